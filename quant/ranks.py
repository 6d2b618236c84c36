"""Which part of which tensor each rank of an engine replica holds, where a replica is spread over several (tensor and expert parallelism).

One layout, used by whoever loads, sends, holds and compares weights. It splits outputs and never a sum: a product's fp32 sum over its
inputs lies whole on one rank, so that a replica of any number of ranks computes the bits of one.

    q, k, v               rows, by heads: a KV head lies with its query heads
    gate, up              rows of the intermediate, of shared experts and dense MLPs
    o, down               rows of the output
    routed experts        whole, by contiguous ranges (`owned`); their adapters with them
    embedding             columns; head: rows of the vocabulary, the last rank's may be fewer
    all else              whole on every rank: norms, router, indexer

Of an adapter's pair, B is split as its weight's rows are and A is whole, since every row of B multiplies all of A x.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from .roles import ATTENTION_ROLES, DENSE_ROLES, EXPERT_ROLES, SHARED_ROLES, ModuleId, Role, module_id, strip_prefixes, tensor_role

ROW_ROLES = (*ATTENTION_ROLES, *SHARED_ROLES, *DENSE_ROLES, Role.HEAD)
"""Split by output rows."""


class LayoutError(ValueError):
    """Tensors cannot be laid over that many ranks, or a layout leaves something out."""


class Part(NamedTuple):
    """Elements `start` to `stop` (exclusive) along dimension `dim` of a tensor."""

    dim: int
    start: int
    stop: int

    def of(self, tensor: Tensor) -> Tensor:
        """That part, as a view."""
        return tensor.narrow(self.dim, self.start, self.stop - self.start)

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Shape of the part of a tensor of shape `whole`."""
        return (*whole[: self.dim], self.stop - self.start, *whole[self.dim + 1 :])

    def is_whole(self, whole: Sequence[int]) -> bool:
        """Is it all of a tensor of shape `whole`?"""
        return self.start == 0 and self.stop == whole[self.dim]


def owned(experts: int, world: int, rank: int) -> tuple[int, int]:
    """First expert of a rank and the one after its last: ranges differ by at most one in size, and are empty where ranks are many."""
    return rank * experts // world, (rank + 1) * experts // world


def share(size: int, world: int, rank: int) -> tuple[int, int]:
    """First row of a rank and the one after its last: equal numbers, but for the last ranks where `world` does not divide `size`."""
    each = -(-size // world)
    return min(rank * each, size), min((rank + 1) * each, size)


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of one engine replica."""

    world: int
    """How many there are."""
    experts: int
    """Routed experts of a layer, on all ranks together."""

    @classmethod
    def of_adapter(cls, names: Iterable[str], world: int) -> Ranks:
        """From the tensor names of an adapter. The number of experts is taken from them: an adapter has all of a layer or none."""
        return cls(world, 1 + max((_adapted(name).expert for name in names), default=-1))

    def part(self, rank: int, role: Role, expert: int, shape: Sequence[int]) -> Part | None:
        """What `rank` holds of a tensor of `shape` with outputs first; None: nothing. `expert`: -1 where it is of none."""
        if role in EXPERT_ROLES:
            first, end = owned(self.experts, self.world, rank)
            return Part(0, 0, shape[0]) if first <= expert < end else None
        if role not in (*ROW_ROLES, Role.EMBEDDING):
            return Part(0, 0, shape[0])
        dim = 1 if role is Role.EMBEDDING else 0
        start, stop = share(shape[dim], self.world, rank)
        return Part(dim, start, stop) if stop > start else None

    def weight(self, rank: int, name: str, shape: Sequence[int]) -> Part | None:
        """`part` of a frozen weight by its module path, or of a router's bias by its tensor name."""
        if name.endswith("e_score_correction_bias"):
            return self.part(rank, tensor_role(name), -1, shape)
        module = module_id(name)
        return self.part(rank, module.role, module.expert, shape)

    def adapter(self, rank: int, shapes: Mapping[str, Sequence[int]]) -> dict[str, Part]:
        """Parts of an adapter's tensors that `rank` holds, by name and in the order of `shapes`."""
        found = {}
        for name, shape in shapes.items():
            module = _adapted(name)
            part = self.part(rank, module.role, module.expert, shape)
            if part is not None:
                found[name] = Part(0, 0, shape[0]) if name.endswith(".lora_A.weight") else part
        return found

    def adapters(self, shapes: Mapping[str, Sequence[int]]) -> list[dict[str, Part]]:
        """`adapter` of every rank. Raises `LayoutError` unless they cover every tensor."""
        found = [self.adapter(rank, shapes) for rank in range(self.world)]
        require_cover(shapes, found)
        return found


def require_cover(shapes: Mapping[str, Sequence[int]], ranks: Sequence[Mapping[str, Part]]) -> None:
    """Raise `LayoutError` naming the first tensor of `shapes` that the parts of all ranks do not make up, each whole or side by side."""
    for name, shape in shapes.items():
        parts = sorted({held[name] for held in ranks if name in held})
        if not parts:
            raise LayoutError(f"{name} lies on none of {len(ranks)} ranks")
        if any(part.is_whole(shape) for part in parts) and len(parts) == 1:
            continue
        at = 0
        for part in parts:
            if part.dim != parts[0].dim or part.start != at:
                raise LayoutError(f"{name}: {len(ranks)} ranks hold {[tuple(p) for p in parts]} of {tuple(shape)}")
            at = part.stop
        if at != shape[parts[0].dim]:
            raise LayoutError(f"{name}: {len(ranks)} ranks hold {[tuple(p) for p in parts]} of {tuple(shape)}")
    extra = sorted({name for held in ranks for name in held} - shapes.keys())
    if extra:
        raise LayoutError(f"{extra[0]} is laid on ranks and is no tensor")


def indivisible(world: int, *, kv_heads: int, hidden: int, intermediates: Iterable[int]) -> str | None:
    """What of a model `world` ranks do not divide, in a few words, or None: gathered outputs are of one size on every rank."""
    sizes = (("KV heads", (kv_heads,)), ("outputs of a layer", (hidden,)), ("outputs of an MLP's gate", intermediates))
    return next((f"{size} {what}" for what, each in sizes for size in each if size % world), None)


@lru_cache(maxsize=1 << 17)
def _adapted(name: str) -> ModuleId:
    """The module of an adapter's tensor. Kept, since every sync asks for each of tens of thousands, once a rank."""
    path = strip_prefixes(name)
    for side in "AB":
        if path.endswith(f".lora_{side}.weight"):
            return module_id(path.removesuffix(f".lora_{side}.weight"))
    raise LayoutError(f"{name!r} is no adapter tensor")

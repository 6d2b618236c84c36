"""The tensors of an adapter in stacks: those of all experts of a layer's projection lie one after the other and are handled as one.

A model has many experts and few shapes. Whoever exports, lays out, digests or copies an adapter tensor by tensor pays in Python and in
kernel launches for each of thousands of small tensors; by stacks it pays for each projection of each layer. Any other tensor is a stack of
one. Names, digests and what is proven stay those of single tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .adapter import AdapterError

ALIGNMENT = 256
"""Bytes to whose multiples each stack is laid: what cudaMalloc gives and vector loads take."""
_EXPERT = re.compile(r"\.experts\.(\d+)\.")

Stacked = tuple[tuple[str, ...], Tensor]
"""Names, and their tensors as one [names, ...], each of them contiguous."""


class StackedTensors:
    """Tensors that are made stack by stack, as they are asked for, once; seen as an iterator they are named tensors."""

    def __init__(self, stacks: Iterable[Stacked]) -> None:
        self._stacks = iter(stacks)

    def stacks(self) -> Iterator[Stacked]:
        """Those that were not handed over yet."""
        return self._stacks

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, tensor) for names, stack in self._stacks for name, tensor in zip(names, stack.unbind(), strict=True))


def in_stacks(tensors: StackedTensors | Iterable[tuple[str, Tensor]]) -> Iterator[Stacked]:
    """Whatever named tensors come, in stacks: those that are none become stacks of one."""
    if isinstance(tensors, StackedTensors):
        return tensors.stacks()
    return (((name,), tensor[None]) for name, tensor in tensors)


class Stack(NamedTuple):
    """Tensors of one shape."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    """Of each."""
    start: int
    """First element in the buffer."""

    @property
    def size(self) -> int:
        """Elements of one tensor."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Where the tensors of an adapter lie in one buffer. Everyone makes it from the shapes alone and comes to the same."""

    dtype: torch.dtype
    stacks: tuple[Stack, ...]
    places: dict[str, tuple[int, int]]
    """Name to (stack, place in it)."""
    numel: int
    """Elements of the buffer, padding included."""

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> FlatLayout:
        """Layout of the tensors of `shapes`, whose order is no matter."""
        groups: dict[tuple[str, tuple[int, ...]], list[tuple[int, str]]] = {}
        for name, shape in shapes.items():
            expert = _EXPERT.search(name)
            of = name if expert is None else f"{name[: expert.start(1)]}*{name[expert.end(1) :]}"
            groups.setdefault((of, tuple(shape)), []).append((-1 if expert is None else int(expert[1]), name))
        step = ALIGNMENT // dtype.itemsize
        stacks, at = [], 0
        for (_, shape), members in sorted(groups.items()):
            stacks.append(Stack(tuple(name for _, name in sorted(members)), shape, at))
            at += -(-len(members) * stacks[-1].size // step) * step
        places = {name: (i, row) for i, stack in enumerate(stacks) for row, name in enumerate(stack.names)}
        return cls(dtype, tuple(stacks), places, at)

    @property
    def bytes(self) -> int:
        """Of all tensors, without padding."""
        return sum(len(stack.names) * stack.size for stack in self.stacks) * self.dtype.itemsize

    def buffer(self, device: torch.device | str) -> Tensor:
        """An uninitialised buffer, one allocation."""
        return torch.empty(self.numel, dtype=self.dtype, device=device)

    def require(self, flat: Tensor) -> None:
        """Raise `AdapterError` when `flat` is no buffer of this layout."""
        if flat.dtype != self.dtype or tuple(flat.shape) != (self.numel,) or not flat.is_contiguous():
            found = f"{tuple(flat.shape)} of {str(flat.dtype).removeprefix('torch.')}"
            raise AdapterError(
                f"the shared buffer is {found}, the adapter needs ({self.numel},) of {str(self.dtype).removeprefix('torch.')}"
            )

    def stack_views(self, flat: Tensor) -> list[Tensor]:
        """The part [names, ...] of `flat` of each stack, without a copy. Raises as `require` does."""
        self.require(flat)
        return [flat.narrow(0, s.start, len(s.names) * s.size).view(len(s.names), *s.shape) for s in self.stacks]

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Name to its part of `flat`, without a copy. Raises as `require` does."""
        stacks = zip(self.stacks, self.stack_views(flat), strict=True)
        return {name: view for stack, views in stacks for name, view in zip(stack.names, views.unbind(), strict=True)}


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source into the target of its shape, cast where dtypes differ: in a few launches on a GPU, for those that are laid out
    as their target is; each alone for others."""
    alike = [t.stride() == s.stride() for t, s in zip(targets, sources, strict=True)]
    if any(alike):
        torch._foreach_copy_(
            [t for t, same in zip(targets, alike, strict=True) if same], [s for s, same in zip(sources, alike, strict=True) if same]
        )
    for target, source, same in zip(targets, sources, alike, strict=True):
        if not same:
            target.copy_(source)

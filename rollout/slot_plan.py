"""How an adapter gets from one buffer into the slots of an engine's layers, and back: found once, followed in every sync.

A plan is made by walking the layers that multiply, for each slot. Tensors of a stack (`quant.stacks`) that lie in a layer's buffers at
equal distances, as those of its experts do, are copied and read as one. A plan holds the very tensors of the layers: whether they still are
those, every use of it asks anew, and where a layer was given another adapter or other buffers since, a new plan is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samebits.quant.adapter import PREFIX, AdapterError
from samebits.quant.ranks import Part
from samebits.quant.stacks import FlatLayout, Stack, copy_all

from .slots import AdapterSlots


def slots_of(model: Any) -> AdapterSlots:
    """Those of a model. Raises `AdapterError` when it takes no adapters."""
    for adapter in model.adapters():
        return adapter.slots
    raise AdapterError("the engine takes no adapters: it was started without enable_lora")


def views_of(model: Any, slot: int) -> dict[str, Tensor]:
    """Tensor name to the part of the engine's buffers that holds it."""
    return {
        f"{PREFIX}{path}.lora_{side}.weight": view
        for adapter in model.adapters()
        for path, pair in adapter.views(slot).items()
        for side, view in zip("AB", pair, strict=True)
    }


def parts_of(model: Any) -> dict[str, Part]:
    """Tensor name to the part of it that this rank holds."""
    return model.group.ranks.adapter(model.group.rank, slots_of(model).spec.shapes())


@dataclass(frozen=True, slots=True)
class Run:
    """Tensors that follow each other in the buffer and lie at equal distances in a slot."""

    names: tuple[str, ...]
    held: Tensor
    """Where they are multiplied, [names, ...]."""
    start: int
    """First element in the buffer."""
    strides: tuple[int, ...]
    """Elements from one to the next of them, and inside of them, in the buffer."""

    def of(self, flat: Tensor) -> Tensor:
        """What belongs here of an adapter's buffer, as a view [names, ...]."""
        return flat.as_strided(self.held.shape, self.strides, flat.storage_offset() + self.start)


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """Of one slot."""

    layout: FlatLayout
    runs: tuple[Run, ...]
    adapters: tuple[Any, ...]
    buffers: tuple[tuple[int, ...], ...]
    """What of the layers it was made for."""

    @classmethod
    def of(cls, model: Any, slot: int) -> SlotPlan:
        """The plan of a slot, made anew only where the layers are not those that it was made for.

        Raises `AdapterError` when a layer would be left without its pair, or its buffers are of another shape than its tensors.
        """
        slots = slots_of(model)
        adapters = tuple(model.adapters())
        buffers = tuple(place for adapter in adapters for place in adapter.places())
        known = slots.plans.get(slot)
        if known is None or known.buffers != buffers or not _same(known.adapters, adapters):
            known = slots.plans[slot] = cls(*_runs(model, slot), adapters, buffers)
        return known

    def tensors(self) -> dict[str, Tensor]:
        """Name to the part of the engine's buffers that holds it: `views_of` of this slot."""
        return {name: held for run in self.runs for name, held in zip(run.names, run.held.unbind(), strict=True)}

    def fill(self, flat: Tensor) -> None:
        """Copy an adapter out of a buffer of the layout. Raises `AdapterError` when it is none; nothing is copied then."""
        self.layout.require(flat)
        copy_all([run.held for run in self.runs], [run.of(flat) for run in self.runs])

    def read(self) -> Iterator[tuple[tuple[str, ...], Tensor]]:
        """Names and tensors [names, ...] that the slot holds, in the wire's dtype, on the engine's device, each contiguous.

        Where the slots are of that dtype they are the engine's own, not to be changed. Raises `AdapterError` when a value is none of it.
        """
        dtype = self.layout.dtype
        found, inexact = [], []
        for run in self.runs:
            one = run.held[0]
            wire = run.held if run.held.dtype == dtype and one.is_contiguous() else run.held.to(dtype).contiguous()
            if run.held.dtype != dtype:
                inexact.append((wire.to(run.held.dtype) != run.held).flatten(1).any(1))
            found.append((run.names, wire))
        # Looked at together: on a GPU each look is a wait.
        wrong = torch.cat(inexact).nonzero().flatten().tolist() if inexact else []
        if wrong:
            name = [name for run in self.runs if run.held.dtype != dtype for name in run.names][wrong[0]]
            raise AdapterError(f"{name}: the engine holds values that {str(dtype).removeprefix('torch.')} does not have")
        return iter(found)


def _same(some: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


def _runs(model: Any, slot: int) -> tuple[FlatLayout, tuple[Run, ...]]:
    spec = slots_of(model).spec
    shapes, parts, views = spec.shapes(), parts_of(model), views_of(model, slot)
    odd = sorted(views.keys() ^ parts.keys()) or [n for n, v in views.items() if tuple(v.shape) != parts[n].shape(shapes[n])]
    if odd:
        raise AdapterError(f"engine and adapter disagree on {len(odd)} tensors, the first is {odd[0]}")
    layout = FlatLayout.of(shapes, getattr(torch, spec.dtype))
    return layout, tuple(run for stack in layout.stacks for run in _of_stack(stack, parts, views))


def _of_stack(stack: Stack, parts: Mapping[str, Part], views: Mapping[str, Tensor]) -> Iterator[Run]:
    inner = torch.empty(stack.shape, device="meta").stride()
    here = [row for row, name in enumerate(stack.names) if name in views]
    while here:
        first = here[0]
        view, part = views[stack.names[first]], parts[stack.names[first]]
        step = views[stack.names[first + 1]].data_ptr() - view.data_ptr() if first + 1 in here else 0
        count = 1
        while count < len(here) and here[count] == first + count and _follows(stack, parts, views, first, count, step):
            count += 1
        apart = step // view.itemsize if count > 1 else view.numel()
        held = view.as_strided((count, *view.shape), (apart, *view.stride()), view.storage_offset())
        start = stack.start + first * stack.size + part.start * inner[part.dim]
        yield Run(stack.names[first : first + count], held, start, (stack.size if count > 1 else view.numel(), *inner))
        here = here[count:]


def _follows(stack: Stack, parts: Mapping[str, Part], views: Mapping[str, Tensor], first: int, count: int, step: int) -> bool:
    """Whether tensor `first + count` lies `count` times `step` bytes behind tensor `first`, in the same memory and laid out alike."""
    one, other = stack.names[first], stack.names[first + count]
    a, b = views[one], views[other]
    same = a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() and a.stride() == b.stride() and a.dtype == b.dtype
    apart = b.data_ptr() - a.data_ptr()
    return same and parts[one] == parts[other] and apart == count * step and step > 0 and step % a.itemsize == 0

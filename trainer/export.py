"""An adapter as it leaves the trainer: masters rounded to bf16, shards gathered, in stacks and in few operations.

There are many masters, and each operation on a sharded tensor costs more than the arithmetic of a small master. So the local parts of many
are laid side by side, rounded as one tensor, and gathered by one collective. What comes out are views of its result. A
batch of masters is made at a time, so that no rank holds the whole adapter which need not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard

from samebits.quant.stacks import Stacked

BATCH_BYTES = 256 << 20
"""Of whole bf16 tensors, from which on a batch of masters is made."""


class Side(NamedTuple):
    """A or B of a pair."""

    names: tuple[str, ...]
    """PEFT names, of an expert each."""
    master: Tensor
    """fp32 [names, ...], or without the first dimension where it is of no expert; sharded or not."""
    scale: float
    stacked: bool
    """Has the master the first dimension?"""


class Pair(Protocol):
    """Masters of one module, or of one projection of all experts of a layer."""

    def sides(self) -> tuple[Side, Side]:
        """A and B."""


def export_stacks(pairs: Iterable[Pair]) -> Iterator[Stacked]:
    """Names and bf16 tensors [names, ...] of the sides of `pairs`, in their order. Gathers shards: every rank must drain it.

    Shards are rounded before they travel: the same bits, in half the bytes.
    """
    batch: list[Side] = []
    size = 0
    for pair in pairs:
        sides = pair.sides()
        batch += sides
        size += sum(side.master.numel() * torch.bfloat16.itemsize for side in sides)
        if size >= BATCH_BYTES:
            yield from _made(batch)
            batch, size = [], 0
    if batch:
        yield from _made(batch)


def _made(sides: list[Side]) -> list[Stacked]:
    groups: dict[tuple[DeviceMesh | None, bool, float], list[int]] = {}
    for i, side in enumerate(sides):
        groups.setdefault((*_sharding(side.master), side.scale), []).append(i)
    made: list[Tensor | None] = [None] * len(sides)
    with torch.no_grad():
        for (mesh, regular, scale), places in groups.items():
            masters = [sides[i].master for i in places]
            if not regular:
                whole = [rounded(master, scale).full_tensor() for master in masters]
            elif mesh is None:
                whole = _on_this_rank(masters, scale)
            else:
                whole = _gathered(masters, scale, mesh)
            for i, tensor in zip(places, whole, strict=True):
                made[i] = tensor
    return [(side.names, t if side.stacked else t[None]) for side, t in zip(sides, made, strict=True)]


def _sharding(master: Tensor) -> tuple[DeviceMesh | None, bool]:
    """(the mesh over whose last dimension rows are sharded, None where a rank has them all; False where they are spread in another way)."""
    if not isinstance(master, DTensor):
        return None, True
    mesh, (*others, last) = master.device_mesh, master.placements
    if not all(isinstance(p, Replicate) for p in others) or not (isinstance(last, Replicate) or (type(last) is Shard and last.dim == 0)):
        return mesh, False
    return (None if isinstance(last, Replicate) or mesh.size(mesh.ndim - 1) == 1 else mesh), True


def rounded(master: Tensor, scale: float = 1.0) -> Tensor:
    """The bf16 value of an fp32 master: scaled in fp32, rounded once. The one place where a master becomes what computes."""
    return (master * scale if scale != 1.0 else master).to(torch.bfloat16)


def _local(master: Tensor) -> Tensor:
    return (master.to_local() if isinstance(master, DTensor) else master).reshape(-1)


def _on_this_rank(masters: list[Tensor], scale: float) -> list[Tensor]:
    flat = rounded(torch.cat([_local(master) for master in masters]), scale)
    return [part.view(m.shape) for part, m in zip(flat.split([m.numel() for m in masters]), masters, strict=True)]


def _gathered(masters: list[Tensor], scale: float, mesh: DeviceMesh) -> list[Tensor]:
    """Whole tensors of masters whose rows lie over the last dimension of `mesh`, as torch cuts them: the last ranks may have fewer."""
    world = mesh.size(mesh.ndim - 1)
    rows = [-(-master.shape[0] // world) for master in masters]
    sizes = [each * (master.numel() // master.shape[0]) for each, master in zip(rows, masters, strict=True)]
    pieces = []
    for master, size in zip(masters, sizes, strict=True):
        pieces.append(_local(master))
        if len(pieces[-1]) < size:
            pieces.append(pieces[-1].new_zeros(size - len(pieces[-1])))
    mine = rounded(torch.cat(pieces), scale)
    every = mine.new_empty(world * len(mine))
    dist.all_gather_into_tensor(every, mine, group=mesh.get_group(mesh.ndim - 1))
    parts = torch.empty_like(every).split([world * size for size in sizes])
    whole = [part.view(world, size) for part, size in zip(parts, sizes, strict=True)]
    torch.split_with_sizes_copy(every.view(world, -1), sizes, dim=1, out=whole)
    shapes = [(world * each, *master.shape[1:]) for each, master in zip(rows, masters, strict=True)]
    return [t.view(shape)[: m.shape[0]] for t, shape, m in zip(whole, shapes, masters, strict=True)]

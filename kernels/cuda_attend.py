"""MSA attention over NVFP4 pages in decode, in one launch: `cuda_attend.cu`, compiled by NVRTC when it is first wanted, for Hopper.

It has the bits of `triton_msa.attend`, which takes two launches where queries are few, and every other format, GPU and size. There are
variants, of equal bits: how many blocks, each of a warp of its own, a CTA takes (`unit`; the CTAs of a query are a cluster), how many tiles
of scores a warp works on at a time, and how codes become bf16. `python -m tests.support.cuda_attend_table` compares and times them.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import cuda_module
from .cuda_module import Launch
from .msa_ops import BLOCK, DIM, HEADS_A_GROUP, Batch, Pages

SOURCE, NAME = "cuda_attend.cu", "attend"
TOPK = 16
PLANE = 9216  # bytes of a block's keys, or values, of one head
UNITS = (2, 4, 16)
TILES = (2, 4, 8)
FEW_TOKENS = 8  # of a request: more are prefill, whose queries share blocks, and that is what the Triton kernel is for
# A CTA takes 2 blocks where that makes no more CTAs than multiprocessors, 4 where it makes no more than this many for each, which then all
# are resident, else all 16; a block has four warps where there is no more than one CTA for each.
RESIDENT = 2


class Variant(NamedTuple):
    """How the same result is made."""

    unit: int | None = None
    """Blocks of a CTA; None: by the number of queries."""
    tiles: int = 2
    """n-tiles of scores that a warp works on at a time."""
    mixed: bool = True
    """Codes become bf16 by fewer logic instructions and more multiplications."""
    quarters: bool = False
    """The warps of a CTA's last four blocks share the values of these."""
    wide: bool | None = None
    """A block has four warps and not one (2 or 4 blocks a CTA); None: where queries are few."""


class Constants(NamedTuple):
    """What a compiled kernel is for."""

    unit: int
    groups: int
    heads: int
    lse: bool
    rounded: bool
    tiles: int
    mixed: bool
    quarters: bool
    wide: bool

    @property
    def ctas(self) -> int:
        """Of a query and KV head, which are a cluster."""
        return TOPK // self.unit

    @property
    def threads(self) -> int:
        """Of a CTA."""
        return 32 * self.unit * (4 if self.wide else 1)

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a CTA: blocks, queries, two barriers a block, and maxima of the warps of a block."""
        return 2 * PLANE * min(self.unit, 12) + 2 * HEADS_A_GROUP * DIM + (16 + 16 * HEADS_A_GROUP * self.wide) * self.unit

    @property
    def defines(self) -> cuda_module.Defines:
        """For a compiler."""
        return tuple((name.upper(), int(value)) for name, value in self._asdict().items())


def takes(q: Tensor, cache: object, chosen: Tensor, batch: Batch) -> bool:
    """Whether this is decode over NVFP4 pages on a Hopper GPU, of shapes that the kernel has, and the driver can be reached."""
    return (
        isinstance(cache, Pages)
        and cache.data.dtype is torch.uint8
        and q.dtype is torch.bfloat16
        and chosen.shape[2] == TOPK
        and batch.most <= FEW_TOKENS
        and cache.data.data_ptr() % 16 == cache.data.stride(0) % 16 == 0
        and cuda_module.absence(q.device) is None
    )


def attend(
    q: Tensor,
    cache: Pages,
    chosen: Tensor,
    batch: Batch,
    scale: float,
    lse: bool = False,
    rounded: bool = False,
    variant: Variant | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`triton_msa.attend` of NVFP4 pages.

    Args:
        q: bf16 [T, H, 128]. cache: uint8 pages, see `quant.kv`, at addresses and distances that are multiples of 16 bytes.
        chosen: int32 [T, G, 16]. batch: `request` and `position` int32 [T]. scale: of the softmax. rounded: pages are read as E4M3.
    Returns:
        (bf16 [T, H, 128], fp32 [T, H] log2 of the softmax's sum over scores in powers of two, where `lse`).
    Raises `ValueError` for what the kernel has no form for, `RuntimeError` when it cannot be compiled or launched.
    """
    variant = Variant() if variant is None else variant
    _check(q, cache, chosen, batch, variant)
    tokens, heads, _ = q.shape
    groups = chosen.shape[1]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    sums = torch.empty(tokens, heads, dtype=torch.float32, device=q.device) if lse else None
    if not tokens:
        return out, sums
    rows = tokens * groups
    constants = _constants(variant, rows, groups, heads // groups, lse, rounded, q.device)
    q, chosen, request, position = (x.contiguous() for x in (q, chosen, batch.request, batch.position))
    pointer = ctypes.c_void_p
    arguments = (
        *((x, pointer) for x in (q, cache.data, cache.table, request, position, chosen, out, sums)),
        (cache.data.stride(0), ctypes.c_int64),
        (cache.table.stride(0), ctypes.c_int64),
        (scale * math.log2(math.e) * 128.0, ctypes.c_float),
    )
    launch(constants, rows * constants.ctas, arguments, q.device)
    return out, sums


def _check(q: Tensor, cache: Pages, chosen: Tensor, batch: Batch, variant: Variant) -> None:
    """Refuse what would be read wrongly, with one line that names it."""
    data, table = cache.data, cache.table
    tokens = q.shape[0]
    groups = chosen.shape[1] if chosen.dim() == 3 else 0
    wanted = {
        "queries must be bf16 [T, H, 128]": q.dim() == 3 and q.shape[2] == DIM and q.dtype is torch.bfloat16,
        "chosen blocks must be int32 [T, G, 16]": chosen.shape == (tokens, groups, TOPK) and chosen.dtype is torch.int32,
        f"a group has 1 to {HEADS_A_GROUP} query heads": groups > 0
        and q.shape[1] % groups == 0
        and 0 < q.shape[1] // groups <= HEADS_A_GROUP,
        "pages must be uint8 [pages, 2 G, 128, 72]": data.dtype is torch.uint8 and data.shape[1:] == (2 * groups, BLOCK, PLANE // BLOCK),
        "pages must be contiguous in themselves": data.stride()[1:] == (PLANE, PLANE // BLOCK, 1),
        "pages must lie at multiples of 16 bytes": data.data_ptr() % 16 == 0 and data.stride(0) % 16 == 0,
        "queries must lie at a multiple of 16 bytes": q.data_ptr() % 16 == 0,
        "the table must be int32 [R, blocks], blocks side by side": table.dim() == 2
        and table.dtype is torch.int32
        and table.stride(1) == 1,
        "request and position must be int32 [T]": all(
            x.shape == (tokens,) and x.dtype is torch.int32 for x in (batch.request, batch.position)
        ),
        f"unit must be one of {UNITS}": variant.unit is None or variant.unit in UNITS,
        f"tiles must be one of {TILES}": variant.tiles in TILES,
        "a block has four warps where a CTA has 2 or 4": not variant.wide or variant.unit != TOPK,
    }
    for text, good in wanted.items():
        if not good:
            raise ValueError(f"attention in one launch: {text}")


def _constants(variant: Variant, rows: int, groups: int, heads: int, lse: bool, rounded: bool, device: torch.device) -> Constants:
    """Of a variant for `rows` queries times KV heads."""
    unit, wide = variant.unit, variant.wide
    if unit is None:
        most = torch.cuda.get_device_properties(device).multi_processor_count
        unit = 2 if rows * 8 <= most else 4 if rows * 4 <= RESIDENT * most else TOPK
        wide = rows * 4 <= most and wide is not False
    return Constants(unit, groups, heads, lse, rounded, variant.tiles, variant.mixed, variant.quarters, bool(wide))


def launch(constants: Constants, blocks: int, arguments: Sequence[tuple[Any, Any]], device: torch.device) -> None:
    """Launch `blocks` CTAs on torch's current stream. `arguments`: as `cuda_module.launch` takes them, in the order of the parameters."""
    how = Launch(blocks, constants.threads, constants.shared, constants.ctas, early=True)
    with torch.cuda.device(device):
        cuda_module.launch(SOURCE, NAME, constants.defines, how, arguments)

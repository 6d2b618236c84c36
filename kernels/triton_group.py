"""Which pair of token and expert is where: sorting by expert, tiles, and the sum over a token's choices, in Triton.

A plan is made on the device without asking it anything: the number of tiles is bounded by the number of pairs, and those that are not
needed are marked. Linear layers have a plan too, in which nothing is sorted, so that the same kernels serve both.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_tiles import bf16, on

# Numbers that change with the batch, and pointers into counters: a kernel is compiled once for all of them.
VARYING = ("wide", "pairs", "most", "zeros", "top_k", "experts", "slots")
UNALIGNED = ("counts_ptr", "flags_ptr", "slots_ptr", "order_ptr", "tiles_ptr", "bounds_ptr")


def batch_jit(fn):
    """`triton.jit` that does not specialise on what varies."""
    names = fn.__code__.co_varnames[: fn.__code__.co_argcount]
    return triton.jit(
        fn,
        do_not_specialize=[n for n in VARYING if n in names],
        do_not_specialize_on_alignment=[n for n in UNALIGNED if n in names],
    )


@batch_jit
def _group_kernel(
    ids_ptr, order_ptr, tiles_ptr, bounds_ptr, zero_ptr, zeros, pairs, most, experts,
    BINS: tl.constexpr, BT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program an expert. tiles [3, most]: expert (-1: none), first place, place after the expert's last; bounds [E + 1]."""
    e = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    bins = tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    for first in range(0, pairs, BLOCK):
        ids = tl.load(ids_ptr + first + at, mask=first + at < pairs, other=experts).to(tl.int32)
        counts += tl.histogram(ids, BINS)
    counts = tl.where(bins < experts, counts, 0)
    tiles = (counts + BT - 1) // BT
    place = tl.sum(tl.where(bins < e, counts, 0), axis=0)
    end = place + tl.sum(tl.where(bins == e, counts, 0), axis=0)
    tile = tl.sum(tl.where(bins < e, tiles, 0), axis=0)
    tl.store(bounds_ptr + e, place)
    if e == experts - 1:
        tl.store(bounds_ptr + experts, end)
    for start in range(place, end, BT):
        tl.store(tiles_ptr + tile, e)
        tl.store(tiles_ptr + most + tile, start)
        tl.store(tiles_ptr + 2 * most + tile, end)
        tile += 1
    for unused in range(tl.sum(tiles, axis=0) + e, most, experts):
        tl.store(tiles_ptr + unused, -1)
    for first in range(e * BLOCK, zeros, experts * BLOCK):
        tl.store(zero_ptr + first + at, 0, mask=first + at < zeros)
    for first in range(0, pairs, BLOCK):
        ids = tl.load(ids_ptr + first + at, mask=first + at < pairs, other=experts).to(tl.int32)
        mine = (ids == e).to(tl.int32)
        rank = tl.cumsum(mine, axis=0)
        tl.store(order_ptr + place + rank - 1, first + at, mask=mine == 1)
        place += tl.sum(mine, axis=0)


@triton.jit
def span(tiles_ptr, tile, most, pairs, LINEAR: tl.constexpr, BT: tl.constexpr):
    """Expert (-1: none), first place and end of a tile. LINEAR: one matrix, and the places are the tokens."""
    if LINEAR:
        return tile * 0, tile * BT, pairs
    else:
        return tl.load(tiles_ptr + tile), tl.load(tiles_ptr + most + tile), tl.load(tiles_ptr + 2 * most + tile)


@triton.jit
def columns(order_ptr, slots_ptr, start, end, top_k, LINEAR: tl.constexpr, SLOTTED: tl.constexpr, BT: tl.constexpr):
    """Of a tile: places, whether inside, pairs, tokens, adapter slots."""
    place = start + tl.arange(0, BT)
    inside = place < end
    pair = place if LINEAR else tl.load(order_ptr + place, mask=inside, other=0)
    token = pair if LINEAR else pair // top_k
    if SLOTTED:  # noqa: SIM108
        slot = tl.load(slots_ptr + token, mask=inside, other=-1).to(tl.int32)
    else:
        slot = tl.where(inside, 0, -1)
    return place, inside, pair, token, slot


@triton.jit
def _combine_kernel(y_ptr, ids_ptr, weights_ptr, out_ptr, H, TOP_K: tl.constexpr, CHOICES: tl.constexpr, BLOCK: tl.constexpr):
    """out [T, H] = sum of weights [T, k] * y fp32 [T, k, H] in ascending order of ids; an expert twice: in the order given."""
    token = tl.program_id(0)
    choice = tl.arange(0, CHOICES)
    real = choice < TOP_K
    weights = tl.load(weights_ptr + token * TOP_K + choice, mask=real, other=0.0)
    key = tl.load(ids_ptr + token * TOP_K + choice, mask=real, other=0).to(tl.int32) * TOP_K + choice
    key = tl.where(real, key, 0x7FFFFFFF)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    last = -1
    for _ in tl.static_range(TOP_K):
        last = tl.min(tl.where(key > last, key, 0x7FFFFFFF), axis=0)
        weight = tl.sum(tl.where(key == last, weights, 0.0), axis=0)
        row = (token * TOP_K + last % TOP_K).to(tl.int64)
        total += weight * tl.load(y_ptr + row * H + column, mask=column < H, other=0.0)
    tl.store(out_ptr + token.to(tl.int64) * H + column, bf16(total), mask=column < H)


class Plan(NamedTuple):
    """Which pair is where, and counters at zero for the launches that follow."""

    order: Tensor  # int32 [pairs]: the pair at each place of the sorted order
    tiles: Tensor  # int32 [3, most]: expert or -1, first place, place after the expert's last
    bounds: Tensor  # int32 [experts + 1]: first place of each expert
    counters: Tensor  # int32 [counters, most]
    pairs: int
    most: int
    top_k: int
    experts: int
    linear: bool  # one matrix for all tokens: nothing is sorted, and only the counters are read

    def slots(self, adapter_ids: Tensor | None) -> Tensor:
        """What to give a kernel as adapter slots."""
        return self.counters if adapter_ids is None else adapter_ids


def group(ids: Tensor, experts: int, tile: int, counters: int = 0) -> Plan:
    """Group pairs `ids` [T, k] into tiles of `tile` pairs; the number of tiles is bounded without asking the device."""
    pairs = ids.numel()
    most = min(pairs, min(experts, pairs) + pairs // tile)

    def ints(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=ids.device)

    order, tiles, bounds, zero = ints(pairs), ints(3, most), ints(experts + 1), ints(max(1, counters), most)
    bins = triton.next_power_of_2(experts + 1)
    block = min(4096, max(32, triton.next_power_of_2(pairs)))
    with on(ids):
        _group_kernel[(experts,)](
            ids,
            order,
            tiles,
            bounds,
            zero,
            zero.numel(),
            pairs,
            most,
            experts,
            BINS=bins,
            BT=tile,
            BLOCK=block,
            num_warps=8 if block > 1024 else 4,
        )
    return Plan(order, tiles, bounds, zero, pairs, most, ids.shape[1], experts, False)


def linear_plan(x: Tensor, tile: int, counters: int = 0) -> Plan:
    """All tokens of `x` [T, K] through one matrix. Without counters, which only adapters need, nothing is launched."""
    most = triton.cdiv(len(x), tile)
    zero = (torch.zeros if counters else torch.empty)(max(1, counters), most, dtype=torch.int32, device=x.device)
    return Plan(zero, zero, zero, zero, len(x), most, 1, 1, True)


def combine(y: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum bf16 [T, H] of y fp32 [P, H] over the choices of each token."""
    tokens, k = ids.shape
    h = y.shape[1]
    out = torch.empty(tokens, h, dtype=torch.bfloat16, device=y.device)
    with on(y):
        _combine_kernel[(tokens, triton.cdiv(h, 1024))](
            y, ids, weights, out, h, TOP_K=k, CHOICES=triton.next_power_of_2(k), BLOCK=1024, num_warps=4
        )
    return out

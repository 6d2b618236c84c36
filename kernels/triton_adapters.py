"""The adapter's part of the products in `triton_moe`: how its tensors are given to a kernel, u = A x, and B as the last K step wants it."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .linear import LoRA
from .triton_group import columns, span
from .triton_tiles import bf16, dot, settled


class Adapters(NamedTuple):
    """Of one or two projections as the kernels take them; a missing one is given as the other and never read."""

    a: Tensor
    a2: Tensor
    b: Tensor
    b2: Tensor
    slots: int
    rank: int
    padded: int  # rank, padded for a matrix instruction
    has: tuple[bool, bool]

    @classmethod
    def of(cls, one: LoRA | None, two: LoRA | None, fallback: Tensor) -> Adapters:
        """`fallback`: any tensor to point at where there is no adapter."""
        some = one or two
        if some is None:
            return cls(fallback, fallback, fallback, fallback, 1, 16, 16, (False, False))
        first, second = one or some, two or some
        rank = some.a.shape[-2]
        padded = max(16, triton.next_power_of_2(rank))
        return cls(first.a, second.a, first.b, second.b, some.a.shape[0], rank, padded, (one is not None, two is not None))


@triton.jit
def shrink(
    x_ptr, a_ptr, a2_ptr, u_ptr, partial_ptr, counts_ptr, flags_ptr, order_ptr, tiles_ptr, slots_ptr,
    item, K, pairs, top_k, most, experts, slots,
    LINEAR: tl.constexpr, GATED: tl.constexpr, SLOTTED: tl.constexpr, HAS1: tl.constexpr, HAS2: tl.constexpr,
    R: tl.constexpr, RP: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, EVEN: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """u [pairs, WIDTH] = A x for the pairs of one tile that have one adapter, over one part of K."""
    WIDTH: tl.constexpr = 2 * RP if GATED else RP
    ROWS: tl.constexpr = WIDTH if WIDTH > 64 else 64
    tile, part, wanted = item // (PARTS * slots), item % PARTS, item // PARTS % slots
    e, start, end = span(tiles_ptr, tile, most, pairs, LINEAR, BT)
    if e >= 0:
        place, inside, _pair, token, slot = columns(order_ptr, slots_ptr, start, end, top_k, LINEAR, SLOTTED, BT)
        hit = inside & (slot == wanted)
        row = tl.arange(0, ROWS)
        r = row % RP
        # An adapter that no token of the tile has is not read; a branch would make ptxas wait after each matrix instruction (C7520).
        present = (r < R) & (((row < RP) & HAS1) | ((row >= RP) & (row < WIDTH) & HAS2))
        if SLOTTED:
            present &= row * 0 + tl.max(hit.to(tl.int32), axis=0) == 1
        matrix = (wanted * experts + e).to(tl.int64) * R * K
        k = part * PART + tl.arange(0, 64)
        a_at = (tl.where(row < RP, a_ptr, a2_ptr) + matrix + r * K)[:, None] + k[None, :]
        source = token if GATED else place
        x_at = x_ptr + source.to(tl.int64)[None, :] * K + k[:, None]
        acc = tl.zeros([ROWS, BT], tl.float32)
        for step in tl.range(0, tl.minimum(PART, K - part * PART), 64, num_stages=4):
            if EVEN:
                a = tl.load(a_at, mask=present[:, None], other=0.0)
                x = tl.load(x_at, mask=hit[None, :], other=0.0)
            else:
                a = tl.load(a_at, mask=present[:, None] & (k + step < K)[None, :], other=0.0)
                x = tl.load(x_at, mask=hit[None, :] & (k + step < K)[:, None], other=0.0)
            acc = settled(dot(a, x, acc))
            a_at += 64
            x_at += 64
        u_at = place.to(tl.int64)[None, :] * WIDTH + row[:, None]
        stored = hit[None, :] & (row < WIDTH)[:, None]
        if PARTS == 1:
            tl.store(u_ptr + u_at, bf16(acc), mask=stored)
            tl.debug_barrier()
            tl.atomic_add(flags_ptr + tile, 1, sem="release")
        else:
            tl.store(partial_ptr + part.to(tl.int64) * pairs * WIDTH + u_at, acc, mask=stored)
            tl.debug_barrier()
            if tl.atomic_add(counts_ptr + tile * slots + wanted, 1, sem="acq_rel") == PARTS - 1:
                total = tl.zeros([ROWS, BT], tl.float32)
                part_at = partial_ptr + u_at
                part_size = pairs.to(tl.int64) * WIDTH
                if BT <= 16:  # all loads at once, where registers hold them
                    for _ in tl.static_range(PARTS):
                        total += tl.load(part_at, mask=stored, other=0.0, cache_modifier=".cg")
                        part_at += part_size
                else:
                    for _ in range(PARTS):
                        total += tl.load(part_at, mask=stored, other=0.0, cache_modifier=".cg")
                        part_at += part_size
                tl.store(u_ptr + u_at, bf16(total), mask=stored)
                tl.debug_barrier()
                tl.atomic_add(flags_ptr + tile, 1, sem="release")


@triton.jit
def b_tile(
    b_ptr, b2_ptr, base, row, n, N, GATED: tl.constexpr, HAS1: tl.constexpr, HAS2: tl.constexpr, R: tl.constexpr, RP: tl.constexpr,
    BW: tl.constexpr,
):  # fmt: skip
    """Pointers to B for a band's rows, and which are real. Gate and up: [B1 0; 0 B3], to go with [u1; u3] in one step for both."""
    column = tl.arange(0, 2 * RP if GATED else RP)
    r = column % RP
    offset = base + (n * R)[:, None] + r[None, :]
    real = (n < N)[:, None] & (r < R)[None, :]
    if GATED:
        one = (row < BW)[:, None] & (column < RP)[None, :]
        two = (row >= BW)[:, None] & (column >= RP)[None, :]
        return tl.where(row < BW, b_ptr, b2_ptr)[:, None] + offset, real & ((one & HAS1) | (two & HAS2))
    else:
        return b_ptr + offset, real

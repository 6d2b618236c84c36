"""Triton kernels of the routed experts: grouping by expert, two grouped GEMMs over packed NVFP4 with the adapter inside, combination.

    group     pairs (token, choice) sorted by expert, in token order within one; tiles of BT pairs, none across experts
    gate/up   act = bf16(swiglu(bf16(W1 x + B1 u1), bf16(W3 x + B3 u3)))     u = bf16(A x)
    down      y   = W2 act + B2 u2 in fp32, a row for each pair              u2 = bf16(A2 act)
    combine   sum over the choices of a token, in ascending order of expert, of weight * y, in fp32

Each GEMM is one launch that does two kinds of work. The first programs are the shrink, u = A x: a grouped GEMM of its own, K cut into
fixed parts of 2048 whose sums the last program to finish adds in order. The rest stream the weights; when they come to the adapter, as
K step after the last, u has long been there, so what the adapter costs is its bytes. They wait for a counter all the same; programs
start in the order of their index, so that the wait ends.

No sum depends on the batch: K goes in ascending steps of 16 whatever the tile, shrink parts are fixed by K, the combination by k.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .activation import SwiGLU
from .expert_tiles import CHUNK, NVFP4Tiles
from .linear import LoRA
from .linear_tiles import MXFP8Tiles
from .triton_adapters import Adapters, b_tile, shrink
from .triton_group import Plan, batch_jit, columns, span
from .triton_tiles import bf16, dot, on, prefetch, settled, unit, weight_tile

LARGE = 128  # tokens of a linear layer's tile from which on x comes through the copy engine
SHRINK_PART = 2048  # inputs a shrink program sums: few programs, so that they do not push a wave of the others over


class Cut(NamedTuple):
    """How a product is cut into programs. Speed alone depends on it."""

    tokens: int  # columns of a tile
    rows: int  # outputs of a program; of gate and up: as many of each
    warps: int
    stages: int


def cuts(pairs: int, experts: int) -> tuple[Cut, Cut]:
    """Of gate and up, and of down; the same tiles. The fastest of a sweep on an H200 at MiniMax-M3's shape, by pairs an expert."""
    mean = pairs / experts
    if pairs <= 16:
        return Cut(16, 32, 4, 4), Cut(16, 64, 4, 4)
    if mean <= 4:
        return Cut(16, 64, 4, 4), Cut(16, 128, 4, 4)
    if mean <= 12:
        return Cut(16, 64, 4, 5), Cut(16, 128, 4, 5)
    if mean <= 48:
        return Cut(64, 64, 8, 4), Cut(64, 128, 8, 3)
    return Cut(128, 64, 4, 2), Cut(128, 128, 4, 2)


@triton.jit
def _band(
    x_ptr, x_desc, words_ptr, scales_ptr, global_ptr, b_ptr, b2_ptr, u_ptr, flags_ptr, out_ptr, halves_ptr, order_ptr, slots_ptr,
    tile, band, e, start, end, K, N, pairs, top_k, experts, slots, alpha, beta, limit,
    MX: tl.constexpr, LINEAR: tl.constexpr, GATED: tl.constexpr, LORA: tl.constexpr, SLOTTED: tl.constexpr, HAS1: tl.constexpr,
    HAS2: tl.constexpr, KEEP: tl.constexpr,
    R: tl.constexpr, RP: tl.constexpr, EVEN: tl.constexpr, COPIED: tl.constexpr, BW: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """One band of rows for the first BT pairs from `start`: the packed weights' K steps, the adapter's, the epilogue."""
    ROWS: tl.constexpr = 2 * BW if GATED else BW
    place, inside, pair, token, slot = columns(order_ptr, slots_ptr, start, end, top_k, LINEAR, SLOTTED, BT)
    chunks = tl.cdiv(K, 128)
    height = 2 * N if GATED else N
    row = tl.arange(0, ROWS)
    n = band * BW + row % BW
    # Rows beyond the last repeat it; they are not stored.
    matrix_row = row // BW * N + tl.minimum(n, N - 1)
    first = e.to(tl.int64) * chunks * height
    words_at = words_ptr + first * 16 + matrix_row[:, None] * 16 + tl.arange(0, 16)[None, :]
    scales_at = scales_ptr + first + matrix_row
    k = tl.arange(0, 128)
    source = token if GATED else place
    x_at = x_ptr + source.to(tl.int64)[None, :] * K + k[:, None]
    if LORA and not SLOTTED:
        first_b = e.to(tl.int64) * N * R + tl.minimum(n, N - 1) * R
        prefetch((tl.where(row < BW, b_ptr, b2_ptr) if GATED else b_ptr) + first_b)
    acc = tl.zeros([ROWS, BT], tl.float32)
    for chunk in range(chunks):
        words = tl.load(words_at)
        scales = tl.load(scales_at)
        if COPIED:
            x = x_desc.load([start, chunk * 128]).T  # zeros beyond the last token and the last input
        elif EVEN:
            x = tl.load(x_at, mask=inside[None, :], other=0.0)
        else:
            x = tl.load(x_at, mask=inside[None, :] & (chunk * 128 + k < K)[:, None], other=0.0)
        acc = settled(dot(weight_tile(words, scales, ROWS, MX), x, acc))
        words_at += height * 16
        scales_at += height
        x_at += 128
    acc = acc * unit(global_ptr, e, MX)
    if LORA:
        WIDTH: tl.constexpr = 2 * RP if GATED else RP
        u_at = u_ptr + place.to(tl.int64)[None, :] * WIDTH + tl.arange(0, WIDTH)[:, None]
        if SLOTTED:
            while tl.atomic_add(flags_ptr + tile, 0, sem="acquire") < slots:
                pass
            for wanted in tl.range(0, slots, num_stages=1):
                hit = inside & (slot == wanted)
                base = (wanted * experts + e).to(tl.int64) * N * R
                b_at, real = b_tile(b_ptr, b2_ptr, base, row, n, N, GATED, HAS1, HAS2, R, RP, BW)
                real &= (row * 0 + tl.max(hit.to(tl.int32), axis=0) == 1)[:, None]
                u = tl.load(u_at, mask=hit[None, :], other=0.0, cache_modifier=".cg")
                added = settled(dot(tl.load(b_at, mask=real, other=0.0), u, acc))
                # A column of zeros does not protect the tokens of other adapters from one that holds NaN or infinity.
                acc = tl.where(hit[None, :], added, acc)
        else:
            b_at, real = b_tile(b_ptr, b2_ptr, e.to(tl.int64) * N * R, row, n, N, GATED, HAS1, HAS2, R, RP, BW)
            b = tl.load(b_at, mask=real, other=0.0)
            while tl.atomic_add(flags_ptr + tile, 0, sem="acquire") < 1:
                pass
            acc = dot(b, tl.load(u_at, mask=inside[None, :], other=0.0, cache_modifier=".cg"), acc)
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(acc, [2, BW, BT]), (1, 2, 0)))
        gate, up = bf16(gate), bf16(up)
        n = band * BW + tl.arange(0, BW)
        stored = (n < N)[:, None] & inside[None, :]
        if KEEP:
            at = halves_ptr + place.to(tl.int64)[None, :] * 2 * N + n[:, None]
            tl.store(at, gate, mask=stored)
            tl.store(at + N, up, mask=stored)
        g = tl.minimum(gate.to(tl.float32), limit)
        u = tl.minimum(tl.maximum(up.to(tl.float32), -limit), limit)
        act = g / (1.0 + tl.exp(-alpha * g)) * (u + beta)
        tl.store(out_ptr + place.to(tl.int64)[None, :] * N + n[:, None], bf16(act), mask=stored)
    else:
        if out_ptr.dtype.element_ty == tl.bfloat16:
            acc = bf16(acc)
        tl.store(out_ptr + pair.to(tl.int64)[None, :] * N + n[:, None], acc, mask=(n < N)[:, None] & inside[None, :])


@triton.jit
def _stream(
    x_ptr, x_desc, narrow_desc, words_ptr, scales_ptr, global_ptr, b_ptr, b2_ptr, u_ptr, flags_ptr, out_ptr, halves_ptr, order_ptr,
    tiles_ptr, slots_ptr, item, wide, K, N, pairs, top_k, most, experts, slots, alpha, beta, limit,
    MX: tl.constexpr, LINEAR: tl.constexpr, GATED: tl.constexpr, LORA: tl.constexpr, SLOTTED: tl.constexpr, HAS1: tl.constexpr,
    HAS2: tl.constexpr, KEEP: tl.constexpr,
    R: tl.constexpr, RP: tl.constexpr, EVEN: tl.constexpr, COPIED: tl.constexpr, BW: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """One band of rows for one tile, with as many columns as it has pairs: BT, a half or a quarter of it; with COPIED all or a quarter.

    COPIED (large tiles of a linear layer): programs from `wide` on take a quarter of a tile each.
    """
    bands = tl.cdiv(N, BW)
    if COPIED:
        quarters = tl.maximum(item - wide, 0)
        item = tl.minimum(item, wide + quarters // 4)
    tile, band = item // bands, item % bands
    e, start, end = span(tiles_ptr, tile, most, pairs, LINEAR, BT)
    count = end - start
    if COPIED:
        start += quarters % 4 * (BT // 4)
        count = tl.where(item < wide, count, tl.minimum(end - start, BT // 4))
    if (e >= 0) & (count > 0):
        if COPIED:
            if count > BT // 4:
                _band(
                    x_ptr, x_desc, words_ptr, scales_ptr, global_ptr, b_ptr, b2_ptr, u_ptr, flags_ptr, out_ptr, halves_ptr, order_ptr,
                    slots_ptr, tile, band, e, start, end, K, N, pairs, top_k, experts, slots, alpha, beta, limit,
                    MX, LINEAR, GATED, LORA, SLOTTED, HAS1, HAS2, KEEP, R, RP, EVEN, COPIED, BW, BT,
                )  # fmt: skip
            else:
                _band(
                    x_ptr, narrow_desc, words_ptr, scales_ptr, global_ptr, b_ptr, b2_ptr, u_ptr, flags_ptr, out_ptr, halves_ptr, order_ptr,
                    slots_ptr, tile, band, e, start, end, K, N, pairs, top_k, experts, slots, alpha, beta, limit,
                    MX, LINEAR, GATED, LORA, SLOTTED, HAS1, HAS2, KEEP, R, RP, EVEN, COPIED, BW, BT // 4,
                )  # fmt: skip
        elif LINEAR or BT < 64:  # noqa: SIM114  known when compiled: the widths below are none of these tiles'
            _band(
                x_ptr, x_desc, words_ptr, scales_ptr, global_ptr, b_ptr, b2_ptr, u_ptr, flags_ptr, out_ptr, halves_ptr, order_ptr,
                slots_ptr, tile, band, e, start, end, K, N, pairs, top_k, experts, slots, alpha, beta, limit,
                MX, LINEAR, GATED, LORA, SLOTTED, HAS1, HAS2, KEEP, R, RP, EVEN, COPIED, BW, BT,
            )  # fmt: skip
        elif count > BT // 2:
            _band(
                x_ptr, x_desc, words_ptr, scales_ptr, global_ptr, b_ptr, b2_ptr, u_ptr, flags_ptr, out_ptr, halves_ptr, order_ptr,
                slots_ptr, tile, band, e, start, end, K, N, pairs, top_k, experts, slots, alpha, beta, limit,
                MX, LINEAR, GATED, LORA, SLOTTED, HAS1, HAS2, KEEP, R, RP, EVEN, COPIED, BW, BT,
            )  # fmt: skip
        elif count > BT // 4:
            _band(
                x_ptr, x_desc, words_ptr, scales_ptr, global_ptr, b_ptr, b2_ptr, u_ptr, flags_ptr, out_ptr, halves_ptr, order_ptr,
                slots_ptr, tile, band, e, start, end, K, N, pairs, top_k, experts, slots, alpha, beta, limit,
                MX, LINEAR, GATED, LORA, SLOTTED, HAS1, HAS2, KEEP, R, RP, EVEN, COPIED, BW, BT // 2,
            )  # fmt: skip
        else:
            _band(
                x_ptr, x_desc, words_ptr, scales_ptr, global_ptr, b_ptr, b2_ptr, u_ptr, flags_ptr, out_ptr, halves_ptr, order_ptr,
                slots_ptr, tile, band, e, start, end, K, N, pairs, top_k, experts, slots, alpha, beta, limit,
                MX, LINEAR, GATED, LORA, SLOTTED, HAS1, HAS2, KEEP, R, RP, EVEN, COPIED, BW, BT // 4,
            )  # fmt: skip


@batch_jit
def _experts_kernel(
    x_ptr, x_desc, narrow_desc, words_ptr, scales_ptr, global_ptr, a_ptr, a2_ptr, b_ptr, b2_ptr, u_ptr, partial_ptr, counts_ptr, flags_ptr,
    out_ptr, halves_ptr, order_ptr, tiles_ptr, slots_ptr,
    wide, K, N, pairs, top_k, most, experts, slots, alpha, beta, limit,
    MX: tl.constexpr, LINEAR: tl.constexpr, GATED: tl.constexpr, LORA: tl.constexpr, SLOTTED: tl.constexpr, HAS1: tl.constexpr,
    HAS2: tl.constexpr, KEEP: tl.constexpr,
    R: tl.constexpr, RP: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, EVEN: tl.constexpr, COPIED: tl.constexpr,
    BW: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Weights are NVFP4 stacks, or with MX and LINEAR one MXFP8 matrix (`triton_linear`), whose x comes through tensor descriptors.

    GATED: x [T, K] to act bf16 [pairs, N], weights [2N, K]. Otherwise x [pairs, K] to y fp32 [pairs, N], weights [N, K].

    Rows of act are in sorted order, rows of y in that of the pairs.
    """
    item = tl.program_id(0)
    if LORA:
        shrinks = most * slots * PARTS
        if item < shrinks:
            shrink(
                x_ptr, a_ptr, a2_ptr, u_ptr, partial_ptr, counts_ptr, flags_ptr, order_ptr, tiles_ptr, slots_ptr,
                item, K, pairs, top_k, most, experts, slots, LINEAR, GATED, SLOTTED, HAS1, HAS2, R, RP, PARTS, PART, EVEN, BT,
            )  # fmt: skip
        else:
            _stream(
                x_ptr, x_desc, narrow_desc, words_ptr, scales_ptr, global_ptr, b_ptr, b2_ptr, u_ptr, flags_ptr, out_ptr, halves_ptr,
                order_ptr, tiles_ptr, slots_ptr, item - shrinks, wide, K, N, pairs, top_k, most, experts, slots, alpha, beta, limit,
                MX, LINEAR, GATED, LORA, SLOTTED, HAS1, HAS2, KEEP, R, RP, EVEN, COPIED, BW, BT,
            )  # fmt: skip
    else:
        _stream(
            x_ptr, x_desc, narrow_desc, words_ptr, scales_ptr, global_ptr, b_ptr, b2_ptr, u_ptr, flags_ptr, out_ptr, halves_ptr,
            order_ptr, tiles_ptr, slots_ptr, item, wide, K, N, pairs, top_k, most, experts, slots, alpha, beta, limit,
            MX, LINEAR, GATED, LORA, SLOTTED, HAS1, HAS2, KEEP, R, RP, EVEN, COPIED, BW, BT,
        )  # fmt: skip


def _copied(x: Tensor, cut: Cut, programs: int) -> tuple[TensorDescriptor, TensorDescriptor, int]:
    """Of a linear layer in large tiles: x [T, K] for the copy engine, in tiles of all and of a quarter of the cut's tokens, and how many
    programs take whole tiles; each of the others is cut in four.

    Such programs run one to a multiprocessor, and their last wave may hold few. In quarters it ends sooner, with more of them at work.
    """
    if x.data_ptr() % 16:
        x = x.clone()
    whole, quarter = (TensorDescriptor.from_tensor(x, [tokens, CHUNK]) for tokens in (cut.tokens, cut.tokens // 4))
    return whole, quarter, whole_programs(programs, multiprocessors(x.device))


def whole_programs(programs: int, at_once: int) -> int:
    """How many programs of large tiles, one to a multiprocessor, take a whole one: all but a last wave of half of them or fewer."""
    last = programs % at_once
    return programs - last if 2 * last <= at_once < programs else programs


def multiprocessors(device: torch.device) -> int:
    """Of a GPU; under the interpreter as many as make both kinds of programs."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def weight_product(
    x: Tensor,
    tiles: NVFP4Tiles | MXFP8Tiles,
    plan: Plan,
    cut: Cut,
    activation: SwiGLU | None,
    loras: tuple[LoRA | None, LoRA | None],
    adapter_ids: Tensor | None,
    keep: bool = False,
    counter: int = 0,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """x W^T + u B^T. With `activation` the gate and up of experts, else one projection.

    Returns (act bf16 [P, N], sorted, or y [P, N], fp32 for experts and bf16 for a linear layer; u or None; gate and up [P, 2N] or None).
    `counter`: the first of the plan's counters that is not used yet; 1 + slots of them are.
    """
    gated = activation is not None
    act = activation or SwiGLU()
    height, k = tiles.codes.shape[-2], tiles.inputs
    n = height // 2 if gated else height
    ad = Adapters.of(*loras, x)
    has = any(ad.has)
    # Without ids there is slot 0. A shrink of another slot would have nothing to sum, and tell the tile's programs that theirs is done.
    slots = 1 if adapter_ids is None else ad.slots
    width, parts = ad.padded * (2 if gated else 1), triton.cdiv(k, SHRINK_PART)
    u = torch.empty(plan.pairs, width, dtype=x.dtype, device=x.device) if has else x
    partial = torch.empty(parts, plan.pairs, width, dtype=torch.float32, device=x.device) if has and parts > 1 else u
    out = torch.empty(plan.pairs, n, dtype=x.dtype if gated or plan.linear else torch.float32, device=x.device)
    halves = torch.empty(plan.pairs, 2 * n, dtype=x.dtype, device=x.device) if keep and gated else None
    counters = plan.counters.view(-1)[counter * plan.most :]
    programs = wide = plan.most * triton.cdiv(n, cut.rows)
    descriptors = (None, None)
    if plan.linear and cut.tokens >= LARGE:
        *descriptors, wide = _copied(x, cut, programs)
    grid = wide + 4 * (programs - wide) + (plan.most * slots * parts if has else 0)
    mx = isinstance(tiles, MXFP8Tiles)
    with on(x):
        _experts_kernel[(grid,)](
            x, *descriptors, tiles.codes, tiles.scales, x if mx else tiles.global_scale, ad.a, ad.a2, ad.b, ad.b2, u, partial,
            counters[plan.most :] if has else counters, counters, out, out if halves is None else halves, plan.order, plan.tiles,
            plan.slots(adapter_ids), wide, k, n, plan.pairs, plan.top_k, plan.most, plan.experts, slots, act.alpha, act.beta, act.limit,
            MX=mx, LINEAR=plan.linear, GATED=gated, LORA=has, SLOTTED=adapter_ids is not None, HAS1=ad.has[0], HAS2=ad.has[1],
            KEEP=halves is not None, R=ad.rank, RP=ad.padded, PARTS=parts, PART=SHRINK_PART, EVEN=k % CHUNK == 0,
            COPIED=descriptors[0] is not None, BW=cut.rows, BT=cut.tokens, num_warps=cut.warps, num_stages=cut.stages,
        )  # fmt: skip
    return out, u if has else None, halves

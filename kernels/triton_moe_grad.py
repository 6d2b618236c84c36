"""Triton kernels of the routed experts' backward: gradients of x, of the adapters and of the router weights; the base is frozen.

With g = d out of a pair's token, w its weight and h = [gate, up]:
    v2   = B2^T g                                       (rank)
    da   = W2^T g + A2^T v2                             d out / d act, before the weight
    dw   = act . da                                     so that y is never kept
    dh   = w * da through swiglu
    v    = [B1^T dgate, B3^T dup]                       (rank)
    dx   = W13^T dh + A1^T v1 + A3^T v3                 summed over a token's choices in ascending order of expert
    dA   = v^T x,  dB = dh^T u;   dA2 = (w v2)^T act,  dB2 = g^T (w u2)      sums over an expert's pairs, in fp32, in order

The two large products take tokens as rows, and as columns the 128 inputs of a chunk of the packed weights, which are decoded tile by
tile into shared memory. No gradient depends on timing; those of the adapters are sums over the batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .activation import SwiGLU
from .expert_tiles import NVFP4Tiles
from .linear import LoRA
from .linear_tiles import MXFP8Tiles
from .triton_adapters import Adapters
from .triton_group import Plan, batch_jit, columns, span
from .triton_tiles import bf16, dot, on, settled, unit, weight_tile


class BackCut(NamedTuple):
    """How `back_product` is cut."""

    tokens: int  # rows of a tile
    step: int  # rows of the weight decoded at a time
    warps: int
    stages: int


def back_cut(pairs: int, experts: int) -> BackCut:
    """The fastest of a sweep on an H200 at MiniMax-M3's shape, by pairs an expert."""
    mean = pairs / experts
    if mean <= 12:
        return BackCut(16, 64, 4, 3)
    return BackCut(64, 64, 4, 3) if mean <= 64 else BackCut(128, 64, 4, 3)


@batch_jit
def _rank_kernel(
    g_ptr, b_ptr, b2_ptr, v_ptr, order_ptr, tiles_ptr, slots_ptr, N, stride, pairs, top_k, most, experts, slots,
    LINEAR: tl.constexpr, GATHER: tl.constexpr, SLOTTED: tl.constexpr, HAS1: tl.constexpr, HAS2: tl.constexpr, R: tl.constexpr,
    RP: tl.constexpr, WIDTH: tl.constexpr, BT: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """v bf16 [pairs, WIDTH] = g B, with B [N, R] of each pair's expert and slot; the second projection's g lies N columns on."""
    item, which = tl.program_id(0), tl.program_id(1)
    tile, wanted = item // slots, item % slots
    e, start, end = span(tiles_ptr, tile, most, pairs, LINEAR, BT)
    if e >= 0:
        place, inside, _pair, token, slot = columns(order_ptr, slots_ptr, start, end, top_k, LINEAR, SLOTTED, BT)
        hit = inside & (slot == wanted)
        r = tl.arange(0, RP)
        n = tl.arange(0, STEP)
        source = token if GATHER else place
        has = (HAS1 & (which == 0)) | (HAS2 & (which == 1))
        base = b_ptr if which == 0 else b2_ptr
        b_at = base + (wanted * experts + e).to(tl.int64) * N * R + n[:, None] * R + r[None, :]
        g_at = g_ptr + source.to(tl.int64)[:, None] * stride + which * N + n[None, :]
        acc = tl.zeros([BT, RP], tl.float32)
        for first in range(0, N, STEP):
            g = tl.load(g_at, mask=hit[:, None] & (first + n < N)[None, :], other=0.0)
            b = tl.load(b_at, mask=(first + n < N)[:, None] & ((r < R) & has)[None, :], other=0.0)
            acc = settled(dot(g, b, acc))
            g_at += STEP
            b_at += STEP * R
        tl.store(v_ptr + place.to(tl.int64)[:, None] * WIDTH + which * RP + r[None, :], bf16(acc), mask=hit[:, None])


@batch_jit
def _back_kernel(
    g_ptr, words_ptr, scales_ptr, global_ptr, v_ptr, a_ptr, a2_ptr, out_ptr, order_ptr, tiles_ptr, slots_ptr,
    N, K, pairs, top_k, most, experts, slots,
    MX: tl.constexpr, LINEAR: tl.constexpr, GATED: tl.constexpr, LORA: tl.constexpr, SLOTTED: tl.constexpr, HAS1: tl.constexpr,
    HAS2: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, BT: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One chunk of 128 columns for one tile of pairs: out fp32 [pairs, K] = g [*, N] W [N, K] + v A.

    GATED (gate and up): g is dh, in sorted order, and out in the order of pairs. Otherwise (down): g is d out of tokens, out sorted.
    """
    chunks = tl.cdiv(K, 128)
    tile, chunk = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    e, start, end = span(tiles_ptr, tile, most, pairs, LINEAR, BT)
    if e >= 0:
        place, inside, pair, token, slot = columns(order_ptr, slots_ptr, start, end, top_k, LINEAR, SLOTTED, BT)
        n = tl.arange(0, STEP)
        first = (e.to(tl.int64) * chunks + chunk) * N
        words_at = words_ptr + (first + n)[:, None] * 16 + tl.arange(0, 16)[None, :]
        scales_at = scales_ptr + first + n
        source = place if GATED else token
        g_at = g_ptr + source.to(tl.int64)[:, None] * N + n[None, :]
        acc = tl.zeros([BT, 128], tl.float32)
        for row in range(0, N, STEP):
            real = row + n < N
            words = tl.load(words_at, mask=real[:, None], other=0)
            scales = tl.load(scales_at, mask=real, other=0)
            g = tl.load(g_at, mask=inside[:, None] & real[None, :], other=0.0)
            acc = settled(dot(g, weight_tile(words, scales, STEP, MX), acc))
            words_at += STEP * 16
            scales_at += STEP
            g_at += STEP
        acc = acc * unit(global_ptr, e, MX)
        k = chunk * 128 + tl.arange(0, 128)
        if LORA:
            WIDTH: tl.constexpr = 2 * RP if GATED else RP
            column = tl.arange(0, WIDTH)
            r = column % RP
            present = (r < R) & (((column < RP) & HAS1) | ((column >= RP) & HAS2))
            for wanted in range(slots):
                hit = inside & (slot == wanted)
                if tl.max(hit.to(tl.int32), axis=0) == 1:
                    v = tl.load(v_ptr + place.to(tl.int64)[:, None] * WIDTH + column[None, :], mask=hit[:, None], other=0.0)
                    matrix = (wanted * experts + e).to(tl.int64) * R * K
                    a_at = (tl.where(column < RP, a_ptr, a2_ptr) + matrix + r * K)[:, None] + k[None, :]
                    added = dot(v, tl.load(a_at, mask=present[:, None] & (k < K)[None, :], other=0.0), acc)
                    acc = tl.where(hit[:, None], added, acc) if SLOTTED else added
        target = pair if GATED else place
        if out_ptr.dtype.element_ty == tl.bfloat16:
            acc = bf16(acc)
        tl.store(out_ptr + target.to(tl.int64)[:, None] * K + k[None, :], acc, mask=inside[:, None] & (k < K)[None, :])


@triton.jit
def _swiglu_back_kernel(
    da_ptr, halves_ptr, weights_ptr, order_ptr, dh_ptr, act_ptr, dw_ptr, K, alpha, beta, limit, BLOCK: tl.constexpr
):  # fmt: skip
    """One pair, at its place: da fp32 [K] and [gate, up] bf16 [2K] to dh bf16 [2K], act bf16 [K] and dw fp32."""
    place = tl.program_id(0).to(tl.int64)
    pair = tl.load(order_ptr + place)
    weight = tl.load(weights_ptr + pair)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, K, BLOCK):
        k = first + tl.arange(0, BLOCK)
        real = k < K
        da = tl.load(da_ptr + place * K + k, mask=real, other=0.0)
        gate = tl.load(halves_ptr + place * 2 * K + k, mask=real, other=0.0).to(tl.float32)
        up = tl.load(halves_ptr + place * 2 * K + K + k, mask=real, other=0.0).to(tl.float32)
        low, mid = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit)
        sigmoid = 1.0 / (1.0 + tl.exp(-alpha * low))
        act = bf16(low * sigmoid * (mid + beta))
        tl.store(act_ptr + place * K + k, act, mask=real)
        total += act.to(tl.float32) * da
        da *= weight
        # d(g s)/dg = s + alpha g s (1 - s); a clamped half passes nothing.
        slope = (sigmoid + alpha * low * sigmoid * (1.0 - sigmoid)) * (mid + beta)
        tl.store(dh_ptr + place * 2 * K + k, bf16(tl.where(gate <= limit, da * slope, 0.0)), mask=real)
        tl.store(dh_ptr + place * 2 * K + K + k, bf16(tl.where(tl.abs(up) <= limit, da * low * sigmoid, 0.0)), mask=real)
    tl.store(dw_ptr + pair, tl.sum(total, axis=0))


@batch_jit
def _outer_kernel(
    z_ptr, v_ptr, out_ptr, order_ptr, bounds_ptr, slots_ptr, weights_ptr, K, z_stride, v_stride, pairs, top_k, slots, experts,
    out_k, out_r,
    LINEAR: tl.constexpr, GATHER: tl.constexpr, WEIGHTED: tl.constexpr, SLOTTED: tl.constexpr, R: tl.constexpr, RP: tl.constexpr,
    BK: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """out[slot, e, k, r] (steps out_k, out_r) = sum over the expert's pairs of that slot of z[., k] v[., r], v times weight if WEIGHTED."""
    e, wanted = tl.program_id(0) % experts, tl.program_id(0) // experts
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    r = tl.arange(0, RP)
    acc = tl.zeros([BK, RP], tl.float32)
    begin, end = pairs * 0, pairs
    if not LINEAR:
        begin, end = tl.load(bounds_ptr + e), tl.load(bounds_ptr + e + 1)
    for start in range(begin, end, BT):
        place, inside, pair, token, slot = columns(order_ptr, slots_ptr, start, end, top_k, LINEAR, SLOTTED, BT)
        hit = inside & (slot == wanted)
        source = token if GATHER else place
        z = tl.load(z_ptr + source.to(tl.int64)[None, :] * z_stride + k[:, None], mask=hit[None, :] & (k < K)[:, None], other=0.0)
        v = tl.load(v_ptr + place.to(tl.int64)[:, None] * v_stride + r[None, :], mask=hit[:, None] & (r < R)[None, :], other=0.0)
        if WEIGHTED:
            v = bf16(v.to(tl.float32) * tl.load(weights_ptr + pair, mask=hit, other=0.0)[:, None])
        acc = settled(dot(z, v, acc))
    at = out_ptr + (wanted * experts + e).to(tl.int64) * K * R + k[:, None].to(tl.int64) * out_k + r[None, :] * out_r
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=(k < K)[:, None] & (r < R)[None, :])


def rank_product(g: Tensor, one: LoRA | None, two: LoRA | None, plan: Plan, adapter_ids: Tensor | None, down: bool, tile: int) -> Tensor:
    """v bf16 [P, ranks] = g B. `down` (and a linear layer): one projection, g [T, N] of tokens. Else two, g [P, 2N] sorted."""
    ad = Adapters.of(one, two, g)
    projections = 1 if down else 2
    v = torch.empty(plan.pairs, projections * ad.padded, dtype=g.dtype, device=g.device)
    with on(g):
        _rank_kernel[(plan.most * ad.slots, projections)](
            g, ad.b, ad.b2, v, plan.order, plan.tiles, plan.slots(adapter_ids), ad.b.shape[-2], g.shape[1], plan.pairs, plan.top_k,
            plan.most, plan.experts, ad.slots,
            LINEAR=plan.linear, GATHER=down, SLOTTED=adapter_ids is not None, HAS1=ad.has[0], HAS2=ad.has[1], R=ad.rank, RP=ad.padded,
            WIDTH=projections * ad.padded, BT=tile, STEP=64, num_warps=4, num_stages=3,
        )  # fmt: skip
    return v


def back_product(
    g: Tensor,
    tiles: NVFP4Tiles | MXFP8Tiles,
    v: Tensor | None,
    one: LoRA | None,
    two: LoRA | None,
    plan: Plan,
    adapter_ids: Tensor | None,
    gated: bool,
    cut: BackCut,
) -> Tensor:
    """[P, K] = g W + v A, fp32 for experts and bf16 for a linear layer. See `_back_kernel`."""
    ad = Adapters.of(one, two, g)
    n, k, mx = tiles.codes.shape[-2], tiles.inputs, isinstance(tiles, MXFP8Tiles)
    out = torch.empty(plan.pairs, k, dtype=g.dtype if plan.linear else torch.float32, device=g.device)
    with on(g):
        _back_kernel[(plan.most * triton.cdiv(k, 128),)](
            g, tiles.codes, tiles.scales, g if mx else tiles.global_scale, g if v is None else v, ad.a, ad.a2, out, plan.order, plan.tiles,
            plan.slots(adapter_ids), n, k, plan.pairs, plan.top_k, plan.most, plan.experts, ad.slots,
            MX=mx, LINEAR=plan.linear, GATED=gated, LORA=v is not None, SLOTTED=adapter_ids is not None, HAS1=ad.has[0], HAS2=ad.has[1],
            R=ad.rank, RP=ad.padded, BT=cut.tokens, STEP=cut.step, num_warps=cut.warps, num_stages=cut.stages,
        )  # fmt: skip
    return out


def swiglu_back(da: Tensor, halves: Tensor, weights: Tensor, plan: Plan, activation: SwiGLU) -> tuple[Tensor, Tensor, Tensor]:
    """(dh bf16 [P, 2I], act bf16 [P, I], dw fp32 [P] in the order of pairs) of da fp32 [P, I] and gate and up bf16 [P, 2I]."""
    pairs, k = da.shape
    dh, act, dw = torch.empty_like(halves), halves.new_empty(pairs, k), da.new_empty(pairs)
    with on(da):
        _swiglu_back_kernel[(pairs,)](
            da, halves, weights, plan.order, dh, act, dw, k, activation.alpha, activation.beta, activation.limit,
            BLOCK=min(1024, triton.next_power_of_2(k)), num_warps=4,
        )  # fmt: skip
    return dh, act, dw


def outer_product(
    z: Tensor,
    v: Tensor,
    like: Tensor,
    plan: Plan,
    adapter_ids: Tensor | None,
    gather: bool,
    weights: Tensor | None,
    is_a: bool,
) -> Tensor:
    """Gradient of an A [slots, E, r, K] (`is_a`) or a B [slots, E, N, r]: for each expert and slot the sum over pairs of z (x) v.

    z bf16 [*, K or N], of tokens where `gather`, else of places; v bf16 [P, at least r]; either may be a view of columns. A linear
    layer's have no dimension E.
    """
    slots = like.shape[0]
    rank, k = (like.shape[-2], like.shape[-1]) if is_a else (like.shape[-1], like.shape[-2])
    out = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    with on(z):
        _outer_kernel[(slots * plan.experts, triton.cdiv(k, 128))](
            z, v, out, plan.order, plan.bounds, plan.slots(adapter_ids), z if weights is None else weights, k, z.stride(0), v.stride(0),
            plan.pairs, plan.top_k, slots, plan.experts, 1 if is_a else rank, k if is_a else 1,
            LINEAR=plan.linear, GATHER=gather, WEIGHTED=weights is not None, SLOTTED=adapter_ids is not None, R=rank,
            RP=max(16, triton.next_power_of_2(rank)), BK=128, BT=64, num_warps=4, num_stages=3,
        )  # fmt: skip
    return out

"""MSA attention on CUDA, forward: a query's 16 heads of one KV group over its chosen blocks.

**One order.** A program is one query token and one KV group, in decode, prefill and training alike, and has eight warps. Warp w takes the
chosen blocks at places w and w + 8, in tiles of 64 keys, as in flash attention; the warps' results (maximum, sum, weighted values) are
then reduced over the warps. Every operation on the way to a query's result is the same, in the same order, and none depends
on any other query. Multiply and add are never contracted, so that kernels for other formats of pages round alike.

The warps are a batch dimension of the MMAs, whose sixteen rows are the heads: scores become weights in the registers they were made
in, and no warp waits for another before the reduction. With more than one stage, raw pages are copied to shared memory ahead of their
use (Triton's software pipeline) and decoded from there into registers; with one they are loaded where they are decoded.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from .triton_msa_tiles import (
    INTERPRETED,
    OPERAND,
    PAGE,
    decode_keys,
    decode_values,
    key_of_label,
    label_query,
    load_keys,
    load_values,
    natural_output,
    unit,
    weights_for_values,
)

ROWS = tl.constexpr(16)  # rows of an MMA; the query heads of a group, at most


@triton.jit
def _place(chosen_ptr, table_ptr, position, page_stride, token_stride, PAGED: tl.constexpr):
    """Of the block at a lane's place: keys that the query sees, and its offset in 16 elements."""
    block = tl.load(chosen_ptr)
    if PAGED:
        offset = tl.load(table_ptr + block, mask=block >= 0, other=0).to(tl.int64) * (page_stride // 16)
    else:
        offset = (tl.load(table_ptr) + block * PAGE).to(tl.int64) * (token_stride // 16)
    return tl.where(block < 0, 0, position + 1 - block * PAGE), offset


@triton.jit
def _ends(chosen_ptr, position):
    """Keys that the query sees of the block at each warp's place."""
    block = tl.load(chosen_ptr)
    return tl.where(block < 0, 0, position + 1 - block * PAGE)


@triton.jit
def _finite(x):
    """0 for -inf, so that differences of what may both be -inf are no NaN."""
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
def _over_warps(x, WARPS: tl.constexpr):
    """Sum over the first dimension, neighbours first. `tl.sum` over warps would shuffle every element three times."""
    if WARPS == 1:
        return tl.reshape(x, [ROWS, 128])
    else:
        a, b = tl.split(tl.permute(tl.reshape(x, [WARPS // 2, 2, ROWS, 128]), [0, 2, 3, 1]))
        return _over_warps(a + b, WARPS // 2)


@triton.jit
def attend_kernel(
    query_ptr,  # [T, G * HEADS, 128]
    keys_ptr,
    values_ptr,
    table_ptr,  # int32 [R, table_stride] page ids, or [R] first tokens of contiguous keys
    request_ptr,  # int32 [T]
    position_ptr,  # int32 [T], -1 for padding
    chosen_ptr,  # int32 [T, G, TOPK]
    out_ptr,  # [T, G * HEADS, 128]
    lse_ptr,  # fp32 [T, G * HEADS]: log2 of the softmax's sum, of scores in powers of two
    page_stride,
    token_stride,
    head_stride,
    table_stride,
    factor,  # softmax scale * log2(e) * unit of K
    G: tl.constexpr,
    HEADS: tl.constexpr,
    TOPK: tl.constexpr,
    WARPS: tl.constexpr,
    LSE: tl.constexpr,
    FORMAT: tl.constexpr,
    PAGED: tl.constexpr,
    STAGES: tl.constexpr,
    PART: tl.constexpr,  # keys of a warp's tile
):
    """One query token and KV group a program."""
    if not INTERPRETED:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)  # token * G + group
    token, group = row // G, row % G
    chosen_ptr += row * TOPK
    position = tl.load(position_ptr + token)
    request = tl.load(request_ptr + token).to(tl.int64)
    table_ptr += request * table_stride if PAGED else request
    keys_ptr += group * head_stride
    values_ptr += group * head_stride
    head = tl.arange(0, ROWS)
    at = (row * HEADS + head)[:, None] * 128 + tl.arange(0, 128)[None, :]
    query = tl.load(query_ptr + at, mask=(head < HEADS)[:, None], other=0.0).to(OPERAND)
    query = tl.broadcast_to(label_query(query, ROWS, FORMAT)[None], [WARPS, ROWS, 128])

    lane, warp = tl.arange(0, WARPS * 32) // 32, tl.arange(0, WARPS)
    top = tl.full([WARPS, ROWS], float("-inf"), tl.float32)
    total = tl.zeros([WARPS, ROWS], tl.float32)
    values = tl.zeros([WARPS, ROWS, 128], tl.float32)
    for first in tl.static_range(0, TOPK, 2 * WARPS):
        # Two places a warp in one loop, so that the pipeline does not run dry between them.
        limit_a, offset_a = _place(chosen_ptr + first + lane, table_ptr, position, page_stride, token_stride, PAGED)
        ends_a = _ends(chosen_ptr + first + warp, position)
        tiles = tl.where(tl.load(chosen_ptr + first) >= 0, 128 // PART, 0)
        if TOPK > WARPS:
            limit_b, offset_b = _place(chosen_ptr + first + WARPS + lane, table_ptr, position, page_stride, token_stride, PAGED)
            ends_b = _ends(chosen_ptr + first + WARPS + warp, position)
            tiles += tl.where(tl.load(chosen_ptr + first + WARPS) >= 0, 128 // PART, 0)
        for tile in tl.range(0, tiles, num_stages=STAGES):
            begin = tile % (128 // PART) * PART
            limit, offset, ends = limit_a, offset_a, ends_a
            if TOPK > WARPS:
                limit = tl.where(tile < 128 // PART, limit_a, limit_b)
                offset = tl.where(tile < 128 // PART, offset_a, offset_b)
                ends = tl.where(tile < 128 // PART, ends_a, ends_b)
            x, raw = load_keys(keys_ptr, offset, limit, begin, token_stride, WARPS, PART, FORMAT)
            scores = tl.dot(query, tl.permute(decode_keys(x, raw, WARPS, PART, FORMAT), [0, 2, 1]))
            scores = tl.where((key_of_label(PART) + begin)[None, None, :] < ends[:, None, None], scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, axis=2) * factor)
            origin = _finite(new_top)
            shrink = tl.exp2(top - origin)
            weights = tl.exp2(tl.fma(scores, tl.zeros_like(scores) + factor, tl.broadcast_to(-origin[:, :, None], scores.shape)))
            total = total * shrink + tl.sum(weights, axis=2)
            a, b, c, d, words = load_values(values_ptr, offset, limit, begin, token_stride, WARPS, PART, FORMAT)
            tile_v = decode_values(a, b, c, d, words, limit, begin, WARPS, PART, FORMAT)
            values = tl.dot(weights_for_values(weights, WARPS, ROWS, PART), tile_v, values * shrink[:, :, None])
            top = new_top

    all_top = tl.max(top, axis=0)
    share = tl.exp2(top - _finite(all_top)[None, :])
    all_total = tl.sum(total * share, axis=0)
    all_values = _over_warps(values * share[:, :, None], WARPS)
    inverse = tl.math.div_rn(tl.full([ROWS], 1.0, tl.float32) * unit(FORMAT), tl.where(all_total > 0, all_total, 1.0))
    out = natural_output(all_values * inverse[:, None], ROWS)
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=(head < HEADS)[:, None])
    if LSE:
        lse = tl.where(all_total > 0, all_top + tl.log2(all_total), float("-inf"))
        tl.store(lse_ptr + row * HEADS + head, lse, mask=head < HEADS)

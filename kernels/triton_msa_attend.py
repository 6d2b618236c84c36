"""MSA attention on CUDA, forward: a query's 16 heads of one KV group over its chosen blocks.

**One order.** A program is one query token and one KV group, in decode, prefill and training alike, and it has eight warps. Warp w takes the
chosen blocks at places w and w + 8, in tiles of 64 keys, as in flash attention; the warps' results (maximum, sum, weighted values) are
then reduced over the warps. Every operation on the way to a query's result is the same, in the same order, and none depends on any other
query. Multiply and add are never contracted, so that kernels for other formats of pages round alike.

The warps are a batch dimension of the MMAs, whose sixteen rows are the heads: scores become weights in the registers they were made
in, and no warp waits for another before the reduction. Raw pages are copied to shared memory ahead of their use (Triton's software
pipeline) and decoded from there into registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_msa_tiles import (
    OPERAND,
    PAGE,
    PART,
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
def _scores(query, keys_ptr, offset, limit, column_limit, begin, token_stride, WARPS: tl.constexpr, FORMAT: tl.constexpr):
    """[WARPS, 16, PART], -inf from key `limit` of the block on."""
    x, raw = load_keys(keys_ptr, offset, limit, begin, token_stride, WARPS, PART, FORMAT)
    scores = tl.dot(query, tl.permute(decode_keys(x, raw, WARPS, PART, FORMAT), [0, 2, 1]))
    return tl.where((key_of_label(PART) + begin)[None, None, :] < column_limit[:, None, None], scores, float("-inf"))


@triton.jit
def _weighted(weights, values, values_ptr, offset, limit, begin, token_stride, WARPS: tl.constexpr, FORMAT: tl.constexpr):
    """`values` and the weighted sum of PART values more."""
    a, b, c, d, words = load_values(values_ptr, offset, limit, begin, token_stride, WARPS, PART, FORMAT)
    tile = decode_values(a, b, c, d, words, limit, begin, WARPS, PART, FORMAT)
    return tl.dot(weights_for_values(weights, WARPS, ROWS, PART), tile, values)


@triton.jit
def _weights(scores, top, factor):
    """2^(scores * factor - top)."""
    return tl.exp2(tl.fma(scores, tl.zeros_like(scores) + factor, tl.broadcast_to(-top[:, :, None], scores.shape)))


@triton.jit
def _finite(x):
    """0 for -inf, so that differences of what may both be -inf are no NaN."""
    return tl.where(x == float("-inf"), 0.0, x)


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
    PARTS: tl.constexpr,
):
    """One query token and KV group a program."""
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

    lane = tl.arange(0, WARPS * 32)
    warp = tl.arange(0, WARPS)
    places = 1 + (tl.load(chosen_ptr + WARPS) >= 0).to(tl.int32) if TOPK == 2 * WARPS else TOPK // WARPS
    top = tl.full([WARPS, ROWS], float("-inf"), tl.float32)
    total = tl.zeros([WARPS, ROWS], tl.float32)
    values = tl.zeros([WARPS, ROWS, 128], tl.float32)
    block = tl.load(chosen_ptr + lane // 32)
    block_w = tl.load(chosen_ptr + warp)
    for place in range(places):
        limit = tl.where(block < 0, 0, position + 1 - block * PAGE)
        limit_w = tl.where(block_w < 0, 0, position + 1 - block_w * PAGE)
        if PAGED:
            offset = tl.load(table_ptr + block, mask=block >= 0, other=0).to(tl.int64) * (page_stride // 16)
        else:
            offset = (tl.load(table_ptr) + block * PAGE).to(tl.int64) * (token_stride // 16)
        ahead = tl.minimum(place + 1, TOPK // WARPS - 1) * WARPS
        block = tl.load(chosen_ptr + ahead + lane // 32)
        block_w = tl.load(chosen_ptr + ahead + warp)
        for begin in tl.range(0, PAGE, PARTS * PART, num_stages=STAGES):
            s = _scores(query, keys_ptr, offset, limit, limit_w, begin, token_stride, WARPS, FORMAT)
            new_top = tl.maximum(top, tl.max(s, axis=2) * factor)
            if PARTS == 2:
                t = _scores(query, keys_ptr, offset, limit, limit_w, begin + 32, token_stride, WARPS, FORMAT)
                new_top = tl.maximum(new_top, tl.max(t, axis=2) * factor)
            origin = _finite(new_top)
            shrink = tl.exp2(top - origin)
            values = values * shrink[:, :, None]
            s = _weights(s, origin, factor)
            added = tl.sum(s, axis=2)
            values = _weighted(s, values, values_ptr, offset, limit, begin, token_stride, WARPS, FORMAT)
            if PARTS == 2:
                t = _weights(t, origin, factor)
                added += tl.sum(t, axis=2)
                values = _weighted(t, values, values_ptr, offset, limit, begin + 32, token_stride, WARPS, FORMAT)
            total = total * shrink + added
            top = new_top

    all_top = tl.max(top, axis=0)
    share = tl.exp2(top - _finite(all_top)[None, :])
    all_total = tl.sum(total * share, axis=0)
    all_values = tl.sum(values * share[:, :, None], axis=0)
    inverse = tl.math.div_rn(tl.full([ROWS], 1.0, tl.float32) * unit(FORMAT), tl.where(all_total > 0, all_total, 1.0))
    out = natural_output(all_values * inverse[:, None], ROWS)
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=(head < HEADS)[:, None])
    if LSE:
        lse = tl.where(all_total > 0, all_top + tl.log2(all_total), float("-inf"))
        tl.store(lse_ptr + row * HEADS + head, lse, mask=head < HEADS)

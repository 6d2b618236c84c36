"""MSA attention on CUDA, forward: a query's 16 heads of one KV group over its chosen blocks.

**One order.** The chosen blocks of a query, ascending, are cut into chunks of `PER` places. Inside a chunk, tiles of 64 keys follow one another
as in flash attention; the chunks' results (maximum, sum, weighted values) are then folded in order. Chunks may run in different programs,
the last of which to finish folds (decode), or one after another in one program (prefill, training): every operation on the way to a
query's result is the same, in the same order, and none depends on any other query. Multiply and add are never contracted, so the
two compilations round alike.

A program is one warp. The sixteen heads are the rows of its MMAs; scores become weights in the registers they were made in.
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
def block_offset(block, table_ptr, page_stride, token_stride, PAGED: tl.constexpr):
    """Elements from the start of the cache, or of the packed keys, to a block's first key."""
    if PAGED:
        return tl.load(table_ptr + block).to(tl.int64) * page_stride
    return (tl.load(table_ptr) + block * PAGE).to(tl.int64) * token_stride


@triton.jit
def _nothing():
    return tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, 128], tl.float32)


@triton.jit
def _scores(query, keys, token_stride, begin, limit, one, FORMAT: tl.constexpr, PAGED: tl.constexpr):
    """[16, PART], -inf from key `limit` of the block on."""
    x, raw = load_keys(keys, token_stride, begin, limit, one, PART, FORMAT, True, not PAGED)
    scores = tl.dot(query, tl.trans(decode_keys(x, raw, PART, FORMAT)))
    return tl.where((key_of_label(PART) + begin < limit)[None, :], scores, float("-inf"))


@triton.jit
def _weights(scores, top, factor):
    """2^(scores * factor - top)."""
    return tl.exp2(tl.fma(scores, tl.zeros_like(scores) + factor, tl.broadcast_to(-top[:, None], scores.shape)))


@triton.jit
def _weighted(weights, values, items, token_stride, begin, limit, FORMAT: tl.constexpr):
    """`values` and the weighted sum of PART values more."""
    a, b, c, d, words = load_values(items, token_stride, begin, limit, PART, FORMAT)
    tile = decode_values(a, b, c, d, words, begin, limit, PART, FORMAT)
    return tl.dot(weights_for_values(weights, ROWS, PART), tile, values)


@triton.jit
def _chunk(
    query,  # [16, 128], in the order of labels
    keys_ptr,
    values_ptr,
    table_ptr,
    chosen_ptr,
    first,
    position,
    page_stride,
    token_stride,
    factor,
    one,
    PER: tl.constexpr,
    FORMAT: tl.constexpr,
    PAGED: tl.constexpr,
):
    """Places `first` to `first + PER - 1` of a query: (maximum [16] in powers of two, sum [16], weighted values [16, 128])."""
    top, total, values = _nothing()
    for place in range(first, first + PER):
        block = tl.load(chosen_ptr + place)
        if block >= 0:
            limit = position + 1 - block * PAGE
            offset = block_offset(block, table_ptr, page_stride, token_stride, PAGED)
            keys, items = keys_ptr + offset, values_ptr + offset
            for begin in range(0, tl.minimum(limit, PAGE), 2 * PART):
                s = _scores(query, keys, token_stride, begin, limit, one, FORMAT, PAGED)
                t = _scores(query, keys, token_stride, begin + PART, limit, one, FORMAT, PAGED)
                new_top = tl.maximum(top, tl.maximum(tl.max(s, axis=1), tl.max(t, axis=1)) * factor)
                s, t = _weights(s, new_top, factor), _weights(t, new_top, factor)
                shrink = tl.exp2(top - new_top)
                total = total * shrink + (tl.sum(s, axis=1) + tl.sum(t, axis=1))
                values = values * shrink[:, None]
                values = _weighted(s, values, items, token_stride, begin, limit, FORMAT)
                values = _weighted(t, values, items, token_stride, begin + PART, limit, FORMAT)
                top = new_top
    return top, total, values


@triton.jit
def _fold(top, total, values, next_top, next_total, next_values):
    """One chunk more."""
    new_top = tl.maximum(top, next_top)
    a, b = tl.exp2(top - new_top), tl.exp2(next_top - new_top)
    return new_top, total * a + next_total * b, values * a[:, None] + next_values * b[:, None]


@triton.jit
def _fold_first(next_top, next_total, next_values):
    top, total, values = _nothing()
    return _fold(top, total, values, next_top, next_total, next_values)


@triton.jit
def _finish(top, total, values, out_ptr, lse_ptr, row, HEADS: tl.constexpr, FORMAT: tl.constexpr, LSE: tl.constexpr):
    """Write a query's output; zeros where it has no block."""
    head = tl.arange(0, ROWS)
    inverse = tl.where(total > 0, tl.math.div_rn(tl.full([ROWS], 1.0, tl.float32) * unit(FORMAT), total), 0.0)
    out = natural_output(values * inverse[:, None], ROWS)
    at = (row * HEADS + head)[:, None] * 128 + tl.arange(0, 128)[None, :]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=(head < HEADS)[:, None])
    if LSE:
        tl.store(lse_ptr + row * HEADS + head, tl.where(total > 0, top + tl.log2(total), float("-inf")), mask=head < HEADS)


@triton.jit
def attend_kernel(
    query_ptr,  # [T, G * HEADS, 128]
    keys_ptr,
    values_ptr,
    table_ptr,  # int32 [R, table_stride] page ids, or [R] first tokens of contiguous keys
    request_ptr,  # int32 [T]
    position_ptr,  # int32 [T], -1 for padding
    chosen_ptr,  # int32 [T, G, CHUNKS * PER]
    out_ptr,  # [T, G * HEADS, 128]
    lse_ptr,  # fp32 [T, G * HEADS]: log2 of the softmax's sum, of scores in powers of two
    partial_ptr,  # fp32 [T * G * CHUNKS, 16, 130], where chunks have programs of their own
    arrived_ptr,  # int32 [T * G], zero
    page_stride,
    token_stride,
    head_stride,
    table_stride,
    factor,  # softmax scale * log2(e) * unit of K
    one,
    G: tl.constexpr,
    HEADS: tl.constexpr,
    CHUNKS: tl.constexpr,
    PER: tl.constexpr,
    APART: tl.constexpr,  # a program for each chunk
    LSE: tl.constexpr,
    FORMAT: tl.constexpr,
    PAGED: tl.constexpr,
):
    program = tl.program_id(0)
    chunk = 0
    if APART:
        chunk = program % CHUNKS
        program = program // CHUNKS
    row = program.to(tl.int64)  # token * G + group
    token, group = row // G, row % G
    position = tl.load(position_ptr + token)
    chosen_ptr += row * (CHUNKS * PER)
    request = tl.load(request_ptr + token).to(tl.int64)
    table_ptr += request * table_stride if PAGED else request
    keys_ptr += group * head_stride
    values_ptr += group * head_stride
    head = tl.arange(0, ROWS)
    at = (row * HEADS + head)[:, None] * 128 + tl.arange(0, 128)[None, :]
    query = tl.load(query_ptr + at, mask=(head < HEADS)[:, None], other=0.0).to(OPERAND)
    query = label_query(query, ROWS, FORMAT)
    if APART:
        top, total, values = _chunk(
            query,
            keys_ptr,
            values_ptr,
            table_ptr,
            chosen_ptr,
            chunk * PER,
            position,
            page_stride,
            token_stride,
            factor,
            one,
            PER,
            FORMAT,
            PAGED,
        )
        filled = 1  # chunks with a block; the first counts always, so that somebody writes
        for other in tl.static_range(1, CHUNKS):
            filled += (tl.load(chosen_ptr + other * PER) >= 0).to(tl.int32)
        if filled == 1:
            if chunk == 0:
                top, total, values = _fold_first(top, total, values)
                _finish(top, total, values, out_ptr, lse_ptr, row, HEADS, FORMAT, LSE)
        elif chunk < filled:
            cell = tl.arange(0, ROWS)[:, None] * 128 + tl.arange(0, 128)[None, :]
            base = partial_ptr + row * (CHUNKS * 2080)
            tl.store(base + chunk * 2080 + cell, values)
            tl.store(base + chunk * 2080 + 2048 + head, top)
            tl.store(base + chunk * 2080 + 2064 + head, total)
            tl.debug_barrier()
            before = tl.atomic_add(arrived_ptr + row, 1, sem="acq_rel")
            if before == filled - 1:
                tl.debug_barrier()
                top, total, values = _nothing()
                for c in range(0, filled):
                    next_values = tl.load(base + c * 2080 + cell, cache_modifier=".cg")
                    next_top = tl.load(base + c * 2080 + 2048 + head, cache_modifier=".cg")
                    next_total = tl.load(base + c * 2080 + 2064 + head, cache_modifier=".cg")
                    top, total, values = _fold(top, total, values, next_top, next_total, next_values)
                _finish(top, total, values, out_ptr, lse_ptr, row, HEADS, FORMAT, LSE)
                tl.store(arrived_ptr + row, 0)
    else:
        top, total, values = _nothing()
        for c in range(CHUNKS):
            if tl.load(chosen_ptr + c * PER) >= 0:
                next_top, next_total, next_values = _chunk(
                    query,
                    keys_ptr,
                    values_ptr,
                    table_ptr,
                    chosen_ptr,
                    c * PER,
                    position,
                    page_stride,
                    token_stride,
                    factor,
                    one,
                    PER,
                    FORMAT,
                    PAGED,
                )
                top, total, values = _fold(top, total, values, next_top, next_total, next_values)
        _finish(top, total, values, out_ptr, lse_ptr, row, HEADS, FORMAT, LSE)

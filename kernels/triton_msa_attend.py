"""MSA attention on CUDA, forward: a query's 16 heads of one KV group over its chosen blocks.

**One order.** The chosen blocks of a query are taken in chains of four, as in flash attention: a block's 128 scores, the new maximum, the
weights, their product with V. The chains' results (maximum, sum, weighted values) are joined one after the other, in the order of their
blocks. Nothing of it depends on any other query, nor on who does it: where queries are many, one program takes all chains of a query and
KV group; where they are few, one program takes one chain, and `merge_kernel` joins them by the same operations in the same order. Multiply and
add are never contracted, so that kernels for other formats of pages round alike.

A program has four warps, which share a block (`triton_msa_blocks`). Where it takes one chain, it first asks for all its blocks' pages
to come to the L2 cache.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .triton_msa_blocks import LANES, decode_keys, decode_values, load_keys, load_values, natural_output, prefetch
from .triton_msa_tiles import BF16, INTERPRETED, OPERAND, PAGE, key_of_label, label_query, unit

ROWS = tl.constexpr(16)  # rows of an MMA; the query heads of a group, at most


@triton.jit
def _finite(x):
    """0 for -inf, so that differences of what may both be -inf are no NaN."""
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
def _join(top, total, values, other_top, other_total, other_values):
    """Results of two sets of keys as one."""
    new_top = tl.maximum(top, other_top)
    share = tl.exp2(top - _finite(new_top))
    other_share = tl.exp2(other_top - _finite(new_top))
    total = total * share + other_total * other_share
    return new_top, total, values * share[:, None] + other_values * other_share[:, None]


@triton.jit
def _finish(top, total, values, FORMAT: tl.constexpr):
    """(output in the order of `natural_output`, log2 of the softmax's sum)."""
    inverse = tl.math.div_rn(tl.full(total.shape, 1.0, tl.float32) * unit(FORMAT), tl.where(total > 0, total, 1.0))
    lse = tl.where(total > 0, top + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
    return values * inverse[:, None], lse


@triton.jit
def _offset(table_ptr, block, page_stride, token_stride, PAGED: tl.constexpr):
    """Of a block, in elements; block -1 reads as 0."""
    block = tl.maximum(block, 0)
    if PAGED:
        return tl.load(table_ptr + block).to(tl.int64) * page_stride
    return (tl.load(table_ptr) + block * PAGE).to(tl.int64) * token_stride


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
    part_ptr,  # fp32 [T, G, TOPK / CHAIN, 16, 128]: weighted values of the chains, where they are programs of their own
    state_ptr,  # fp32 [T, G, TOPK / CHAIN, 2, 16]: their maxima and sums
    page_stride,
    token_stride,
    head_stride,
    table_stride,
    factor,  # softmax scale * log2(e) * unit of K
    G: tl.constexpr,
    HEADS: tl.constexpr,
    TOPK: tl.constexpr,
    CHAIN: tl.constexpr,
    SPLIT: tl.constexpr,  # a program takes one chain
    LSE: tl.constexpr,
    FORMAT: tl.constexpr,
    PAGED: tl.constexpr,
    FETCH: tl.constexpr,  # bytes of a block that each lane asks for
    AHEAD: tl.constexpr,  # V is loaded before there are scores
):
    """One query token and KV group, or one chain of it, a program."""
    if not INTERPRETED:
        gdc_wait()
    CHAINS: tl.constexpr = TOPK // CHAIN
    if SPLIT:
        program = tl.program_id(0).to(tl.int64)
        row, chain = program // CHAINS, (program % CHAINS).to(tl.int32)
        end_chain = chain + 1
        if not INTERPRETED:
            gdc_launch_dependents()
    else:
        row, chain, end_chain = tl.program_id(0).to(tl.int64), 0, CHAINS
    token, group = row // G, row % G
    chosen_ptr += row * TOPK
    position = tl.load(position_ptr + token)
    request = tl.load(request_ptr + token).to(tl.int64)
    table_ptr += request * table_stride if PAGED else request
    keys_ptr += group * head_stride
    values_ptr += group * head_stride
    if SPLIT and FETCH > 0:
        lane = tl.arange(0, LANES)
        wanted = tl.load(chosen_ptr + chain * CHAIN + lane * CHAIN // LANES)
        page = tl.load(table_ptr + tl.maximum(wanted, 0)).to(tl.int64)
        address = (keys_ptr + page * page_stride).to(tl.int64) + lane % (LANES // CHAIN) * FETCH
        prefetch(address, tl.where(wanted >= 0, FETCH, 0))
    head = tl.arange(0, ROWS)
    at = (row * HEADS + head)[:, None] * 128 + tl.arange(0, 128)[None, :]
    query = tl.load(query_ptr + at, mask=(head < HEADS)[:, None], other=0.0).to(OPERAND)
    query = label_query(query, ROWS, BF16)
    places = tl.sum((tl.load(chosen_ptr + tl.arange(0, TOPK)) >= 0).to(tl.int32), axis=0)

    all_top = tl.full([ROWS], float("-inf"), tl.float32)
    all_total = tl.zeros([ROWS], tl.float32)
    all_values = tl.zeros([ROWS, 128], tl.float32)
    while chain < end_chain:
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        values = tl.zeros([ROWS, 128], tl.float32)
        for place in range(chain * CHAIN, tl.minimum(chain * CHAIN + CHAIN, places)):
            block = tl.load(chosen_ptr + place)
            offset = _offset(table_ptr, block, page_stride, token_stride, PAGED)
            limit = position + 1 - block * PAGE
            x, raw = load_keys(keys_ptr + offset, limit, token_stride, FORMAT)
            if AHEAD:
                a, b, c, d, words = load_values(values_ptr + offset, limit, token_stride, FORMAT)
            scores = tl.dot(query, decode_keys(x, raw, FORMAT))
            scores = tl.where((key_of_label(PAGE) < limit)[None, :], scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, axis=1) * factor)
            origin = _finite(new_top)
            shrink = tl.exp2(top - origin)
            if not AHEAD:
                a, b, c, d, words = load_values(values_ptr + offset, limit, token_stride, FORMAT)
            weights = tl.exp2(tl.fma(scores, tl.zeros_like(scores) + factor, tl.broadcast_to(-origin[:, None], scores.shape)))
            total = total * shrink + tl.sum(weights, axis=1)
            values = tl.dot(weights.to(OPERAND), decode_values(a, b, c, d, words, FORMAT), values * shrink[:, None])
            top = new_top
        if SPLIT:
            all_top, all_total, all_values = top, total, values
        else:
            all_top, all_total, all_values = _join(all_top, all_total, all_values, top, total, values)
        chain += 1

    if SPLIT:
        state_ptr += tl.program_id(0).to(tl.int64) * 2 * ROWS
        tl.store(state_ptr + head, all_top)
        tl.store(state_ptr + ROWS + head, all_total)
        part_ptr += tl.program_id(0).to(tl.int64) * ROWS * 128
        tl.store(part_ptr + head[:, None] * 128 + tl.arange(0, 128)[None, :], all_values)
    else:
        out, lse = _finish(all_top, all_total, all_values, FORMAT)
        tl.store(out_ptr + at, natural_output(out, ROWS).to(out_ptr.dtype.element_ty), mask=(head < HEADS)[:, None])
        if LSE:
            tl.store(lse_ptr + row * HEADS + head, lse, mask=head < HEADS)


@triton.jit
def merge_kernel(
    part_ptr,  # as `attend_kernel` left them
    state_ptr,
    out_ptr,
    lse_ptr,
    HEADS: tl.constexpr,
    CHAINS: tl.constexpr,
    SHARE: tl.constexpr,  # heads of a program
    LSE: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Some heads of one query token and KV group a program."""
    if not INTERPRETED:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * SHARE + tl.arange(0, SHARE)
    dim = tl.arange(0, 128)
    state_ptr += row * CHAINS * 2 * ROWS
    part_ptr += row * CHAINS * ROWS * 128
    top = tl.full([SHARE], float("-inf"), tl.float32)
    total = tl.zeros([SHARE], tl.float32)
    values = tl.zeros([SHARE, 128], tl.float32)
    for chain in tl.static_range(CHAINS):
        other_top = tl.load(state_ptr + chain * 2 * ROWS + head)
        other_total = tl.load(state_ptr + (chain * 2 + 1) * ROWS + head)
        other = tl.load(part_ptr + (head + chain * ROWS)[:, None] * 128 + dim[None, :])
        top, total, values = _join(top, total, values, other_top, other_total, other)
    out, lse = _finish(top, total, values, FORMAT)
    at = (row * HEADS + head)[:, None] * 128 + dim[None, :]
    tl.store(out_ptr + at, natural_output(out, SHARE).to(out_ptr.dtype.element_ty), mask=(head < HEADS)[:, None])
    if LSE:
        tl.store(lse_ptr + row * HEADS + head, lse, mask=head < HEADS)

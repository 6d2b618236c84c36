"""MSA attention on CUDA, forward: a query's 16 heads of one KV group over its chosen blocks.

**One order.** Each chosen block has a result of its own: the maximum of its 128 scores, the sums of its weights, its weighted values.
The results of four neighbouring blocks are joined one after the other, and then those of such groups of blocks. Nothing of it depends on
any other query, nor on who does it: where queries are many, one program takes all blocks of a query and KV group; where they are fewer, a
program takes a group of blocks, or a single block, and `merge_kernel` does what is left by the same operations in the same order.
Multiply and add are never contracted, so that kernels for other formats of pages round alike.

Programs that take all blocks of a query go through the queries of one KV head before those of the next: 32768 bf16 keys and values of one
head are 16 MiB, of four more than the L2 cache of an H200.

A program has two warps, which share a block (`triton_msa_blocks`). Of NVFP4 pages, the next block's keys are loaded while the present one's
values are at work, from a place that was looked up while its keys were. To load its values ahead too took longer on an H200, in
decode and in prefill (commit cb2a716).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .triton_msa_blocks import PLACES, WARPS, decode_keys, decode_values, load_keys, load_values, natural_output
from .triton_msa_tiles import NVFP4, OPERAND, PAGE, key_of_label, label_query, value_weights
from .triton_target import has_ptx

ROWS = tl.constexpr(16)  # rows of an MMA; the query heads of a group, at most
SUMS = tl.constexpr(4 * WARPS.value)  # sums of a head's weights, one for each lane that has its scores
STATE = tl.constexpr(ROWS.value * (1 + SUMS.value))  # maxima and sums of a program


@triton.jit
def _finite(x):
    """0 for -inf, so that differences of what may both be -inf are no NaN."""
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
def _join(top, sums, values, other_top, other_sums, other_values):
    """Results of two sets of keys as one: maxima [ROWS], sums [ROWS, SUMS], weighted values [ROWS, 128]."""
    new_top = tl.maximum(top, other_top)
    share = tl.exp2(top - _finite(new_top))[:, None]
    other_share = tl.exp2(other_top - _finite(new_top))[:, None]
    return new_top, sums * share + other_sums * other_share, values * share + other_values * other_share


@triton.jit
def _added(x, N: tl.constexpr):
    """[ROWS, N] to [ROWS], neighbours first: in one order, wherever the elements are."""
    if N == 1:
        return tl.reshape(x, [x.shape[0]])
    else:
        a, b = tl.split(tl.reshape(x, [x.shape[0], N // 2, 2]))
        return _added(a + b, N // 2)


@triton.jit
def _finish(top, sums, values):
    """(output in the order of `natural_output`, log2 of the softmax's sum)."""
    total = _added(sums, SUMS)
    inverse = tl.math.div_rn(tl.full(total.shape, 1.0, tl.float32), tl.where(total > 0, total, 1.0))
    lse = tl.where(total > 0, top + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
    return values * inverse[:, None] + 0.0, lse  # 0.0 for -0.0, which an empty set of keys makes 0.0 when it is joined


@triton.jit
def _offset(table_ptr, block, page_stride, token_stride, PAGED: tl.constexpr):
    """Of a block, in elements; for -1 it is that of page 0, which can be read, or of the first keys, which are masked."""
    if PAGED:
        return tl.load(table_ptr + block, mask=block >= 0, other=0).to(tl.int64) * page_stride
    return (tl.load(table_ptr) + tl.maximum(block, 0) * PAGE).to(tl.int64) * token_stride


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
    part_ptr,  # fp32 [T, G, TOPK / UNIT, 16, 128]: weighted values of the programs, where a query has several
    state_ptr,  # fp32 [T, G, TOPK / UNIT, STATE]: their maxima [16] and sums [16, SUMS]
    page_stride,
    token_stride,
    head_stride,
    table_stride,
    factor,  # softmax scale * log2(e) * unit of K
    G: tl.constexpr,
    HEADS: tl.constexpr,
    TOPK: tl.constexpr,
    GROUP: tl.constexpr,  # blocks whose results are joined before others are
    UNIT: tl.constexpr,  # blocks of a program: 1, GROUP or TOPK
    LSE: tl.constexpr,
    FORMAT: tl.constexpr,
    PAGED: tl.constexpr,
    ROUNDED: tl.constexpr,  # NVFP4 is read as E4M3
    AHEAD: tl.constexpr,  # V is loaded before there are scores
):
    """One query token and KV group, or some blocks of it, a program."""
    if has_ptx():
        gdc_wait()
        if UNIT < TOPK:
            gdc_launch_dependents()
    program = tl.program_id(0).to(tl.int64)
    if UNIT < TOPK:
        row = program // (TOPK // UNIT)
        token, group = row // G, row % G
    else:
        # Of one KV head all queries, then of the next: what runs at a time reads the keys of one head, which stay in the L2 cache.
        tokens = tl.num_programs(0) // G
        token, group = program % tokens, program // tokens
        row = token * G + group
    first = (program % (TOPK // UNIT)).to(tl.int32) * UNIT
    chosen_ptr += row * TOPK
    position = tl.load(position_ptr + token)
    request = tl.load(request_ptr + token).to(tl.int64)
    table_ptr += request * table_stride if PAGED else request
    keys_ptr += group * head_stride
    values_ptr += group * head_stride
    block = tl.load(chosen_ptr + first)
    offset = _offset(table_ptr, block, page_stride, token_stride, PAGED)
    head = tl.arange(0, ROWS)
    at = (row * HEADS + head)[:, None] * 128 + tl.arange(0, 128)[None, :]
    query = tl.load(query_ptr + at, mask=(head < HEADS)[:, None], other=0.0).to(OPERAND)
    query = label_query(query, ROWS)
    places = tl.sum((tl.load(chosen_ptr + tl.arange(0, TOPK)) >= 0).to(tl.int32), axis=0)
    end = tl.minimum(first + UNIT, places)

    NEXT: tl.constexpr = UNIT > 1 and FORMAT == NVFP4  # bf16 rows would not fit into registers
    x, raw = load_keys(keys_ptr + offset, tl.where(first < end, position + 1 - block * PAGE, 0), token_stride, FORMAT)
    all_top = tl.full([ROWS], float("-inf"), tl.float32)
    all_sums = tl.zeros([ROWS, SUMS], tl.float32)
    all_values = tl.zeros([ROWS, 128], tl.float32)
    for group_first in range(first, first + UNIT, GROUP):
        top = tl.full([ROWS], float("-inf"), tl.float32)
        sums = tl.zeros([ROWS, SUMS], tl.float32)
        values = tl.zeros([ROWS, 128], tl.float32)
        for place in range(group_first, tl.minimum(group_first + GROUP, end)):
            if UNIT > 1 and not NEXT:
                block = tl.load(chosen_ptr + place)
                offset = _offset(table_ptr, block, page_stride, token_stride, PAGED)
                x, raw = load_keys(keys_ptr + offset, position + 1 - block * PAGE, token_stride, FORMAT)
            limit = position + 1 - block * PAGE
            if AHEAD:
                a, b, c, d, words = load_values(values_ptr + offset, limit, token_stride, FORMAT)
            if NEXT:
                # Asked for long before it is used: what is waited for holds up all that the warp has to do.
                following = tl.load(chosen_ptr + tl.minimum(place + 1, TOPK - 1))
                next_offset = _offset(table_ptr, following, page_stride, token_stride, PAGED)
            scores = tl.dot(query, decode_keys(x, raw, FORMAT, ROUNDED))
            if not AHEAD:
                a, b, c, d, words = load_values(values_ptr + offset, limit, token_stride, FORMAT)
            if NEXT and place + 1 < end:
                block, offset = following, next_offset
                x, raw = load_keys(keys_ptr + offset, position + 1 - block * PAGE, token_stride, FORMAT)
            if limit < PAGE:
                scores = tl.where((key_of_label(PAGE) < limit)[None, :], scores, float("-inf"))
            block_top = tl.max(scores, axis=1) * factor
            origin = -_finite(block_top)
            weights = tl.exp2(tl.fma(scores, tl.zeros_like(scores) + factor, tl.broadcast_to(origin[:, None], scores.shape)))
            # Of each lane: they need not meet before the end. Pairs, then a tree over the steps, said so: `tl.sum` of what a lane has is a
            # tree in some versions of Triton and one after the other in others.
            even, odd = tl.split(tl.reshape(weights, [ROWS, PLACES, SUMS, 2]))
            block_sums = tl.reshape(_added(tl.reshape(tl.permute(even + odd, [0, 2, 1]), [ROWS * SUMS, PLACES]), PLACES), [ROWS, SUMS])
            block_values = tl.dot(value_weights(weights, FORMAT), decode_values(a, b, c, d, words, FORMAT, ROUNDED))
            top, sums, values = _join(top, sums, values, block_top, block_sums, block_values)
        if UNIT < TOPK:
            all_top, all_sums, all_values = top, sums, values
        else:
            all_top, all_sums, all_values = _join(all_top, all_sums, all_values, top, sums, values)

    if UNIT < TOPK:
        state_ptr += program * STATE
        tl.store(state_ptr + head, all_top)
        tl.store(state_ptr + ROWS + head[:, None] * SUMS + tl.arange(0, SUMS)[None, :], all_sums)
        part_ptr += program * ROWS * 128
        tl.store(part_ptr + head[:, None] * 128 + tl.arange(0, 128)[None, :], all_values)
    else:
        out, lse = _finish(all_top, all_sums, all_values)
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
    GROUPS: tl.constexpr,  # of blocks of a query
    PARTS: tl.constexpr,  # of a group
    SHARE: tl.constexpr,  # heads of a program
    LSE: tl.constexpr,
):
    """Some heads of one query token and KV group a program."""
    if has_ptx():
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * SHARE + tl.arange(0, SHARE)
    dim = tl.arange(0, 128)
    state_ptr += row * GROUPS * PARTS * STATE
    part_ptr += (row * GROUPS * PARTS * ROWS + head[:, None]) * 128 + dim[None, :]
    # All is asked for before any of it is used: one wait for memory instead of one for each part.
    tops, sums_of, values_of = (), (), ()
    for place in tl.static_range(GROUPS * PARTS):
        tops += (tl.load(state_ptr + place * STATE + head),)
        sums_of += (tl.load(state_ptr + place * STATE + ROWS + head[:, None] * SUMS + tl.arange(0, SUMS)[None, :]),)
        values_of += (tl.load(part_ptr + place * ROWS * 128),)
    all_top = tl.full([SHARE], float("-inf"), tl.float32)
    all_sums = tl.zeros([SHARE, SUMS], tl.float32)
    all_values = tl.zeros([SHARE, 128], tl.float32)
    for group in tl.static_range(GROUPS):
        if PARTS == 1:
            top, sums, values = tops[group], sums_of[group], values_of[group]
        else:
            top = tl.full([SHARE], float("-inf"), tl.float32)
            sums = tl.zeros([SHARE, SUMS], tl.float32)
            values = tl.zeros([SHARE, 128], tl.float32)
            for part in tl.static_range(group * PARTS, group * PARTS + PARTS):
                top, sums, values = _join(top, sums, values, tops[part], sums_of[part], values_of[part])
        all_top, all_sums, all_values = _join(all_top, all_sums, all_values, top, sums, values)
    out, lse = _finish(all_top, all_sums, all_values)
    at = (row * HEADS + head)[:, None] * 128 + dim[None, :]
    tl.store(out_ptr + at, natural_output(out, SHARE).to(out_ptr.dtype.element_ty), mask=(head < HEADS)[:, None])
    if LSE:
        tl.store(lse_ptr + row * HEADS + head, lse, mask=head < HEADS)

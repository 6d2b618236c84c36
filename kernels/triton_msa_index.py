"""The MSA indexer on CUDA: scores of every block of 128 keys, and the exact top 16 of them.

**Scores.** A program of one warp takes some tokens of one request (their index heads are the columns of its MMAs) and every n-th block of
the context: keys come from their page into registers, become bf16 there (`triton_msa_tiles`), and only the maximum of a block leaves. A
score is a function of one key block and one query, so neither the number of programs nor the other queries change a bit of it.
The next tile is loaded before the present one is decoded, and page ids two blocks ahead.

**Choice.** One program a query and head. Scores become integers that order as they do, and bisection, by counting, finds a value that
exactly 16 blocks reach, or the 16th largest itself where several are equal to it: of those the lowest ids are taken. A running count
puts the chosen in ascending order. Nothing is sorted. Equal scores (-0.0 and 0.0 are equal) go to the lower block, as in
`kernels.msa.select_blocks`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .triton_msa_tiles import OPERAND, PAGE, decode_keys, label_query, load_index_keys, unit
from .triton_target import has_ptx


@triton.jit
def _block_base(keys_ptr, table_ptr, first_token, page_stride, token_stride, block, last, PAGED: tl.constexpr):
    """Address of a block's keys; `block` beyond `last` reads as `last`, so that loads ahead of the loop stay inside."""
    block = tl.minimum(block, last)
    if PAGED:
        return keys_ptr + tl.load(table_ptr + block).to(tl.int64) * page_stride
    return keys_ptr + (first_token + block * PAGE).to(tl.int64) * token_stride


@triton.jit
def score_kernel(
    query_ptr,  # [T, G, 128]
    keys_ptr,
    table_ptr,  # int32 [R, table_stride] page ids, or [R] first tokens of contiguous keys
    start_ptr,  # int32 [R + 1] first token of each request
    position_ptr,  # int32 [T], -1 for padding
    scores_ptr,  # fp32 [T, G, blocks]
    page_stride,
    token_stride,
    table_stride,
    blocks,
    one,
    G: tl.constexpr,
    TOKENS: tl.constexpr,
    N: tl.constexpr,  # TOKENS * G, at least 8
    KEYS: tl.constexpr,  # keys of a tile
    FORMAT: tl.constexpr,
    PAGED: tl.constexpr,
    ROUNDED: tl.constexpr,  # NVFP4 is read as E4M3
):
    """Scores of some tokens of a request and every n-th block; program (share of the blocks, request, tile of tokens)."""
    if has_ptx():
        gdc_wait()
        gdc_launch_dependents()
    split, splits = tl.program_id(0), tl.num_programs(0)
    request = tl.program_id(1)
    column = tl.arange(0, N)
    token = tl.load(start_ptr + request) + tl.program_id(2) * TOKENS + column // G
    inside = (token < tl.load(start_ptr + request + 1)) & (column < TOKENS * G)
    position = tl.load(position_ptr + token, mask=inside, other=-1)
    newest = tl.max(position, axis=0)
    # The oldest query of the tile says from which block on a mask is needed.
    oldest = tl.min(tl.where(inside, position, 0x7FFFFFFF), axis=0)
    last = newest // PAGE  # floor towards zero is no matter: nothing is done for newest = -1
    if (newest >= 0) & (split <= last):
        rows = (token * G + column % G).to(tl.int64)
        at = rows[:, None] * 128 + tl.arange(0, 128)[None, :]
        query = tl.load(query_ptr + at, mask=inside[:, None], other=0.0).to(OPERAND)
        query = tl.trans(label_query(query, N))
        first_token = 0
        if PAGED:
            table_ptr += request.to(tl.int64) * table_stride
        else:
            first_token = tl.load(table_ptr + request)
        base = _block_base(keys_ptr, table_ptr, first_token, page_stride, token_stride, split, last, PAGED)
        following = _block_base(keys_ptr, table_ptr, first_token, page_stride, token_stride, split + splits, last, PAGED)
        limit = newest + 1 - split * PAGE
        x, raw = load_index_keys(base, 0, limit, one, token_stride, KEYS, FORMAT, not PAGED)
        for block in range(split, last + 1, splits):
            later = _block_base(keys_ptr, table_ptr, first_token, page_stride, token_stride, block + 2 * splits, last, PAGED)
            best = tl.full([KEYS, N], float("-inf"), tl.float32)
            for part in tl.static_range(PAGE // KEYS):
                if part + 1 < PAGE // KEYS:
                    ahead, begin, limit = base, (part + 1) * KEYS, newest + 1 - block * PAGE
                else:
                    ahead, begin, limit = following, 0, newest + 1 - tl.minimum(block + splits, last) * PAGE
                x_ahead, raw_ahead = load_index_keys(ahead, begin, limit, one, token_stride, KEYS, FORMAT, not PAGED)
                score = tl.dot(decode_keys(x, raw, KEYS, FORMAT, ROUNDED), query)
                if block * PAGE + (PAGE - 1) > oldest:
                    key = block * PAGE + part * KEYS + tl.arange(0, KEYS)
                    score = tl.where(key[:, None] <= position[None, :], score, float("-inf"))
                best = tl.maximum(best, score)
                x, raw = x_ahead, raw_ahead
            base, following = following, later
            tl.store(scores_ptr + rows * blocks + block, tl.max(best, axis=0) * unit(FORMAT), mask=inside)


@triton.jit
def _order(score):
    """uint32 that orders as fp32 scores do, -0.0 as 0.0; 0 is below every number."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits | -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def choose_kernel(
    scores_ptr,  # fp32 [T, G, blocks]
    position_ptr,  # int32 [T]
    chosen_ptr,  # int32 [T, G, TOPK]
    blocks,
    G: tl.constexpr,
    TOPK: tl.constexpr,
    INIT: tl.constexpr,
    LOCAL: tl.constexpr,
    SIZE: tl.constexpr,  # power of two, at least `blocks`
):
    """Choice of one query and index head a program."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, SIZE)
    if has_ptx():
        gdc_wait()
        gdc_launch_dependents()
    score = tl.load(scores_ptr + row * blocks + block, mask=block < blocks, other=float("-inf"))  # beyond `own`: never written
    position = tl.load(position_ptr + row // G)
    own = tl.where(position < 0, -1, position // 128)
    if INIT > 0:
        score = tl.where(block < INIT, 1e30, score)
    score = tl.where(block > own - LOCAL, 1e29, score)
    order = tl.where((block <= own) & (score > float("-inf")), _order(score), 0)
    # Bisection for the TOPK-th largest: at least TOPK blocks reach `low`, fewer reach `high`. Of any TOPK groups of blocks each has one
    # that reaches the smallest of their maxima. Where all blocks fit, every one is chosen.
    groups = tl.max(tl.reshape(order, [TOPK, SIZE // TOPK]), axis=1)
    low = tl.min(groups, axis=0)
    if INIT + LOCAL < TOPK:
        free = tl.where((block >= INIT) & (block <= own - LOCAL), order, 0)
        high = tl.maximum(tl.max(free, axis=0), low) + 1
    else:
        high = tl.max(groups, axis=0) + 1
    reached = tl.sum((order >= low).to(tl.int32), axis=0)
    if own < TOPK:
        low, high, reached = tl.full([], 1, tl.uint32), tl.full([], 1, tl.uint32), TOPK
    while (reached != TOPK) & (high - low > 1):
        middle = low + (high - low) // 2
        count = tl.sum((order >= middle).to(tl.int32), axis=0)
        enough = count >= TOPK
        low, reached, high = tl.where(enough, middle, low), tl.where(enough, count, reached), tl.where(enough, high, middle)
    chosen = order >= low
    if reached != TOPK:
        above = order > low
        equal = order == low
        room = TOPK - tl.sum(above.to(tl.int32), axis=0)
        chosen = above | (equal & (tl.cumsum(equal.to(tl.int32), axis=0) <= room))
    place = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    tl.store(chosen_ptr + row * TOPK + place, block, mask=chosen)
    slot = tl.arange(0, TOPK)
    tl.store(chosen_ptr + row * TOPK + slot, tl.full([TOPK], -1, tl.int32), mask=slot > own)

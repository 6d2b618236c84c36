"""Choice of KV blocks where the index keys are spread over ranks, in Triton: candidates, their exchange, their merge.

A candidate is one word that orders as the choice does: the score's order in bits 22 to 53, below it the block id counted from the end,
so that of equal scores the lower block is the larger word. A rank's best 16 blocks go to all ranks, and the best 16 of all candidates
are the best 16 of all blocks, because words never tie.

Over peer memory all three steps are one kernel. A word carries a tag of its call in bits 54 to 62, so that a word is its own flag: the
reader waits until all it needs carry the tag, and nothing else is sent or waited for (8 bytes are stored and loaded whole). Calls
alternate between two inboxes; a rank that writes to one again has read an answer which its peers sent after they had read that inbox.
Words of a rank that is gone never come: after `peer_memory.PATIENCE_S` the reader traps, which ends its process with an error of CUDA.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer

from .peer_memory import PATIENCE_S
from .triton_target import has_ptx

PATIENCE = tl.constexpr(PATIENCE_S * 10**9)
ID_BITS = tl.constexpr(22)
LAST_ID = tl.constexpr((1 << 22) - 1)
TAG_AT = tl.constexpr(54)
CALLS = tl.constexpr(1000)  # after which the count of calls begins again; even, and the tags of half as many are apart


@triton.jit
def _order(score):
    """uint32 that orders as fp32 scores do, -0.0 as 0.0; 0 is below every number."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits | -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def _best(order, free, TOPK: tl.constexpr, FORCED: tl.constexpr, SIZE: tl.constexpr):
    """Which TOPK entries of `order` are largest, the first of equal ones; those that are not 0 where they are fewer.

    free: `order` without the at most FORCED entries that are forced. Bisection by counting, as in `triton_msa_index`.
    """
    groups = tl.max(tl.reshape(order, [TOPK, SIZE // TOPK]), axis=1)
    low = tl.min(groups, axis=0)
    if FORCED < TOPK:  # noqa: SIM108
        high = tl.maximum(tl.max(free, axis=0), low) + 1
    else:
        high = tl.max(groups, axis=0) + 1
    reached = tl.sum((order >= low).to(tl.int32), axis=0)
    if tl.sum((order > 0).to(tl.int32), axis=0) <= TOPK:
        low, high, reached = tl.full([], 1, tl.uint32), tl.full([], 1, tl.uint32), TOPK
    while (reached != TOPK) & (high - low > 1):
        middle = low + (high - low) // 2
        count = tl.sum((order >= middle).to(tl.int32), axis=0)
        enough = count >= TOPK
        low, reached, high = tl.where(enough, middle, low), tl.where(enough, count, reached), tl.where(enough, high, middle)
    chosen = order >= low
    if reached != TOPK:
        equal = order == low
        room = TOPK - tl.sum((order > low).to(tl.int32), axis=0)
        chosen = (order > low) | (equal & (tl.cumsum(equal.to(tl.int32), axis=0) <= room))
    return chosen


@triton.jit
def _give_up_after(began):
    """Trap where the words that began to be waited for at `began` (ns) should have come long ago."""
    if globaltimer() - began > PATIENCE:
        tl.inline_asm_elementwise("trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def exchange_kernel(
    scores_ptr,  # fp32 [T, G, blocks], of this rank's blocks
    position_ptr,  # int32 [T], in the whole context; -1 for padding
    inboxes_ptr,  # int64 [TARGETS], addresses of int64 [2, WORLD, room, TOPK]
    inbox_ptr,  # this rank's
    calls_ptr,  # int32 [room], how often each row was exchanged
    chosen_ptr,  # int32 [T, G, TOPK]
    blocks,
    rank,
    room,
    G: tl.constexpr,
    WORLD: tl.constexpr,
    TARGETS: tl.constexpr,
    TOPK: tl.constexpr,
    INIT: tl.constexpr,
    LOCAL: tl.constexpr,
    SIZE: tl.constexpr,  # power of two, at least `blocks` and 2 TOPK
    CANDIDATES: tl.constexpr,  # power of two, at least WORLD * TOPK
    SEND: tl.constexpr,
    MERGE: tl.constexpr,
    TAGGED: tl.constexpr,
):
    """One query and index head a program. Block j of this rank is block j * WORLD + rank of the context."""
    row = tl.program_id(0).to(tl.int64)
    if has_ptx():
        gdc_wait()
        gdc_launch_dependents()
    call, tag = tl.full([], 0, tl.int32), tl.full([], 0, tl.int64)
    if TAGGED:
        call = tl.load(calls_ptr + row)
        tag = (1 + call % (CALLS // 2)).to(tl.int64)
    half = (call % 2).to(tl.int64) * WORLD
    if SEND:
        j = tl.arange(0, SIZE)
        block = j * WORLD + rank
        score = tl.load(scores_ptr + row * blocks + j, mask=j < blocks, other=float("-inf"))
        position = tl.load(position_ptr + row // G)
        own = tl.where(position < 0, -1, position // 128)
        seen = (block <= own) & (j < blocks) & ((score > float("-inf")) | (block < INIT) | (block > own - LOCAL))
        if INIT > 0:
            score = tl.where(block < INIT, 1e30, score)
        score = tl.where(block > own - LOCAL, 1e29, score)
        order = tl.where(seen, _order(score), 0)
        free = tl.where((block >= INIT) & (block <= own - LOCAL), order, 0)
        chosen = _best(order, free, TOPK, INIT + LOCAL, SIZE)
        words = (tag << TAG_AT) | (order.to(tl.int64) << ID_BITS) | (block ^ LAST_ID).to(tl.int64)
        place = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
        slot = tl.arange(0, TOPK)
        count = tl.sum(chosen.to(tl.int32), axis=0)
        at = ((half + rank) * room + row) * TOPK
        for target in tl.static_range(TARGETS):
            there = tl.load(inboxes_ptr + target).to(tl.pointer_type(tl.int64)) + at
            tl.store(there + place, words, mask=chosen)
            tl.store(there + slot, tl.full([TOPK], 0, tl.int64) + (tag << TAG_AT), mask=slot >= count)
    if MERGE:
        i = tl.arange(0, CANDIDATES)
        mask = i < WORLD * TOPK
        here = inbox_ptr + ((half + i // TOPK) * room + row) * TOPK + i % TOPK
        words = tl.load(here, mask=mask, other=0, volatile=True)
        if TAGGED:
            began = tl.full([], 0, tl.int64)
            if has_ptx():
                began = globaltimer()
            while tl.min(((words >> TAG_AT == tag) | (i >= WORLD * TOPK)).to(tl.int32), axis=0) == 0:
                words = tl.load(here, mask=mask, other=0, volatile=True)
                if has_ptx():
                    _give_up_after(began)
            words -= tl.where(mask, tag << TAG_AT, 0)
            tl.store(calls_ptr + row, (call + 1) % CALLS)
        larger = tl.sum((words[None, :] > words[:, None]).to(tl.int32), axis=1)
        chosen = (larger < TOPK) & (words > 0)
        block = tl.where(chosen, (words & LAST_ID).to(tl.int32) ^ LAST_ID, 0x7FFFFFFF)
        place = tl.sum((block[None, :] < block[:, None]).to(tl.int32), axis=1)
        tl.store(chosen_ptr + row * TOPK + place, block, mask=chosen)
        slot = tl.arange(0, TOPK)
        count = tl.sum(chosen.to(tl.int32), axis=0)
        tl.store(chosen_ptr + row * TOPK + slot, tl.full([TOPK], -1, tl.int32), mask=slot >= count)

"""A block of K and V for the two warps of an attention program, from pages straight into the registers of the tensor cores.

As in `triton_msa_tiles`, whose decoding and labels these are, every lane loads what the MMAs want of it, and codes become bf16 in the
registers they were loaded into. Here the warps share a block. Of the scores, a warp makes the keys of labels 16 r + 8 w .. + 7 (its
n-tiles, as Triton deals them out). Of the output it makes 64 dimensions, and lane (g, t) of it eight neighbouring ones, of the four keys
of token quad t: 4, 8 or 16 bytes of V a key, and one scale for each key. The weights go from one to the other through shared memory.

Only bf16 rows are masked: they may lie outside of the tensor, or be NaN. Bytes of pages always are some finite number, and the weight of a
key that the query does not see is zero.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_msa_tiles import (
    FP8,
    NVFP4,
    OPERAND,
    PAGE,
    block_scales,
    byte_scales,
    decoded_keys,
    e4m3_bytes,
    finite,
    halves,
    key_order,
    nibbles,
    rounded,
    settle,
)

WARPS = tl.constexpr(2)  # of a program
LANES = tl.constexpr(32 * WARPS.value)
PLACES = tl.constexpr(16 // WARPS.value)  # dimensions of V of a lane; n-tiles of a warp
QUADS = tl.constexpr(8 * LANES.value)  # rows of V of which a lane loads a key each: 8 steps of 16 keys, warp, g, t


@triton.jit
def load_keys(base, limit, token_stride, FORMAT: tl.constexpr):
    """Raw bits of a block's 128 keys in the order of `key_order`: (words or elements [lanes, vector], scale words, or anything).

    Args:
        base: pointer to the block, of one head. limit: keys from here on may not exist.
    """
    PARTS: tl.constexpr = 1 if FORMAT == NVFP4 else (2 if FORMAT == FP8 else 4)
    row = tl.arange(0, PAGE * 4 * PARTS)  # rep, part, warp, g, t
    # The part of an address that depends on the lane comes first, so that the rest, a constant of a register, goes into the instruction.
    lane, rep, part = key_order(row % LANES // 4), row // (LANES * PARTS) * (8 * WARPS), row // LANES % PARTS
    t = row % 4
    if FORMAT == NVFP4:
        words = base.to(tl.pointer_type(tl.int32))
        x = tl.load((words + (lane * 16 + t * 4) + rep * 16)[:, None] + tl.arange(0, 4)[None, :])
        # The word that holds a lane's two scale bytes. Nothing is done to it here: a load that is used at once is waited for at once.
        raw = tl.load(words + (lane * 2 + t // 2) + (PAGE * 16 + rep * 2))
    elif FORMAT == FP8:
        words = base.to(tl.pointer_type(tl.int32)) + (lane * token_stride // 4 + t * 8) + (rep * token_stride // 4 + part * 4)
        x = tl.load(words[:, None] + tl.arange(0, 4)[None, :])
        raw = row
    else:
        rows = base + (lane * token_stride + t * 32) + (rep * token_stride + part * 8)
        x = tl.load(rows[:, None] + tl.arange(0, 8)[None, :], mask=(lane + rep < limit)[:, None], other=0)
        raw = row
    return x, raw


@triton.jit
def decode_keys(x, raw, FORMAT: tl.constexpr, ROUNDED: tl.constexpr):
    """Operand [128 dimensions in the order of labels, 128 keys]."""
    if FORMAT == NVFP4:
        raw = raw >> (tl.arange(0, PAGE * 4) % 2 * 16)  # rows of (rep, warp, g, t): the lane's half of its word
    tile = decoded_keys(x, raw, WARPS, PAGE // WARPS, FORMAT, ROUNDED)  # rep, warp, g, t, w, h, i1, i0
    # Turned around at once: `tl.trans` after it would send the tile through shared memory.
    return settle(tl.reshape(tl.permute(tile, [4, 6, 7, 3, 5, 0, 1, 2]), [128, PAGE]))


@triton.jit
def load_values(base, limit, token_stride, FORMAT: tl.constexpr):
    """Raw bits of a block's 128 values: the four keys of the token quads apart, and scale words (or anything)."""
    row = tl.arange(0, QUADS)  # step, warp, g, t
    step, part, t = row // LANES, row % LANES // 4, row % 4  # 16 keys; PLACES dimensions
    if FORMAT == NVFP4:
        NEXT: tl.constexpr = 64 // (PLACES // 2)  # codes of a lane are a 16-bit or 32-bit word
        codes = base.to(tl.pointer_type(tl.int16 if PLACES == 4 else tl.int32)) + (t * 4 * NEXT + part) + step * 16 * NEXT
        scales = tl.load(base.to(tl.pointer_type(tl.int32)) + (t * 8 + part * PLACES // 16) + (PAGE * 16 + step * 32))
        return tl.load(codes), tl.load(codes + NEXT), tl.load(codes + 2 * NEXT), tl.load(codes + 3 * NEXT), scales
    elif FORMAT == FP8:
        words = base.to(tl.pointer_type(tl.int32)) + (t * token_stride + part * (PLACES // 4)) + step * 4 * token_stride
        words = words[:, None] + tl.arange(0, PLACES // 4)[None, :]
        next = token_stride // 4
        return tl.load(words), tl.load(words + next), tl.load(words + next * 2), tl.load(words + next * 3), row
    else:
        rows = base + (t * 4 * token_stride + part * PLACES) + step * 16 * token_stride
        rows = rows[:, None] + tl.arange(0, PLACES)[None, :]
        left = limit - (step * 16 + t * 4)
        a = tl.load(rows, mask=(left > 0)[:, None], other=0)
        b = tl.load(rows + token_stride, mask=(left > 1)[:, None], other=0)
        c = tl.load(rows + token_stride * 2, mask=(left > 2)[:, None], other=0)
        d = tl.load(rows + token_stride * 3, mask=(left > 3)[:, None], other=0)
        return a, b, c, d, row


@triton.jit
def decode_values(a, b, c, d, words, FORMAT: tl.constexpr, ROUNDED: tl.constexpr):
    """Operand [128 keys in the order of labels, 128 dimensions in the order of `natural_output`]."""
    tile = tl.join(_value_pair(a, b, words, 0, FORMAT, ROUNDED), _value_pair(c, d, words, 2, FORMAT, ROUNDED))
    tile = tl.reshape(tile, [PAGE // 16, WARPS, 8, 4, PLACES, 2, 2])  # step, warp, g, t, place, pair, b3
    return settle(tl.reshape(tl.permute(tile, [0, 6, 3, 5, 4, 1, 2]), [PAGE, 128]))


@triton.jit
def _value_pair(a, b, words, FIRST: tl.constexpr, FORMAT: tl.constexpr, ROUNDED: tl.constexpr):
    """Two neighbouring keys of each quad, from key FIRST of it: [lanes, PLACES, 2]."""
    if FORMAT == NVFP4:
        place = tl.broadcast_to(tl.arange(0, 2)[None, :] + FIRST, [QUADS, 2])
        words = tl.broadcast_to(words[:, None], [QUADS, 2])
        scales = block_scales(finite(words >> (place * 8))) if ROUNDED else byte_scales(words, place)
        if PLACES == 4:
            pair = nibbles(tl.join(a, b), scales)  # [lanes, 2 keys, 2 i1, 2 i0]
        else:
            scales = tl.broadcast_to(scales[:, None, :], [QUADS, 2, 2])
            pair = nibbles(tl.join(halves(a), halves(b)), scales)  # [lanes, 2 halves, 2 keys, 2 i1, 2 i0]
        if ROUNDED:
            pair = rounded(pair)
        pair = tl.permute(tl.reshape(pair, [QUADS, PLACES // 4, 2, 4]), [0, 1, 3, 2])
    elif FORMAT == FP8:
        pair = e4m3_bytes(tl.join(a, b))  # [lanes, words, 2 keys, 2 i1, 2 i0]
        pair = tl.permute(tl.reshape(pair, [QUADS, PLACES // 4, 2, 4]), [0, 1, 3, 2])
    else:
        pair = tl.join(a.to(OPERAND), b.to(OPERAND))
    return tl.reshape(pair, [QUADS, PLACES, 2])


@triton.jit
def natural_output(x, ROWS: tl.constexpr):
    """[ROWS, 128 dimensions as `decode_values` has them] to their natural order."""
    return tl.reshape(tl.permute(tl.reshape(x, [ROWS, PLACES, 8 * WARPS]), [0, 2, 1]), [ROWS, 128])

"""Tiles of K, V and index keys, from pages straight into the registers of the tensor cores: what all MSA kernels share.

Every tile of a warp is loaded so that each lane already holds the elements that `mma.m16n8k16` wants of it: none moves between lanes,
and NVFP4 codes become bf16 in the registers they were loaded into. Some ideas make that possible.

**Labels.** A sum does not care how its terms are numbered, as long as both operands agree. Lane (g, t) of an MMA (g = lane / 4,
t = lane % 4) holds four of the sixteen k's of a step, for row or column g. Along the head dimension lane t is given the 32 dimensions from
32 t: two NVFP4 groups, 16 bytes of codes. Dimension 32 t + 8 w + 4 h + 2 i1 + i0 takes part in step 2 w + i1, in register i0, as half h:
a 32-bit word of eight codes then makes the pairs (code i, code i + 4) that sit 16 bits apart. bf16 and fp8 keys take the same
places, so that a dot product is the same sum in the same order whatever the page's format.

**Runs.** Triton numbers the k's of a lane in runs of two or four, by what it sees behind an operand: four where tensors were joined. The
fragments of the other operand then lie apart and must be put together anew for every MMA. `settle` keeps it from seeing, so that they are
runs of two, whatever the format. (With other runs results would stay right, but be moved through shared memory.)

**Rows.** A two-dimensional load [rows, V] with V contiguous elements is laid out by Triton as V elements a lane and rows across lanes, in
order. Which address a row means is free arithmetic, so rows are counted as lanes are: t fastest, then g.

**Decode.** An E2M1 code, moved to where bf16 has its sign, the two low bits of its exponent and the top bit of its fraction, is its value
times 2^-126, subnormal included; one exact multiply by the block scale times 2^119 leaves value * 2^-7, which has at most six
significant bits and lies between 2^-17 and 21. Moving costs one AND, one multiply (two shifts at once), one AND for two codes.
The factor 2^7 (`unit`) is given back before any sum can leave fp32's normal numbers, where a power of two would change what is lost: to
scores as they are scaled, and to values by the weights that they are multiplied by (`value_weights`).

Where there is no PTX (`triton_target`) values are decoded in fp32, in which they are exact, and cast; what goes where stays the same.

Keys that a query does not see may read as anything: their scores are masked.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_target import INTERPRETED as INTERPRETED
from .triton_target import OPERAND, has_ptx

BF16, FP8, NVFP4 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
PAGE = tl.constexpr(128)  # keys of a block, and of a page

_E2M1_ASM = tl.constexpr("""{
.reg .b32 high, c;
shr.u32 high, $4, 8;
and.b32 c, $4, 0x000F000F;
mul.lo.u32 c, c, 0x1040;
and.b32 c, c, 0x81C081C0;
mul.rn.bf16x2 $0, c, $5;
and.b32 c, $4, 0x00F000F0;
mul.lo.u32 c, c, 0x104;
and.b32 c, c, 0x81C081C0;
mul.rn.bf16x2 $1, c, $5;
and.b32 c, high, 0x000F000F;
mul.lo.u32 c, c, 0x1040;
and.b32 c, c, 0x81C081C0;
mul.rn.bf16x2 $2, c, $5;
and.b32 c, high, 0x00F000F0;
mul.lo.u32 c, c, 0x104;
and.b32 c, c, 0x81C081C0;
mul.rn.bf16x2 $3, c, $5;
}""")
SCALE_COPIES, SCALE_BITS = tl.constexpr(0x1010), tl.constexpr(0x07F007F0)
# E4M3 bits four places up are bf16 bits of value * 2^-120; 2^239, in two steps, makes them value * 2^119.
_SCALE_ASM = tl.constexpr("""{
.reg .b32 c, k;
mov.b32 k, 0x7B807B80;
mul.rn.bf16x2 c, $1, k;
mov.b32 k, 0x7B007B00;
mul.rn.bf16x2 $0, c, k;
}""")
# The same from one byte of each of two words, which $3 and $4 say (0 to 3).
_BYTE_SCALE_ASM = tl.constexpr("""{
.reg .b32 c, k;
shl.b32 k, $4, 8;
add.u32 k, k, $3;
add.u32 k, k, 0x0400;
prmt.b32 c, $1, $2, k;
and.b32 c, c, 0x007F007F;
shl.b32 c, c, 4;
mov.b32 k, 0x7B807B80;
mul.rn.bf16x2 c, c, k;
mov.b32 k, 0x7B007B00;
mul.rn.bf16x2 $0, c, k;
}""")
_E4M3_ASM = tl.constexpr("""{
.reg .b32 c, s, k;
mov.b32 k, 0x7B807B80;
prmt.b32 c, $4, $5, 0x4400;
shr.u32 s, c, 4;
and.b32 s, s, 0x07F007F0;
and.b32 c, c, 0x80008000;
or.b32 c, c, s;
mul.rn.bf16x2 $0, c, k;
prmt.b32 c, $4, $5, 0x5511;
shr.u32 s, c, 4;
and.b32 s, s, 0x07F007F0;
and.b32 c, c, 0x80008000;
or.b32 c, c, s;
mul.rn.bf16x2 $1, c, k;
prmt.b32 c, $4, $5, 0x6622;
shr.u32 s, c, 4;
and.b32 s, s, 0x07F007F0;
and.b32 c, c, 0x80008000;
or.b32 c, c, s;
mul.rn.bf16x2 $2, c, k;
prmt.b32 c, $4, $5, 0x7733;
shr.u32 s, c, 4;
and.b32 s, s, 0x07F007F0;
and.b32 c, c, 0x80008000;
or.b32 c, c, s;
mul.rn.bf16x2 $3, c, k;
}""")
# bf16 values * 2^-7 rounded to E4M3 (to nearest even, saturating), as values * 2^-7 again.
_ROUND_ASM = tl.constexpr("""{
.reg .b32 l, h, s;
.reg .b16 e;
shl.b32 l, $1, 16;
and.b32 h, $1, 0xFFFF0000;
mul.rn.f32 l, l, 0f43000000;
mul.rn.f32 h, h, 0f43000000;
cvt.rn.satfinite.e4m3x2.f32 e, h, l;
cvt.u32.u16 h, e;
prmt.b32 h, h, h, 0x1100;
shr.u32 s, h, 4;
and.b32 s, s, 0x07F007F0;
and.b32 h, h, 0x80008000;
or.b32 h, h, s;
mov.b32 s, 0x78007800;
mul.rn.bf16x2 $0, h, s;
}""")
# Two bf16 numbers times 2^7.
_UNIT_ASM = tl.constexpr("""{
.reg .b32 k;
mov.b32 k, 0x43004300;
mul.rn.bf16x2 $0, $1, k;
}""")


@triton.jit
def unit(FORMAT: tl.constexpr):
    """What a decoded tile must be multiplied by to be the values."""
    return 128.0 if FORMAT == NVFP4 else 1.0


@triton.jit
def value_weights(weights, FORMAT: tl.constexpr):
    """fp32 weights, none above 1, as operand: times what makes the product with a decoded tile of values that with the values.

    Such a product is the same number in every format. Times 2^-7, that of a weight of 2^-120 would lose bits that other formats keep.
    """
    if FORMAT != NVFP4:
        return weights.to(OPERAND)
    elif not has_ptx():
        return (weights.to(OPERAND).to(tl.float32) * 128.0).to(OPERAND)
    else:
        return tl.inline_asm_elementwise(_UNIT_ASM, "=r,r", [weights.to(OPERAND)], dtype=tl.bfloat16, is_pure=True, pack=2)


@triton.jit
def e4m3_fp32(bits):
    """fp32 value of E4M3 bits (int32) without NaN."""
    magnitude = bits & 0x7F
    normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
    return tl.where(bits > 0x7F, -value, value)


@triton.jit
def e2m1_fp32(code):
    """fp32 value of E2M1 codes (int32, 0..15)."""
    magnitude = code & 7
    normal = ((magnitude << 22) + (126 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 2, magnitude.to(tl.float32) * 0.5, normal)
    return tl.where(code > 7, -value, value)


@triton.jit
def block_scales(bits):
    """Operand values of E4M3 scales (int32 bits, sign ignored; NaN reads as 480), times 2^119; without PTX in fp32 and times 2^-7."""
    if not has_ptx():
        return e4m3_fp32(bits & 0x7F) * 0.0078125
    else:
        raw = ((bits & 0x7F) << 4).to(tl.int16).to(tl.bfloat16, bitcast=True)
        return tl.inline_asm_elementwise(_SCALE_ASM, "=r,r", [raw], dtype=tl.bfloat16, is_pure=True, pack=2)


@triton.jit
def key_scales(raw, ROUNDED: tl.constexpr):
    """`block_scales` of the two low bytes of int32 `raw` [..]: [.., 2]. Beside a sign, which no scale has, the second may be any number."""
    if ROUNDED or not has_ptx():
        first, second = raw & 0xFF, (raw >> 8) & 0xFF
        if ROUNDED:
            first, second = finite(first), finite(second)
        return block_scales(tl.join(first, second))
    else:
        # Both at once: the first from one copy, the second from the other; what the copies add up to between them is cut out.
        pair = halves(((raw & 0xFFFF) * SCALE_COPIES) & SCALE_BITS)
        return tl.inline_asm_elementwise(_SCALE_ASM, "=r,r", [pair.to(tl.bfloat16, bitcast=True)], dtype=tl.bfloat16, is_pure=True, pack=2)


@triton.jit
def byte_scales(words, place):
    """`block_scales` of byte `place` (int32, 0 to 3) of int32 words."""
    if not has_ptx():
        return block_scales((words >> (place * 8)) & 0xFF)
    else:
        return tl.inline_asm_elementwise(_BYTE_SCALE_ASM, "=r,r,r,r,r", [words, place], dtype=tl.bfloat16, is_pure=True, pack=2)


@triton.jit
def finite(bits):
    """E4M3 bits without a sign, and 0 for NaN."""
    return tl.where(bits & 0x7F == 0x7F, 0, bits & 0x7F)


@triton.jit
def _round_fp32(x):
    """fp32 rounded to E4M3, by integers."""
    sign = x.to(tl.int32, bitcast=True) & -0x80000000
    x = tl.minimum(tl.abs(x), 448.0)
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    small = (x + 24576.0) - 24576.0  # 3 * 2^13: fp32 numbers there are 2^-9 apart
    value = tl.where(x < 0.015625, small, normal)
    return (value.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def rounded(x):
    """Values * 2^-7 read as E4M3: the re-rounded read of `quant.kv`."""
    if not has_ptx():
        return (_round_fp32(x.to(tl.float32) * 128.0) * 0.0078125).to(OPERAND)
    else:
        return tl.inline_asm_elementwise(_ROUND_ASM, "=r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2)


@triton.jit
def halves(x):
    """int32 words [..] as their 16-bit halves [.., 2], the low one first."""
    return tl.join((x & 0xFFFF).to(tl.int16), ((x >> 16) & 0xFFFF).to(tl.int16))


@triton.jit
def nibbles(x, scales):
    """Values * 2^-7 of 16-bit groups of four codes [..]: [.., 2, 2], the last dimensions the two bits of the code's place."""
    if not has_ptx():
        x = x.to(tl.int32)
        a, b = (e2m1_fp32(x & 15) * scales).to(OPERAND), (e2m1_fp32((x >> 4) & 15) * scales).to(OPERAND)
        c, d = (e2m1_fp32((x >> 8) & 15) * scales).to(OPERAND), (e2m1_fp32((x >> 12) & 15) * scales).to(OPERAND)
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            _E2M1_ASM,
            "=r,=r,=r,=r,r,r",
            [x, scales],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    return tl.join(tl.join(a, c), tl.join(b, d))


@triton.jit
def e4m3_bytes(x):
    """Operand values of the four E4M3 bytes of int32 words [..]: [.., 2, 2], as `nibbles`."""
    if not has_ptx():
        a, b = e4m3_fp32(x & 0xFF).to(OPERAND), e4m3_fp32((x >> 8) & 0xFF).to(OPERAND)
        c, d = e4m3_fp32((x >> 16) & 0xFF).to(OPERAND), e4m3_fp32((x >> 24) & 0xFF).to(OPERAND)
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            _E4M3_ASM,
            "=r,=r,=r,=r,r,r",
            [x],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    return tl.join(tl.join(a, c), tl.join(b, d))


# ------------------------------------------------------------------------------------------------------------------ head dimension


@triton.jit
def settle(tile):
    """`tile` itself, two elements a register, with its making hidden from Triton's choice of a layout."""
    if not has_ptx():
        return tile
    else:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tile], dtype=tl.bfloat16, is_pure=False, pack=2)


@triton.jit
def label_query(x, ROWS: tl.constexpr):
    """[ROWS, 128] in natural order to the order of labels: w, i1, i0, t, h."""
    x = tl.reshape(x, [ROWS, 4, 4, 2, 2, 2])  # t, w, h, i1, i0
    return tl.reshape(tl.permute(x, [0, 2, 4, 5, 1, 3]), [ROWS, 128])


@triton.jit
def load_index_keys(base, first, limit, one, token_stride, KEYS: tl.constexpr, FORMAT: tl.constexpr, MASKED: tl.constexpr):
    """Raw bits of KEYS index keys from key `first` of a block, for one warp.

    Args:
        base: of the block: uint8 plane of an NVFP4 page; otherwise key 0's row, `token_stride` elements from one key to the next.
        limit: keys of the block from here on may not exist (MASKED) or hold anything. one: the number 1, unknown to the compiler.
    Returns:
        (words or elements [lanes, vector], scale bits or anything).
    """
    # What of an address depends on the lane comes first, so that the rest, a constant of a register, goes into the instruction.
    if FORMAT == NVFP4:
        row = tl.arange(0, KEYS * 4)  # rep, g, t: as the codes lie
        lane, rest = row % 32, row // 32 * 32 + first * 4
        x = tl.load((base.to(tl.pointer_type(tl.int32)) + lane * 4 + rest * 4)[:, None] + tl.arange(0, 4)[None, :])
        # A lane takes the two scale bytes of its own groups; times `one`, so that Triton does not widen the load and move lanes.
        raw = tl.load((base + PAGE * 64).to(tl.pointer_type(tl.int16)) + lane * one + rest).to(tl.int32)
    elif FORMAT == FP8:
        row = tl.arange(0, KEYS * 8)  # rep, w2, g, t
        key = row // 64 * 8 + row // 4 % 8 + first
        at = base.to(tl.pointer_type(tl.int32)) + (key * token_stride + row % 4 * 32 + row // 32 % 2 * 16) // 4
        x = _load_rows(at, key < limit, 4, MASKED)
        raw = row
    else:
        row = tl.arange(0, KEYS * 16)  # rep, w, g, t
        lane, rest = row // 4 % 8, row // 128 * 8 + first
        at = base + (lane * token_stride + row % 4 * 32) + (rest * token_stride + row // 32 % 4 * 8)
        x = _load_rows(at, lane + rest < limit, 8, MASKED)
        raw = row
    return x, raw


@triton.jit
def _load_rows(at, inside, VECTOR: tl.constexpr, MASKED: tl.constexpr):
    at = at[:, None] + tl.arange(0, VECTOR)[None, :]
    if MASKED:
        return tl.load(at, mask=inside[:, None], other=0)
    else:
        return tl.load(at)


@triton.jit
def decode_keys(x, raw, KEYS: tl.constexpr, FORMAT: tl.constexpr, ROUNDED: tl.constexpr):
    """Operand [KEYS, 128], dimensions in the order of labels, of what `load_index_keys` gave."""
    tile = decoded_keys(x, raw, 1, KEYS, FORMAT, ROUNDED)
    return settle(tl.reshape(tl.permute(tile, [0, 1, 2, 4, 6, 7, 3, 5]), [KEYS, 128]))


@triton.jit
def decoded_keys(x, raw, WARPS: tl.constexpr, KEYS: tl.constexpr, FORMAT: tl.constexpr, ROUNDED: tl.constexpr):
    """Tile [KEYS / 8, WARPS, 8 g, 4 t, 4 w, 2 h, 2 i1, 2 i0] of raw bits in rows of (rep, warp, g, t). ROUNDED: NVFP4 is read as E4M3."""
    if FORMAT == NVFP4:
        scales = key_scales(raw, ROUNDED)
        scales = tl.reshape(tl.broadcast_to(scales[:, :, None], [KEYS * WARPS * 4, 2, 4]), [KEYS * WARPS * 4, 4, 2])
        tile = nibbles(halves(x), scales)
        if ROUNDED:
            tile = rounded(tile)
    elif FORMAT == FP8:
        tile = tl.reshape(e4m3_bytes(tl.reshape(x, [KEYS * WARPS * 8, 2, 2])), [KEYS // 8, 2, WARPS, 8, 4, 16])
        tile = tl.permute(tile, [0, 2, 3, 4, 1, 5])
    else:
        tile = tl.reshape(x.to(OPERAND), [KEYS // 8, 4, WARPS, 8, 4, 8])
        tile = tl.permute(tile, [0, 2, 3, 4, 1, 5])
    return tl.reshape(tile, [KEYS // 8, WARPS, 8, 4, 4, 2, 2, 2])


@triton.jit
def key_of_label(KEYS: tl.constexpr):
    """Keys in the order of the scores' columns: a lane that has columns 2t, 2t+1, 2t+8, 2t+9 of 16 has the four keys of token quad t."""
    return key_order(tl.arange(0, KEYS))


@triton.jit
def key_order(label):
    """The key of a label."""
    return label // 16 * 16 + (label // 2 % 4) * 4 + (label // 8 % 2) * 2 + label % 2

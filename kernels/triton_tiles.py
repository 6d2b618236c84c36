"""What the Triton kernels of this folder share: tiles of packed weights decoded in registers, and one way to multiply.

Weights are the left operand, rows of the output; tokens are the columns. So decoded weights go from registers straight into the matrix
instruction and touch neither shared nor device memory as 16-bit values. Each K step of an instruction is 16 inputs deep, and steps
follow one another in ascending K in every configuration: an output's sum has one order, whatever tile a token falls in.

Under `TRITON_INTERPRET=1` (CPU) the same values are made by plain operations, and products are fp32: the interpreter has no inline
assembly, and its bf16 dot is wrong.
"""

from __future__ import annotations

import contextlib
import os

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")

# Two bytes of E5M3 scales, 16 bits apart, become two bf16 of 2^107 times their value: four bits up, high exponent bits set.
_SCALES = tl.constexpr("""{
.reg .b32 p;
and.b32 p, $4, 0x00FF00FF; mad.lo.u32 $0, p, 16, 0x70007000;
shr.u32 p, $4, 8; and.b32 p, p, 0x00FF00FF; mad.lo.u32 $1, p, 16, 0x70007000;
and.b32 p, $5, 0x00FF00FF; mad.lo.u32 $2, p, 16, 0x70007000;
shr.u32 p, $5, 8; and.b32 p, p, 0x00FF00FF; mad.lo.u32 $3, p, 16, 0x70007000;
}""")


def _decode_text() -> str:
    """Two neighbouring words of a row ($8, $9) to the eight planes' bf16 pairs ($0..$7), each times its scale ($10, $12, $14, $16)."""
    lines = [".reg .b32 t, a, b, s;", ".reg .b16 l, h;"]
    for half, pick in ((0, "0x5410"), (1, "0x7632")):
        lines.append(f"prmt.b32 t, $8, $9, {pick};")
        for plane in range(4):
            # See expert_tiles: planes 0 and 1 have sign and magnitude in their distance, 2 and 3 need two shifts.
            lines.append(
                (
                    "and.b32 a, t, 0x81C081C0;",
                    "shl.b32 a, t, 3; and.b32 a, a, 0x81C081C0;",
                    "shl.b32 a, t, 6; and.b32 a, a, 0x01C001C0; shl.b32 b, t, 1; lop3.b32 a, b, 0x80008000, a, 0xEA;",
                    "shr.u32 a, t, 3; and.b32 a, a, 0x01C001C0; shl.b32 b, t, 2; lop3.b32 a, b, 0x80008000, a, 0xEA;",
                )[plane]
            )
            scale = 10 + 4 * half + 2 * (plane % 2)  # planes 0 and 2 of a half share a register, 1 and 3 the next
            lines.append(f"mov.b32 {{l, h}}, ${scale};")
            lines.append(f"mov.b32 s, {{{'lh'[plane // 2]}, {'lh'[plane // 2]}}};")
            lines.append(f"mul.rn.bf16x2 ${4 * half + plane}, a, s;")
    return "{\n" + "\n".join(lines) + "\n}"


_DECODE = tl.constexpr(_decode_text())
# Decoded values are 2^-126 (code) * 2^107 (scale) of the true ones, all of them normal bf16; the sums are put right in fp32.
NVFP4_UNIT = tl.constexpr(2.0**19)


@triton.jit
def _plane_value(word, scales, PLANE: tl.constexpr):
    """Interpreter: fp32 [ROWS, 16] of one plane, in the units of the assembly."""
    half = word >> (16 * (PLANE // 4))
    if PLANE % 4 == 0:
        magnitude, sign = (half >> 6) & 7, (half >> 15) & 1
    elif PLANE % 4 == 1:
        magnitude, sign = (half >> 3) & 7, (half >> 12) & 1
    elif PLANE % 4 == 2:
        magnitude, sign = half & 7, (half >> 14) & 1
    else:
        magnitude, sign = (half >> 9) & 7, (half >> 13) & 1
    # E2M1 without subnormals in the way: magnitudes 2..7 are (1 + m / 2) 2^(e - 1), 0 and 1 are 0 and a half.
    exponent, fraction = magnitude >> 1, (magnitude & 1).to(tl.float32)
    value = tl.where(exponent == 0, fraction * 0.5, (1.0 + fraction * 0.5) * (1 << (exponent & 3)).to(tl.float32) * 0.5)
    byte = ((scales >> (8 * PLANE)) & 0xFF).to(tl.int32)
    scale = ((byte << 20) + (117 << 23)).to(tl.float32, bitcast=True)
    return tl.where(sign == 1, -value, value) * scale[:, None] * (1.0 / 524288.0)


@triton.jit
def _chunk(a, b, c, d, e, f, g, h, ROWS: tl.constexpr):
    """Eight planes [ROWS, 16] beside one another."""
    # [ROWS, 16, plane bit 2, 1, 0]: only registers are renamed, in the layout the matrix instruction wants.
    planes = tl.join(tl.join(tl.join(a, e), tl.join(c, g)), tl.join(tl.join(b, f), tl.join(d, h)))
    return tl.reshape(tl.permute(planes, (0, 2, 3, 4, 1)), [ROWS, 128])


@triton.jit
def nvfp4_tile(words, scales, ROWS: tl.constexpr):
    """Weights [ROWS, 128], in units of 1 / NVFP4_UNIT, of words int32 [ROWS, 16] and scales int64 [ROWS] (see `expert_tiles`)."""
    if INTERPRETED:
        a, b = _plane_value(words, scales, 0), _plane_value(words, scales, 1)
        c, d = _plane_value(words, scales, 2), _plane_value(words, scales, 3)
        e, f = _plane_value(words, scales, 4), _plane_value(words, scales, 5)
        g, h = _plane_value(words, scales, 6), _plane_value(words, scales, 7)
    else:
        even, odd, even4, odd4 = tl.inline_asm_elementwise(
            _SCALES.value,
            "=r,=r,=r,=r,r,r",
            [scales.to(tl.int32), (scales >> 32).to(tl.int32)],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
        # pack=2 gives the assembly two neighbours of a row, which share their scales: it reads the first one's.
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            _DECODE.value,
            "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r",
            [words, even[:, None], odd[:, None], even4[:, None], odd4[:, None]],
            dtype=(tl.bfloat16,) * 8,
            is_pure=True,
            pack=2,
        )
    return _chunk(a, b, c, d, e, f, g, h, ROWS)


def _mxfp8_text() -> str:
    """Two neighbouring words ($8, $9: planes 0..3; $10, $11: 4..7) to bf16 pairs ($0..$7), each times its block's scale ($12, $14)."""
    lines = [".reg .b32 t, a, s;", ".reg .b16 l, h;"]
    for plane in range(8):
        low, high = (8, 9) if plane < 4 else (10, 11)
        byte = plane % 4
        # The byte on top of each half: its sign is in place, its magnitude four bits too high (bf16 of 2^-120 of the value).
        lines.append(f"prmt.b32 t, ${low}, ${high}, 0x{4 + byte}0{byte}0;")
        lines.append("shr.u32 a, t, 4; and.b32 a, a, 0x07F007F0; lop3.b32 a, t, 0x80008000, a, 0xEA;")
        lines.append(f"mov.b32 {{l, h}}, ${12 + 2 * (plane // 2 % 2)};")
        lines.append(f"mov.b32 s, {{{'lh'[plane // 4]}, {'lh'[plane // 4]}}};")
        lines.append(f"mul.rn.bf16x2 ${plane}, a, s;")
    return "{\n" + "\n".join(lines) + "\n}"


_MXFP8 = tl.constexpr(_mxfp8_text())
# Four exponent bytes, 16 bits apart, to bf16: 2^(byte - 127 + 120 - 32).
_EXPONENTS = tl.constexpr("""{
.reg .b32 p;
and.b32 p, $2, 0x00FF00FF; mad.lo.u32 $0, p, 128, 0x2C002C00;
shr.u32 p, $2, 8; and.b32 p, p, 0x00FF00FF; mad.lo.u32 $1, p, 128, 0x2C002C00;
}""")
MXFP8_UNIT = tl.constexpr(2.0**32)


@triton.jit
def _mxfp8_value(words, exponents, PLANE: tl.constexpr):
    """Interpreter: fp32 [ROWS, 16] of one plane, in the units of the assembly."""
    byte = ((words >> (8 * PLANE)) & 0xFF).to(tl.int32)
    magnitude = byte & 0x7F
    normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
    exponent = (exponents >> (8 * (PLANE // 2))) & 0xFF
    scale = (tl.maximum(exponent - 32, 0) << 23).to(tl.float32, bitcast=True)
    return tl.where(byte > 0x7F, -value, value) * scale[:, None]


@triton.jit
def mxfp8_tile(words, exponents, ROWS: tl.constexpr):
    """Weights [ROWS, 128], in units of 1 / MXFP8_UNIT, of words int64 [ROWS, 16] and exponents int32 [ROWS] (see `linear_tiles`)."""
    if INTERPRETED:
        a, b = _mxfp8_value(words, exponents, 0), _mxfp8_value(words, exponents, 1)
        c, d = _mxfp8_value(words, exponents, 2), _mxfp8_value(words, exponents, 3)
        e, f = _mxfp8_value(words, exponents, 4), _mxfp8_value(words, exponents, 5)
        g, h = _mxfp8_value(words, exponents, 6), _mxfp8_value(words, exponents, 7)
    else:
        even, odd = tl.inline_asm_elementwise(_EXPONENTS.value, "=r,=r,r", [exponents], dtype=(tl.int32, tl.int32), is_pure=True, pack=1)
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            _MXFP8.value,
            "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r,r,r,r",
            [words.to(tl.int32), (words >> 32).to(tl.int32), even[:, None], odd[:, None]],
            dtype=(tl.bfloat16,) * 8,
            is_pure=True,
            pack=2,
        )
    return _chunk(a, b, c, d, e, f, g, h, ROWS)


@triton.jit
def weight_tile(words, scales, ROWS: tl.constexpr, MX: tl.constexpr):
    """`mxfp8_tile` or `nvfp4_tile`."""
    if MX:
        return mxfp8_tile(words, scales, ROWS)
    else:
        return nvfp4_tile(words, scales, ROWS)


@triton.jit
def unit(global_ptr, e, MX: tl.constexpr):
    """What sums of decoded weights are to be multiplied by."""
    if MX:
        return MXFP8_UNIT
    else:
        return NVFP4_UNIT * tl.load(global_ptr + e)


@triton.jit
def dot(a, b, acc):
    """acc + a b with fp32 sums."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc)


@triton.jit
def settled(acc):
    """`acc`, whose products are to be finished here.

    A loop that leaves its last product in flight makes ptxas wait after each single matrix instruction (C7515): a use of the sums at the
    end of an iteration lets it run all of a chunk's instructions behind one another.
    """
    if INTERPRETED:
        return acc
    return tl.inline_asm_elementwise("// $0", "=f,0", [acc], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def prefetch(at):
    """Ask for the cache lines of these pointers."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def bf16(x):
    """fp32 rounded to nearest even; the interpreter's cast alone would cut bits off."""
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return x.to(tl.bfloat16)


def on(x: Tensor) -> contextlib.AbstractContextManager:
    """The device of `x` as the current one."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()

"""What the Triton kernels of this folder share: tiles of packed weights decoded in registers, and one way to multiply.

Weights are the left operand, rows of the output; tokens are the columns. So decoded weights go from registers straight into the matrix
instruction and touch neither shared nor device memory as 16-bit values. Each K step of an instruction is 16 inputs deep, and steps
follow one another in ascending K in every configuration: an output's sum has one order, whatever tile a token falls in.

Where there is no PTX (`triton_target`) the same values are made by plain operations, in the steps of the assembly; under the interpreter
products are fp32.
"""

from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import constexpr_function

from . import expert_tiles
from .triton_target import INTERPRETED, OPERAND, has_ptx

# Sign and magnitude of two E2M1 where bf16 has them; see `expert_tiles` for the words.
E2M1, MIXED = tl.constexpr(0x81C081C0), tl.constexpr(expert_tiles.MIXED)
_PLACES = tl.constexpr(expert_tiles.PLACES)
# Eight scales, four to a register as `expert_tiles` has them, to bf16 of 2^107 times their value: the high exponent bits are set.
_SCALES = tl.constexpr("""{
.reg .b32 k, p;
mov.b32 k, 0x70007000;
lop3.b32 $0, $4, 0x0FF00FF0, k, 0xEA; shf.r.wrap.b32 p, $4, $4, 8; lop3.b32 $1, p, 0x0FF00FF0, k, 0xEA;
lop3.b32 $2, $5, 0x0FF00FF0, k, 0xEA; shf.r.wrap.b32 p, $5, $5, 8; lop3.b32 $3, p, 0x0FF00FF0, k, 0xEA;
}""")


def _turn(target: str, source: str, right: int) -> str:
    """`source` turned right by so many bits. To the left nothing wraps that is used, and a plain shift can take the multipliers' pipe."""
    return f"shl.b32 {target}, {source}, {-right};" if right < 0 else f"shf.r.wrap.b32 {target}, {source}, {source}, {right};"


def _decode_text() -> str:
    """A row's words 2i and 2i + 1 ($8, $9) to the eight planes' bf16 pairs ($0..$7), each times its scale ($10, $12, $14, $16)."""
    lines = [".reg .b32 a, c, s;", ".reg .b16 l, h;", f"lop3.b32 c, $8, $9, {MIXED.value:#x}, 0xE4;"]
    for plane, (source, right) in enumerate(expert_tiles.PLACES):
        name = ("$8", "$9", "c")[source]
        if right:
            lines.append(_turn("a", name, right))
        lines.append(f"and.b32 a, {'a' if right else name}, {E2M1.value:#x};")
        scale = 10 + 4 * (plane // 4) + 2 * (plane % 2)  # planes 0 and 2 of four share a register, 1 and 3 the next
        half = "lh"[plane % 4 // 2]
        lines.append(f"mov.b32 {{l, h}}, ${scale}; mov.b32 s, {{{half}, {half}}}; mul.rn.bf16x2 ${plane}, a, s;")
    return "{\n" + "\n".join(lines) + "\n}"


_DECODE = tl.constexpr(_decode_text())
# Decoded values are 2^-126 (code) * 2^107 (scale) of the true ones, all of them normal bf16; the sums are put right in fp32.
NVFP4_UNIT = tl.constexpr(2.0**19)


@constexpr_function
def _place(plane, part):
    """Without PTX: of a plane, the word that holds it (part 0), or by how much that is turned right (part 1)."""
    return _PLACES.value[plane][part] % 32


@triton.jit
def _turned(word, right: tl.constexpr):
    """Without PTX: 32 bits in an int64, turned right by 0 to 31 bits; what a plain shift loses is not used."""
    return ((word >> right) | (word << (32 - right))) & 0xFFFFFFFF


@triton.jit
def _unsigned(word):
    """Without PTX: the low 32 bits as an int64."""
    return word.to(tl.int64) & 0xFFFFFFFF


@triton.jit
def _neighbours(words):
    """Without PTX: of words [ROWS, 16] those of even and those of odd index."""
    even, odd = tl.split(tl.reshape(words, [words.shape[0], 8, 2]))
    return even, odd


@triton.jit
def _scaled(pairs, scale):
    """Without PTX: operands [ROWS, 16] of pairs of bf16 [ROWS, 8] times a bf16 [ROWS], all as bits in int64."""
    values = tl.join((pairs & 0xFFFF) << 16, pairs & 0xFFFF0000).to(tl.int32).to(tl.float32, bitcast=True)
    scaled = tl.reshape(values, [pairs.shape[0], 16]) * ((scale & 0xFFFF) << 16).to(tl.int32).to(tl.float32, bitcast=True)[:, None]
    return scaled.to(OPERAND)


@triton.jit
def _nvfp4_plane(words, scales, PLANE: tl.constexpr):
    """Without PTX: operands [ROWS, 16] of one plane, in the steps of the assembly."""
    even, odd = _neighbours(words)
    even, odd = _unsigned(even), _unsigned(odd)
    SOURCE: tl.constexpr = _place(PLANE, 0)
    if SOURCE == 0:
        word = even
    elif SOURCE == 1:
        word = odd
    else:
        word = (even & MIXED) | (odd & (0xFFFFFFFF - MIXED))
    four = _turned(_unsigned(scales >> (32 * (PLANE // 4))), 8 * (PLANE % 2))
    return _scaled(_turned(word, _place(PLANE, 1)) & E2M1, ((four >> (16 * (PLANE % 4 // 2))) & 0x0FF0) | 0x7000)


@triton.jit
def _chunk(a, b, c, d, e, f, g, h, ROWS: tl.constexpr):
    """Eight planes [ROWS, 16] beside one another."""
    # [ROWS, 16, plane bit 2, 1, 0]: only registers are renamed, in the layout the matrix instruction wants.
    planes = tl.join(tl.join(tl.join(a, e), tl.join(c, g)), tl.join(tl.join(b, f), tl.join(d, h)))
    return tl.reshape(tl.permute(planes, (0, 2, 3, 4, 1)), [ROWS, 128])


@triton.jit
def nvfp4_tile(words, scales, ROWS: tl.constexpr):
    """Weights [ROWS, 128], in units of 1 / NVFP4_UNIT, of words int32 [ROWS, 16] and scales int64 [ROWS] (see `expert_tiles`)."""
    if not has_ptx():
        a, b = _nvfp4_plane(words, scales, 0), _nvfp4_plane(words, scales, 1)
        c, d = _nvfp4_plane(words, scales, 2), _nvfp4_plane(words, scales, 3)
        e, f = _nvfp4_plane(words, scales, 4), _nvfp4_plane(words, scales, 5)
        g, h = _nvfp4_plane(words, scales, 6), _nvfp4_plane(words, scales, 7)
    else:
        even, odd, even4, odd4 = tl.inline_asm_elementwise(
            _SCALES.value,
            "=r,=r,=r,=r,r,r",
            [scales.to(tl.int32), (scales >> 32).to(tl.int32)],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
        # pack=2 gives the assembly words 2i and 2i + 1 of a row, which share their scales: it reads the first one's.
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            _DECODE.value,
            "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r",
            [words, even[:, None], odd[:, None], even4[:, None], odd4[:, None]],
            dtype=(tl.bfloat16,) * 8,
            is_pure=True,
            pack=2,
        )
    return _chunk(a, b, c, d, e, f, g, h, ROWS)


# Sign and magnitude of two E4M3 where bf16 has them, which reads as 2^-120 of the value; and of these the sign and upper four bits.
E4M3, E4M3_TOP = tl.constexpr(0x87F087F0), tl.constexpr(0x87808780)


def _mxfp8_text() -> str:
    """A row's words 2i and 2i + 1 to bf16 pairs ($0..$7), each times its block's scale ($12, $14).

    $8 and $10 are the low and high half of the first, $9 and $11 of the second; each of the four holds two planes (see `linear_tiles`).
    """
    lines = [".reg .b32 a, b, s;", ".reg .b16 l, h;"]
    for plane in range(8):
        word = ("$8", "$9", "$10", "$11")[plane // 2]
        if plane % 2 == 0:
            lines.append(f"and.b32 a, {word}, {E4M3.value:#x};")
        else:
            lines.append(f"shf.r.wrap.b32 a, {word}, {word}, 4; and.b32 a, a, {E4M3_TOP.value:#x};")
            lines.append(f"shl.b32 b, {word}, 4; lop3.b32 a, b, {E4M3.value - E4M3_TOP.value:#x}, a, 0xEA;")
        half = "lh"[plane // 4]
        lines.append(f"mov.b32 {{l, h}}, ${12 + 2 * (plane // 2 % 2)}; mov.b32 s, {{{half}, {half}}}; mul.rn.bf16x2 ${plane}, a, s;")
    return "{\n" + "\n".join(lines) + "\n}"


_MXFP8 = tl.constexpr(_mxfp8_text())
# Four exponents as `linear_tiles` has them to bf16 of 2^(120 - 32) times their value: they only want to be in their place.
_EXPONENTS = tl.constexpr("""{
.reg .b32 p;
and.b32 $0, $2, 0x7F807F80; shf.r.wrap.b32 p, $2, $2, 8; and.b32 $1, p, 0x7F807F80;
}""")
MXFP8_UNIT = tl.constexpr(2.0**32)


@triton.jit
def _mxfp8_plane(words, exponents, PLANE: tl.constexpr):
    """Without PTX: operands [ROWS, 16] of one plane, in the steps of the assembly."""
    even, odd = _neighbours(words)
    word = _unsigned((even if PLANE // 2 % 2 == 0 else odd) >> (32 * (PLANE // 4)))
    pairs = word & E4M3 if PLANE % 2 == 0 else (_turned(word, 4) & E4M3_TOP) | ((word << 4) & (E4M3 - E4M3_TOP))
    return _scaled(pairs, (_turned(_unsigned(exponents), 8 * (PLANE // 2 % 2)) >> (16 * (PLANE // 4))) & 0x7F80)


@triton.jit
def mxfp8_tile(words, exponents, ROWS: tl.constexpr):
    """Weights [ROWS, 128], in units of 1 / MXFP8_UNIT, of words int64 [ROWS, 16] and exponents int32 [ROWS] (see `linear_tiles`)."""
    if not has_ptx():
        a, b = _mxfp8_plane(words, exponents, 0), _mxfp8_plane(words, exponents, 1)
        c, d = _mxfp8_plane(words, exponents, 2), _mxfp8_plane(words, exponents, 3)
        e, f = _mxfp8_plane(words, exponents, 4), _mxfp8_plane(words, exponents, 5)
        g, h = _mxfp8_plane(words, exponents, 6), _mxfp8_plane(words, exponents, 7)
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
    if not has_ptx():
        return acc
    else:
        return tl.inline_asm_elementwise("// $0", "=f,0", [acc], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def prefetch(at):
    """Ask for the cache lines of these pointers."""
    if has_ptx():
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

"""Rows of heads between the QKV projection and attention, as Triton functions: Gemma norm, partial RoPE, and what a KV cache holds of them.

A row is one head of one token, 128 elements in four quarters [R, 32] of fp32 values, so that the two halves that RoPE turns into one
another are in the same lanes and every element is loaded once, 16 bytes at a time. A row's bits depend on that row alone. Every kernel
that norms, rotates or quantizes heads calls these functions, so that a trainer's K and an engine's have the same bits.

The steps round where `kernels.norm` and `kernels.rope` do (norm to bf16, rotation in fp32 and to bf16), products and sums are not
contracted (launch with `enable_fp_fusion=False`), square root and quotients are correctly rounded, and NVFP4 is that of `quant.kv`. The
one thing torch may do in another order is the sum of 128 squares: here it is a tree of neighbours.
"""

from __future__ import annotations

import triton
import triton.language as tl

from samebits.quant.triton_quant import _codes, _e2m1_value, _e4m3_bits, _e4m3_value

from .triton_msa_tiles import FP8, INTERPRETED, NVFP4, PAGE
from .triton_rows import inverse_root, tree_sum
from .triton_tiles import bf16


@triton.jit
def quarters(at, mask):
    """Four quarters in fp32 of the rows that start at `at` [R]; zeros where `mask` [R] is not."""
    at = at[:, None] + tl.arange(0, 32)[None, :]
    mask = mask[:, None]
    a = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(at + 32, mask=mask, other=0.0).to(tl.float32)
    c = tl.load(at + 64, mask=mask, other=0.0).to(tl.float32)
    d = tl.load(at + 96, mask=mask, other=0.0).to(tl.float32)
    return a, b, c, d


@triton.jit
def store_quarters(at, mask, a, b, c, d):
    """Quarters to rows of bf16 or fp32; they hold values of bf16."""
    at = at[:, None] + tl.arange(0, 32)[None, :]
    mask = mask[:, None]
    kind = at.dtype.element_ty
    tl.store(at, a.to(kind), mask=mask)
    tl.store(at + 32, b.to(kind), mask=mask)
    tl.store(at + 64, c.to(kind), mask=mask)
    tl.store(at + 96, d.to(kind), mask=mask)


@triton.jit
def _rounded(x):
    """fp32 rounded to bf16 and back."""
    return bf16(x).to(tl.float32)


@triton.jit
def row_sum(a, b, c, d):
    """[R] sums of rows, in the order of `tree_sum` over all 128."""
    return (tree_sum(a) + tree_sum(b)) + (tree_sum(c) + tree_sum(d))


@triton.jit
def inverse_rms(a, b, c, d, eps):
    """[R] 1 / sqrt(mean of squares + eps)."""
    return inverse_root(row_sum(a * a, b * b, c * c, d * d) * 0.0078125, eps)


@triton.jit
def norm_weights(at):
    """1 + w of the four quarters, of norm weights that start at `at` [R]."""
    at = at[:, None] + tl.arange(0, 32)[None, :]
    a = 1.0 + tl.load(at).to(tl.float32)
    b = 1.0 + tl.load(at + 32).to(tl.float32)
    c = 1.0 + tl.load(at + 64).to(tl.float32)
    d = 1.0 + tl.load(at + 96).to(tl.float32)
    return a, b, c, d


@triton.jit
def angles(cos_ptr, sin_ptr, position, ROTARY: tl.constexpr):
    """cos and sin [R, 32] of the first half of what is rotated, which is ROTARY long, at `position` [R]: its two quarters, or one twice."""
    at = position.to(tl.int64)[:, None] * ROTARY + tl.arange(0, 32)[None, :]
    cos, sin = tl.load(cos_ptr + at), tl.load(sin_ptr + at)
    if ROTARY == 64:
        return cos, sin, tl.load(cos_ptr + at + 32), tl.load(sin_ptr + at + 32)
    else:
        return cos, sin, cos, sin


@triton.jit
def _turn(x, partner, cos, sin):
    """A pair of halves, rotated and rounded to bf16."""
    return _rounded(x * cos - partner * sin), _rounded(partner * cos + x * sin)


@triton.jit
def normed_rotated(a, b, c, d, inverse, weight, turn, ROTARY: tl.constexpr):
    """Quarters normed by `inverse` (`inverse_rms`) and `weight` (`norm_weights`), rotated by `turn` (`angles`): fp32 values of bf16."""
    inverse = inverse[:, None]
    wa, wb, wc, wd = weight
    a, b = _rounded(a * inverse * wa), _rounded(b * inverse * wb)
    c, d = _rounded(c * inverse * wc), _rounded(d * inverse * wd)
    cos, sin, cos2, sin2 = turn
    if ROTARY == 32:
        a, b = _turn(a, b, cos, sin)
    else:
        a, c = _turn(a, c, cos, sin)
        b, d = _turn(b, d, cos2, sin2)
    return a, b, c, d


@triton.jit
def _nvfp4(x, R: tl.constexpr):
    """Codes int32 [R, 2, 16] and E4M3 scale bits int32 [R, 2] of a quarter [R, 32]."""
    x = tl.reshape(x, [R, 2, 16])
    top = tl.max(tl.abs(x), axis=2)
    ratio = tl.math.div_rn(top, tl.full([R, 2], 6.0, tl.float32))
    ratio = tl.minimum(tl.maximum(ratio, 0.001953125), 448.0)
    scale = _e4m3_bits(tl.where(top == 0, 1.0, ratio))
    divisor = _e4m3_value(scale)
    r = tl.math.div_rn(tl.full([R, 2], 1.0, tl.float32), divisor)
    STEPS: tl.constexpr = 0 if INTERPRETED else 1  # see `quant.triton_quant`
    # Everything in the layout of x: a lane keeps its elements.
    divisor = tl.broadcast_to(divisor[:, :, None], [R, 2, 16])
    return _codes(x.to(tl.int32, bitcast=True), divisor, tl.broadcast_to(r[:, :, None], [R, 2, 16]), STEPS), scale


@triton.jit
def _store_nvfp4(x, Q: tl.constexpr, base, mask, place, value, R: tl.constexpr):
    """Quarter Q of rows [R, 32] into their planes at `base` [R]; `place` [R]: token in the page; `value`: V, not K."""
    codes, scale = _nvfp4(x, R)
    low, high = tl.split(tl.reshape(codes, [R, 16, 2]))
    at = base[:, None] + (place[:, None] * 64 + Q * 16 + tl.arange(0, 16)[None, :])
    tl.store(at, (low | (high << 4)).to(tl.uint8), mask=mask[:, None])
    group, place = tl.arange(0, 2)[None, :] + Q * 2, place[:, None]
    at = tl.where(value, place // 4 * 32 + group * 4 + place % 4, place * 8 + group)
    tl.store(base[:, None] + (PAGE * 64 + at), scale.to(tl.uint8), mask=mask[:, None])


@triton.jit
def _e4m3_bits_saturated(x):
    """E4M3 bits (int32) of the magnitudes of fp32 values, nearest even, saturating.

    By integers: of the hardware's conversion, packed by ptxas with what reads its bits again, every second element was lost on an H200.
    """
    return _e4m3_bits(tl.minimum(tl.abs(x), 448.0))


@triton.jit
def _e4m3_byte(x):
    """E4M3 of fp32 values, uint8."""
    return (_e4m3_bits_saturated(x) | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def store_page_rows(a, b, c, d, base, mask, place, token_stride, value, R: tl.constexpr, FORMAT: tl.constexpr):
    """Quarters of bf16 values into pages of a format. `base` [R]: planes (NVFP4), else first rows; `value`: V, not K."""
    if FORMAT == NVFP4:
        _store_nvfp4(a, 0, base, mask, place, value, R)
        _store_nvfp4(b, 1, base, mask, place, value, R)
        _store_nvfp4(c, 2, base, mask, place, value, R)
        _store_nvfp4(d, 3, base, mask, place, value, R)
    else:
        at = base + place * token_stride
        if FORMAT == FP8:
            store_quarters(at, mask, _e4m3_byte(a), _e4m3_byte(b), _e4m3_byte(c), _e4m3_byte(d))
        else:
            store_quarters(at, mask, a, b, c, d)


@triton.jit
def _given_back(x, R: tl.constexpr, FORMAT: tl.constexpr):
    """What a cache of the format gives back for a quarter of bf16 values."""
    if FORMAT == NVFP4:
        codes, scale = _nvfp4(x, R)
        return tl.reshape(_e2m1_value(codes) * _e4m3_value(scale)[:, :, None], [R, 32])
    elif FORMAT == FP8:
        value = _e4m3_value(_e4m3_bits_saturated(x)).to(tl.int32, bitcast=True)
        return (value | (x.to(tl.int32, bitcast=True) & -2147483648)).to(tl.float32, bitcast=True)  # a negative zero keeps its sign
    else:
        return x


@triton.jit
def cached(a, b, c, d, R: tl.constexpr, FORMAT: tl.constexpr):
    """What a cache of the format gives back for rows of bf16 values."""
    return _given_back(a, R, FORMAT), _given_back(b, R, FORMAT), _given_back(c, R, FORMAT), _given_back(d, R, FORMAT)


@triton.jit
def head_gradient(a, b, c, d, ga, gb, gc, gd, weight, turn, eps, ROTARY: tl.constexpr):
    """Gradient of the inputs of `normed_rotated`, from inputs and gradients of its outputs; roundings have the gradient one.

    The rotation backwards, then s (g' - x s^2 mean(g' x)) with s = 1 / sqrt(mean(x^2) + eps) and g' = g (1 + w), as in `kernels.norm`.
    """
    cos, sin, cos2, sin2 = turn
    if ROTARY == 32:
        ga, gb = ga * cos + gb * sin, gb * cos - ga * sin
    else:
        ga, gc = ga * cos + gc * sin, gc * cos - ga * sin
        gb, gd = gb * cos2 + gd * sin2, gd * cos2 - gb * sin2
    wa, wb, wc, wd = weight
    ga, gb, gc, gd = ga * wa, gb * wb, gc * wc, gd * wd
    s = inverse_rms(a, b, c, d, eps)
    along = (s * s * (row_sum(ga * a, gb * b, gc * c, gd * d) * 0.0078125))[:, None]
    s = s[:, None]
    return (ga - a * along) * s, (gb - b * along) * s, (gc - c * along) * s, (gd - d * along) * s

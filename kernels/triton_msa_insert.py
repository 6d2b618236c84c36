"""What happens between the QKV projection and attention, in one kernel: per-head Gemma norm, partial RoPE, and K, V and index key into
their pages, as NVFP4, E4M3 or bf16. A program is as many rows of one token as there are KV groups (or its index key), all of one kind;
queries come out in bf16.

The steps round where `kernels.norm` and `kernels.rope` do (norm to bf16, rotation in fp32 and to bf16), products and sums are not
contracted, square root and quotients are correctly rounded, and NVFP4 bytes are those of `quant.kv`. The one thing torch may do in another
order is the sum of 128 squares. Non-finite rows are not looked for: an engine has no use for an exception in the middle of a step.
"""

from __future__ import annotations

import triton
import triton.language as tl

from samebits.quant.triton_quant import _codes, _e4m3_bits, _e4m3_value

from .triton_msa_tiles import FP8, INTERPRETED, NVFP4, PAGE


@triton.jit
def _normed(x_ptr, rows, weight_ptr, inverse, dim):
    """Norm outputs [R, 8, 8] in fp32, rounded to bf16."""
    x = tl.load(x_ptr + rows[:, None, None] * 128 + dim[None]).to(tl.float32) * inverse[:, None, None]
    return _bf16(x * (1.0 + tl.load(weight_ptr + dim).to(tl.float32))[None])


@triton.jit
def _bf16(x):
    """fp32 rounded to bf16 and back, by integers: the interpreter's own cast is wrong."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _inverse(x_ptr, rows, eps):
    """[R] 1 / sqrt(mean of squares + eps) of rows of 128 elements."""
    x = tl.load(x_ptr + rows[:, None] * 128 + tl.arange(0, 128)[None, :]).to(tl.float32)
    mean = tl.sum(x * x, axis=1) / 128.0
    return tl.math.div_rn(tl.full(mean.shape, 1.0, tl.float32), tl.math.sqrt_rn(mean + eps))


@triton.jit
def _half(x_ptr, rows, weight_ptr, cos_ptr, sin_ptr, inverse, parity: tl.constexpr, NORM: tl.constexpr, ROTARY: tl.constexpr):
    """Elements 16 g + 2 j + parity of rows as [R, 8 g, 8 j], fp32 values of bf16."""
    dim = tl.arange(0, 8)[:, None] * 16 + tl.arange(0, 8)[None, :] * 2 + parity
    if NORM:
        x = _normed(x_ptr, rows, weight_ptr, inverse, dim)
        turned = dim < 2 * ROTARY
        partner = _normed(x_ptr, rows, weight_ptr, inverse, tl.where(turned, (dim + ROTARY) % (2 * ROTARY), dim))
        cos = tl.load(cos_ptr + dim % ROTARY)[None]
        sin = tl.load(sin_ptr + dim % ROTARY)[None]
        rotated = tl.where((dim < ROTARY)[None], x * cos - partner * sin, x * cos + partner * sin)
        return tl.where(turned[None], _bf16(rotated), x)
    else:
        return tl.load(x_ptr + rows[:, None, None] * 128 + dim[None]).to(tl.float32)


@triton.jit
def _store(even, odd, base, place, token_stride, R: tl.constexpr, FORMAT: tl.constexpr, VALUE: tl.constexpr):
    """Rows [R, 8, 8] twice into a page: `base` [R] are their planes (NVFP4), or the first rows; `place` is the key in the page."""
    group, pair = tl.arange(0, 8)[None, :, None], tl.arange(0, 8)[None, None, :]
    base = base[:, None, None]
    if FORMAT == NVFP4:
        top = tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), axis=2)
        ratio = tl.math.div_rn(top, tl.full([R, 8], 6.0, tl.float32))
        ratio = tl.minimum(tl.maximum(ratio, 0.001953125), 448.0)
        scale = _e4m3_bits(tl.where(top == 0, 1.0, ratio))[:, :, None]
        divisor = _e4m3_value(scale)
        r = tl.broadcast_to(tl.math.div_rn(tl.full([R, 8, 1], 1.0, tl.float32), divisor), [R, 8, 8])
        divisor = tl.broadcast_to(divisor, [R, 8, 8])
        STEPS: tl.constexpr = 0 if INTERPRETED else 1
        low = _codes(even.to(tl.int32, bitcast=True), divisor, r, STEPS)
        high = _codes(odd.to(tl.int32, bitcast=True), divisor, r, STEPS)
        tl.store(base + (place * 64 + group * 8 + pair), (low | (high << 4)).to(tl.uint8))
        at = place // 4 * 32 + group * 4 + place % 4 if VALUE else place * 8 + group
        tl.store(base + (PAGE * 64 + at), scale.to(tl.uint8))
    else:
        at = place * token_stride + group * 16 + pair * 2
        if FORMAT == FP8:
            tl.store(base + at, _e4m3_byte(even))
            tl.store(base + (at + 1), _e4m3_byte(odd))
        else:
            tl.store(base + at, even.to(base.dtype.element_ty))
            tl.store(base + (at + 1), odd.to(base.dtype.element_ty))


@triton.jit
def _e4m3_byte(x):
    """E4M3 bits of fp32 values, nearest even, saturating."""
    bits = _e4m3_bits(tl.minimum(tl.abs(x), 448.0))
    return (bits | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def insert_kernel(
    q_ptr,  # [T, H, 128] by token stride, as all inputs
    k_ptr,  # [T, G, 128]
    v_ptr,  # [T, G, 128]
    index_q_ptr,  # [T, G, 128]
    index_k_ptr,  # [T, 128]
    q_out_ptr,  # [T, H, 128]
    index_q_out_ptr,  # [T, G, 128]
    q_norm_ptr,
    k_norm_ptr,
    index_q_norm_ptr,
    index_k_norm_ptr,
    cos_ptr,  # fp32 [positions, ROTARY]
    sin_ptr,
    position_ptr,  # int32 [T], -1 for padding
    slot_ptr,  # int64 [T], page * 128 + place; -1 for no page
    keys_ptr,
    values_ptr,
    index_ptr,
    q_stride,
    k_stride,
    v_stride,
    index_q_stride,
    index_k_stride,
    page_stride,
    token_stride,
    head_stride,
    index_page_stride,
    index_token_stride,
    eps,
    H: tl.constexpr,
    G: tl.constexpr,
    ROTARY: tl.constexpr,
    FORMAT: tl.constexpr,
    INDEX_FORMAT: tl.constexpr,
):
    """Program (p, t): G rows of token t: G at a time of the H queries, then index queries, keys, values, the index key."""
    token = tl.program_id(1).to(tl.int64)
    part = tl.program_id(0)
    position = tl.maximum(tl.load(position_ptr + token), 0).to(tl.int64)
    cos_ptr += position * ROTARY
    sin_ptr += position * ROTARY
    slot = tl.load(slot_ptr + token)
    page, place = slot // PAGE, (slot % PAGE).to(tl.int32)
    rows = tl.arange(0, G)
    if part < H // G:
        x = q_ptr + token * q_stride + part * (G * 128)
        _write_queries(x, rows, q_norm_ptr, cos_ptr, sin_ptr, eps, q_out_ptr + (token * H + part * G) * 128, ROTARY)
    elif part == H // G:
        x = index_q_ptr + token * index_q_stride
        _write_queries(x, rows, index_q_norm_ptr, cos_ptr, sin_ptr, eps, index_q_out_ptr + token * G * 128, ROTARY)
    elif slot >= 0:
        turn = (cos_ptr, sin_ptr, eps)
        if part == H // G + 1:
            base = keys_ptr + page * page_stride
            x = k_ptr + token * k_stride
            _write_rows(x, G, k_norm_ptr, turn, base, head_stride, place, token_stride, FORMAT, True, False, ROTARY)
        elif part == H // G + 2:
            base = values_ptr + page * page_stride
            x = v_ptr + token * v_stride
            _write_rows(x, G, k_norm_ptr, turn, base, head_stride, place, token_stride, FORMAT, False, True, ROTARY)
        else:
            plane = index_ptr + page * index_page_stride
            x = index_k_ptr + token * index_k_stride
            _write_rows(x, 1, index_k_norm_ptr, turn, plane, 0, place, index_token_stride, INDEX_FORMAT, True, False, ROTARY)


@triton.jit
def _write_rows(
    x,
    R: tl.constexpr,
    weight_ptr,
    turn,
    base,
    head_stride,
    place,
    token_stride,
    FORMAT: tl.constexpr,
    NORM: tl.constexpr,
    VALUE: tl.constexpr,
    ROTARY: tl.constexpr,
):
    """R rows into a page, normed and rotated where they are no values."""
    cos_ptr, sin_ptr, eps = turn
    rows = tl.arange(0, R)
    inverse = _inverse(x, rows, eps) if NORM else rows
    even = _half(x, rows, weight_ptr, cos_ptr, sin_ptr, inverse, 0, NORM, ROTARY)
    odd = _half(x, rows, weight_ptr, cos_ptr, sin_ptr, inverse, 1, NORM, ROTARY)
    _store(even, odd, base + rows * head_stride, place, token_stride, R, FORMAT, VALUE)


@triton.jit
def _write_queries(x, rows, weight_ptr, cos_ptr, sin_ptr, eps, out, ROTARY: tl.constexpr):
    inverse = _inverse(x, rows, eps)
    at = rows[:, None, None] * 128 + (tl.arange(0, 8)[:, None] * 16 + tl.arange(0, 8)[None, :] * 2)[None]
    even = _half(x, rows, weight_ptr, cos_ptr, sin_ptr, inverse, 0, True, ROTARY)
    odd = _half(x, rows, weight_ptr, cos_ptr, sin_ptr, inverse, 1, True, ROTARY)
    both = tl.join(even, odd).to(out.dtype.element_ty)
    tl.store(out + at[:, :, :, None] + tl.arange(0, 2)[None, None, None, :], both)

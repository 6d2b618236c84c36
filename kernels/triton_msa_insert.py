"""What happens between the QKV projection and attention, in one kernel: per-head Gemma norm, partial RoPE, and K, V and index key into
their pages, as NVFP4, E4M3 or bf16. A program is one row of 128 elements of one token: a query head, an index query, a key, a value or
the index key; queries come out in bf16.

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
def _normed(x_ptr, weight_ptr, inverse, dim):
    """One norm output in fp32, rounded to bf16."""
    x = tl.load(x_ptr + dim).to(tl.float32) * inverse * (1.0 + tl.load(weight_ptr + dim).to(tl.float32))
    return _bf16(x)


@triton.jit
def _bf16(x):
    """fp32 rounded to bf16 and back, by integers: the interpreter's own cast is wrong."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _inverse(x_ptr, eps):
    """1 / sqrt(mean of squares + eps) of 128 elements."""
    x = tl.load(x_ptr + tl.arange(0, 128)).to(tl.float32)
    mean = tl.sum(x * x, axis=0) / 128.0
    return tl.math.div_rn(1.0, tl.math.sqrt_rn(mean + eps))


@triton.jit
def _half(x_ptr, weight_ptr, cos_ptr, sin_ptr, inverse, parity: tl.constexpr, NORM: tl.constexpr, ROTARY: tl.constexpr):
    """Elements 16 g + 2 j + parity as [8 g, 8 j], fp32 values of bf16."""
    dim = tl.arange(0, 8)[:, None] * 16 + tl.arange(0, 8)[None, :] * 2 + parity
    if NORM:
        x = _normed(x_ptr, weight_ptr, inverse, dim)
        turned = dim < 2 * ROTARY
        partner = _normed(x_ptr, weight_ptr, inverse, tl.where(turned, (dim + ROTARY) % (2 * ROTARY), dim))
        cos = tl.load(cos_ptr + dim % ROTARY)
        sin = tl.load(sin_ptr + dim % ROTARY)
        rotated = tl.where(dim < ROTARY, x * cos - partner * sin, x * cos + partner * sin)
        return tl.where(turned, _bf16(rotated), x)
    else:
        return tl.load(x_ptr + dim).to(tl.float32)


@triton.jit
def _store(even, odd, base, place, token_stride, FORMAT: tl.constexpr, VALUE: tl.constexpr):
    """A row [8, 8] twice into a page: `base` is its plane (NVFP4), or its first row; `place` its key in the page."""
    group, pair = tl.arange(0, 8), tl.arange(0, 8)
    if FORMAT == NVFP4:
        top = tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), axis=1)
        ratio = tl.math.div_rn(top, tl.full([8], 6.0, tl.float32))
        ratio = tl.minimum(tl.maximum(ratio, 0.001953125), 448.0)
        scale = _e4m3_bits(tl.where(top == 0, 1.0, ratio))
        divisor = _e4m3_value(scale)
        r = tl.broadcast_to(tl.math.div_rn(tl.full([8], 1.0, tl.float32), divisor)[:, None], [8, 8])
        divisor = tl.broadcast_to(divisor[:, None], [8, 8])
        STEPS: tl.constexpr = 0 if INTERPRETED else 1
        low = _codes(even.to(tl.int32, bitcast=True), divisor, r, STEPS)
        high = _codes(odd.to(tl.int32, bitcast=True), divisor, r, STEPS)
        tl.store(base + place * 64 + group[:, None] * 8 + pair[None, :], (low | (high << 4)).to(tl.uint8))
        at = place // 4 * 32 + group * 4 + place % 4 if VALUE else place * 8 + group
        tl.store(base + PAGE * 64 + at, scale.to(tl.uint8))
    else:
        at = place * token_stride + group[:, None] * 16 + pair[None, :] * 2
        if FORMAT == FP8:
            tl.store(base + at, _e4m3_byte(even))
            tl.store(base + at + 1, _e4m3_byte(odd))
        else:
            tl.store(base + at, even.to(base.dtype.element_ty))
            tl.store(base + at + 1, odd.to(base.dtype.element_ty))


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
    """Row r of token t: H queries, G index queries, G keys, the index key, G values."""
    token = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0)
    position = tl.maximum(tl.load(position_ptr + token), 0).to(tl.int64)
    cos_ptr += position * ROTARY
    sin_ptr += position * ROTARY
    slot = tl.load(slot_ptr + token)
    page, place = slot // PAGE, (slot % PAGE).to(tl.int32)
    if row < H:
        x = q_ptr + token * q_stride + row * 128
        _write_query(x, q_norm_ptr, cos_ptr, sin_ptr, eps, q_out_ptr + (token * H + row) * 128, ROTARY)
    elif row < H + G:
        x = index_q_ptr + token * index_q_stride + (row - H) * 128
        _write_query(x, index_q_norm_ptr, cos_ptr, sin_ptr, eps, index_q_out_ptr + (token * G + row - H) * 128, ROTARY)
    elif slot >= 0:
        if row < H + 2 * G:
            head = row - H - G
            x = k_ptr + token * k_stride + head * 128
            inverse = _inverse(x, eps)
            even = _half(x, k_norm_ptr, cos_ptr, sin_ptr, inverse, 0, True, ROTARY)
            odd = _half(x, k_norm_ptr, cos_ptr, sin_ptr, inverse, 1, True, ROTARY)
            _store(even, odd, keys_ptr + page * page_stride + head * head_stride, place, token_stride, FORMAT, False)
        elif row == H + 2 * G:
            x = index_k_ptr + token * index_k_stride
            inverse = _inverse(x, eps)
            even = _half(x, index_k_norm_ptr, cos_ptr, sin_ptr, inverse, 0, True, ROTARY)
            odd = _half(x, index_k_norm_ptr, cos_ptr, sin_ptr, inverse, 1, True, ROTARY)
            _store(even, odd, index_ptr + page * index_page_stride, place, index_token_stride, INDEX_FORMAT, False)
        else:
            head = row - H - 2 * G - 1
            x = v_ptr + token * v_stride + head * 128
            even = _half(x, k_norm_ptr, cos_ptr, sin_ptr, 1.0, 0, False, ROTARY)
            odd = _half(x, k_norm_ptr, cos_ptr, sin_ptr, 1.0, 1, False, ROTARY)
            _store(even, odd, values_ptr + page * page_stride + head * head_stride, place, token_stride, FORMAT, True)


@triton.jit
def _write_query(x, weight_ptr, cos_ptr, sin_ptr, eps, out, ROTARY: tl.constexpr):
    inverse = _inverse(x, eps)
    at = tl.arange(0, 8)[:, None] * 16 + tl.arange(0, 8)[None, :] * 2
    even = _half(x, weight_ptr, cos_ptr, sin_ptr, inverse, 0, True, ROTARY)
    odd = _half(x, weight_ptr, cos_ptr, sin_ptr, inverse, 1, True, ROTARY)
    tl.store(out + at, even.to(out.dtype.element_ty))
    tl.store(out + at + 1, odd.to(out.dtype.element_ty))

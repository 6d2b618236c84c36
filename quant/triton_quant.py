"""Triton kernels for CUDA: quantize and dequantize NVFP4 and MXFP8 with the bytes of `quant.nvfp4` and `quant.mxfp8`.

A tensor is a row of blocks, whatever its shape, and a program takes a tile of them. NVFP4 without a given global scale reads the
input twice, once for the amax of each matrix (integer maximum of the magnitude bits, so in any order the same) and once for the codes;
everything else is one pass. Non-finite input is seen by the kernels and read back once, after the last launch: the one host sync.

**Division.** Codes are decided by RN(x / d). Triton's `/` is approximate and its `div_rn` is long; here r = RN(1 / d) is made once a
block with `div_rn`, and an element takes q = RN(x r) and steps q' = fma(fma(-q, d, x), r, q). After two steps q is the correctly
rounded quotient (Markstein's theorem, as r is correctly rounded and the first step leaves q within one ulp), provided that no step
under- or overflows: the 2^-90 floor of global scales (d >= 2^-99) and the cap of |x| at 6.5 d see to that; beyond it the code is 6 in
any case, and a quotient that underflows has code 0 both ways. For 16-bit inputs one step suffices for the code: only divisors
next to x over a half-way point could tell, and tests/quant/test_triton_logic.py tries all of them.
"""

from __future__ import annotations

import contextlib
import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from .blocks import NonFiniteWeight
from .mxfp8 import MXFP8Tensor
from .nvfp4 import GLOBAL_LIMIT, GLOBAL_MIN, NVFP4Tensor

INFINITY = 0x7F800000
# Blocks (elements, for the amax) and warps a program, the fastest of a sweep on an H200 with 1 GiB of bf16.
TILE, WARPS = 128, 1
DEQUANTIZE_TILE, DEQUANTIZE_WARPS = 64, 2
MX_TILE, MX_WARPS = 64, 4
MX_DEQUANTIZE_TILE, MX_DEQUANTIZE_WARPS = 64, 1
AMAX_TILE, AMAX_STEPS, AMAX_WARPS = 4096, 8, 4
# Triton's interpreter (TRITON_INTERPRET=1, CPU) has no fused multiply-add, but an exact quotient.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit
def _fp32_bits(x, BF16: tl.constexpr):
    """int32 bits of the fp32 values of fp16 or fp32 `x`, or of bf16 given as int16."""
    if BF16:
        return x.to(tl.int32) << 16
    return x.to(tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def _e4m3_bits(x):
    """E4M3 bits (int32) of fp32 values within [0, 448], round to nearest even, by integers."""
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 steps are 2^-9: adding 1.5 * 2^14 rounds to them and leaves their number in the low bits.
    subnormal = (x + 24576.0).to(tl.int32, bitcast=True) & 0xF
    return tl.where(x < 0.015625, subnormal, normal)


@triton.jit
def _e4m3_value(bits):
    """fp32 value of E4M3 bits (int32), NaN included."""
    magnitude = bits & 0x7F
    normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
    value = tl.where(magnitude == 0x7F, float("nan"), value)
    return tl.where(bits > 0x7F, -value, value)


@triton.jit
def _global_of_amax(bits):
    """Global scale of an amax given by its bits."""
    g = tl.math.div_rn(bits.to(tl.float32, bitcast=True), 2688.0)
    return tl.where(bits == 0, 1.0, tl.where(g < 8.077935669463161e-28, 8.077935669463161e-28, g))


@triton.jit
def _amax_kernel(x_ptr, amax_ptr, per_matrix, tiles, BF16: tl.constexpr, TILE: tl.constexpr, STEPS: tl.constexpr):
    """Largest magnitude bits of each matrix; a bf16 matrix is given as int32 words of two elements, and `per_matrix` counts words."""
    matrix = tl.program_id(0) // tiles
    x_ptr += matrix.to(tl.int64) * per_matrix
    start = (tl.program_id(0) % tiles).to(tl.int64) * (TILE * STEPS)
    best = tl.zeros([TILE], tl.int32)
    low = tl.zeros([TILE], tl.int32)
    for step in tl.static_range(STEPS):
        at = start + step * TILE + tl.arange(0, TILE)
        x = tl.load(x_ptr + at, mask=at < per_matrix, other=0)
        if BF16:
            best = tl.maximum(best, x & 0x7FFF0000)
            low = tl.maximum(low, x & 0x7FFF)
        else:
            best = tl.maximum(best, _fp32_bits(x, False) & 0x7FFFFFFF)
    tl.atomic_max(amax_ptr + matrix, tl.max(tl.maximum(best, low << 16), axis=0), sem="relaxed")


@triton.jit
def _codes(bits, divisor, r, STEPS: tl.constexpr):
    """E2M1 codes (int32) of fp32 `bits` over `divisor`, of which `r` is the reciprocal. STEPS: see the module; 0 divides."""
    x = bits.to(tl.float32, bitcast=True)
    magnitude = tl.abs(x)
    magnitude = tl.minimum(magnitude, 6.5 * divisor)  # beyond 6 the code is 7, as long as the quotient stays below 7
    if STEPS == 0:
        q = tl.math.div_rn(magnitude, divisor)
    else:
        q = magnitude * r
        for _ in tl.static_range(STEPS):
            q = tl.fma(tl.fma(-q, divisor, magnitude), r, q)
    # As in `nvfp4._magnitude_codes`: the sum rounds to the step between codes.
    power = tl.maximum((q.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True), 1.0)
    total = (power * 4194304.0 + q).to(tl.int32, bitcast=True)
    return ((total + (total >> 22) - 298) & 7) | tl.where(x < 0, 8, 0)


@triton.jit
def _nvfp4_quantize_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    amax_ptr,
    global_ptr,
    blocks,
    tiles,
    BF16: tl.constexpr,
    GIVEN: tl.constexpr,
    TILE: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Tile of blocks of one matrix. GIVEN: global scales are read, and non-finite input is reported in `amax_ptr`."""
    matrix, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    at = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < blocks
    row = matrix.to(tl.int64) * blocks + at
    if BF16:
        words = tl.load(x_ptr + row[:, None] * 8 + tl.arange(0, 8)[None, :], mask=inside[:, None], other=0)
        low, high = words << 16, words & -65536
    else:
        x = tl.load(x_ptr + row[:, None] * 16 + tl.arange(0, 16)[None, :], mask=inside[:, None], other=0)
        low, high = tl.split(tl.reshape(_fp32_bits(x, False), [TILE, 8, 2]))
    top = tl.max(tl.maximum(low & 0x7FFFFFFF, high & 0x7FFFFFFF), axis=1)
    if GIVEN:
        g = tl.load(global_ptr + matrix)
        worst = tl.max(top, axis=0)
        tl.atomic_max(amax_ptr + matrix, worst, mask=worst >= 0x7F800000, sem="relaxed")
    else:
        g = _global_of_amax(tl.load(amax_ptr + matrix))
        tl.store(global_ptr + matrix, g, mask=tile == 0)
    # A subnormal amax, flushed or not, is far below the smallest scale.
    ratio = tl.math.div_rn(top.to(tl.float32, bitcast=True), tl.full([TILE], 0.0, tl.float32) + 6.0 * g)
    ratio = tl.minimum(tl.maximum(ratio, 0.001953125), 448.0)
    scale = _e4m3_bits(tl.where(top == 0, 1.0, ratio))
    divisor = _e4m3_value(scale) * g
    r = tl.broadcast_to(tl.math.div_rn(tl.full([TILE], 1.0, tl.float32), divisor)[:, None], [TILE, 8])
    divisor = tl.broadcast_to(divisor[:, None], [TILE, 8])
    packed = _codes(low, divisor, r, STEPS) | (_codes(high, divisor, r, STEPS) << 4)
    tl.store(codes_ptr + row[:, None] * 8 + tl.arange(0, 8)[None, :], packed.to(tl.uint8), mask=inside[:, None])
    tl.store(scales_ptr + row, scale.to(tl.uint8), mask=inside)


@triton.jit
def _e2m1_value(code):
    """fp32 value of E2M1 codes (int32, 0..15): their bits, put where fp32 has exponent and fraction, are 2^-126 of it."""
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def _nvfp4_dequantize_kernel(codes_ptr, scales_ptr, global_ptr, out_ptr, blocks, tiles, TILE: tl.constexpr):
    matrix, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    at = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < blocks
    row = matrix.to(tl.int64) * blocks + at
    packed = tl.load(codes_ptr + row[:, None] * 8 + tl.arange(0, 8)[None, :], mask=inside[:, None], other=0).to(tl.int32)
    d = (_e4m3_value(tl.load(scales_ptr + row, mask=inside, other=0).to(tl.int32)) * tl.load(global_ptr + matrix))[:, None]
    values = tl.interleave(_e2m1_value(packed) * d, _e2m1_value(packed >> 4) * d)
    out = out_ptr + row[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(out, values.to(out_ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _mxfp8_quantize_kernel(x_ptr, codes_ptr, exponents_ptr, flag_ptr, blocks, BF16: tl.constexpr, CAST: tl.constexpr, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < blocks
    where = at[:, None] * 32 + tl.arange(0, 32)[None, :]
    bits = _fp32_bits(tl.load(x_ptr + where, mask=inside[:, None], other=0), BF16)
    top = tl.max(bits & 0x7FFFFFFF, axis=1)
    worst = tl.max(top, axis=0)
    tl.atomic_max(flag_ptr, worst, mask=worst >= 0x7F800000, sem="relaxed")
    byte = tl.maximum(((top + 0x1FFFFF) >> 23) - 8, 0)
    inverse = ((254 - byte) << 23).to(tl.float32, bitcast=True)
    if CAST:
        codes = (bits.to(tl.float32, bitcast=True) * inverse[:, None]).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        magnitude = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True) * inverse[:, None]
        codes = (_e4m3_bits(magnitude) | ((bits >> 24) & 0x80)).to(tl.uint8)
    tl.store(codes_ptr + where, codes, mask=inside[:, None])
    tl.store(exponents_ptr + at, byte.to(tl.uint8), mask=inside)


@triton.jit
def _mxfp8_dequantize_kernel(codes_ptr, exponents_ptr, out_ptr, blocks, CAST: tl.constexpr, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < blocks
    where = at[:, None] * 32 + tl.arange(0, 32)[None, :]
    byte = tl.load(exponents_ptr + at, mask=inside, other=0).to(tl.int32)
    bits = tl.where(byte == 0, 1 << 22, tl.where(byte == 255, 0x7FC00000, byte << 23))
    codes = tl.load(codes_ptr + where, mask=inside[:, None], other=0)
    values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32) if CAST else _e4m3_value(codes.to(tl.int32))
    values = values * bits.to(tl.float32, bitcast=True)[:, None]
    tl.store(out_ptr + where, values.to(out_ptr.dtype.element_ty), mask=inside[:, None])


def _plain(x: Tensor) -> tuple[Tensor, bool]:
    """Contiguous and aligned, flat, in a dtype that the kernels load; bf16 as int16, and whether it is that."""
    x = x.detach().contiguous().view(-1)
    x = x if x.data_ptr() % 16 == 0 else x.clone()
    if x.dtype is torch.bfloat16:
        return x.view(torch.int16), True
    return x if x.dtype in (torch.float16, torch.float32) else x.float(), False


def _on(x: Tensor) -> contextlib.AbstractContextManager:
    """The device of `x` as the current one."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def _casts(x: Tensor) -> bool:
    """Whether the device converts E4M3 itself (compute capability 8.9); the interpreter does, but rounds wrongly."""
    return x.is_cuda and torch.cuda.get_device_capability(x.device) >= (8, 9)


def _grid_scales(global_scale: Tensor, leading: torch.Size) -> tuple[Tensor, int]:
    """Global scales flat [S], and S, which divides the tensor into equal parts: its leading dimensions, or one for all."""
    scale = global_scale.float()
    if scale.numel() == 1:
        return scale.reshape(1), 1
    # Trailing dimensions of size 1 only broadcast; what is left must be the tensor's leading dimensions.
    flat = scale.reshape(scale.shape + (1,) * (len(leading) - scale.dim()))
    keep = max((i + 1 for i, n in enumerate(flat.shape) if n > 1), default=0)
    return flat.expand(*leading[:keep], *flat.shape[keep:]).reshape(-1).contiguous(), leading[:keep].numel()


def nvfp4_quantize(w: Tensor, global_scale: Tensor | None, name: str | None) -> NVFP4Tensor:
    """`quant.nvfp4.quantize` of a CUDA tensor whose last dimension is a multiple of 16; without a name there is no host sync."""
    x, bf16 = _plain(w)
    lead = w.shape[:-1]
    given = global_scale is not None
    if given:
        scales_in, parts = _grid_scales(global_scale, lead)
    else:
        parts = w.shape[:-2].numel()
        scales_in = torch.ones(parts, dtype=torch.float32, device=w.device)
    amax = torch.zeros(parts, dtype=torch.int32, device=w.device)
    codes = torch.empty(*lead, w.shape[-1] // 2, dtype=torch.uint8, device=w.device)
    scales = torch.empty(*lead, w.shape[-1] // 16, dtype=torch.uint8, device=w.device)
    if x.numel():
        blocks = x.numel() // parts // 16
        x = x.view(torch.int32) if bf16 else x
        steps = 0 if INTERPRETED else 2 if x.dtype is torch.float32 else 1
        with _on(x):
            if not given:
                loads = x.numel() // parts
                tiles = triton.cdiv(loads, AMAX_TILE * AMAX_STEPS)
                _amax_kernel[(tiles * parts,)](x, amax, loads, tiles, BF16=bf16, TILE=AMAX_TILE, STEPS=AMAX_STEPS, num_warps=AMAX_WARPS)
            tiles = triton.cdiv(blocks, TILE)
            _nvfp4_quantize_kernel[(tiles * parts,)](
                x, codes, scales, amax, scales_in, blocks, tiles, BF16=bf16, GIVEN=given, TILE=TILE, STEPS=steps, num_warps=WARPS
            )
    made = NVFP4Tensor(codes, scales, global_scale.float() if given else scales_in.reshape(w.shape[:-2]))
    if name is None:
        return made
    worst, outside = amax.amax() if parts else amax.new_zeros(()), None
    if given:
        outside = ((scales_in < GLOBAL_MIN) | ((scales_in > GLOBAL_LIMIT) & scales_in.isfinite())).any()
        worst, outside = torch.stack((worst, outside.int())).tolist()
    if worst >= INFINITY:
        raise NonFiniteWeight(f"{name}: holds NaN or infinity")
    if outside:
        raise ValueError(f"{name}: global scale must lie within [2^-90, 2^117]")
    return made


def nvfp4_dequantize(t: NVFP4Tensor, dtype: torch.dtype) -> Tensor:
    """`quant.nvfp4.dequantize` of CUDA tensors."""
    lead = t.codes.shape[:-1]
    scale, parts = _grid_scales(t.global_scale, lead)
    out = torch.empty(*lead, t.codes.shape[-1] * 2, dtype=dtype, device=t.codes.device)
    if out.numel():
        blocks = t.block_scales.numel() // parts
        tiles = triton.cdiv(blocks, DEQUANTIZE_TILE)
        with _on(out):
            _nvfp4_dequantize_kernel[(tiles * parts,)](
                t.codes.contiguous(),
                t.block_scales.contiguous(),
                scale,
                out,
                blocks,
                tiles,
                TILE=DEQUANTIZE_TILE,
                num_warps=DEQUANTIZE_WARPS,
            )
    return out


def mxfp8_quantize(w: Tensor, name: str) -> MXFP8Tensor:
    """`quant.mxfp8.quantize` of a CUDA tensor whose last dimension is a multiple of 32."""
    x, bf16 = _plain(w)
    codes = torch.empty(w.shape, dtype=torch.uint8, device=w.device)
    exponents = torch.empty(*w.shape[:-1], w.shape[-1] // 32, dtype=torch.uint8, device=w.device)
    flag = torch.zeros(1, dtype=torch.int32, device=w.device)
    if x.numel():
        blocks = x.numel() // 32
        with _on(x):
            _mxfp8_quantize_kernel[(triton.cdiv(blocks, MX_TILE),)](
                x, codes, exponents, flag, blocks, BF16=bf16, CAST=_casts(x), TILE=MX_TILE, num_warps=MX_WARPS
            )
        if flag.item() >= INFINITY:
            raise NonFiniteWeight(f"{name}: holds NaN or infinity")
    return MXFP8Tensor(codes, exponents)


def mxfp8_dequantize(t: MXFP8Tensor, dtype: torch.dtype) -> Tensor:
    """`quant.mxfp8.dequantize` of CUDA tensors."""
    out = torch.empty(t.codes.shape, dtype=dtype, device=t.codes.device)
    if out.numel():
        blocks = t.exponents.numel()
        with _on(out):
            _mxfp8_dequantize_kernel[(triton.cdiv(blocks, MX_DEQUANTIZE_TILE),)](
                t.codes.contiguous(),
                t.exponents.contiguous(),
                out,
                blocks,
                CAST=_casts(out),
                TILE=MX_DEQUANTIZE_TILE,
                num_warps=MX_DEQUANTIZE_WARPS,
            )
    return out

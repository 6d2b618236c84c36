"""MXFP8: E4M3 values in blocks of 32 that share a power-of-two scale (E8M0).

    exponent  e = ceil(log2(block_amax / 448))       rounded up ("RCEIL"), clamped to -127..127; byte = e + 127
    value     v = E4M3(x / 2^e)                      round to nearest even; never clips, since x / 2^e <= 448
    back      x' = v * 2^e                           exact in fp32, then cast

The exponent is found on the bits of the amax, exactly: no logarithm and no quotient is rounded.

Rules at the edges, each with a golden vector in tests/quant/golden/mxfp8.json:
  powers    amax 448 * 2^k (that is 1.75 * 2^(k + 8)) has exponent k exactly; the next larger fp32 has k + 1
  zeros     a block of zeros has exponent byte 0 and codes 0 (0x80 for -0.0)
  tiny      a block with amax below 448 * 2^-127 has byte 0 and scale 2^-127; subnormal inputs are not flushed
  large     the largest fp32 has byte 247, and its code is rounded up to 2^8: a value within half a step of 2^128 reads as infinity.
            Byte 255, which no finite input reaches, reads as NaN (OCP MX)
  sign      -0.0, and a negative value that rounds to zero, keep their sign: 0x80
  others    NaN or infinity raises `NonFiniteWeight` naming the tensor; a last dimension that is no multiple of 32 raises `ValueError`

Rounding up follows the MX practice of Blackwell engines; rounding down (OCP floor) clips up to 12 % off the largest values. CUDA
tensors take the kernels of `quant.triton_quant`, and `torch.compile` traces plain torch, as in `quant.nvfp4`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .blocks import block_amax, e4m3_values, fast_path, for_chunks, require_blocks, table

BLOCK = 32
BIAS = 127


class MXFP8Tensor(NamedTuple):
    """A quantized tensor of logical shape [..., K]."""

    codes: Tensor  # uint8 [..., K], E4M3 bits
    exponents: Tensor  # uint8 [..., K/32], E8M0: 2^(byte - 127)


def exponent_byte(amax: Tensor) -> Tensor:
    """E8M0 byte (uint8) of blocks whose largest magnitudes are `amax` (fp32): ceil(log2(amax / 448)) + 127, 0 where amax is 0."""
    # 448 = 1.75 * 2^8: the addend carries into the exponent field exactly where the fraction exceeds .75 (0x600000).
    return ((amax.view(torch.int32) + 0x1FFFFF) >> 23).sub_(8).clamp_min_(0).to(torch.uint8)


def scale_of(exponents: Tensor) -> Tensor:
    """fp32 scale 2^(byte - 127) of E8M0 bytes, exact down to the subnormal 2^-127; NaN for byte 255."""
    return table(_scale_table, exponents.device).index_select(0, exponents.reshape(-1).int()).reshape(exponents.shape)


def _scale_table(device: torch.device) -> Tensor:
    # The exponent field is the byte itself; 2^-127 is subnormal, and 0x7FC00000 is NaN.
    bits = torch.arange(256, dtype=torch.int32, device=device) << 23
    bits = torch.where(bits == 0, 1 << 22, bits)
    return torch.where(bits == 255 << 23, 0x7FC00000, bits).view(torch.float32)


def quantize(w: Tensor, name: str = "weight") -> MXFP8Tensor:
    """Quantize `w` [..., K] (bf16, fp16 or fp32). Raises `NonFiniteWeight` (with `name`) and `ValueError` on a bad K."""
    require_blocks(w, BLOCK)
    if fast_path(w):
        from . import triton_quant

        return triton_quant.mxfp8_quantize(w, name)
    blocks = w.detach().reshape(-1, BLOCK)
    exponents = exponent_byte(block_amax(blocks, name))
    # 2^(127 - byte): a normal fp32 for every byte up to 253, so that the product below is exact or underflows as x / 2^e does.
    inverse = (254 - exponents.int()).bitwise_left_shift_(23).view(torch.float32)
    codes = torch.empty(blocks.shape, dtype=torch.float8_e4m3fn, device=w.device)

    def work(part: slice) -> None:
        codes[part] = blocks[part] * inverse[part, None]

    for_chunks(blocks, work)
    return MXFP8Tensor(codes.view(torch.uint8).reshape(w.shape), exponents.reshape(*w.shape[:-1], w.shape[-1] // BLOCK))


def dequantize(t: MXFP8Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values [..., K] of a quantized tensor, computed in fp32 (exact) and cast to `dtype` last."""
    if fast_path(t.codes):
        from . import triton_quant

        return triton_quant.mxfp8_dequantize(t, dtype)
    codes, scale = t.codes.reshape(-1, BLOCK), scale_of(t.exponents.reshape(-1))
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)

    def work(part: slice) -> None:
        out[part] = e4m3_values(codes[part]).mul_(scale[part, None])

    for_chunks(codes, work)
    return out.reshape(t.codes.shape)

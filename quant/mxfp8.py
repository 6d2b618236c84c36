"""MXFP8: E4M3 values in blocks of 32 that share a power-of-two scale (E8M0).

    exponent  e = ceil(log2(block_amax / 448))       rounded up ("RCEIL"), clamped to -127..127; byte = e + 127
    value     v = E4M3(x / 2^e)                      round to nearest even; never clips, since x / 2^e <= 448

A block of zeros has exponent byte 0. NaN or infinity raises; a last dimension that is no multiple of 32 raises.
Rounding up follows the MX practice of Blackwell engines; rounding down (OCP floor) clips up to 12 % off the largest values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .nvfp4 import E4M3_MAX, _require_blocks, require_finite

BLOCK = 32
BIAS = 127


class MXFP8Tensor(NamedTuple):
    """A quantized tensor of logical shape [..., K]."""

    codes: Tensor  # uint8 [..., K], E4M3 bits
    exponents: Tensor  # uint8 [..., K/32], E8M0: 2^(byte - 127)


def exponent_byte(amax: Tensor) -> Tensor:
    """E8M0 byte (uint8) of blocks whose largest magnitudes are `amax` (fp32): ceil(log2(amax / 448)) + 127, 0 where amax is 0."""
    # frexp is exact where log2 and the quotient are not: amax = m * 2^e with m in [0.5, 1), and 448 = 0.875 * 2^9.
    mantissa, exponent = torch.frexp(amax)
    ceil = exponent - 9 + (mantissa > 0.875).to(exponent.dtype)
    byte = (ceil + BIAS).clamp(0, 2 * BIAS)
    return torch.where(amax == 0, torch.zeros_like(byte), byte).to(torch.uint8)


def scale_of(exponents: Tensor) -> Tensor:
    """fp32 scale 2^(byte - 127) of E8M0 bytes, exact down to the subnormal 2^-127."""
    return torch.ldexp(torch.ones(exponents.shape, device=exponents.device), exponents.int() - BIAS)


def quantize(w: Tensor, name: str = "weight") -> MXFP8Tensor:
    """Quantize `w` [..., K] (bf16, fp16 or fp32). Raises `NonFiniteWeight` (with `name`) and `ValueError` on a bad K."""
    _require_blocks(w, BLOCK)
    require_finite(w, name)
    blocks = w.float().unflatten(-1, (-1, BLOCK))
    exponents = exponent_byte(blocks.abs().amax(-1))
    scaled = torch.ldexp(blocks, (BIAS - exponents.int())[..., None]).clamp(-E4M3_MAX, E4M3_MAX)
    return MXFP8Tensor(scaled.to(torch.float8_e4m3fn).view(torch.uint8).flatten(-2), exponents)


def dequantize(t: MXFP8Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values [..., K] of a quantized tensor, computed in fp32 (exact) and cast to `dtype` last."""
    values = t.codes.view(torch.float8_e4m3fn).float().unflatten(-1, (-1, BLOCK))
    return (values * scale_of(t.exponents)[..., None]).flatten(-2).to(dtype)

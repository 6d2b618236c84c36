"""NVFP4 activations of the `w4a4` profile: what enters a GEMM on Blackwell, block scales from the values themselves.

The codes and scales follow the engines, not `quant.nvfp4`: the same format, but products with reciprocals in the place of quotients, and
no floor under the scales. With G the encode scale (fp32) and 1/6 rounded to fp32:

**Static** (`quantize_static`): one input scale from the checkpoint, `input_scale` = amax / 2688. As vLLM's `ref_nvfp4_quant`:
    G = 1 / input_scale
    s = E4M3(G * (block_amax * (1/6)))                   nearest even, saturating at 448; may be 0
    c = E2M1(x * (1 / (s * (1 / G))))                    1 / 0 counts as 1e-8, so that a block of scale 0 has codes 0
    x' = E2M1[c] * (s / G)                               what vLLM's emulation multiplies (`dequantize_static`)

**Per token** (`quantize_per_token`): a global scale for each row, from its amax. As FlashInfer's kernel with fast math off:
    G = 2688 / row_amax                                  at most the largest fp32, also where row_amax is 0
    s = E4M3(block_amax * (G * (1/6)))                   0 for a block of zeros
    c = E2M1(x * min(1 / (s * (1 / G)), largest fp32))   a factor of 0 for a block of zeros
    x' = E2M1[c] * (s * (1 / G))                         1 / G is the token scale handed to the GEMM; 0 for a row of zeros

With fast math on, which is their default, both engines take approximate reciprocals (`rcp.approx.ftz`): that differs in rare codes next
to a half-way point and cannot be computed anywhere but on the device. The engine of a run that is to agree must have it off.

Nothing raises on NaN or infinity: a forward pass must not wait for a check. A block that holds NaN (per token: its whole row) has scale
NaN (0x7F), and so values NaN; infinity under a static scale gives scale 448 and the largest code. Signs are as in `quant.nvfp4`: -0.0
has code 0 here and code 8 in hardware; both are zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import nvfp4
from .blocks import block_amax, e4m3_values, require_blocks
from .nvfp4 import BLOCK, E2M1_MAX, E4M3_MAX, GLOBAL_DIVISOR, NVFP4Tensor

_SIXTH = 0.1666666716337204  # 1/6 in fp32
_LARGEST = torch.finfo(torch.float32).max


def input_scale(amax: Tensor) -> Tensor:
    """Static input scale of activations whose calibrated largest magnitude is `amax` (any shape): fp32 amax / 2688."""
    amax = amax.float()
    return amax / torch.full_like(amax, GLOBAL_DIVISOR)  # a tensor as divisor: see `nvfp4.global_scale`


def quantize_static(x: Tensor, scale: Tensor) -> NVFP4Tensor:
    """Quantize activations [..., K] under the static input scale `scale` (fp32 scalar).

    The result's `global_scale` is `scale`. Raises `ValueError` when K is no multiple of 16.
    """
    blocks, amax = _blocks(x)
    encode = _reciprocal(scale.float().reshape(()))
    s = _e4m3(encode * (amax * _SIXTH))
    factor = _reciprocal(e4m3_values(s) * _reciprocal(encode))
    return _encoded(x, blocks, factor, s, scale.float())


def dequantize_static(t: NVFP4Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values [..., K] of `quantize_static`'s result as vLLM's emulation has them: E2M1 value times (s / G)."""
    factor = e4m3_values(t.block_scales.reshape(-1)) / _reciprocal(t.global_scale.reshape(()))
    return nvfp4.scaled_values(t.codes, factor, dtype)


def quantize_per_token(x: Tensor) -> NVFP4Tensor:
    """Quantize activations [..., K] with a global scale for each token, [...]: read the result with `nvfp4.dequantize`.

    Raises `ValueError` when K is no multiple of 16.
    """
    blocks, amax = _blocks(x)
    per_row = x.shape[-1] // BLOCK
    row = amax.view(*x.shape[:-1], per_row).amax(-1)
    # torch takes a number over a tensor as a product with the reciprocal: two roundings.
    encode = (torch.full_like(row, GLOBAL_DIVISOR) / row).clamp_max_(_LARGEST)
    encode = torch.where(encode == 0, torch.ones_like(encode), encode)
    decode = torch.where(row == 0, torch.zeros_like(row), 1.0 / encode)
    spread = encode.reshape(-1, 1).expand(-1, per_row).reshape(-1)
    zero = amax == 0
    s = _e4m3((amax * (spread * _SIXTH)).masked_fill_(zero, 0.0))
    factor = (1.0 / (e4m3_values(s) * (1.0 / spread))).clamp_max_(_LARGEST).masked_fill_(zero, 0.0)
    return _encoded(x, blocks, factor, s, decode)


def _blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks fp32 [B, 16] and their amax [B], NaN where they hold one."""
    require_blocks(x, BLOCK)
    blocks = x.detach().reshape(-1, BLOCK)
    return blocks, block_amax(blocks, None)


def _e4m3(x: Tensor) -> Tensor:
    """E4M3 bits (uint8) of non-negative fp32 values, saturating; NaN stays NaN."""
    return x.clamp_max(E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def _reciprocal(x: Tensor) -> Tensor:
    """1 / x, and 1e-8 where x is 0."""
    return 1.0 / torch.where(x == 0, torch.full_like(x, 1e8), x)


def _encoded(x: Tensor, blocks: Tensor, factor: Tensor, s: Tensor, scale: Tensor) -> NVFP4Tensor:
    scaled = (blocks.float() * factor[:, None]).clamp_(-E2M1_MAX, E2M1_MAX)
    codes = nvfp4.pack(nvfp4.encode_e2m1(scaled)).reshape(*x.shape[:-1], -1)
    return NVFP4Tensor(codes, s.reshape(*x.shape[:-1], -1), scale)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, scale: Tensor | None) -> Tensor:
        if scale is None:
            return nvfp4.dequantize(quantize_per_token(x), x.dtype)
        return dequantize_static(quantize_static(x, scale), x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None


def round_trip(x: Tensor, scale: Tensor | None = None) -> Tensor:
    """What a W4A4 GEMM sees of activations `x` [..., K], in x's dtype, with a straight-through gradient.

    `scale`: the static input scale; None: per token.
    """
    return _StraightThrough.apply(x, scale)

"""NVFP4: E2M1 values in blocks of 16 with an E4M3 scale each, under one fp32 global scale.

This is the one definition of the format in samebits; kernels, packers and engines are compared with it byte by byte.

    global scale  g = amax / 2688                     (2688 = 448 * 6, the largest E4M3 times the largest E2M1)
    block scale   s = E4M3(block_amax / (6 * g))      round to nearest even, saturating at 448
    code          c = E2M1(x / (s * g))               round to nearest, ties to the even code, saturating at 6
    value         x' = E2M1[c] * (s * g)

Rules at the edges, each with a golden vector in the tests:
  ties      0.25->0  0.75->1  1.25->1  1.75->2  2.5->2  3.5->4  5->4 (the even code, as `cvt.rn.satfinite.e2m1x2`)
  zeros     a block of zeros has scale 1.0 (byte 0x38) and codes 0; a tensor of zeros has global scale 1.0
  tiny      a block whose scale would round to 0 takes the smallest E4M3, 2^-9, so that it keeps what it can
  sign      -0.0 has code 0; a negative value that rounds to zero has code 8
  others    NaN or infinity raises `NonFiniteWeight`; a last dimension that is no multiple of 16 raises `ValueError`

Byte layout: two codes a byte, the even element in the low nibble, as ModelOpt and vLLM store it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 16
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_TINY = 2.0**-9
GLOBAL_DIVISOR = E2M1_MAX * E4M3_MAX  # 2688
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Between code i and i+1. A magnitude equal to a midpoint belongs to the even code: the lower one where i is even.
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


class NonFiniteWeight(ValueError):
    """A weight holds NaN or infinity and cannot be quantized."""


class NVFP4Tensor(NamedTuple):
    """A quantized tensor of logical shape [..., K]."""

    codes: Tensor  # uint8 [..., K/2], even element in the low nibble
    block_scales: Tensor  # uint8 [..., K/16], E4M3 bits
    global_scale: Tensor  # fp32, broadcastable over the leading dimensions: [] or [E] for a stack of experts


def require_finite(w: Tensor, name: str = "weight") -> None:
    """Raise `NonFiniteWeight` naming the tensor when it holds NaN or infinity."""
    if not torch.isfinite(w).all():
        raise NonFiniteWeight(f"{name}: holds NaN or infinity")


def _require_blocks(w: Tensor, block: int) -> None:
    if w.dim() == 0 or w.shape[-1] % block:
        raise ValueError(f"last dimension must be a multiple of {block}, got shape {tuple(w.shape)}")


def global_scale(amax: Tensor) -> Tensor:
    """Global scale of a tensor whose largest magnitude is `amax` (any shape, fp32): amax / 2688, or 1 where amax is 0."""
    amax = amax.float()
    return torch.where(amax == 0, torch.ones_like(amax), amax / GLOBAL_DIVISOR)


def _expand(scale: Tensor, dims: int) -> Tensor:
    return scale.reshape(scale.shape + (1,) * (dims - scale.dim()))


def encode_e2m1(x: Tensor) -> Tensor:
    """E2M1 code (uint8, 0..15) of each fp32 value: round to nearest, ties to even, saturating."""
    magnitude = x.abs()
    code = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for i, mid in enumerate(_MIDPOINTS):
        code += (magnitude > mid) if i % 2 == 0 else (magnitude >= mid)
    return code | ((x < 0).to(torch.uint8) << 3)


def decode_e2m1(codes: Tensor) -> Tensor:
    """fp32 value of each E2M1 code (uint8, 0..15)."""
    table = torch.tensor(E2M1_VALUES + tuple(-v for v in E2M1_VALUES), dtype=torch.float32, device=codes.device)
    return table[codes.int()]


def pack(codes: Tensor) -> Tensor:
    """uint8 [..., K] codes to uint8 [..., K/2] bytes, even element in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """Inverse of `pack`."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def quantize(w: Tensor, scale: Tensor | None = None, name: str = "weight") -> NVFP4Tensor:
    """Quantize `w` [..., K] (bf16, fp16 or fp32).

    `scale` is the fp32 global scale: a scalar, or of a shape that matches `w`'s leading dimensions (one per expert of
    a stack [E, N, K] is shape [E]). Default: one for the whole tensor, from its amax.
    Raises `NonFiniteWeight` (with `name`) and `ValueError` when K is no multiple of 16.
    """
    _require_blocks(w, BLOCK)
    require_finite(w, name)
    x = w.float()
    if scale is None:
        scale = global_scale(x.abs().amax())
    g = _expand(scale.float(), w.dim())
    blocks = x.unflatten(-1, (-1, BLOCK))
    amax = blocks.abs().amax(-1)
    ratio = (amax / (E2M1_MAX * g)).clamp(E4M3_TINY, E4M3_MAX)
    s = torch.where(amax == 0, torch.ones_like(ratio), ratio).to(torch.float8_e4m3fn)
    codes = encode_e2m1(blocks / (s.float() * g)[..., None]).flatten(-2)
    return NVFP4Tensor(pack(codes), s.view(torch.uint8), scale.float())


def dequantize(t: NVFP4Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values [..., K] of a quantized tensor: E2M1 value times (block scale times global scale) in fp32, cast to `dtype` last."""
    values = decode_e2m1(unpack(t.codes)).unflatten(-1, (-1, BLOCK))
    s = t.block_scales.view(torch.float8_e4m3fn).float() * _expand(t.global_scale, t.block_scales.dim())
    return (values * s[..., None]).flatten(-2).to(dtype)

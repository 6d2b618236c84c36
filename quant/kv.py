"""NVFP4 KV cache: the format of one token's key, value or index key of one head.

A row of D elements (128 in MiniMax-M3) becomes D/2 bytes of E2M1 codes and D/16 bytes of E4M3 scales: 72 bytes for 128 elements,
4.5 bits each. The global scale is 1.0, as in vLLM's M3 layers, so a row can be written without knowing any other row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import nvfp4


def row_bytes(head_dim: int) -> int:
    """Bytes of one row of `head_dim` elements."""
    return head_dim // 2 + head_dim // nvfp4.BLOCK


def write(x: Tensor) -> Tensor:
    """Rows [..., D] (bf16 or fp32) to bytes uint8 [..., D/2 + D/16]: codes first, then scales, both linear."""
    t = nvfp4.quantize(x, torch.ones((), device=x.device), name="KV row")
    return torch.cat((t.codes, t.block_scales), dim=-1)


def read(rows: Tensor, head_dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Bytes uint8 [..., D/2 + D/16] to values [..., D]."""
    codes, scales = rows.split((head_dim // 2, head_dim // nvfp4.BLOCK), dim=-1)
    return nvfp4.dequantize(nvfp4.NVFP4Tensor(codes, scales, torch.ones((), device=rows.device)), dtype)


class _RoundTrip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return read(write(x), x.shape[-1], x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad


def round_trip(x: Tensor) -> Tensor:
    """What an NVFP4 cache gives back for `x` [..., D], with a straight-through gradient."""
    return _RoundTrip.apply(x)

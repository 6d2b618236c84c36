"""Gemma RMS norm: y = x / sqrt(mean(x^2) + eps) * (1 + w), in fp32, rounded once at the end."""

from __future__ import annotations

import torch
from torch import Tensor


def _normalise(x32: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps) * (1.0 + weight.float())


def gemma_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x` [..., D], zero-centred `weight` [D]; result in x's dtype."""
    return _normalise(x.float(), weight, eps).to(x.dtype)


def gemma_rms_norm_add(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Norm of x + residual, and that sum. The sum is rounded to x's dtype, the norm is taken before that rounding, as vLLM does."""
    total = x.float() + residual.float()
    return _normalise(total, weight, eps).to(x.dtype), total.to(x.dtype)

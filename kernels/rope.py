"""Partial rotary position embedding in NeoX layout: the first `rotary_dim` elements of a head are rotated, the rest pass."""

from __future__ import annotations

import torch
from torch import Tensor


def rope_table(max_position: int, rotary_dim: int, theta: float, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """cos and sin, fp32 [max_position, rotary_dim / 2], computed as vLLM's `RotaryEmbedding` computes its cache."""
    inv_freq = 1.0 / (theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim))
    angles = torch.arange(max_position, dtype=torch.float32, device=device)[:, None] * inv_freq
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` [T, heads, D] by `cos`, `sin` [T, rotary_dim / 2]; computed in fp32, result in x's dtype."""
    half = cos.shape[-1]
    c, s = cos.float()[:, None], sin.float()[:, None]
    a, b = x[..., :half].float(), x[..., half : 2 * half].float()
    return torch.cat(((a * c - b * s).to(x.dtype), (b * c + a * s).to(x.dtype), x[..., 2 * half :]), dim=-1)

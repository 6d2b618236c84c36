"""Partial rotary position embedding in NeoX layout: the first `rotary_dim` elements of a head are rotated, the rest pass."""

from __future__ import annotations

import torch
from torch import Tensor


def rope_table(max_position: int, rotary_dim: int, theta: float, device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
    """cos and sin, fp32 [max_position, rotary_dim / 2] on `device` (default: torch's default device).

    Computed on the CPU whatever the device, by the formula of vLLM's `RotaryEmbedding`: both sides of a run get the same bits.
    """
    inv_freq = 1.0 / (theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32, device="cpu") / rotary_dim))
    angles = torch.arange(max_position, dtype=torch.float32, device="cpu")[:, None] * inv_freq
    device = torch.get_default_device() if device is None else device
    return angles.cos().to(device), angles.sin().to(device)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    c, s = cos.float()[:, None], sin.float()[:, None]
    a, b = x[..., :half].float(), x[..., half : 2 * half].float()
    out = torch.empty_like(x)
    out[..., :half] = (a * c).sub_(b * s)
    out[..., half : 2 * half] = (b * c).add_(a * s)
    out[..., 2 * half :] = x[..., 2 * half :]
    return out


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx, grad: Tensor):
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin), None, None  # the gradient is rotated back


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` [T, heads, D] by `cos`, `sin` [T, rotary_dim / 2] (no gradient); computed in fp32, result in x's dtype."""
    return _Rope.apply(x, cos, sin)

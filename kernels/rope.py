"""Partial rotary position embedding in NeoX layout: the first `rotary_dim` elements of a head are rotated, the rest pass.

With x in bf16 on CUDA, `triton_rows` computes the same bits in one kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.quant.blocks import fast_path


def rope_table(max_position: int, rotary_dim: int, theta: float, device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
    """cos and sin, fp32 [max_position, rotary_dim / 2] on `device` (default: torch's default device).

    Computed on the CPU whatever the device, by the formula of vLLM's `RotaryEmbedding`: both sides of a run get the same bits.
    """
    inv_freq = 1.0 / (theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32, device="cpu") / rotary_dim))
    angles = torch.arange(max_position, dtype=torch.float32, device="cpu")[:, None] * inv_freq
    device = torch.get_default_device() if device is None else device
    return angles.cos().to(device), angles.sin().to(device)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    """Rotated by the angles, or back by them."""
    if x.dtype is torch.bfloat16 and fast_path(x):
        from . import triton_rows

        return triton_rows.rotate(x, cos, sin, back)
    sin = -sin if back else sin
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
        return _rotate(x, cos, sin, back=False)

    @staticmethod
    def backward(ctx, grad: Tensor):
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, sin, back=True), None, None


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` [T, heads, D] by `cos`, `sin` [T, rotary_dim / 2] (no gradient); computed in fp32, result in x's dtype."""
    return _Rope.apply(x, cos, sin)

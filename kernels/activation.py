"""SwiGLU as MiniMax-M3 and gpt-oss use it, gate and up in separate halves (not interleaved).

With gate and up in bf16 on CUDA, kernels of `triton_rows` do the work; the sigmoid's last bit may then be another than torch's.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from samebits.quant.blocks import fast_path

from .sums import wide


class SwiGLU(NamedTuple):
    """Constants of the activation: `min(gate, limit) * sigmoid(alpha * gate) * (clamp(up, limit) + beta)`."""

    alpha: float = 1.702
    beta: float = 1.0
    limit: float = 7.0


class _SwiGLU(torch.autograd.Function):
    """The gradient is written out, so that only the two inputs are kept."""

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor, params: SwiGLU, dtype: torch.dtype) -> Tensor:
        ctx.params = params
        ctx.save_for_backward(gate, up)
        if _kernels_take(gate, up):
            from . import triton_rows

            return triton_rows.swiglu(gate, up, params, dtype)
        gate = wide(gate).clamp(max=params.limit)
        up = wide(up).clamp(-params.limit, params.limit)
        return (params.alpha * gate).sigmoid_().mul_(gate).mul_(up + params.beta).float().to(dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (gate, up), params = ctx.saved_tensors, ctx.params
        if _kernels_take(gate, up):
            from . import triton_rows

            return *triton_rows.swiglu_gradient(gate, up, grad, params), None, None
        g, u = gate.float().clamp(max=params.limit), up.float().clamp(-params.limit, params.limit)
        s = (params.alpha * g).sigmoid_()
        gs = g * s
        grad_up = (grad * gs).mul_(up.abs() <= params.limit)
        # d(g s)/dg = s + alpha g s (1 - s); a clamped half passes no gradient.
        slope = s.add_(gs.sub_(gs * s), alpha=params.alpha)
        grad_gate = slope.mul_(u.add_(params.beta)).mul_(grad).mul_(gate <= params.limit)
        return grad_gate.to(gate.dtype), grad_up.to(up.dtype), None, None


def _kernels_take(gate: Tensor, up: Tensor) -> bool:
    return gate.dtype is up.dtype is torch.bfloat16 and fast_path(gate)


def swiglu_oai_halves(gate: Tensor, up: Tensor, params: SwiGLU, dtype: torch.dtype = torch.float32) -> Tensor:
    """`gate` and `up` [..., I] to [..., I], computed in fp32 and rounded once to `dtype` (fp32 or bf16)."""
    return _SwiGLU.apply(gate, up, params, dtype)


def swiglu_oai(gate_up: Tensor, params: SwiGLU, dtype: torch.dtype = torch.float32) -> Tensor:
    """`gate_up` [..., 2I], gate half first, to [..., I]; see `swiglu_oai_halves`."""
    return swiglu_oai_halves(*gate_up.chunk(2, dim=-1), params, dtype)

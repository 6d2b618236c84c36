"""Gemma RMS norm: y = x / sqrt(mean(x^2) + eps) * (1 + w), in fp32, rounded once at the end.

The gradient is written out: autograd would keep and walk six full-size intermediates of each norm. With x in bf16 on CUDA the kernels of
`triton_rows` do the work: a row's sum of squares then has one order, whatever the batch. Gradients of a weight are torch's everywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.quant.blocks import fast_path

from .sums import wide


def _kernels_take(*inputs: Tensor) -> bool:
    return all(x.dtype is torch.bfloat16 for x in inputs) and fast_path(inputs[0])


def _scale(x32: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(wide(x32).square().mean(-1, keepdim=True) + eps).float()


def _normalise(x32: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (x32 * _scale(x32, eps)).mul_(1.0 + weight.float())


def _gradient(grad: Tensor, x32: Tensor, weight: Tensor, eps: float) -> Tensor:
    """dL/dx in fp32 for y = x s (1 + w) with s = rsqrt(mean(x^2) + eps): s g' - x s^3 mean(g' x), g' = g (1 + w)."""
    s = _scale(x32, eps)
    g = grad.float() * (1.0 + weight.float())
    along = s.square() * (g * x32).mean(-1, keepdim=True)
    return g.sub_(x32 * along).mul_(s)


def _weight_gradient(grad: Tensor, x32: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (grad.float() * x32 * _scale(x32, eps)).flatten(0, -2).sum(0).to(weight.dtype)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.eps = eps
        ctx.save_for_backward(x, weight)
        if _kernels_take(x):
            from . import triton_rows

            return triton_rows.norm(x, None, weight, eps)[0]
        return _normalise(x.float(), weight, eps).to(x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        grad_weight = _weight_gradient(grad, x.float(), weight, ctx.eps) if ctx.needs_input_grad[1] else None
        if _kernels_take(x):
            from . import triton_rows

            return triton_rows.norm_gradient(x, None, weight, grad, None, ctx.eps), grad_weight, None
        return _gradient(grad, x.float(), weight, ctx.eps).to(x.dtype), grad_weight, None


class _NormAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        ctx.eps = eps
        ctx.save_for_backward(x, residual, weight)
        if _kernels_take(x, residual):
            from . import triton_rows

            return triton_rows.norm(x, residual, weight, eps)
        total = x.float() + residual.float()
        return _normalise(total, weight, eps).to(x.dtype), total.to(x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor, grad_sum: Tensor):
        x, residual, weight = ctx.saved_tensors
        grad_weight = None
        if ctx.needs_input_grad[2]:
            grad_weight = _weight_gradient(grad, x.float() + residual.float(), weight, ctx.eps)
        if _kernels_take(x, residual):
            from . import triton_rows

            g = triton_rows.norm_gradient(x, residual, weight, grad, grad_sum, ctx.eps)
            return g, g, grad_weight, None
        g = _gradient(grad, x.float() + residual.float(), weight, ctx.eps) + grad_sum.float()
        return g.to(x.dtype), g.to(residual.dtype), grad_weight, None


def gemma_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x` [..., D], zero-centred `weight` [D]; result in x's dtype."""
    return _Norm.apply(x, weight, eps)


def gemma_rms_norm_add(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Norm of x + residual, and that sum. The sum is rounded to x's dtype, the norm is taken before that rounding, as vLLM does."""
    return _NormAdd.apply(x, residual, weight, eps)

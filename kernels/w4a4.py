"""NVFP4 activations times NVFP4 weights, emulated with bits that no device, batch or library changes.

A GEMM of the base sees x quantized as `quant.activations` says, code for code:

    y = (sum over blocks of sx sw (sum over the block of cx cw)) * (gx gw)

with E2M1 codes c, E4M3 block scales s and the fp32 global scales g of the token (or the tensor) and the expert. As on Blackwell's tensor
cores the block-scaled sum is rounded to fp32 before the epilogue's one multiplication; unlike there it is rounded once, since the order in
which that hardware rounds is not known. What makes the sum the same everywhere is that it is exact: a product of two codes and two scales
is a multiple of 2^-20, 64 blocks of 16 of them stay below 2^33, so that fp64 holds every partial sum of 1024 inputs and any matrix product,
in any order, gives the same bits. Parts of 1024 inputs are added in ascending order.

The rest is made of single operations that IEEE 754 defines: adapters, whose products are not on a grid, are summed in fp64 in a tree of
fixed shape, and SwiGLU is computed in fp64 with an exponential of its own, since libraries differ in theirs. Gradients pass the
quantization straight through, by ordinary matrix products: they have no such bits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from samebits.quant import nvfp4
from samebits.quant.activations import quantize_per_token, quantize_static
from samebits.quant.blocks import e4m3_values
from samebits.quant.nvfp4 import NVFP4Tensor

from .activation import SwiGLU, _SwiGLU
from .linear import LoRA, adapter_rows

EXACT = 1024  # inputs whose sum fp64 holds exactly
_HELD = 1 << 22  # products of an adapter held at a time
_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10  # of fdlibm: k * high is exact for |k| < 2^11
_TERMS = 14  # of the exponential's series on [-ln 2 / 2, ln 2 / 2]: the first left out is below 2^-57


def block_product(x: Tensor, weight: NVFP4Tensor, scale: Tensor | None) -> Tensor:
    """x [T, K] quantized times `weight` [N, K] transposed: fp32 [T, N], with a straight-through gradient to x.

    `scale`: the static input scale (fp32 scalar), None for a scale of each token. Raises `ValueError` for a weight that is not NVFP4.
    """
    if not isinstance(weight, NVFP4Tensor):
        raise ValueError(f"W4A4 multiplies NVFP4 weights, got {type(weight).__name__}")
    return _BlockProduct.apply(x, scale, *weight)


class _BlockProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, scale: Tensor | None, *parts: Tensor) -> Tensor:
        ctx.x_dtype = x.dtype
        ctx.save_for_backward(*parts)
        weight = NVFP4Tensor(*parts)
        x = x.float()
        t = quantize_per_token(x) if scale is None else quantize_static(x, scale)
        left, right = unscaled(t), unscaled(weight)
        out = torch.zeros(len(x), len(right), dtype=torch.float64, device=x.device)
        for a, b in zip(left.split(EXACT, 1), right.split(EXACT, 1), strict=True):
            out += a @ b.t()
        factor = t.global_scale * weight.global_scale
        return out.float() * (factor if scale is not None else factor[:, None])

    @staticmethod
    def backward(ctx, grad: Tensor):
        grad_x = None
        parts = ctx.saved_tensors
        if ctx.needs_input_grad[0]:
            grad_x = (grad.float() @ nvfp4.dequantize(NVFP4Tensor(*parts))).to(ctx.x_dtype)
        return grad_x, None, *(None for _ in parts)


def unscaled(t: NVFP4Tensor) -> Tensor:
    """fp64 values without the global scale, exact."""
    return nvfp4.scaled_values(t.codes, e4m3_values(t.block_scales.reshape(-1)), torch.float64)


def add_adapter(out: Tensor, x: Tensor, lora: LoRA, adapter_ids: Tensor | None) -> Tensor:
    """`linear.add_lora` with sums of one order."""
    for slot, rows in adapter_rows(adapter_ids):
        xs = x if rows is None else x[rows]
        u = _TreeLinear.apply(xs, lora.a[slot]).to(x.dtype)
        delta = _TreeLinear.apply(u, lora.b[slot])
        out = out + delta if rows is None else out.index_add(0, rows, delta)
    return out


class _TreeLinear(torch.autograd.Function):
    """x [T, K] times w [N, K] transposed, fp32."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return tree_linear(x, w)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, w = ctx.saved_tensors
        return (grad @ w.float()).to(x.dtype), (grad.t() @ x.float()).to(w.dtype)


def tree_linear(x: Tensor, w: Tensor) -> Tensor:
    """x [T, K] times w [N, K] transposed, rounded to fp32: fp64 sums in which the second half is added to the first until one is left."""
    x, w = x.double(), w.double()
    out = torch.empty(len(x), len(w), dtype=torch.float32, device=x.device)
    columns = max(1, _HELD // x.shape[1])
    rows = max(1, columns // len(w))
    for i in range(0, len(x), rows):
        for j in range(0, len(w), columns):
            products = x[i : i + rows, None] * w[None, j : j + columns]
            while products.shape[-1] > 1:
                half = (products.shape[-1] + 1) // 2
                head, tail = products[..., :half], products[..., half:]
                head[..., : tail.shape[-1]] += tail
                products = head
            out[i : i + rows, j : j + columns] = products[..., 0]
    return out


class _SameSwiGLU(_SwiGLU):
    """The gradient is that of every other SwiGLU."""

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor, params: SwiGLU, dtype: torch.dtype) -> Tensor:
        ctx.params = params
        ctx.save_for_backward(gate, up)
        g, u = gate.double().clamp(max=params.limit), up.double().clamp(-params.limit, params.limit)
        return (g / (exp(g * -params.alpha) + 1.0) * (u + params.beta)).float().to(dtype)


def swiglu(gate: Tensor, up: Tensor, params: SwiGLU, dtype: torch.dtype = torch.float32) -> Tensor:
    """`activation.swiglu_oai_halves` in fp64, rounded to fp32 and then to `dtype`."""
    return _SameSwiGLU.apply(gate, up, params, dtype)


def exp(x: Tensor) -> Tensor:
    """e^x of fp64 within a few units in the last place, by additions and multiplications alone; as at 700 and -700 beyond those."""
    x = x.clamp(-700.0, 700.0)
    k = torch.round(x * (1 / math.log(2)))
    r = (x - k * _LN2_HIGH) - k * _LN2_LOW
    out = torch.full_like(r, 1 / math.factorial(_TERMS - 1))
    for n in range(_TERMS - 2, -1, -1):
        out = out * r
        out = out + 1 / math.factorial(n)
    return out * ((k.long() + 1023) << 52).view(torch.float64)

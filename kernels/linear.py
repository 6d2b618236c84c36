"""Linear layers over a frozen, possibly quantized weight, with the adapter added inside the same fp32 sum.

    y = x W^T + u B^T      with u = x A^T rounded to x's dtype, everything summed in fp32 and rounded once to x's dtype

The frozen weight may stay packed: its values are rebuilt where they are needed, in forward and again in backward, so that
autograd never keeps a dequantised copy alive.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from samebits.quant import mxfp8, nvfp4
from samebits.quant.blocks import fast_path
from samebits.quant.mxfp8 import MXFP8Tensor
from samebits.quant.nvfp4 import NVFP4Tensor

from .linear_tiles import MXFP8Tiles, unpack_linear
from .sums import add_product, product

FrozenWeight = Tensor | NVFP4Tensor | MXFP8Tensor


class LoRA(NamedTuple):
    """Adapter slots of one projection. The scale alpha / rank is already inside B."""

    a: Tensor  # [slots, r, K]
    b: Tensor  # [slots, N, r]


def values(weight: FrozenWeight) -> Tensor:
    """fp32 values of a frozen weight."""
    if isinstance(weight, NVFP4Tensor):
        return nvfp4.dequantize(weight)
    if isinstance(weight, MXFP8Tensor):
        return mxfp8.dequantize(weight)
    return weight.float()


def select(weight: FrozenWeight, index: int) -> FrozenWeight:
    """One matrix of a stack [E, N, K]."""
    return type(weight)(*(part[index] for part in weight)) if isinstance(weight, tuple) else weight[index]


def rows_of(weight: FrozenWeight, start: int, stop: int) -> FrozenWeight:
    """Some output rows of a matrix [N, K]."""
    if not isinstance(weight, tuple):
        return weight[start:stop]
    # Codes and block scales have a row for each output; a global scale has no dimension here.
    return type(weight)(*(part[start:stop] if part.dim() > 1 else part for part in weight))


def split(weight: FrozenWeight, parts: int) -> tuple[FrozenWeight, ...]:
    """A matrix [N, K] cut into `parts` of equal height, e.g. a stacked gate and up."""
    n = (weight[0] if isinstance(weight, tuple) else weight).shape[0] // parts
    return tuple(rows_of(weight, i * n, (i + 1) * n) for i in range(parts))


class _FrozenLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, kind: type, *parts: Tensor) -> Tensor:
        ctx.kind, ctx.x_dtype = kind, x.dtype
        ctx.save_for_backward(*parts)
        return product(x, values(_join(kind, parts)))

    @staticmethod
    def backward(ctx, grad: Tensor):
        parts = ctx.saved_tensors  # read once: activation checkpointing allows no more
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad.float() @ values(_join(ctx.kind, parts))).to(ctx.x_dtype)
        return (grad_x, None, *(None for _ in parts))


def _join(kind: type, parts: tuple[Tensor, ...]) -> FrozenWeight:
    return kind(*parts) if kind is not Tensor else parts[0]


def frozen_linear(x: Tensor, weight: FrozenWeight, outputs: int | None = None) -> Tensor:
    """x [T, K] times a frozen weight [N, K] transposed: fp32 [T, N]. Gradient to x only.

    `outputs`: rows of the matrix of which `weight` is a part, where it is one: the order of a sum may be chosen by them.

    A dense bf16 or fp32 weight and x in bf16 on CUDA take the kernels of `triton_dense`: a row's sums then have one order in every batch.
    """
    if isinstance(weight, tuple):
        return _FrozenLinear.apply(x, type(weight), *weight)
    if x.dtype is torch.bfloat16 and fast_path(x) and weight.dtype in (torch.bfloat16, torch.float32):
        from .triton_dense import DenseLinear

        return DenseLinear.apply(x, weight, outputs)
    return _FrozenLinear.apply(x, Tensor, weight)


def add_lora(out: Tensor, x: Tensor, lora: LoRA, adapter_ids: Tensor | None) -> Tensor:
    """`out` fp32 [T, N] plus the adapter's delta. `adapter_ids` int [T]: slot of each token, -1 for none; None: slot 0 for all.

    A token without an adapter keeps its bits.
    """
    for slot, rows in adapter_rows(adapter_ids):
        xs = x if rows is None else x[rows]
        u = product(xs, lora.a[slot]).to(x.dtype)
        b = lora.b[slot]
        out = add_product(out, u, b) if rows is None else out.index_copy(0, rows, add_product(out.index_select(0, rows), u, b))
    return out


class _LoRALinear(torch.autograd.Function):
    """`frozen_linear` and `add_lora` of one slot for all rows, with one gradient GEMM for both: g [W | B] gives dx and du."""

    @staticmethod
    def forward(ctx, x: Tensor, a: Tensor, b: Tensor, kind: type, *parts: Tensor) -> Tensor:
        u = product(x, a).to(x.dtype)
        ctx.kind = kind
        ctx.save_for_backward(x, u, a, b, *parts)
        return add_product(product(x, values(_join(kind, parts))), u, b)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, u, a, b, *parts = ctx.saved_tensors
        grad, a32, b32 = grad.float(), a.float(), b.float()
        grad_x = None
        if ctx.needs_input_grad[0]:
            weight = values(_join(ctx.kind, tuple(parts)))
            both = grad @ torch.cat((weight, b32), dim=1)
            grad_x, grad_u = both[:, : weight.shape[1]], both[:, weight.shape[1] :]
            grad_x = torch.addmm(grad_x, grad_u, a32).to(x.dtype)
        else:
            grad_u = grad @ b32
        grad_a, grad_b = grad_u.t() @ x.float(), grad.t() @ u.float()
        return grad_x, grad_a.to(a.dtype), grad_b.to(b.dtype), None, *(None for _ in parts)


def adapter_rows(adapter_ids: Tensor | None) -> list[tuple[int, Tensor | None]]:
    """(slot, its rows) for each adapter present; rows None means all rows, so that the common case moves nothing."""
    if adapter_ids is None:
        return [(0, None)]
    slots = adapter_ids.unique().tolist()
    if len(slots) == 1:
        return [(slots[0], None)] if slots[0] >= 0 else []
    return [(s, (adapter_ids == s).nonzero().flatten()) for s in slots if s >= 0]


def lora_linear(x: Tensor, weight: FrozenWeight | MXFP8Tiles, lora: LoRA | None = None, adapter_ids: Tensor | None = None) -> Tensor:
    """Frozen linear with adapter: x [T, K] to [T, N] in x's dtype. See the module docstring for the arithmetic.

    `MXFP8Tiles` with x in bf16 on CUDA take the Triton kernels of `triton_linear`; anywhere else they are unpacked first.
    """
    if isinstance(weight, MXFP8Tiles):
        if x.dtype is torch.bfloat16 and fast_path(x) and len(x):
            from .triton_linear import fused_linear

            return fused_linear(x, weight, lora, adapter_ids)
        weight = unpack_linear(weight)
    return lora_sum(x, weight, lora, adapter_ids).to(x.dtype)


def lora_sum(x: Tensor, weight: FrozenWeight, lora: LoRA | None = None, adapter_ids: Tensor | None = None) -> Tensor:
    """`lora_linear` before its rounding: fp32 [T, N]."""
    if lora is None:
        return frozen_linear(x, weight)
    if adapter_ids is not None:
        return add_lora(frozen_linear(x, weight), x, lora, adapter_ids)
    parts = weight if isinstance(weight, tuple) else (weight,)
    return _LoRALinear.apply(x, lora.a[0], lora.b[0], type(weight) if isinstance(weight, tuple) else Tensor, *parts)

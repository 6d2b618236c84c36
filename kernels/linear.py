"""Linear layers over a frozen, possibly quantized weight, with the adapter added inside the same fp32 sum.

    y = x W^T + u B^T      with u = x A^T rounded to x's dtype, everything summed in fp32 and rounded once to x's dtype

The frozen weight may stay packed: its values are rebuilt where they are needed, in forward and again in backward, so that
autograd never keeps a dequantised copy alive.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from samebits.quant import mxfp8, nvfp4
from samebits.quant.mxfp8 import MXFP8Tensor
from samebits.quant.nvfp4 import NVFP4Tensor

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


class _FrozenLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, kind: type, *parts: Tensor) -> Tensor:
        ctx.kind, ctx.x_dtype = kind, x.dtype
        ctx.save_for_backward(*parts)
        return F.linear(x.float(), values(_join(kind, parts)))

    @staticmethod
    def backward(ctx, grad: Tensor):
        grad_x = (grad.float() @ values(_join(ctx.kind, ctx.saved_tensors))).to(ctx.x_dtype)
        return (grad_x, None, *(None for _ in ctx.saved_tensors))


def _join(kind: type, parts: tuple[Tensor, ...]) -> FrozenWeight:
    return kind(*parts) if kind is not Tensor else parts[0]


def frozen_linear(x: Tensor, weight: FrozenWeight) -> Tensor:
    """x [T, K] times a frozen weight [N, K] transposed: fp32 [T, N]. Gradient to x only."""
    if isinstance(weight, tuple):
        return _FrozenLinear.apply(x, type(weight), *weight)
    return _FrozenLinear.apply(x, Tensor, weight)


def add_lora(out: Tensor, x: Tensor, lora: LoRA, adapter_ids: Tensor | None) -> Tensor:
    """`out` fp32 [T, N] plus the adapter's delta. `adapter_ids` int [T]: slot of each token, -1 for none; None: slot 0 for all.

    A token without an adapter keeps its bits.
    """
    for slot, rows in adapter_rows(adapter_ids):
        xs = x if rows is None else x[rows]
        u = F.linear(xs.float(), lora.a[slot].float()).to(x.dtype)
        delta = F.linear(u.float(), lora.b[slot].float())
        out = out + delta if rows is None else out.index_add(0, rows, delta)
    return out


def adapter_rows(adapter_ids: Tensor | None) -> list[tuple[int, Tensor | None]]:
    """(slot, its rows) for each adapter present; rows None means all rows, so that the common case moves nothing."""
    if adapter_ids is None:
        return [(0, None)]
    slots = adapter_ids.unique().tolist()
    if len(slots) == 1:
        return [(slots[0], None)] if slots[0] >= 0 else []
    return [(s, (adapter_ids == s).nonzero().flatten()) for s in slots if s >= 0]


def lora_linear(x: Tensor, weight: FrozenWeight, lora: LoRA | None = None, adapter_ids: Tensor | None = None) -> Tensor:
    """Frozen linear with adapter: x [T, K] to [T, N] in x's dtype. See the module docstring for the arithmetic."""
    out = frozen_linear(x, weight)
    if lora is not None:
        out = add_lora(out, x, lora, adapter_ids)
    return out.to(x.dtype)

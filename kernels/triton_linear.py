"""An MXFP8 linear layer with its adapter inside, on the Triton kernels of the experts: one matrix, all tokens, nothing sorted.

    y = x W^T + u B^T      u = bf16(x A^T), W decoded in registers, everything summed in fp32 and rounded once to bf16

The same promises as in `triton_moe`: K ascends in steps of 16 whatever the tile, so that a token's result does not depend on its batch,
and the adapter costs its bytes. For the backward only x and u are kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .linear import LoRA
from .linear_tiles import MXFP8Tiles
from .moe_fused import dtypes_of, shaped
from .triton_group import linear_plan
from .triton_moe import Cut, weight_product
from .triton_moe_grad import BackCut, back_product, outer_product, rank_product


def cut_of(tokens: int, outputs: int) -> Cut:
    """The fastest of a sweep on an H200 at MiniMax-M3's shapes."""
    if tokens <= 16:
        return Cut(16, 64, 4, 4)
    if tokens <= 32:
        return Cut(32, 64, 4, 4)
    if tokens <= 64:
        return Cut(64, 64, 4, 5)
    return Cut(128, 128, 8, 3) if tokens < 768 else Cut(256, 128, 8, 3)


def back_cut_of(tokens: int) -> BackCut:
    """Of the backward of a linear layer."""
    return BackCut(16, 64, 4, 3) if tokens <= 64 else BackCut(128, 64, 4, 3)


class FusedLinear(torch.autograd.Function):
    """x bf16 [T, K], an MXFP8 matrix, A [slots, r, K] and B [slots, N, r] or None. Their gradients keep the dtype that they came in."""

    @staticmethod
    def forward(ctx, x, adapter_ids, weight, a, b):
        """See the module."""
        lora = None if a is None else LoRA(a.to(x.dtype).contiguous(), b.to(x.dtype).contiguous())
        cut = cut_of(len(x), weight.codes.shape[1])
        plan = linear_plan(x, cut.tokens, 1 + len(a) if lora else 0)
        out, u, _ = weight_product(x, weight, plan, cut, None, (lora, None), adapter_ids)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(x, adapter_ids, u, *(lora or (None, None)), *weight[:2])
            ctx.inputs, ctx.dtypes = weight.inputs, dtypes_of((a, b))
        return out

    @staticmethod
    def backward(ctx, grad):
        """See `triton_moe_grad`."""
        x, adapter_ids, u, a, b, *parts = ctx.saved_tensors
        lora, grad = None if a is None else LoRA(a, b), grad.contiguous()
        cut = back_cut_of(len(x))
        plan = linear_plan(x, cut.tokens)
        v = rank_product(grad, lora, None, plan, adapter_ids, down=True, tile=cut.tokens) if lora else None
        grad_x = grad_a = grad_b = None
        if ctx.needs_input_grad[0]:
            weight = MXFP8Tiles(*parts, ctx.inputs)
            grad_x = back_product(grad, weight, v, lora, None, plan, adapter_ids, gated=False, cut=cut)
        if lora:
            of_a, of_b = (shaped(t, dtype) for t, dtype in zip(lora, ctx.dtypes, strict=True))
            grad_a = outer_product(x, v, of_a, plan, adapter_ids, gather=True, weights=None, is_a=True)
            grad_b = outer_product(grad, u, of_b, plan, adapter_ids, gather=False, weights=None, is_a=False)
        return grad_x, None, None, grad_a, grad_b


def fused_linear(x: Tensor, weight: MXFP8Tiles, lora: LoRA | None, adapter_ids: Tensor | None) -> Tensor:
    """`kernels.linear.lora_linear` for x bf16 [T, K] on CUDA."""
    ids = None if adapter_ids is None else adapter_ids.contiguous()
    return FusedLinear.apply(x.contiguous(), ids, weight, *(lora or (None, None)))

"""An MXFP8 linear layer with its adapter inside, on the Triton kernels of the experts: one matrix, all tokens, nothing sorted.

    y = x W^T + u B^T      u = bf16(x A^T), W decoded in registers, everything summed in fp32 and rounded once to bf16

The same promises as in `triton_moe`: a token's result does not depend on its batch, and the adapter costs its bytes. For the backward
only x and u are kept.

What the number of tokens may choose is a cut: how many tokens and outputs a program takes, its warps and stages, and which programs take a
quarter of a tile. None of it touches a sum. Every cut walks all of K in chunks of 128 inputs, ascending, in one accumulator an output, and
multiplies with one kind of instruction: 64 rows of weights or more a product and warps in fours give `wgmma`, 16 inputs deep, whose
64 rows and 8 to 256 tokens are columns of their own. A cut of fewer rows would fall to `mma.sync`, and is not allowed
(`tests/kernels/test_linear_cuts.py`).
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from .linear import LoRA
from .linear_tiles import MXFP8Tiles
from .moe_fused import dtypes_of, shaped
from .triton_group import linear_plan
from .triton_moe import Cut, multiprocessors, weight_product, whole_programs
from .triton_moe_grad import BackCut, back_product, outer_product, rank_product

# Large tiles run one to a multiprocessor. Microseconds that a chunk of 128 inputs costs a wave of them, and a wave of quarters: measured
# on an H200 at MiniMax-M3's layers; with those of the larger ten times from 1024 to 4096 tokens come out within 7 %.
LARGE_CUTS = {Cut(128, 128, 8, 3): (1.19, 0.62), Cut(256, 128, 8, 3): (1.81, 0.75)}


def cut_of(tokens: int, outputs: int, at_once: int) -> Cut:
    """The fastest on an H200, where `at_once` (multiprocessors) is 132. Up to 64 tokens by a sweep at MiniMax-M3's shapes.

    Beyond, the large cut whose waves take the least time. The larger one costs less a token, but 512 tokens of 9856 outputs are 154
    programs of it, a wave and one of quarters, and 308 of the smaller, two and two.
    """
    if tokens <= 16:
        return Cut(16, 64, 4, 4)
    if tokens <= 32:
        return Cut(32, 64, 4, 4)
    if tokens <= 64:
        return Cut(64, 64, 4, 5)
    return min(LARGE_CUTS, key=lambda cut: chunk_time(tokens, outputs, cut, at_once))


def chunk_time(tokens: int, outputs: int, cut: Cut, at_once: int) -> float:
    """Microseconds a chunk of 128 inputs with a large cut, by its waves of whole tiles and of quarters (`triton_moe.whole_programs`)."""
    programs = triton.cdiv(tokens, cut.tokens) * triton.cdiv(outputs, cut.rows)
    whole = whole_programs(programs, at_once)
    of_whole, of_quarters = LARGE_CUTS[cut]
    return triton.cdiv(whole, at_once) * of_whole + triton.cdiv(4 * (programs - whole), at_once) * of_quarters


def back_cut_of(tokens: int) -> BackCut:
    """Of the backward of a linear layer."""
    return BackCut(16, 64, 4, 3) if tokens <= 64 else BackCut(128, 64, 4, 3)


class FusedLinear(torch.autograd.Function):
    """x bf16 [T, K], an MXFP8 matrix, A [slots, r, K] and B [slots, N, r] or None. Their gradients keep the dtype that they came in."""

    @staticmethod
    def forward(ctx, x, adapter_ids, weight, a, b):
        """See the module."""
        lora = None if a is None else LoRA(a.to(x.dtype).contiguous(), b.to(x.dtype).contiguous())
        cut = cut_of(len(x), weight.codes.shape[1], multiprocessors(x.device))
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

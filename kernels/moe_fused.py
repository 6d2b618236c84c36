"""The routed experts as one differentiable operation over `NVFP4Tiles`, on the Triton kernels.

What is kept for the backward, of P = T * k pairs: x, the routes, u (P * 3 ranks), and gate and up (P * 2 I) unless `recompute`, which
runs that GEMM again instead. The base has no gradient; its values exist in 16 bits in registers and shared memory only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .activation import SwiGLU
from .expert_tiles import NVFP4Tiles
from .linear import LoRA
from .triton_moe import Groups, combine, group, grouped_gemm, tiling
from .triton_moe_grad import BACK_TOKENS, back_product, outer_product, rank_product, swiglu_back


def _pair(a: Tensor | None, b: Tensor | None) -> LoRA | None:
    return None if a is None else LoRA(a, b)


def _grouped(ids: Tensor, experts: int, tile: int, loras: tuple[LoRA | None, ...]) -> Groups:
    slots = max((p.a.shape[0] for p in loras if p is not None), default=1)
    return group(ids, experts, tile, 2 + 2 * slots)


class FusedExperts(torch.autograd.Function):
    """x bf16 [T, H], weights fp32 [T, k], the six adapter tensors or None; see `kernels.moe.moe`."""

    @staticmethod
    def forward(ctx, x, weights, ids, adapter_ids, w13, w2, activation, recompute, *adapters):
        """See the class."""
        loras = tuple(_pair(adapters[i], adapters[i + 1]) for i in (0, 2, 4))
        k, experts = ids.shape[1], len(w13.codes)
        cut = tiling(ids.numel(), experts)
        groups = _grouped(ids, experts, cut.tokens, loras)
        train = any(ctx.needs_input_grad)
        act, u, halves = grouped_gemm(x, w13, groups, k, cut, activation, loras[:2], adapter_ids, keep=train and not recompute)
        y, u2, _ = grouped_gemm(act, w2, groups, k, cut, None, (loras[2], None), adapter_ids)
        if train:
            ctx.save_for_backward(x, weights, ids, adapter_ids, u, u2, halves, *w13[:3], *w2[:3], *adapters)
            ctx.inputs, ctx.activation = (w13.inputs, w2.inputs), activation
        return combine(y, ids, weights)

    @staticmethod
    def backward(ctx, grad):
        """See `triton_moe_grad`."""
        x, weights, ids, adapter_ids, u, u2, halves, *rest = ctx.saved_tensors
        w13, w2 = NVFP4Tiles(*rest[:3], ctx.inputs[0]), NVFP4Tiles(*rest[3:6], ctx.inputs[1])
        adapters = rest[6:]
        gate, up, down = loras = tuple(_pair(adapters[i], adapters[i + 1]) for i in (0, 2, 4))
        k, experts = ids.shape[1], len(w13.codes)
        if halves is None:
            cut = tiling(ids.numel(), experts)
            groups = _grouped(ids, experts, cut.tokens, loras)
            halves = grouped_gemm(x, w13, groups, k, cut, ctx.activation, loras[:2], adapter_ids, keep=True)[2]
        mean = ids.numel() / experts
        tile = 16 if mean <= 12 else 64 if mean <= 64 else BACK_TOKENS
        groups = _grouped(ids, experts, tile, loras)
        grad = grad.contiguous()
        same = (groups, k, adapter_ids)
        v2 = rank_product(grad, down, None, *same, gather=True, tile=tile) if down else None
        da = back_product(grad, w2, v2, down, None, *same, gated=False, tile=tile)
        dh, act, dw = swiglu_back(da, halves, weights, groups, ctx.activation)
        inner = gate is not None or up is not None
        v = rank_product(dh, gate, up, *same, gather=False, tile=tile) if inner else None
        grad_x = None
        if ctx.needs_input_grad[0]:
            dx = back_product(dh, w13, v, gate, up, *same, gated=True, tile=tile)
            grad_x = combine(dx, ids, torch.ones_like(weights))
        grads: list[Tensor | None] = [None] * 6
        half, width = dh.shape[1] // 2, (v.shape[1] // 2 if inner else 0)
        for at, one in ((0, gate), (1, up)):
            if one is not None:
                columns, ranks = slice(at * half, (at + 1) * half), slice(at * width, (at + 1) * width)
                grads[2 * at] = outer_product(x, v[:, ranks], one.a, *same, gather=True, weights=None, is_a=True)
                grads[2 * at + 1] = outer_product(dh[:, columns], u[:, ranks], one.b, *same, gather=False, weights=None, is_a=False)
        if down is not None:
            grads[4] = outer_product(act, v2, down.a, *same, gather=False, weights=weights, is_a=True)
            grads[5] = outer_product(grad, u2, down.b, *same, gather=True, weights=weights, is_a=False)
        return grad_x, dw.view_as(weights), None, None, None, None, None, None, *grads


def fused_experts(
    x: Tensor,
    w13: NVFP4Tiles,
    w2: NVFP4Tiles,
    ids: Tensor,
    weights: Tensor,
    activation: SwiGLU,
    lora: tuple[LoRA | None, LoRA | None, LoRA | None] | None,
    adapter_ids: Tensor | None,
    recompute: bool,
) -> Tensor:
    """`kernels.moe.moe` for x in bf16 on CUDA."""
    adapters = []
    for one in lora or (None, None, None):
        # Kernels read bf16; a gradient comes back through the cast.
        adapters += [None, None] if one is None else [one.a.to(x.dtype).contiguous(), one.b.to(x.dtype).contiguous()]
    if adapter_ids is not None:
        adapter_ids = adapter_ids.contiguous()
    ids, weights = ids.contiguous(), weights.float().contiguous()
    return FusedExperts.apply(x.contiguous(), weights, ids, adapter_ids, w13, w2, activation, recompute, *adapters)

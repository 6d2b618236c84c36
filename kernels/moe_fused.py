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
from .triton_group import Plan, combine, group
from .triton_moe import cuts, weight_product
from .triton_moe_grad import back_cut, back_product, outer_product, rank_product, swiglu_back


def _pair(a: Tensor | None, b: Tensor | None) -> LoRA | None:
    return None if a is None else LoRA(a, b)


def _slots(loras: tuple[LoRA | None, ...]) -> int:
    return max((p.a.shape[0] for p in loras if p is not None), default=1)


def _plan(ids: Tensor, experts: int, tile: int, loras: tuple[LoRA | None, ...]) -> Plan:
    return group(ids, experts, tile, 2 * (1 + _slots(loras)))


class FusedExperts(torch.autograd.Function):
    """x bf16 [T, H], weights fp32 [T, k], the six adapter tensors or None; see `kernels.moe.moe`."""

    @staticmethod
    def forward(ctx, x, weights, ids, adapter_ids, w13, w2, activation, recompute, *adapters):
        """See `triton_moe`."""
        loras = tuple(_pair(adapters[i], adapters[i + 1]) for i in (0, 2, 4))
        inner, outer = cuts(ids.numel(), len(w13.codes))
        plan = _plan(ids, len(w13.codes), inner.tokens, loras)
        train = any(ctx.needs_input_grad)
        act, u, halves = weight_product(x, w13, plan, inner, activation, loras[:2], adapter_ids, keep=train and not recompute)
        y, u2, _ = weight_product(act, w2, plan, outer, None, (loras[2], None), adapter_ids, counter=1 + _slots(loras))
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
        pairs, experts = ids.numel(), len(w13.codes)
        if halves is None:
            inner = cuts(pairs, experts)[0]
            plan = _plan(ids, experts, inner.tokens, loras)
            halves = weight_product(x, w13, plan, inner, ctx.activation, loras[:2], adapter_ids, keep=True)[2]
        cut = back_cut(pairs, experts)
        plan = _plan(ids, experts, cut.tokens, loras)
        grad = grad.contiguous()
        v2 = rank_product(grad, down, None, plan, adapter_ids, down=True, tile=cut.tokens) if down else None
        da = back_product(grad, w2, v2, down, None, plan, adapter_ids, gated=False, cut=cut)
        dh, act, dw = swiglu_back(da, halves, weights, plan, ctx.activation)
        del da, halves
        v = rank_product(dh, gate, up, plan, adapter_ids, down=False, tile=cut.tokens) if gate or up else None
        grad_x = None
        if ctx.needs_input_grad[0]:
            dx = back_product(dh, w13, v, gate, up, plan, adapter_ids, gated=True, cut=cut)
            grad_x = combine(dx, ids, torch.ones_like(weights))
            del dx
        grads: list[Tensor | None] = [None] * 6
        half, width = dh.shape[1] // 2, 0 if v is None else v.shape[1] // 2
        for at, one in ((0, gate), (1, up)):
            if one is not None:
                columns, ranks = slice(at * half, (at + 1) * half), slice(at * width, (at + 1) * width)
                grads[2 * at] = outer_product(x, v[:, ranks], one.a, plan, adapter_ids, gather=True, weights=None, is_a=True)
                grads[2 * at + 1] = outer_product(
                    dh[:, columns], u[:, ranks], one.b, plan, adapter_ids, gather=False, weights=None, is_a=False
                )
        if down is not None:
            grads[4] = outer_product(act, v2, down.a, plan, adapter_ids, gather=False, weights=weights, is_a=True)
            grads[5] = outer_product(grad, u2, down.b, plan, adapter_ids, gather=True, weights=weights, is_a=False)
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

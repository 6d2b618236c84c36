"""The routed experts as one differentiable operation over `NVFP4Tiles`, on the Triton kernels.

What is kept for the backward, of P = T * k pairs: x, the routes, u (P * 3 ranks), and gate and up (P * 2 I) unless `recompute`, which
runs that GEMM again instead. The base has no gradient; its values exist in 16 bits in registers and shared memory only.

Adapters come in any dtype and are rounded to bf16 here, where the kernels read them; their gradients are the fp32 sums, in the dtype in
which the adapters came. So masters in fp32 get gradients that were never rounded.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .activation import SwiGLU
from .expert_tiles import NVFP4Tiles
from .linear import LoRA
from .triton_group import Plan, combine, group
from .triton_moe import cuts, weight_product
from .triton_moe_grad import back_cut, back_product, outer_product, rank_product, swiglu_back

Adapters6 = tuple[Tensor | None, ...]  # A and B of gate, up and down; None where not adapted


def flat(lora: tuple[LoRA | None, LoRA | None, LoRA | None] | None) -> Adapters6:
    """The six tensors of gate, up and down."""
    return tuple(t for pair in lora or (None, None, None) for t in pair or (None, None))


def pairs_of(adapters: Adapters6) -> tuple[LoRA | None, LoRA | None, LoRA | None]:
    """`flat` undone."""
    return tuple(None if adapters[i] is None else LoRA(adapters[i], adapters[i + 1]) for i in (0, 2, 4))


def readable(adapters: Adapters6, x: Tensor) -> Adapters6:
    """Adapters as the kernels read them: contiguous, in the dtype of x."""
    return tuple(None if t is None else t.to(x.dtype).contiguous() for t in adapters)


def dtypes_of(adapters: Adapters6) -> tuple[torch.dtype | None, ...]:
    """What their gradients are to be."""
    return tuple(None if t is None else t.dtype for t in adapters)


def shaped(adapter: Tensor, dtype: torch.dtype) -> Tensor:
    """Shape and device of `adapter` with another dtype, without memory: what `outer_product` makes a gradient like."""
    return adapter.new_empty((), dtype=dtype).expand(adapter.shape)


def slots_of(loras: tuple[LoRA | None, ...]) -> int:
    """Adapter slots, 1 where there is no adapter."""
    return max((p.a.shape[0] for p in loras if p is not None), default=1)


def _plan(ids: Tensor, experts: int, tile: int, loras: tuple[LoRA | None, ...]) -> Plan:
    return group(ids, experts, tile, 2 * (1 + slots_of(loras)))


class Saved(NamedTuple):
    """What `backward_experts` needs: tensors for `ctx.save_for_backward`, and the rest."""

    tensors: tuple[Tensor | None, ...]
    inputs: tuple[int, int]
    activation: SwiGLU
    dtypes: tuple[torch.dtype | None, ...]


def forward_experts(x, weights, ids, adapter_ids, w13, w2, activation, recompute, adapters, train) -> tuple[Tensor, Saved | None]:
    """bf16 [T, H], and with `train` what the backward needs. See `kernels.moe.moe` and `triton_moe`."""
    read = readable(adapters, x)
    loras = pairs_of(read)
    inner, outer = cuts(ids.numel(), len(w13.codes))
    plan = _plan(ids, len(w13.codes), inner.tokens, loras)
    act, u, halves = weight_product(x, w13, plan, inner, activation, loras[:2], adapter_ids, keep=train and not recompute)
    y, u2, _ = weight_product(act, w2, plan, outer, None, (loras[2], None), adapter_ids, counter=1 + slots_of(loras))
    saved = None
    if train:
        tensors = (x, weights, ids, adapter_ids, u, u2, halves, *w13[:3], *w2[:3], *read)
        saved = Saved(tensors, (w13.inputs, w2.inputs), activation, dtypes_of(adapters))
    return combine(y, ids, weights), saved


def backward_experts(saved: Saved, grad: Tensor, needs_x: bool) -> tuple[Tensor | None, Tensor, list[Tensor | None]]:
    """Gradients of x, of the routes' weights and of the six adapter tensors. See `triton_moe_grad`."""
    x, weights, ids, adapter_ids, u, u2, halves, *rest = saved.tensors
    w13, w2 = NVFP4Tiles(*rest[:3], saved.inputs[0]), NVFP4Tiles(*rest[3:6], saved.inputs[1])
    gate, up, down = loras = pairs_of(rest[6:])
    pairs, experts = ids.numel(), len(w13.codes)
    if halves is None:
        inner = cuts(pairs, experts)[0]
        plan = _plan(ids, experts, inner.tokens, loras)
        halves = weight_product(x, w13, plan, inner, saved.activation, loras[:2], adapter_ids, keep=True)[2]
    cut = back_cut(pairs, experts)
    plan = _plan(ids, experts, cut.tokens, loras)
    v2 = rank_product(grad, down, None, plan, adapter_ids, down=True, tile=cut.tokens) if down else None
    da = back_product(grad, w2, v2, down, None, plan, adapter_ids, gated=False, cut=cut)
    dh, act, dw = swiglu_back(da, halves, weights, plan, saved.activation)
    del da, halves
    v = rank_product(dh, gate, up, plan, adapter_ids, down=False, tile=cut.tokens) if gate or up else None
    grad_x = None
    if needs_x:
        dx = back_product(dh, w13, v, gate, up, plan, adapter_ids, gated=True, cut=cut)
        grad_x = combine(dx, ids, torch.ones_like(weights))
        del dx
    kinds = saved.dtypes
    grads: list[Tensor | None] = [None] * 6
    half, width = dh.shape[1] // 2, 0 if v is None else v.shape[1] // 2
    for at, one in ((0, gate), (1, up)):
        if one is not None:
            columns, ranks = slice(at * half, (at + 1) * half), slice(at * width, (at + 1) * width)
            like = shaped(one.a, kinds[2 * at])
            grads[2 * at] = outer_product(x, v[:, ranks], like, plan, adapter_ids, gather=True, weights=None, is_a=True)
            like = shaped(one.b, kinds[2 * at + 1])
            grads[2 * at + 1] = outer_product(dh[:, columns], u[:, ranks], like, plan, adapter_ids, gather=False, weights=None, is_a=False)
    if down is not None:
        grads[4] = outer_product(act, v2, shaped(down.a, kinds[4]), plan, adapter_ids, gather=False, weights=weights, is_a=True)
        grads[5] = outer_product(grad, u2, shaped(down.b, kinds[5]), plan, adapter_ids, gather=True, weights=weights, is_a=False)
    return grad_x, dw.view_as(weights), grads


class FusedExperts(torch.autograd.Function):
    """x bf16 [T, H], weights fp32 [T, k], the six adapter tensors or None; see `kernels.moe.moe`."""

    @staticmethod
    def forward(ctx, x, weights, ids, adapter_ids, w13, w2, activation, recompute, *adapters):
        """See `forward_experts`."""
        train = any(ctx.needs_input_grad)
        out, saved = forward_experts(x, weights, ids, adapter_ids, w13, w2, activation, recompute, adapters, train)
        if saved is not None:
            ctx.save_for_backward(*saved.tensors)
            ctx.saved = saved._replace(tensors=())
        return out

    @staticmethod
    def backward(ctx, grad):
        """See `backward_experts`."""
        saved = ctx.saved._replace(tensors=ctx.saved_tensors)
        grad_x, dw, grads = backward_experts(saved, grad.contiguous(), ctx.needs_input_grad[0])
        return grad_x, dw, None, None, None, None, None, None, *grads


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
    if adapter_ids is not None:
        adapter_ids = adapter_ids.contiguous()
    ids, weights = ids.contiguous(), weights.float().contiguous()
    return FusedExperts.apply(x.contiguous(), weights, ids, adapter_ids, w13, w2, activation, recompute, *flat(lora))

"""The MLP over `MXFP8Tiles` as one differentiable operation, alone and beside the routed experts, on the Triton kernels.

Gate and up are one product with SwiGLU in its epilogue, as the experts have it: the kernels take one matrix for all tokens as they take
a stack for sorted ones. Kept for the backward: x, u, and gate and up unless `recompute`.

Beside the routed experts the MLP runs on a second stream where the batch leaves part of the GPU idle. Fork and join lie inside forward and
inside backward: whatever one stream allocates, the other uses only between them, so that no memory is given out again too early, and
autograd sees one operation on one stream. No kernel of one waits for one of the other.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from .activation import SwiGLU
from .linear import LoRA
from .linear_tiles import MXFP8Tiles
from .moe_fused import (
    Adapters6,
    backward_experts,
    dtypes_of,
    flat,
    forward_experts,
    pairs_of,
    readable,
    shaped,
    slots_of,
)
from .taps import tap
from .triton_group import linear_plan
from .triton_linear import back_cut_of, cut_of
from .triton_moe import Cut, multiprocessors, weight_product
from .triton_moe_grad import back_product, outer_product, rank_product, swiglu_back

# Up to so many tokens the shared expert runs on a stream of its own: with more, either fills an H200 by itself.
BESIDE = 512
_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


def mlp_cuts(x: Tensor, outputs: int) -> tuple[Cut, Cut]:
    """Of gate and up, which have two rows for each of a program's outputs, and of down. The same tiles of tokens."""
    down = cut_of(len(x), outputs, multiprocessors(x.device))
    return down._replace(rows=max(32, down.rows // 2)), down


class Saved(NamedTuple):
    """What `backward_mlp` needs: tensors for `ctx.save_for_backward`, and the rest."""

    tensors: tuple[Tensor | None, ...]
    inputs: tuple[int, int]
    activation: SwiGLU
    dtypes: tuple[torch.dtype | None, ...]


def forward_mlp(x, adapter_ids, gate_up, down, activation, recompute, adapters, train) -> tuple[Tensor, Tensor, Saved | None]:
    """(out bf16 [T, H], activation bf16 [T, I], with `train` what the backward needs)."""
    read = readable(adapters, x)
    loras = pairs_of(read)
    inner, outer = mlp_cuts(x, down.codes.shape[1])
    counters = 1 + slots_of(loras) if any(loras) else 0
    plan = linear_plan(x, inner.tokens, 2 * counters)
    act, u, halves = weight_product(x, gate_up, plan, inner, activation, loras[:2], adapter_ids, keep=train and not recompute)
    out, u2, _ = weight_product(act, down, plan, outer, None, (loras[2], None), adapter_ids, counter=counters)
    if not train:
        return out, act, None
    tensors = (x, adapter_ids, u, u2, halves, *gate_up[:2], *down[:2], *read)
    return out, act, Saved(tensors, (gate_up.inputs, down.inputs), activation, dtypes_of(adapters))


def _taps(point: str, act: Tensor, out: Tensor) -> None:
    tap(f"{point}activation", act)
    tap(f"{point}down_proj", out)


def backward_mlp(saved: Saved, grad: Tensor, needs_x: bool) -> tuple[Tensor | None, list[Tensor | None]]:
    """Gradients of x and of the six adapter tensors."""
    x, adapter_ids, u, u2, halves, *rest = saved.tensors
    gate_up, down_tiles = MXFP8Tiles(*rest[:2], saved.inputs[0]), MXFP8Tiles(*rest[2:4], saved.inputs[1])
    gate, up, down = loras = pairs_of(rest[4:])
    if halves is None:
        inner = mlp_cuts(x, down_tiles.codes.shape[1])[0]
        plan = linear_plan(x, inner.tokens, 1 + slots_of(loras))
        halves = weight_product(x, gate_up, plan, inner, saved.activation, loras[:2], adapter_ids, keep=True)[2]
    cut = back_cut_of(len(x))
    plan = linear_plan(x, cut.tokens)
    v2 = rank_product(grad, down, None, plan, adapter_ids, down=True, tile=cut.tokens) if down else None
    da = back_product(grad, down_tiles, v2, down, None, plan, adapter_ids, gated=False, cut=cut)
    # The kernel of the routed experts: here each token is its own pair, with weight one.
    order = torch.arange(len(x), dtype=torch.int32, device=x.device)
    ones = torch.ones(len(x), dtype=torch.float32, device=x.device)
    dh, act, _ = swiglu_back(da, halves, ones, plan._replace(order=order), saved.activation)
    del da, halves
    v = rank_product(dh, gate, up, plan, adapter_ids, down=False, tile=cut.tokens) if gate or up else None
    grad_x = back_product(dh, gate_up, v, gate, up, plan, adapter_ids, gated=True, cut=cut) if needs_x else None
    half, width = dh.shape[1] // 2, 0 if v is None else v.shape[1] // 2
    grads: list[Tensor | None] = [None] * 6

    def outer(at: int, z: Tensor, ranks: Tensor, one: LoRA) -> None:
        like = shaped(one[at % 2], saved.dtypes[at])
        grads[at] = outer_product(z, ranks, like, plan, adapter_ids, gather=True, weights=None, is_a=at % 2 == 0)

    for at, one in enumerate((gate, up)):
        if one is not None:
            ranks = slice(at * width, (at + 1) * width)
            outer(2 * at, x, v[:, ranks], one)
            outer(2 * at + 1, dh[:, at * half : (at + 1) * half], u[:, ranks], one)
    if down is not None:
        outer(4, act, v2, down)
        outer(5, grad, u2, down)
    return grad_x, grads


class _FusedMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, adapter_ids, gate_up, down, activation, recompute, point, *adapters):
        train = any(ctx.needs_input_grad)
        out, act, saved = forward_mlp(x, adapter_ids, gate_up, down, activation, recompute, adapters, train)
        _taps(point, act, out)
        if saved is not None:
            ctx.save_for_backward(*saved.tensors)
            ctx.saved = saved._replace(tensors=())
        return out

    @staticmethod
    def backward(ctx, grad):
        saved = ctx.saved._replace(tensors=ctx.saved_tensors)
        grad_x, grads = backward_mlp(saved, grad.contiguous(), ctx.needs_input_grad[0])
        return grad_x, None, None, None, None, None, None, *grads


def _fork(x: Tensor) -> torch.cuda.Stream | None:
    """The second stream, which has waited for the current one; None where the work stays on that."""
    if not x.is_cuda or len(x) > BESIDE:
        return None
    if x.device not in _STREAMS:
        _STREAMS[x.device] = torch.cuda.Stream(x.device)
    side = _STREAMS[x.device]
    side.wait_stream(torch.cuda.current_stream(x.device))
    return side


def _on(side: torch.cuda.Stream | None):
    return nullcontext() if side is None else torch.cuda.stream(side)


def _join(side: torch.cuda.Stream | None) -> None:
    if side is not None:
        torch.cuda.current_stream(side.device).wait_stream(side)


class _FusedMoEWithShared(torch.autograd.Function):
    """Routed and shared experts; adapters are the routed ones' six tensors, then the shared one's."""

    @staticmethod
    def forward(ctx, x, weights, ids, adapter_ids, w13, w2, gate_up, down, activation, recompute, point, *adapters):
        train = any(ctx.needs_input_grad)
        side = _fork(x)
        with _on(side):  # first, so that it runs while the routed pairs are sorted
            shared, act, of_shared = forward_mlp(x, adapter_ids, gate_up, down, activation, recompute, adapters[6:], train)
        routed, of_routed = forward_experts(x, weights, ids, adapter_ids, w13, w2, activation, recompute, adapters[:6], train)
        _join(side)
        tap(f"{point}experts", routed)
        _taps(f"{point}shared_experts.", act, shared)
        if train:
            ctx.save_for_backward(*of_routed.tensors, *of_shared.tensors)
            ctx.routed, ctx.shared = of_routed._replace(tensors=()), of_shared._replace(tensors=())
            ctx.cut = len(of_routed.tensors)
        return routed.add_(shared)

    @staticmethod
    def backward(ctx, grad):
        tensors, grad, needs_x = ctx.saved_tensors, grad.contiguous(), ctx.needs_input_grad[0]
        side = _fork(grad)
        with _on(side):
            shared_x, shared_grads = backward_mlp(ctx.shared._replace(tensors=tensors[ctx.cut :]), grad, needs_x)
        grad_x, dw, grads = backward_experts(ctx.routed._replace(tensors=tensors[: ctx.cut]), grad, needs_x)
        _join(side)
        if needs_x:
            grad_x = grad_x.add_(shared_x)
        return grad_x, dw, None, None, None, None, None, None, None, None, None, *grads, *shared_grads


def fused_mlp(x, gate_up, down, activation, lora, adapter_ids, recompute, point) -> Tensor:
    """`kernels.mlp.mlp` for x in bf16 on CUDA."""
    ids = None if adapter_ids is None else adapter_ids.contiguous()
    return _FusedMLP.apply(x.contiguous(), ids, gate_up, down, activation, recompute, point, *flat(lora))


def fused_moe_with_shared(x, w13, w2, ids, weights, shared, activation, lora, adapter_ids, recompute, point) -> Tensor:
    """`kernels.mlp.moe_with_shared` for x in bf16 on CUDA."""
    adapter_ids = None if adapter_ids is None else adapter_ids.contiguous()
    adapters: Adapters6 = (*flat(lora), *flat(shared.lora))
    ids, weights = ids.contiguous(), weights.float().contiguous()
    return _FusedMoEWithShared.apply(
        x.contiguous(), weights, ids, adapter_ids, w13, w2, shared.gate_up, shared.down, activation, recompute, point, *adapters
    )


def fused_activation(x, gate_up, activation, lora, adapter_ids) -> Tensor:
    """`kernels.mlp.mlp_activation` for x in bf16 on CUDA: the first product of `forward_mlp`, which keeps nothing."""
    ids = None if adapter_ids is None else adapter_ids.contiguous()
    loras = pairs_of(readable(flat(lora), x))
    inner, _ = mlp_cuts(x, gate_up.codes.shape[1] // 2)
    x = x.contiguous()
    plan = linear_plan(x, inner.tokens, 1 + slots_of(loras))
    act, _, _ = weight_product(x, gate_up, plan, inner, activation, loras[:2], ids)
    return act

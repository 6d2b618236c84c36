"""Mixture of experts over frozen, possibly packed experts with the adapter of each expert inside its GEMMs.

Router (MiniMax-M3): fp32 logits; sigmoid; the top-k experts by sigmoid + bias; weights are the unbiased sigmoids of the chosen
experts, normalised to sum 1, times the routed scaling factor.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from samebits.quant.blocks import fast_path

from .activation import SwiGLU, swiglu_oai_halves
from .expert_tiles import NVFP4Tiles, unpack_experts
from .linear import FrozenWeight, LoRA, lora_sum, select, split
from .sums import wide
from .w4a4 import add_adapter, block_product
from .w4a4 import swiglu as same_swiglu


class ExpertLoRA(NamedTuple):
    """Adapter slots of all experts of a layer, a and b as [slots, E, r, K] and [slots, E, N, r]; None where not adapted."""

    gate: LoRA | None
    up: LoRA | None
    down: LoRA | None


class W4A4(NamedTuple):
    """NVFP4 activations, as a Blackwell engine's experts take them: the static input scale (fp32 scalar) of each GEMM, None per token.

    What a GEMM of the base sees is x quantized as `quant.activations` says, code for code. The adapter sees x itself. Gradients pass the
    quantization straight through. Forward bits are the same on every device and in every batch; see `kernels.w4a4`.
    """

    w13: Tensor | None = None
    w2: Tensor | None = None


def _routed_by_kernels(logits: Tensor) -> bool:
    return logits.dim() == 2 and logits.dtype is torch.float32 and fast_path(logits)


def route_topk(logits: Tensor, bias: Tensor | None, top_k: int, scale: float) -> tuple[Tensor, Tensor]:
    """Choose experts: `logits` fp32 [T, E], `bias` fp32 [E] to (ids int64 [T, k], weights fp32 [T, k]).

    Ids come in ascending order of expert, so that equal sets are equal rows. Ties go to the lower id. On CUDA, one kernel of
    `triton_route`, whose weights of a token have the bits that `route_weights` gives for the same ids.
    """
    if _routed_by_kernels(logits):
        from .triton_route import RouteTopK

        return RouteTopK.apply(logits, bias, top_k, scale)
    scores = torch.sigmoid(wide(logits)).float()
    biased = scores if bias is None else scores + bias.float()
    ids = biased.sort(dim=-1, descending=True, stable=True).indices[:, :top_k].sort(dim=-1).values
    return ids, route_weights(logits, ids, scale)


def route_weights(logits: Tensor, ids: Tensor, scale: float) -> Tensor:
    """Weights fp32 [T, k] of given experts, from the full (dense) logits: a replayed id outside the live top-k keeps its gradient."""
    if _routed_by_kernels(logits):
        from .triton_route import RouteWeights

        return RouteWeights.apply(logits, ids, scale)
    chosen = torch.sigmoid(wide(logits)).float().gather(-1, ids)
    return chosen / wide(chosen).sum(-1, keepdim=True).float() * scale


def moe(
    x: Tensor,
    w13: FrozenWeight | NVFP4Tiles,
    w2: FrozenWeight | NVFP4Tiles,
    ids: Tensor,
    weights: Tensor,
    activation: SwiGLU,
    lora: ExpertLoRA | None = None,
    adapter_ids: Tensor | None = None,
    recompute: bool = False,
    w4a4: W4A4 | None = None,
) -> Tensor:
    """Routed experts: sum over k of weights[t, k] * expert_{ids[t, k]}(x[t]), in ascending order of expert.

    Args:
        x: [T, H].
        w13: stack [E, 2I, H], gate rows first. w2: stack [E, H, I]. Dense, or packed NVFP4 with one global scale an expert. Given as
            `NVFP4Tiles` and with x in bf16 on CUDA, the Triton kernels of `triton_moe` do the work, and a token's result does not
            depend on its batch; anywhere else tiles are unpacked first.
        ids: int [T, k] expert ids. weights: fp32 [T, k].
        lora: adapter slots, or None. adapter_ids: int [T] slot of each token (-1: base), None: slot 0 for all.
        recompute: keep less for the backward and compute gate and up again there (Triton kernels only).
        w4a4: emulate NVFP4 activations, on any device, in torch; the weights must be NVFP4 then.
    Returns:
        [T, H] in x's dtype, summed in fp32. Gradients go to x, weights and the adapter.
    """
    if not len(x):
        return torch.zeros_like(x)
    if isinstance(w13, NVFP4Tiles):
        if w4a4 is None and x.dtype is torch.bfloat16 and fast_path(x):
            from .moe_fused import fused_experts

            return fused_experts(x, w13, w2, ids, weights, activation, lora, adapter_ids, recompute)
        w13, w2 = unpack_experts(w13), unpack_experts(w2)
    k = ids.shape[1]
    ids, slot = ids.sort(dim=-1, stable=True)
    # One sort groups the (token, k) pairs by expert; within an expert, tokens stay in order.
    flat = ids.reshape(-1)
    order = flat.argsort(stable=True)
    token = torch.div(order, k, rounding_mode="floor")
    rows = x.index_select(0, token)
    parts = expert_outputs(rows, flat[order], w13, w2, activation, lora, None if adapter_ids is None else adapter_ids[token], w4a4)
    # Back in token order, a token's k results are added one after the other: the same order on every device, which an
    # atomic scatter would not keep.
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    y = parts.index_select(0, place).unflatten(0, ids.shape) * weights.float().gather(-1, slot)[..., None]
    out = y[:, 0]
    for i in range(1, k):
        out = out + y[:, i]
    return out.to(x.dtype)


def expert_outputs(
    rows: Tensor,
    experts: Tensor,
    w13: FrozenWeight,
    w2: FrozenWeight,
    activation: SwiGLU,
    lora: ExpertLoRA | None = None,
    adapter_ids: Tensor | None = None,
    w4a4: W4A4 | None = None,
) -> Tensor:
    """The torch reference of one expert a row: rows [P, H], at least one, and their experts [P], ascending, to fp32 [P, H].

    adapter_ids: slot of each row. Not rounded and not weighted yet; see `moe`.
    """
    experts, counts = experts.unique_consecutive(return_counts=True)
    sizes = counts.tolist()
    slots = [None] * len(sizes) if adapter_ids is None else adapter_ids.split(sizes)
    gates, ups, downs = (_by_expert(p) for p in lora or (None, None, None))
    parts = []
    for e, xs, ad in zip(experts.tolist(), rows.split(sizes), slots, strict=True):
        gate, up = (
            _project(xs, w, pair[e] if pair else None, ad, w4a4 and (w4a4.w13,)).to(rows.dtype)
            for w, pair in zip(split(select(w13, e), 2), (gates, ups), strict=True)
        )
        act = (swiglu_oai_halves if w4a4 is None else same_swiglu)(gate, up, activation).to(rows.dtype)
        parts.append(_project(act, select(w2, e), downs[e] if downs else None, ad, w4a4 and (w4a4.w2,)))
    return torch.cat(parts)


def _project(
    x: Tensor, weight: FrozenWeight, lora: LoRA | None, adapter_ids: Tensor | None, rounded: tuple[Tensor | None] | None
) -> Tensor:
    """`lora_sum`, where `rounded` with the base seeing NVFP4 activations under that static scale (or per token)."""
    if rounded is None:
        return lora_sum(x, weight, lora, adapter_ids)
    out = block_product(x, weight, *rounded)
    return out if lora is None else add_adapter(out, x, lora, adapter_ids)


def _by_expert(lora: LoRA | None) -> list[LoRA]:
    """The slots of each expert. Unbinding once keeps the backward linear in E: every index of a stack would cost a stack of zeros."""
    return [] if lora is None else [LoRA(a, b) for a, b in zip(lora.a.unbind(1), lora.b.unbind(1), strict=True)]

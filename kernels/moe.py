"""Mixture of experts over frozen, possibly packed experts with the adapter of each expert inside its GEMMs.

Router (MiniMax-M3): fp32 logits; sigmoid; the top-k experts by sigmoid + bias; weights are the unbiased sigmoids of the chosen
experts, normalised to sum 1, times the routed scaling factor.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .activation import SwiGLU, swiglu_oai
from .linear import FrozenWeight, LoRA, add_lora, frozen_linear, select


class ExpertLoRA(NamedTuple):
    """Adapter slots of all experts of a layer, a and b as [slots, E, r, K] and [slots, E, N, r]; None where not adapted."""

    gate: LoRA | None
    up: LoRA | None
    down: LoRA | None


def route_topk(logits: Tensor, bias: Tensor | None, top_k: int, scale: float) -> tuple[Tensor, Tensor]:
    """Choose experts: `logits` fp32 [T, E], `bias` fp32 [E] to (ids int64 [T, k], weights fp32 [T, k]).

    Ids come in ascending order of expert, so that equal sets are equal rows. Ties go to the lower id.
    """
    scores = torch.sigmoid(logits.float())
    biased = scores if bias is None else scores + bias.float()
    ids = biased.sort(dim=-1, descending=True, stable=True).indices[:, :top_k].sort(dim=-1).values
    return ids, route_weights(logits, ids, scale)


def route_weights(logits: Tensor, ids: Tensor, scale: float) -> Tensor:
    """Weights fp32 [T, k] of given experts, from the full (dense) logits: a replayed id outside the live top-k keeps its gradient."""
    chosen = torch.sigmoid(logits.float()).gather(-1, ids)
    return chosen / chosen.sum(-1, keepdim=True) * scale


def moe(
    x: Tensor,
    w13: FrozenWeight,
    w2: FrozenWeight,
    ids: Tensor,
    weights: Tensor,
    activation: SwiGLU,
    lora: ExpertLoRA | None = None,
    adapter_ids: Tensor | None = None,
) -> Tensor:
    """Routed experts: sum over k of weights[t, k] * expert_{ids[t, k]}(x[t]), in ascending order of expert.

    Args:
        x: [T, H].
        w13: stack [E, 2I, H], gate rows first. w2: stack [E, H, I]. Dense, or packed NVFP4 with one global scale an expert.
        ids: int [T, k] expert ids. weights: fp32 [T, k].
        lora: adapter slots, or None. adapter_ids: int [T] slot of each token (-1: base), None: slot 0 for all.
    Returns:
        [T, H] in x's dtype, summed in fp32. Gradients go to x, weights and the adapter.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    # One sort groups the (token, k) pairs by expert; within an expert, tokens stay in order.
    flat = ids.reshape(-1)
    order = flat.argsort(stable=True)
    experts, counts = flat[order].unique_consecutive(return_counts=True)
    pairs = order.split(counts.tolist())
    gates, ups, downs = (_by_expert(p) for p in lora or (None, None, None))
    for e, pair in zip(experts.tolist(), pairs, strict=True):
        token = torch.div(pair, ids.shape[1], rounding_mode="floor")
        xs = x[token]
        slots = None if adapter_ids is None else adapter_ids[token]
        h = frozen_linear(xs, select(w13, e))
        if gates or ups:
            gate, up = h.chunk(2, dim=-1)
            gate = add_lora(gate, xs, gates[e], slots) if gates else gate
            up = add_lora(up, xs, ups[e], slots) if ups else up
            h = torch.cat((gate, up), dim=-1)
        act = swiglu_oai(h.to(x.dtype), activation).to(x.dtype)
        y = frozen_linear(act, select(w2, e))
        if downs:
            y = add_lora(y, act, downs[e], slots)
        out.index_add_(0, token, y * weights.reshape(-1)[pair][:, None].float())
    return out.to(x.dtype)


def _by_expert(lora: LoRA | None) -> list[LoRA]:
    """The slots of each expert. Unbinding once keeps the backward linear in E: every index of a stack would cost a stack of zeros."""
    return [] if lora is None else [LoRA(a, b) for a, b in zip(lora.a.unbind(1), lora.b.unbind(1), strict=True)]

"""Experts applied to single pairs of token and expert, without the sum over a token's choices: what one rank of several computes.

`outputs` gives the fp32 row of each pair, `Gradients` what comes back from the gradient of the tokens' sums. Bits are those of
`kernels.moe.moe` on the same device: the same kernels (packed tiles, bf16, CUDA) or the same torch reference (anything else), which
keeps nothing for the backward and computes its forward again there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from samebits.quant.blocks import fast_path

from .activation import SwiGLU
from .expert_routes import Pairs
from .expert_tiles import NVFP4Tiles, unpack_experts
from .linear import FrozenWeight, LoRA
from .moe import W4A4, ExpertLoRA, expert_outputs

Loras = tuple[LoRA | None, LoRA | None, LoRA | None]


class Part(NamedTuple):
    """Some neighbouring experts with their adapters, and how they are computed."""

    w13: FrozenWeight | NVFP4Tiles
    w2: FrozenWeight | NVFP4Tiles
    loras: Loras
    activation: SwiGLU
    slotted: bool  # tokens have slots; otherwise slot 0 is everybody's
    recompute: bool
    w4a4: W4A4 | None


def takes_kernels(x: Tensor, w13: FrozenWeight | NVFP4Tiles, w4a4: W4A4 | None) -> bool:
    """As `moe` decides it."""
    return isinstance(w13, NVFP4Tiles) and w4a4 is None and x.dtype is torch.bfloat16 and fast_path(x)


def some_experts(weight: FrozenWeight | NVFP4Tiles, first: int, end: int) -> FrozenWeight | NVFP4Tiles:
    """Neighbouring matrices of a stack, as views."""
    if not isinstance(weight, tuple):
        return weight[first:end]
    return type(weight)(*(part[first:end] if isinstance(part, Tensor) else part for part in weight))


def outputs(xs: Tensor, pairs: Pairs, slots: Tensor, part: Part, keep: bool) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """fp32 [P, H], a row for each pair's target, and what `Gradients` needs of it.

    Args:
        xs: [rows, H]. slots: int32 [rows].
        keep: a backward will follow.
    """
    if not len(pairs.row):
        return xs.new_empty(0, xs.shape[1], dtype=torch.float32), (None, None, None)
    if takes_kernels(xs, part.w13, part.w4a4):
        return _kernel_outputs(xs, pairs, slots, part, keep)
    order, rows = _sorted(pairs)
    y = _reference(xs.index_select(0, rows), pairs.expert[order], slots[rows], part, part.loras)
    return torch.empty_like(y).index_copy_(0, pairs.target[order].long(), y), (None, None, None)


class Gradients:
    """Gradients of one part: `x` fp32 [P, H] and `weights` fp32 [P], by target, and those of the adapters once `adapters` is called.

    The adapters' are left for later, so that the others can travel meanwhile.
    """

    def __init__(self, xs: Tensor, grads: Tensor, pairs: Pairs, slots: Tensor, part: Part, kept: tuple[Tensor | None, ...]) -> None:
        """`grads` [rows, H]: gradient of each row's token. `kept`: what `outputs` returned."""
        if not len(pairs.row):
            self.x = xs.new_empty(0, xs.shape[1], dtype=torch.float32)
            self.weights = self.x.new_empty(0)
            self.adapters = lambda: [None if t is None else torch.zeros_like(t) for t in _flat(part.loras)]
        elif takes_kernels(xs, part.w13, part.w4a4):
            self.x, self.weights, self.adapters = _kernel_gradients(xs, grads, pairs, slots, part, kept)
        else:
            self.x, self.weights, self.adapters = _reference_gradients(xs, grads, pairs, slots, part)


def _flat(loras: Loras) -> list[Tensor | None]:
    return [t for pair in loras for t in (pair or (None, None))]


def _pack(flat: list[Tensor | None]) -> Loras:
    return tuple(None if flat[i] is None else LoRA(flat[i], flat[i + 1]) for i in (0, 2, 4))


def _sorted(pairs: Pairs) -> tuple[Tensor, Tensor]:
    """Places of the pairs in the order of expert, and their rows."""
    order = pairs.expert.argsort(stable=True)
    return order, pairs.row[order].long()


def _reference(rows: Tensor, experts: Tensor, slots: Tensor, part: Part, loras: Loras) -> Tensor:
    w13, w2 = (unpack_experts(w) if isinstance(w, NVFP4Tiles) else w for w in (part.w13, part.w2))
    lora = None if loras == (None, None, None) else ExpertLoRA(*loras)
    return expert_outputs(rows, experts, w13, w2, part.activation, lora, slots if part.slotted else None, part.w4a4)


def _reference_gradients(xs: Tensor, grads: Tensor, pairs: Pairs, slots: Tensor, part: Part):
    order, at = _sorted(pairs)
    target = pairs.target[order].long()
    leaves = [None if t is None else t.detach().requires_grad_() for t in _flat(part.loras)]
    with torch.enable_grad():
        rows = xs.detach().index_select(0, at).requires_grad_()
        y = _reference(rows, pairs.expert[order], slots[at], part, _pack(leaves))
    grad = grads.index_select(0, at).float()
    wanted = [rows, *(t for t in leaves if t is not None)]
    found = torch.autograd.grad(y, wanted, grad * pairs.weight[target][:, None], allow_unused=True)
    dx = torch.empty_like(y).index_copy_(0, target, found[0].float())
    dw = y.new_empty(len(y)).index_copy_(0, target, (grad * y.detach()).sum(-1))
    rest = iter(found[1:])
    adapters = [None if t is None else next(rest) for t in leaves]
    adapters = [torch.zeros_like(t) if g is None and t is not None else g for g, t in zip(adapters, leaves, strict=True)]
    return dx, dw, lambda: adapters


def _plans(pairs: Pairs, tile: int, part: Part):
    """One grouping by expert, twice: `by_row` finds a place's token, `by_target` its result. A token has one choice in both."""
    from .triton_group import group

    counters = 2 * (1 + max((p.a.shape[0] for p in part.loras if p is not None), default=1))
    plan = group(pairs.expert[:, None], len(part.w13.codes), tile, counters)
    return plan._replace(order=pairs.row[plan.order]), plan._replace(order=pairs.target[plan.order])


def _readable(loras: Loras, dtype: torch.dtype) -> Loras:
    """As kernels read them. Gradients come in the dtype of the adapters themselves: fp32 masters get sums that were never rounded."""
    return tuple(None if pair is None else LoRA(pair.a.to(dtype), pair.b.to(dtype)) for pair in loras)


def _kernel_outputs(xs: Tensor, pairs: Pairs, slots: Tensor, part: Part, keep: bool) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    from .triton_moe import cuts, weight_product

    gate, up, down = _readable(part.loras, xs.dtype)
    inner, outer = cuts(len(pairs.row), len(part.w13.codes))
    by_row, by_target = _plans(pairs, inner.tokens, part)
    row_slots, target_slots = (slots, pairs.slot) if part.slotted else (None, None)
    used = len(by_row.counters) // 2
    act, u, halves = weight_product(xs, part.w13, by_row, inner, part.activation, (gate, up), row_slots, keep=keep and not part.recompute)
    y, u2, _ = weight_product(act, part.w2, by_target, outer, None, (down, None), target_slots, counter=used)
    return y, (u, u2, halves) if keep else (None, None, None)


def _kernel_gradients(xs: Tensor, grads: Tensor, pairs: Pairs, slots: Tensor, part: Part, kept: tuple[Tensor | None, ...]):
    """The steps of `moe_fused.FusedExperts.backward`, with tokens and results in lists of their own."""
    from .triton_moe import cuts, weight_product
    from .triton_moe_grad import back_cut, back_product, outer_product, rank_product, swiglu_back

    u, u2, halves = kept
    gate, up, down = _readable(part.loras, xs.dtype)
    count, experts = len(pairs.row), len(part.w13.codes)
    row_slots, target_slots = (slots, pairs.slot) if part.slotted else (None, None)
    if halves is None:
        inner = cuts(count, experts)[0]
        again, _ = _plans(pairs, inner.tokens, part)
        halves = weight_product(xs, part.w13, again, inner, part.activation, (gate, up), row_slots, keep=True)[2]
    cut = back_cut(count, experts)
    by_row, by_target = _plans(pairs, cut.tokens, part)
    v2 = rank_product(grads, down, None, by_row, row_slots, down=True, tile=cut.tokens) if down else None
    da = back_product(grads, part.w2, v2, down, None, by_row, row_slots, gated=False, cut=cut)
    dh, act, dw = swiglu_back(da, halves, pairs.weight, by_target, part.activation)
    v = rank_product(dh, gate, up, by_target, target_slots, down=False, tile=cut.tokens) if gate or up else None
    dx = back_product(dh, part.w13, v, gate, up, by_target, target_slots, gated=True, cut=cut)

    def adapters() -> list[Tensor | None]:
        found: list[Tensor | None] = [None] * 6
        half, width = dh.shape[1] // 2, 0 if v is None else v.shape[1] // 2
        for at, one in enumerate(part.loras[:2]):
            if one is not None:
                columns, ranks = slice(at * half, (at + 1) * half), slice(at * width, (at + 1) * width)
                found[2 * at] = outer_product(xs, v[:, ranks], one.a, by_row, row_slots, gather=True, weights=None, is_a=True)
                found[2 * at + 1] = outer_product(
                    dh[:, columns], u[:, ranks], one.b, by_row, row_slots, gather=False, weights=None, is_a=False
                )
        if down is not None:
            found[4] = outer_product(act, v2, part.loras[2].a, by_target, target_slots, gather=False, weights=pairs.weight, is_a=True)
            # A row's token has a gradient for every choice, so that the weight goes with the place, rounded as the kernel rounds it.
            weighted = (u2.float() * pairs.weight[by_target.order][:, None]).to(u2.dtype)
            found[5] = outer_product(grads, weighted, part.loras[2].b, by_row, row_slots, gather=True, weights=None, is_a=False)
        return found

    return dx, dw, adapters

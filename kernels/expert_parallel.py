"""Routed experts spread over the ranks of a torch.distributed group, with the bits of one rank that has them all.

Each rank holds a contiguous range of the experts and of their adapters (`expert_routes.owned`) and tokens of its own. A token goes once
to each rank that owns an expert of it, the fp32 row of each (token, expert) comes back before any sum, and the token's own rank adds
the rows up in ascending order of expert, as `moe` does. So a token's result is that of `moe`, bit for bit, wherever its experts are.

What that costs: a result row is 4 H bytes where the token was 2 H. A rank's own sum over several experts of one token could travel in
their place only where it begins the token's sum, because fp32 sums have an order. With two ranks, four experts a token and uniform
routes that would save three rows in ten, but one in ten on the busier way, from the rank of the upper experts to that of the lower ones,
and that way is the one waited for. So rows travel as they are, and travel behind the computing.

The pipeline is over experts, not tokens: a rank computes its range in `parts`, while tokens that only later parts need still come and
rows of earlier parts already go. Each packed weight is read once, tiles stay full, and an adapter's gradient is one sum. The gradient
takes the same ways: gradients of tokens go out, an fp32 row and the router weight's gradient come back for each pair, while the
adapters' gradients are computed. Parts change no bit of results and gradients.

Everything goes through `all_to_all_single`: NCCL on CUDA, gloo on CPU. Counts are known on the host, which waits for the device three
times a forward; `expert_peers` is the way without (inference).
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .activation import SwiGLU
from .expert_pairs import Gradients, Part, outputs, some_experts, takes_kernels
from .expert_routes import Routes, make_routes, owned, part_edges
from .expert_tiles import NVFP4Tiles
from .linear import FrozenWeight, LoRA
from .moe import W4A4, ExpertLoRA


class Call(NamedTuple):
    """What of a call is no tensor of autograd's."""

    routes: Routes
    parts: list[tuple[int, int]]  # experts of each part, within the rank's range
    w13: FrozenWeight | NVFP4Tiles
    w2: FrozenWeight | NVFP4Tiles
    activation: SwiGLU
    slotted: bool
    recompute: bool
    w4a4: W4A4 | None
    group: dist.ProcessGroup | None

    def part(self, g: int, adapters: tuple[Tensor | None, ...]) -> Part:
        """Experts and adapters of a part."""
        first, end = self.parts[g]
        mine = [None if t is None else t[:, first:end].contiguous() for t in adapters]
        loras = tuple(None if mine[i] is None else LoRA(mine[i], mine[i + 1]) for i in (0, 2, 4))
        experts = (some_experts(w, first, end) for w in (self.w13, self.w2))
        return Part(*experts, loras, self.activation, self.slotted, self.recompute, self.w4a4)


def expert_parallel_moe(
    x: Tensor,
    w13: FrozenWeight | NVFP4Tiles,
    w2: FrozenWeight | NVFP4Tiles,
    ids: Tensor,
    weights: Tensor,
    activation: SwiGLU,
    lora: ExpertLoRA | None = None,
    adapter_ids: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    *,
    experts: int,
    parts: int = 4,
    recompute: bool = False,
    w4a4: W4A4 | None = None,
) -> Tensor:
    """`kernels.moe.moe` with the experts spread over `group`; every rank calls it, and runs the backward, with tokens or without.

    Args:
        x: [T, H], this rank's tokens; T may differ from rank to rank, and be 0.
        w13, w2, lora: this rank's experts, those of `owned(experts, world, rank)`, dense, packed or as tiles.
        ids: int [T, k], of all experts. weights: fp32 [T, k].
        adapter_ids: int [T], on all ranks or on none.
        experts: their number on all ranks together. parts: in how many parts a rank computes its range.
        recompute, w4a4: see `moe`.
    Returns:
        [T, H] in x's dtype. Gradients go to x, weights and this rank's adapter, and do not depend on timing.
    Raises:
        ValueError: on every rank alike, where shapes or routes do not fit.
    """
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    first, end = owned(experts, world, rank)
    held = len(w13[0] if isinstance(w13, tuple) else w13)
    tokens = _agreed(x, held == end - first, ids.shape[1], adapter_ids is not None, group)
    ids, order = ids.long().sort(dim=-1, stable=True)
    weights = weights.float().gather(-1, order)
    everybody = _gathered(ids, adapter_ids, weights, max(tokens), group)
    routes = make_routes(*everybody, tokens, experts, parts, rank)
    edges = part_edges(experts, world, parts)[rank * parts : (rank + 1) * parts + 1]
    ranges = [(a - first, b - first) for a, b in itertools.pairwise(edges)]
    call = Call(routes, ranges, w13, w2, activation, adapter_ids is not None, recompute, w4a4, group)
    flat = [t for pair in lora or () for t in (pair or (None, None))] or [None] * 6
    return _ExpertParallel.apply(x.contiguous(), weights, call, *flat)


class _ExpertParallel(torch.autograd.Function):
    """x [T, H], weights fp32 [T, k] in ascending order of expert, the six adapter tensors or None."""

    @staticmethod
    def forward(ctx, x, weights, call, *adapters):
        keep = any(ctx.needs_input_grad)
        routes = call.routes
        xs, arrivals = _dispatch(x, call)
        z = torch.empty(routes.place.numel(), x.shape[1], dtype=torch.float32, device=x.device)
        returns, kept = _Returns(z, call), []
        for g, arrival in enumerate(arrivals):
            arrival.wait()
            y, saved = outputs(xs, routes.pairs[g], routes.slots, call.part(g, adapters), keep)
            returns.send(g, y)
            kept += saved
        returns.wait()
        if keep:
            ctx.call = call
            ctx.save_for_backward(xs, *kept, *adapters)
        return _combine(z, routes.place, weights, x, call)

    @staticmethod
    def backward(ctx, grad):
        call = ctx.call
        routes, count = call.routes, len(call.parts)
        xs, *rest = ctx.saved_tensors
        kept, adapters = rest[: 3 * count], rest[3 * count :]
        grads, arrivals = _dispatch(grad.contiguous(), call)
        z = torch.empty(routes.place.numel(), xs.shape[1], dtype=torch.float32, device=xs.device)
        zw = torch.empty(routes.place.numel(), 1, dtype=torch.float32, device=xs.device)
        rows, scalars, found = _Returns(z, call), _Returns(zw, call), []
        for g, arrival in enumerate(arrivals):
            arrival.wait()
            part = call.part(g, adapters)
            one = Gradients(xs, grads, routes.pairs[g], routes.slots, part, kept[3 * g : 3 * g + 3])
            rows.send(g, one.x)
            scalars.send(g, one.weights[:, None])
            found.append(one.adapters())
        rows.wait()
        scalars.wait()
        ones = torch.ones(routes.place.shape, dtype=torch.float32, device=xs.device)
        dx = _combine(z, routes.place, ones, xs, call)
        dw = zw[:, 0][routes.place]
        return dx, dw, None, *(None if t is None else torch.cat([f[i] for f in found], 1) for i, t in enumerate(adapters))


class _Done:
    """Of an exchange with nobody."""

    def wait(self) -> None:
        """Nothing to wait for."""


def _swap(out: Tensor, rows: Tensor, recv: list[int], send: list[int], group: dist.ProcessGroup | None):
    """Rows to and from every rank, behind what the current stream does next; `wait` makes it wait for them."""
    if dist.get_world_size(group) == 1:
        return _Done()
    return dist.all_to_all_single(out, rows, recv, send, group=group, async_op=True)


def _dispatch(x: Tensor, call: Call) -> tuple[Tensor, list]:
    """(rows [rows, H]: own tokens, then what comes; an exchange for each part)."""
    routes = call.routes
    rows = torch.empty(routes.rows, x.shape[1], dtype=x.dtype, device=x.device)
    staged = x.index_select(0, routes.sent)
    works, there, here = [], 0, routes.tokens
    for send, recv in zip(routes.send, routes.recv, strict=True):
        works.append(_swap(rows[here : here + sum(recv)], staged[there : there + sum(send)], recv, send, call.group))
        there, here = there + sum(send), here + sum(recv)
    rows[: routes.tokens] = x  # while they travel
    return rows, works


class _Returns:
    """Results on their way home, part by part, to the rows that `Routes.place` speaks of."""

    def __init__(self, z: Tensor, call: Call) -> None:
        """`z` [T * k, *]: where they go."""
        self.z, self.call, self.at, self.works = z, call, 0, []

    def send(self, g: int, y: Tensor) -> None:
        """Start with part g; the own rows are copied."""
        routes = self.call.routes
        others, come, own = sum(routes.give[g]), sum(routes.take[g]), routes.own[g]
        work = _swap(self.z[self.at : self.at + come], y[:others], routes.take[g], routes.give[g], self.call.group)
        self.z[self.at + come : self.at + come + own] = y[others:]
        self.at += come + own
        self.works.append((work, y))  # rows live until they are sent

    def wait(self) -> None:
        """Until all are there."""
        for work, _ in self.works:
            work.wait()
        self.works.clear()


def _combine(z: Tensor, place: Tensor, weights: Tensor, like: Tensor, call: Call) -> Tensor:
    """The weighted sum of each token's rows, as `moe` does it for this kind of tensors."""
    if takes_kernels(like, call.w13, call.w4a4):
        from .triton_placed import combine_placed

        return combine_placed(z, place, weights)
    y = z.index_select(0, place.flatten()).unflatten(0, place.shape) * weights[..., None]
    out = y[:, 0]
    for i in range(1, y.shape[1]):
        out = out + y[:, i]
    return out.to(like.dtype)


def _agreed(x: Tensor, fits: bool, k: int, slotted: bool, group: dist.ProcessGroup | None) -> list[int]:
    """Tokens of each rank, after all ranks have looked whether they fit together."""
    mine = torch.tensor([len(x), int(fits), k, int(slotted), x.shape[1]], device=x.device)
    heard = torch.empty(dist.get_world_size(group), len(mine), dtype=mine.dtype, device=x.device)
    dist.all_gather(list(heard.unbind()), mine, group=group)
    heard = heard.tolist()
    if missing := [r for r, line in enumerate(heard) if not line[1]]:
        raise ValueError(f"ranks {missing} do not hold the experts that are theirs")
    if len({tuple(line[2:]) for line in heard}) > 1:
        raise ValueError("ranks differ in the number of choices, the width, or in whether tokens have adapter slots")
    return [line[0] for line in heard]


def _gathered(
    ids: Tensor, slots: Tensor | None, weights: Tensor, room: int, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Ids int64 [W, room, k], -1 beyond a rank's tokens, slots int32 [W, room] and weights fp32 [W, room, k] of all ranks."""
    tokens, k = ids.shape
    mine = torch.full((room, 2 * k + 1), -1, dtype=torch.int32, device=ids.device)
    mine[:tokens, :k] = ids
    mine[:tokens, k] = 0 if slots is None else slots
    mine[:tokens, k + 1 :] = weights.detach().contiguous().view(torch.int32)
    everybody = torch.empty(dist.get_world_size(group), room, 2 * k + 1, dtype=torch.int32, device=ids.device)
    dist.all_gather(list(everybody.unbind()), mine, group=group)
    return everybody[..., :k].long(), everybody[..., k], everybody[..., k + 1 :].contiguous().view(torch.float32)

"""Routed experts of an engine against those of a trainer, bit for bit, over random tokens: `python -m tests.support.random_experts`.

A case is a token: its hidden state, its router logits, and the adapter it asks for, or none. Cases are drawn in sets of up to 64, which
share a layer; routes may be even, or lean to a few experts. Of a set

- the trainer routes and computes all tokens among others, with what gradients need: for each adapter with that adapter alone, as a job
  trains it, and without one for the tokens that ask for none. Then it computes each adapter's tokens in a batch that has no others, over
  replayed routes, whose weights must be those of chosen ones;
- the engine computes them in batches of 1, 7 and 64 tokens in another order, and in one batch among others, as a chunk of prefill has
  them; all adapters in their slots.

Routes, weights and outputs must have the same bytes, of every token in every one of these batches: `comparisons` says how many that are.
A byte that differs names the token, and its set can be run alone.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from samebits.kernels.activation import SwiGLU
from samebits.kernels.expert_tiles import pack_experts
from samebits.kernels.linear import LoRA
from samebits.kernels.moe import ExpertLoRA, moe, route_topk, route_weights
from samebits.quant import nvfp4

from . import random_command
from .random_attention import same_bytes
from .random_command import Finding, again, summary

ACT = SwiGLU()
SCALE = 2.5  # of a token's weights


class Layer(NamedTuple):
    """Sizes of a layer."""

    hidden: int
    width: int
    experts: int
    top: int
    rank: int
    slots: int


class Limits(NamedTuple):
    """From what cases are drawn."""

    layers: tuple[Layer, ...] = (Layer(768, 384, 8, 4, 32, 3), Layer(272, 80, 5, 2, 16, 2))
    each: int = 64  # tokens of a set
    batches: tuple[int, ...] = (1, 7, 64)
    others: tuple[int, ...] = (0, 40, 900)  # tokens of no case in the trainer's batch


class Ops(NamedTuple):
    """The operations; see `kernels.moe`. `moe` gets packed weights, bf16 adapters or None, slots or None, and whether gradients follow."""

    route_topk: Callable
    route_weights: Callable
    moe: Callable


def fast_ops() -> Ops:
    """As trainer and engine call them."""

    def call(x, w13, w2, ids, weights, lora, slots, train):
        with torch.set_grad_enabled(train):
            return moe(x.clone().requires_grad_(train), w13, w2, ids, weights, ACT, lora, slots).detach()

    return Ops(route_topk, route_weights, call)


def comparisons(limits: Limits) -> int:
    """Of each case: weights and output of replayed routes, then routes, weights and output of each batch of the engine."""
    return 2 + 3 * (len(limits.batches) + 1)


def check_set(
    number: int, seed: int, count: int, limits: Limits, ops: Ops, device: str, differing: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Finding, Tensor, dict[str, Tensor]]:
    """All comparisons of a set of `count` tokens: the finding without words, the tokens' slots, and what differs by token."""
    rng = random.Random(f"{seed}/{number}/experts")
    layer, others, leaning = limits.layers[number % len(limits.layers)], rng.choice(limits.others), rng.random() < 0.5
    g = torch.Generator(device).manual_seed(seed * 1_000_003 + number)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, device=device)

    def pair(n: int, k: int) -> LoRA:
        a, b = normal(layer.slots, layer.experts, layer.rank, k) / k**0.5, normal(layer.slots, layer.experts, n, layer.rank) * 0.3
        return LoRA(a.bfloat16(), b.bfloat16())

    w13 = pack_experts(nvfp4.quantize(normal(layer.experts, 2 * layer.width, layer.hidden) / layer.hidden**0.5))
    w2 = pack_experts(nvfp4.quantize(normal(layer.experts, layer.hidden, layer.width) / layer.width**0.5))
    lora = ExpertLoRA(pair(layer.width, layer.hidden), pair(layer.width, layer.hidden), pair(layer.hidden, layer.width))
    x = normal(count + others, layer.hidden).bfloat16()
    logits, bias = normal(count + others, layer.experts), normal(layer.experts) * 0.1
    if leaning:
        logits = logits + torch.linspace(0, 6, layer.experts, device=device)
    slots = torch.randint(-1, layer.slots, (count,), generator=g, device=device)
    found: dict[str, Tensor] = {}
    size, times = 0, torch.zeros(count, dtype=torch.int64, device=device)

    def compare(name: str, have: Tensor, want: Tensor, rows: Tensor) -> None:
        nonlocal size
        size += have.nbytes
        times.index_add_(0, rows, torch.ones_like(rows))
        found.setdefault(name, torch.zeros(count, dtype=torch.int64, device=device)).index_add_(0, rows, differing(have, want))

    every = torch.arange(count, device=device)
    mixed = torch.randperm(count + others, generator=g, device=device)  # the trainer's order
    back = torch.empty_like(mixed).scatter_(0, mixed, torch.arange(len(mixed), device=device))[:count]
    ids, weights = ops.route_topk(logits[mixed], bias, layer.top, SCALE)
    want = torch.empty(count, layer.hidden, dtype=torch.bfloat16, device=device)

    def alone(slot: int) -> ExpertLoRA | None:
        """What a job that trains one adapter has."""
        return None if slot < 0 else ExpertLoRA(*(LoRA(p.a[slot : slot + 1], p.b[slot : slot + 1]) for p in lora))

    for slot in range(-1, layer.slots):
        out = ops.moe(x[mixed], w13, w2, ids, weights, alone(slot), None, True)[back]
        want = torch.where((slots == slot)[:, None], out, want)
    if not want.isfinite().all():
        raise ValueError(f"set {number}: the trainer's experts are not finite")
    ids, weights = ids[back], weights[back]
    for slot in range(-1, layer.slots):
        rows = (slots == slot).nonzero().flatten()
        if len(rows):
            replayed = ops.route_weights(logits[rows], ids[rows], SCALE)
            compare("weights of replayed routes", replayed, weights[rows], rows)
            have = ops.moe(x[rows], w13, w2, ids[rows], replayed, alone(slot), None, True)
            compare("experts of replayed routes", have, want[rows], rows)

    def engine(where: str, batch: Tensor, asked: Tensor) -> None:
        """Tokens `batch`, those of no case too, which ask for adapters `asked`."""
        chosen, their = ops.route_topk(logits[batch], bias, layer.top, SCALE)
        have = ops.moe(x[batch], w13, w2, chosen, their, lora, asked, False)
        ours = batch < count
        rows = batch[ours]
        compare(f"routes, {where}", chosen[ours], ids[rows], rows)
        compare(f"weights, {where}", their[ours], weights[rows], rows)
        compare(f"experts, {where}", have[ours], want[rows], rows)

    order = every[torch.randperm(count, generator=g, device=device)]
    for batch in limits.batches:
        for rows in order.split(batch):
            engine(f"{batch} tokens a batch", rows, slots[rows])
    asked = torch.cat((slots, torch.randint(-1, layer.slots, (others,), generator=g, device=device)))
    mixed = torch.randperm(count + others, generator=g, device=device)
    engine("among others", mixed, asked[mixed])
    return Finding(count, size, int(times.sum()), int(times.min()), ()), slots, found


def run(
    seed: int,
    count: int,
    limits: Limits,
    ops: Ops,
    device: str,
    only: int | None = None,
    differing: Callable[[Tensor, Tensor], Tensor] = same_bytes,
    tell: Callable[[str], None] = print,
) -> Finding:
    """All sets, or the one numbered `only`; tells what differs as soon as it is found, and at the end how much was compared."""
    findings = []
    for number, first in enumerate(range(0, count, limits.each)):
        if only is not None and number != only:
            continue
        finding, slots, found = check_set(number, seed, min(limits.each, count - first), limits, ops, device, differing)
        table = torch.stack(list(found.values())).cpu()
        if table.any():
            at = int(table.any(0).nonzero()[0])
            layer = limits.layers[number % len(limits.layers)]
            what = "; ".join(f"{name}: {int(n)}" for name, n in zip(found, table[:, at], strict=True) if n)
            line = f"case {first + at} (set {number}, token {at}, adapter {int(slots[at])}, {layer}) differs in bytes of {what}"
            finding = finding._replace(wrong=(line + again("random_experts", seed, count, number),))
            tell(finding.wrong[0])
        findings.append(finding)
    return summary(f"experts, seed {seed}", findings, tell)


def on_gpu(seed: int, count: int, number: int) -> Finding:
    """The set `number` of `count` cases, on the kernels; other processes get back what memory it took."""
    found = run(seed, count, Limits(), fast_ops(), "cuda", number, tell=lambda line: None)
    torch.cuda.empty_cache()
    return found


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    return random_command.main("experts", lambda count: -(-count // Limits().each), on_gpu, argv)


if __name__ == "__main__":
    sys.exit(main())

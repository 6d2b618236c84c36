"""Experts on two and on four gloo ranks against one rank that has them all: equal bits forward, and gradients."""

from __future__ import annotations

import pytest
import torch

from samebits.kernels.activation import SwiGLU
from samebits.kernels.expert_pairs import some_experts
from samebits.kernels.expert_parallel import expert_parallel_moe
from samebits.kernels.expert_routes import owned
from samebits.kernels.linear import LoRA
from samebits.kernels.moe import ExpertLoRA, moe
from samebits.quant import nvfp4
from tests.support.ranks import on_ranks

H, WIDTH, TOP, R, SLOTS = 32, 48, 3, 4, 2
ACT = SwiGLU()
NAMES = ("x", "weights", "gate.a", "gate.b", "up.a", "up.b", "down.a", "down.b")
# name: tokens of each rank (repeated), experts, parts, weights, adapters, slots, routes
CASES = {
    "plain": ((9, 5, 1, 7), 8, 3, "dense", False, False, "any"),
    "adapters": ((9, 5, 1, 7), 8, 3, "dense", True, False, "any"),
    "slots and packed experts": ((6, 6, 6, 6), 7, 2, "nvfp4", True, True, "any"),
    "one token": ((0, 1, 0, 0), 8, 2, "dense", True, True, "any"),
    "no tokens": ((0, 0, 0, 0), 8, 2, "dense", True, False, "any"),
    "all to one rank": ((4, 0, 3, 2), 8, 1, "dense", True, True, "last"),
    "more ranks and parts than experts": ((3, 4, 2, 5), 3, 4, "dense", True, False, "any"),
    "an expert more than once": ((5, 2, 3, 4), 8, 2, "dense", True, False, "twice"),
    "partly adapted": ((5, 2, 3, 4), 8, 2, "dense", "down", True, "any"),
}


def layer(case: str, world: int):
    """Experts, adapters, and the tokens of all ranks; every expert and slot of a size of its own."""
    tokens, experts, parts, kind, adapted, slotted, route = CASES[case]
    tokens = list(tokens[:world])
    g = torch.Generator().manual_seed(len(case))
    size = torch.arange(1.0, experts + 1)[:, None, None]
    w13 = torch.randn(experts, 2 * WIDTH, H, generator=g) * size / H**0.5
    w2 = torch.randn(experts, H, WIDTH, generator=g) / size / WIDTH**0.5
    if kind == "nvfp4":
        w13, w2 = nvfp4.quantize(w13), nvfp4.quantize(w2)
    slot = torch.tensor([1.0, -2.0])[:, None, None, None]

    def pair(n: int, k: int) -> LoRA:
        return LoRA(torch.randn(SLOTS, experts, R, k, generator=g) * slot, torch.randn(SLOTS, experts, n, R, generator=g) * 0.1 * size)

    lora = ExpertLoRA(pair(WIDTH, H), pair(WIDTH, H), pair(H, WIDTH)) if adapted else None
    if adapted == "down":
        lora = ExpertLoRA(None, None, lora.down)
    count = sum(tokens)
    x = torch.randn(count, H, generator=g)
    if route == "last":
        ids = torch.tensor([experts - 2, experts - 1, experts - 1]).repeat(count, 1)
    elif route == "twice":
        ids = torch.randint(0, experts, (count, TOP), generator=g)
        ids[:, 2] = ids[:, 0]
    else:
        ids = torch.rand(count, experts, generator=g).argsort(-1)[:, :TOP]
    weights = torch.rand(count, TOP, generator=g)
    slots = torch.randint(-1, SLOTS, (count,), generator=g) if slotted else None
    direction = torch.randn(count, H, generator=g)
    return tokens, experts, parts, w13, w2, lora, x, ids, weights, slots, direction


def flat(lora):
    return [t for pair in lora or (None, None, None) for t in (pair or (None, None))]


def run(call, x, weights, adapters, direction):
    """Output and gradients, None where there is no leaf."""
    leaves = [None if t is None else t.clone().requires_grad_() for t in (x, weights, *adapters)]
    pairs = [None if leaves[i] is None else LoRA(leaves[i], leaves[i + 1]) for i in (2, 4, 6)]
    out = call(leaves[0], leaves[1], ExpertLoRA(*pairs) if any(pairs) else None)
    (out * direction).sum().backward()
    return out.detach(), [None if t is None else t.grad for t in leaves]


def worker(rank: int, world: int) -> dict:
    results = {}
    for name in CASES:
        tokens, experts, parts, w13, w2, lora, x, ids, weights, slots, direction = layer(name, world)
        first, end = owned(experts, world, rank)
        mine = slice(sum(tokens[:rank]), sum(tokens[: rank + 1]))
        shards = [some_experts(w, first, end) for w in (w13, w2)]
        adapters = [None if t is None else t[:, first:end] for t in flat(lora)]

        def call(parts):
            def one(x, weights, adapter):
                slot = None if slots is None else slots[mine]  # noqa: B023
                return expert_parallel_moe(
                    x, *shards, ids[mine], weights, ACT, adapter, slot, experts=experts, parts=parts  # noqa: B023
                )  # fmt: skip

            return one

        results[name] = run(call(parts), x[mine], weights[mine], adapters, direction[mine])
        again = run(call(1), x[mine], weights[mine], adapters, direction[mine])
        same = [torch.equal(results[name][0], again[0])]
        same += [a is b is None or torch.equal(a, b) for a, b in zip(results[name][1], again[1], strict=True)]
        results[name, "parts"] = all(same)
    results["errors"] = errors(rank, world)
    return results


def errors(rank: int, world: int) -> list[str]:
    """What is said on this rank where one rank is wrong."""
    tokens, experts, _, w13, w2, _, x, ids, weights, _, _ = layer("plain", world)
    first, end = owned(experts, world, rank)
    mine = slice(sum(tokens[:rank]), sum(tokens[: rank + 1]))
    wrong = ids[mine].clone()
    if rank == 1:
        wrong[0, 0] = experts
    said = []
    for its, cut, slots in ((wrong, 0, None), (ids[mine], rank == 0, None), (ids[mine], 0, ids[mine][:, 0] if rank else None)):
        shards = [w[first : end - cut] for w in (w13, w2)]
        try:
            expert_parallel_moe(x[mine], *shards, its, weights[mine], ACT, None, slots, experts=experts)
        except ValueError as error:
            said.append(str(error))
    return said


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request, tmp_path_factory):
    return request.param, on_ranks(request.param, worker, tmp_path_factory.mktemp("experts"))


@pytest.mark.parametrize("name", CASES)
def test_as_one_rank_with_all_experts(ranks, name):
    world, results = ranks
    tokens, _, _, w13, w2, lora, x, ids, weights, slots, direction = layer(name, world)
    assert all(r[name, "parts"] for r in results)
    have = torch.cat([r[name][0] for r in results])
    if not sum(tokens):  # one rank's layer is a constant then, but these still have gradients to exchange
        assert have.shape == (0, H) and all(not t.any() for r in results for t in r[name][1])
        return
    out, grads = run(lambda x, w, a: moe(x, w13, w2, ids, w, ACT, a, slots), x, weights, flat(lora), direction)
    assert torch.equal(have, out)
    for i, want in enumerate(grads):
        got = [r[name][1][i] for r in results]
        if want is None:
            assert got == [None] * world
            continue
        got = torch.cat(got, 0 if i < 2 else 1)
        assert want.any() and torch.equal(got, want), NAMES[i]


def test_a_mistake_of_one_rank_is_said_on_all(ranks):
    _, results = ranks
    for r in results:
        assert r["errors"] == [
            "rank 1 chose an expert that is not one of 0 to 7",
            "ranks [0] do not hold the experts that are theirs",
            "ranks differ in the number of choices, the width, or in whether tokens have adapter slots",
        ]

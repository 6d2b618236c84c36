"""Experts over the GPUs of one host, measured: what a rank computes, what it moves, and both together. Lines of `bench_parallel`.

MiniMax-M3's shape (hidden 6144, intermediate 3072, 128 experts, top-4, rank-32 adapters on all experts), uniform random routes, as many
tokens on every rank, each rank's own:

    one GPU       `moe` with all experts on one rank's tokens
    computing     what a rank computes for the tokens of all: grouping, the two products in one part each, the sum
    moving        everything else: publishing, reading, storing of rows, both barriers, and no products
    together      the call; what is exposed of the moving is together - computing

By peer memory these are CUDA-graph replays; over NCCL (`expert_parallel`, with its counts on the host) CUDA events. Every result is
compared bit for bit with one GPU's.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import bench_moe
from .bench_moe import ACT
from .bench_ranks import all_agree, graph_us, median_us
from .expert_pairs import some_experts
from .expert_parallel import expert_parallel_moe
from .expert_routes import owned
from .linear import LoRA
from .moe import ExpertLoRA, moe

TRAINED = 4096
PARTS = (8, 4)  # parts of a call with many tokens: that of `expert_peers`, and half as many
BATCHES = 3


class Layer:
    """Experts of one layer, the same on all ranks, and which of them are this rank's."""

    def __init__(self) -> None:
        """On the current GPU."""
        torch.manual_seed(0)
        self.tiles = (
            bench_moe.random_tiles(2 * bench_moe.WIDTH, bench_moe.HIDDEN),
            bench_moe.random_tiles(bench_moe.HIDDEN, bench_moe.WIDTH),
        )
        self.whole = bench_moe.random_adapters()
        first, end = owned(bench_moe.EXPERTS, dist.get_world_size(), dist.get_rank())
        self.shards = [some_experts(t, first, end) for t in self.tiles]
        self.lora = ExpertLoRA(*(LoRA(p.a[:, first:end], p.b[:, first:end]) for p in self.whole))

    def lines(self, count: int) -> Iterator[dict[str, Any]]:
        """A line for each way, of `count` tokens on every rank."""
        from .expert_peers import MANY, PeerExperts

        shards, lora = self.shards, self.lora
        batches = bench_moe.batches(count, BATCHES, seed=dist.get_rank())
        peers = PeerExperts(bench_moe.EXPERTS, bench_moe.TOP, bench_moe.HIDDEN, count)
        wants = [self.one_gpu(*b) for b in batches]
        one = graph_us([lambda b=b: self.one_gpu(*b) for b in batches])
        computing = graph_us([computing_alone(peers, shards, lora, *b) for b in batches])
        many = count * bench_moe.TOP >= MANY
        for parts in PARTS if many else (1,):

            def call(x: Tensor, ids: Tensor, w: Tensor, parts: int = parts) -> Tensor:
                return peers(x, *shards, ids, w, ACT, lora, parts=parts)

            equal = all(torch.equal(call(*b), want) for b, want in zip(batches, wants, strict=True))
            moving = graph_us([moving_alone(peers, shards, lora, parts, *b) for b in batches])
            together = graph_us([lambda b=b, call=call: call(*b) for b in batches])
            line = {"tokens": count, "way": "peer memory", "parts": parts, "one_gpu_us": one}
            yield line | shares(computing, moving, together) | {"equal": all_agree(equal)}
        for parts in (1, 4) if many else ():

            def call(x: Tensor, ids: Tensor, w: Tensor, parts: int = parts) -> Tensor:
                return expert_parallel_moe(x, *shards, ids, w, ACT, lora, experts=bench_moe.EXPERTS, parts=parts)

            equal = all(torch.equal(call(*b), want) for b, want in zip(batches, wants, strict=True))
            together = statistics.mean(median_us(lambda b=b, call=call: call(*b), 7) for b in batches[:2])
            line = {"tokens": count, "way": "NCCL", "parts": parts, "one_gpu_us": one, "computing_us": computing, "together_us": together}
            yield line | {"equal": all_agree(equal)}

    def one_gpu(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The call that all is compared with."""
        return moe(x, *self.tiles, ids, weights, ACT, self.whole)


def shares(computing: float, moving: float, together: float) -> dict[str, float]:
    """The times and which share of the moving is hidden behind the computing."""
    exposed = together - computing
    return {"computing_us": computing, "moving_us": moving, "together_us": together, "exposed_us": exposed, "hidden": 1 - exposed / moving}


def computing_alone(peers, shards: list, lora: ExpertLoRA, x: Tensor, ids: Tensor, weights: Tensor) -> Callable[[], Any]:
    """What this rank computes for such a batch on all ranks, its rows being there, in one part."""
    from .expert_peers import _Work
    from .triton_group import combine, group
    from .triton_moe import weight_product

    peers(x, *shards, ids, weights, ACT, lora, parts=1)
    work = _Work(peers, x, *shards, ids, ACT, lora, None, 1)
    work.plan()  # routes are still there
    dist.barrier()
    torch.cuda.synchronize()
    own, rows = work.own, torch.randn_like(peers.rows.local)
    results = torch.randn_like(peers.results.local)

    def call() -> Tensor:
        plan = group(own, len(shards[0].codes), work.inner.tokens, 4)
        act, _, _ = weight_product(rows, shards[0], plan, work.inner, ACT, (lora.gate, lora.up), None)
        y, _, _ = weight_product(act, shards[1], plan, work.outer, None, (lora.down, None), None, counter=2)
        del y
        return combine(results, ids, weights)

    return call


def moving_alone(peers, shards: list, lora: ExpertLoRA, parts: int, x: Tensor, ids: Tensor, weights: Tensor) -> Callable[[], Any]:
    """The call without its plan, its products and its sum."""
    from .expert_peers import _Work

    def prepared() -> _Work:
        work = _Work(peers, x, *shards, ids, ACT, lora, None, parts)
        work.publish()
        peers.routes.barrier(0)
        work.plan()
        for part in range(work.parts):
            work.pull(part)
            work.compute(part)
        torch.cuda.synchronize()
        peers.routes.barrier(0)
        return work

    work = prepared()

    def call() -> None:
        work.publish()
        peers.routes.barrier(0)
        for part in range(work.parts):
            work.pull(part)
        for part in range(work.parts):
            work.push(part)
        peers.results.barrier(1)

    return call


def training_lines(repeat: int = 5) -> Iterator[dict[str, Any]]:
    """Forward and backward over NCCL, against one GPU with its own tokens and against the bits of one with all ranks' tokens."""
    world, rank = dist.get_world_size(), dist.get_rank()
    layer = Layer()
    tiles, whole, shards, lora = layer.tiles, layer.whole, layer.shards, layer.lora
    x, ids, weights = bench_moe.batches(TRAINED * world, 1)[0]
    grad = torch.randn_like(x)
    mine = slice(rank * TRAINED, (rank + 1) * TRAINED)

    def step(call: Callable[..., Tensor], rows: slice, adapters: ExpertLoRA) -> Callable[[], list[Tensor]]:
        leaves = [t.clone().requires_grad_() for t in (x[rows], weights[rows], *(t for pair in adapters for t in pair))]
        own = ExpertLoRA(*(LoRA(a, b) for a, b in zip(leaves[2::2], leaves[3::2], strict=True)))

        def run() -> list[Tensor]:
            out = call(leaves[0], leaves[1], ids[rows], own)
            return [out.detach(), *torch.autograd.grad(out, leaves, grad[rows])]

        return run

    want = step(lambda x, w, ids, a: moe(x, *tiles, ids, w, ACT, a), slice(None), whole)()
    first, end = owned(bench_moe.EXPERTS, world, rank)
    want = [t[mine] if i < 3 else t[:, first:end] for i, t in enumerate(want)]
    one = step(lambda x, w, ids, a: moe(x, *tiles, ids, w, ACT, a), mine, whole)
    yield {"tokens": TRAINED, "way": "one GPU with all experts", "us": median_us(one, repeat)}
    del one
    for parts in (1, 4):

        def call(x: Tensor, w: Tensor, ids: Tensor, a: ExpertLoRA, parts: int = parts) -> Tensor:
            return expert_parallel_moe(x, *shards, ids, w, ACT, a, experts=bench_moe.EXPERTS, parts=parts)

        spread = step(call, mine, lora)
        equal = all(torch.equal(a, b) for a, b in zip(spread(), want, strict=True))
        yield {"tokens": TRAINED, "way": f"NCCL, {parts} parts", "us": median_us(spread, repeat), "equal": all_agree(equal)}

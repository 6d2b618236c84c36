"""Speed of the layers that are spread over the GPUs of one host: `python -m samebits.kernels.bench_parallel --json FILE`.

Starts a process for each GPU (two unless `--world` says otherwise). Experts at MiniMax-M3's shape (hidden 6144, intermediate 3072, 128
experts, top-4, rank-32 adapters on all experts, uniform random routes), the same number of tokens on every rank:

    one GPU       `moe` with all experts on one rank's tokens
    computing     what a rank computes for the tokens of all: grouping, the two products in one part each, the sum
    moving        everything else: publishing, reading, storing of rows, both barriers, and no products
    together      the call; what is exposed of the moving is together - computing

By peer memory these are CUDA-graph replays; over NCCL (`expert_parallel`, with its counts on the host) CUDA events. Then one training step.
The indexer at MiniMax-M3's shapes, NVFP4 index keys, one query token a request: `index_topk` with all pages on one GPU, and split, in
graph replay over several queries. Every figure is the slowest rank's median; every result is compared bit for bit with one GPU's.

Needs torch and Triton alone. Exit code 1 when a result differs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import socket
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from samebits.quant import kv
from samebits.quant.bench import machine

from . import bench_moe, msa_ops
from .bench_moe import ACT, EXPERTS, HIDDEN, TOP, WIDTH
from .bench_msa import CONFIG, GROUPS, random_pages
from .expert_pairs import some_experts
from .expert_parallel import expert_parallel_moe
from .expert_routes import owned
from .linear import LoRA
from .moe import ExpertLoRA, moe
from .msa_ops import BLOCK, DIM, Batch, Pages

TOKENS = (1, 16, 64, 256, 1024, 4096)
TRAINED = 4096
SHAPES = ((1, 131072), (8, 131072), (32, 131072), (1, 524288), (8, 524288), (32, 524288))


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--world", type=int, default=2, help="number of GPUs")
    parser.add_argument("--tokens", type=int, nargs="*", default=list(TOKENS), help="tokens of each rank")
    parser.add_argument("--parts", type=int, nargs="+", default=[8], help="parts to try where tokens are many")
    parser.add_argument("--programs", type=int, nargs="+", default=[24], help="programs of a copy to try there")
    parser.add_argument("--skip", nargs="*", default=[], choices=("experts", "training", "index"), help="parts to leave out")
    args = parser.parse_args(argv)
    if torch.cuda.device_count() < args.world or args.world < 2:
        print(f"samebits: needs two CUDA GPUs or more, asked for {args.world} of {torch.cuda.device_count()}", file=sys.stderr)
        return 2
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    results = mp.get_context("spawn").SimpleQueue()
    ranks = mp.spawn(_rank, (args, port, results), nprocs=args.world, join=False)
    result = None
    while result is None or not result["done"]:  # what there is after each part; a rank's failure ends the wait
        if not results.empty():
            result = results.get()
            if args.json:
                args.json.write_text(json.dumps(result, indent=1) + "\n")
        elif ranks.join(timeout=0.2) and results.empty():
            break
    while not ranks.join():
        pass
    show(result)
    return 0 if result["right"] else 1


def _rank(rank: int, args: argparse.Namespace, port: int, results: Any) -> None:
    torch.cuda.set_device(rank)
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    dist.init_process_group(
        "nccl",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=args.world,
        device_id=torch.device("cuda", rank),
        pg_options=options,
    )
    result: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **machine("cuda"),
        "world": args.world,
        "experts": [],
        "training": [],
        "index": [],
        "done": False,
    }

    def save() -> None:
        lines = [line for part in ("experts", "training", "index") for line in result[part]]
        result["right"] = all(line.get("equal", True) for line in lines)
        if rank == 0:
            results.put(result)

    with torch.no_grad():
        result["link"] = link()
        save()
        for part, lines in (("experts", expert_lines), ("index", index_lines)):
            if part not in args.skip:
                for line in lines(args):
                    result[part].append(line)
                save()
    if "training" not in args.skip:
        result["training"] = training_lines()
    result["done"] = True
    save()
    dist.barrier()
    dist.destroy_process_group()


def slowest(value: float) -> float:
    """The largest of all ranks' figures."""
    t = torch.tensor(value, device="cuda", dtype=torch.float64)
    dist.all_reduce(t, dist.ReduceOp.MAX)
    return t.item()


def all_agree(equal: bool) -> bool:
    """Whether it is so on every rank."""
    return slowest(float(not equal)) == 0


def median_us(call: Callable[[], Any], repeat: int) -> float:
    """Slowest rank's median of CUDA events, all ranks starting together."""
    times = []
    for _ in range(repeat + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        dist.barrier()
        torch.cuda.synchronize()
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return slowest(statistics.median(times[2:]))


def graph_us(calls: list[Callable[[], Any]], repeat: int = 15) -> float:
    """Median microseconds of one of `calls` in graph replay; at least 2 ms of them in a graph, so that its start is no matter."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for call in calls:
        call()
    end.record()
    torch.cuda.synchronize()
    rounds = max(1, min(20, int(2 / max(slowest(start.elapsed_time(end)), 0.05))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(rounds):
            for call in calls:
                call()
    return median_us(graph.replay, repeat) / len(calls) / rounds


def link() -> dict[str, float]:
    """GB/s of this rank's copy to its neighbour, both ways at once, and of NCCL's exchange."""
    from .peer_memory import PeerMemory

    memory = PeerMemory((1 << 28,), torch.uint8)
    world, rank = dist.get_world_size(), dist.get_rank()
    there = memory.of((rank + 1) % world)
    source = torch.ones_like(memory.local)
    size = source.nbytes / 1e3
    out = torch.empty_like(source)
    return {
        "copy_gb_s": size / median_us(lambda: there.copy_(source), 10),
        "nccl_gb_s": size * (world - 1) / world / median_us(lambda: dist.all_to_all_single(out, source), 10),
    }


def shard_of(tiles: tuple, lora: ExpertLoRA) -> tuple[list, ExpertLoRA]:
    """This rank's experts and adapters."""
    first, end = owned(EXPERTS, dist.get_world_size(), dist.get_rank())
    return [some_experts(t, first, end) for t in tiles], ExpertLoRA(*(LoRA(p.a[:, first:end], p.b[:, first:end]) for p in lora))


def expert_lines(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A line for each number of tokens and each way."""
    torch.manual_seed(0)  # the same layer on all ranks
    tiles = bench_moe.random_tiles(2 * WIDTH, HIDDEN), bench_moe.random_tiles(HIDDEN, WIDTH)
    whole = bench_moe.random_adapters()
    for count in args.tokens:
        torch.manual_seed(100 + dist.get_rank())
        yield from expert_lines_of(count, tiles, whole, args)


def expert_lines_of(count: int, tiles: tuple, whole: ExpertLoRA, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Of `count` tokens on every rank."""
    from . import triton_peers
    from .expert_peers import MANY, PeerExperts

    shards, lora = shard_of(tiles, whole)
    batches = bench_moe.batches(count, 3)
    peers = PeerExperts(EXPERTS, TOP, HIDDEN, count)
    wants = [moe(x, *tiles, ids, w, ACT, whole) for x, ids, w in batches]
    one = graph_us([lambda b=b: moe(b[0], *tiles, *b[1:], ACT, whole) for b in batches])
    computing = graph_us([computing_alone(peers, shards, lora, *b) for b in batches])
    many = count * TOP >= MANY
    for parts in args.parts if many else (1,):
        for programs in args.programs if many else (triton_peers.PROGRAMS,):
            triton_peers.PROGRAMS = programs

            def call(x: Tensor, ids: Tensor, w: Tensor, parts: int = parts) -> Tensor:
                return peers(x, *shards, ids, w, ACT, lora, parts=parts)

            equal = all(torch.equal(call(*b), want) for b, want in zip(batches, wants, strict=True))
            moving = graph_us([moving_alone(peers, shards, lora, parts, *b) for b in batches])
            together = graph_us([lambda b=b, call=call: call(*b) for b in batches])
            line = {"tokens": count, "way": "peer memory", "parts": parts, "programs": programs, "one_gpu_us": one}
            yield line | shares(computing, moving, together) | {"equal": all_agree(equal)}
    for parts in (1, 4) if many else ():

        def call(x: Tensor, ids: Tensor, w: Tensor, parts: int = parts) -> Tensor:
            return expert_parallel_moe(x, *shards, ids, w, ACT, lora, experts=EXPERTS, parts=parts)

        equal = all(torch.equal(call(*b), want) for b, want in zip(batches, wants, strict=True))
        together = statistics.mean(median_us(lambda b=b, call=call: call(*b), 7) for b in batches[:2])
        line = {"tokens": count, "way": "NCCL", "parts": parts, "one_gpu_us": one, "computing_us": computing, "together_us": together}
        yield line | {"equal": all_agree(equal)}


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


def training_lines(repeat: int = 5) -> list[dict[str, Any]]:
    """Forward and backward over NCCL, against one GPU with its own tokens and against the bits of one with all ranks' tokens."""
    torch.manual_seed(0)
    world, rank = dist.get_world_size(), dist.get_rank()
    tiles = bench_moe.random_tiles(2 * WIDTH, HIDDEN), bench_moe.random_tiles(HIDDEN, WIDTH)
    whole = bench_moe.random_adapters()
    shards, lora = shard_of(tiles, whole)
    x, ids, weights = bench_moe.batches(TRAINED * world, 1)[0]
    grad = torch.randn_like(x)
    mine = slice(rank * TRAINED, (rank + 1) * TRAINED)
    lines = []

    def step(call: Callable[..., Tensor], rows: slice, adapters: ExpertLoRA) -> Callable[[], list[Tensor]]:
        leaves = [t.clone().requires_grad_() for t in (x[rows], weights[rows], *(t for pair in adapters for t in pair))]
        own = ExpertLoRA(*(LoRA(a, b) for a, b in zip(leaves[2::2], leaves[3::2], strict=True)))

        def run() -> list[Tensor]:
            out = call(leaves[0], leaves[1], ids[rows], own)
            return [out.detach(), *torch.autograd.grad(out, leaves, grad[rows])]

        return run

    want = step(lambda x, w, ids, a: moe(x, *tiles, ids, w, ACT, a), slice(None), whole)()
    first, end = owned(EXPERTS, world, rank)
    want = [t[mine] if i < 3 else t[:, first:end] for i, t in enumerate(want)]
    one = step(lambda x, w, ids, a: moe(x, *tiles, ids, w, ACT, a), mine, whole)
    lines.append({"tokens": TRAINED, "way": "one GPU with all experts", "us": median_us(one, repeat)})
    del one
    for parts in (1, 4):

        def call(x: Tensor, w: Tensor, ids: Tensor, a: ExpertLoRA, parts: int = parts) -> Tensor:
            return expert_parallel_moe(x, *shards, ids, w, ACT, a, experts=EXPERTS, parts=parts)

        spread = step(call, mine, lora)
        equal = all(torch.equal(a, b) for a, b in zip(spread(), want, strict=True))
        lines.append({"tokens": TRAINED, "way": f"NCCL, {parts} parts", "us": median_us(spread, repeat), "equal": all_agree(equal)})
    return lines


def index_lines(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A line for each shape: one GPU, and split by either way."""
    from .index_parallel import Inbox

    inboxes = {way: Inbox(32 * GROUPS, CONFIG.topk, peers=way == "peer memory") for way in ("peer memory", "NCCL")}
    for requests, context in SHAPES:
        torch.cuda.empty_cache()
        yield index_line(requests, context, inboxes)


def index_line(requests: int, context: int, inboxes: dict[str, Any]) -> dict[str, Any]:
    """Pages of one shape, whole on every GPU, and this rank's share of them packed together."""
    from .index_parallel import share_of, split_index_topk

    world, rank = dist.get_world_size(), dist.get_rank()
    g = torch.Generator("cuda").manual_seed(requests * context)
    blocks = context // BLOCK
    table = torch.randperm(requests * blocks, generator=g, device="cuda").int().view(requests, blocks)
    whole = Pages(random_pages(kv.index_page_shape(requests * blocks, DIM), g), table)
    ours = table[:, rank::world]
    keys = Pages(whole.data[ours.flatten().long()], torch.arange(ours.numel(), dtype=torch.int32, device="cuda").view(ours.shape))
    queries = [torch.randn(requests, GROUPS, DIM, generator=g, device="cuda").bfloat16() for _ in range(8)]
    row = torch.arange(requests + 1, dtype=torch.int32, device="cuda")
    batch = Batch(row, row[:-1], torch.full_like(row[:-1], context - 1), 1)
    share = share_of(batch, world, rank)
    wants = [msa_ops.index_topk(q, whole, batch, CONFIG) for q in queries]
    one = graph_us([lambda q=q: msa_ops.index_topk(q, whole, batch, CONFIG) for q in queries])
    line: dict[str, Any] = {"requests": requests, "context": context, "one_gpu_us": one, "equal": True}
    for way, inbox in inboxes.items():

        def call(q: Tensor, inbox: Any = inbox) -> Tensor:
            return split_index_topk(q, keys, share, CONFIG, inbox)

        line["equal"] &= all_agree(all(torch.equal(call(q), want) for q, want in zip(queries, wants, strict=True)))
        us = graph_us([lambda q=q, call=call: call(q) for q in queries])
        line |= {f"{way} us": us, f"{way} times": one / us}
    return line


def show(result: dict[str, Any]) -> None:
    """Print what was found."""
    where = " · ".join(str(v) for v in result["machine"].values())
    print(result["world"], "x", where, "·", ", ".join(f"{k} {v}" for k, v in result["versions"].items()))
    print("to the next GPU {copy_gb_s:.0f} GB/s each way, NCCL {nccl_gb_s:.0f}".format(**result["link"]))
    for line in result["experts"]:
        text = f"{line['tokens']:5d} tokens {line['way']:12s} {line['parts']:2d} parts {line.get('programs', ''):3}"
        text += f" one GPU {line['one_gpu_us']:8.1f} computing {line['computing_us']:8.1f} together {line['together_us']:8.1f} us"
        if "hidden" in line:
            text += f" moving {line['moving_us']:7.1f} exposed {line['exposed_us']:7.1f} hidden {100 * line['hidden']:4.0f} %"
        print(text, "" if line["equal"] else "DIFFERS")
    for line in result["training"]:
        print(f"{line['tokens']:5d} tokens trained, {line['way']:24s} {line['us']:9.1f} us", "" if line.get("equal", True) else "DIFFERS")
    for line in result["index"]:
        text = f"index {line['requests']:3d} x {line['context']:7d} one GPU {line['one_gpu_us']:7.1f} us"
        for way in ("peer memory", "NCCL"):
            text += f"  {way} {line[way + ' us']:7.1f} us, {line[way + ' times']:.2f} times"
        print(text, "" if line["equal"] else "DIFFERS")


if __name__ == "__main__":
    sys.exit(main())

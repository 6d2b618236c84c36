"""A dry run of the benchmark over several GPUs, on CPU: `TRITON_INTERPRET=1 python -m tests.kernels.interpret_bench_parallel`.

Two processes of a gloo group go through all of it at tiny sizes, with each other's memory mapped from files, the kernels in the
interpreter, and streams, events and graphs that do at once what they are given. Nothing is timed; what is shown is that the script runs to
its end, in which order results come, and that every comparison of bits in it holds.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from samebits.kernels import (
    bench_moe,
    bench_parallel,
    bench_parallel_experts,
    bench_parallel_index,
    bench_ranks,
    expert_pairs,
    expert_parallel,
    expert_peers,
    index_parallel,
    moe_fused,
    msa_ops,
    peer_memory,
)
from samebits.kernels.msa import SparseConfig
from samebits.kernels.triton_tiles import INTERPRETED
from tests.kernels.interpret_parallel import check, small_tiles
from tests.support.mapped_memory import FOLDER, Line, Mapped

TOKENS, LONG = (3, 1), 768
SHAPES = ((1, LONG), (2, LONG), (1, 128))


class OnCPU(TorchFunctionMode):
    """What is asked for on CUDA is made on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `TorchFunctionMode`."""
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


class Event:
    """Of no time of its own."""

    def __init__(self, **options: Any) -> None:
        """As torch's."""

    def record(self, stream: Any = None) -> None:
        """Nothing to record."""

    def elapsed_time(self, other: Event) -> float:
        """A second: as much as a graph holds of one call."""
        return 1e3


class Graph:
    """What it holds was done when it was captured."""

    def replay(self) -> None:
        """Nothing is left to do."""


def tiny() -> None:
    """Sizes, and everything of CUDA that the script asks for."""
    small_tiles()
    cuda, generator, names = torch.cuda, torch.Generator, itertools.count()
    cuda.Event, cuda.CUDAGraph, cuda.Stream = Event, Graph, lambda **options: Line()
    cuda.graph = cuda.stream = lambda *rest, **options: contextlib.nullcontext()
    cuda.current_stream, cuda.synchronize, cuda.empty_cache = Line, lambda: None, lambda: None
    torch.Generator = lambda device="cpu": generator()

    def memory(shape: Any, dtype: Any, group: Any = None) -> Mapped:
        # Mapped memory begins as files of zeros, of which each has a name of its own.
        return Mapped(f"memory{next(names)}-", tuple(shape), dtype, 0)

    for module in (peer_memory, index_parallel, expert_peers):
        module.PeerMemory = memory
    expert_pairs.takes_kernels = expert_parallel.takes_kernels = msa_ops._kernels_take = lambda *_: True
    for name, value in {"HIDDEN": 128, "WIDTH": 128, "EXPERTS": 3, "TOP": 1, "RANK": 4}.items():
        setattr(bench_moe, name, value)
    expert_peers.MANY, bench_parallel_experts.TRAINED, bench_parallel_experts.PARTS = 3, 2, (2,)
    bench_parallel_experts.BATCHES = 1

    def moe(x: Any, w13: Any, w2: Any, ids: Any, weights: Any, activation: Any, lora: Any) -> Any:
        return moe_fused.fused_experts(x, w13, w2, ids, weights, activation, lora, None, False)

    def once(call: Any, repeat: int) -> float:
        call()
        return 1.0

    bench_parallel_experts.moe, bench_parallel_experts.median_us, bench_ranks.median_us = moe, once, once
    bench_parallel_index.CONFIG, bench_parallel_index.GROUPS, bench_parallel_index.QUERIES = SparseConfig(topk=4), 2, 2
    bench_parallel.TOKENS, bench_parallel.SHAPES, bench_parallel.FIRST, bench_parallel.LONG = TOKENS, SHAPES, 2, LONG
    bench_parallel.LINK_BYTES, bench_parallel.copy_bandwidth = 64, lambda repeat: 4e12
    bench_parallel.machine = lambda device: {"machine": {"device": "none"}, "versions": {"torch": torch.__version__}}


def rank_of(rank: int, port: int, results: Any, parts: tuple[str, ...]) -> None:
    """A rank of the benchmark."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=bench_parallel.WORLD)
    tiny()
    with OnCPU():
        bench_parallel.measured(rank, results, parts)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Run, and look at what came."""
    if not INTERPRETED.value:
        raise SystemExit("set TRITON_INTERPRET=1")
    saved: list[dict[str, Any]] = []
    bench_parallel.TOKENS, bench_parallel.LONG, bench_parallel.PATIENCE = TOKENS, LONG, 450
    with tempfile.TemporaryDirectory() as folder:
        os.environ[FOLDER] = folder
        result = bench_parallel.run(lambda partial: saved.append(copy.deepcopy(partial)), rank=rank_of)
    check(f"the run: {result.get('failed')}", result["done"] and "failed" not in result)
    check("bits", result["right"] and all(line.get("equal", True) for part in ("experts", "index", "training") for line in result[part]))
    check("its parts", [len(result[part]) for part in ("experts", "index", "training")] == [4, len(SHAPES), 3])
    order = [tuple(len(s.get(part, ())) for part in ("experts", "index", "training")) for s in saved]
    check("what matters first", order == sorted(order) and order[0] == (0, 0, 0) and (3, 2, 0) in order and (4, 2, 0) in order)
    check("claims", "hidden" in result["claims"]["experts"] and len(result["claims"]["index"]) == 2)
    check("JSON", json.loads(json.dumps(result)) == result)
    bench_parallel.show(result)
    print("same results")


if __name__ == "__main__":
    main()

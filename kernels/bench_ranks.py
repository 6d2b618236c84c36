"""Times of calls that several ranks make together, each with a GPU: the slowest rank's median, ranks starting together."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


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

"""Processes of one group, without anything of the trainer: gloo on CPU, or NCCL with a GPU each."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SHARDS_BYTES = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)
"""Whether FSDP2 shards parameters of bytes: older releases than the one that this package pins want a gradient of every shard."""


def on_ranks(world: int, call: Callable[[int, int], object], folder: Path, backend: str = "gloo") -> list:
    """What `call(rank, world)`, a function of a module, returns on each rank; raises what a rank raises."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(_worker, (world, port, call, str(folder), backend), nprocs=world)
    return [torch.load(folder / f"{rank}.pt", weights_only=False, map_location="cpu") for rank in range(world)]


def _worker(rank: int, world: int, port: int, call: Callable[[int, int], object], folder: str, backend: str) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    torch.save(call(rank, world), f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()

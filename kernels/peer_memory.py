"""Memory of every GPU of a group that each of them can address, over NVLink (torch's symmetric memory).

Kernels here store to it and load from it by plain addresses. NVLink multicast (multimem) is not used, and is kept from being set up.

A rank that has died, or whose host raised before it launched its part, never arrives. Whoever waits for it on the device gives up after
`PATIENCE_S` and traps: the next call that looks at the device raises, and the process ends instead of keeping a GPU busy for ever.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

PATIENCE_S = 300
"""Seconds that a kernel waits for another rank: as long as vLLM waits for a step. Ranks may be apart by what one compiles or loads."""


class Shared(Protocol):
    """One tensor a rank."""

    local: Tensor
    addresses: Tensor  # int64 [world], where each rank's tensor is, on the device

    def barrier(self, channel: int) -> None:
        """On the current stream: what ranks did before is done on all. Barriers of different channels may be under way together.

        The kernel traps where another rank does not come within `PATIENCE_S`.
        """


def addressable(group: dist.ProcessGroup | None = None) -> bool:
    """Whether the current GPU of every rank can address every other's, as far as ranks can tell. All ranks call it and get one answer.

    group: with a CPU backend. GPUs that a rank does not see (of other hosts, or hidden from its process) it cannot map.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    host = boot.read_text().strip() if boot.exists() else socket.gethostname()
    seen = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    here = torch.cuda.current_device()
    mine = (host, next(uuid for uuid, i in seen.items() if i == here))
    ranks: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(ranks, mine, group=group)
    others = [uuid for host_of, uuid in ranks if (host_of, uuid) != mine]
    alone = all(host_of == host for host_of, _ in ranks) and len({uuid for _, uuid in ranks}) == len(ranks)
    return agreed(alone and all(u in seen and torch.cuda.can_device_access_peer(here, seen[u]) for u in others), group)


def agreed(mine: bool, group: dist.ProcessGroup | None = None) -> bool:
    """Whether every rank of `group` (with a CPU backend) says so. All ranks call it."""
    said = torch.tensor([int(mine)], device="cpu")  # a model may be under construction on its device
    dist.all_reduce(said, dist.ReduceOp.MIN, group=group)
    return bool(said.item())


class PeerMemory:
    """A tensor of zeros on each rank of `group`, its own mapped into the others. All ranks construct it, in the same order."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, group: dist.ProcessGroup | None = None) -> None:
        """Raises `RuntimeError` where the GPUs cannot address each other."""
        import torch.distributed._symmetric_memory as symmetric

        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"  # read at the first rendezvous
        group = group or dist.group.WORLD
        device = torch.device("cuda", torch.cuda.current_device())
        self.local = symmetric.empty(shape, dtype=dtype, device=device)
        self._handle = symmetric.rendezvous(self.local, group)
        addresses = [self.of(rank).data_ptr() for rank in range(dist.get_world_size(group))]
        if addresses[dist.get_rank(group)] != self.local.data_ptr():
            raise RuntimeError("symmetric memory is mapped at another address than its tensor has")
        self.addresses = torch.tensor(addresses, dtype=torch.int64, device=device)
        self.local.zero_()
        self.barrier(0)

    def barrier(self, channel: int) -> None:
        """See `Shared`."""
        self._handle.barrier(channel=channel, timeout_ms=PATIENCE_S * 1000)

    def of(self, rank: int) -> Tensor:
        """Another rank's tensor."""
        return self._handle.get_buffer(rank, self.local.shape, self.local.dtype)


class First:
    """The first rows of every rank's tensor, under the same addresses."""

    def __init__(self, shared: Shared, rows: int) -> None:
        self.local, self.addresses = shared.local[:rows], shared.addresses
        self.barrier = shared.barrier

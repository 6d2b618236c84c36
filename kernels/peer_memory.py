"""Memory of every GPU of a group that each of them can address, over NVLink (torch's symmetric memory).

Kernels here store to it and load from it by plain addresses. NVLink multicast (multimem) is not used, and is kept from being set up.
"""

from __future__ import annotations

import os
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Shared(Protocol):
    """One tensor a rank."""

    local: Tensor
    addresses: Tensor  # int64 [world], where each rank's tensor is, on the device

    def barrier(self, channel: int) -> None:
        """On the current stream: what ranks did before is done on all. Barriers of different channels may be under way together."""


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
        self._handle.barrier(channel=channel)

    def of(self, rank: int) -> Tensor:
        """Another rank's tensor."""
        return self._handle.get_buffer(rank, self.local.shape, self.local.dtype)


class First:
    """The first rows of every rank's tensor, under the same addresses."""

    def __init__(self, shared: Shared, rows: int) -> None:
        self.local, self.addresses = shared.local[:rows], shared.addresses
        self.barrier = shared.barrier

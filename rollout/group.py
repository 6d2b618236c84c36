"""This process among the ranks of its engine replica: what it holds, and how the ranks' outputs come together.

Outputs are gathered and nothing is summed over ranks (see `quant.ranks`), so that a replica of several ranks computes the bits of one. A
gather goes through vLLM's tensor-parallel group, whose collectives a captured graph holds: NCCL on CUDA, shared memory or gloo on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from vllm.distributed.parallel_state import get_tp_group

from samebits.quant.ranks import Part, Ranks, owned


@dataclass(frozen=True, slots=True)
class Group:
    """One rank of a replica."""

    ranks: Ranks
    rank: int

    @classmethod
    def of_engine(cls, experts: int) -> Group:
        """Of the worker that this process is. `experts`: routed experts of a layer."""
        tp = get_tp_group()
        return cls(Ranks(tp.world_size, experts), tp.rank_in_group)

    @property
    def world(self) -> int:
        """Ranks of the replica."""
        return self.ranks.world

    @property
    def experts(self) -> tuple[int, int]:
        """First routed expert of this rank, and the one after its last."""
        return owned(self.ranks.experts, self.world, self.rank)

    @property
    def collectives(self) -> dist.ProcessGroup:
        """The group for torch.distributed."""
        return get_tp_group().device_group

    def part(self, name: str, shape: Sequence[int]) -> Part | None:
        """What this rank holds of a weight, by its path in a checkpoint."""
        return self.ranks.weight(self.rank, name, shape)

    def gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """The tensors of all ranks, which are of one shape, side by side along `dim`."""
        return x if self.world == 1 else get_tp_group().all_gather(x.contiguous(), dim)


ALONE = Group(Ranks(1, 0), 0)
"""Of a replica of one rank, where the number of experts is no matter."""

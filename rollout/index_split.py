"""The indexer's work spread over the ranks of an engine replica: who they are, and what of a step each needs for its share.

Under tensor parallelism every rank has the queries of all index heads and writes all index keys into its own pages, so that each could
score everything. Instead a rank scores page b of every request where b modulo their number is its own rank, reads 1 / ranks of the bytes,
and learns of the others' best blocks from them (`kernels.index_parallel`): the choice is that of one rank with all pages, bit for bit.

What of a step is a rank's share, its part of the block table and the positions among its keys, lies in buffers that stay where they are
and are written before every step, as the step's own are (`pages`): a captured CUDA graph reads those of the step it is replayed for. The
inbox is one for all layers, made while vLLM builds the engine, on all ranks at the same point.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import GroupCoordinator, get_tp_group, model_parallel_is_initialized

from samebits.kernels.index_parallel import Inbox, Ranks, Share, open_inbox, own_positions, table_of
from samebits.kernels.msa import SparseConfig
from samebits.kernels.msa_ops import Batch

from . import settings

TOKENS = 2048
"""Tokens whose candidates an inbox has room for; a longer step takes several calls."""


def ranks_of(config: VllmConfig, sparse: SparseConfig, group: GroupCoordinator | None = None) -> Ranks | None:
    """The ranks that share the indexer's work; None where one rank does it alone.

    That is so without tensor parallelism, where the setting `split_indexer` is false, and where no context can have more blocks than are
    chosen, since no index is scored then.

    Args:
        group: of the replica's ranks; None: vLLM's tensor-parallel group.
    """
    if not settings.of(config).split_indexer or config.model_config.max_model_len <= sparse.topk * sparse.block:
        return None
    if group is None:
        if not model_parallel_is_initialized():
            return None
        group = get_tp_group()
    if group.world_size == 1:
        return None
    # vLLM's own communicator can be captured in CUDA graphs; torch's watches its work from a thread, which a capture may not allow.
    nccl = getattr(group.device_communicator, "pynccl_comm", None)
    gather = nccl.all_gather if nccl is not None and not nccl.disabled else None
    return Ranks(group.world_size, group.rank_in_group, group.device_group, group.cpu_group, gather)


class SplitStep(NamedTuple):
    """A rank's share of one step, for all layers."""

    share: Share
    table: Tensor
    """int32 [R, blocks of this rank] page of each."""
    inbox: Inbox


class IndexSplit:
    """What stays between steps."""

    def __init__(
        self, ranks: Ranks, sparse: SparseConfig, heads: int, *, tokens: int, requests: int, blocks: int, device: torch.device
    ) -> None:
        """All ranks construct it.

        Args:
            heads: index heads, of which every rank has all queries. tokens, requests: of a step at most. blocks: of a context at most.
        """
        self.ranks = ranks
        self.position = torch.full((tokens,), -1, dtype=torch.int32, device=device)
        self.table = torch.zeros(requests, -(-blocks // ranks.world), dtype=torch.int32, device=device)
        self.inbox = open_inbox(min(tokens, TOKENS) * heads, sparse.topk, ranks)

    def step(self, batch: Batch, table: Tensor) -> SplitStep:
        """This rank's share of a step with this block table, int32 [R, blocks]. It holds until the next one is made."""
        world, rank = self.ranks.world, self.ranks.rank
        position = self.position[: len(batch.position)]
        position.copy_(own_positions(batch.position, world, rank))
        share = Share(batch, batch._replace(position=position), world, rank)
        return SplitStep(share, table_of(table, world, rank, out=self.table), self.inbox)

"""The indexer with its keys spread over ranks: each scores its share of every request's pages, and all choose the same blocks.

Page b of a request belongs to rank b % world, wherever the request stands: shares differ by one page at most at any length, and a
growing request fills the ranks in turn, which contiguous ranges would not. Index keys have one head, so that a tensor-parallel engine
else repeats them on every rank and scores all of them there; spread, each rank reads 1 / world of the bytes, and keeps no more.

A rank scores its pages for all index heads (its pages in their order are a context of their own, so `triton_msa.index_scores` does
that), takes its best 16 with their exact scores, and sends them to all: 128 bytes a query and head. The merge is exact, ties included:
`index_topk` of one rank with all keys. The local and first blocks are forced by the rank that has them, hence once.

Queries are the same on all ranks; so are the choices.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from . import msa_ops
from .msa import SparseConfig
from .msa_ops import BLOCK, Batch, Pages
from .peer_memory import PeerMemory, Shared

_ID_BITS, _LAST_ID = 22, (1 << 22) - 1
_INIT, _LOCAL = 1e30, 1e29  # as `kernels.msa` forces blocks


class Share(NamedTuple):
    """A rank's part of the work of one step; the same for all layers."""

    batch: Batch  # queries with their positions in the whole context
    local: Batch  # with their positions among this rank's keys
    world: int
    rank: int


def share_of(batch: Batch, world: int, rank: int) -> Share:
    """The last key that a query sees of this rank's: in its own block where that is this rank's, else the end of the last one before."""
    own = torch.div(batch.position, BLOCK, rounding_mode="floor")
    count = torch.div(own - rank, world, rounding_mode="floor") + 1  # of this rank's blocks, up to the query's own
    inside = (count - 1) * BLOCK + batch.position % BLOCK
    local = torch.where(own % world == rank, inside, count * BLOCK - 1)
    local = torch.where(batch.position < 0, -1, local)
    return Share(batch, batch._replace(position=local), world, rank)


def table_of(table: Tensor, world: int, rank: int) -> Tensor:
    """int32 [R, blocks of this rank], the part of a table [R, blocks] whose pages this rank has; the page numbers are its own."""
    return table[:, rank::world].contiguous()


class Inbox:
    """Where candidates of other ranks arrive, of at most `room` pairs of query and index head. One serves all layers, one after the other.

    Over peer memory (`peers`) candidates come by stores of the other GPUs, otherwise by an all-gather of `group`.
    """

    def __init__(self, room: int, topk: int, group: dist.ProcessGroup | None = None, peers: bool = True) -> None:
        """All ranks construct it. Raises `RuntimeError` where `peers` and the GPUs cannot address each other."""
        self.group, self.room = group, room
        shape = (2, dist.get_world_size(group), room, topk)
        self.shared: Shared | None = PeerMemory(shape, torch.int64, group) if peers else None
        self.words = self.shared.local if peers else torch.zeros(shape, dtype=torch.int64, device=_device(group))
        self.calls = torch.zeros(room, dtype=torch.int32, device=self.words.device)
        self.addresses = self.shared.addresses if peers else torch.tensor([self.words.data_ptr()], device=self.words.device)


def split_index_topk(
    index_q: Tensor, keys: Pages, share: Share, config: SparseConfig, inbox: Inbox | None = None, out: Tensor | None = None
) -> Tensor:
    """`msa_ops.index_topk` over the ranks of a group, which all call it.

    Args:
        index_q: bf16 or fp32 [T, G, D], the same on all ranks. keys: this rank's pages, with its table (`table_of`).
        inbox: needed for the kernels; without it candidates go through an all-gather of the default group.
    Returns:
        int32 [T, G, topk] on every rank: ascending block ids of the whole context, then -1.
    """
    tokens, groups, _ = index_q.shape
    if out is None:
        out = torch.empty(tokens, groups, config.topk, dtype=torch.int32, device=index_q.device)
    if inbox is not None and msa_ops._kernels_take(index_q, config.block):
        return _kernels(index_q, keys, share, config, inbox, out)
    mine = candidates(index_q, keys, share, config)
    heard = mine.new_empty(share.world, *mine.shape)
    dist.all_gather(list(heard.unbind()), mine, group=inbox and inbox.group)
    return out.copy_(merge(heard, config.topk))


def _kernels(index_q: Tensor, keys: Pages, share: Share, config: SparseConfig, inbox: Inbox, out: Tensor) -> Tensor:
    from . import triton_msa

    scores = triton_msa.index_scores(index_q, keys, share.local)
    if inbox.shared is not None:
        exchange(scores, share, config, inbox, out, send=True, merge=True)
        return out
    exchange(scores, share, config, inbox, out, send=True, merge=False)
    mine = inbox.words[0, share.rank]
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(inbox.words[0].flatten(), mine.flatten(), group=inbox.group)
    exchange(scores, share, config, inbox, out, send=False, merge=True)
    return out


def exchange(scores: Tensor, share: Share, config: SparseConfig, inbox: Inbox, out: Tensor, send: bool, merge: bool) -> None:
    """One launch of the exchange kernel: `scores` [T, G, blocks] of this rank to candidates, and candidates of all ranks to `out`."""
    import triton

    from .triton_index_parallel import exchange_kernel
    from .triton_tiles import INTERPRETED, on

    tokens, groups, blocks = scores.shape
    rows = tokens * groups
    if config.topk & (config.topk - 1):
        raise ValueError(f"the number of chosen blocks must be a power of two, got {config.topk}")
    if rows > inbox.room or inbox.words.shape[3] != config.topk:
        raise ValueError(f"{rows} queries and heads with {config.topk} blocks each do not fit an inbox {tuple(inbox.words.shape)}")
    if blocks * share.world > _LAST_ID:
        raise ValueError(f"a context has {blocks * share.world} blocks, the limit is {_LAST_ID}")
    if not rows:
        return
    size = max(triton.next_power_of_2(blocks), 2 * config.topk)
    with on(scores):
        exchange_kernel[(rows,)](
            scores,
            share.batch.position,
            inbox.addresses,
            inbox.words,
            inbox.calls,
            out,
            blocks,
            share.rank,
            inbox.room,
            G=groups,
            WORLD=share.world,
            TARGETS=len(inbox.addresses),
            TOPK=config.topk,
            INIT=config.init_blocks,
            LOCAL=config.local_blocks,
            SIZE=size,
            CANDIDATES=triton.next_power_of_2(share.world * config.topk),
            SEND=send,
            MERGE=merge,
            TAGGED=inbox.shared is not None,
            launch_pdl=send and not INTERPRETED.value,
            num_warps=max(1, min(8, size // 256)),
        )


def candidates(index_q: Tensor, keys: Pages, share: Share, config: SparseConfig) -> Tensor:
    """The torch reference of a rank's candidates: int64 [T, G, topk] words, larger is better, 0 is none."""
    tokens, groups, dim = index_q.shape
    found = torch.zeros(tokens, groups, config.topk, dtype=torch.int64, device=index_q.device)
    for r, rows, local in msa_ops._requests(share.local):
        length = int(local.max()) + 1
        blocks = -(-length // config.block)
        scores = torch.einsum("qgd,kd->qgk", index_q[rows].float(), msa_ops._index_keys(keys, r, length, dim))
        unseen = torch.arange(length, device=index_q.device) > local[:, None]
        scores = scores.masked_fill(unseen[:, None], float("-inf"))
        scores = torch.nn.functional.pad(scores, (0, blocks * config.block - length), value=float("-inf"))
        scores = scores.unflatten(-1, (blocks, config.block)).amax(-1)
        block = torch.arange(blocks, device=index_q.device) * share.world + share.rank
        own = torch.div(share.batch.position[rows], config.block, rounding_mode="floor")[:, None]
        valid = block <= own
        scores = scores.masked_fill((valid & (block < config.init_blocks))[:, None], _INIT)
        scores = scores.masked_fill((valid & (block > own - config.local_blocks))[:, None], _LOCAL)
        bits = (scores + 0.0).contiguous().view(torch.int32).long()
        order = torch.where(bits < 0, ~bits & 0x7FFFFFFF, bits + (1 << 31))
        words = torch.where(scores > float("-inf"), order << _ID_BITS | _LAST_ID - block, 0)
        best = words.topk(min(config.topk, blocks), dim=-1).values
        found[rows, :, : best.shape[-1]] = best
    return found


def merge(words: Tensor, topk: int) -> Tensor:
    """Blocks int32 [T, G, topk], ascending, then -1, of all ranks' candidates [W, T, G, topk]."""
    best = words.movedim(0, -2).flatten(-2).topk(topk, dim=-1).values
    block = torch.where(best > 0, _LAST_ID - (best & _LAST_ID), _LAST_ID).sort(-1).values
    return torch.where(block == _LAST_ID, -1, block).int()


def _device(group: dist.ProcessGroup | None) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else torch.device("cpu")

"""The indexer with its keys spread over ranks: each scores its share of every request's pages, and all choose the same blocks.

Page b of a request belongs to rank b % world, wherever the request stands: shares differ by one page at most at any length, and a
growing request fills the ranks in turn, which contiguous ranges would not. Index keys have one head, so that a tensor-parallel engine
else repeats them on every rank and scores all of them there; spread, each rank reads 1 / world of the bytes, and keeps no more.

A rank scores its pages for all index heads (its pages in their order are a context of their own, so `triton_msa.index_scores` does
that), takes its best 16 with their exact scores, and sends them to all: 128 bytes a query and head. The merge is exact, ties included:
`index_topk` of one rank with all keys. The local and first blocks are forced by the rank that has them, hence once.

Queries are the same on all ranks; so are the choices. `split_index_topk` is the call over pages, `split_select_blocks` that of padded
batches in torch. Both are calls of the whole group: what they launch follows from shapes that all ranks share.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from . import msa_ops
from .msa import SparseConfig, block_scores
from .msa_ops import BLOCK, Batch, Pages
from .peer_memory import PeerMemory, Shared, addressable, agreed

_ID_BITS, _LAST_ID = 22, (1 << 22) - 1
_INIT, _LOCAL = 1e30, 1e29  # as `kernels.msa` forces blocks


log = logging.getLogger(__name__)


class Ranks(NamedTuple):
    """Who shares the keys, and how they reach one another."""

    world: int
    rank: int
    group: dist.ProcessGroup | None = None  # moves candidates; None: the default group
    host: dist.ProcessGroup | None = None  # with a CPU backend, in which ranks agree on what they use
    gather: Callable[[Tensor, Tensor], object] | None = None  # all-gather of the second into the first; None: that of `group`

    def gathered(self, mine: Tensor) -> Tensor:
        """[world, ...] of every rank's tensor."""
        heard = mine.new_empty(self.world, *mine.shape)
        if self.gather is not None:
            self.gather(heard, mine)
        else:
            dist.all_gather(list(heard.unbind()), mine, group=self.group)
        return heard


class Share(NamedTuple):
    """A rank's part of the work of one step; the same for all layers."""

    batch: Batch  # queries with their positions in the whole context
    local: Batch  # with their positions among this rank's keys
    world: int
    rank: int


def share_of(batch: Batch, world: int, rank: int) -> Share:
    """A rank's share of a batch; see `own_positions`."""
    return Share(batch, batch._replace(position=own_positions(batch.position, world, rank)), world, rank)


def own_positions(position: Tensor, world: int, rank: int, block: int = BLOCK) -> Tensor:
    """The last key that each query sees of this rank's, counted among those; -1 where it sees none.

    In the query's own block where that is this rank's, else the end of the last one before.
    """
    own = torch.div(position, block, rounding_mode="floor")
    count = torch.div(own - rank, world, rounding_mode="floor") + 1  # of this rank's blocks, up to the query's own
    inside = (count - 1) * block + position % block
    local = torch.where(own % world == rank, inside, count * block - 1)
    return torch.where(position < 0, -1, local)


def table_of(table: Tensor, world: int, rank: int, out: Tensor | None = None) -> Tensor:
    """int32 [R, ceil(blocks / world)], the part of a table [R, blocks] whose pages this rank has; the page numbers are its own.

    As wide on all ranks: the last entry of a rank that has one block less is that of no key, and so is what `out` held there.
    """
    own = table[:, rank::world]
    width = -(-table.shape[1] // world)
    if out is None:
        return torch.nn.functional.pad(own, (0, width - own.shape[1])).contiguous()
    out[: len(own), : own.shape[1]].copy_(own)
    return out[: len(own), :width]


class Inbox:
    """Where candidates of other ranks arrive, of at most `room` pairs of query and index head. One serves all layers, one after the other.

    Over peer memory (`peers`) candidates come by stores of the other GPUs, otherwise by an all-gather.
    """

    def __init__(
        self,
        room: int,
        topk: int,
        group: dist.ProcessGroup | None = None,
        peers: bool = True,
        gather: Callable[[Tensor, Tensor], object] | None = None,
    ) -> None:
        """All ranks construct it. `gather`: see `Ranks`. Raises `RuntimeError` where `peers` and the GPUs cannot address each other."""
        self.room, self.topk = room, topk
        self.ranks = Ranks(dist.get_world_size(group), dist.get_rank(group), group, gather=gather)
        shape = (2, self.ranks.world, room, topk)
        self.shared: Shared | None = PeerMemory(shape, torch.int64, group) if peers else None
        self.words = self.shared.local if peers else torch.zeros(shape, dtype=torch.int64, device=_device(group))
        self.calls = torch.zeros(room, dtype=torch.int32, device=self.words.device)
        self.addresses = self.shared.addresses if peers else torch.tensor([self.words.data_ptr()], device=self.words.device)


def open_inbox(room: int, topk: int, ranks: Ranks) -> Inbox:
    """The inbox of a group: over peer memory where every GPU can address every other, otherwise over its all-gather.

    All ranks call it, and get the same kind.
    """
    if _on_gpus(ranks.group) and addressable(ranks.host):
        inbox, why = None, "another rank's"
        try:
            inbox = Inbox(room, topk, ranks.group)
        except RuntimeError as error:
            why = str(error).splitlines()[0]
        if agreed(inbox is not None, ranks.host):
            return inbox
        log.warning("samebits: the indexer's candidates go through NCCL, since peer memory was refused: %s", why)
    return Inbox(room, topk, ranks.group, peers=False, gather=ranks.gather)


def split_index_topk(
    index_q: Tensor,
    keys: Pages,
    share: Share,
    config: SparseConfig,
    inbox: Inbox | None = None,
    out: Tensor | None = None,
    rounded: bool = False,
) -> Tensor:
    """`msa_ops.index_topk` over the ranks of a group, which all call it.

    Args:
        index_q: bf16 or fp32 [T, G, D], the same on all ranks. keys: this rank's pages, with its table (`table_of`).
        inbox: needed for the kernels; without it candidates go through an all-gather of the default group.
        rounded: NVFP4 pages are read as E4M3, as in `index_topk`.
    Returns:
        int32 [T, G, topk] on every rank: ascending block ids of the whole context, then -1.
    """
    tokens, groups, _ = index_q.shape
    if out is None:
        out = torch.empty(tokens, groups, config.topk, dtype=torch.int32, device=index_q.device)
    if inbox is not None and msa_ops._kernels_take(index_q, config.block):
        return _kernels(index_q, keys, share, config, inbox, out, rounded)
    mine = candidates(index_q, keys, share, config, rounded)
    ranks = inbox.ranks if inbox is not None else Ranks(share.world, share.rank)
    return out.copy_(merge(ranks.gathered(mine), config.topk))


def split_select_blocks(index_q: Tensor, index_k: Tensor, q_pos: Tensor, config: SparseConfig, ranks: Ranks) -> Tensor:
    """`msa.select_blocks` over the ranks of a group, which all call it.

    Args:
        index_q: [R, Q, G, D], the same on all ranks. index_k: [R, K, D], the keys of this rank's blocks (`own_keys`) one after the other.
        q_pos: int [R, Q], positions in the whole context, -1 for padding.
    Returns:
        int32 [R, Q, G, topk] on every rank: ascending block ids of the whole context, then -1.
    """
    return merge(ranks.gathered(padded_candidates(index_q, index_k, q_pos, config, ranks.world, ranks.rank)), config.topk)


def own_keys(keys: int, block: int, world: int, rank: int, device: torch.device | str = "cpu") -> Tensor:
    """int64, which of the positions 0 to `keys` - 1 lie in this rank's blocks."""
    position = torch.arange(keys, device=device)
    return position[position // block % world == rank]


def _kernels(index_q: Tensor, keys: Pages, share: Share, config: SparseConfig, inbox: Inbox, out: Tensor, rounded: bool) -> Tensor:
    """Queries some at a time, as many on all ranks: what fits the inbox and the memory for scores."""
    from . import triton_msa

    tokens, groups, _ = index_q.shape
    most = max(1, triton_msa.SCORE_MEMORY // max(1, groups * keys.table.shape[1]))
    step = max(1, min(tokens, inbox.room // groups, max(triton_msa.SCORE_TOKENS, most)))
    for first in range(0, tokens, step):
        end = min(first + step, tokens)
        local, rows = triton_msa._part(share.local, first, end)
        part = share._replace(batch=triton_msa._part(share.batch, first, end)[0], local=local)
        scores = triton_msa.index_scores(index_q[rows], keys, local, rounded=rounded)
        _exchanged(scores, part, config, inbox, out[rows])
    return out


def _exchanged(scores: Tensor, share: Share, config: SparseConfig, inbox: Inbox, out: Tensor) -> None:
    if inbox.shared is not None:
        exchange(scores, share, config, inbox, out, send=True, merge=True)
        return
    exchange(scores, share, config, inbox, out, send=True, merge=False)
    # Only the rows of this call travel: they lie together, see `exchange`.
    count = out.numel() * share.world
    heard = inbox.words[0].flatten()[:count].view(share.world, -1)
    if inbox.ranks.gather is not None:
        inbox.ranks.gather(heard, heard[share.rank])
    else:
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(heard.flatten(), heard[share.rank], group=inbox.ranks.group)
    exchange(scores, share, config, inbox, out, send=False, merge=True)


def exchange(scores: Tensor, share: Share, config: SparseConfig, inbox: Inbox, out: Tensor, send: bool, merge: bool) -> None:
    """One launch of the exchange kernel: `scores` [T, G, blocks] of this rank to candidates, and candidates of all ranks to `out`."""
    import triton

    from .triton_index_parallel import exchange_kernel
    from .triton_target import nvidia_options
    from .triton_tiles import on

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
            inbox.room if inbox.shared is not None else rows,
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
            num_warps=max(1, min(8, size // 256)),
            **nvidia_options(launch_pdl=send),
        )


def candidates(index_q: Tensor, keys: Pages, share: Share, config: SparseConfig, rounded: bool = False) -> Tensor:
    """The torch reference of a rank's candidates: int64 [T, G, topk] words, larger is better, 0 is none."""
    tokens, groups, dim = index_q.shape
    found = torch.zeros(tokens, groups, config.topk, dtype=torch.int64, device=index_q.device)
    for r, rows, local in msa_ops._requests(share.local):
        own = msa_ops._index_keys(keys, r, int(local.max()) + 1, dim, rounded)
        position = share.batch.position[None, rows].long()
        found[rows] = padded_candidates(index_q[None, rows], own[None], position, config, share.world, share.rank)[0]
    return found


def padded_candidates(index_q: Tensor, index_k: Tensor, q_pos: Tensor, config: SparseConfig, world: int, rank: int) -> Tensor:
    """Candidates int64 [R, Q, G, topk] of a padded batch; arguments as in `split_select_blocks`."""
    scores = block_scores(index_q, index_k, own_positions(q_pos, world, rank, config.block), config.block)
    blocks = scores.shape[-1]
    block = torch.arange(blocks, device=index_q.device) * world + rank
    own = torch.div(q_pos, config.block, rounding_mode="floor")[..., None]
    valid = (block <= own) & (q_pos >= 0)[..., None]
    scores = scores.masked_fill((valid & (block < config.init_blocks))[:, :, None], _INIT)
    scores = scores.masked_fill((valid & (block > own - config.local_blocks))[:, :, None], _LOCAL)
    bits = (scores + 0.0).view(torch.int32).long()
    order = torch.where(bits < 0, ~bits & 0x7FFFFFFF, bits + (1 << 31))
    words = torch.where(scores > float("-inf"), order << _ID_BITS | _LAST_ID - block, 0)
    best = words.topk(min(config.topk, blocks), dim=-1).values
    return torch.nn.functional.pad(best, (0, config.topk - best.shape[-1]))


def merge(words: Tensor, topk: int) -> Tensor:
    """Blocks int32 [T, G, topk], ascending, then -1, of all ranks' candidates [W, T, G, topk]."""
    best = words.movedim(0, -2).flatten(-2).topk(topk, dim=-1).values
    block = torch.where(best > 0, _LAST_ID - (best & _LAST_ID), _LAST_ID).sort(-1).values
    return torch.where(block == _LAST_ID, -1, block).int()


def _on_gpus(group: dist.ProcessGroup | None) -> bool:
    return dist.get_backend(group) == "nccl"


def _device(group: dist.ProcessGroup | None) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if _on_gpus(group) else torch.device("cpu")

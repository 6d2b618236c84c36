"""MSA (MiniMax sparse attention): the torch reference.

A light indexer scores every key of the context with one index query for each KV group against one shared index key, takes the
maximum over each block of 128 keys, and the query attends exactly to its top 16 blocks, the block it stands in among them.
Blocks are anchored at each sequence's start. Scores and softmax are fp32 (or fp64, see `sums`).

All functions work on a padded batch: queries [R, Q, ...] and keys [R, K, ...] of R sequences, where key j of a row is the key at
position j and `q_pos` [R, Q] is the absolute position of a query, or -1 for padding. Packed training batches and paged engine
batches are brought into this form by `pad_packed` here and by the engine's page gather.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .sums import wide

_FORCED_INIT, _FORCED_LOCAL = 1e30, 1e29  # above any score; as upstream orders them


class SparseConfig(NamedTuple):
    """Block choice of one layer."""

    block: int = 128
    topk: int = 16
    init_blocks: int = 0
    local_blocks: int = 1


def select_blocks(index_q: Tensor, index_k: Tensor, q_pos: Tensor, config: SparseConfig) -> Tensor:
    """Choose KV blocks.

    Args:
        index_q: [R, Q, G, D], one index query a KV group. index_k: [R, K, D], shared by the groups.
        q_pos: int [R, Q], absolute position, -1 for padding.
    Returns:
        int32 [R, Q, G, topk]: ascending block ids, then -1. Ties go to the lower block.
    """
    scores = block_scores(index_q, index_k, q_pos, config.block)
    blocks = scores.shape[-1]
    block_id = torch.arange(blocks, device=q_pos.device)
    own = torch.div(q_pos, config.block, rounding_mode="floor")[..., None]  # -1 for padding
    valid = (block_id <= own) & (q_pos >= 0)[..., None]
    scores = scores.masked_fill((valid & (block_id < config.init_blocks))[:, :, None], _FORCED_INIT)
    scores = scores.masked_fill((valid & (block_id > own - config.local_blocks))[:, :, None], _FORCED_LOCAL)
    top = scores.sort(dim=-1, descending=True, stable=True)
    kept = min(config.topk, blocks)
    ids = top.indices[..., :kept].masked_fill(top.values[..., :kept] == float("-inf"), blocks)
    ids = ids.sort(dim=-1).values
    ids = ids.masked_fill(ids == blocks, -1).int()
    return torch.nn.functional.pad(ids, (0, config.topk - kept), value=-1)


def block_scores(index_q: Tensor, index_k: Tensor, q_pos: Tensor, block: int) -> Tensor:
    """fp32 [R, Q, G, blocks]: the largest score of each block's keys up to the query's own; -inf where it sees none.

    Arguments are those of `select_blocks`. Every block is a product of its own and of one shape, so that its score does not depend on
    how many blocks there are beside it: a rank that has some of them (`index_parallel`) computes the bits of one that has all.
    """
    rows, queries, groups, dim = index_q.shape
    keys = index_k.shape[1]
    blocks = -(-keys // block)
    tiles = torch.nn.functional.pad(wide(index_k), (0, 0, 0, blocks * block - keys)).view(rows * blocks, block, dim)
    heads = wide(index_q).reshape(rows, 1, queries * groups, dim).expand(-1, blocks, -1, -1)
    scores = torch.bmm(heads.reshape(rows * blocks, queries * groups, dim), tiles.mT).view(rows, blocks, queries, groups, block)
    seen = torch.arange(blocks * block, device=q_pos.device).view(blocks, 1, 1, block) <= q_pos[:, None, :, None, None]
    return scores.masked_fill(~seen, float("-inf")).amax(-1).permute(0, 2, 3, 1).float().contiguous()


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_pos: Tensor,
    scale: float,
    blocks: Tensor | None = None,
    block: int = 128,
    finite: bool = False,
) -> Tensor:
    """Causal attention, over chosen blocks where given.

    Args:
        q: [R, Q, H, D]. k, v: [R, K, G, D] with H a multiple of G. q_pos: int [R, Q], -1 for padding.
        blocks: int32 [R, Q, G, n] block ids, -1 for none; None attends to the whole prefix.
        finite: v holds no NaN or infinity anywhere, not even where no query looks; saves a pass over v.
    Returns:
        [R, Q, H, D] in q's dtype; zeros at padding.
    """
    rows, queries, heads, dim = q.shape
    keys, groups = k.shape[1], k.shape[2]
    grouped = wide(q).view(rows, queries, groups, heads // groups, dim)
    if blocks is not None and queries == 1 and keys > blocks.shape[-1] * block:
        # Decode over a long context: read only the chosen blocks.
        k, v, key_pos = _gather_blocks(k, v, blocks[:, 0], block)
        allowed = (key_pos >= 0) & (key_pos <= q_pos[:, :1, None])  # [R, G, n * block]
        scores = torch.einsum("rqghd,rgkd->rghqk", grouped, wide(k)) * scale
        weights = _softmax(scores, allowed[:, :, None, None])
        out = torch.einsum("rghqk,rgkd->rqghd", weights, _clean(v, allowed))
        return out.float().reshape(q.shape).to(q.dtype)
    allowed = (torch.arange(keys, device=q.device) <= q_pos[..., None])[:, :, None]  # [R, Q, 1, K]
    if blocks is not None:
        allowed = allowed & _block_mask(blocks, keys, block)
    scores = torch.einsum("rqghd,rkgd->rghqk", grouped, wide(k)) * scale
    weights = _softmax(scores, allowed.transpose(1, 2)[:, :, None])
    v = wide(v) if finite else _clean(v, allowed.any(1).transpose(1, 2))
    return torch.einsum("rghqk,rkgd->rqghd", weights, v).float().reshape(q.shape).to(q.dtype)


def _softmax(scores: Tensor, allowed: Tensor) -> Tensor:
    # A padding row allows no key: its softmax would be NaN, so it is given zeros through a finite floor and a mask.
    scores = scores.masked_fill(~allowed, torch.finfo(torch.float32).min)
    return scores.softmax(-1) * allowed


def _clean(v: Tensor, used: Tensor) -> Tensor:
    """`v` with zeros where no query looks: a page's unwritten tail may hold NaN, and NaN times a weight of zero is NaN."""
    return wide(v).masked_fill(~used[..., None], 0.0)


def _block_mask(blocks: Tensor, keys: int, block: int) -> Tensor:
    """bool [R, Q, G, K]: does the key's block stand among the chosen ones?"""
    count = -(-keys // block)
    chosen = torch.zeros(*blocks.shape[:-1], count + 1, dtype=torch.bool, device=blocks.device)
    chosen.scatter_(-1, torch.where(blocks < 0, count, blocks).long(), True)
    return chosen[..., :count].repeat_interleave(block, dim=-1)[..., :keys]


def _gather_blocks(k: Tensor, v: Tensor, blocks: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values of chosen blocks [R, G, n]: [R, G, n * block, D] each, and their positions, -1 where there is none."""
    keys, dim = k.shape[1], k.shape[3]
    position = (blocks.long() * block)[..., None] + torch.arange(block, device=k.device)
    position = torch.where((blocks < 0)[..., None] | (position >= keys), -1, position).flatten(-2)  # [R, G, n * block]
    index = position.clamp_min(0)[..., None].expand(-1, -1, -1, dim)
    return k.transpose(1, 2).gather(2, index), v.transpose(1, 2).gather(2, index), position


class PaddedBucket(NamedTuple):
    """Some sequences of a packed batch, brought to one length."""

    index: Tensor  # int64 [R, L] row in the packed batch; 0 at padding
    q_pos: Tensor  # int64 [R, L] position in the sequence; -1 at padding


def pad_packed(lengths: list[int], device: torch.device | str = "cpu", waste: float = 1.5) -> list[PaddedBucket]:
    """Split the sequences of a packed batch into buckets of similar length, each padded to at most `waste` times its tokens."""
    starts = [0]
    for n in lengths:
        starts.append(starts[-1] + n)
    order = sorted((i for i, n in enumerate(lengths) if n), key=lambda i: -lengths[i])
    buckets: list[list[int]] = []
    tokens = 0
    for i in order:
        if buckets and lengths[buckets[-1][0]] * (len(buckets[-1]) + 1) <= waste * (tokens + lengths[i]):
            buckets[-1].append(i)
            tokens += lengths[i]
        else:
            buckets.append([i])
            tokens = lengths[i]
    padded = []
    for members in buckets:
        length = torch.tensor([lengths[i] for i in members], device=device)[:, None]
        start = torch.tensor([starts[i] for i in members], device=device)[:, None]
        pos = torch.arange(lengths[members[0]], device=device)[None]
        inside = pos < length
        padded.append(PaddedBucket(torch.where(inside, start + pos, 0), torch.where(inside, pos, -1)))
    return padded


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    buckets: list[PaddedBucket],
    scale: float,
    index_q: Tensor | None = None,
    index_k: Tensor | None = None,
    config: SparseConfig | None = None,
    replay_blocks: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention of a packed training batch; sparse where `config` is given.

    Args:
        q: [T, H, D]. k, v: [T, G, D]. index_q: [T, G, D]. index_k: [T, D].
            index_q and index_k may be None when no sequence has more blocks than are chosen.
        buckets: from `pad_packed`. replay_blocks: int32 [T, G, topk], block choices to use instead of the indexer's own; a row that
            starts with -1 keeps the indexer's choice.
    Returns:
        (out [T, H, D], chosen blocks int32 [T, G, topk] or None for dense attention).
    """
    out = torch.zeros_like(q)
    chosen = None if config is None else torch.full((*k.shape[:2], config.topk), -1, dtype=torch.int32, device=q.device)
    for index, q_pos in buckets:
        flat, inside = index.flatten(), (q_pos.flatten() >= 0).nonzero().flatten()
        rows = flat[inside]

        def padded(x: Tensor, flat: Tensor = flat, shape: torch.Size = index.shape) -> Tensor:
            # index_select, since the gradient of advanced indexing is far slower than that of a selection of rows.
            return x.index_select(0, flat).unflatten(0, shape)

        blocks = None
        if config is not None:
            blocks = _choose(index.shape[1], q_pos, config, k.shape[1], index_q, index_k, replay_blocks, padded)
            chosen[rows] = blocks.flatten(0, 1)[inside]
            most = config.block * (config.topk if replay_blocks is None else 1)
            if index.shape[1] <= most:
                blocks = None  # no more blocks than are chosen: every query attends to all of its prefix
        part = attend(padded(q), padded(k), padded(v), q_pos, scale, blocks, config.block if config else 128, finite=True)
        out = out.index_copy(0, rows, part.flatten(0, 1).index_select(0, inside))
    return out, chosen


def _choose(keys, q_pos, config, groups, index_q, index_k, replay_blocks, padded) -> Tensor:
    """Blocks of one bucket [R, Q, G, topk]: replayed where a row has any, otherwise chosen."""
    if keys <= config.block * config.topk:
        own = all_blocks(keys, q_pos, config)[:, :, None].expand(-1, -1, groups, -1)
    else:
        own = select_blocks(padded(index_q), padded(index_k), q_pos, config)
    if replay_blocks is None:
        return own
    given = padded(replay_blocks)
    return torch.where(given[..., :1] >= 0, given, own)


def all_blocks(keys: int, q_pos: Tensor, config: SparseConfig) -> Tensor:
    """What `select_blocks` gives where the context has no more blocks than are chosen: int32 [R, Q, topk], all up to the query's own."""
    block_id = torch.arange(config.topk, device=q_pos.device, dtype=torch.int32)
    own = torch.div(q_pos, config.block, rounding_mode="floor")[..., None]  # -1 for padding
    return torch.where(block_id <= own, block_id, -1)

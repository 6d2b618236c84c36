"""Attention of a packed training batch, on the kernels of `kernels.msa_ops` or in torch, and what of the batch all layers share, made once.

On the kernels nothing is padded, and the sparse layers compute with `sparse_attention` whatever the length of a sequence, as the engine
does: where there are no more blocks than are chosen the choice is all of them and takes no scores, but the arithmetic is the same.

Where the profile reads an NVFP4 cache as E4M3 (`NumericsProfile.kv_read`), what comes here as the cache holds it is rounded once more, and
so are the queries: the values that the engine's attention reads and multiplies. Gradients pass straight through.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from samebits.kernels import msa_ops
from samebits.kernels.msa import PaddedBucket, SparseConfig, all_blocks, packed_attention, pad_packed
from samebits.kernels.msa_ops import BLOCK, DIM, HEADS_A_GROUP, Batch, Packed
from samebits.kernels.rope import rope_table
from samebits.quant import kv

from .m3_config import M3Dims


class Sequences(NamedTuple):
    """What every layer needs to know about the packed batch."""

    longest: int
    table: tuple[Tensor, Tensor]  # cos and sin, fp32 [longest, rotary_dim / 2]
    position: Tensor  # int32 [T], in the sequence
    batch: Batch | None  # where attention runs on the kernels
    every_block: Tensor | None  # int32 [T, G, topk], on the kernels, where no sequence has more blocks than are chosen
    buckets: list[PaddedBucket]  # elsewhere
    cos: Tensor | None  # fp32 [T, rotary_dim / 2], elsewhere
    sin: Tensor | None


def kernels_attend(dims: M3Dims, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether attention of this model runs on the kernels of `msa_ops` here: the engine's condition, and a choice that they can make."""
    shape, sparse = dims.shape, dims.sparse
    fits = shape.head_dim == DIM and shape.heads // shape.kv_heads <= HEADS_A_GROUP
    fits = fits and sparse.block == BLOCK and sparse.topk & (sparse.topk - 1) == 0
    return fits and dtype is torch.bfloat16 and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def sequences(lengths: list[int], dims: M3Dims, kernels: bool, device: torch.device) -> Sequences:
    """Of the packed sequences of these lengths; `kernels`: see `kernels_attend`."""
    length = torch.tensor(lengths, device=device)
    start = torch.nn.functional.pad(length.cumsum(0), (1, 0))
    request = torch.arange(len(lengths), device=device).repeat_interleave(length, output_size=sum(lengths))
    position = torch.arange(sum(lengths), device=device) - start[request]
    longest = max(lengths)
    table = rope_table(longest, dims.rotary_dim, dims.rope_theta, device)
    if not kernels:
        buckets = pad_packed(lengths, device, waste=1.15)
        return Sequences(longest, table, position.int(), None, None, buckets, table[0][position], table[1][position])
    position = position.int()
    every = None
    if longest <= dims.sparse.block * dims.sparse.topk:
        every = all_blocks(longest, position, dims.sparse)[:, None].expand(-1, dims.shape.kv_heads, -1).contiguous()
    return Sequences(longest, table, position, Batch(start.int(), request.int(), position, longest), every, [], None, None)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seqs: Sequences,
    scale: float,
    index_q: Tensor | None,
    index_k: Tensor | None,
    config: SparseConfig | None,
    replay: Tensor | None,
    rounded: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Causal attention that never crosses a sequence; sparse where `config` is given.

    Args:
        q: [T, H, D]. k, v: [T, G, D]. index_q: [T, G, D] and index_k: [T, D], or None where no sequence has more blocks than are chosen.
        replay: int [T, G, topk] block choices to use instead of the model's own; a row that starts with -1 keeps its own.
        rounded: queries, K, V and index keys are taken as E4M3.
    Returns:
        (out [T, H, D], chosen blocks int32 [T, G, topk] or None for dense attention).
    """
    if rounded:
        q, k, v = (msa_ops.as_e4m3(x) for x in (q, k, v))
        index_q, index_k = (x if x is None else kv.round_e4m3(x) for x in (index_q, index_k))
    if seqs.batch is None:
        return packed_attention(q, k, v, seqs.buckets, scale, index_q, index_k, config, None if replay is None else replay.int())
    start, blocks = seqs.batch.start[:-1], -(-seqs.longest // BLOCK)
    cache = Packed(k, v, start, blocks)
    if config is None:
        return msa_ops.dense_attention(q, cache, seqs.batch, scale), None
    chosen = seqs.every_block
    if chosen is None:
        with torch.no_grad():
            chosen = msa_ops.index_topk(index_q, Packed(index_k, None, start, blocks), seqs.batch, config)
    if replay is not None:
        chosen = torch.where(replay[..., :1] >= 0, replay.int(), chosen)
    return msa_ops.sparse_attention(q, cache, chosen, seqs.batch, scale), chosen

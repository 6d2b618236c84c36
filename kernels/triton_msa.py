"""Launches of the MSA kernels: shapes, strides, formats and how many programs; `kernels.msa_ops` says what they compute."""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from . import cuda_prefill
from .msa import SparseConfig
from .msa_ops import DIM, Batch, Norms, Packed, Pages
from .triton_msa_attend import ROWS, STATE, attend_kernel, merge_kernel
from .triton_msa_backward import PackedAttention
from .triton_msa_blocks import WARPS
from .triton_msa_index import choose_kernel, score_kernel
from .triton_msa_insert import insert_kernel
from .triton_msa_rotate import HeadRows
from .triton_target import nvidia_options

FORMATS = {torch.bfloat16: 0, torch.uint8: 2, torch.float8_e4m3fn: 1, torch.float32: 0}
SLOT = 9216
# Programs of the score kernel for each multiprocessor, of one warp each: twice what is resident, so that none idles at the end. With 128
# registers 16 of them are resident, and spill a few words: that wins where a program has less than SCORE_LONG blocks, and waits more than
# it works.
SCORE_PROGRAMS, SCORE_REGISTERS = 32, 128
# In decode over NVFP4 pages, where as many programs as are resident without that limit have SCORE_LONG blocks each or more, there are
# exactly so many, and no more registers than that allows: programs that start late would find the multiprocessors half empty. Swept on an
# H200 at 32 requests of 131072 tokens, where a program has 21 blocks then.
SCORE_LONG, SCORE_RESIDENT, SCORE_FREE = 8, 12, 168
SCORE_KEYS = {0: 32, 1: 64, 2: 64}  # keys of a tile, by format
SCORE_TOKENS = 8  # query tokens of a program at most
SCORE_MEMORY = 1 << 26  # scores held at a time, in elements, where there are many queries
# A kernel may be launched while the one before it ends (programmatic dependent launch); all wait for it before they read or write.
EARLY = True
# Chosen blocks whose results are joined before others are: part of the arithmetic. A program takes one block where that makes no more than
# SPLIT programs for each multiprocessor, else such a group of blocks where queries times groups are no more than that, else all blocks.
BLOCKS_TOGETHER = 4
SPLIT = 4
MERGE_HEADS = 16  # of a program
# V is loaded before there are scores, by format. Rows of bf16 fill the registers as it is.
AHEAD = {0: False, 1: False, 2: True}


def index_topk(
    index_q: Tensor, keys: Pages | Packed, batch: Batch, config: SparseConfig, out: Tensor | None, rounded: bool = False
) -> Tensor:
    """`msa_ops.index_topk` on CUDA."""
    tokens, groups, _ = index_q.shape
    if out is None:
        out = torch.empty(tokens, groups, config.topk, dtype=torch.int32, device=index_q.device)
    blocks = _blocks(keys)
    step = tokens
    if tokens * groups * blocks > SCORE_MEMORY:
        step = max(SCORE_TOKENS, SCORE_MEMORY // (groups * blocks))
    for first in range(0, tokens, step):
        part, rows = _part(batch, first, min(first + step, tokens))
        scores = index_scores(index_q[rows], keys, part, rounded=rounded)
        choose(scores, part.position, config, out[rows])
    return out


def _part(batch: Batch, first: int, end: int) -> tuple[Batch, slice]:
    """Tokens `first` to `end` - 1 of a batch, of all requests, and which they are."""
    if first == 0 and end == batch.position.numel():
        return batch, slice(None)
    rows = slice(first, end)
    start = (batch.start - first).clamp(0, end - first)
    return Batch(start, batch.request[rows], batch.position[rows], min(batch.most, end - first)), rows


def index_scores(index_q: Tensor, keys: Pages | Packed, batch: Batch, programs: int | None = None, rounded: bool = False) -> Tensor:
    """fp32 [T, G, blocks]: the largest score of each block up to the query's own; entries beyond are not written."""
    tokens, groups, _ = index_q.shape
    requests, blocks = batch.start.numel() - 1, _blocks(keys)
    scores = torch.empty(tokens, groups, blocks, dtype=torch.float32, device=index_q.device)
    if scores.numel() == 0:
        return scores
    data = keys.data if isinstance(keys, Pages) else keys.keys
    form = FORMATS[data.dtype]
    together = min(SCORE_TOKENS, triton.next_power_of_2(batch.most))
    tiles = triton.cdiv(batch.most, together)
    columns = max(8, together * groups)
    if programs is None:
        programs = _score_programs(requests * tiles * blocks, form == 2 and columns == 8, _multiprocessors(index_q.device))
    splits = max(1, min(blocks, programs // (requests * tiles)))
    # Even shares: with 1024 blocks over 700 programs half would do two blocks and half one.
    share = triton.cdiv(blocks, splits)
    splits = triton.cdiv(blocks, share)
    registers = None
    if form == 2:
        registers = SCORE_REGISTERS if share < SCORE_LONG else SCORE_FREE if columns == 8 else None
    paged = isinstance(keys, Pages)
    with torch.cuda.device(index_q.device) if index_q.is_cuda else _Nothing():
        score_kernel[(splits, requests, tiles)](
            index_q.contiguous(),
            _plain(data),
            keys.table if paged else keys.start,
            batch.start,
            batch.position,
            scores,
            data.stride(0) if paged else 0,
            data.stride(-2) if form != 2 else 0,
            keys.table.stride(0) if paged else 0,
            blocks,
            1,
            G=groups,
            TOKENS=together,
            N=columns,
            KEYS=SCORE_KEYS[form],
            FORMAT=form,
            PAGED=paged,
            ROUNDED=rounded and form == 2,
            num_warps=1,
            num_stages=1,
            enable_fp_fusion=False,
            **nvidia_options(maxnreg=registers, launch_pdl=EARLY and index_q.is_cuda),
        )
    return scores


def _score_programs(blocks: int, decode: bool, multiprocessors: int) -> int:
    """Programs for the scores of so many blocks, over all requests. decode: NVFP4 pages, few query tokens a request."""
    resident = SCORE_RESIDENT * multiprocessors
    return resident if decode and blocks >= SCORE_LONG * resident else SCORE_PROGRAMS * multiprocessors


def choose(scores: Tensor, position: Tensor, config: SparseConfig, out: Tensor) -> None:
    """Block ids of the best scores [T, G, blocks] into `out` [T, G, topk]."""
    tokens, groups, blocks = scores.shape
    if not out.numel():
        return
    if config.topk & (config.topk - 1):
        raise ValueError(f"the number of chosen blocks must be a power of two, got {config.topk}")
    size = max(triton.next_power_of_2(blocks), 2 * config.topk)
    with torch.cuda.device(scores.device) if scores.is_cuda else _Nothing():
        choose_kernel[(tokens * groups,)](
            scores,
            position,
            out,
            blocks,
            G=groups,
            TOPK=config.topk,
            INIT=config.init_blocks,
            LOCAL=config.local_blocks,
            SIZE=size,
            num_warps=max(1, min(8, size // 256)),
            **nvidia_options(launch_pdl=EARLY and scores.is_cuda),
        )


def sparse_attention(q: Tensor, cache: Pages | Packed, chosen: Tensor, batch: Batch, scale: float, rounded: bool = False) -> Tensor:
    """`msa_ops.sparse_attention` on CUDA."""
    if isinstance(cache, Packed) and torch.is_grad_enabled() and any(t.requires_grad for t in (q, cache.keys, cache.values)):
        if q.shape[0] != cache.keys.shape[0]:
            raise ValueError("gradients need every token of the packed keys to be a query")
        chosen = chosen.contiguous()
        return PackedAttention.apply(
            q,
            cache.keys,
            cache.values,
            lambda: attend(q.detach(), cache, chosen, batch, scale, lse=True),
            chosen,
            batch.start,
            batch.request,
            batch.position,
            scale,
        )
    return attend(q, cache, chosen, batch, scale, rounded=rounded)[0]


def kv_insert(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index_q: Tensor | None,
    index_k: Tensor | None,
    norms: Norms,
    table: tuple[Tensor, Tensor],
    position: Tensor,
    slots: Tensor,
    cache: Tensor,
    index_cache: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """`msa_ops.kv_insert` on CUDA."""
    rows = HeadRows.of(q, k, v, index_q, index_k, norms, table, position)
    q_out, index_q_out = rows.like(q), rows.like(index_q)
    if not len(q):
        return q_out, index_q_out
    keys, values, strides, _, form = _layout(Pages(cache, slots))
    index = cache if index_cache is None else index_cache
    index_form = FORMATS[index.dtype]
    with torch.cuda.device(q.device) if q.is_cuda else _Nothing():
        insert_kernel[(rows.programs,)](
            *rows.heads,
            q_out,
            q_out if index_q_out is None else index_q_out,
            *rows.norms,
            *rows.table,
            position,
            slots,
            keys,
            values,
            _plain(index),
            *rows.strides,
            *strides,
            index.stride(0),
            index.stride(1) if index_form != 2 else 0,
            norms.eps,
            len(q),
            INDEX_FORMAT=index_form,
            FORMAT=form,
            **rows.shape,
        )
    return q_out, index_q_out


def attend(
    q: Tensor, cache: Pages | Packed, chosen: Tensor, batch: Batch, scale: float, lse: bool = False, rounded: bool = False
) -> tuple[Tensor, Tensor | None]:
    """(output [T, H, D], fp32 [T, H] log2 of the softmax's sum over scores in powers of two, where `lse`).

    Chosen blocks ascend, then -1, as `index_topk` gives them. Many queries over bf16 go to CUDA C++ on Hopper, with the same bits.
    """
    if cuda_prefill.wanted(q, cache, chosen, batch):
        return cuda_prefill.attend(q, cache, chosen, batch, scale, lse)
    return attend_in_triton(q, cache, chosen, batch, scale, lse, rounded)


def attend_in_triton(
    q: Tensor, cache: Pages | Packed, chosen: Tensor, batch: Batch, scale: float, lse: bool = False, rounded: bool = False
) -> tuple[Tensor, Tensor | None]:
    """`attend` by the Triton kernels alone."""
    tokens, heads, _ = q.shape
    groups, topk = chosen.shape[1:]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    sums = torch.empty(tokens, heads, dtype=torch.float32, device=q.device) if lse else None
    if not q.numel():
        return out, sums
    if topk & (topk - 1):
        raise ValueError(f"the number of chosen blocks must be a power of two, got {topk}")
    together = min(BLOCKS_TOGETHER, topk)
    rows = tokens * groups
    most = SPLIT * _multiprocessors(q.device)
    unit = 1 if rows * topk <= most else together if rows <= most else topk
    units = topk // unit
    keys, values, strides, table, form = _layout(cache)
    parts = state = None
    if units > 1:
        parts = torch.empty(rows, units, ROWS.value, DIM, dtype=torch.float32, device=q.device)
        state = torch.empty(rows, units, STATE.value, dtype=torch.float32, device=q.device)
    with torch.cuda.device(q.device) if q.is_cuda else _Nothing():
        attend_kernel[(rows * units,)](
            q.contiguous(),
            keys,
            values,
            table,
            batch.request,
            batch.position,
            chosen.contiguous(),
            out,
            sums,
            parts,
            state,
            *strides,
            table.stride(0),
            scale * math.log2(math.e) * (128.0 if form == 2 else 1.0),
            G=groups,
            HEADS=heads // groups,
            TOPK=topk,
            GROUP=together,
            UNIT=unit,
            LSE=lse,
            FORMAT=form,
            PAGED=isinstance(cache, Pages),
            ROUNDED=rounded and form == 2,
            AHEAD=AHEAD[form],
            num_warps=WARPS.value,
            num_stages=1,
            enable_fp_fusion=False,
            **nvidia_options(launch_pdl=EARLY and q.is_cuda),
        )
        if units > 1:
            merge_kernel[(rows, triton.cdiv(heads // groups, MERGE_HEADS))](
                parts,
                state,
                out,
                sums,
                HEADS=heads // groups,
                GROUPS=topk // together,
                PARTS=max(1, together // unit),
                SHARE=MERGE_HEADS,
                LSE=lse,
                num_warps=4,
                enable_fp_fusion=False,
                **nvidia_options(launch_pdl=EARLY and q.is_cuda),
            )
    return out, sums


def _layout(cache: Pages | Packed) -> tuple[Tensor, Tensor, tuple[int, int, int], Tensor, int]:
    """(keys, values, (page, token, head) strides, table, format)."""
    if isinstance(cache, Packed):
        k, v = cache.keys, cache.values
        if k.stride() != v.stride() or k.stride(2) != 1:
            k, v = k.contiguous(), v.contiguous()
        return _plain(k), _plain(v), (0, k.stride(0), k.stride(1)), cache.start, FORMATS[k.dtype]
    data = cache.data
    form = FORMATS[data.dtype]
    if form == 2:
        return data, data[:, 1:], (data.stride(0), 0, 2 * SLOT), cache.table, form
    plain = _plain(data)
    return plain, plain[..., DIM:], (data.stride(0), data.stride(2), data.stride(1)), cache.table, form


def _plain(x: Tensor) -> Tensor:
    """E4M3 as bytes: kernels read its bits."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def _blocks(keys: Pages | Packed) -> int:
    return keys.table.shape[1] if isinstance(keys, Pages) else keys.blocks


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


class _Nothing:
    """No device to make current, under Triton's interpreter."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass

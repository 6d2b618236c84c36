"""MSA as an engine and a trainer call it: `kv_insert`, `index_topk`, `sparse_attention`, one signature each.

On CUDA (compute capability 9.0 or newer, head dimension 128, blocks of 128, at most 16 query heads a group) they are the Triton kernels;
elsewhere the torch reference of `kernels.msa`, request by request. A kernel's result depends on its own query and its own keys alone:
it is bitwise the same alone or in any batch, as one token or one of many, from pages or from packed tensors of the same values.

**Batch.** T query tokens of R requests, the tokens of a request consecutive. Each has its position; the keys at positions 0 to its own
are the request's cache, or, in training, the packed tokens themselves. Chunked prefill, decode with several tokens and training are all so.

**Pages.** A cache is told by its tensor: uint8 are NVFP4 pages (`quant.kv`), bf16 or E4M3 (scale 1) are pages [pages, G, 128, 2 D], K then
V along the last dimension, and [pages, 128, D] for index keys, as vLLM lays out MiniMax-M3's.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from samebits.quant import kv
from samebits.quant.blocks import fast_path

from . import msa
from .msa import SparseConfig
from .norm import gemma_rms_norm
from .rope import apply_rope

DIM, BLOCK, HEADS_A_GROUP = 128, 128, 16


class Batch(NamedTuple):
    """Which query tokens there are."""

    start: Tensor  # int32 [R + 1], first token of each request, then T
    request: Tensor  # int32 [T], request of each token
    position: Tensor  # int32 [T], absolute position; -1 for padding, for which nothing is chosen and zeros come out
    most: int  # no request has more tokens


class Pages(NamedTuple):
    """A paged cache of one layer: main KV, or index keys."""

    data: Tensor
    table: Tensor  # int32 [R, blocks], page of each block of a request; entries past its last key may be anything


class Packed(NamedTuple):
    """Keys of a packed batch: [T, G, D] each, or index keys [T, D] with `values` None."""

    keys: Tensor
    values: Tensor | None
    start: Tensor  # int32 [R], first token of each request
    blocks: int  # no request has more blocks of keys


def batch_of(new: list[int], total: list[int] | None = None, device: torch.device | str = "cpu") -> Batch:
    """Batch in which request r has `new[r]` query tokens, the last of its `total[r]` (default: of `new[r]`) tokens."""
    total = new if total is None else total
    start = [0]
    for n in new:
        start.append(start[-1] + n)
    request = [r for r, n in enumerate(new) for _ in range(n)]
    position = [p for n, end in zip(new, total, strict=True) for p in range(end - n, end)]

    def ints(x: list[int]) -> Tensor:
        return torch.tensor(x, dtype=torch.int32, device=device)

    return Batch(ints(start), ints(request), ints(position), max(new, default=0))


def index_topk(
    index_q: Tensor, keys: Pages | Packed, batch: Batch, config: SparseConfig, out: Tensor | None = None, rounded: bool = False
) -> Tensor:
    """Choose KV blocks: scores of the index heads against the shared index key, largest of each block, the best `config.topk` blocks.

    Args:
        index_q: bf16 or fp32 [T, G, D]. keys: index keys.
        out: int32 [T, G, topk] to write to. rounded: NVFP4 pages are read as E4M3 (`quant.kv`); other caches hold what they hold.
    Returns:
        int32 [T, G, topk]: ascending block ids, then -1. Ties go to the lower block. Scores are fp32.
    """
    if _kernels_take(index_q, config.block):
        from . import triton_msa

        return triton_msa.index_topk(index_q, keys, batch, config, out, rounded)
    chosen = torch.full((*index_q.shape[:2], config.topk), -1, dtype=torch.int32, device=index_q.device) if out is None else out.fill_(-1)
    for r, rows, q_pos in _requests(batch):
        k = _index_keys(keys, r, int(q_pos.max()) + 1, index_q.shape[2], rounded)
        chosen[rows] = msa.select_blocks(index_q[None, rows], k[None], q_pos[None].long(), config)[0]
    return chosen


def sparse_attention(q: Tensor, cache: Pages | Packed, chosen: Tensor, batch: Batch, scale: float, rounded: bool = False) -> Tensor:
    """Causal attention of every query to its chosen blocks.

    Args:
        q: bf16 [T, H, D]. chosen: int32 [T, G, topk] from `index_topk` (or replayed): block ids, -1 only after them.
        rounded: NVFP4 pages are read as E4M3 (`quant.kv`); other caches hold what they hold. The query is the caller's.
    Returns:
        [T, H, D] in q's dtype. Differentiable in q and the packed keys and values; then every token must be a query.
    """
    if _kernels_take(q, BLOCK) and q.shape[1] // chosen.shape[1] <= HEADS_A_GROUP:
        from . import triton_msa

        return triton_msa.sparse_attention(q, cache, chosen, batch, scale, rounded)
    out = torch.zeros_like(q)
    for r, rows, q_pos in _requests(batch):
        k, v = _keys_values(cache, r, int(q_pos.max()) + 1, chosen.shape[1], q.shape[2], rounded)
        args = (q[None, rows], k[None], v[None], q_pos[None].long(), scale, chosen[None, rows])
        out[rows] = msa.attend(*args)[0]
    return out


class Norms(NamedTuple):
    """Per-head Gemma norm weights [D] of one layer, and their epsilon."""

    q: Tensor
    k: Tensor
    index_q: Tensor
    index_k: Tensor
    eps: float


def kv_insert(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index_q: Tensor,
    index_k: Tensor,
    norms: Norms,
    table: tuple[Tensor, Tensor],
    position: Tensor,
    slots: Tensor,
    cache: Tensor,
    index_cache: Tensor,
) -> tuple[Tensor, Tensor]:
    """Norm and rotate the heads of a projection, and write K, V and the index key into their pages, in place.

    Args:
        q: bf16 [T, H, D]. k, v, index_q: [T, G, D]. index_k: [T, D]. Views of one projection's output will do.
        table: cos and sin of `kernels.rope.rope_table`. position: int32 [T], -1 for padding.
        slots: int64 [T], page * 128 + place in the page, no two equal; -1 writes nothing.
        cache, index_cache: pages (see the module), each of a format of its own.
    Returns:
        (q [T, H, D], index_q [T, G, D]) in bf16, normed and rotated.
    """
    if _kernels_take(q, BLOCK):
        from . import triton_msa

        return triton_msa.kv_insert(q, k, v, index_q, index_k, norms, table, position, slots, cache, index_cache)
    cos, sin = (t[position.clamp_min(0).long()] for t in table)

    def turned(x: Tensor, weight: Tensor) -> Tensor:
        return apply_rope(gemma_rms_norm(x, weight, norms.eps), cos, sin)

    written = slots >= 0
    k, index_k = turned(k, norms.k)[written], turned(index_k[:, None], norms.index_k)[written]
    v, slots = v[written], slots[written]
    if cache.dtype == torch.uint8:
        kv.write_pages(cache, slots, k, v)
    else:
        _put(cache, torch.cat((k, v), -1), slots)
    if index_cache.dtype == torch.uint8:
        kv.write_index_pages(index_cache, slots, index_k[:, 0])
    else:
        _put(index_cache[:, None], index_k, slots)
    return turned(q, norms.q), turned(index_q, norms.index_q)


def _put(pages: Tensor, rows: Tensor, slots: Tensor) -> None:
    """`rows` [T, heads, E] into `pages` [pages, heads, 128, E], E4M3 saturating."""
    if pages.dtype == torch.float8_e4m3fn:
        pages, rows = pages.view(torch.uint8), kv.round_e4m3(rows).to(torch.float8_e4m3fn).view(torch.uint8)
    pages[slots // BLOCK, :, slots % BLOCK] = rows.to(pages.dtype)


def _kernels_take(q: Tensor, block: int) -> bool:
    return fast_path(q) and q.shape[-1] == DIM and block == BLOCK and torch.cuda.get_device_capability(q.device) >= (9, 0)


def _requests(batch: Batch) -> list[tuple[int, slice, Tensor]]:
    """(request, its token rows, their positions) of every request that has a token which is no padding."""
    start = batch.start.tolist()
    rows = [(r, slice(a, b)) for r, (a, b) in enumerate(itertools.pairwise(start)) if b > a]
    return [(r, part, batch.position[part]) for r, part in rows if int(batch.position[part].max()) >= 0]


def _slots(pages: Pages, request: int, length: int) -> Tensor:
    """Slot (page * 128 + place) of the keys at positions 0 to `length` - 1."""
    position = torch.arange(length, device=pages.table.device)
    return pages.table[request].long()[position // BLOCK] * BLOCK + position % BLOCK


def _index_keys(keys: Pages | Packed, request: int, length: int, dim: int, rounded: bool = False) -> Tensor:
    """fp32 [length, D]."""
    if isinstance(keys, Packed):
        start = int(keys.start[request])
        return keys.keys[start : start + length].float()
    slots = _slots(keys, request, length)
    if keys.data.dtype == torch.uint8:
        return kv.read_index_pages(keys.data, slots, dim, rounded=rounded)
    return _pick(keys.data.reshape(-1, dim), slots)


def _keys_values(cache: Pages | Packed, request: int, length: int, groups: int, dim: int, rounded: bool = False) -> tuple[Tensor, Tensor]:
    """fp32 K and V [length, G, D]."""
    if isinstance(cache, Packed):
        start = int(cache.start[request])
        return cache.keys[start : start + length].float(), cache.values[start : start + length].float()
    slots = _slots(cache, request, length)
    if cache.data.dtype == torch.uint8:
        return kv.read_pages(cache.data, slots, dim, rounded=rounded)
    places = slots[:, None] // BLOCK * groups + torch.arange(groups, device=slots.device)
    both = _pick(cache.data.reshape(-1, 2 * dim), places * BLOCK + slots[:, None] % BLOCK)  # [length, G, 2 D]
    return both[..., :dim], both[..., dim:]


def _pick(rows: Tensor, at: Tensor) -> Tensor:
    """fp32 rows; E4M3 as bytes, which can be indexed on every device."""
    return rows.view(torch.uint8)[at].view(rows.dtype).float() if rows.dtype == torch.float8_e4m3fn else rows[at].float()


def default_scale(dim: int = DIM) -> float:
    """MiniMax-M3's softmax scale."""
    return 1 / math.sqrt(dim)

"""Attention as an engine and a trainer call it: `kv_insert`, `rotate_heads`, `index_topk`, `sparse_attention`, `dense_attention`.

On CUDA (compute capability 9.0 or newer, head dimension 128, blocks of 128, at most 16 query heads a group) they are the Triton kernels;
elsewhere the torch reference of `kernels.msa`, request by request. A kernel's result depends on its own query and its own keys alone:
it is bitwise the same alone or in any batch, as one token or one of many, from pages or from packed tensors of the same values.

**Batch.** T query tokens of R requests, the tokens of a request consecutive. Each has its position; the keys at positions 0 to its own
are the request's cache, or, in training, the packed tokens themselves. Chunked prefill, decode with several tokens and training are all so.

**Pages.** A cache is told by its tensor: uint8 are NVFP4 pages (`quant.kv`), bf16 or E4M3 (scale 1) are pages [pages, G, 128, 2 D], K then
V along the last dimension, and [pages, 128, D] for index keys, as vLLM lays out MiniMax-M3's. Pages may lie any distance apart, so that
both caches can be views of one buffer whose pages hold a layer's main KV and then its index keys; inside a page all is contiguous.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samebits.quant import kv
from samebits.quant.blocks import fast_path

from . import msa
from .linear import LoRA, lora_linear
from .linear_tiles import MXFP8Tiles
from .msa import SparseConfig
from .norm import gemma_rms_norm
from .rope import apply_rope

DIM, BLOCK, HEADS_A_GROUP = 128, 128, 16
FORMS = ("nvfp4", "fp8", "bf16")  # of a cache, see the module


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
        q: bf16 [T, H, D]. chosen: int32 [T, G, topk] from `index_topk` (or replayed): block ids, ascending, -1 only after them.
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


def dense_attention(q: Tensor, cache: Pages | Packed, batch: Batch, scale: float, rounded: bool = False) -> Tensor:
    """Causal attention of every query to all keys of its request up to its own: MiniMax-M3's first layers, which choose nothing.

    Args:
        q: bf16 [T, H, D]; H a multiple of the cache's KV heads. rounded: as in `sparse_attention`.
    Returns:
        [T, H, D] in q's dtype. Differentiable in q and the packed keys and values; then every token must be a query.
    """
    groups = _groups(cache)
    if _kernels_take(q, BLOCK) and q.shape[1] // groups <= HEADS_A_GROUP:
        from . import triton_msa_dense_ops

        return triton_msa_dense_ops.dense_attention(q, cache, batch, scale, rounded)
    out = torch.zeros_like(q)
    for r, rows, q_pos in _requests(batch):
        k, v = _keys_values(cache, r, int(q_pos.max()) + 1, groups, q.shape[2], rounded)
        out[rows] = msa.attend(q[None, rows], k[None], v[None], q_pos[None].long(), scale)[0]
    return out


class Norms(NamedTuple):
    """Per-head Gemma norm weights [D] of one layer, and their epsilon; a layer without an indexer has None for its two."""

    q: Tensor
    k: Tensor
    index_q: Tensor | None
    index_k: Tensor | None
    eps: float


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
    """Norm and rotate the heads of a projection, and write K, V and the index key into their pages, in place.

    Args:
        q: bf16 [T, H, D]. k, v: [T, G, D]. index_q: [T, G, D], or of more groups where G are one rank's. index_k: [T, D]. Views of one
            projection's output will do.
        norms: of the layer. A layer without an indexer has None there and for `index_q`, `index_k` and `index_cache`.
        table: cos and sin of `kernels.rope.rope_table`. position: int32 [T], -1 for padding.
        slots: int64 [T], page * 128 + place in the page, no two equal; -1 writes nothing.
        cache, index_cache: pages (see the module), each of a format of its own.
    Returns:
        (q [T, H, D], index_q [T, G, D] or None) in bf16, normed and rotated.
    Raises `ValueError` when there are index heads without index pages or the other way round.
    """
    if len({x is None for x in (index_q, index_k, norms.index_q, norms.index_k, index_cache)}) > 1:
        raise ValueError("an indexer needs index_q, index_k, their norms and index pages; a layer without one has none of them")
    if _rows_take(q, table) and q.shape[-1] == DIM:
        from . import triton_msa

        return triton_msa.kv_insert(q, k, v, index_q, index_k, norms, table, position, slots, cache, index_cache)
    turned = _turning(norms.eps, table, position)
    written = slots >= 0
    at, k, v = slots[written], turned(k, norms.k)[written], v[written]
    if cache.dtype == torch.uint8:
        kv.write_pages(cache, at, k, v)
    else:
        _put(cache, torch.cat((k, v), -1), at)
    if index_q is None:
        return turned(q, norms.q), None
    index_k = turned(index_k[:, None], norms.index_k)[written]
    if index_cache.dtype == torch.uint8:
        kv.write_index_pages(index_cache, at, index_k[:, 0])
    else:
        _put(index_cache[:, None], index_k, at)
    return turned(q, norms.q), turned(index_q, norms.index_q)


class HeadLoRA(NamedTuple):
    """Adapters of the three projections that have one."""

    q: LoRA | None
    k: LoRA | None
    v: LoRA | None


def project_insert(
    x: Tensor,
    weight: MXFP8Tiles,
    loras: HeadLoRA | None,
    adapter_ids: Tensor | None,
    norms: Norms,
    table: tuple[Tensor, Tensor],
    position: Tensor,
    slots: Tensor,
    cache: Tensor,
    index_cache: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """`lora_linear` of all heads and `kv_insert`, in one launch on CUDA in bf16, with the bits of the two.

    Args:
        x: [T, K]. weight: rows of queries, K, V, index queries and index key one after the other, of D = 128; without `index_cache` those
            of queries, K and V. loras: of q, k and v, of one rank. adapter_ids: as in `lora_linear`.
        norms, table, position, slots, cache, index_cache: as in `kv_insert`.
    Returns:
        (q [T, H, D], index_q [T, G, D] or None), normed and rotated.
    Raises `ValueError` when the weight's rows are not those of whole heads.
    """
    groups = cache.shape[1] // 2 if cache.dtype == torch.uint8 else cache.shape[1]
    count, rest = divmod(weight.codes.shape[1], DIM)
    heads = count - (3 * groups + 1 if index_cache is not None else 2 * groups)
    if rest or heads <= 0:
        raise ValueError(f"a projection of {weight.codes.shape[1]} rows does not fit {groups} KV heads of {DIM}")
    rest = (norms, table, position, slots, cache, index_cache)
    if _rows_take(x, table):
        from . import triton_msa_project

        return triton_msa_project.project_insert(x, weight, loras, adapter_ids, *rest, (heads, groups))
    return _project_apart(x, weight, loras, adapter_ids, *rest, (heads, groups))


def _project_apart(
    x: Tensor, weight: MXFP8Tiles, loras: HeadLoRA | None, adapter_ids: Tensor | None, norms: Norms, *rest: Any
) -> tuple[Tensor, Tensor | None]:
    """The parts of `project_insert` one after the other; `rest` ends with (query heads, groups)."""
    *rest, (heads, groups) = rest
    parts, first = [], 0
    for n, lora in itertools.zip_longest([heads, groups, groups] + ([groups, 1] if rest[-1] is not None else []), loras or ()):
        rows = slice(first * DIM, (first + n) * DIM)
        part = MXFP8Tiles(weight.codes[:, rows].contiguous(), weight.scales[:, rows].contiguous(), weight.inputs)
        parts.append(lora_linear(x, part, lora, adapter_ids if lora else None).unflatten(-1, (n, DIM)))
        first += n
    q, k, v, index_q, index_k = (*parts, None, None)[:5]
    return kv_insert(q, k, v, index_q, None if index_k is None else index_k[:, 0], norms, *rest)


def rotate_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index_q: Tensor | None,
    index_k: Tensor | None,
    norms: Norms,
    table: tuple[Tensor, Tensor],
    position: Tensor,
    form: str | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """`kv_insert` for training: heads normed and rotated, and K, V and the index key as a cache of `form` gives them back.

    On CUDA in bf16 the row functions are those of `kv_insert`'s kernel, so that the bits are what an engine reads from its pages.

    Args:
        q: [T, H, D]. k, v, index_q: [T, G, D]. index_k: [T, D]. Views of one projection's output will do; the index pair may be None.
        norms, table, position: as in `kv_insert`.
        form: "nvfp4", "fp8" (E4M3, scale 1), "bf16" or None: K and V stay as they are.
    Returns:
        (q, k, v, index_q, index_k), shapes and dtype as given. Differentiable in q, k and v; a cache's rounding passes gradients
        straight through, norm weights are frozen, and the choice that the index pair is for passes none.
    Raises `ValueError` for another `form`.
    """
    if form not in (None, *FORMS):
        raise ValueError(f"cache form must be one of {', '.join(FORMS)} or None, got {form!r}")
    if _rows_take(q, table) and q.shape[-1] == DIM:
        from . import triton_msa_rotate

        return triton_msa_rotate.rotate_heads(q, k, v, index_q, index_k, norms, table, position, form)
    turned = _turning(norms.eps, table, position)
    cached = {"nvfp4": kv.round_trip, "fp8": _Fp8.apply}.get(form, lambda x: x)
    q, k, v = turned(q, norms.q), cached(turned(k, norms.k)), cached(v)
    if index_q is None:
        return q, k, v, None, None
    with torch.no_grad():
        index_k = cached(turned(index_k[:, None], norms.index_k))[:, 0]
        return q, k, v, turned(index_q, norms.index_q), index_k


def _turning(eps: float, table: tuple[Tensor, Tensor], position: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Norm and rotation of heads [T, heads, D] with a norm weight [D], which is frozen."""
    cos, sin = (t[position.clamp_min(0).long()] for t in table)
    return lambda x, weight: apply_rope(gemma_rms_norm(x, weight.detach(), eps), cos, sin)


def as_e4m3(x: Tensor) -> Tensor:
    """`x` as E4M3 and back (`quant.kv.round_e4m3`), with a straight-through gradient: a re-rounded read for training, and its query."""
    return _Fp8.apply(x)


class _Fp8(torch.autograd.Function):
    """What an E4M3 cache gives back, with a straight-through gradient."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return kv.round_e4m3(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad


def _put(pages: Tensor, rows: Tensor, slots: Tensor) -> None:
    """`rows` [T, heads, E] into `pages` [pages, heads, 128, E], E4M3 saturating."""
    if pages.dtype == torch.float8_e4m3fn:
        pages, rows = pages.view(torch.uint8), kv.round_e4m3(rows).to(torch.float8_e4m3fn).view(torch.uint8)
    pages[slots // BLOCK, :, slots % BLOCK] = rows.to(pages.dtype)


def _kernels_take(q: Tensor, block: int) -> bool:
    return fast_path(q) and q.shape[-1] == DIM and block == BLOCK and torch.cuda.get_device_capability(q.device) >= (9, 0)


def _rows_take(x: Tensor, table: tuple[Tensor, Tensor]) -> bool:
    """Whether kernels take rows of heads: in bf16, with 64 or all 128 elements of a head rotated."""
    return (
        fast_path(x)
        and x.dtype is torch.bfloat16
        and 2 * table[0].shape[1] in (64, 128)
        and torch.cuda.get_device_capability(x.device) >= (9, 0)
    )


def _requests(batch: Batch) -> list[tuple[int, slice, Tensor]]:
    """(request, its token rows, their positions) of every request that has a token which is no padding."""
    start = batch.start.tolist()
    rows = [(r, slice(a, b)) for r, (a, b) in enumerate(itertools.pairwise(start)) if b > a]
    return [(r, part, batch.position[part]) for r, part in rows if int(batch.position[part].max()) >= 0]


def _slots(pages: Pages, request: int, length: int) -> Tensor:
    """Slot (page * 128 + place) of the keys at positions 0 to `length` - 1."""
    position = torch.arange(length, device=pages.table.device)
    return pages.table[request].long()[position // BLOCK] * BLOCK + position % BLOCK


def _groups(cache: Pages | Packed) -> int:
    """KV heads. NVFP4 pages have a plane of K and one of V for each."""
    if isinstance(cache, Packed):
        return cache.keys.shape[1]
    return cache.data.shape[1] // 2 if cache.data.dtype == torch.uint8 else cache.data.shape[1]


def _index_keys(keys: Pages | Packed, request: int, length: int, dim: int, rounded: bool = False) -> Tensor:
    """fp32 [length, D]."""
    if isinstance(keys, Packed):
        start = int(keys.start[request])
        return keys.keys[start : start + length].float()
    slots = _slots(keys, request, length)
    if keys.data.dtype == torch.uint8:
        return kv.read_index_pages(keys.data, slots, dim, rounded=rounded)
    return _pick(keys.data, slots // BLOCK, slots % BLOCK)


def _keys_values(cache: Pages | Packed, request: int, length: int, groups: int, dim: int, rounded: bool = False) -> tuple[Tensor, Tensor]:
    """fp32 K and V [length, G, D]."""
    if isinstance(cache, Packed):
        start = int(cache.start[request])
        return cache.keys[start : start + length].float(), cache.values[start : start + length].float()
    slots = _slots(cache, request, length)
    if cache.data.dtype == torch.uint8:
        return kv.read_pages(cache.data, slots, dim, rounded=rounded)
    group = torch.arange(groups, device=slots.device)
    both = _pick(cache.data, slots[:, None] // BLOCK, group, slots[:, None] % BLOCK)  # [length, G, 2 D]
    return both[..., :dim], both[..., dim:]


def _pick(rows: Tensor, *at: Tensor) -> Tensor:
    """fp32 rows; E4M3 as bytes, which can be indexed on every device."""
    return rows.view(torch.uint8)[at].view(rows.dtype).float() if rows.dtype == torch.float8_e4m3fn else rows[at].float()


def default_scale(dim: int = DIM) -> float:
    """MiniMax-M3's softmax scale."""
    return 1 / math.sqrt(dim)

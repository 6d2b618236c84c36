"""Launches of dense attention: which kernel takes which requests, and how much is held between them.

Over pages, requests of at most 4 query tokens go chunk by chunk (`split_kernel`), as many requests a launch as the parts of their chunks
have room for; others take `prefill_kernel`. Over packed keys, which are training's, all do. Grids depend on shapes and `batch.most` alone.
"""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from .msa_ops import DIM, Batch, Packed, Pages
from .triton_msa import FORMATS
from .triton_msa_dense import merge_kernel, prefill_kernel, split_kernel
from .triton_msa_dense_backward import PackedDense

# Keys of a chunk and of a tile are part of the arithmetic; the rest is not.
CHUNK, KEYS = 512, 64
SMALL = 4  # query tokens of a request that goes chunk by chunk, at most
TOKENS = 8  # query tokens of a prefill program
PARTS = 1 << 28  # bytes of chunks' results held at a time
ROWS = 4  # heads of a merging program
STAGES = {0: 3, 1: 1, 2: 1}  # of the pipeline, by format: codes are prefetched into registers
SPLIT_STAGES = {0: 2, 1: 1, 2: 1}


def dense_attention(q: Tensor, cache: Pages | Packed, batch: Batch, scale: float, rounded: bool = False) -> Tensor:
    """`msa_ops.dense_attention` on CUDA."""
    if isinstance(cache, Packed) and torch.is_grad_enabled() and any(t.requires_grad for t in (q, cache.keys, cache.values)):
        if q.shape[0] != cache.keys.shape[0]:
            raise ValueError("gradients need every token of the packed keys to be a query")
        return PackedDense.apply(q, cache.keys, cache.values, lambda: attend(q.detach(), cache, batch, scale, lse=True), batch, scale)
    return attend(q, cache, batch, scale, rounded=rounded)[0]


def attend(
    q: Tensor, cache: Pages | Packed, batch: Batch, scale: float, lse: bool = False, rounded: bool = False
) -> tuple[Tensor, Tensor | None]:
    """(output [T, H, D], fp32 [T, H] log2 of the softmax's sum over scores in powers of two, where `lse`, over packed keys only)."""
    tokens, heads, _ = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    sums = torch.empty(tokens, heads, dtype=torch.float32, device=q.device) if lse else None
    if not q.numel():
        return out, sums
    paged = isinstance(cache, Pages)
    small = min(SMALL, triton.next_power_of_2(batch.most)) if paged else 0
    with torch.cuda.device(q.device) if q.is_cuda else torch.no_grad():
        if paged:
            _split(q.contiguous(), cache, batch, scale, out, small, rounded)
        if batch.most > small:
            _prefill(q.contiguous(), cache, batch, scale, out, sums, small, rounded)
    return out, sums


def _split(q: Tensor, cache: Pages, batch: Batch, scale: float, out: Tensor, small: int, rounded: bool) -> None:
    keys, values, strides, groups, form = layout(cache)
    heads = q.shape[1] // groups
    requests, chunks = batch.start.numel() - 1, max(1, triton.cdiv(cache.table.shape[1] * 128, CHUNK))
    each = chunks * groups * small * 16
    step = max(1, min(requests, PARTS // (each * DIM * 4), 65535))
    part = torch.empty(step * each, DIM, dtype=torch.float32, device=q.device)
    top, total = (torch.empty(step * each, dtype=torch.float32, device=q.device) for _ in range(2))
    sizes = {"G": groups, "HEADS": heads, "TOKENS": small, "CHUNK": CHUNK, "enable_fp_fusion": False}
    for first in range(0, requests, step):
        count = min(step, requests - first)
        split_kernel[(chunks, groups, count)](
            q,
            keys,
            values,
            cache.table,
            batch.start,
            batch.position,
            part,
            top,
            total,
            *strides,
            cache.table.stride(0),
            factor(scale, form),
            first,
            KEYS=KEYS,
            FORMAT=form,
            ROUNDED=rounded and form == 2,
            STAGES=SPLIT_STAGES[form],
            num_warps=4,
            **sizes,
        )
        # One more at the end, for padding behind all requests.
        slots = count + (first + count == requests)
        merge_kernel[(slots * small, groups, triton.cdiv(heads, ROWS))](
            part,
            top,
            total,
            batch.start,
            batch.position,
            out,
            first,
            count,
            requests,
            q.shape[0],
            chunks,
            ROWS=ROWS,
            num_warps=1,
            **sizes,
        )


def _prefill(
    q: Tensor, cache: Pages | Packed, batch: Batch, scale: float, out: Tensor, lse: Tensor | None, small: int, rounded: bool
) -> None:
    keys, values, strides, groups, form = layout(cache)
    paged = isinstance(cache, Pages)
    table = cache.table if paged else cache.start
    requests = batch.start.numel() - 1
    prefill_kernel[((q.shape[0] // TOKENS + requests) * groups,)](
        q,
        keys,
        values,
        table,
        batch.start,
        batch.position,
        out,
        lse,
        *strides,
        table.stride(0) if paged else 0,
        factor(scale, form),
        requests,
        small,
        G=groups,
        HEADS=q.shape[1] // groups,
        TOKENS=TOKENS,
        CHUNK=CHUNK,
        KEYS=KEYS,
        LSE=lse is not None,
        FORMAT=form,
        ROUNDED=rounded and form == 2,
        PAGED=paged,
        STAGES=STAGES[form],
        num_warps=TOKENS,
        num_stages=STAGES[form],
        enable_fp_fusion=False,
    )


def factor(scale: float, form: int) -> float:
    """What turns a product with a tile of the format into a power of two."""
    return scale * math.log2(math.e) * (128.0 if form == 2 else 1.0)


def layout(cache: Pages | Packed) -> tuple[Tensor, Tensor, tuple[int, int, int], int, int]:
    """(keys, values, (page, token, head) strides, KV heads, format); E4M3 as bytes, of which kernels read the bits."""
    if isinstance(cache, Packed):
        k, v = cache.keys, cache.values
        if k.stride() != v.stride() or k.stride(2) != 1:
            k, v = k.contiguous(), v.contiguous()
        return k, v, (0, k.stride(0), k.stride(1)), k.shape[1], FORMATS[k.dtype]
    data = cache.data
    form = FORMATS[data.dtype]
    if form == 2:
        return data, data[:, 1:], (data.stride(0), 0, 2 * data.stride(1)), data.shape[1] // 2, form
    data = data.view(torch.uint8) if form == 1 else data
    return data, data[..., DIM:], (data.stride(0), data.stride(2), data.stride(1)), data.shape[1], form

"""Faults in the engine's attention: what it writes into its cache, which blocks it chooses, and what it attends to.

The engine attends in torch over rows (`rollout.paged`) or by kernels over pages (`rollout.pages`); a fault goes into the one that is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from samebits.alignment_checks.pair import Pair
from samebits.alignment_checks.report import Place
from samebits.kernels.msa import attend
from samebits.kernels.msa_ops import Batch
from samebits.rollout import paged, pages

from .base import engine_layer, fault, layers, on_pages, replaced
from .engine import OPERATIONS


@fault("engine", "routing.blocks")
def block_choice_not_causal(pair: Pair) -> Iterator[Place]:
    """The indexer scores blocks that lie after the query."""
    place = Place(layer=layers(pair)[1])
    if on_pages(pair):
        by_kernels = pages.index_topk

        def ahead_in_pages(index_q: Tensor, keys: Any, batch: Batch, config: Any, **options: Any) -> Tensor:
            last = batch.position[batch.start[1:].long().sub(1).clamp_min(0)][batch.request.long()]
            return by_kernels(index_q, keys, batch._replace(position=torch.where(batch.position >= 0, last, -1)), config, **options)

        with replaced(pages, "index_topk", ahead_in_pages):
            yield place
        return
    original = paged.select_blocks

    def ahead(index_q: Tensor, index_k: Tensor, q_pos: Tensor, config: Any) -> Tensor:
        last = q_pos.amax(-1, keepdim=True).expand_as(q_pos)
        return original(index_q, index_k, torch.where(q_pos >= 0, last, q_pos), config)

    with replaced(paged, "select_blocks", ahead):
        yield place


@contextmanager
def _sparse(pair: Pair, layer: int, **change: int) -> Iterator[None]:
    cache = engine_layer(pair, layer).self_attn.attn
    with replaced(cache, "sparse", cache.sparse._replace(**change)):
        yield


@fault("engine", "routing.blocks")
def local_block_missing(pair: Pair) -> Iterator[Place]:
    """A query's own block is not forced into its choice."""
    layer = layers(pair)[2]
    with _sparse(pair, layer, local_blocks=0):
        yield Place(layer=layer)


@fault("engine", "routing.blocks")
def fewer_blocks(pair: Pair) -> Iterator[Place]:
    """One layer reads half of the blocks of the model's top-k."""
    layer = layers(pair)[1]
    with _sparse(pair, layer, topk=pair.trainer.dims.sparse.topk // 2):
        yield Place(layer=layer)


@contextmanager
def _written(pair: Pair, layer: int, change: Callable[[list[Tensor]], list[Tensor]], k_norm: float = 1.0) -> Iterator[None]:
    """A layer writes `change` of [k, v, index_k] into its cache (where there are index keys), keys `k_norm` times as large."""
    cache = engine_layer(pair, layer).self_attn.attn
    if not isinstance(cache, pages.PageCache):
        original = cache._write

        def write(slots: Tensor, k: Tensor, *rest: Tensor) -> None:
            original(slots, *change([k * k_norm if k_norm != 1 else k, *rest]))

        with replaced(cache, "_write", write):
            yield
        return
    by_kernels = pages.kv_insert

    def insert(q, k, v, index_q, index_k, norms, table, position, slots, main, index):  # type: ignore[no-untyped-def]
        if main is cache.main:
            k, v, *rest = change([k, v] if index_k is None else [k, v, index_k])
            index_k = rest[0] if rest else None
            # Keys are normed by the same kernel that writes them: (1 + w) is their size.
            norms = norms._replace(k=((1 + norms.k.float()) * k_norm - 1).to(norms.k.dtype))
        return by_kernels(q, k, v, index_q, index_k, norms, table, position, slots, main, index)

    with replaced(pages, "kv_insert", insert):
        yield


@fault("engine", "routing.blocks")
def index_keys_lost(pair: Pair) -> Iterator[Place]:
    """Index keys are not written into the cache, the third lane of a page."""
    layer = layers(pair)[2]
    with _written(pair, layer, lambda parts: [*parts[:2], torch.ones_like(parts[2])]):
        yield Place(layer=layer)


@fault("engine", *OPERATIONS)
def kv_scale_wrong(pair: Pair) -> Iterator[Place]:
    """Keys of one layer enter the cache under another scale than they are read with."""
    layer = layers(pair)[1]
    with _written(pair, layer, lambda parts: parts, k_norm=1.25):
        yield Place(layer=layer, tensor=f"model.layers.{layer}.self_attn.k")


@fault("engine", *OPERATIONS)
def kv_rounded_to_fp8(pair: Pair) -> Iterator[Place]:
    """The engine keeps values in an FP8 cache, the trainer does not."""
    layer = layers(pair)[0]
    with _written(pair, layer, lambda parts: [parts[0], parts[1].to(torch.float8_e4m3fn).to(parts[1].dtype), *parts[2:]]):
        yield Place(layer=layer, tensor=f"model.layers.{layer}.self_attn.v")


@contextmanager
def _batches(change: Callable[[Batch], Batch]) -> Iterator[None]:
    """Attention over pages sees `change` of its batch."""
    with ExitStack() as stack:
        for name in ("sparse_attention", "dense_attention"):
            original = getattr(pages, name)

            def other(q: Tensor, cache: Any, *rest: Any, original=original, **options: Any) -> Tensor:
                *chosen, batch, scale = rest
                return original(q, cache, *chosen, change(batch), scale, **options)

            stack.enter_context(replaced(pages, name, other))
        yield


@fault("engine", *OPERATIONS)
def last_key_masked(pair: Pair) -> Iterator[Place]:
    """Attention leaves out the newest key: the tail's mask is one short."""
    place = Place(layer=0, tensor="model.layers.0.self_attn.attention")
    if on_pages(pair):
        with _batches(lambda b: b._replace(position=torch.where(b.position > 0, b.position - 1, b.position))):
            yield place
        return
    original = paged.attend

    def short(q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, *rest: Any, **options: Any) -> Tensor:
        return original(q, k, v, torch.where(q_pos > 0, q_pos - 1, q_pos), *rest, **options)

    with replaced(paged, "attend", short):
        yield place


@fault("engine", *OPERATIONS)
def attention_scale_wrong(pair: Pair) -> Iterator[Place]:
    """Attention scores are scaled by the hidden size instead of the head size."""
    layer = layers(pair)[0]
    cache = engine_layer(pair, layer).self_attn.attn
    with replaced(cache, "scale", cache.scale * 0.9):
        yield Place(layer=layer, tensor=f"model.layers.{layer}.self_attn.attention")


@fault("engine", "logprobs.variants")
def chunk_forgets_prefix(pair: Pair) -> Iterator[Place]:
    """A prefill that continues a prefix, cached or of an earlier chunk, does not attend to it."""
    if on_pages(pair):
        with replaced(pages, "sparse_attention", _forgetting(pages.sparse_attention)):
            yield Place()
        return
    original = paged.PagedCache.forward

    def forward(self, q: Tensor, *rest: Any) -> Tensor:
        with replaced(paged, "attend", _without_prefix):
            return original(self, q, *rest)

    def _without_prefix(q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, *rest: Any, **options: Any) -> Tensor:
        first = q_pos.masked_fill(q_pos < 0, 1 << 30).amin(-1)
        if q.shape[1] == 1 or int(first.max()) == 0:
            return attend(q, k, v, q_pos, *rest, **options)
        # Keys before the first query become those at it: what is left is attention within the chunk.
        keys = torch.maximum(torch.arange(k.shape[1], device=q.device), first[:, None]).clamp_max(k.shape[1] - 1)
        pick = keys[:, :, None, None].expand(-1, -1, *k.shape[2:])
        return attend(q, k.gather(1, pick), v.gather(1, pick), q_pos, *rest, **options)

    with replaced(paged.PagedCache, "forward", forward):
        yield Place()


def _forgetting(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Sparse attention over pages in which a chunk of several tokens sees no block that lies before the one it begins in."""

    def attention(q: Tensor, cache: Any, chosen: Tensor, batch: Batch, scale: float, **options: Any) -> Tensor:
        start = batch.start.long()
        first = batch.position[start[:-1].clamp_max(len(batch.position) - 1)].clamp_min(0) // paged.PAGE
        first = torch.where(start.diff() > 1, first, 0)[batch.request.long()]
        kept = chosen.masked_fill(chosen < first[:, None, None], 1 << 30).sort(-1).values
        return original(q, cache, kept.masked_fill(kept == 1 << 30, -1).to(chosen.dtype), batch, scale, **options)

    return attention

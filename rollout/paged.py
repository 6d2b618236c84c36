"""Paged attention of the engine in torch, for any device and dtype: cache layout, batching of a step, and attention by `kernels.msa`.

On CUDA in bf16 `pages` takes its place.

**Cache.** A page holds 128 tokens; a token's row in it is [K of each KV head | V of each KV head | index key]. The index key lies in
the row of its token, so that whatever moves a page moves all three. Elements are in the compute dtype, or each head's vector is a
row of `quant.kv` bytes (72 for a head of 128). Dense layers keep an unused index area, so that all layers share one layout, one
block table and one metadata build.

**Batch.** vLLM hands over packed tokens of sequences of different lengths. `plan` sorts the sequences into buckets of similar query
and context length (each at most 1.5 times padded), so that a decode step of hundreds of sequences is one or two padded calls, and
reads exactly the tokens of the longest context in a bucket, not its pages. A padded key points at the first key of its own sequence:
it is masked, and it is finite.

**Arithmetic.** `kernels.msa`. While a context has no more blocks than the top-k, every block is
chosen and no index score is computed; the choice is then simply all blocks. Where several ranks hold all index keys, each scores its
blocks of a bucket (`index_split`). Where the profile reads the cache as E4M3, the queries that meet it are rounded to E4M3 too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImplBase,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheLayout, KVCacheSpec

from samebits.kernels.index_parallel import Ranks, own_keys, split_select_blocks
from samebits.kernels.msa import SparseConfig, all_blocks, attend, select_blocks
from samebits.kernels.taps import recording, tap
from samebits.quant import kv

from .group import ALONE, Group
from .index_split import ranks_of
from .settings import PAGE, EngineSettings

_SMALLEST_CLASS = 64  # contexts below this length share a bucket
_GROWTH = 1.5  # ratio of the longest to the shortest length in a bucket
_SCORES = 1 << 25  # largest number of attention scores of one call (128 MB)


@dataclass
class Bucket:
    """Queries that are attended in one padded call of R sequences."""

    query: Tensor | None
    """int64 [R, Q] row in the packed batch, of the first query at padding; None: one query a sequence, all tokens, in order."""
    q_pos: Tensor
    """int64 [R, Q] absolute position, -1 at padding."""
    keys: Tensor
    """int64 [R, K] row in the flattened cache of the key at each position."""


@dataclass
class StepPlan(AttentionMetadata):
    """One step, for all layers."""

    slots: Tensor
    """int64 [T] row in the flattened cache to which each token is written."""
    buckets: list[Bucket]
    ranks: Ranks | None = None
    """Those that share the indexer's work."""


class PlanBuilder(AttentionMetadataBuilder[StepPlan]):
    """Builds the plan of a step from vLLM's common metadata."""

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
        group: GroupCoordinator | None = None,
    ) -> None:
        """`group`: ranks of the replica; None: vLLM's tensor-parallel group."""
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        config = vllm_config.model_config.hf_text_config
        self.heads = config.num_attention_heads
        self.ranks = ranks_of(vllm_config, sparse_config(config), group)

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False) -> StepPlan:
        """See `plan`."""
        m = common_attn_metadata
        lengths = m.seq_lens_cpu_upper_bound
        if lengths is None:
            raise RuntimeError("vLLM gave no sequence lengths on the host")
        n = m.num_reqs
        starts = m.query_start_loc_cpu[: n + 1].numpy().astype(np.int64)
        # A token of padding has slot -1: it goes to vLLM's null block, which no sequence reads.
        slots = m.slot_mapping[: m.num_actual_tokens].long().clamp_min(0)
        buckets = plan(starts, lengths[:n].numpy().astype(np.int64), m.block_table_tensor[:n], self.heads)
        return StepPlan(slots, buckets, self.ranks)


def plan(starts: np.ndarray, lengths: np.ndarray, block_table: Tensor, heads: int) -> list[Bucket]:
    """Buckets of a step.

    Args:
        starts: int64 [R + 1], where each sequence's queries start in the packed batch. lengths: int64 [R] context lengths, queries
            included. block_table: int [R, pages]. heads: query heads, for the size limit.
    """
    queries = np.diff(starts)
    live = np.flatnonzero(queries)
    if not len(live):
        return []

    def length_class(n: np.ndarray, smallest: int) -> np.ndarray:
        return np.ceil(np.log(np.maximum(n / smallest, 1)) / np.log(_GROWTH)).astype(np.int64)

    kind = length_class(queries[live], 1) * 1000 + length_class(lengths[live], _SMALLEST_CLASS)
    kinds, member = np.unique(kind, return_inverse=True)
    buckets = []
    for b in range(len(kinds)):
        rows = live[member == b]
        width, context = int(queries[rows].max()), int(lengths[rows].max())
        per_query = heads * context
        rows_each = max(1, _SCORES // (per_query * width))
        width_each = width if len(rows) > 1 or rows_each > 1 else max(1, min(width, _SCORES // per_query))
        for part in np.array_split(rows, -(-len(rows) // rows_each)):
            for at in range(0, width, width_each):
                buckets.append(_bucket(starts, lengths, block_table, part, at, min(at + width_each, width)))
    if len(buckets) == 1 and len(live) == len(queries) and int(queries.max()) == 1:
        buckets[0].query = None
    return buckets


def _bucket(starts: np.ndarray, lengths: np.ndarray, block_table: Tensor, rows: np.ndarray, first: int, last: int) -> Bucket:
    """Queries `first` to `last` (exclusive) of each sequence in `rows`."""
    device = block_table.device
    at = np.arange(first, last)
    queries = (starts[rows + 1] - starts[rows])[:, None]
    inside = at < queries
    context = lengths[rows][:, None]
    q_pos = np.where(inside, context - queries + at, -1)
    query = starts[rows][:, None] + np.where(inside, at, 0)
    keys = torch.arange(int(q_pos.max()) + 1, device=device)
    pages = block_table[torch.from_numpy(rows).to(device)].long()
    slot = pages[:, keys // PAGE] * PAGE + keys % PAGE
    slot = torch.where(keys < torch.from_numpy(context).to(device), slot, slot[:, :1])
    return Bucket(torch.from_numpy(query).to(device), torch.from_numpy(q_pos).to(device), slot)


class PagedBackend(AttentionBackend):
    """What vLLM asks of a backend; the layers call `kernels.msa` themselves."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float32]

    @staticmethod
    def get_name() -> str:
        """Name in vLLM's log."""
        return "SAMEBITS_PAGED"

    @staticmethod
    def get_impl_cls() -> type[AttentionImplBase]:
        """There is no implementation object: the layers are not vLLM `Attention` layers."""
        raise NotImplementedError("samebits attention layers have no separate implementation")

    @staticmethod
    def get_builder_cls() -> type[PlanBuilder]:
        """Builder of the step's plan."""
        return PlanBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int]:
        """One page is one block of sparse attention."""
        return [PAGE]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Layer outermost, so that the rows of a layer are one matrix."""
        return (KVCacheLayout.LBHNC,)


class PagedCache(nn.Module, AttentionLayerBase):
    """The cache of one layer, and attention over it."""

    own = slice(None)
    """This rank's KV heads among all."""

    def __init__(self, config: Any, settings: EngineSettings, sparse: bool, prefix: str, group: Group = ALONE) -> None:
        super().__init__()
        self.kv_heads, self.dim = config.num_key_value_heads // group.world, config.head_dim
        self.num_heads = config.num_attention_heads // group.world
        self.own = slice(group.rank * self.kv_heads, (group.rank + 1) * self.kv_heads)
        self.packed = settings.packed_kv
        self.scale = self.dim**-0.5
        self.sparse = sparse_config(config) if sparse else None
        self.dtype = get_current_vllm_config().model_config.dtype
        self.kv_cache = torch.tensor([])
        self.flat: Tensor | None = None  # [pages * 128 * vectors, width], one vector a row
        self.prefix = prefix
        self.rounded = settings.profile.rounded_reads
        context = get_current_vllm_config().compilation_config.static_forward_context
        if prefix in context:
            raise ValueError(f"layer {prefix} exists twice")
        context[prefix] = self

    rounded = False
    """Does attention read its NVFP4 rows as E4M3?"""

    @property
    def vectors(self) -> int:
        """Vectors in a row: K and V of each head, and the index key."""
        return 2 * self.kv_heads + 1

    @property
    def head_width(self) -> int:
        """Elements of one head's vector in a row: bytes where packed."""
        return kv.row_bytes(self.dim) if self.packed else self.dim

    def get_attn_backend(self) -> type[AttentionBackend]:
        """Same for all layers."""
        return PagedBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """Rows as one "head": K and the index key are its key part, V its value part."""
        return FullAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=1,
            head_size=(self.kv_heads + 1) * self.head_width,
            head_size_v=self.kv_heads * self.head_width,
            dtype=torch.uint8 if self.packed else self.dtype,
        )

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """`kv_cache` [pages, 1, 128, row]."""
        self.kv_cache = kv_cache
        self.flat = kv_cache.view(-1, self.head_width)

    def _write(self, slots: Tensor, *parts: Tensor) -> None:
        """Put vectors [T, heads, D] of tokens into their rows, in the order given."""
        vectors = torch.cat(parts, dim=1)
        vectors = kv.write(vectors) if self.packed else vectors
        self.flat.view(-1, self.vectors, self.head_width)[:, : vectors.shape[1]].index_put_((slots,), vectors)

    def _read(self, keys: Tensor, first: int, heads: int, rounded: bool = False) -> Tensor:
        """`heads` vectors from the `first` on of the rows `keys` [R, K]: [R, K, heads, D], stored as [R, heads, K, D].

        rounded: as attention reads them, where that is not as they are held.
        """
        index = keys[:, None] * self.vectors + torch.arange(first, first + heads, device=keys.device)[:, None]
        found = self.flat.index_select(0, index.flatten()).view(*index.shape, self.head_width)
        return (kv.read(found, self.dim, self.dtype, rounded) if self.packed else found).transpose(1, 2)

    def read_back(self, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the cache holds at rows `keys` [R, K]: K and V [R, K, G, D], index keys [R, K, 1, D]."""
        g = self.kv_heads
        return self._read(keys, 0, g), self._read(keys, g, g), self._read(keys, 2 * g, 1)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, index_q: Tensor | None = None, index_k: Tensor | None = None) -> Tensor:
        """Write the step's tokens and attend.

        Args:
            q: [T, H, D]. k, v: [T, G, D]. index_q: [T, all G, D], index_k: [T, 1, D] in sparse layers.
        Returns:
            [T, H, D]; zeros in vLLM's profiling runs, which have no cache.
        """
        out = torch.zeros_like(q)
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict):
            return out
        step: StepPlan = metadata[self.prefix]
        n, g = step.slots.shape[0], self.kv_heads
        self._write(step.slots, *(x[:n] for x in (k, v, index_k) if x is not None))
        layer = self.prefix.removesuffix(".attn")
        for name, first, heads in (("k", 0, g), ("v", g, g), ("index_k", 2 * g, 1)):
            if recording(f"{layer}.{name}") and (name != "index_k" or index_k is not None):
                tap(f"{layer}.{name}", self._read(step.slots[None], first, heads)[0])
        if self.rounded:
            q, index_q = kv.round_e4m3(q), None if index_q is None else kv.round_e4m3(index_q)
        chosen = None
        if self.sparse is not None and recording(f"{layer}.blocks"):
            chosen = torch.full((n, index_q.shape[1], self.sparse.topk), -1, dtype=torch.int32, device=q.device)
        for bucket in step.buckets:
            where = torch.arange(n, device=q.device)[:, None] if bucket.query is None else bucket.query
            queries = q[:n, None] if bucket.query is None else q[where]
            keys = bucket.keys
            blocks, block = None, PAGE
            if self.sparse is not None and keys.shape[1] > self.sparse.topk * self.sparse.block:
                index = index_q[:n, None] if bucket.query is None else index_q[where]
                blocks = self._choose(index, keys, bucket.q_pos, step.ranks)
                block = self.sparse.block
            if chosen is not None:
                self._note_choice(chosen, blocks, bucket, where)
            blocks = None if blocks is None else blocks[:, :, self.own]
            # K and V are gathered head by head, so that the products below read them where they are. They are finite: a padded
            # key is the first key of its own sequence.
            k_all, v_all = (self._read(keys, first, g, self.rounded) for first in (0, g))
            part = attend(queries, k_all, v_all, bucket.q_pos, self.scale, blocks, block, finite=True)
            if bucket.query is None:
                out[:n] = part[:, 0]
            else:
                inside = bucket.q_pos >= 0
                out[where[inside]] = part[inside]
        if chosen is not None:
            tap(f"{layer}.blocks", chosen)
        return out

    def _choose(self, index_q: Tensor, keys: Tensor, q_pos: Tensor, ranks: Ranks | None) -> Tensor:
        """Blocks of one bucket [R, Q, index heads, topk], whose keys lie in the rows `keys` [R, K]."""
        if ranks is None:
            return select_blocks(index_q, self._read(keys, 2 * self.kv_heads, 1, self.rounded).squeeze(2), q_pos, self.sparse)
        own = keys[:, own_keys(keys.shape[1], self.sparse.block, ranks.world, ranks.rank, keys.device)]
        return split_select_blocks(index_q, self._read(own, 2 * self.kv_heads, 1, self.rounded).squeeze(2), q_pos, self.sparse, ranks)

    def _note_choice(self, chosen: Tensor, blocks: Tensor | None, bucket: Bucket, where: Tensor) -> None:
        """Put a bucket's block choices into `chosen` [T, all G, topk], for a recorder."""
        if blocks is None:
            blocks = all_blocks(bucket.keys.shape[1], bucket.q_pos, self.sparse)[:, :, None].expand(-1, -1, chosen.shape[1], -1)
        inside = bucket.q_pos >= 0
        chosen[where[inside]] = blocks[inside]


def sparse_config(config: Any) -> SparseConfig:
    """Block choice of the model's sparse layers."""
    c = config.sparse_attention_config
    return SparseConfig(c["sparse_block_size"], c["sparse_topk_blocks"], c.get("sparse_init_block", 0), c.get("sparse_local_block", 1))

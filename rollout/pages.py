"""Paged attention of the engine on the kernels of `kernels.msa_ops`: CUDA, bf16 activations, heads of 128.

**Cache.** vLLM allocates what `attention.PagedCache` asks for on every device; here a page of 128 tokens is read as K and V of its heads,
in the layout of `msa_ops.Pages` (NVFP4 slots as `quant.kv` has them, or [heads, 128, K then V]), and behind them the 128 index keys. So
whatever moves a page moves all three, and a token costs 72 bytes a vector in NVFP4, 256 in bf16.

**Step.** What a step needs beside vLLM's own buffers is which request each token belongs to and its position, -1 for padding. Both lie in
buffers that stay where they are and are written before every step, so that a captured CUDA graph of a decode step reads those of the
step it is replayed for. Nothing in a forward asks the device.

**Choice.** While no context of a step can have more blocks than are chosen, the choice is all of them and no index is scored; attention
is that of chosen blocks all the same, so that a query's bits do not depend on which of the two found its blocks. Where several ranks hold
all index keys they share the scoring (`index_split`).

**Reads.** Where the profile reads an NVFP4 cache as E4M3 (`NumericsProfile.kv_read`), queries are rounded to E4M3 before they meet it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadata, AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheSpec

from samebits.kernels.index_parallel import split_index_topk
from samebits.kernels.msa import SparseConfig, all_blocks
from samebits.kernels.msa_ops import Batch, Norms, Pages, dense_attention, index_topk, kv_insert, sparse_attention
from samebits.kernels.taps import recording, tap
from samebits.quant import kv

from .index_split import IndexSplit, SplitStep, ranks_of
from .paged import PAGE, PagedBackend, PagedCache, sparse_config


@dataclass
class PageStep(AttentionMetadata):
    """One step, for all layers."""

    batch: Batch
    slots: Tensor
    """int64 [T] page * 128 + place in the page of each token; -1 for padding, which is not written."""
    table: Tensor
    """int32 [R, pages] page of each block of a request."""
    longest: int
    """No context of the step is longer; of a captured graph, none of any step."""
    split: SplitStep | None = None
    """This rank's share of the indexer's work, where several share it."""
    all_chosen: Tensor | None = None

    def all(self, config: SparseConfig, groups: int) -> Tensor:
        """int32 [T, G, topk]: every block up to the query's own. The same for all layers, so made once."""
        if self.all_chosen is None:
            blocks = all_blocks(0, self.batch.position[None], config)[0]
            self.all_chosen = blocks[:, None].expand(-1, groups, -1).contiguous()
        return self.all_chosen


class StepBuilder(AttentionMetadataBuilder[PageStep]):
    """Builds a step from vLLM's common metadata, without asking the device anything."""

    split: IndexSplit | None = None

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
        model = vllm_config.model_config
        most = vllm_config.scheduler_config.max_num_batched_tokens
        self.token = torch.arange(most, dtype=torch.int32, device=device)
        self.request, self.position = (torch.empty_like(self.token) for _ in range(2))
        sparse = sparse_config(model.hf_text_config)
        ranks = ranks_of(vllm_config, sparse, group)
        if ranks is not None:
            self.split = IndexSplit(
                ranks,
                sparse,
                model.hf_text_config.sparse_attention_config["sparse_num_index_heads"],
                tokens=most,
                requests=vllm_config.scheduler_config.max_num_seqs,
                blocks=-(-model.max_model_len // PAGE),
                device=device,
            )

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec) -> AttentionCGSupport:
        """Graphs of decode steps: their launches depend on nothing but the number of tokens."""
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False) -> PageStep:
        """The step. Its buffers hold until the next one is built."""
        m = common_attn_metadata
        n, requests = m.num_actual_tokens, m.num_reqs
        start = m.query_start_loc[: requests + 1]
        token, request, position = (x[:n] for x in (self.token, self.request, self.position))
        # Where requests are padding their start is the number of tokens, and so it is for tokens that are padding.
        found = torch.searchsorted(start[1:], token, right=True, out_int32=True).clamp_max_(requests - 1)
        request.copy_(found)
        found = found.long()
        first_key = m.seq_lens[:requests].index_select(0, found) - start[1:].index_select(0, found)
        position.copy_(torch.where(token < start[-1:], first_key + token, -1))
        batch = Batch(start, request, position, m.max_query_len)
        pages = -(-m.max_seq_len // PAGE)
        table = m.block_table_tensor[:requests, :pages]
        # Made even where this step scores no index: a graph that was captured with scores may be replayed for it.
        split = self.split.step(batch, table) if self.split is not None else None
        return PageStep(batch, m.slot_mapping[:n], table, m.max_seq_len, split)


class PageBackend(PagedBackend):
    """`PagedBackend` with the builder of these steps."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]

    @staticmethod
    def get_name() -> str:
        """Name in vLLM's log."""
        return "SAMEBITS_MSA"

    @staticmethod
    def get_builder_cls() -> type[StepBuilder]:
        """Builder of the step."""
        return StepBuilder


class PageCache(PagedCache):
    """The cache of one layer in pages that the kernels read, and attention over it."""

    main: Tensor
    """K and V of all heads: uint8 [pages, 2 G, 128, 72] or bf16 [pages, G, 128, 256], with the stride of a whole page."""
    index: Tensor
    """Index keys: uint8 [pages, 128, 72] or bf16 [pages, 128, 128]."""

    def get_attn_backend(self) -> type[PagedBackend]:
        """Same for all layers."""
        return PageBackend

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """`kv_cache` [pages, 1, 128, row], contiguous in itself."""
        self.kv_cache = kv_cache
        count, width = kv_cache.shape[0], self.head_width
        if not kv_cache.numel():
            return
        page = kv_cache.view(count, self.vectors * PAGE * width)
        cut = 2 * self.kv_heads * PAGE * width
        shape = (2 * self.kv_heads, PAGE, width) if self.packed else (self.kv_heads, PAGE, 2 * width)
        self.main = page[:, :cut].unflatten(1, shape)
        self.index = page[:, cut:].unflatten(1, (PAGE, width))

    def read_back(self, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the cache holds in slots `keys` [N]: K and V [N, G, D], index keys [N, 1, D]."""
        if self.packed:
            k, v = kv.read_pages(self.main, keys, self.dim, self.dtype)
            return k, v, kv.read_index_pages(self.index, keys, self.dim, self.dtype)[:, None]
        k, v = self.main[keys // PAGE, :, keys % PAGE].split(self.dim, dim=-1)
        return k, v, self.index[keys // PAGE, keys % PAGE][:, None]

    def run(self, parts: list[Tensor], norms: Norms, table: tuple[Tensor, Tensor]) -> Tensor:
        """Norm and rotate the step's heads, write keys and values, attend.

        Args:
            parts: q [T, H, D], k and v [T, G, D] and in sparse layers index_q [T, all G, D] and index_k [T, 1, D], as the projection gave
                them. table: cos and sin of all positions.
        Returns:
            [T, H, D]; zeros in vLLM's profiling runs, which have no cache, and for padding.
        """
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict):
            return torch.zeros_like(parts[0], memory_format=torch.contiguous_format)
        step: PageStep = metadata[self.prefix]
        n = step.slots.shape[0]
        q, k, v, *index = (x[:n] for x in parts)
        index_q, index_k = (index[0], index[1][:, 0]) if index else (None, None)
        index_cache = self.index if index else None
        q, index_q = kv_insert(q, k, v, index_q, index_k, norms, table, step.batch.position, step.slots, self.main, index_cache)
        layer = self.prefix.removesuffix(".attn")
        self._tap_written(layer, q, index_q, step)
        cache = Pages(self.main, step.table)
        if self.rounded:
            q, index_q = kv.round_e4m3(q), None if index_q is None else kv.round_e4m3(index_q)
        if self.sparse is None:
            out = dense_attention(q, cache, step.batch, self.scale, rounded=self.rounded)
        else:
            chosen = self._choose(index_q, step)
            if recording(f"{layer}.blocks"):
                tap(f"{layer}.blocks", chosen)
            out = sparse_attention(q, cache, chosen[:, self.own].contiguous(), step.batch, self.scale, rounded=self.rounded)
        if n < parts[0].shape[0]:
            out = torch.cat((out, out.new_zeros(parts[0].shape[0] - n, *out.shape[1:])))
        return out

    def _choose(self, index_q: Tensor, step: PageStep) -> Tensor:
        """Blocks int32 [T, index heads, topk] of each query and index head."""
        if step.longest <= self.sparse.topk * self.sparse.block:
            return step.all(self.sparse, index_q.shape[1])
        if step.split is None:
            return index_topk(index_q, Pages(self.index, step.table), step.batch, self.sparse, rounded=self.rounded)
        share, table, inbox = step.split
        return split_index_topk(index_q, Pages(self.index, table), share, self.sparse, inbox, rounded=self.rounded)

    def _tap_written(self, layer: str, q: Tensor, index_q: Tensor | None, step: PageStep) -> None:
        """Queries as they attend, and keys and values as the cache gives them back."""
        tap(f"{layer}.q", q)
        if index_q is not None:
            tap(f"{layer}.index_q", index_q)
        names = ["k", "v"] + (["index_k"] if index_q is not None else [])
        if any(recording(f"{layer}.{name}") for name in names):
            for name, held in zip(names, self.read_back(step.slots), strict=False):
                tap(f"{layer}.{name}", held)

"""One attention layer of the engine: the fused projection, norm and rotation by head, paged attention, output projection.

Attention over the cache is `pages.PageCache` where the kernels of `kernels.msa_ops` compute it, and `paged.PagedCache` elsewhere. The
kernels norm, rotate and write in one pass over the projection's output; in torch these are operations of their own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from vllm.config import CacheConfig, get_current_vllm_config
from vllm.model_executor.layers.linear import MinimaxM3QKVParallelLinearWithIndexer, QKVParallelLinear, RowParallelLinear
from vllm.platforms import current_platform

from samebits.kernels.msa_ops import BLOCK, DIM, HEADS_A_GROUP, Norms
from samebits.kernels.norm import gemma_rms_norm
from samebits.kernels.rope import apply_rope
from samebits.kernels.taps import tap

from .paged import PAGE, PagedCache
from .pages import PageCache
from .settings import EngineSettings


class Rotation(NamedTuple):
    """cos and sin, fp32: of all positions, and of the step's tokens where they are needed by themselves."""

    table: tuple[Tensor, Tensor]
    rows: tuple[Tensor, Tensor] | None


def kernels_attend(config: Any, dtype: torch.dtype) -> bool:
    """Whether attention of this model runs on the kernels of `msa_ops` here."""
    fits = config.head_dim == DIM and PAGE == BLOCK and config.num_attention_heads // config.num_key_value_heads <= HEADS_A_GROUP
    return fits and dtype is torch.bfloat16 and current_platform.is_cuda() and current_platform.has_device_capability(90)


class HeadNorm(nn.Module):
    """Gemma RMS norm of each head, one weight for all heads."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] to [..., D]."""
        return gemma_rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """Attention of one layer: one fused projection, norm and rotation by head, paged attention, output projection."""

    def __init__(self, config: Any, settings: EngineSettings, cache: CacheConfig, quant: Any, sparse: bool, prefix: str) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        h = config.hidden_size
        options = {"bias": False, "quant_config": quant, "prefix": f"{prefix}.qkv_proj"}
        q, k = self.heads * self.dim, self.kv_heads * self.dim
        slices = [("q_proj", q, "q"), ("k_proj", k, "k"), ("v_proj", k, "v")]
        if sparse:
            c = config.sparse_attention_config
            index_heads, index_dim = c["sparse_num_index_heads"], c["sparse_index_dim"]
            if index_heads != self.kv_heads or index_dim != self.dim:
                raise ValueError(f"{prefix}: the indexer must have the KV heads' count and size")
            self.qkv_proj = MinimaxM3QKVParallelLinearWithIndexer(h, self.dim, self.heads, self.kv_heads, index_heads, index_dim, **options)
            slices += [("index_q_proj", index_heads * index_dim, "index_q"), ("index_k_proj", index_dim, "index_k")]
            self.index_q_norm = HeadNorm(index_dim, config.rms_norm_eps)
            self.index_k_norm = HeadNorm(index_dim, config.rms_norm_eps)
        else:
            self.qkv_proj = QKVParallelLinear(h, self.dim, self.heads, self.kv_heads, **options)
        self.qkv_proj.slices = [(f"{prefix}.{name}", rows, shard) for name, rows, shard in slices]
        self.sizes = [rows for _, rows, _ in slices]
        self.o_proj = RowParallelLinear(q, h, bias=False, quant_config=quant, prefix=f"{prefix}.o_proj")
        self.o_proj.slices = [(f"{prefix}.o_proj", h, None)]
        self.q_norm = HeadNorm(self.dim, config.rms_norm_eps)
        self.k_norm = HeadNorm(self.dim, config.rms_norm_eps)
        self.kernels = kernels_attend(config, get_current_vllm_config().model_config.dtype)
        self.attn = (PageCache if self.kernels else PagedCache)(config, settings, sparse, f"{prefix}.attn")
        self.prefix = prefix

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        """x [T, hidden] to [T, hidden]."""
        qkv, _ = self.qkv_proj(x)
        parts = [part.unflatten(-1, (-1, self.dim)) for part in qkv.split(self.sizes, dim=-1)]
        attended = self.attn.run(parts, self._norms(), rotation.table) if self.kernels else self._in_torch(*parts, rows=rotation.rows)
        attended = attended.flatten(1)
        tap(f"{self.prefix}.attention", attended)
        out, _ = self.o_proj(attended)
        tap(f"{self.prefix}.o_proj", out)
        return out

    def _norms(self) -> Norms:
        index = (self.index_q_norm.weight, self.index_k_norm.weight) if self.attn.sparse else (None, None)
        return Norms(self.q_norm.weight, self.k_norm.weight, *index, self.q_norm.eps)

    def _in_torch(self, q: Tensor, k: Tensor, v: Tensor, *index: Tensor, rows: tuple[Tensor, Tensor]) -> Tensor:
        q = apply_rope(self.q_norm(q), *rows)
        k = apply_rope(self.k_norm(k), *rows)
        if index:
            index = (apply_rope(self.index_q_norm(index[0]), *rows), apply_rope(self.index_k_norm(index[1]), *rows))
        tap(f"{self.prefix}.q", q)
        if index:
            tap(f"{self.prefix}.index_q", index[0])
        return self.attn(q, k, v, *index)

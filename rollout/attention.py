"""One attention layer of the engine: the fused projection, norm and rotation by head, paged attention, output projection.

Attention over the cache is `pages.PageCache` where the kernels of `kernels.msa_ops` compute it, and `paged.PagedCache` elsewhere. The
kernels norm, rotate and write in one pass over the projection's output; in torch these are operations of their own.

On a replica of several ranks each has some KV heads and the query heads that go with them. Blocks are chosen for all of them everywhere.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.platforms import current_platform

from samebits.kernels.msa_ops import BLOCK, DIM, HEADS_A_GROUP, Norms
from samebits.kernels.norm import gemma_rms_norm
from samebits.kernels.rope import apply_rope
from samebits.kernels.taps import tap

from .group import Group
from .layers import Projection
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

    def __init__(self, config: Any, settings: EngineSettings, group: Group, sparse: bool, prefix: str) -> None:
        super().__init__()
        self.dim, self.group = config.head_dim, group
        h, q, k = config.hidden_size, config.num_attention_heads * self.dim, config.num_key_value_heads * self.dim
        slices = [("q_proj", q), ("k_proj", k), ("v_proj", k)]
        if sparse:
            c = config.sparse_attention_config
            index_heads, index_dim = c["sparse_num_index_heads"], c["sparse_index_dim"]
            if index_heads != config.num_key_value_heads or index_dim != self.dim:
                raise ValueError(f"{prefix}: the indexer must have the KV heads' count and size")
            slices += [("index_q_proj", index_heads * index_dim), ("index_k_proj", index_dim)]
            self.index_q_norm = HeadNorm(index_dim, config.rms_norm_eps)
            self.index_k_norm = HeadNorm(index_dim, config.rms_norm_eps)
        self.qkv_proj = Projection(h, [(f"{prefix}.{name}", rows) for name, rows in slices], group, f"{prefix}.qkv_proj")
        self.o_proj = Projection(q, [(f"{prefix}.o_proj", h)], group, f"{prefix}.o_proj")
        self.q_norm = HeadNorm(self.dim, config.rms_norm_eps)
        self.k_norm = HeadNorm(self.dim, config.rms_norm_eps)
        self.kernels = kernels_attend(config, get_current_vllm_config().model_config.dtype)
        self.attn = (PageCache if self.kernels else PagedCache)(config, settings, sparse, f"{prefix}.attn", group)
        self.prefix = prefix

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        """x [T, hidden] to [T, hidden]."""
        parts = [part.unflatten(-1, (-1, self.dim)) for part in self.qkv_proj(x).split(self.qkv_proj.sizes, dim=-1)]
        attended = self.attn.run(parts, self._norms(), rotation.table) if self.kernels else self._in_torch(*parts, rows=rotation.rows)
        attended = self.group.gather(attended.flatten(1))
        tap(f"{self.prefix}.attention", attended)
        out = self.group.gather(self.o_proj(attended))
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

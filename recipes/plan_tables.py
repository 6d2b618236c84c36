"""Models and accelerators that can be planned with, from `models.yaml` and `hardware.yaml`, and the sizes that follow from a format."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samebits.quant.adapter import ModelShape
from samebits.quant.roles import ATTENTION_ROLES, DENSE_ROLES, EXPERT_ROLES, SHARED_ROLES, Role

TABLES = Path(__file__).parent
BITS = {"nvfp4": 4.5, "mxfp8": 8.25, "fp8": 8.0, "bf16": 16.0, "fp32": 32.0}
"""Stored bits an element, scales included: NVFP4 one E4M3 scale each 16 elements, MXFP8 one E8M0 scale each 32."""
FAMILY = "minimax_m3"
"""The family of architectures that trainer and engine implement."""


class PlanError(ValueError):
    """A plan that cannot be made. The message is one line."""


@dataclass(frozen=True, slots=True)
class Sparse:
    """MSA: at most `blocks` blocks of `block` tokens a query, chosen by `index_heads` queries against one index key of `index_dim`."""

    blocks: int
    block: int
    index_dim: int
    index_heads: int


@dataclass(frozen=True, slots=True)
class Model:
    """The sizes of a model, as `models.yaml` has them."""

    title: str
    layers: int
    dense_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    experts_per_token: int
    expert_intermediate: int
    shared_intermediate: int
    dense_intermediate: int
    vocabulary: int
    sources: tuple[str, ...]
    family: str = FAMILY
    """Kind of architecture: what it takes to compute the model."""
    context: int | None = None
    """Longest sequence the model takes, in tokens."""
    sparse: Sparse | None = None
    checkpoint_gb: Mapping[str, float] = field(default_factory=dict)

    @property
    def moe_layers(self) -> int:
        """Layers with routed experts; the same ones have sparse attention."""
        return self.layers - self.dense_layers

    def matrix(self, role: Role) -> tuple[int, int]:
        """(N, K) of a projection: output and input width; (0, 0) where the model has none."""
        q, kv, hidden = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.hidden
        index = (self.sparse.index_dim, self.sparse.index_heads) if self.sparse else (0, 0)
        widths = {
            Role.ATTN_Q: (q, hidden),
            Role.ATTN_K: (kv, hidden),
            Role.ATTN_V: (kv, hidden),
            Role.ATTN_O: (hidden, q),
            Role.INDEX_Q: (index[0] * index[1], hidden),
            Role.INDEX_K: (index[0], hidden),
        }
        for roles, width in (
            (SHARED_ROLES, self.shared_intermediate),
            (DENSE_ROLES, self.dense_intermediate),
            (EXPERT_ROLES, self.expert_intermediate),
        ):
            widths |= dict(zip(roles, ((width, hidden), (width, hidden), (hidden, width)), strict=True))
        n, k = widths[role]
        return (n, k) if n and k else (0, 0)

    def count(self, role: Role) -> int:
        """How many matrices of `role` the model has."""
        if role in EXPERT_ROLES:
            return self.moe_layers * self.experts
        if role in SHARED_ROLES or role in (Role.INDEX_Q, Role.INDEX_K):
            return self.moe_layers
        return self.dense_layers if role in DENSE_ROLES else self.layers

    def parameters(self, *roles: Role) -> int:
        """Weights of all matrices of `roles`."""
        return sum(self.count(role) * self.matrix(role)[0] * self.matrix(role)[1] for role in roles)

    @property
    def expert_parameters(self) -> int:
        """Weights of all routed experts."""
        return self.parameters(*EXPERT_ROLES)

    @property
    def projection_parameters(self) -> int:
        """Weights of attention, indexer, shared experts and dense MLPs."""
        return self.parameters(*ATTENTION_ROLES, Role.INDEX_Q, Role.INDEX_K, *SHARED_ROLES, *DENSE_ROLES)

    @property
    def active_parameters(self) -> int:
        """Weights that one token passes through, head included, embedding (a look-up) not."""
        routed = self.expert_parameters // self.experts * self.experts_per_token
        return routed + self.projection_parameters + self.moe_layers * self.experts * self.hidden + self.vocabulary * self.hidden

    def expert_bytes(self, weights: str) -> float:
        """Bytes of all routed experts in format `weights`."""
        return self.expert_parameters * _bits(weights) / 8

    def other_bytes(self, weights: str) -> float:
        """Bytes of everything but the routed experts: the rest of the published checkpoint, or else counted.

        Counted: projections in MXFP8 (BF16 where the experts are), router in fp32, embedding and head in BF16; norms are left out.
        """
        if weights in self.checkpoint_gb:
            return self.checkpoint_gb[weights] * 1e9 - self.expert_bytes(weights)
        projections = self.projection_parameters * (16.0 if weights == "bf16" else BITS["mxfp8"]) / 8
        router = self.moe_layers * self.experts * (self.hidden + 1) * 4
        return projections + router + 2 * self.vocabulary * self.hidden * 2

    def kv_bytes_per_token(self, kv: str) -> float:
        """Bytes of K and V of one token over all layers: 2 * layers * KV heads * head width * bits / 8."""
        return 2 * self.layers * self.kv_heads * self.head_dim * _bits(kv) / 8

    def index_bytes_per_token(self, index: str) -> float:
        """Bytes of one token's index keys over the sparse layers."""
        return self.moe_layers * self.sparse.index_dim * _bits(index) / 8 if self.sparse else 0.0

    def index_read_per_token_and_layer(self, index: str) -> float:
        """Bytes that the indexer reads of each token of the context in a sparse layer, for one query."""
        return self.sparse.index_dim * _bits(index) / 8 if self.sparse else 0.0

    def dense_read_per_token_and_layer(self, kv: str) -> float:
        """Bytes that dense attention would read of each token of the context in a layer, for one query."""
        return 2 * self.kv_heads * self.head_dim * _bits(kv) / 8

    def decode_read(self, context: int, kv: str, index: str) -> float:
        """Bytes of cache read for one new token: everything in dense layers; index keys and the chosen blocks in sparse ones."""
        dense = self.dense_read_per_token_and_layer(kv)
        if not self.sparse:
            return self.layers * context * dense
        chosen = min(context, self.sparse.blocks * self.sparse.block)
        sparse = context * self.index_read_per_token_and_layer(index) + chosen * dense
        return self.dense_layers * context * dense + self.moe_layers * sparse


@dataclass(frozen=True, slots=True)
class Gpu:
    """One accelerator, as `hardware.yaml` has it."""

    title: str
    memory_gib: float
    """What the driver gives a program, in GiB."""
    memory_tb_s: float
    bf16_tflops: float
    link_gb_s: float
    sources: tuple[str, ...]
    nvfp4_mma: bool = False
    """Whether its matrix units multiply NVFP4 by NVFP4."""

    @property
    def memory_gb(self) -> float:
        """What the driver gives a program, in decimal GB."""
        return self.memory_gib * 2**30 / 1e9


def get_model(name: str) -> Model:
    """The model called `name`. Raises `PlanError` naming the known ones."""
    entry = _entry("models", name)
    sparse = Sparse(**entry.pop("sparse")) if entry.get("sparse") else None
    return Model(**entry | {"sparse": sparse, "sources": tuple(entry["sources"])})


def model_of_config(config: Mapping[str, Any], title: str) -> Model:
    """Sizes of a MiniMax-M3 checkpoint from its config.json. Raises `ValueError` naming a missing key."""
    shape = ModelShape.from_config(config)
    text = config.get("text_config", config)
    sparse = text.get("sparse_attention_config") or {}
    try:
        return Model(
            title=title,
            layers=shape.layers,
            dense_layers=shape.layers - len(shape.moe_layers),
            hidden=shape.hidden,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            experts=shape.experts,
            experts_per_token=text["num_experts_per_tok"],
            expert_intermediate=shape.expert_intermediate,
            shared_intermediate=shape.shared_intermediate,
            dense_intermediate=shape.dense_intermediate,
            vocabulary=text["vocab_size"],
            sources=("config.json of the checkpoint",),
            context=text.get("max_position_embeddings"),
            sparse=Sparse(
                sparse.get("sparse_topk_blocks", 16),
                sparse.get("sparse_block_size", 128),
                sparse["sparse_index_dim"],
                sparse["sparse_num_index_heads"],
            )
            if sparse.get("use_sparse_attention")
            else None,
        )
    except KeyError as error:
        raise ValueError(f"model config has no key {error.args[0]!r}") from None


def adapter_shape(model: Model) -> ModelShape:
    """The sizes that an adapter of `model` depends on; its dense layers come first."""
    return ModelShape(
        layers=model.layers,
        hidden=model.hidden,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        expert_intermediate=model.expert_intermediate,
        shared_intermediate=model.shared_intermediate,
        dense_intermediate=model.dense_intermediate,
        experts=model.experts,
        moe_layers=tuple(range(model.dense_layers, model.layers)),
    )


def get_gpu(name: str) -> Gpu:
    """The accelerator called `name`. Raises `PlanError` naming the known ones."""
    entry = _entry("hardware", name)
    return Gpu(**entry | {"sources": tuple(entry["sources"])})


def _entry(table: str, name: str) -> dict[str, Any]:
    known = _table(table)
    if name.lower() not in known:
        near = difflib.get_close_matches(name.lower(), known, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        kind = {"models": "model", "hardware": "GPU"}[table]
        raise PlanError(f"unknown {kind} {name!r}; known: {', '.join(known)}{hint}")
    return dict(known[name.lower()])


@functools.cache
def _table(name: str) -> dict[str, dict[str, Any]]:
    from omegaconf import OmegaConf

    return OmegaConf.to_container(OmegaConf.load(TABLES / f"{name}.yaml"))


def _bits(name: str) -> float:
    if name not in BITS:
        raise PlanError(f"unknown format {name!r}; known: {', '.join(BITS)}")
    return BITS[name]

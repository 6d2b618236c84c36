"""The numbers of a MiniMax-M3 config.json that the training model computes with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from samebits.kernels.activation import SwiGLU
from samebits.kernels.msa import SparseConfig
from samebits.quant.adapter import ModelShape


@dataclass(frozen=True, slots=True)
class M3Dims:
    """Sizes and constants of the text model."""

    shape: ModelShape
    vocab: int
    eps: float
    rope_theta: float
    rotary_dim: int
    top_k: int
    routed_scale: float
    activation: SwiGLU
    sparse_layers: frozenset[int]
    """Absolute indices of the layers with block-sparse attention."""
    sparse: SparseConfig

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> M3Dims:
        """From a checkpoint's config.json. Raises `ValueError` naming what is missing or not supported."""
        shape = ModelShape.from_config(config)
        text = config.get("text_config", config)
        sparse = text.get("sparse_attention_config") or {}
        freq = sparse.get("sparse_attention_freq", [1] * shape.layers) if sparse.get("use_sparse_attention") else [0] * shape.layers
        if text.get("scoring_func", "sigmoid") != "sigmoid" or text.get("tie_word_embeddings"):
            raise ValueError("the training model supports sigmoid routing and untied embeddings only")
        if any(freq) and sparse["sparse_num_index_heads"] != shape.kv_heads:
            raise ValueError(f"{sparse['sparse_num_index_heads']} index heads do not match {shape.kv_heads} KV heads")
        try:
            return cls(
                shape=shape,
                vocab=text["vocab_size"],
                eps=text["rms_norm_eps"],
                rope_theta=text["rope_theta"],
                rotary_dim=int(shape.head_dim * text.get("partial_rotary_factor", 0.5)),
                top_k=text["num_experts_per_tok"],
                routed_scale=text.get("routed_scaling_factor", 1.0),
                activation=SwiGLU(text.get("swiglu_alpha", 1.702), text.get("swiglu_beta", 1.0), text.get("swiglu_limit", 7.0)),
                sparse_layers=frozenset(i for i, f in enumerate(freq) if f),
                sparse=SparseConfig(
                    block=sparse.get("sparse_block_size", 128),
                    topk=sparse.get("sparse_topk_blocks", 16),
                    init_blocks=sparse.get("sparse_init_block", 0),
                    local_blocks=sparse.get("sparse_local_block", 1),
                ),
            )
        except KeyError as error:
            raise ValueError(f"model config has no key {error.args[0]!r}") from None

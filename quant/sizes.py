"""Bytes of a checkpoint from the architecture alone: every tensor of a MiniMax-M3 model, by role and format.

Counted is what lies in the safetensors files: codes and scales, embeddings and head (not tied), router and its bias, norms, and the
vision tower with its projector in 16 bits, as `samebits quantize` copies it. Not counted: file headers (some megabytes), tokenizer,
and the MTP module, which `samebits quantize` leaves out; it is listed on its own. A GB is 10^9 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .adapter import ModelShape
from .mxfp8 import BLOCK as MXFP8_BLOCK
from .nvfp4 import BLOCK as NVFP4_BLOCK
from .profile import Format, NumericsProfile
from .roles import DENSE_ROLES, EXPERT_ROLES, LORA_ROLES, MODULE_PATHS, PROJECTION_ROLES, SHARED_ROLES, Role, tensor_role

GB = 10**9
VISION = "vision"
MTP = "mtp"


def weight_bytes(shape: tuple[int, ...], fmt: Format) -> int:
    """Bytes of one weight with its scales. NVFP4: half a byte an element, one a block of 16, four for the global scale."""
    n = math.prod(shape)
    return {
        Format.NVFP4: n // 2 + n // NVFP4_BLOCK + 4,
        Format.MXFP8: n + n // MXFP8_BLOCK,
        Format.BF16: 2 * n,
        Format.FP32: 4 * n,
    }[fmt]


def text_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name (no prefix) and shape of every weight of the text model that `config` (a config.json) describes.

    Raises `ValueError` naming a missing key.
    """
    shape, text = ModelShape.from_config(config), config.get("text_config", config)
    out: dict[str, tuple[int, ...]] = {}
    try:
        vocab = text["vocab_size"]
        out["model.embed_tokens.weight"] = (vocab, shape.hidden)
        sparse = _sparse_layers(text, shape.layers)
        for layer in range(shape.layers):
            moe = layer in shape.moe_layers
            out |= {f"model.layers.{layer}.{n}": s for n, s in _layer(shape, text, moe, layer in sparse)}
        out["model.norm.weight"] = (shape.hidden,)
        if not text.get("tie_word_embeddings"):
            out["lm_head.weight"] = (vocab, shape.hidden)
    except KeyError as error:
        raise ValueError(f"model config has no key {error.args[0]!r}") from None
    return out


def _sparse_layers(text: Mapping[str, Any], layers: int) -> set[int]:
    sparse = text.get("sparse_attention_config") or {}
    if not sparse.get("use_sparse_attention"):
        return set()
    return {i for i, f in enumerate(sparse.get("sparse_attention_freq", [1] * layers)) if f}


def _layer(shape: ModelShape, text: Mapping[str, Any], moe: bool, sparse: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "input_layernorm.weight", (shape.hidden,)
    yield "post_attention_layernorm.weight", (shape.hidden,)
    for role in LORA_ROLES:
        if role in (DENSE_ROLES if moe else SHARED_ROLES + EXPERT_ROLES):
            continue
        for e in range(shape.experts) if role in EXPERT_ROLES else (0,):
            yield f"{MODULE_PATHS[role].format(e=e)}.weight", shape.matrix(role)
    yield from ((f"self_attn.{n}_norm.weight", (shape.head_dim,)) for n in "qk")
    if sparse:
        index = text["sparse_attention_config"]
        dim, heads = index["sparse_index_dim"], index["sparse_num_index_heads"]
        yield "self_attn.index_q_proj.weight", (heads * dim, shape.hidden)
        yield "self_attn.index_k_proj.weight", (dim, shape.hidden)
        yield from ((f"self_attn.index_{n}_norm.weight", (dim,)) for n in "qk")
    if moe:
        yield "block_sparse_moe.gate.weight", (shape.experts, shape.hidden)
        if text.get("use_routing_bias", True):
            yield "block_sparse_moe.e_score_correction_bias", (shape.experts,)


def vision_elements(config: Mapping[str, Any]) -> int:
    """Elements of vision tower, projector and patch merger; 0 without a vision_config. Raises `ValueError` naming a missing key."""
    vision = config.get("vision_config")
    if not vision:
        return 0
    try:
        h, inner, text = vision["hidden_size"], vision["intermediate_size"], config.get("text_config", config)["hidden_size"]
        compression = vision.get("img_token_compression_config", {})
        patch = vision.get("num_channels", 3) * compression.get("temporal_patch_size", 2) * vision["patch_size"] ** 2
        merged = compression.get("spatial_merge_size", 2) ** 2 * text
        projector = config.get("projector_hidden_size") or text
        layer = _linear(h, h) * 4 + _linear(h, inner) + _linear(inner, h) + 2 * 2 * h
        tower = patch * h + 2 * h + vision["num_hidden_layers"] * layer
    except KeyError as error:
        raise ValueError(f"vision_config has no key {error.args[0]!r}") from None
    return tower + _linear(h, projector) + _linear(projector, text) + _linear(merged, projector) + _linear(projector, text)


def _linear(inputs: int, outputs: int) -> int:
    return inputs * outputs + outputs  # with a bias


@dataclass(frozen=True, slots=True)
class Row:
    """All weights of one role."""

    role: str
    format: Format
    tensors: int
    elements: int
    bytes: int


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """What a checkpoint weighs in one profile."""

    profile: str
    rows: tuple[Row, ...]
    """By role, in the order of `Role`, then vision."""
    mtp: Row | None
    """The multi-token-prediction module, in the same formats; not part of `total`."""

    @property
    def total(self) -> int:
        """Bytes of all rows."""
        return sum(r.bytes for r in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """As plain values for JSON."""
        rows = [_row_dict(r) for r in self.rows]
        return {"profile": self.profile, "rows": rows, "bytes": self.total, "mtp": _row_dict(self.mtp) if self.mtp else None}


def _row_dict(row: Row) -> dict[str, Any]:
    return {
        "role": row.role,
        "format": str(row.format),
        "tensors": row.tensors,
        "elements": row.elements,
        "bytes": row.bytes,
    }


def plan_weights(config: Mapping[str, Any], profile: NumericsProfile) -> WeightPlan:
    """Bytes by role of the model that `config` describes, in the formats of `profile`. Raises `ValueError` naming a missing key."""
    found: dict[Role, list[tuple[int, ...]]] = {}
    for name, shape in text_shapes(config).items():
        found.setdefault(tensor_role(name), []).append(shape)
    rows = [_row(str(role), found[role], profile.weight_format(role)) for role in Role if role in found]
    vision = vision_elements(config)
    if vision:
        rows.append(Row(VISION, Format.BF16, 0, vision, 2 * vision))
    return WeightPlan(profile.name, tuple(rows), _mtp(config, profile))


def _row(role: str, shapes: list[tuple[int, ...]], fmt: Format) -> Row:
    return Row(role, fmt, len(shapes), sum(map(math.prod, shapes)), sum(weight_bytes(s, fmt) for s in shapes))


def _mtp(config: Mapping[str, Any], profile: NumericsProfile) -> Row | None:
    """One decoder layer with MSA and experts for each module, a projection [H, 2H] in the projections' format, and three norms."""
    text = config.get("text_config", config)
    modules = text.get("num_mtp_modules", 0)
    if not modules:
        return None
    shape = ModelShape.from_config(config)
    layer = [(f"model.layers.0.{n}", s) for n, s in _layer(shape, text, moe=True, sparse=bool(_sparse_layers(text, shape.layers)))]
    weights = [(profile.weight_format(tensor_role(n)), s) for n, s in layer]
    weights += [(profile.weight_format(Role.ATTN_O), (shape.hidden, 2 * shape.hidden))]
    weights += [(profile.weight_format(Role.NORM), (shape.hidden,))] * 3
    elements = modules * sum(math.prod(s) for _, s in weights)
    return Row(
        MTP,
        profile.weight_format(Role.EXPERT_GATE),
        modules * len(weights),
        elements,
        modules * sum(weight_bytes(s, f) for f, s in weights),
    )


def all_mxfp8(profile: NumericsProfile) -> NumericsProfile:
    """`profile` with its routed experts in MXFP8 like its projections: what an M3-MXFP8 checkpoint holds."""
    formats = dict(profile.weights) | {str(r): str(Format.MXFP8) for r in EXPERT_ROLES + PROJECTION_ROLES}
    return profile.replace(name="mxfp8", weights=tuple(sorted(formats.items())))

"""Roles: what a weight of a MiniMax-M3 text model is for.

Every format decision of samebits is made by role, never by a name pattern at the point of use. This file is the one place
where checkpoint names become roles. Names are the ones of the published checkpoint (`block_sparse_moe.experts.{e}.w1` and so
on); the optional prefixes `language_model.` (vision-language checkpoint) and `base_model.model.` (PEFT) are accepted.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass


class Role(enum.StrEnum):
    """The part that a weight plays. Values are stable: they are hashed into numerics profiles."""

    EXPERT_GATE = "expert.gate"
    EXPERT_UP = "expert.up"
    EXPERT_DOWN = "expert.down"
    ATTN_Q = "attn.q"
    ATTN_K = "attn.k"
    ATTN_V = "attn.v"
    ATTN_O = "attn.o"
    INDEX_Q = "index.q"
    INDEX_K = "index.k"
    SHARED_GATE = "shared.gate"
    SHARED_UP = "shared.up"
    SHARED_DOWN = "shared.down"
    DENSE_GATE = "dense.gate"
    DENSE_UP = "dense.up"
    DENSE_DOWN = "dense.down"
    ROUTER = "router"
    ROUTER_BIAS = "router.bias"
    NORM = "norm"
    EMBEDDING = "embedding"
    HEAD = "head"


EXPERT_ROLES = (Role.EXPERT_GATE, Role.EXPERT_UP, Role.EXPERT_DOWN)
ATTENTION_ROLES = (Role.ATTN_Q, Role.ATTN_K, Role.ATTN_V, Role.ATTN_O)
INDEX_ROLES = (Role.INDEX_Q, Role.INDEX_K)
SHARED_ROLES = (Role.SHARED_GATE, Role.SHARED_UP, Role.SHARED_DOWN)
DENSE_ROLES = (Role.DENSE_GATE, Role.DENSE_UP, Role.DENSE_DOWN)
PROJECTION_ROLES = ATTENTION_ROLES + INDEX_ROLES + SHARED_ROLES + DENSE_ROLES
# Roles that an adapter may carry. The indexer is left out: its top-k choice passes no gradient, so an adapter there never moves.
LORA_ROLES = ATTENTION_ROLES + SHARED_ROLES + DENSE_ROLES + EXPERT_ROLES

# Module path of each role below `model.layers.{i}.`; experts take their id as `{e}`.
MODULE_PATHS: dict[Role, str] = {
    Role.EXPERT_GATE: "block_sparse_moe.experts.{e}.w1",
    Role.EXPERT_DOWN: "block_sparse_moe.experts.{e}.w2",
    Role.EXPERT_UP: "block_sparse_moe.experts.{e}.w3",
    Role.ATTN_Q: "self_attn.q_proj",
    Role.ATTN_K: "self_attn.k_proj",
    Role.ATTN_V: "self_attn.v_proj",
    Role.ATTN_O: "self_attn.o_proj",
    Role.INDEX_Q: "self_attn.index_q_proj",
    Role.INDEX_K: "self_attn.index_k_proj",
    Role.SHARED_GATE: "block_sparse_moe.shared_experts.gate_proj",
    Role.SHARED_UP: "block_sparse_moe.shared_experts.up_proj",
    Role.SHARED_DOWN: "block_sparse_moe.shared_experts.down_proj",
    Role.DENSE_GATE: "mlp.gate_proj",
    Role.DENSE_UP: "mlp.up_proj",
    Role.DENSE_DOWN: "mlp.down_proj",
    Role.ROUTER: "block_sparse_moe.gate",
}
# Parts of a vision-language checkpoint beside the text model, by the start of their names (prefixes stripped).
VISION_PARTS = ("vision_tower.", "multi_modal_projector.", "patch_merge_mlp.")
MTP_PARTS = ("mtp.", "model.mtp.")
NOT_TEXT = VISION_PARTS + MTP_PARTS

_NORM_MODULES = (
    "input_layernorm",
    "post_attention_layernorm",
    "self_attn.q_norm",
    "self_attn.k_norm",
    "self_attn.index_q_norm",
    "self_attn.index_k_norm",
)
_TOP_MODULES = {"model.embed_tokens": Role.EMBEDDING, "lm_head": Role.HEAD, "model.norm": Role.NORM}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"block_sparse_moe\.experts\.(\d+)\.(w[123])")
_BY_PATH = {path: role for role, path in MODULE_PATHS.items()} | {path: Role.NORM for path in _NORM_MODULES}


class UnknownModule(ValueError):
    """A name that is no part of a MiniMax-M3 text model."""


@dataclass(frozen=True, slots=True, order=True)
class ModuleId:
    """One module of the model: its role, absolute layer index and expert id; -1 where there is none."""

    role: Role
    layer: int = -1
    expert: int = -1

    @property
    def path(self) -> str:
        """Checkpoint module path, e.g. `model.layers.3.block_sparse_moe.experts.7.w1`. Norms have no unique path and raise."""
        for path, role in _TOP_MODULES.items():
            if role is self.role and self.layer < 0:
                return path
        if self.role not in MODULE_PATHS:
            raise UnknownModule(f"role {self.role} does not name one module")
        return f"model.layers.{self.layer}." + MODULE_PATHS[self.role].format(e=self.expert)


def strip_prefixes(name: str) -> str:
    """`name` without the PEFT and vision-language prefixes that different tools put before the text model's names."""
    for prefix in ("base_model.model.", "language_model."):
        name = name.removeprefix(prefix)
    return name


def module_id(path: str) -> ModuleId:
    """The module that a checkpoint module path (no `.weight`) names. Raises `UnknownModule`."""
    path = strip_prefixes(path)
    if path in _TOP_MODULES:
        return ModuleId(_TOP_MODULES[path])
    layer = _LAYER.fullmatch(path)
    if layer:
        index, rest = int(layer[1]), layer[2]
        expert = _EXPERT.fullmatch(rest)
        if expert:
            return ModuleId(_BY_PATH[f"block_sparse_moe.experts.{{e}}.{expert[2]}"], index, int(expert[1]))
        if rest in _BY_PATH:
            return ModuleId(_BY_PATH[rest], index)
    raise UnknownModule(f"{path!r} is no module of a MiniMax-M3 text model")


def tensor_role(name: str) -> Role:
    """Role of a checkpoint tensor (`....weight`, scales included, or the router's `e_score_correction_bias`)."""
    name = strip_prefixes(name)
    module, _, leaf = name.rpartition(".")
    if leaf == "e_score_correction_bias":
        module_id(module + ".gate")  # raises when the name is not in a MoE layer
        return Role.ROUTER_BIAS
    return module_id(module).role

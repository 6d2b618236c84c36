"""Names become roles here and nowhere else: a golden table in both directions, and the errors."""

import pytest

from samebits.quant.roles import LORA_ROLES, MODULE_PATHS, ModuleId, Role, UnknownModule, module_id, strip_prefixes, tensor_role
from tests.support import random_m3

GOLDEN = {
    "model.layers.3.block_sparse_moe.experts.7.w1": ModuleId(Role.EXPERT_GATE, 3, 7),
    "model.layers.3.block_sparse_moe.experts.8.w2": ModuleId(Role.EXPERT_DOWN, 3, 8),
    "model.layers.4.block_sparse_moe.experts.127.w3": ModuleId(Role.EXPERT_UP, 4, 127),
    "model.layers.0.self_attn.q_proj": ModuleId(Role.ATTN_Q, 0),
    "model.layers.1.self_attn.k_proj": ModuleId(Role.ATTN_K, 1),
    "model.layers.2.self_attn.v_proj": ModuleId(Role.ATTN_V, 2),
    "model.layers.59.self_attn.o_proj": ModuleId(Role.ATTN_O, 59),
    "model.layers.5.self_attn.index_q_proj": ModuleId(Role.INDEX_Q, 5),
    "model.layers.6.self_attn.index_k_proj": ModuleId(Role.INDEX_K, 6),
    "model.layers.7.block_sparse_moe.shared_experts.gate_proj": ModuleId(Role.SHARED_GATE, 7),
    "model.layers.7.block_sparse_moe.shared_experts.up_proj": ModuleId(Role.SHARED_UP, 7),
    "model.layers.7.block_sparse_moe.shared_experts.down_proj": ModuleId(Role.SHARED_DOWN, 7),
    "model.layers.0.mlp.gate_proj": ModuleId(Role.DENSE_GATE, 0),
    "model.layers.0.mlp.up_proj": ModuleId(Role.DENSE_UP, 0),
    "model.layers.0.mlp.down_proj": ModuleId(Role.DENSE_DOWN, 0),
    "model.layers.9.block_sparse_moe.gate": ModuleId(Role.ROUTER, 9),
    "model.embed_tokens": ModuleId(Role.EMBEDDING),
    "lm_head": ModuleId(Role.HEAD),
}
NORMS = ("input_layernorm", "post_attention_layernorm", *(f"self_attn.{n}_norm" for n in ("q", "k", "index_q", "index_k")))


@pytest.mark.parametrize(("path", "module"), GOLDEN.items())
def test_golden_paths_both_ways(path, module):
    assert module_id(path) == module
    assert module.path == path


@pytest.mark.parametrize("prefix", ["", "language_model.", "base_model.model.", "base_model.model.language_model."])
def test_prefixes_are_accepted(prefix):
    path = "model.layers.3.self_attn.q_proj"
    assert strip_prefixes(prefix + path) == path
    assert module_id(prefix + path) == ModuleId(Role.ATTN_Q, 3)


def test_every_role_with_a_path_is_in_the_golden_table():
    assert set(MODULE_PATHS) <= {m.role for m in GOLDEN.values()}


def test_adapters_leave_out_indexer_router_norms_embedding_and_head():
    left_out = {Role.INDEX_Q, Role.INDEX_K, Role.ROUTER, Role.ROUTER_BIAS, Role.NORM, Role.EMBEDDING, Role.HEAD}
    assert set(LORA_ROLES) == set(Role) - left_out and len(LORA_ROLES) == len(set(LORA_ROLES)) == 13


@pytest.mark.parametrize("norm", NORMS)
def test_norms_have_a_role_but_no_path(norm):
    module = module_id(f"model.layers.3.{norm}")
    assert module == ModuleId(Role.NORM, 3)
    with pytest.raises(UnknownModule, match="does not name one module"):
        _ = module.path


def test_tensor_roles():
    expert = "model.layers.3.block_sparse_moe.experts.7.w1"
    assert {tensor_role(f"{expert}.{leaf}") for leaf in ("weight", "weight_scale", "weight_scale_2")} == {Role.EXPERT_GATE}
    assert tensor_role("language_model.model.layers.3.block_sparse_moe.e_score_correction_bias") is Role.ROUTER_BIAS
    assert tensor_role("model.norm.weight") is Role.NORM


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.3.block_sparse_moe.experts.7.w4.weight",
        "model.layers.3.block_sparse_moe.experts.x.w1.weight",
        "model.layers.3.mlp.experts.7.gate_proj.weight",
        "model.layers.3.self_attn.q_proj_extra.weight",
        "model.layers.self_attn.q_proj.weight",
        "transformer.layers.3.self_attn.q_proj.weight",
        "model.layers.3.self_attn.e_score_correction_bias",
        "vision_tower.vision_model.weight",
    ],
)
def test_unknown_names_raise(name):
    with pytest.raises(UnknownModule, match="is no module of a MiniMax-M3 text model"):
        tensor_role(name)


def test_every_tensor_of_the_fixture_has_a_role():
    roles = {tensor_role(name) for name in random_m3.tensors()}
    assert roles == set(Role)

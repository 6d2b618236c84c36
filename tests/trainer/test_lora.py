"""Masters, their bf16 values, and their names."""

from __future__ import annotations

import torch

from samebits.quant.adapter import AdapterSpec, ModelShape, parse_name, target_roles
from samebits.quant.roles import Role
from samebits.trainer.lora import LayerLoRA, LoRASettings, rounded
from tests.support import random_m3


def layer_lora(layer: int = 1, targets: str = "all", rank: int = 8, alpha: float = 24.0, seed: int = 0) -> LayerLoRA:
    settings = LoRASettings(rank, alpha, target_roles(targets), seed)
    return LayerLoRA(AdapterSpec(ModelShape.from_config(random_m3.config()), rank, settings.roles), layer, settings)


def test_init_depends_on_seed_layer_and_role_only():
    whole, part = layer_lora(), layer_lora(targets="experts")
    for name, pair in part.pairs.items():
        assert torch.equal(pair.lora_A, whole.pairs[name].lora_A)
    assert not torch.equal(layer_lora(seed=1).pairs["ATTN_Q"].lora_A, whole.pairs["ATTN_Q"].lora_A)
    assert not torch.equal(layer_lora(layer=2).pairs["ATTN_Q"].lora_A, whole.pairs["ATTN_Q"].lora_A)
    assert not torch.equal(whole.pairs["EXPERT_GATE"].lora_A, whole.pairs["EXPERT_UP"].lora_A)
    assert not torch.equal(whole.pairs["EXPERT_GATE"].lora_A[0], whole.pairs["EXPERT_GATE"].lora_A[1])


def test_init_is_pefts():
    pair = layer_lora().pairs["EXPERT_DOWN"]
    bound = pair.lora_A.shape[-1] ** -0.5  # kaiming-uniform with a = sqrt(5) over K inputs
    assert pair.lora_A.abs().max() <= bound and pair.lora_A.abs().max() > 0.98 * bound
    assert abs(pair.lora_A.std() - bound / 3**0.5) < 0.02 * bound
    assert (pair.lora_B == 0).all()


def test_forward_values_and_export_are_the_same_bits():
    lora = layer_lora(alpha=20.0)  # scale 2.5: B * scale is rounded, and not as B alone would be
    for pair in lora.pairs.values():
        pair.lora_B.data.normal_()
    exported = dict(lora.export())
    for name, tensor in exported.items():
        module, side = parse_name(name)
        values = getattr(lora.values(module.role), side.lower())[0]
        value = values[module.expert] if module.expert >= 0 else values
        assert tensor.dtype == torch.bfloat16 and torch.equal(tensor.float(), value), name
    pair = lora.pairs["ATTN_V"]
    b = exported["base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"]
    assert torch.equal(b, (pair.lora_B * 2.5).bfloat16())
    assert not torch.equal(b, pair.lora_B.bfloat16() * 2.5)


def test_gradient_is_straight_through_and_unrounded():
    pair = layer_lora(alpha=24.0).pairs["ATTN_O"]
    grad_a = torch.randn(1, *pair.lora_A.shape)
    grad_b = torch.randn(1, *pair.lora_B.shape)
    a, b = pair.values()
    torch.autograd.backward((a, b), (grad_a, grad_b))
    assert torch.equal(pair.lora_A.grad, grad_a[0]) and torch.equal(pair.lora_B.grad, grad_b[0] * 3.0)


def test_constants_land_on_their_own_expert_and_projection():
    lora = layer_lora(alpha=8.0)
    projections = {Role.EXPERT_GATE: 1, Role.EXPERT_UP: 2, Role.EXPERT_DOWN: 3}
    for role, number in projections.items():
        pair = lora.pairs[role.name]
        for e in range(8):
            pair.lora_A.data[e], pair.lora_B.data[e] = 16 * number + e, 100 + 16 * number + e
    leaf = {1: "w1", 2: "w3", 3: "w2"}
    exported = dict(lora.export())
    for number in projections.values():
        for e in range(8):
            prefix = f"base_model.model.model.layers.1.block_sparse_moe.experts.{e}.{leaf[number]}.lora_"
            assert (exported[prefix + "A.weight"] == 16 * number + e).all()
            assert (exported[prefix + "B.weight"] == 100 + 16 * number + e).all()


def test_export_leaves_the_masters_alone():
    pair = layer_lora().pairs["SHARED_UP"]
    pair.lora_B.data.normal_()
    before = pair.lora_B.clone()
    for _, tensor in pair.export():
        tensor.zero_()
    assert torch.equal(pair.lora_B, before) and torch.equal(rounded(torch.ones(2)), torch.ones(2).bfloat16())

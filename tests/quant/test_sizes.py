"""Sizes from the architecture alone: MiniMax-M3's known totals, and the same numbers as real files."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from samebits.quant.checkpoint import write_checkpoint
from samebits.quant.profile import Format, get_profile
from samebits.quant.roles import tensor_role
from samebits.quant.sizes import all_mxfp8, plan_weights, text_shapes, vision_elements, weight_bytes
from tests.support import random_m3

PROFILE = get_profile("w4a16")
M3 = json.loads((Path(__file__).parents[1] / "fixtures" / "minimax_m3_config.json").read_text())


def test_m3_has_the_published_sizes():
    plan, other = plan_weights(M3, PROFILE), plan_weights(M3, all_mxfp8(PROFILE))
    assert plan.total == 250_088_146_432  # published: 250.1 GB
    assert abs(plan.total / 1e9 - 250.1) < 0.005 * 250.1
    assert other.total == 443_739_074_560 and other.mtp.bytes == 7_728_059_904
    assert abs((other.total + other.mtp.bytes) / 1e9 - 451.5) < 0.05  # published: 451.5 GB


def test_only_the_experts_differ_between_the_two():
    plan, other = plan_weights(M3, PROFILE), plan_weights(M3, all_mxfp8(PROFILE))
    differing = {a.role: b.bytes - a.bytes for a, b in zip(plan.rows, other.rows, strict=True) if a != b}
    assert set(differing) == {"expert.gate", "expert.up", "expert.down"}
    assert sum(differing.values()) == other.total - plan.total
    elements = 57 * 128 * 3072 * 6144
    assert set(differing.values()) == {elements + elements // 32 - elements // 2 - elements // 16 - 4 * 57 * 128}


def test_m3_has_its_known_parameters():
    rows = {r.role: r for r in plan_weights(M3, PROFILE).rows}
    assert rows["expert.up"].tensors == 57 * 128 and rows["attn.q"].tensors == 60 and rows["index.k"].tensors == 57
    assert rows["dense.down"].elements == 3 * 12288 * 6144 and rows["router.bias"].elements == 57 * 128
    assert rows["norm"].tensors == 60 * 4 + 57 * 2 + 1
    assert rows["embedding"].bytes == rows["head"].bytes == 2 * 200064 * 6144 and rows["router"].bytes == 4 * 57 * 128 * 6144
    h, n = 1280, 6144
    layer = 4 * (h * h + h) + (h * 5120 + 5120) + (5120 * h + h) + 4 * h
    projector = (h * n + n) + (n * n + n) + (4 * n * n + n) + (n * n + n)
    assert rows["vision"].elements == vision_elements(M3) == 3 * 2 * 14 * 14 * h + 2 * h + 32 * layer + projector


def test_shapes_are_the_model_s():
    want = {n: tuple(t.shape) for n, t in random_m3.tensors().items()}
    assert text_shapes(random_m3.config()) == want
    assert text_shapes(random_m3.config()["text_config"]) == want


def test_plan_is_what_a_written_checkpoint_holds(tmp_path):
    write_checkpoint(tmp_path, random_m3.tensors(), random_m3.config(), PROFILE)
    stored = load_file(tmp_path / "model.safetensors")
    plan = plan_weights(random_m3.config(), PROFILE)
    for row in plan.rows:
        held = sum(t.numel() * t.element_size() for n, t in stored.items() if tensor_role(n) == row.role)
        assert held == row.bytes, row.role
    assert plan.total == sum(t.numel() * t.element_size() for t in stored.values()) and plan.mtp is None


@pytest.mark.parametrize(
    "fmt, want", [(Format.NVFP4, 48 * 8 + 48 + 4), (Format.MXFP8, 48 * 16 + 24), (Format.BF16, 1536), (Format.FP32, 3072)]
)
def test_bytes_of_one_weight(fmt, want):
    assert weight_bytes((24, 32), fmt) == want


def test_missing_keys_are_named():
    for key in ("vocab_size", "hidden_size", "num_local_experts"):
        config = random_m3.config()
        del config["text_config"][key]
        with pytest.raises(ValueError, match=key):
            plan_weights(config, PROFILE)
    config = random_m3.config() | {"vision_config": {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}}
    with pytest.raises(ValueError, match="patch_size"):
        plan_weights(config, PROFILE)

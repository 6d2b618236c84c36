"""Packed weights become the values that `quant` defines, each in its place, once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from samebits.quant import mxfp8, nvfp4
from samebits.rollout.quantization import MXFP8Linear, NVFP4Experts, SamebitsConfig

E, H, I = 3, 32, 48  # noqa: E741


def experts() -> tuple[nn.Module, dict[tuple[int, str], nvfp4.NVFP4Tensor]]:
    """A layer filled as a checkpoint fills it, and the packed matrix of each (expert, projection)."""
    layer, method = nn.Module(), NVFP4Experts()
    layer.prefix = "model.layers.1.block_sparse_moe.experts"
    method.create_weights(layer, E, H, I)
    g = torch.Generator().manual_seed(0)
    packed = {}
    for e in range(E):
        shared = torch.tensor(0.001 * (e + 1))
        for which, shape in (("w1", (I, H)), ("w3", (I, H)), ("w2", (H, I))):
            t = nvfp4.quantize(torch.randn(shape, generator=g), None if which == "w2" else shared)
            packed[e, which] = t
            for leaf, part in zip(("weight", "weight_scale", "weight_scale_2"), t, strict=True):
                target = method.target(layer, leaf, e, which)
                target.copy_(part.view(target.dtype) if leaf == "weight_scale" else part)
    return layer, packed


def test_experts_are_dequantised_exactly_gate_rows_first():
    layer, packed = experts()
    NVFP4Experts().process_weights_after_loading(layer)
    for e in range(E):
        want = torch.cat((nvfp4.dequantize(packed[e, "w1"]), nvfp4.dequantize(packed[e, "w3"])))
        assert torch.equal(layer.w13[e], want)
        assert torch.equal(layer.w2[e], nvfp4.dequantize(packed[e, "w2"]))
    assert sorted(n for n, _ in layer.named_parameters()) == ["w13", "w2"]


def test_gate_and_up_with_different_global_scales_are_refused():
    layer, _ = experts()
    NVFP4Experts.target(layer, "weight_scale_2", 2, "w3").mul_(1.25)
    with pytest.raises(ValueError, match=r"w1 and w3 of experts \[2\] have different global scales"):
        NVFP4Experts().process_weights_after_loading(layer)


def test_projection_is_dequantised_exactly_and_rounded_once():
    layer, method = nn.Module(), MXFP8Linear()
    layer.adapter = None
    method.create_weights(layer, 64, [16, 16], 64, 32, torch.bfloat16)
    packed = mxfp8.quantize(torch.randn(32, 64, generator=torch.Generator().manual_seed(0)))
    layer.weight.data.copy_(packed.codes.view(torch.float8_e4m3fn))
    layer.weight_scale.data.copy_(packed.exponents)
    method.process_weights_after_loading(layer)
    assert layer.weight.dtype == torch.float32 and torch.equal(layer.weight, mxfp8.dequantize(packed))
    x = torch.randn(5, 64).bfloat16()
    assert torch.equal(method.apply(layer, x), (x.float() @ layer.weight.T).bfloat16())


def test_only_checkpoints_of_samebits_are_taken_over():
    ours = {"quant_method": "modelopt", "producer": {"name": "samebits"}}
    assert SamebitsConfig.override_quantization_method(ours, None) == "samebits"
    assert SamebitsConfig.override_quantization_method(ours | {"producer": {"name": "modelopt"}}, None) is None
    assert SamebitsConfig.override_quantization_method({"quant_method": "modelopt"}, None) is None


@pytest.mark.parametrize("room", [1, 2 * 4 * 96 * 128, 1 << 30])
def test_values_of_a_layer_are_those_of_its_experts_each_unpacked_once(room, monkeypatch):
    from types import SimpleNamespace

    from samebits.kernels.expert_tiles import pack_experts
    from samebits.quant import nvfp4
    from samebits.rollout import quantization
    from samebits.rollout.quantization import NVFP4Experts

    g = torch.Generator().manual_seed(0)
    w13, w2 = (nvfp4.quantize(torch.randn(5, *shape, generator=g)) for shape in ((96, 64), (64, 48)))
    unpacked, inner = [], quantization.unpack_experts
    monkeypatch.setattr(quantization, "unpack_experts", lambda t: unpacked.append(len(t.codes)) or inner(t))
    monkeypatch.setattr(quantization, "_VALUE_BYTES", room)
    runs = list(NVFP4Experts.values(SimpleNamespace(w13=pack_experts(w13), w2=pack_experts(w2))))
    assert [first for first, _, _ in runs] == [sum(len(w) for _, w, _ in runs[:i]) for i in range(len(runs))]
    for i, want in ((1, w13), (2, w2)):
        assert torch.equal(torch.cat([run[i] for run in runs]), nvfp4.dequantize(want))
    assert sum(unpacked) == 2 * 5 and len(unpacked) == 2 * len(runs) == 2 * {1: 5, 1 << 30: 1}.get(room, 3)
    held = SimpleNamespace(w13=nvfp4.dequantize(w13), w2=nvfp4.dequantize(w2))
    assert [(first, a is held.w13, b is held.w2) for first, a, b in NVFP4Experts.values(held)] == [(0, True, True)]

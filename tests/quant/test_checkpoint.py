"""Checkpoints: bytes on disk by role, shared global scales, what vLLM's config reader needs, and refusals."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from samebits.quant import mxfp8, nvfp4
from samebits.quant.checkpoint import Checkpoint, CheckpointError, quantization_config, quantize_tensors, write_checkpoint
from samebits.quant.mxfp8 import MXFP8Tensor
from samebits.quant.nvfp4 import NonFiniteWeight, NVFP4Tensor
from samebits.quant.profile import get_profile
from samebits.quant.roles import UnknownModule
from tests.support import random_m3

PROFILE = get_profile("w4a16")
EXPERT = "model.layers.2.block_sparse_moe.experts.5."


@pytest.fixture(scope="module")
def tensors():
    return random_m3.tensors()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tensors):
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, tensors, random_m3.config(), PROFILE)
    return folder


@pytest.fixture(scope="module")
def stored(folder):
    return load_file(folder / "model.safetensors")


def test_gate_and_up_share_one_global_scale_by_role(tensors, stored):
    amax = {w: tensors[f"{EXPERT}{w}.weight"].abs().max().float() for w in ("w1", "w2", "w3")}
    assert amax["w3"] > 3 * amax["w1"]  # the fixture makes up five times gate
    assert torch.equal(stored[f"{EXPERT}w1.weight_scale_2"], amax["w3"] / 2688)
    assert torch.equal(stored[f"{EXPERT}w3.weight_scale_2"], amax["w3"] / 2688)
    assert torch.equal(stored[f"{EXPERT}w2.weight_scale_2"], amax["w2"] / 2688)
    other = EXPERT.replace(".5.", ".4.")
    assert not torch.equal(stored[f"{EXPERT}w1.weight_scale_2"], stored[f"{other}w1.weight_scale_2"])


def test_gate_and_up_share_the_larger_scale_whichever_it_is(tensors):
    gate, up = f"{EXPERT}w1.weight", f"{EXPERT}w3.weight"
    for large, small in ((gate, up), (up, gate)):
        out = quantize_tensors({large: tensors[up], small: tensors[gate]}, PROFILE)
        scales = {out[n.replace(".weight", ".weight_scale_2")].item() for n in (gate, up)}
        assert scales == {(tensors[up].abs().max().float() / 2688).item()}


@pytest.mark.parametrize("leaf", ["w1", "w2", "w3"])
def test_expert_bytes_are_the_reference_quantizer_s(tensors, stored, leaf):
    name = f"{EXPERT}{leaf}"
    want = nvfp4.quantize(tensors[f"{name}.weight"], stored[f"{name}.weight_scale_2"])
    assert torch.equal(stored[f"{name}.weight"], want.codes) and stored[f"{name}.weight"].dtype == torch.uint8
    assert stored[f"{name}.weight_scale"].dtype == torch.float8_e4m3fn and stored[f"{name}.weight_scale_2"].dim() == 0
    assert torch.equal(stored[f"{name}.weight_scale"].view(torch.uint8), want.block_scales)


@pytest.mark.parametrize(
    "module", ["model.layers.0.mlp.down_proj", "model.layers.1.self_attn.index_k_proj", "model.layers.2.self_attn.o_proj"]
)
def test_projection_bytes_are_the_reference_quantizer_s(tensors, stored, module):
    want = mxfp8.quantize(tensors[f"{module}.weight"])
    assert stored[f"{module}.weight"].dtype == torch.float8_e4m3fn and stored[f"{module}.weight_scale"].dtype == torch.uint8
    assert torch.equal(stored[f"{module}.weight"].view(torch.uint8), want.codes)
    assert torch.equal(stored[f"{module}.weight_scale"], want.exponents)


def test_the_rest_is_kept_in_its_format(tensors, stored):
    moe = "model.layers.1.block_sparse_moe."
    for name, dtype in {
        f"{moe}gate.weight": torch.float32,
        f"{moe}e_score_correction_bias": torch.float32,
        "model.embed_tokens.weight": torch.bfloat16,
        "lm_head.weight": torch.bfloat16,
        "model.layers.1.self_attn.index_q_norm.weight": torch.bfloat16,
    }.items():
        assert stored[name].dtype == dtype and torch.equal(stored[name], tensors[name])


def test_every_tensor_is_there_and_nothing_else(tensors, stored):
    nvfp4_modules = {n for n in tensors if ".experts." in n}
    mxfp8_modules = {n for n in tensors if "_proj.weight" in n}
    scales = {n.replace(".weight", ".weight_scale") for n in nvfp4_modules | mxfp8_modules}
    assert stored.keys() == tensors.keys() | scales | {n.replace(".weight", ".weight_scale_2") for n in nvfp4_modules}


def test_config_says_profile_and_quantized_layers(folder, tensors):
    config = json.loads((folder / "config.json").read_text())
    assert config["samebits"] == {"profile": "w4a16", "weights_hash": PROFILE.weights_hash}
    q = config["quantization_config"]
    assert (q["quant_method"], q["quant_algo"]) == ("modelopt", "MIXED_PRECISION")
    layers = q["quantized_layers"]
    assert layers[f"{EXPERT}w1"] == {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    assert layers["model.layers.0.self_attn.q_proj"] == {"quant_algo": "MXFP8", "group_size": 32}
    assert set(layers) == {n.removesuffix(".weight") for n in tensors if ".experts." in n or "_proj.weight" in n}
    assert q == quantization_config(tensors, PROFILE)


def test_reading_gives_the_bytes_back(folder, stored):
    checkpoint = Checkpoint(folder)
    assert checkpoint.weights_hash == PROFILE.weights_hash
    for module in checkpoint.modules:
        weight = checkpoint.weight(module)
        raw = stored[f"{module}.weight"]
        if isinstance(weight, NVFP4Tensor):
            assert torch.equal(weight.codes, raw) and weight.block_scales.dtype == torch.uint8
            assert torch.equal(weight.block_scales, stored[f"{module}.weight_scale"].view(torch.uint8))
            assert torch.equal(weight.global_scale, stored[f"{module}.weight_scale_2"])
        elif isinstance(weight, MXFP8Tensor):
            assert torch.equal(weight.codes, raw.view(torch.uint8)) and weight.codes.dtype == torch.uint8
            assert torch.equal(weight.exponents, stored[f"{module}.weight_scale"])
        else:
            assert torch.equal(weight, raw)
    assert sum(isinstance(checkpoint.weight(m), NVFP4Tensor) for m in checkpoint.modules) == 2 * 8 * 3


def test_writing_twice_writes_the_same_bytes(folder, tmp_path, tensors):
    write_checkpoint(tmp_path, tensors, random_m3.config(), PROFILE)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


def test_prefixed_names_and_several_files_are_read(folder, stored, tmp_path):
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    names = list(stored)
    save_file({f"language_model.{n}": stored[n] for n in names[::2]}, tmp_path / "model-1.safetensors")
    save_file({f"language_model.{n}": stored[n] for n in names[1::2]}, tmp_path / "model-2.safetensors")
    checkpoint = Checkpoint(tmp_path)
    assert set(checkpoint.modules) == set(Checkpoint(folder).modules)
    assert torch.equal(checkpoint.weight(f"{EXPERT}w2").codes, stored[f"{EXPERT}w2.weight"])


def test_bad_folders_raise_in_one_line(folder, stored, tmp_path):
    with pytest.raises(CheckpointError, match="no model at"):
        Checkpoint(tmp_path)
    config = random_m3.config()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="was not quantized by samebits"):
        Checkpoint(tmp_path)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match="holds no safetensors file"):
        Checkpoint(tmp_path)
    save_file({n: t for n, t in stored.items() if n != f"{EXPERT}w1.weight_scale_2"}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"experts\.5\.w1\.weight_scale_2 is missing"):
        Checkpoint(tmp_path).weight(f"{EXPERT}w1")
    with pytest.raises(UnknownModule):
        Checkpoint(tmp_path).weight("model.layers.0.nonsense")


@pytest.mark.parametrize("name", [f"{EXPERT}w3.weight", "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"])
def test_non_finite_weights_raise_with_the_tensor_s_name(tensors, name):
    broken = tensors[name].clone()
    broken.view(-1)[0] = float("nan")
    part = {n: t for n, t in tensors.items() if n.startswith(EXPERT)} | {name: broken}
    with pytest.raises(NonFiniteWeight, match=f"^{name}: "):
        quantize_tensors(part, PROFILE)

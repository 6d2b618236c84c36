"""What `samebits quantize` wrote, in the engine and in the trainer: the same values, read back out of the buffers of both."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from samebits.alignment_checks.weights import checkpoint_digests, verify_base
from samebits.kernels.linear import values
from samebits.quant import mxfp8, nvfp4
from samebits.quant.checkpoint import Checkpoint
from samebits.quant.profile import get_profile
from samebits.recipes.cli import app
from samebits.trainer.model import M3ForTraining
from tests.rollout.conftest import prompt, same_bits
from tests.support import random_m3, stored

VISION = {"vision_tower.vision_model.x.weight": torch.ones(3, 5), "multi_modal_projector.linear_1.bias": torch.ones(4)}


@pytest.fixture(scope="session")
def source() -> dict[str, torch.Tensor]:
    return random_m3.tensors(seed=7)


@pytest.fixture(scope="session")
def folder(tmp_path_factory, source):
    """A bf16 checkpoint as it is published (prefixed names, vision parts, several shards), through the command."""
    where = tmp_path_factory.mktemp("quantized")
    stored.write(where / "bf16", {f"language_model.{n}": t for n, t in source.items()} | VISION, shards=5)
    random_m3.write_tokenizer(where / "bf16", random_m3.SIZES["vocab"])
    result = CliRunner().invoke(app, ["quantize", str(where / "bf16"), str(where / "out")])
    assert result.exit_code == 0, result.output
    return where / "out"


@pytest.fixture(scope="session")
def quantized_engine(start, folder):
    """Lives as long as the session: an engine that ends takes vLLM's process groups away from the others in this process."""
    return start(folder=folder)


def expected_values(source: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """fp32 values by module path, from the full-precision tensors and the reference quantizers alone."""
    out = {}
    for name, w in source.items():
        path = name.removesuffix(".weight")
        if ".experts." in name:
            out[path] = nvfp4.dequantize(nvfp4.quantize(w, stored.pair_scale(source, name)))
        elif name.endswith("_proj.weight"):
            out[path] = mxfp8.dequantize(mxfp8.quantize(w))
        else:
            out[path] = w.float()
    return out


def trainer_values(model: M3ForTraining) -> dict[str, torch.Tensor]:
    """fp32 values by module path, from the parameters of the training model."""
    out = {
        "model.embed_tokens": values(model.embed.value()),
        "model.norm": values(model.norm.value()),
        "lm_head": values(model.head.value()),
    }
    for i, layer in enumerate(model.layers):
        p = f"model.layers.{i}."
        out[f"{p}input_layernorm"] = values(layer.input_norm.value())
        out[f"{p}post_attention_layernorm"] = values(layer.post_norm.value())
        out |= {f"{p}self_attn.{n}_proj": values(b.value()) for n, b in layer.attention.proj.items()}
        out |= {f"{p}self_attn.{n}_norm": values(b.value()) for n, b in layer.attention.norm.items()}
        mlp, where = (layer.mlp.shared, f"{p}block_sparse_moe.shared_experts.") if layer.is_moe else (layer.mlp, f"{p}mlp.")
        gate, up = values(mlp.gate_up.value()).chunk(2)
        out |= {f"{where}gate_proj": gate, f"{where}up_proj": up, f"{where}down_proj": values(mlp.down.value())}
        if layer.is_moe:
            moe = f"{p}block_sparse_moe."
            out |= {f"{moe}gate": values(layer.mlp.gate.value()), f"{moe}e_score_correction_bias": values(layer.mlp.bias.value())}
            for e, (w13, w2) in enumerate(zip(values(layer.mlp.w13.value()), values(layer.mlp.w2.value()), strict=True)):
                out |= dict(zip((f"{moe}experts.{e}.w1", f"{moe}experts.{e}.w3"), w13.chunk(2), strict=True))
                out[f"{moe}experts.{e}.w2"] = w2
    return out


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    different = [n for n in a if a[n].shape != b[n].shape or not same_bits(a[n].float().contiguous(), b[n].float().contiguous())]
    assert not different


def test_the_trainer_holds_the_values_of_the_source_quantized_by_role(folder, source):
    model = M3ForTraining(Checkpoint(folder), get_profile("w4a16-fp32"))
    assert_same(trainer_values(model), expected_values(source))


def test_engine_and_trainer_hold_the_same_bits_of_every_weight(quantized_engine, folder, source):
    held = dict(quantized_engine.model.base_values())
    assert len(held) == len(source)
    assert_same(held, trainer_values(M3ForTraining(Checkpoint(folder), get_profile("w4a16-fp32"))))
    assert_same(held, expected_values(source))


def test_the_engine_s_digests_are_the_checkpoint_s_and_it_generates(quantized_engine, folder, source):
    held = quantized_engine.rpc("samebits_base_digests")
    assert verify_base(checkpoint_digests(Checkpoint(folder)), held, "engine") == len(source)
    out = quantized_engine.run([prompt(40)], tokens=4)[0]
    assert len(out.ids) == 4 and torch.isfinite(out.logprobs).all()

"""What an engine holds, to the byte, against what the recipe's plan counts."""

from __future__ import annotations

import shutil

import pytest
import torch

from samebits.recipes import memory_parts
from samebits.recipes.config import load_recipe
from samebits.recipes.layout import ROLLOUT
from samebits.recipes.memory import engine_parts
from samebits.recipes.validate import examine
from samebits.rollout.held import held_bytes
from tests.support.gpu_wiring import as_on_a_gpu

from .conftest import KV_BYTES, RANK

pytestmark = pytest.mark.slow


class Adapter:
    def __init__(self) -> None:
        self.stacked = (torch.zeros(2, 8), torch.zeros(2, 4))
        self.parts = [("path", 0, 4, (self.stacked[0][:, :4], self.stacked[1]))]  # views of the same memory


def test_shared_memory_counts_once():
    model = torch.nn.Linear(4, 4, bias=False)
    model.adapters = lambda: iter([Adapter()])
    pages = torch.zeros(10, dtype=torch.uint8)
    assert held_bytes(model, [pages, (pages[:5], torch.zeros(3))]) == {"weights": 64, "adapter_slots": 2 * 12 * 4, "kv_cache": 10 + 12}


@pytest.mark.parametrize(("name", "cache"), [("engine", "auto"), ("packed_engine", "nvfp4")])
def test_weights_slots_and_cache_are_those_planned(name, cache, request, checkpoint, monkeypatch):
    """To the byte, of the parts that the plan counts; the fixture's engine takes 1,024 tokens and rank 8."""
    counted = request.getfixturevalue(name).rpc("samebits_held_bytes")
    shutil.copyfile("recipes/tiny_m3_base/tokenizer.json", checkpoint / "tokenizer.json")
    settings = [f"model={checkpoint}", "device=cpu", f"numerics.kv_cache={cache}", f"lora.rank={RANK}", f"{ROLLOUT}.max_model_len=1024"]
    monkeypatch.setattr(memory_parts, "CPU_KV_BYTES", KV_BYTES)
    recipe, verl = load_recipe("recipes/tiny_m3_grpo.yaml", settings)
    planned, _ = engine_parts(recipe, verl, examine(recipe, verl))
    assert counted == {
        "weights": planned["engine: base"],
        "adapter_slots": planned["engine: adapter slots"],
        "kv_cache": planned["engine: KV cache"],
    }


def test_weights_in_tiles_are_those_planned(start, checkpoint, monkeypatch):
    """An engine wired as on a GPU: matrices of any width, in whole chunks of 128 inputs."""
    with as_on_a_gpu():
        made = start(profile="w4a16", dtype="bfloat16")
    counted = made.rpc("samebits_held_bytes")
    shutil.copyfile("recipes/tiny_m3_base/tokenizer.json", checkpoint / "tokenizer.json")
    settings = [f"model={checkpoint}", "device=cpu", "numerics.profile=w4a16", f"lora.rank={RANK}", f"{ROLLOUT}.max_model_len=1024"]
    monkeypatch.setattr(memory_parts, "CPU_KV_BYTES", KV_BYTES)
    recipe, verl = load_recipe("recipes/tiny_m3_grpo.yaml", settings)
    planned, _ = engine_parts(recipe, verl, examine(recipe, verl))
    head = made.model.lm_head.weight  # on a CPU twice as wide
    assert counted["weights"] - head.numel() * 2 == planned["engine: base"]
    assert counted["adapter_slots"] == planned["engine: adapter slots"] and counted["kv_cache"] == planned["engine: KV cache"]
    assert "card" not in counted

"""What an engine holds, to the byte, against what the recipe's plan counts."""

from __future__ import annotations

import pytest
import torch

from samebits.quant.checkpoint import Checkpoint
from samebits.quant.profile import get_profile
from samebits.recipes import support
from samebits.recipes.plan_tables import model_of_config
from samebits.rollout.held import held_bytes

from .conftest import spec

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


@pytest.mark.parametrize("name", ["engine", "packed_engine"])
def test_weights_slots_and_cache_are_those_planned(name, request, checkpoint):
    engine = request.getfixturevalue(name)
    counted = engine.rpc("samebits_held_bytes")
    model = model_of_config(Checkpoint(checkpoint).config, "m3")
    parameters = sum(n * k for n, k in spec().shapes().values())
    assert counted["adapter_slots"] == 2 * 4 * parameters
    profile = get_profile("w4a16-fp32", "nvfp4" if name == "packed_engine" else "auto")
    bits = "nvfp4" if name == "packed_engine" else "fp32"
    page = 128 * (model.kv_bytes_per_token(bits) + model.index_bytes_per_token(bits))
    assert str(profile.kv_cache) == ("nvfp4" if name == "packed_engine" else "float32")
    assert counted["kv_cache"] == 2**30 // page * page
    assert counted["weights"] == pytest.approx(support.held_weights(model), rel=2e-2), "norms, biases and rows of padding are not planned"

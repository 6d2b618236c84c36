from __future__ import annotations

import pytest
import torch

from samebits.quant.adapter import target_roles
from samebits.quant.checkpoint import Checkpoint
from samebits.quant.profile import get_profile
from samebits.trainer.lora import LoRASettings
from samebits.trainer.model import M3ForTraining
from tests.support import random_m3


@pytest.fixture(scope="session")
def m3(tmp_path_factory):
    """A random tiny M3 checkpoint."""
    return random_m3.build(tmp_path_factory.mktemp("trainer_m3"))


@pytest.fixture
def make_model(m3):
    """Build the training model with an adapter whose B is not zero."""

    def build(targets: str = "all", kv_cache: str = "auto", profile: str = "w4a16-fp32", alpha: float = 24.0, b_scale: float = 0.3):
        settings = LoRASettings(rank=8, alpha=alpha, roles=target_roles(targets), seed=3)
        model = M3ForTraining(Checkpoint(m3), get_profile(profile, kv_cache), settings)
        g = torch.Generator().manual_seed(5)
        for name, parameter in model.adapter_parameters():
            if name.endswith("lora_B"):
                parameter.data.copy_(torch.randn(parameter.shape, generator=g) * b_scale / parameter.shape[-1])
        return model

    return build


@pytest.fixture
def packed():
    """Random packed tokens: (tokens [T], lengths, labels [T], temperature [T])."""

    def make(*lengths: int, seed: int = 0, temperature: float = 1.0):
        total = sum(lengths)
        tokens = torch.randint(0, random_m3.SIZES["vocab"], (total,), generator=torch.Generator().manual_seed(seed))
        return tokens, list(lengths), tokens.roll(-1), torch.full((total,), temperature)

    return make

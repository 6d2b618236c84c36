"""Lets stock verl run on a machine without a GPU, to try the baseline out: its times say nothing about a GPU.

Of samebits it takes the CPU platform and the two patches of verl that go with it; engine and trainer stay verl's. See `baseline_shim`.
"""

from __future__ import annotations

from types import ModuleType

from verl.plugin.platform import platform_manager

from samebits.trainer import verl_patches
from samebits.trainer.platform import CPUPlatform

from .baseline_shim import install


def register_engine(module: ModuleType) -> None:
    """verl's own FSDP engine, which it registers for CUDA and NPU, on the CPU."""
    module.EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cpu")(module.FSDPEngineWithLMHead)


platform_manager.PlatformRegistry.register("cpu")(CPUPlatform)
verl_patches.apply()
install({"verl.workers.engine.fsdp.transformer_impl": register_engine})

"""What importing the plugin does to verl, in fresh processes, as Ray's workers import it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from samebits.trainer import hf_config, verl_patches
from tests.support import random_m3


def run(code: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=300, env=os.environ | env, check=False
    )


def test_verl_loads_the_plugin_by_environment_variable():
    code = """
import verl
from verl.utils.device import get_device_name, get_vendor
from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead
from verl.trainer.ppo.core_algos import get_policy_loss_fn
import verl.workers.engine_workers as workers
import importlib.metadata, samebits.trainer.plugin as plugin
from samebits.trainer.engine import SamebitsEngine
from samebits.trainer.objective import samebits_tis
plugin.register(); plugin.register()
assert EngineRegistry.get_engine_cls("language_model", "fsdp2") is SamebitsEngine
assert EngineRegistry._engines["language_model"]["fsdp2"][("cuda", "nvidia")] is SamebitsEngine
assert issubclass(SamebitsEngine, FSDPEngineWithLMHead)
assert get_policy_loss_fn("samebits_tis") is samebits_tis
assert hasattr(workers.initialize_global_process_group_ray, "_samebits_patch")
print(get_device_name(), get_vendor(), importlib.metadata.version("vllm"))
"""
    done = run(code, VERL_USE_EXTERNAL_MODULES="samebits.trainer.plugin", VERL_PLATFORM="cpu")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[-3:-1] == ["cpu", "cpu"]


def test_plugin_after_the_workers_is_refused():
    done = run("import verl.workers.engine_workers, samebits.trainer.plugin", VERL_USE_EXTERNAL_MODULES="", VERL_PLATFORM="")
    assert done.returncode != 0 and "samebits plugin" in done.stderr.splitlines()[-1]


def test_patches_refuse_another_verl(monkeypatch):
    monkeypatch.setattr(verl_patches, "VERL_VERSION", "0.9.2")
    with pytest.raises(verl_patches.PatchError, match=r"verl 0\.9\.1 is installed; samebits patches verl 0\.9\.2 only"):
        verl_patches.apply()


def test_patches_refuse_another_source():
    def initialize_global_process_group_ray():
        """Not verl's."""

    with pytest.raises(verl_patches.PatchError, match="initialize_global_process_group_ray is not the one samebits patches"):
        verl_patches.require_digest(initialize_global_process_group_ray, verl_patches.INIT_GROUP_DIGEST)


def test_other_models_get_verls_own_engine(monkeypatch):
    from verl.workers.engine import FSDPEngineWithLMHead

    import samebits.trainer.plugin  # noqa: F401
    from samebits.trainer.engine import SamebitsEngine

    made = []
    monkeypatch.setattr(FSDPEngineWithLMHead, "__init__", lambda self, *args, **kwargs: made.append((args, kwargs)))

    class Other:
        architectures = ("LlamaForCausalLM",)

    built = SamebitsEngine(model_config=Other(), engine_config=1, optimizer_config=2, checkpoint_config=3)
    assert type(built) is FSDPEngineWithLMHead and len(made) == 1


def test_config_class_reads_a_checkpoint_with_and_without_vllms(tmp_path):
    folder = random_m3.build(tmp_path)
    hf_config.register()
    code = f"""
from transformers import AutoConfig
from samebits.trainer import hf_config
hf_config.register(); hf_config.register()
config = AutoConfig.from_pretrained({str(folder)!r}, attn_implementation="flash_attention_2")
assert type(config) is hf_config.M3Config
assert config.architectures == [hf_config.ARCHITECTURE] and config.get_text_config().num_local_experts == 8
from vllm.transformers_utils.configs.minimax_m3 import MiniMaxM3Config
AutoConfig.register("minimax_m3_vl", MiniMaxM3Config, exist_ok=True)  # as vLLM does before it reads a model
hf_config.register()
config = AutoConfig.from_pretrained({str(folder)!r})
assert type(config) is MiniMaxM3Config and config.architectures == [hf_config.ARCHITECTURE]
"""
    done = run(code)
    assert done.returncode == 0, done.stderr[-2000:]

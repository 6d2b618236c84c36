"""The plugin entry: idempotent, and its patches refuse a vLLM that they were not written for."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from samebits import rollout
from samebits.rollout import vllm_patches


def test_vllm_finds_the_entry_point():
    (found,) = [p for p in entry_points(group="vllm.general_plugins") if p.name == "samebits"]
    assert found.load() is rollout.register


def test_registering_twice_changes_nothing():
    from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

    rollout.register()
    once = LoRAModelRunnerMixin.load_lora_model
    rollout.register()
    assert LoRAModelRunnerMixin.load_lora_model is once


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(vllm_patches, "_applied", False)
    monkeypatch.setattr(vllm_patches.vllm, "__version__", "0.32.0")
    with pytest.raises(vllm_patches.PatchTargetChanged, match=r"the package is not as in 0\.31\.0"):
        vllm_patches.apply()


@pytest.mark.parametrize("patch", ["_memory_adapters", "_capturer", "_routes_on_cpu", "_answers", "_reset_at_rest"])
def test_a_patch_refuses_a_target_that_is_already_something_else(patch):
    rollout.register()
    with pytest.raises(vllm_patches.PatchTargetChanged, match=r"is not as in 0\.31\.0"):
        getattr(vllm_patches, patch)()


def test_other_models_keep_their_lora_manager():
    from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

    rollout.register()
    with pytest.raises(ValueError, match="does not support LoRA yet"):
        LoRAModelRunnerMixin.load_lora_model(object(), object(), None, None)


def test_a_torchvision_that_raises_is_hidden(monkeypatch, tmp_path):
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [n for n in sys.modules if n.split(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    rollout._hide_broken_torchvision()
    try:
        assert sys.modules["torchvision"] is None
        with pytest.raises(ImportError):
            import torchvision  # noqa: F401
    finally:
        sys.modules.pop("torchvision")


def _engine(alive) -> None:
    rollout._end_with_parent()
    alive.send(os.getpid())
    time.sleep(60)


def _server(alive) -> None:
    multiprocessing.get_context("spawn").Process(target=_engine, args=(alive,)).start()
    time.sleep(60)


def test_an_engine_ends_with_a_server_that_was_killed():
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    server = spawn.Process(target=_server, args=(theirs,))
    server.start()
    engine = ours.recv() if ours.poll(60) else None
    assert engine, "the engine process did not start"
    os.kill(server.pid, signal.SIGKILL)
    server.join()
    for _ in range(100):
        if not Path(f"/proc/{engine}").exists() or "Z" in Path(f"/proc/{engine}/stat").read_text().rsplit(")", 1)[1].split()[0]:
            return
        time.sleep(0.1)
    os.kill(engine, signal.SIGKILL)
    pytest.fail("the engine outlived its server")

"""The plugin entry: idempotent, and its patches refuse a vLLM that they were not written for."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

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


WATCHING = ["_capturer", "_whole_outputs", "_slots_at_hand", "_flat_logprobs"]
"""Patches that take over what several functions of vLLM's do together."""


@pytest.mark.parametrize("patch", ["_memory_adapters", "_routes_on_cpu", "_answers", "_reset_at_rest", "_sleep_beside_others", *WATCHING])
def test_a_patch_refuses_a_target_that_is_already_something_else(patch):
    rollout.register()
    vllm_patches.apply_in_worker()
    with pytest.raises(vllm_patches.PatchTargetChanged, match=r"is not as in 0\.31\.0"):
        getattr(vllm_patches, patch)()


_CHANGED = """
import json
import sys
import types
from samebits.rollout import vllm_patches

class Seen(Exception):
    pass

def note(digests):
    raise Seen(digests)

require = vllm_patches._require_sources
for patch in sys.argv[1:]:
    vllm_patches._require_sources = note
    try:
        getattr(vllm_patches, patch)()
    except Seen as seen:
        (digests,) = seen.args
    vllm_patches._require_sources = require
    for function in digests:
        owner = sys.modules[function.__module__]
        *classes, name = function.__qualname__.split(".")
        for each in classes:
            owner = getattr(owner, each)

        changed = types.FunctionType(json.dumps.__code__, {})
        changed.__qualname__ = function.__qualname__
        setattr(owner, name, changed)
        try:
            getattr(vllm_patches, patch)()
        except vllm_patches.PatchTargetChanged as error:
            assert f": {function.__qualname__} is not as in" in str(error), error
            print(function.__qualname__)
        else:
            raise SystemExit(f"{patch} takes a changed {function.__qualname__}")
        setattr(owner, name, function)
vllm_patches.apply()
"""


def test_any_one_changed_function_is_refused_by_its_name():
    """Of those that the patches take over, replaced or not. In a process where nothing was patched yet."""
    done = subprocess.run([sys.executable, "-c", _CHANGED, *WATCHING], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    refused = done.stdout.split()
    assert len(refused) == 21 and {"check_stop", "Scheduler.update_from_output", "FlatLogprobs.append_fast"} <= set(refused)


def test_other_models_keep_their_lora_manager():
    from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

    rollout.register()
    with pytest.raises(ValueError, match="does not support LoRA yet"):
        LoRAModelRunnerMixin.load_lora_model(object(), object(), None, None)


def test_an_engine_sleeps_while_another_job_takes_memory(monkeypatch, caplog):
    """vLLM's own worker; of the card it sees less free memory afterwards than before."""
    import torch
    from vllm.v1.worker.gpu_worker import Worker

    from samebits.rollout import settings

    vllm_patches.apply_in_worker()
    once = Worker.sleep
    vllm_patches.apply_in_worker()
    assert Worker.sleep is once
    free, slept = [], []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (free.pop(0), 100))
    worker = SimpleNamespace(
        sleep_mode_backend=SimpleNamespace(suspend=slept.append),
        vllm_config=SimpleNamespace(model_config=SimpleNamespace(enable_nccl_comm_suspend=False)),
    )
    monkeypatch.setattr(settings, "serving", True)
    for after, said in ((90, 0), (20, 1)):
        free[:] = [50, after]
        Worker.sleep(worker, 1)
        assert len(caplog.records) == said
    assert slept == [1, 1] and "another process took memory" in caplog.text

    def broken(level: int) -> None:
        raise AssertionError("cumem allocator is not available")

    worker.sleep_mode_backend.suspend, free[:] = broken, [50, 90]
    with pytest.raises(AssertionError, match="not available"):
        Worker.sleep(worker, 1)
    monkeypatch.setattr(settings, "serving", False)
    worker.sleep_mode_backend.suspend, free[:] = slept.append, [50, 20]
    with pytest.raises(AssertionError, match="increased"):  # other models keep vLLM's behaviour
        Worker.sleep(worker, 1)


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

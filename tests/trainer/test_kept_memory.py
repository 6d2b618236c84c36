"""Whether verl gives a rank's cached memory back when it sends an adapter."""

from __future__ import annotations

import asyncio
import inspect
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

import samebits.trainer.plugin  # noqa: F401  before verl looks for its platform
from samebits.trainer import verl_patches
from tests.support.training import start_group


def send(workers, sleeps: bool) -> list[str]:
    """What verl's own `update_weights` does, in order."""
    done = []

    def noting(name):
        async def call(*args, **kwargs):
            done.append(f"{name} {kwargs['tags'][0]}" if "tags" in kwargs else name)

        return call

    config = OmegaConf.create({"name": "samebits", "free_cache_engine": sleeps, "checkpoint_engine": {"backend": "naive"}})
    engine = SimpleNamespace(get_per_tensor_param=lambda **_: ([], {"samebits": {}}), is_param_offload_enabled=False)
    worker = SimpleNamespace(
        config=SimpleNamespace(rollout=config),
        rollout=SimpleNamespace(resume=noting("resume"), update_weights=noting("send")),
        actor=SimpleNamespace(engine=engine),
        layered_summon=False,
        peft_merge=False,
        base_sync_done=True,
    )
    workers.events = done
    asyncio.run(inspect.unwrap(workers.ActorRolloutRefWorker.update_weights)(worker, global_steps=1))
    return done


@pytest.fixture
def workers(monkeypatch):
    import verl.workers.engine_workers as workers

    start_group()
    device = SimpleNamespace(
        empty_cache=lambda: workers.events.append("empty"), synchronize=lambda: workers.events.append("wait"), memory_allocated=lambda: 7
    )
    monkeypatch.setattr(workers, "events", [], raising=False)
    monkeypatch.setattr(workers, "get_torch_device", lambda: device)
    monkeypatch.setattr(workers, "log_gpu_memory_usage", lambda *a, **k: None)
    monkeypatch.setattr(workers, "set_expandable_segments", lambda enable: None)
    return workers


def test_an_engine_that_sleeps_wakes_into_memory_that_was_given_back(workers):
    assert send(workers, True) == ["empty", "resume weights", "send", "wait", "empty", "resume kv_cache"]


def test_beside_an_engine_that_does_not_sleep_it_stays(workers):
    verl_patches.keep_cached_memory()
    verl_patches.keep_cached_memory()
    assert send(workers, False) == ["send", "wait"]
    assert workers.get_torch_device().memory_allocated() == 7


def test_another_update_of_weights_is_refused(workers, monkeypatch):
    monkeypatch.setattr(verl_patches, "UPDATE_WEIGHTS_DIGEST", "0" * 16)
    with pytest.raises(verl_patches.PatchError, match="update_weights is not the one samebits patches"):
        verl_patches.keep_cached_memory()


@pytest.mark.parametrize(("sleeps", "kept"), [(True, 0), (False, 1)])
def test_the_job_says_which_it_is(workers, monkeypatch, sleeps, kept):
    from samebits.recipes import job
    from samebits.recipes.config import load_recipe
    from samebits.trainer import engine

    recipe, _ = load_recipe("recipes/tiny_m3_grpo.yaml", ["device=cpu"])
    monkeypatch.setenv(engine.KEEP_MEMORY, job._environment(recipe, sleeps=sleeps)[engine.KEEP_MEMORY])
    calls = []
    monkeypatch.setattr(verl_patches, "keep_cached_memory", lambda: calls.append(1))
    monkeypatch.setattr(engine, "AdapterCheckpointManager", lambda engine: None)
    built = SimpleNamespace(_build_model_optimizer=lambda: None, _is_offload_param=False, _is_offload_optimizer=False, to=lambda **_: None)
    engine.SamebitsEngine.initialize(built)
    assert len(calls) == kept

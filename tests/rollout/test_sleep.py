"""An engine that sleeps between steps and wakes in two parts, as verl has it: weights before an adapter is sent, the cache after it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from tests.support import sleeping_cpu

from .conftest import adapter, prompt, same_bits

pytestmark = pytest.mark.slow
PROMPTS = [prompt(n, n) for n in (3, 130, 300)]


@pytest.fixture(params=["engine", "packed_engine"])
def sleeper(request, monkeypatch):
    for name in ("sleep", "wake_up"):
        monkeypatch.setattr(CPUWorker, name, getattr(CPUWorker, name))  # put back afterwards
    sleeping_cpu.install()
    engine = request.getfixturevalue(request.param)
    engine.clear()
    return engine


def sample(engine, version: int) -> list:
    return engine.run(PROMPTS, version, tokens=6, temperature=0, prompt_logprobs=None)


def test_what_was_asleep_serves_the_next_version_with_the_same_bits(sleeper, tmp_path):
    """Before sleep one version, after it the next: tokens, logprobs and routes are those of an engine that was awake all the time."""
    llm = sleeper.llm
    sleeper.load(adapter(5, 0.2), 1, tmp_path)
    first = sample(sleeper, 1)
    llm.sleep(level=1)
    assert llm.llm_engine.is_sleeping()
    held = sleeper.runner.kv_caches[0]
    assert (held.view(torch.uint8) == 0xFF).all(), "the cache is still there"
    assert all(p.isnan().all() for p in sleeper.model.parameters() if p.is_floating_point()), "the weights are still there"
    llm.wake_up(tags=["weights"])
    assert llm.llm_engine.is_sleeping(), "requests would be scheduled without a cache"
    sleeper.load(adapter(6, 0.2), 2, tmp_path)
    llm.wake_up(tags=["kv_cache"])
    llm.reset_prefix_cache()
    assert not llm.llm_engine.is_sleeping()
    second, again = sample(sleeper, 2), sample(sleeper, 1)
    assert [out.cached for out in second] == [0] * len(PROMPTS)
    for before, after, other in zip(first, again, second, strict=True):
        assert before.ids == after.ids and same_bits(before.logprobs, after.logprobs) and (before.routes == after.routes).all()
        assert not same_bits(before.logprobs, other.logprobs)
        assert (other.routes[:, 1:] >= 0).all()


def test_the_base_can_be_read_between_and_sleep_again(sleeper):
    """What the full check of a step does while the engine sleeps."""
    llm = sleeper.llm
    awake = sleeper.rpc("samebits_base_digests")
    llm.sleep(level=1)
    assert sleeper.rpc("samebits_base_digests") != awake
    llm.wake_up(tags=["weights"])
    assert sleeper.rpc("samebits_base_digests") == awake
    llm.sleep(level=1)
    llm.wake_up()
    assert sleeper.rpc("samebits_base_digests") == awake


def test_requests_that_run_are_never_reset_without_their_routes(sleeper):
    """Where requests do run, vLLM's refusal stands: they would be computed again without the rows that were already told."""
    from vllm import SamplingParams

    scheduler, engine = sleeper.scheduler, sleeper.llm.llm_engine
    engine.add_request("r", {"prompt_token_ids": prompt(9)}, SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False))
    engine.step()
    assert scheduler.running
    with pytest.raises(RuntimeError, match="only supports resetting running requests"):
        scheduler.reset_prefix_cache(reset_running_requests=True)
    sleeper.llm.sleep(level=1)
    assert not scheduler.running
    engine.abort_request(["r"])
    sleeper.llm.wake_up()
    assert [out.cached for out in sleeper.run([prompt(9)])] == [0]


@pytest.mark.long
def test_the_server_of_a_job_sleeps_and_wakes(checkpoint):
    """Over vLLM's asynchronous engine, whose core is a process of its own; also with a request that sleep cuts short."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.rollout.async_sleep", str(checkpoint)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "synced": [True, True],
        "asleep": True,
        "same": True,
        "base_same": True,
        "cut": "aborted",
        "moved": [True, True],
    }

"""Processes that are killed and memory that runs out in a step of the real job on a GPU: one line, a whole checkpoint, and the same command
goes on from it with the samples of a run that nothing happened to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

pytest.importorskip("vllm")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from samebits.recipes.run_dir import read_metrics

STEPS = 5
JOB = [
    "train", "recipes/tiny_m3_grpo.yaml", "device=cuda", "data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.n=4", f"trainer.total_training_steps={STEPS}", "trainer.save_freq=2", "trainer.test_freq=-1",
    "trainer.val_before_train=false", "threads=4", "actor_rollout_ref.rollout.gpu_memory_utilization=0.05",
    "actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes=1000000000",
]  # fmt: skip
"""Small enough for several at once, so that faults may be tried side by side (`pytest -n 3`)."""


class Run:
    """One run directory, started as often as a test likes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder.with_suffix(".log")

    def start(self, *extra: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "samebits.recipes.cli", *JOB, f"run_dir={self.folder}", *extra]
        with self.log.open("a") as log:
            return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | {"COLUMNS": "300"})

    def last(self) -> str:
        return self.log.read_text().strip().splitlines()[-1]

    def saved(self) -> dict[str, bytes]:
        """Files of the checkpoint that a start goes on from; empty while there is none."""
        tracker = self.folder / "checkpoints" / "latest_checkpointed_iteration.txt"
        if not tracker.is_file() or not (step := tracker.read_text()):
            return {}
        here = self.folder / "checkpoints" / f"global_step_{step}"
        return {str(p.relative_to(here.parent)): p.read_bytes() for p in here.rglob("*") if p.is_file()}

    def finish(self) -> list[dict]:
        assert self.start().wait(timeout=600) == 0, self.log.read_text()[-3000:]
        return read_metrics(self.folder / "metrics.jsonl")


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> list[dict]:
    return Run(tmp_path_factory.mktemp("faults") / "straight").finish()


def goes_on(run: Run, straight: list[dict]) -> None:
    lines = run.finish()
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line, other in zip(lines, straight, strict=True):
        assert line["samples/digest"] == other["samples/digest"] and line["mismatch/max_abs"] == 0, line["step"]


def title_of(process: psutil.Process) -> str:
    """What a process calls itself; nothing where it is gone, as the short-lived ones that Ray starts to look at its GPUs."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # a zombie too
        return ""


@pytest.mark.parametrize(
    ("title", "says"), [("VLLM::EngineCore", "engine replica 0: process EngineCore"), ("ray::WorkerDict", "trainer rank 0")]
)
def test_a_killed_process_ends_the_job_in_one_line_and_the_same_command_goes_on(tmp_path, straight, title, says):
    run = Run(tmp_path / "run")
    process = run.start("fault.kind=hang", "fault.step=3")
    while process.poll() is None and not run.saved():
        time.sleep(0.05)
    time.sleep(1)  # into the next step, which hangs
    assert process.poll() is None, run.last()
    tree = psutil.Process(process.pid).children(recursive=True)
    (victim,) = (child for child in tree if title_of(child).startswith(title))
    os.kill(victim.pid, signal.SIGKILL)
    assert process.wait(timeout=120) == 1
    last, kept = run.last(), run.saved()
    assert last.startswith(f"samebits: stopped: {says} (pid {victim.pid}) "), last
    assert any(name.endswith("samebits_trainer.json") for name in kept) and any(name.endswith("data.pt") for name in kept)
    goes_on(run, straight)


def test_a_gpu_without_memory_ends_the_job_in_one_line_and_the_same_command_goes_on(tmp_path, straight):
    run = Run(tmp_path / "run")
    assert run.start("fault.kind=oom", "fault.step=3").wait(timeout=600) == 1
    last = run.last()
    assert last.startswith("samebits: stopped: trainer rank 0: CUDA out of memory. Tried to allocate"), last
    assert "injected" not in last, "the allocator's own words"
    assert any(name.startswith("global_step_2/") for name in run.saved())
    goes_on(run, straight)

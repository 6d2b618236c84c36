"""Several jobs on one machine at the same time, as three seeds on one GPU are run: neither may notice the other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from samebits.recipes.run_dir import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(3600)]
SMALL = ["device=cpu", "threads=1", "data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4"]
SMALL += ["actor_rollout_ref.rollout.n=4", "trainer.total_training_steps=3", "trainer.save_freq=3"]
SMALL += ["trainer.val_before_train=false", "trainer.test_freq=-1"]
EQUAL = "step prompts/digest samples/digest reward/mean train/loss train/grad_norm mismatch/kl replay/rows adapter/version".split()


def start(run: Path, seed: int) -> subprocess.Popen:
    command = [sys.executable, "-m", "samebits.recipes.cli", "train", "recipes/tiny_m3_grpo.yaml", *SMALL, f"seed={seed}", f"run_dir={run}"]
    with run.with_suffix(".log").open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | {"COLUMNS": "300"})


def finish(process: subprocess.Popen, run: Path) -> list[dict]:
    assert process.wait(timeout=1500) == 0, run.with_suffix(".log").read_text()[-3000:]
    return read_metrics(run / "metrics.jsonl")


def test_two_jobs_at_once_do_what_each_does_alone(tmp_path):
    runs = [tmp_path / "zero", tmp_path / "one"]
    before = {p.name for p in Path("/dev/shm").glob("samebits-*")}
    started = [start(run, seed) for seed, run in enumerate(runs)]
    zero, one = (finish(process, run) for process, run in zip(started, runs, strict=True))
    alone = tmp_path / "alone"
    for line, single, other in zip(zero, finish(start(alone, 0), alone), one, strict=True):
        for key in EQUAL:
            assert line[key] == single[key], (key, line[key], single[key])
        assert line["sync/verified"] is True and other["sync/verified"] is True
        assert line["prompts/digest"] != other["prompts/digest"] and line["samples/digest"] != other["samples/digest"]
    assert [line["step"] for line in one] == [1, 2, 3]
    assert {p.name for p in Path("/dev/shm").glob("samebits-*")} <= before

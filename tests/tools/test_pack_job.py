"""A run whose machine is lost goes on elsewhere from what was packed of it, with the bits of one that nothing happened to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from samebits.recipes.run_dir import read_metrics
from tools.measure.pack import Sizes, pack, slice_to, unpack

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800)]
JOB = ["recipes/tiny_m3_grpo.yaml", "device=cpu", "threads=1", "data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4"]
JOB += ["actor_rollout_ref.rollout.n=4", "trainer.save_freq=2", "trainer.test_freq=-1", "trainer.val_before_train=false"]
EQUAL = ("step", "samples/digest", "adapter/digest", "train/loss", "train/grad_norm", "mismatch/kl")


def train(run: Path, steps: int) -> list[dict]:
    command = [sys.executable, "-m", "samebits.recipes.cli", "train", *JOB, f"run_dir={run}", f"trainer.total_training_steps={steps}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=os.environ | {"COLUMNS": "300"})
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return read_metrics(run / "metrics.jsonl")


def test_a_run_goes_on_from_what_was_packed(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    train(here / "runs" / "a", 2)
    (here / "runs" / "a" / "summary.json").unlink()  # as a run that was interrupted
    manifest = pack(here, tmp_path / "parts", "state", Sizes(part=2_000_000, slice=5_000_000))
    carried = [tmp_path / f"slice{number}" for number in range(len(manifest["slices"]))]
    for number, folder in enumerate(carried):
        slice_to(tmp_path / "parts", number, folder)
    unpack(there, carried)
    straight, carried_on = train(here / "runs" / "a", 3), train(there / "runs" / "a", 3)
    assert [[line[key] for key in EQUAL] for line in carried_on] == [[line[key] for key in EQUAL] for line in straight]
    assert [line["step"] for line in carried_on] == [1, 2, 3]

"""Measurements and ablations of the real job on the shipped tiny model: two short runs, and one start for syncs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from samebits.recipes.run_dir import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
SMALL = ["device=cpu", "data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.rollout.n=4"]
RECIPE = "recipes/tiny_m3_grpo.yaml"


def samebits(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", "samebits.recipes.cli", *arguments], capture_output=True, text=True, timeout=1400)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


def test_a_step_with_recomputed_old_logprobs_is_measured_phase_by_phase(tmp_path):
    out = tmp_path / "step.json"
    options = ["--steps", "1", "--warm-up", "1", "--json", str(out)]
    samebits("bench", "step", RECIPE, *SMALL, "ablation.recompute_old_logprobs=true", "numerics.kv_cache=nvfp4", *options)
    found = json.loads(out.read_text())
    phases = found["seconds"]["phases"]
    assert found["kv_cache"] == "nvfp4" and set(phases) == {
        "rollout", "collect", "old logprobs", "advantage", "train", "sync", "check of the sync", "rest",
    }  # fmt: skip
    assert phases["old logprobs"]["seconds"] > 0
    assert all(seconds > 0 for name, seconds in phases["train"]["parts"].items())
    assert set(phases["sync"]["parts"]) == {"export", "digest", "write", "load", "verify", "rest"}
    assert sum(phase["seconds"] for phase in phases.values()) == pytest.approx(found["seconds"]["step"])
    assert phases["rest"]["seconds"] > 0, "phases overlap"
    assert found["sync"]["paths"] == ["file (the trainer is on cpu)"] and found["tokens"]["trained_per_second"] > 0
    assert {"forward", "backward", "optimizer", "export"} <= set(found["memory"]["trainer"])
    assert found["memory"]["engine"]["rollout"]["resident"] > 1 << 28
    assert not list(Path(tmp_path).glob("run*")), "the measured run was not thrown away"


def test_without_replay_and_weights_the_job_trains_and_says_so(tmp_path):
    run = tmp_path / "run"
    left_out = ["checks.routing_replay=false", "actor_rollout_ref.rollout.enable_rollout_routing_replay=false"]
    schedule = ["trainer.total_training_steps=2", "trainer.save_freq=-1", "trainer.test_freq=-1", "trainer.val_before_train=false"]
    samebits("train", RECIPE, f"run_dir={run}", *SMALL, *schedule, *left_out, "ablation.importance_sampling=false")
    lines = read_metrics(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert not any(key.startswith("replay/") for key in line)
        assert line["tis/mean"] == pytest.approx(1.0, abs=1e-6) and line["tis/clipped_fraction"] == 0
        assert line["mismatch/kl"] < 1e-3 and line["sync/verified"] is True
    samebits("report", str(run), str(run), "--html", str(tmp_path / "page.html"), "--png", str(tmp_path / "curves.png"))


def test_syncs_are_measured_part_by_part(tmp_path):
    out = tmp_path / "sync.json"
    samebits("bench", "sync", RECIPE, *SMALL, "--repeat", "3", "--json", str(out))
    found = json.loads(out.read_text())
    assert found["syncs"] == 3 and found["path"] == ["file (the trainer is on cpu)"]
    assert set(found["parts"]) == {"export", "digest", "write", "load", "verify", "rest"}
    assert sum(found["parts"].values()) == pytest.approx(found["seconds"]) and found["parts"]["rest"] > 0
    assert found["seconds"] <= found["with_verl"]
    assert found["bytes"] == 1_351_680 and found["fastest"] <= found["seconds"] <= found["slowest"]
    assert 0 < found["copy_seconds"] < found["seconds"]

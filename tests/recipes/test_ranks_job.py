"""The whole job on two ranks of one machine, as `samebits train` starts it: two trainer processes under FSDP2, an engine for each."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from samebits.alignment_checks.in_run import HISTORY, read_history
from samebits.kernels import tracing
from samebits.recipes.run_dir import read_metrics

pytestmark = [pytest.mark.long, pytest.mark.timeout(7200)]
SMALL = [
    "device=cpu", "threads=1", "data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.rollout.n=4",
    "trainer.total_training_steps=3", "trainer.save_freq=2", "trainer.test_freq=-1", "trainer.val_before_train=false",
]  # fmt: skip
EXACT = ("prompts/digest", "samples/digest", "reward/mean", "replay/rows", "replay/agreement", "tokens/prompt", "tokens/response")


def train(run: Path, ranks: int, *extra: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "samebits.recipes.cli", "train", "recipes/tiny_m3_grpo.yaml", f"run_dir={run}", *SMALL]
    return subprocess.run([*command, f"trainer.n_gpus_per_node={ranks}", *extra], capture_output=True, text=True, timeout=3600)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, Path, subprocess.CompletedProcess]:
    """(a run on one rank, one on two that a fault on replica 1 ended in step 3 and that was then resumed, how the fault ended it)."""
    folder = tmp_path_factory.mktemp("ranks_job")
    one, two = folder / "one", folder / "two"
    done = train(one, 1)
    assert done.returncode == 0, done.stdout + done.stderr
    ended = train(two, 2, "fault.kind=wrong_tensor", "fault.replica=1", "fault.step=3", "tracing.first=2", "tracing.steps=1")
    assert [line["step"] for line in read_metrics(two / "metrics.jsonl")] == [1, 2], ended.stdout + ended.stderr
    done = train(two, 2)
    assert done.returncode == 0, done.stdout + done.stderr
    return one, two, ended


def test_a_wrong_tensor_on_one_replica_ends_the_job_in_one_line(runs):
    ended = runs[2]
    last = (ended.stdout + ended.stderr).strip().splitlines()[-1]
    assert ended.returncode == 1
    assert re.fullmatch(r"samebits: stopped: replica 1 rank 0: base_model\S+\.lora_B\.weight differs: \w+ is held, \w+ was sent", last), (
        last
    )


def test_two_ranks_sample_and_learn_what_one_rank_does(runs):
    one, two = (read_metrics(run / "metrics.jsonl") for run in runs[:2])
    assert [line["step"] for line in two] == [1, 2, 3]
    for a, b in zip(one, two, strict=True):
        assert all(a[key] == b[key] for key in EXACT)
        assert b["train/loss"] == pytest.approx(a["train/loss"], rel=1e-4, abs=1e-6)
        assert b["train/grad_norm"] == pytest.approx(a["train/grad_norm"], rel=1e-3)
        assert 0 <= b["mismatch/kl"] < 1e-8 and b["mismatch/max_abs"] < 1e-3


def test_each_sync_was_verified_on_both_replicas(runs):
    lines = read_metrics(runs[1] / "metrics.jsonl")
    assert all((line["sync/verified"], line["sync/replicas"], line["sync/ranks"]) == (True, 2, 2) for line in lines)
    assert len({line["adapter/digest"] for line in lines}) == 3
    syncs = [entry["results"][0] for entry in read_history(runs[1] / HISTORY) if entry["occasion"] == "sync"]
    assert all(result["status"] == "agree" and result["metrics"]["replicas"] == 2 for result in syncs)
    assert all(result["compared"] == 2 * result["metrics"]["tensors"] for result in syncs)


def test_the_recorded_step_has_both_ranks_and_both_engines(runs):
    records = tracing.read(runs[1] / "traces")
    assert [(r["step"], r["stretch"], r["rank"]) for r in records] == [(2, s, r) for s in ("sync", "train") for r in (0, 1)]
    assert all(record["phases"]["backward"]["volume"]["reduce_scatter"]["bytes"] > 0 for record in records if record["stretch"] == "train")
    assert (runs[1] / "traces" / "engines_2.json").is_file()

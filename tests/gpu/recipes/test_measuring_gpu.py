"""The real job on one GPU: adapters that do not leave it, steps in which no bit differs, and memory told by torch's allocator."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

pytest.importorskip("vllm")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from samebits.recipes.run_dir import read_metrics

RECIPE = "recipes/tiny_m3_grpo.yaml"
SMALL = ["device=cuda", "data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8"]


def samebits(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "samebits.recipes.cli", *arguments], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    print(done.stdout)


def test_syncs_stay_on_the_gpu(tmp_path):
    out = tmp_path / "sync.json"
    samebits("bench", "sync", RECIPE, *SMALL, "--repeat", "10", "--json", str(out))
    found = json.loads(out.read_text())
    assert found["path"] == ["ipc"]
    assert set(found["parts"]) == {"export", "digest", "share", "load", "verify", "rest"}


@pytest.mark.parametrize("sleep", [False, True])
def test_steps_are_measured_and_adapters_shared_with_and_without_sleep(tmp_path, sleep):
    out = tmp_path / "step.json"
    given = f"actor_rollout_ref.rollout.free_cache_engine={str(sleep).lower()}"
    samebits("bench", "step", RECIPE, *SMALL, given, "--steps", "4", "--warm-up", "2", "--json", str(out))
    found = json.loads(out.read_text())
    assert found["sync"]["paths"] == ["ipc"]
    assert set(found["memory"]["trainer"]["backward"]) == {"allocated", "reserved"}
    assert found["memory"]["engine"]["rollout"]["reserved"] > 1 << 20
    engine = [row for row in found["plan"]["phases"] if row["role"] == "engine"]
    assert {row["phase"] for row in engine} == {"rollout", "load", "verify"} and all(row["near"] for row in engine), engine
    held = {row["part"]: row for row in found["plan"]["held"] if row["role"] == "engine"}
    for part, row in held.items():  # the cache is what vLLM left of its share of the card
        (counted,) = row["counted"].values()
        assert abs(counted / row["planned"] - 1) <= (0.1 if part == "kv_cache" else 1e-9), (part, row)
    parts = found["seconds"]["phases"]
    assert ("wake" in parts["sync"]["parts"]) == ("sleep" in parts["collect"]["parts"]) == sleep
    assert parts["train"]["parts"]["rest"] >= -1e-3, "events say that the device worked longer than the update took"


def test_no_bit_differs_where_none_may(tmp_path):
    run = tmp_path / "run"
    schedule = ["trainer.total_training_steps=3", "trainer.save_freq=-1", "trainer.test_freq=-1", "trainer.val_before_train=false"]
    samebits("train", RECIPE, f"run_dir={run}", *SMALL, *schedule, "numerics.parity=bitwise", "checks.every=1")
    lines = read_metrics(run / "metrics.jsonl")
    assert [line["mismatch/max_abs"] for line in lines] == [0.0] * 3 and not (run / "parity").exists()

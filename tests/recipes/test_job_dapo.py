"""Task dapo-math in a real job: problems in DAPO's schema from a local file, graded by `grading`, tracked, and tied to their data.

The shipped tiny model knows arithmetic alone, so the problems are its own, in DAPO's schema and out of DAPO's template.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from samebits.recipes.arithmetic import draw
from samebits.recipes.data import RECORD
from samebits.recipes.math_data import PROMPT_HEAD, PROMPT_TAIL
from samebits.recipes.run_dir import read_metrics
from samebits.recipes.tracking import numbers
from tests.recipes.test_tracking import tensorboard, wandb_offline

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def write(path: Path, split: str, count: int) -> Path:
    rows = [
        {
            "data_source": "math_dapo",
            "prompt": [{"content": PROMPT_HEAD + p.prompt + PROMPT_TAIL, "role": "user"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": p.answer, "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": f"own-{i}"},
        }
        for i, p in enumerate(draw(split, count, seed=3))
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Runs the job; returns its run directory and a function that runs it again with changes."""
    folder = tmp_path_factory.mktemp("dapo")
    train, test = write(folder / "train.jsonl", "train", 40), write(folder / "test.jsonl", "test", 8)
    options = {
        "device": "cpu",
        "run_dir": folder / "run",
        "task": "dapo-math",
        "data_source.train": train,
        "data_source.test": test,
        "data_source.prompt_template": '"{problem}"',
        "grading.overlong_buffer": 8,
        "data.train_batch_size": 4,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
        "actor_rollout_ref.rollout.n": 4,
        "trainer.total_training_steps": 2,
        "trainer.save_freq": 2,
        "trainer.test_freq": 2,
        "tracking.tensorboard": "true",
        "tracking.wandb.mode": "offline",
    }

    def run(**changes):
        arguments = [f"{key}={value}" for key, value in (options | {k.replace("__", "."): v for k, v in changes.items()}).items()]
        command = [sys.executable, "-m", "samebits.recipes.cli", "train", "recipes/tiny_m3_grpo.yaml", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=900)

    done = run()
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return folder / "run", run


def test_the_job_trains_on_the_problems_and_grades_with_the_overlong_penalty(job):
    folder, _ = job
    first, *steps = read_metrics(folder / "metrics.jsonl")
    assert [line["step"] for line in steps] == [1, 2] and all(line["sync/verified"] for line in steps)
    assert first["accuracy/samples"] == 8 and {"accuracy/heldout"} <= set(steps[-1])
    # The model's answers take up to 25 tokens of 26, so with a buffer of 8 each is punished by part of the penalty: no mean of 16 plain
    # rewards of +1 and -1 is a multiple of 1/8 alone.
    tokens, reward = steps[0]["response/tokens_mean"], steps[0]["reward/mean"]
    penalty = (tokens - 18) / 8
    right = (reward + penalty + 1) / 2 * 16
    assert tokens > 18 and right == pytest.approx(round(right), abs=1e-6) and 0 <= round(right) <= 16
    assert all(line["mismatch/kl"] < 1e-3 for line in steps)


def test_the_numbers_are_the_same_in_every_tracker(job):
    folder, _ = job
    want = {line["step"]: numbers(line) for line in read_metrics(folder / "metrics.jsonl")}
    assert tensorboard(folder / "tensorboard") == want and wandb_offline(folder)[0] == want
    assert json.loads((folder / "summary.json").read_text())["warnings"] == []


def test_the_fingerprint_lies_with_the_run_and_its_checkpoint(job):
    folder, _ = job
    record = json.loads((folder / "data" / RECORD).read_text())
    assert json.loads((folder / "checkpoints" / "global_step_2" / RECORD).read_text()) == record
    assert json.loads((folder / "data" / "train.report.json").read_text())["fingerprint"] == record["train"]


def test_a_resumed_run_with_other_data_is_refused_before_anything_starts(job, tmp_path):
    folder, run = job
    changed = (folder.parent / "train.jsonl").read_text().splitlines()
    row = json.loads(changed[5])
    row["reward_model"]["ground_truth"] = "9" + row["reward_model"]["ground_truth"]
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join([*changed[:5], json.dumps(row), *changed[6:]]) + "\n")
    before = (folder / "metrics.jsonl").read_bytes(), (folder / "data" / RECORD).read_bytes()
    done = run(data_source__train=other, trainer__total_training_steps=3)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and f"{folder} holds a run on other data (train set" in done.stderr
    assert before == ((folder / "metrics.jsonl").read_bytes(), (folder / "data" / RECORD).read_bytes())


def test_the_same_data_from_another_file_is_the_same_run(job, tmp_path):
    folder, run = job
    moved = tmp_path / "moved.jsonl"
    moved.write_text("\n".join(reversed((folder.parent / "train.jsonl").read_text().splitlines())) + "\n")
    done = run(data_source__train=moved)
    assert done.returncode == 0 and "has all 2 steps already" in done.stdout

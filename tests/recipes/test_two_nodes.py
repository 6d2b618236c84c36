"""A run on two Ray nodes started with the commands of docs/cluster.md, on two machines that share nothing but the run directory.

They are namespaces of this machine (tests.support.machines): each with its own network address, host name, /dev/shm and temporary files.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from samebits.alignment_checks.in_run import HISTORY, read_history
from samebits.recipes.config import load_recipe
from samebits.recipes.launch import HEAD, commands
from samebits.recipes.run_dir import read_metrics
from tests.support.machines import Machine, absent, machines

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(3600)]
RECIPE = "recipes/tiny_m3_grpo.yaml"
SMALL = ["device=cpu", "threads=1", "data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4"]
SMALL += ["actor_rollout_ref.rollout.n=4", "trainer.total_training_steps=2", "trainer.save_freq=2"]
SMALL += ["trainer.val_before_train=false", "trainer.test_freq=-1"]
EQUAL = "step prompts/digest samples/digest reward/mean train/loss train/grad_norm mismatch/kl replay/rows".split()
LIMIT = 1500


def on_path(command: str) -> list[str]:
    """Words of a command that --check printed, with this environment's programs."""
    words = shlex.split(command)
    at = next(i for i, word in enumerate(words) if "=" not in word)
    return ["env", *words[:at], str(Path(sys.executable).parent / words[at]), *words[at + 1 :]]


@contextmanager
def cluster(told: list[str], at: list[Machine], logs: Path) -> Iterator[None]:
    """Ray nodes by their `ray start` commands, one on each machine."""
    started: list[subprocess.Popen] = []
    try:
        for command, machine in zip(told, at, strict=True):
            own = ["--block"] + ([] if started else [f"--temp-dir={machine.local}/ray", "--include-dashboard=false"])
            log = logs / f"{machine.name}.log"
            with log.open("w") as out:
                started.append(subprocess.Popen(machine.inside([*on_path(command), *own]), stdout=out, stderr=subprocess.STDOUT))
            _wait_for(log, started[-1])
        yield
    finally:
        for node in reversed(started):
            tree = [node, *psutil.Process(node.pid).children(recursive=True)] if node.poll() is None else []
            node.terminate()
            for process in psutil.wait_procs(tree[1:], timeout=20)[1]:
                process.kill()
            node.wait(timeout=20)


def _wait_for(log: Path, node: subprocess.Popen) -> None:
    deadline = time.time() + 300
    while "Ray runtime started" not in log.read_text():
        assert node.poll() is None and time.time() < deadline, log.read_text()
        time.sleep(0.3)


def train(command: list[str], log: Path, status: int = 0) -> str:
    with log.open("w") as out:
        done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, timeout=LIMIT, env=os.environ | {"COLUMNS": "400"})
    assert done.returncode == status, log.read_text()[-3000:]
    return log.read_text()


def test_two_nodes_do_what_one_does_with_two_ranks(tmp_path):
    if why := absent():
        pytest.skip(why)
    recipe_file = str(Path(RECIPE).absolute())
    with tempfile.TemporaryDirectory(prefix="m") as short, machines(2, Path(short)) as both:
        first = both[0]
        run = first.shared / "two"
        overrides = [*SMALL, "trainer.nnodes=2", "trainer.n_gpus_per_node=1", f"run_dir={run}"]
        recipe, verl = load_recipe(recipe_file, overrides)
        printed = commands(recipe, verl, recipe_file, overrides)
        assert [where for where, _ in printed] == ["first node", "each of the other 1 node", "first node", "every node, at the end"]
        told = [command.replace(HEAD, first.address) for _, command in printed]
        with cluster(told[:2], both, tmp_path):
            train(first.inside(on_path(told[2] + os.environ.get("MORE", ""))), tmp_path / "two.log")
        two = read_metrics(run / "metrics.jsonl")
        history = read_history(run / HISTORY)
    one = [*SMALL, "trainer.n_gpus_per_node=2", f"run_dir={tmp_path / 'one'}"]
    train([sys.executable, "-m", "samebits.recipes.cli", "train", RECIPE, *one], tmp_path / "one.log")
    for line, single in zip(two, read_metrics(tmp_path / "one" / "metrics.jsonl"), strict=True):
        for key in EQUAL:
            assert line[key] == single[key], (key, line[key], single[key])
        assert line["sync/verified"] is True and line["adapter/version"] == line["step"]
    assert [line["step"] for line in two] == [1, 2]
    syncs = [h for h in history if h["occasion"] == "sync"]
    assert [h["step"] for h in syncs] == [0, 1, 2]
    assert all(r["status"] == "agree" and r["metrics"]["ranks"] == 2 for h in syncs for r in h["results"])

"""A run on two Ray nodes that were started with the commands of docs/cluster.md, both on this machine, against one node with two ranks."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
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

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(3600)]
RECIPE = "recipes/tiny_m3_grpo.yaml"
SMALL = ["device=cpu", "threads=1", "data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4"]
SMALL += ["actor_rollout_ref.rollout.n=4", "trainer.total_training_steps=2", "trainer.save_freq=2"]
SMALL += ["trainer.val_before_train=false", "trainer.test_freq=-1"]
EQUAL = "step prompts/digest samples/digest reward/mean train/loss train/grad_norm mismatch/kl replay/rows".split()
LIMIT = 1500


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def on_path(command: str) -> list[str]:
    """Words of a command that --check printed, with this environment's programs."""
    words = shlex.split(command)
    at = next(i for i, word in enumerate(words) if "=" not in word)
    return ["env", *words[:at], str(Path(sys.executable).parent / words[at]), *words[at + 1 :]]


@contextmanager
def nodes(starts: list[str], folder: Path) -> Iterator[None]:
    """Ray nodes by their `ray start` commands, each with ports and a folder of its own, which several machines have anyway."""
    started = []
    try:
        for i, start in enumerate(starts):
            first = 21000 + 1000 * i
            # A socket's path may have 107 bytes: no folder of the test's own.
            own = [f"--min-worker-port={first}", f"--max-worker-port={first + 999}", "--block"]
            own += [] if i else [f"--temp-dir={folder}", "--include-dashboard=false"]
            with (folder / f"node{i}.log").open("w") as log:
                started.append(subprocess.Popen([*on_path(start), *own], stdout=log, stderr=subprocess.STDOUT, start_new_session=True))
            _wait_for(folder / f"node{i}.log", started[-1])
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


def train(command: list[str], log: Path, **environment: str) -> None:
    with log.open("w") as out:
        done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, timeout=LIMIT, env=os.environ | environment)
    assert done.returncode == 0, log.read_text()[-3000:]


def test_two_nodes_do_what_one_does_with_two_ranks(tmp_path):
    import tempfile

    port = free_port()
    overrides = [*SMALL, "trainer.nnodes=2", "trainer.n_gpus_per_node=1", f"run_dir={tmp_path / 'two'}", f"cluster.ray_port={port}"]
    recipe, verl = load_recipe(RECIPE, overrides)
    told = [command.replace(HEAD, "127.0.0.1") for _, command in commands(recipe, verl, RECIPE, overrides)]
    assert [where for where, _ in commands(recipe, verl, RECIPE, overrides)] == [
        "first node",
        "each of the other 1 node",
        "first node",
        "every node, at the end",
    ]
    with tempfile.TemporaryDirectory(prefix="ray") as short, nodes(told[:2], Path(short)):
        train(on_path(told[2]), tmp_path / "two.log")
    one = [*SMALL, "trainer.n_gpus_per_node=2", f"run_dir={tmp_path / 'one'}"]
    train([sys.executable, "-m", "samebits.recipes.cli", "train", RECIPE, *one], tmp_path / "one.log")
    lines = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("two", "one")]
    for two, single in zip(*lines, strict=True):
        for key in (
            "step",
            "prompts/digest",
            "samples/digest",
            "reward/mean",
            "train/loss",
            "train/grad_norm",
            "mismatch/kl",
            "replay/rows",
        ):
            assert two[key] == single[key], (key, two[key], single[key])
        assert two["sync/verified"] is True and two["adapter/version"] == two["step"]
    assert [line["step"] for line in lines[0]] == [1, 2]
    syncs = [h for h in read_history(tmp_path / "two" / HISTORY) if h["occasion"] == "sync"]
    assert [h["step"] for h in syncs] == [0, 1, 2]
    assert all(r["status"] == "agree" and r["metrics"]["ranks"] == 2 for h in syncs for r in h["results"])

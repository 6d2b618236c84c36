"""A run on two Ray nodes started with the commands of docs/cluster.md, on two machines that share nothing but the run directory.

They are namespaces of this machine (tests.support.machines): each with its own network address, host name, /dev/shm and temporary files.
So whatever brings an adapter to an engine by a file must have a sender on the engine's own node, and a rank that wrote its shard of a
checkpoint anywhere else than into the run directory is found out by resuming.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

import samebits
from samebits.alignment_checks.in_run import HISTORY, read_history
from samebits.recipes.config import load_recipe
from samebits.recipes.launch import HEAD, commands
from samebits.recipes.nodes import PARTS
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
def ray_node(told: str, machine: Machine, log: Path, *more: str, **environment: str) -> Iterator[None]:
    """A Ray node on `machine`, by its `ray start` command."""
    # Both machines are this one, whose memory other work may need: Ray would end workers that are small themselves.
    environment |= {"RAY_memory_monitor_refresh_ms": "0"}
    with log.open("w") as out:
        node = subprocess.Popen(machine.inside([*on_path(told), "--block", *more], **environment), stdout=out, stderr=subprocess.STDOUT)
    try:
        _wait_for(log, node)
        yield
    finally:
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


def refused(command: list[str], log: Path) -> str:
    """The one line with which a job was refused."""
    text = train(command, log, status=2)
    (line,) = (line for line in text.splitlines() if line.startswith("samebits: "))
    return line.removeprefix("samebits: ")


def train(command: list[str], log: Path, status: int = 0) -> str:
    with log.open("w") as out:
        done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, timeout=LIMIT, env=os.environ | {"COLUMNS": "400"})
    assert done.returncode == status, log.read_text()[-3000:]
    return log.read_text()


def other_install(folder: Path) -> Path:
    """A folder with samebits' parts, one of them with another file, and with the record of another verl."""
    package = Path(samebits.__file__).parent
    (folder / "samebits").mkdir(parents=True)
    (folder / "samebits" / "__init__.py").symlink_to(package / "__init__.py")
    for part in PARTS:
        spec = importlib.util.find_spec(f"samebits.{part}")
        (folder / "samebits" / part).symlink_to(Path(next(iter(spec.submodule_search_locations))).resolve())
    quant = folder / "samebits" / "quant"
    copied = quant.resolve()
    quant.unlink()
    shutil.copytree(copied, quant)
    (quant / "formats_of_tomorrow.py").write_text("")
    (folder / "verl-0.0.1.dist-info").mkdir()
    (folder / "verl-0.0.1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: verl\nVersion: 0.0.1\n")
    return folder


def test_two_nodes_do_what_one_does_with_two_ranks_and_refuse_to_differ(tmp_path):
    if why := absent():
        pytest.skip(why)
    recipe_file = str(Path(RECIPE).absolute())
    with tempfile.TemporaryDirectory(prefix="m") as short, machines(2, Path(short)) as (first, second):
        run = first.shared / "two"
        overrides = [*SMALL, "trainer.nnodes=2", "trainer.n_gpus_per_node=1", f"run_dir={run}"]
        recipe, verl = load_recipe(recipe_file, overrides)
        printed = commands(recipe, verl, recipe_file, overrides)
        assert [where for where, _ in printed] == ["first node", "each of the other 1 node", "first node", "every node, at the end"]
        head, other, job, _ = (command.replace(HEAD, first.address) for _, command in printed)
        command = first.inside(on_path(job))
        with ray_node(head, first, tmp_path / "head.log", f"--temp-dir={first.local}/ray", "--include-dashboard=false"):
            install = other_install(first.shared / "other")
            path = os.pathsep.join([str(install), os.environ.get("PYTHONPATH", "")])
            with ray_node(other, second, tmp_path / "differs.log", PYTHONPATH=path):
                line = refused(command, tmp_path / "versions.log")
                assert line == f"nodes differ, and other versions compute other bits: verl is 0.9.1, but 0.0.1 on {second.address}"
                shutil.rmtree(install / "verl-0.0.1.dist-info")
                line = refused(command, tmp_path / "files.log")
                assert line.startswith(f"node {second.address} has other files of samebits than the first node {first.address}")
            with ray_node(other, second, tmp_path / "second.log"):
                line = refused([*command, f"run_dir={first.local}/two"], tmp_path / "unseen.log")
                assert line.startswith(f"node {second.address} does not see run_dir {first.local}/two")
                train(command, tmp_path / "two.log")
                # The same command goes on from the shards that both nodes wrote.
                train([*command, "trainer.total_training_steps=3"], tmp_path / "three.log")
        two = read_metrics(run / "metrics.jsonl")
        history = read_history(run / HISTORY)
        shards = run / "checkpoints" / "global_step_2" / "actor" / "state"
        assert {path.name.split("_")[2] for path in shards.glob("*.distcp")} == {"0", "1"}
    one = [*SMALL, "trainer.n_gpus_per_node=2", "trainer.total_training_steps=3", f"run_dir={tmp_path / 'one'}"]
    train([sys.executable, "-m", "samebits.recipes.cli", "train", RECIPE, *one], tmp_path / "one.log")
    for line, single in zip(two, read_metrics(tmp_path / "one" / "metrics.jsonl"), strict=True):
        for key in EQUAL:
            assert line[key] == single[key], (key, line[key], single[key])
        assert line["sync/verified"] is True and line["adapter/version"] == line["step"]
    assert [line["step"] for line in two] == [1, 2, 3]
    syncs = [h for h in history if h["occasion"] == "sync"]
    assert [h["step"] for h in syncs] == [0, 1, 2, 2, 3]
    assert all(r["status"] == "agree" and r["metrics"]["ranks"] == 2 for h in syncs for r in h["results"])

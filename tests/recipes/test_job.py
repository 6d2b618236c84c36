"""The whole job for real: verl, Ray, vLLM and the trainer on the shipped tiny model, a few steps each."""

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil
import pytest
from safetensors import safe_open
from typer.testing import CliRunner

from samebits.alignment_checks.in_run import HISTORY, read_history
from samebits.quant.adapter import AdapterSpec, ModelShape, load_peft, target_roles
from samebits.recipes.cli import app
from samebits.recipes.run_dir import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
STEPS = 4
SMALL = ["device=cpu", "data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.rollout.n=4"]
SCHEDULE = [f"trainer.total_training_steps={STEPS}", "trainer.save_freq=2", "trainer.test_freq=4", "checks.every=3"]
KEYS = """step reward/mean mismatch/kl mismatch/max_abs tis/mean tis/max_raw tis/clipped_fraction replay/layers replay/rows
replay/agreement sync/tensors sync/bytes sync/seconds sync/verified adapter/version time/rollout time/train time/step""".split()


def command(run: Path, *extra: str) -> list[str]:
    return [sys.executable, "-m", "samebits.recipes.cli", "train", "recipes/tiny_m3_grpo.yaml", f"run_dir={run}", *SMALL, *SCHEDULE, *extra]


def start(run: Path, *extra: str) -> subprocess.Popen:
    run.parent.mkdir(parents=True, exist_ok=True)
    log = (run.parent / f"{run.name}.log").open("a")
    return subprocess.Popen(command(run, *extra), stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


def finish(run: Path, *extra: str) -> tuple[int, str]:
    process = start(run, *extra)
    status = process.wait(timeout=900)
    return status, (run.parent / f"{run.name}.log").read_text()


def titles(processes: Iterable[psutil.Process]) -> dict[int, str]:
    """Command lines by process id, of those that there still are."""
    found = {}
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found[process.pid] = " ".join(process.cmdline())
    return found


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("job") / "straight"
    status, log = finish(run)
    assert status == 0, log[-3000:]
    return run


def test_every_step_is_logged_verified_and_in_agreement(finished):
    lines = read_metrics(finished / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert "accuracy/heldout" in lines[0] and "accuracy/heldout" in lines[4]
    config = json.loads(Path("recipes/tiny_m3_base/config.json").read_text())
    shape = ModelShape.from_config(config)
    for line in lines[1:]:
        assert set(KEYS) <= set(line), set(KEYS) - set(line)
        assert line["sync/verified"] is True and line["adapter/version"] == line["step"]
        assert line["sync/tensors"] >= len(shape.moe_layers) * shape.experts * 3 * 2
        assert 0 <= line["mismatch/kl"] < 1e-3
        assert line["replay/layers"] == len(shape.moe_layers) and 0.9 < line["replay/agreement"] <= 1
        assert line["replay/rows"] > 16 * 8
        assert 0.9 < line["tis/mean"] < 1.1 and line["tis/clipped_fraction"] == 0
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["steps"] == STEPS and summary["sync_verified_steps"] == STEPS


def test_checks_inside_the_job_are_in_its_history(finished):
    history = read_history(finished / HISTORY)
    assert [(h["step"], h["occasion"]) for h in history] == [
        (0, "preflight"),
        (0, "sync"),
        (1, "full"),
        (1, "sync"),
        (2, "sync"),
        (3, "full"),
        (3, "sync"),
        (4, "sync"),
    ]
    full = {r["name"]: r for r in history[2]["results"]}
    assert set(full) == {"logprobs.generated", "routing.rows", "weights.base"}
    assert all(r["status"] == "agree" and r["compared"] > 0 for h in history for r in h["results"])
    assert full["logprobs.generated"]["metrics"]["tokens"] > 100 and full["logprobs.generated"]["metrics"]["k3"] < 1e-6


def test_a_run_is_verified_with_its_newest_adapter(finished, tmp_path):
    command = [sys.executable, "-m", "samebits.recipes.cli", "verify", "weights", str(finished), "--json", str(tmp_path / "r.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "r.json").read_text())["settings"]["adapter_version"] == 4
    copy = tmp_path / "broken"
    shutil.copytree(finished, copy, ignore=shutil.ignore_patterns("checkpoints", ".*"))
    file = copy / "adapters" / "step_4" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    done = subprocess.run([*command[:5], str(copy)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1
    assert "step_4" in done.stderr and "cannot be read" in done.stderr


def test_a_finished_run_is_measured_from_what_it_left(finished, tmp_path):
    out = tmp_path / "step.json"
    done = CliRunner().invoke(app, ["bench", "step", str(finished), "--warm-up", "1", "--json", str(out)])
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    assert found["steps"] == STEPS - 1
    assert {"rollout", "collect", "full check", "advantage", "train", "sync", "check of the sync", "rest"} == set(
        found["seconds"]["phases"]
    )
    assert {"forward", "backward", "optimizer", "rest"} == set(found["seconds"]["phases"]["train"]["parts"])
    assert found["sync"]["paths"] == ["file (the trainer is on cpu)"] and found["tokens"]["generated_per_second"] > 0


def test_adapters_are_peft_folders_with_every_expert(finished):
    shape = ModelShape.from_config(json.loads(Path("recipes/tiny_m3_base/config.json").read_text()))
    spec = AdapterSpec(shape, 32, target_roles("all"))
    two, four = (load_peft(finished / "adapters" / f"step_{n}", spec) for n in (2, 4))
    assert any((two[name] != four[name]).any() for name in two)
    with safe_open(finished / "adapters" / "step_4" / "adapter_model.safetensors", "pt") as f:
        assert f.metadata()["adapter_version"] == "4"
    experts = [name for name in four if ".experts." in name and name.endswith("lora_B.weight")]
    assert sum(bool(four[name].any()) for name in experts) > len(experts) // 2


def test_the_same_command_again_changes_nothing(finished):
    before = (finished / "metrics.jsonl").read_bytes()
    status, log = finish(finished)
    assert status == 0 and "has all 4 steps already" in log
    assert (finished / "metrics.jsonl").read_bytes() == before


class Ends:
    """One run that is brought to an end in step 3 again and again, each time resumed by the same command from the checkpoint of step 2."""

    # Evaluations before training would take most of the time of these starts.
    QUIET = ("trainer.val_before_train=false", "trainer.test_freq=-1")

    def __init__(self, folder: Path) -> None:
        self.run = folder / "run"
        self.kept: dict[str, str] = {}

    def preflights(self) -> int:
        history = self.run / HISTORY
        return sum(h["occasion"] == "preflight" for h in read_history(history)) if history.is_file() else 0

    def ended_by(self, who: str | None) -> tuple[float, int, str, int]:
        """Start, kill the process whose title begins with `who` (None: the command) in step 3; seconds, status, last line, pid."""
        before, resumed = self.preflights(), bool(self.kept)
        process = start(self.run, *self.QUIET, "fault.kind=hang", "fault.step=3")
        try:
            return self._ended_by(who, process, lambda: self.preflights() > before if resumed else self.last_step() == 2)
        finally:
            if process.poll() is None:  # or the next start finds the folder in use
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _ended_by(self, who: str | None, process: subprocess.Popen, begun: Callable[[], bool]) -> tuple[float, int, str, int]:
        root, deadline = psutil.Process(process.pid), time.time() + 900
        victim, tree = (process.pid if who is None else None), {}
        while victim is None or not begun():
            assert process.poll() is None, self.log()[-3000:]
            assert time.time() < deadline, (titles(tree.values()), self.log()[-3000:])
            time.sleep(0.05)
            tree = {child.pid: child for child in root.children(recursive=True)}
            if who is not None:
                victim = next((pid for pid, title in titles(tree.values()).items() if title.startswith(who)), None)
        time.sleep(3)  # into the step, which hangs: it is still the one after this, however slow the machine
        tree |= {child.pid: child for child in root.children(recursive=True)}
        killed = time.time()
        os.kill(victim, signal.SIGKILL)
        status = process.wait(timeout=120)
        seconds = time.time() - killed
        _, alive = psutil.wait_procs(tree.values(), timeout=400)  # Ray's agents look for their raylet every minute
        alive = [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        assert not alive, [(p.pid, p.name()) for p in alive]
        self.keep()
        return seconds, status, self.log().strip().splitlines()[-1], victim

    def last_step(self) -> int:
        metrics = self.run / "metrics.jsonl"
        lines = read_metrics(metrics) if metrics.is_file() else []
        return lines[-1]["step"] if lines else -1

    def log(self) -> str:
        return (self.run.parent / f"{self.run.name}.log").read_text()

    def keep(self) -> None:
        """The checkpoint of step 2 is there, the only one, and byte for byte what it was at the end before."""
        folder = self.run / "checkpoints"
        assert [p.name for p in folder.glob("global_step_*")] == ["global_step_2"]
        assert (folder / "latest_checkpointed_iteration.txt").read_text() == "2"
        found = {str(p.relative_to(folder)): hashlib.blake2b(p.read_bytes()).hexdigest() for p in folder.rglob("*") if p.is_file()}
        assert self.kept in ({}, found) and "global_step_2/data.pt" in found
        self.kept = found
        assert self.last_step() == 2


@pytest.fixture(scope="module")
def ends(tmp_path_factory) -> Ends:
    return Ends(tmp_path_factory.mktemp("ends"))


def test_skipped_sync_stops_the_job_and_names_what_is_stale(ends):
    status, log = finish(ends.run, *ends.QUIET, "fault.kind=skip_sync", "fault.step=3")
    assert status == 1
    last = log.strip().splitlines()[-1]
    assert last.startswith("samebits: stopped:") and "version 2 is held, the trainer is at 3" in last and "lora_A" in last
    ends.keep()


def test_a_killed_trainer_ends_the_job_in_one_line(ends):
    seconds, status, last, pid = ends.ended_by("ray::WorkerDict")
    assert status == 1 and seconds < 60
    assert re.fullmatch(
        rf"samebits: stopped: trainer rank 0 \(pid {pid}\) (was )?ended.*, without an error of its own \(log: .*\)", last
    ), last


def test_a_killed_engine_ends_the_job_in_one_line(ends):
    seconds, status, last, pid = ends.ended_by("VLLM::EngineCore")
    assert status == 1 and seconds < 60
    assert last == f"samebits: stopped: engine replica 0: process EngineCore (pid {pid}) was ended by signal 9 (SIGKILL)"


@pytest.mark.long
def test_a_killed_server_ends_the_job_in_one_line(ends):
    seconds, status, last, pid = ends.ended_by("ray::SamebitsServer")
    assert status == 1 and seconds < 60
    assert last.startswith(f"samebits: stopped: server of engine replica 0 (pid {pid}) "), last


@pytest.mark.long
def test_a_trainer_out_of_memory_ends_the_job_in_one_line(ends):
    status, log = finish(ends.run, *ends.QUIET, "fault.kind=oom", "fault.step=3")
    last = log.strip().splitlines()[-1]
    assert status == 1
    assert last.startswith("samebits: stopped: trainer rank 0: CUDA out of memory. Tried to allocate 2.00 GiB."), last
    ends.keep()


def test_a_killed_command_leaves_nothing_behind(ends):
    _, status, _, _ = ends.ended_by(None)
    assert status == -signal.SIGKILL


def test_a_run_that_ended_so_often_goes_on_as_if_nothing_had_happened(ends, finished):
    status, log = finish(ends.run, *ends.QUIET)
    assert status == 0, log[-3000:]
    straight = {line["step"]: line for line in read_metrics(finished / "metrics.jsonl")}
    resumed = {line["step"]: line for line in read_metrics(ends.run / "metrics.jsonl")}
    assert sorted(resumed) == [1, 2, 3, 4]
    for step in (3, 4):
        for key in ("prompts/digest", "samples/digest", "reward/mean", "replay/rows"):
            assert resumed[step][key] == straight[step][key], (step, key)
        for key in ("train/loss", "train/grad_norm"):
            assert resumed[step][key] == pytest.approx(straight[step][key], rel=1e-5, abs=1e-9), (step, key)


def test_an_engine_that_did_not_start_is_explained_by_its_own_error(tmp_path):
    from samebits.recipes.job import _with_engine_cause

    died = "Engine core initialization failed. See root cause above. Failed core proc(s): {}"
    assert _with_engine_cause("kl too large", tmp_path) == "kl too large"
    assert str(tmp_path) in _with_engine_cause(died, tmp_path)
    killed = "('EngineCore encountered an issue. See stack trace (above) for the root cause.', "
    assert _with_engine_cause(killed, tmp_path).startswith("the engine process died") and str(tmp_path) in _with_engine_cause(
        killed, tmp_path
    )
    log = tmp_path / "worker-1.err"
    log.write_text(
        "(EngineCore pid=7) ERROR 11-29 core.py:9] Traceback (most recent call last):\n"
        "(EngineCore pid=7) ERROR 11-29 core.py:9] ValueError: No available memory for the cache blocks.\n"
        f"(EngineCore pid=7) ERROR 11-29 core.py:9] RuntimeError: {died}\n"
    )
    text = _with_engine_cause(died, tmp_path)
    assert text == f"the engine stopped: ValueError: No available memory for the cache blocks. (log: {log})"

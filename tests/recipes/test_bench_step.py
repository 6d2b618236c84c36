"""What `samebits bench step` makes of metrics, and the lines that a step's phases become."""

from __future__ import annotations

import json

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from samebits.recipes import bench_step
from samebits.recipes.cli import app
from samebits.recipes.config import RecipeError, load_recipe
from samebits.recipes.phases import step_phases, sync_metrics
from samebits.recipes.run_dir import prepare

TIMES = {
    "time/rollout": 4.0, "time/generate": 3.0, "time/reward": 0.5, "time/enqueue": 0.25, "time/collect": 0.5, "time/advantage": 0.25,
    "time/train": 2.0, "time/forward": 0.75, "time/backward": 1.0, "time/optimizer": 0.125, "time/sync": 1.0, "time/sync_check": 0.125,
    "sync/export_seconds": 0.25, "sync/digest_seconds": 0.125, "sync/write_seconds": 0.0625, "sync/load_seconds": 0.125,
    "sync/verify_seconds": 0.125, "time/step": 8.0,
}  # fmt: skip


def line(step: int, scale: float = 1.0, **more) -> dict:
    return {
        "step": step,
        **{key: value * scale for key, value in TIMES.items()},
        "sync/bytes": 1_351_680,
        "sync/tensors": 138,
        "sync/seconds": 0.9,
        "sync/path": "ipc",
        "tokens/prompt": 100,
        "tokens/response": 300,
        "memory/trainer/forward/allocated": float(1000 * step),
        "memory/engine/rollout/reserved": 77.0,
        **more,
    }


@pytest.fixture
def recipe(tmp_path):
    return load_recipe("recipes/tiny_m3_grpo.yaml", ["device=cpu", f"run_dir={tmp_path / 'run'}"])


LINES = [{"step": 0, "accuracy/heldout": 0.4}, line(1, 50.0, **{"time/check": 9.0}), line(2, 0.5), line(3, 1.5)]


def test_phases_add_up_to_the_step_and_their_parts_to_them(recipe):
    found = bench_step.measured("r", recipe[0], LINES, warm_up=1)
    seconds = found["seconds"]
    assert (seconds["step"], seconds["fastest"], seconds["slowest"], found["steps"]) == (8.0, 4.0, 12.0, 2)
    phases = seconds["phases"]
    assert sum(phase["seconds"] for phase in phases.values()) == pytest.approx(8.0)
    assert phases["rest"]["seconds"] == pytest.approx(8.0 - 4.0 - 0.5 - 0.25 - 2.0 - 1.0 - 0.125)
    assert phases["train"]["parts"] == pytest.approx({"forward": 0.75, "backward": 1.0, "optimizer": 0.125, "rest": 0.125})
    assert phases["sync"]["parts"]["rest"] == pytest.approx(1.0 - 0.6875) and "share" not in phases["sync"]["parts"]
    assert found["share"]["rollout"] == 0.5 and found["share"]["train/backward"] == 0.125
    assert "full check" not in phases and found["full_check_seconds"] == 9.0, "it was in a step that is left out"


def test_rates_memory_and_bytes(recipe):
    found = bench_step.measured("r", recipe[0], LINES, warm_up=1)
    tokens = found["tokens"]
    assert (tokens["generated_per_second"], tokens["trained_per_second"], tokens["per_second"]) == (100.0, 200.0, 50.0)
    assert found["memory"] == {"trainer": {"forward": {"allocated": 3000}}, "engine": {"rollout": {"reserved": 77}}}
    sync = found["sync"]
    assert (sync["bytes"], sync["paths"]) == (1_351_680, ["ipc"])
    assert sync["share_of_packed"] == sync["bytes"] / sync["full_packed_bytes"] and sync["full_bf16_bytes"] > 2 * sync["full_packed_bytes"]
    json.dumps(found)


def test_the_first_step_is_told_by_its_samples_and_its_loss_as_fp32(recipe):
    seen = {"samples/digest": "aa", "train/loss": 0.1, "mismatch/max_abs": 0.0}
    found = bench_step.measured("r", recipe[0], [line(1, **seen), line(2)], warm_up=1)["first"]
    assert found == {"samples": "aa", "loss": torch.tensor(0.1, dtype=torch.float32).item(), "max_abs": 0.0}
    assert bench_step.measured("r", recipe[0], LINES, warm_up=1)["first"] is None
    assert bench_step.measured("r", recipe[0], [line(5, **seen)], warm_up=0)["first"] is None


def test_a_full_check_in_a_measured_step_is_a_phase(recipe):
    found = bench_step.measured("r", recipe[0], [*LINES, line(4, **{"time/check": 0.3})], warm_up=1)
    assert found["seconds"]["phases"]["full check"]["seconds"] == pytest.approx(0.1)


def test_a_run_of_before_is_measured_as_far_as_it_recorded(recipe):
    old = {
        "step": 1,
        "time/step": 2.0,
        "time/train": 0.5,
        "time/sync": 0.25,
        "time/rollout": 1.0,
        "sync/bytes": 1,
        "sync/tensors": 1,
        "sync/seconds": 0.2,
    }
    found = bench_step.measured("r", recipe[0], [old], warm_up=0)
    assert set(found["seconds"]["phases"]) == {"rollout", "train", "sync", "rest"} and found["tokens"]["prompt"] is None
    console = Console(record=True, width=140)
    bench_step.show(found, console)
    assert "a path that was not recorded" in console.export_text()


def test_the_tables_show_every_phase_and_role(recipe):
    console = Console(record=True, width=160)
    bench_step.show(bench_step.measured("r", recipe[0], LINES, warm_up=1), console)
    text = console.export_text()
    for word in ("rollout", "  generate", "backward", "check of the sync", "rest", "trainer", "engine", "allocated", "reserved", "by ipc"):
        assert word in text, word


def test_no_step_to_measure_is_one_line(recipe):
    with pytest.raises(bench_step.NotMeasured, match="3 steps, of which the first 3 are left out"):
        bench_step.measured("r", recipe[0], LINES, warm_up=3)


@pytest.mark.parametrize("key", bench_step.OWN)
def test_what_the_measurement_sets_cannot_be_set(key):
    with pytest.raises(RecipeError, match=f"{key} is set by the measurement itself"):
        bench_step.run("recipes/tiny_m3_grpo.yaml", [f"{key}=1"], 1, 1, Console(), False)


def command(*arguments: str):
    return CliRunner().invoke(app, ["bench", *arguments])


def test_a_run_directory_is_read_and_written_as_json(recipe, tmp_path):
    prepare(*recipe)
    folder = recipe[0].folder
    (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in LINES))
    out = tmp_path / "out.json"
    done = command("step", str(folder), "--warm-up", "1", "--json", str(out))
    assert done.exit_code == 0, done.output
    assert json.loads(out.read_text())["seconds"]["step"] == 8.0 and "backward" in done.stdout
    done = command("step", str(folder), "seed=1")
    assert done.exit_code == 2 and "seed=1 would change nothing" in done.stderr
    done = command("step", str(folder), "--warm-up", "5")
    assert done.exit_code == 2 and "none to measure" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("what", ["step", "sync"])
def test_a_recipe_that_is_not_there_is_one_line(what, monkeypatch):
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "samebits.trainer.plugin,samebits.rollout.verl_plugin")
    done = command(what, "none.yaml", "--verbose")
    assert done.exit_code == 2 and done.stderr == "samebits: no recipe at none.yaml\n"


def test_phases_of_the_engine_and_verl_s_timers_become_times_and_memory():
    metrics = {"actor/phase/forward/seconds": 1.5, "actor/phase/forward/allocated": 7, "actor/grad_norm": 1.0}
    found = step_phases(metrics, {"gen": 0.5, "adv": 0.25, "step": 3.0})
    assert found == {"time/collect": 0.5, "time/advantage": 0.25, "time/forward": 1.5, "memory/trainer/forward/allocated": 7.0}


def report(seconds: float, path: str = "ipc", reason: str = "", waiting: dict | None = None) -> dict:
    return {
        "seconds": seconds,
        "path": path,
        "reason": reason,
        "parts": {"export": seconds / 2, "load": seconds / 4},
        "memory": {"trainer": {"export": {"allocated": 10}}, "engine": {"load": {"allocated": int(seconds * 100)}}},
        "waiting": waiting or {},
    }


def test_a_sync_is_as_slow_as_its_slowest_replica_and_as_large_as_its_largest():
    found = sync_metrics(
        [report(2.0, waiting={"wake": 0.5}), report(1.0, "file", "the engine is on another device", {"wake": 0.75, "sleep": 0.1})]
    )
    assert found == {
        "sync/path": "file (the engine is on another device), ipc",
        "sync/export_seconds": 1.0,
        "sync/load_seconds": 0.5,
        "time/wake": 0.75,
        "time/sleep": 0.1,
        "memory/trainer/export/allocated": 10.0,
        "memory/engine/load/allocated": 200.0,
    }

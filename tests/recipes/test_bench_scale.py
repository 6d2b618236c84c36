"""What `samebits bench step --gpus` refuses, how it scales a recipe, and what it makes of measurements."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from rich.console import Console
from typer.testing import CliRunner

from samebits.recipes import bench_scale, bench_step, bench_traces
from samebits.recipes.cli import app
from samebits.recipes.config import RecipeError, load_recipe

RECIPE = "recipes/tiny_m3_grpo.yaml"


def verl(*overrides: str):
    return load_recipe(RECIPE, ["device=cpu", *overrides])[1]


@pytest.mark.parametrize(("text", "want"), [("4", (1, 4)), ("8,2,4", (1, 2, 4, 8)), ("1", (1,)), ("2, 2", (1, 2))])
def test_one_gpu_is_always_measured(text, want):
    assert bench_scale.parse(text) == want


@pytest.mark.parametrize("text", ["3", "2,6", "0", "-2", "two", "", "2,", "2.0"])
def test_what_is_no_power_of_two_is_refused(text):
    with pytest.raises(RecipeError, match=r"--gpus") as caught:
        bench_scale.parse(text)
    assert "\n" not in str(caught.value)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 5), st.integers(0, 3))
def test_work_for_each_gpu_stays_or_the_whole_does(power, own_power):
    gpus, own = 2**power, 2**own_power
    config = OmegaConf.create(
        {
            "trainer": {"nnodes": 1, "n_gpus_per_node": own},
            "data": {"train_batch_size": 16},
            "actor_rollout_ref": {"rollout": {"n": 2}},
        }
    )
    grown = dict(one.split("=") for one in bench_scale.overrides_for(gpus, config, total=False))
    same = dict(one.split("=") for one in bench_scale.overrides_for(gpus, config, total=True))
    for key in bench_scale.BATCHES:
        assert int(grown[key]) * own == 16 * gpus and int(same[key]) == 16
    assert int(grown[bench_scale.GPUS]) == int(same[bench_scale.GPUS]) == gpus


def test_batches_that_do_not_divide_are_refused():
    odd = verl("data.train_batch_size=3", f"{bench_scale.GPUS}=2", "actor_rollout_ref.rollout.n=2")
    with pytest.raises(RecipeError, match="--gpus: data.train_batch_size=3 of trainer.n_gpus_per_node=2 is no whole batch on 1 GPUs"):
        bench_scale.overrides_for(1, odd, total=False)
    with pytest.raises(RecipeError, match="--total: data.train_batch_size=3 x 2 samples do not divide over 4 GPUs"):
        bench_scale.overrides_for(4, odd, total=True)
    with pytest.raises(RecipeError, match="--gpus measures one host: trainer.nnodes=2"):
        bench_scale.overrides_for(2, verl("trainer.nnodes=2"), total=False)


def bench(*arguments: str):
    return CliRunner().invoke(app, ["bench", "step", *arguments], env={"VERL_USE_EXTERNAL_MODULES": "samebits.trainer.plugin"})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((RECIPE, "device=cpu", "--gpus", "6"), "--gpus: 6 is no power of two"),
        ((RECIPE, "device=cpu", "--total"), "--total goes with --gpus"),
        ((RECIPE, "device=cpu", "trainer.n_gpus_per_node=2", "--gpus", "2"), "trainer.n_gpus_per_node is set by --gpus"),
        ((RECIPE, "device=cpu", "tracing.steps=2"), "tracing.steps is set by the measurement itself"),
        ((RECIPE, "device=cpu", "--gpus", "4096"), "data.train_batch_size=65536 is more than the"),
        (("none.yaml", "--gpus", "2"), "no recipe at none.yaml"),
    ],
)
def test_errors_are_one_line_before_anything_starts(arguments, says, monkeypatch):
    monkeypatch.setattr("samebits.recipes.job.train", lambda *_, **__: pytest.fail("it was started"))
    done = bench(*arguments, "--verbose")
    assert done.exit_code == 2 and says in done.stderr and done.stderr.count("\n") == 1, done.output


def test_more_gpus_than_there_are_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    bench_scale.require_gpus((1, 2), "cuda")
    bench_scale.require_gpus((1, 64), "cpu")
    with pytest.raises(RecipeError, match="--gpus: 4 asked for, this machine has 2"):
        bench_scale.require_gpus((1, 4), "cuda")


def phase(seconds: float, communication: float, exposed: float, **volume: tuple[int, int, int]) -> dict:
    return {
        "seconds": seconds,
        "overlap": {"communication": communication, "exposed": exposed, "compute": seconds / 2},
        "volume": {kind: dict(zip(("calls", "bytes", "unsized"), counts, strict=True)) for kind, counts in volume.items()},
        "peak": None,
    }


def recording(step: int, rank: int, stretch: str, **phases: dict) -> dict:
    return {"step": step, "rank": rank, "stretch": stretch, "phases": phases, "held": {}, "device": "cpu"}


RECORDS = [
    recording(
        5, 0, "train", forward=phase(1.0, 0.2, 0.1, all_gather=(4, 400, 0)), backward=phase(2.0, 1.0, 0.5, reduce_scatter=(3, 300, 1))
    ),
    recording(
        6, 0, "train", forward=phase(3.0, 0.4, 0.3, all_gather=(4, 600, 0)), backward=phase(2.0, 1.0, 0.5, reduce_scatter=(3, 300, 1))
    ),
    recording(5, 0, "sync", export=phase(0.5, 0.5, 0.5, all_gather=(2, 50, 0)), other=phase(0.0, 0.0, 0.0)),
    recording(
        5, 1, "train", forward=phase(1.0, 0.2, 0.2, all_gather=(4, 400, 0)), backward=phase(3.0, 3.0, 3.0, reduce_scatter=(3, 300, 1))
    ),
]


def test_recordings_become_means_of_a_step_by_rank_and_phase():
    found = bench_traces.communication(RECORDS)
    assert found["steps"] == [5, 6] and [rank["rank"] for rank in found["ranks"]] == [0, 1]
    own = found["ranks"][0]["phases"]
    assert list(own) == ["forward", "backward", "export"]
    assert (own["forward"]["seconds"], own["forward"]["exposed"], own["forward"]["bytes"]) == pytest.approx((2.0, 0.2, 500))
    assert own["backward"]["volume"]["reduce_scatter"] == {"calls": 3, "bytes": 300, "unsized": 1}
    assert bench_traces.exposed_share(found) == pytest.approx((0.1 + 1.5) / (0.5 + 1.5)), "rank 1, of which one of two steps was recorded"
    assert bench_traces.communication([]) is None and bench_traces.exposed_share(None) is None


def measurement(gpus: int, seconds: float, tokens: float, peak: int) -> dict:
    phases = {name: {"seconds": seconds * share, "parts": {}} for name, share in (("rollout", 0.5), ("train", 0.4), ("rest", 0.1))}
    return {
        "subject": "r", "profile": "w4a16", "device": "cuda", "steps": 2, "gpus": gpus,
        "seconds": {"step": seconds, "fastest": seconds, "slowest": seconds, "phases": phases},
        "share": {name: found["seconds"] / seconds for name, found in phases.items()},
        "full_check_seconds": None,
        "tokens": {"prompt": tokens / 4, "response": tokens * 3 / 4, "generated_per_second": 1.0, "trained_per_second": 1.0,
                   "per_second": tokens / seconds},
        "memory": {"trainer": {"forward": {"allocated": peak}}, "engine": {"rollout": {"resident": 2 * peak}}},
        "sync": {"bytes": 1, "tensors": 1, "paths": ["ipc"], "full_packed_bytes": None},
        "communication": bench_traces.communication(RECORDS) if gpus > 1 else None,
        "plan": None, "first": {"samples": "aa", "loss": 0.25, "max_abs": 0.0},
    }  # fmt: skip


def test_the_table_holds_gpus_against_one():
    found = bench_scale.result("r", False, [measurement(1, 2.0, 1000.0, 10**9), measurement(4, 2.5, 4000.0, 2 * 10**9)])
    one, four = found["points"]
    assert one["efficiency"] == 1.0 and four["efficiency"] == pytest.approx(4000 / 2.5 / (4 * 500)) == pytest.approx(0.8)
    assert four["phase_ratio"] == pytest.approx({"rollout": 1.25, "train": 1.25, "rest": 1.25})
    assert one["exposed_share"] is None and four["exposed_share"] == pytest.approx(0.8)
    json.dumps(found)
    console = Console(record=True, width=200)
    bench_scale.show(found, console)
    text = console.export_text()
    for word in (
        "the same batch for each GPU", "80.0%", "1.0000 (x 1.25)", "4 GPUs", "2.000", "4.000", "4 all_gather", "exposed share", "3.20",
    ):  # fmt: skip
        assert word in text, word
    assert found["first_step"] is None and "first step" not in text


def test_a_fixed_batch_is_said(tmp_path):
    found = bench_scale.result("r", True, [measurement(1, 2.0, 1000.0, 1), measurement(2, 1.0, 1000.0, 1)])
    assert found["points"][1]["efficiency"] == 1.0 and found["work"] == "total"


@pytest.mark.parametrize(
    ("other", "want", "says"),
    [
        ({}, {"samples": True, "loss": True}, "the same samples, the same loss (0.25, 0.25), trainer and engine at most 0 apart"),
        ({"loss": 0.2500001, "max_abs": 0.5}, {"samples": True, "loss": False}, "the same samples, OTHER loss (0.25, 0.2500001), tr"),
        ({"samples": "ab"}, {"samples": False, "loss": True}, "OTHER samples, the same loss"),
    ],
)
def test_the_same_batch_begins_alike_on_any_number_of_gpus(other, want, says):
    one, two = measurement(1, 2.0, 1000.0, 1), measurement(2, 1.0, 1000.0, 1)
    found = bench_scale.result("r", True, [one, two | {"first": two["first"] | other}])
    assert found["first_step"] == want
    console = Console(record=True, width=200)
    bench_scale.show(found, console)
    assert says in console.export_text()
    assert bench_scale.result("r", True, [one | {"first": None}, two])["first_step"] is None


def test_every_number_of_gpus_is_measured_with_its_own_settings(monkeypatch, tmp_path):
    asked = []

    def run(recipe, overrides, **options):
        asked.append((overrides, options))
        return measurement(2 ** (len(asked) - 1), 1.0, 100.0, 1)

    monkeypatch.setattr(bench_step, "run", run)
    out = tmp_path / "out.json"
    done = bench(RECIPE, "device=cpu", "seed=3", "--gpus", "2", "--steps", "3", "--traced", "2", "--json", str(out), "--verbose")
    assert done.exit_code == 0, done.output
    keys = (bench_scale.GPUS, *bench_scale.BATCHES)
    for n, (overrides, _) in zip((1, 2), asked, strict=True):
        assert overrides == ["device=cpu", "seed=3", *(f"{key}={value}" for key, value in zip(keys, (n, 16 * n, 16 * n), strict=True))]
    assert all(options["steps"] == 3 and options["traced"] == 2 for _, options in asked)
    assert json.loads(out.read_text())["schema"] == bench_scale.SCHEMA

"""Runs are pooled when nothing but their seed differs, and never otherwise; what is told of a group is what its metrics hold."""

import json
import math
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from rich.console import Console
from typer.testing import CliRunner

from samebits.recipes import run_report
from samebits.recipes.cli import app
from samebits.recipes.config import load_recipe
from samebits.recipes.run_dir import prepare
from samebits.recipes.run_groups import FOLLOWS, Group, figures, geometric, grouped, interval
from samebits.recipes.run_report import Run
from tests.support.browser import DESKTOP, PHONE, Browser

GOLDEN = Path(__file__).parent / "data" / "run_groups_table.txt"
ABLATIONS = {
    "": [],
    "routing_replay=false": ["checks.routing_replay=false", "actor_rollout_ref.rollout.enable_rollout_routing_replay=false"],
    "importance_sampling=false": ["ablation.importance_sampling=false"],
    "kv_cache=auto": ["numerics.kv_cache=auto"],
    "recompute_old_logprobs=true": ["ablation.recompute_old_logprobs=true"],
}


def metrics(seed: int, steps: int = 4, kl: float = 1e-6) -> list[dict]:
    lines = [{"step": 0, "accuracy/heldout": 0.375 + seed / 64}]
    for step in range(1, steps + 1):
        lines.append(
            {"step": step, "reward/mean": step / 8 + seed / 16, "mismatch/kl": kl * (step + seed), "tis/clipped_fraction": seed / 1024}
        )
        lines[-1] |= {"mismatch/max_abs": 2.0**-10, "sync/verified": True, "time/step": 2.0 + seed / 4, "train/grad_norm": 1.0}
        lines[-1] |= {"replay/agreement": 1.0, "sync/tensors": 138}
    lines[-1]["accuracy/heldout"] = 0.75 + seed / 32
    return lines


def folder(path: Path, recipe: str, overrides: list[str], lines: list[dict], versions: dict | None = None) -> Path:
    """A run directory as a job leaves it, as far as reports read it."""
    own, verl = load_recipe(recipe, [*overrides, f"run_dir={path}", "device=cpu", "numerics.profile=w4a16-fp32"], planned=True)
    prepare(own, verl)
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = {"name": own.name, "versions": versions or {"torch": "2.13.0"}, "steps": lines[-1]["step"], "seed": own.seed}
    (path / "summary.json").write_text(json.dumps(summary))
    return path


def run(name: str, seed: int, given: dict[str, str] | None, **changes) -> Run:
    """A run whose settings are known without a file."""
    known = {"settings": given, "versions": {"torch": "2.13.0"}, "inputs": {"base": "b"}, "recipe_name": "recipe"}
    return Run(name, metrics(seed), {}, seed=seed, **(known | changes))


def labels(runs: list[Run]) -> list[tuple[str, list[int]]]:
    return [(group.label, group.seeds) for group in grouped(runs, [r.name for r in runs]).groups]


@pytest.mark.parametrize(
    "changed",
    [
        *(overrides for overrides in ABLATIONS.values() if overrides),
        ["lora.targets=attention"],
        ["lora.rank=16"],
        ["lora.alpha=16"],
        ["model=elsewhere"],
        ["numerics.parity=bitwise"],
        ["recompute.experts=true"],
        ["data.max_response_length=100"],
        ["data.max_prompt_length=90"],
        ["algorithm.rollout_correction.rollout_is_threshold=3.0"],
        ["actor_rollout_ref.rollout.free_cache_engine=false"],
        ["task=arithmetic"],
    ],
    ids=lambda changed: changed[0],
)
def test_only_what_was_set_is_a_difference_and_not_what_follows_from_it(changed):
    plain, other = (
        run(name, 0, run_report.settings_of(*(OmegaConf.to_container(OmegaConf.create(part)) for part in parts)))
        for name, parts in (("plain", _config([])), ("other", _config(changed)))
    )
    found = grouped([plain, other], ["plain", "other"]).groups
    assert len(found) == 2
    assert set(found[1].differs) == {key.partition("=")[0].rpartition(".")[2] for key in changed}


def _config(overrides: list[str]) -> tuple:
    import dataclasses

    own, verl = load_recipe("mini_m3_h200.yaml", overrides, planned=True)
    return dataclasses.asdict(own), OmegaConf.to_container(verl, resolve=False)


def test_what_follows_is_a_key_that_there_is():
    own, verl = _config([])
    keys = run_report.settings_of(own, verl) | {"verl.actor_rollout_ref.model.path": "", "verl.reward.custom_reward_function.path": ""}
    for name in FOLLOWS:
        assert any(key == name or key.startswith(name if name.endswith("_") else f"{name}.") for key in keys), name


def test_seeds_of_real_recipes_are_pooled_and_ablations_named_by_their_keys(tmp_path):
    paths = [folder(tmp_path / f"s{s}", "mini_m3_h200.yaml", [f"seed={s}", f"name=mini_{s}"], metrics(s)) for s in (0, 1, 2)]
    for place, (label, overrides) in enumerate(ABLATIONS.items()):
        if label:
            paths.append(folder(tmp_path / f"a{place}", "mini_m3_h200.yaml", ["tracking.tensorboard=true", *overrides], metrics(0)))
    loaded = [run_report.load(path) for path in paths]
    assert labels(loaded) == [
        ("mini_0 (3 seeds)", [0, 1, 2]),
        ("routing_replay=false, enable_rollout_routin…", [0]),
        ("importance_sampling=false", [0]),
        ("kv_cache=auto", [0]),
        ("recompute_old_logprobs=true", [0]),
    ]
    found = grouped(loaded, [r.name for r in loaded])
    assert found.notes == [] and found.pooled
    assert found.groups[0].differs == {
        "importance_sampling": "true",
        "recompute_old_logprobs": "false",
        "routing_replay": "true",
        "kv_cache": "nvfp4",
        "enable_rollout_routing_replay": "true",
    }


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_partition_by_settings_is_found_again(data):
    keys = ["verl.a.b", "verl.c.b", "recipe.d", "verl.e"]
    kind = st.fixed_dictionaries({key: st.sampled_from("01") for key in keys})
    kinds = data.draw(st.lists(kind, min_size=1, max_size=4, unique_by=lambda kind: str(sorted(kind.items()))))
    wanted = [(kind, data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True))) for kind in kinds]
    runs = [run(f"{i}-{seed}", seed, dict(kind)) for i, (kind, seeds) in enumerate(wanted) for seed in seeds]
    runs = data.draw(st.permutations(runs))
    found = grouped(runs, [r.name for r in runs])
    assert found.notes == []
    got = {json.dumps(group.runs[0].settings, sort_keys=True): sorted(group.seeds) for group in found.groups}
    assert got == {json.dumps(kind, sort_keys=True): sorted(seeds) for kind, seeds in wanted}
    assert sum(len(group.runs) for group in found.groups) == len(runs)
    assert all(r.settings == group.runs[0].settings for group in found.groups for r in group.runs)
    assert len({group.label for group in found.groups}) == len(found.groups)
    differing = {key for key in keys if len({kind[key] for kind, _ in wanted}) > 1}
    for group in found.groups:
        named = [{key for key in differing if key.endswith(f".{name}") or key == name} for name in group.differs]
        assert all(len(found) == 1 for found in named) and set().union(*named) == differing
    one, other = (Group(list(order)) for order in (found.groups[0].runs, reversed(found.groups[0].runs)))
    first, second = (figures(group, []) for group in (one, other))
    assert first.reward_end.mean == pytest.approx(second.reward_end.mean, rel=1e-12)
    assert first.mismatch_kl_max == second.mismatch_kl_max == max(x["mismatch/kl"] for r in one.runs for x in r.steps)


def test_what_else_may_differ_is_not_pooled():
    same = {"recipe.x": "1"}
    base = run("a", 0, same)
    assert labels([base, run("b", 1, same)]) == [("recipe (2 seeds)", [0, 1])]
    apart = grouped([base, run("b", 1, same, versions={"torch": "2.12.0"})], ["a", "b"]).groups
    assert [group.seeds for group in apart] == [[0], [1]] and apart[1].label == "torch=2.12.0"
    apart = grouped([base, run("b", 1, same, inputs={"base": "c"})], ["a", "b"]).groups
    assert [group.label for group in apart] == ["a", "base=c"]


def test_a_seed_that_comes_twice_and_settings_that_are_not_known_are_said():
    same = {"recipe.x": "1"}
    runs = [run("a", 0, same), run("b", 0, same), run("c", 1, same), run("d", 2, None)]
    found = grouped(runs, [r.name for r in runs])
    assert [group.label for group in found.groups] == ["a", "b", "c", "d"] and not found.pooled
    assert found.notes == [
        "not pooled, since no settings are recorded with it: d",
        "not pooled, since seed 0 comes twice: a, b, c",
    ]


def test_unfinished_runs_are_pooled_and_said_to_be_so():
    same = {"recipe.x": "1"}
    runs = [run("a", 0, same), run("b", 1, same, versions={})]
    found = grouped(runs, ["a", "b"])
    assert [group.seeds for group in found.groups] == [[0, 1]]
    assert found.notes == ["versions are recorded at the end of a run and not compared yet for b"]
    runs.append(run("c", 2, same, versions={"torch": "2.12.0"}))  # which of the two b has is not known
    assert sorted(map(str, (group.seeds for group in grouped(runs, ["a", "b", "c"]).groups))) == ["[0]", "[1]", "[2]"]


def test_an_interval_is_students_and_cut_at_its_limits():
    found = interval([1.0, 2.0, 3.0])
    assert (found.mean, found.count) == (2.0, 3)
    half = 4.302652729911275 / math.sqrt(3)  # 97.5 % quantile of t with 2 degrees of freedom, and a standard deviation of 1
    assert found.low == pytest.approx(2 - half, rel=1e-9) and found.high == pytest.approx(2 + half, rel=1e-9)
    assert interval([0.1, 0.9], 0.0, 1.0).low == 0.0 and interval([0.1, 0.9], 0.0, 1.0).high == 1.0
    assert interval([0.5]).low is None and interval([0.5, 0.5]).low == interval([0.5, 0.5]).high == 0.5
    with pytest.raises(ValueError, match="no runs"):
        interval([])
    logs = geometric([1e-8, 1e-6])
    assert logs.mean == pytest.approx(1e-7) and logs.low * logs.high == pytest.approx(1e-14)
    assert geometric([1e-300, 1e300]).high == math.inf


def test_an_interval_of_three_covers_the_true_mean_as_often_as_it_says():
    draws = np.random.default_rng(0).normal(5.0, 2.0, size=(1500, 3))
    hits = sum(found.low <= 5.0 <= found.high for found in (interval(list(row)) for row in draws))
    assert 0.93 < hits / len(draws) < 0.97


def test_a_mean_is_taken_at_steps_that_every_run_has():
    group = Group([Run("a", metrics(0, 4), {}), Run("b", metrics(1, 2), {})])
    curve = group.curve("reward/mean")
    assert list(curve) == [1, 2] and curve[2].mean == (0.25 + 0.25 + 1 / 16) / 2 and group.steps == 2
    assert list(group.curve("accuracy/heldout")) == [0]
    found = figures(group, ["a", "b"])
    assert found.accuracy_gain is None and found.accuracy_start == found.accuracy_end
    assert found.reward_end.mean == pytest.approx(((0.125 + 0.25) / 2 + (0.125 + 0.25) / 2 + 1 / 16) / 2)
    assert found.mismatch_kl_max == 4e-6 and (found.sync_verified, found.sync_steps) == (6, 6)
    group.runs[0].lines[2]["mismatch/kl"] = math.nan
    assert math.isnan(figures(group, []).mismatch_kl_max)


@pytest.fixture(scope="module")
def four(tmp_path_factory) -> list[Path]:
    """Three seeds and an ablation."""
    place = tmp_path_factory.mktemp("groups")
    paths = [folder(place / f"s{s}", "mini_m3_h200.yaml", [f"seed={s}"], metrics(s)) for s in (0, 1, 2)]
    return [*paths, folder(place / "no_tis", "mini_m3_h200.yaml", ["ablation.importance_sampling=false"], metrics(0, kl=2e-4))]


def test_the_table_of_groups_is_the_golden_one(four):
    console = Console(width=110, record=True, file=open("/dev/null", "w"), color_system=None)  # noqa: SIM115
    found, reached = run_report.group([run_report.load(path) for path in four])
    console.print(run_report.groups_table(reached, found.notes))
    assert console.export_text() == GOLDEN.read_text()


def test_json_holds_the_figures_of_the_table_and_the_curves(four, tmp_path):
    out = tmp_path / "runs.json"
    done = CliRunner().invoke(app, ["report", *map(str, four), "--json", str(out)])
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    assert (found["schema"], found["interval"], found["confidence"], found["notes"]) == ("samebits.runs/1", "Student t over runs", 0.95, [])
    pooled, single = found["groups"]
    assert pooled["seeds"] == [0, 1, 2] and pooled["runs"] == ["s0", "s1", "s2"] and single["differs"] == {"importance_sampling": "false"}
    half = pytest.approx(4.302652729911275 * (1 / 32) / math.sqrt(3))
    end = pooled["accuracy_end"]
    assert (end["mean"], 0.78125 - end["low"], end["high"] - 0.78125, end["count"]) == (0.78125, half, half, 3)
    assert single["accuracy_end"] == {"mean": 0.75, "low": None, "high": None, "count": 1}
    assert pooled["mismatch_kl_max"] == 6e-6 and single["mismatch_kl_max"] == 8e-4
    assert pooled["tis_clipped_fraction_max"] == 2 / 1024 and pooled["tis_clipped_fraction"]["mean"] == pytest.approx(1 / 1024)
    assert pooled["curves"]["reward/mean"][0] == {"step": 1, **json.loads(json.dumps(vars_of(interval([0.125, 0.1875, 0.25]))))}
    assert "wrote" in done.output and "seconds a step" in done.output and not (four[0] / "report.html").exists()


def vars_of(found) -> dict:
    return {"mean": found.mean, "low": found.low, "high": found.high, "count": found.count}


def test_a_published_result_is_pooled_like_its_run(four, tmp_path, monkeypatch):
    files = []
    for path in four[:2]:
        files.append(tmp_path / f"{path.name}.json")
        monkeypatch.setattr(sys, "argv", ["run_result.py", str(path), str(files[-1]), "--command", "c", "--machine", "m"])
        runpy.run_path("tools/run_result.py", run_name="__main__")
    text = files[0].read_text()
    assert str(tmp_path) not in text and str(four[0]) not in text
    loaded = [run_report.load(files[0]), run_report.load(four[1])]
    assert labels(loaded) == [("mini_m3_h200 (2 seeds)", [0, 1])]


def test_the_page_draws_means_with_bands_and_names_what_differs(four):
    page = run_report.render([run_report.load(path) for path in four])
    body = page.split("</style>")[1]
    # every curve of the metrics has a band for the group of three and none for the single run
    drawn = sum(any(key in line for line in metrics(0) for key in curve.keys[:1]) for curve in run_report.CURVES)
    assert drawn == 8 and body.count('class="band b0"') == drawn and body.count('class="band b1"') == 0
    assert "mini_m3_h200 (3 seeds)" in body and "importance_sampling=false" in body and "95% t intervals" in body
    assert "78.1% [70.4, 85.9]" in body and "Geometric mean, interval of the logarithms." in body
    single = run_report.render([run_report.load(four[0])])
    assert "Side by side" not in single and "band b0" not in single.split("</style>")[1]


@pytest.mark.parametrize("size", [PHONE, DESKTOP])
def test_in_a_browser(browser: Browser, four, tmp_path, size):
    hostile = run("</script><img src=x onerror=alert(1)>", 7, {"recipe.</style>": "<b>"})
    path = tmp_path / "r.html"
    run_report.write([*(run_report.load(p) for p in four), hostile], path, tmp_path / "r.png")
    browser.open(path, size)
    assert browser.console() == [] and browser.requests() == [] and browser.overflow() <= 0
    assert browser.on_first_screen(".verdict")
    assert (tmp_path / "r.png").read_bytes()[:4] == b"\x89PNG"

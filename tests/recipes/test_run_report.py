"""`samebits report`: the page and the picture hold what the metrics hold."""

import json

import pytest
from typer.testing import CliRunner

from samebits.alignment_checks.in_run import History
from samebits.alignment_checks.report import CheckResult, Finding
from samebits.recipes import run_report
from samebits.recipes.cli import app
from tests.support.browser import Browser


def line(step: int, **changes) -> dict:
    base = {"step": step, "reward/mean": -0.5 + step / 10, "mismatch/kl": 1e-9 * (step + 1), "mismatch/max_abs": 1e-4, "tis/mean": 1.0}
    base |= {"tis/max_raw": 1.01, "tis/clipped_fraction": 0.0, "sync/verified": True, "time/step": 2.0 + step, "time/rollout": 1.0}
    return base | changes


def run_folder(path, steps: int = 5, total: int = 5, **changes):
    path.mkdir()
    lines = [{"step": 0, "accuracy/heldout": 0.25}, *(line(i, **changes) for i in range(1, steps + 1))]
    lines[-1]["accuracy/heldout"] = 0.75
    (path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    (path / "config.yaml").write_text(f"verl:\n  trainer:\n    total_training_steps: {total}\n")
    History(path).write(1, "sync", [CheckResult("weights.held", 5)])
    return path


def call(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_series_have_every_step_and_gaps_where_a_run_has_none(tmp_path):
    runs = [run_report.load(run_folder(tmp_path / "a", 3)), run_report.load(run_folder(tmp_path / "b", 5))]
    reward = next(c for c in run_report.CURVES if c.heading == "Reward")
    steps, lines, log = run_report.series(run_report.group(runs)[0], reward)
    assert not log
    assert steps == [1, 2, 3, 4, 5]
    assert lines[0].values == [-0.4, -0.3, -0.2, None, None] and [x.name for x in lines] == ["a", "b"]
    times = next(c for c in run_report.CURVES if c.keys[0] == "time/step")
    assert [x.name for x in run_report.series(run_report.group(runs[:1])[0], times)[1]] == ["time/step", "time/rollout"]


def test_page_and_picture_lie_in_the_run(tmp_path):
    done = call(run_folder(tmp_path / "a"))
    assert done.exit_code == 0, done.output
    text = (tmp_path / "a" / "report.html").read_text()
    assert "25.0% to 75.0%" in text and "-0.40 to -0.20" in text and "Every sync verified" in text
    assert (tmp_path / "a" / "curves.png").read_bytes()[:4] == b"\x89PNG"


def test_an_unverified_sync_a_finding_and_an_open_run_are_on_top(tmp_path):
    assert "Trainer and engine disagreed" in run_report.render([run_report.load(run_folder(tmp_path / "a", **{"sync/verified": False}))])
    folder = run_folder(tmp_path / "b")
    History(folder).write(2, "full", [CheckResult("routing.rows", 3, [Finding("layer 2 is <odd>")])])
    page = run_report.render([run_report.load(folder)])
    assert "Trainer and engine disagreed" in page and "layer 2 is &lt;odd&gt;" in page
    assert "Not finished" in run_report.render([run_report.load(run_folder(tmp_path / "c", total=9))])


def test_bad_input_is_one_line(tmp_path):
    (tmp_path / "x.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "metrics.jsonl").write_text("")
    run = run_folder(tmp_path / "a")
    for arguments, says in (
        ([tmp_path / "none"], "neither a run directory"),
        ([tmp_path / "x.json", "--html", tmp_path / "y.html"], "not a result with metrics"),
        ([tmp_path / "empty"], "no training step"),
        ([run, run], "say with --html"),
        ([run, "--html", tmp_path / "no" / "y.html"], "No such file"),
    ):
        done = call(*arguments)
        assert done.exit_code == 2 and says in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.output


@pytest.mark.parametrize("size", [(360, 740), (1280, 800)])
def test_in_a_browser(browser: Browser, tmp_path, size):
    path = tmp_path / "r.html"
    run_report.write([run_report.load(run_folder(tmp_path / n)) for n in ("a", "b")], path, None)
    browser.open(path, size)
    assert browser.console() == [] and browser.requests() == [] and browser.overflow() <= 0
    assert browser.on_first_screen(".verdict")

"""`samebits report`: the curves of one run, or of several beside each other, as one self-contained page and as PNG files.

A run is its directory, or one JSON file of `docs/results/` that holds its metrics. Several runs share their axes, a line each: seeds,
ablations, two machines. Nothing is smoothed; a step that a run does not have is a gap.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from markupsafe import Markup

from samebits.alignment_checks import page
from samebits.alignment_checks.drawing import Line, line_chart, thinned
from samebits.alignment_checks.in_run import HISTORY, read_history
from samebits.alignment_checks.page import Column, Verdict

from .run_dir import read_metrics

TEMPLATES = Path(__file__).parent / "templates"
MOST_POINTS = 1000
TAIL = 20
"""Steps over which a last value is averaged."""


class ReportError(ValueError):
    """There is nothing to draw. The message is one line."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One drawing: the same metrics of every run."""

    heading: str
    keys: tuple[str, ...]
    """Of several runs only the first is drawn."""
    label: str
    text: str
    log: bool = False


CURVES = (
    Curve("Reward", ("reward/mean",), "mean reward", "Mean reward of the samples of each step."),
    Curve("Held-out accuracy", ("accuracy/heldout",), "share right", "Held-out prompts answered right, sampled at temperature 1."),
    Curve("Distance of trainer and engine", ("mismatch/kl",), "KL, nats", "Mean of exp(d) - d - 1, d trainer minus rollout logprob.", True),
    Curve("Largest logprob difference", ("mismatch/max_abs",), "nats", "Largest absolute d of a token in each step.", True),
    Curve("Importance weights", ("tis/max_raw", "tis/mean"), "ratio", "Largest ratio before the cap, and mean weight after it."),
    Curve("Weights at the cap", ("tis/clipped_fraction",), "share", "Share of tokens whose ratio passed the cap."),
    Curve("Routing replay", ("replay/agreement",), "share", "Share of (token, layer) where the trainer alone takes the same experts."),
    Curve("Entropy", ("train/entropy",), "nats", "Entropy of the trainer's distribution on response tokens."),
    Curve("Length", ("response/tokens_mean",), "tokens", "Mean length of a response."),
    Curve("Truncated responses", ("response/truncated_fraction",), "share", "Share cut off at the longest response."),
    Curve("Gradient norm", ("train/grad_norm",), "norm", "Before clipping."),
    Curve("Seconds a step", ("time/step", "time/rollout", "time/train", "time/sync"), "s", "The step, and its phases."),
)


@dataclass(slots=True)
class Run:
    """What is known of one run."""

    name: str
    lines: list[dict[str, Any]]
    facts: dict[str, Any]
    history: list[dict[str, Any]] = field(default_factory=list)
    planned: int | None = None
    """Steps that the run is to have."""

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Lines of training steps."""
        return [line for line in self.lines if line["step"] > 0]

    def last(self, key: str) -> float | None:
        """Mean of the last steps that have `key`."""
        values = [line[key] for line in self.steps if key in line][-TAIL:]
        return sum(values) / len(values) if values else None


def load(path: Path) -> Run:
    """A run directory, or a JSON file with `metrics`. Raises `ReportError`."""
    if path.is_file():
        try:
            data = json.loads(path.read_text())
            lines = data["metrics"]
        except (ValueError, KeyError, TypeError):
            raise ReportError(f"{path}: not a result with metrics") from None
        facts = {k: v for k, v in data.items() if k not in ("metrics", "accuracy_heldout")}
        return _run(path, Run(path.stem, lines, facts, planned=data.get("steps")))
    metrics = path / "metrics.jsonl"
    if not metrics.is_file():
        raise ReportError(f"{path}: neither a run directory with metrics.jsonl nor a JSON result")
    summary = path / "summary.json"
    facts = json.loads(summary.read_text()) if summary.is_file() else {}
    return _run(path, Run(path.name, read_metrics(metrics), facts, read_history(path / HISTORY), _planned(path / "config.yaml")))


def _planned(config: Path) -> int | None:
    if not config.is_file():
        return None
    from omegaconf import OmegaConf

    return OmegaConf.select(OmegaConf.load(config), "verl.trainer.total_training_steps")


def _run(path: Path, run: Run) -> Run:
    if not run.steps:
        raise ReportError(f"{path}: no training step is finished yet")
    return run


def _names(runs: Sequence[Run]) -> list[str]:
    """One name for each run; equal names get their place."""
    names = [run.name for run in runs]
    return [f"{n} ({i + 1})" if names.count(n) > 1 else n for i, n in enumerate(names)]


def series(runs: Sequence[Run], curve: Curve) -> tuple[list[int], list[Line]]:
    """Common steps and one line for each run and key that has values."""
    keys = curve.keys if len(runs) == 1 else curve.keys[:1]
    steps = sorted({line["step"] for run in runs for line in run.lines if any(k in line for k in keys)})
    lines = []
    for name, run in zip(_names(runs), runs, strict=True):
        found = {line["step"]: line for line in run.lines}
        for key in keys:
            values = [found.get(step, {}).get(key) for step in steps]
            if any(v is not None for v in values):
                lines.append(Line(name if len(runs) > 1 else key, values))
    return steps, lines


def render(runs: Sequence[Run]) -> str:
    """The page."""
    figures = []
    for curve in CURVES:
        steps, lines = series(runs, curve)
        figures.append((curve.heading, _draw(curve, steps, lines) if lines else None, curve.text))
    first = runs[0].facts
    facts: dict[str, Any] = {"Runs": ", ".join(_names(runs))}
    for label, key in (("Profile", "profile"), ("Machine", "machine"), ("Command", "command"), ("Date", "date")):
        if key in first:
            facts[label] = first[key]
    if first.get("versions"):
        facts["Versions"] = page.chips(first["versions"])
    return page.render(
        "run.html.jinja",
        [TEMPLATES],
        kind="run report",
        title=f"{', '.join(_names(runs))} · samebits run",
        verdict=_verdict(runs),
        facts=facts,
        run_columns=[Column("Run"), *(Column(label, number=True) for label, _ in _ROWS)],
        runs=[[name, *(cell(run) for _, cell in _ROWS)] for name, run in zip(_names(runs), runs, strict=True)],
        figures=figures,
        check_columns=[Column("Run"), Column("Occasion"), Column("Step", number=True), Column("Check"), Column("Result")],
        checks=[row for name, run in zip(_names(runs), runs, strict=True) for row in _check_rows(name, run)],
        download=page.Download.of("runs.json", [{"name": r.name, "facts": r.facts, "metrics": r.lines} for r in runs]),
    )


def _draw(curve: Curve, steps: list[int], lines: list[Line]) -> Markup:
    x, columns, stride = thinned(steps, [line.values for line in lines], MOST_POINTS)
    kept = [Line(line.name, values) for line, values in zip(lines, columns, strict=True)]
    positive = all(v is None or v > 0 for line in kept for v in line.values)
    text = curve.text + (f" Each point is the largest of {stride} steps." if stride > 1 else "")
    return line_chart(curve.heading, text, x, kept, "step", curve.label, log=curve.log and positive)


def _heldout(run: Run) -> str:
    values = [line["accuracy/heldout"] for line in run.lines if "accuracy/heldout" in line]
    return f"{values[0]:.1%} to {values[-1]:.1%}" if values else "–"


def _reward(run: Run) -> str:
    return f"{run.steps[0]['reward/mean']:+.2f} to {run.last('reward/mean'):+.2f}"


def _largest(key: str):
    return lambda run: page.number(max((line[key] for line in run.steps if key in line), default=None))


_ROWS = (
    ("Steps", lambda run: str(run.steps[-1]["step"])),
    ("Reward, first to last 20", _reward),
    ("Held-out accuracy", _heldout),
    ("Largest KL", _largest("mismatch/kl")),
    ("Largest share at the cap", _largest("tis/clipped_fraction")),
    ("Syncs verified", lambda run: f"{sum(bool(line.get('sync/verified')) for line in run.steps)} of {len(run.steps)}"),
    ("Seconds a step", lambda run: page.number(sum(line["time/step"] for line in run.steps) / len(run.steps), 3)),
)


def _verdict(runs: Sequence[Run]) -> Verdict:
    """Good when every run has all its steps and every sync was verified; what is open or broken is said."""
    unverified = sum(not line.get("sync/verified") for run in runs for line in run.steps)
    open_runs = [run for run in runs if run.planned is not None and run.steps[-1]["step"] < run.planned]
    bad = [r for run in runs for h in run.history for r in h["results"] if r["status"] != "agree"]
    steps = page.counted(sum(len(run.steps) for run in runs), "step")
    if unverified or bad:
        return Verdict("bad", "Trainer and engine disagreed", f"{page.counted(unverified + len(bad), 'result')} of checks inside the runs.")
    if open_runs:
        return Verdict("unknown", "Not finished", f"{steps} so far, every sync verified.")
    return Verdict("good", "Every sync verified", f"{page.counted(len(runs), 'run')}, {steps}.")


def _check_rows(name: str, run: Run) -> list[list[object]]:
    counts: dict[tuple[str, str], int] = {}
    rows: list[list[object]] = []
    for occasion in run.history:
        for result in occasion["results"]:
            if result["status"] == "agree":
                key = (occasion["occasion"], result["name"])
                counts[key] = counts.get(key, 0) + 1
                continue
            said = result["findings"][0]["message"] if result["findings"] else result["error"] or "nothing was compared"
            rows.append([name, occasion["occasion"], str(occasion["step"]), result["name"], said])
    return rows + [[name, kind, "–", check, f"agreed {page.counted(n, 'time')}"] for (kind, check), n in counts.items()]


def write_png(path: Path, runs: Sequence[Run], curves: Sequence[Curve] = CURVES) -> None:
    """One PNG with every curve that has values. Raises `ReportError` where it cannot be written."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    drawn = [(curve, *series(runs, curve)) for curve in curves]
    drawn = [d for d in drawn if d[2]]
    columns = min(3, len(drawn))
    rows = -(-len(drawn) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(5 * columns, 3 * rows), squeeze=False, layout="constrained")
    for place, (curve, steps, lines) in zip(axes.flat, drawn, strict=False):
        for line in lines:
            points = [(x, v) for x, v in zip(steps, line.values, strict=True) if v is not None]
            place.plot(*zip(*points, strict=True), label=line.name, linewidth=1.2, marker="o" if len(points) < 12 else None, markersize=4)
        positive = all(v is None or v > 0 for line in lines for v in line.values)
        place.set(title=curve.heading, xlabel="step", ylabel=curve.label, yscale="log" if curve.log and positive else "linear")
        place.grid(alpha=0.3)
        if len(lines) > 1:
            place.legend(fontsize=7)
    for place in axes.flat[len(drawn) :]:
        place.set_axis_off()
    try:
        figure.savefig(path, dpi=80)
    except OSError as error:
        raise ReportError(f"{path}: {error.strerror}") from None
    finally:
        pyplot.close(figure)


def write(runs: Sequence[Run], html: Path, png: Path | None) -> None:
    """Write the page, and the PNG where asked for. Raises `ReportError` or `PageError` in one line."""
    page.write(html, render(runs))
    if png is not None:
        write_png(png, runs)


def paths_of(targets: Sequence[Path], html: Path | None, png: Path | None) -> tuple[Path, Path | None]:
    """Where page and PNG go: into the run's directory unless said otherwise. Raises `ReportError` when that is not one place."""
    folder = targets[0] if len(targets) == 1 and targets[0].is_dir() else None
    if html is None and folder is None:
        raise ReportError("say with --html where the page of several runs, or of a JSON result, goes")
    return html or folder / "report.html", png or (folder / "curves.png" if folder else None)

"""`samebits report`: the curves of one run, or of several beside each other, as one self-contained page and as PNG files.

A run is its directory, or one JSON file of `docs/results/` that holds its metrics. Several runs share their axes. Those that differ in
their seed only are one line, their mean, with its interval; all others have a line each (`run_groups`). Nothing is smoothed; a step that a
run does not have is a gap.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from markupsafe import Markup
from rich.table import Table

from samebits.alignment_checks import page
from samebits.alignment_checks.drawing import Line, line_chart, thinned_lines
from samebits.alignment_checks.in_run import HISTORY, read_history
from samebits.alignment_checks.page import Column, Verdict

from .run_dir import read_metrics
from .run_groups import CONFIDENCE, TAIL, Figures, Grouping, Interval, figures, grouped, settings_of, to_json

TEMPLATES = Path(__file__).parent / "templates"
MOST_POINTS = 1000
SCHEMA = "samebits.runs/1"


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
    least: float | None = 0.0
    most: float | None = None
    """Where an interval is cut: what the quantity cannot pass."""


CURVES = (
    Curve("Reward", ("reward/mean",), "mean reward", "Mean reward of the samples of each step.", least=None),
    Curve("Held-out accuracy", ("accuracy/heldout",), "share right", "Held-out prompts answered right, sampled at temperature 1.", most=1),
    Curve("Distance of trainer and engine", ("mismatch/kl",), "KL, nats", "Mean of exp(d) - d - 1, d trainer minus rollout logprob.", True),
    Curve("Largest logprob difference", ("mismatch/max_abs",), "nats", "Largest absolute d of a token in each step.", True),
    Curve("Importance weights", ("tis/max_raw", "tis/mean"), "ratio", "Largest ratio before the cap, and mean weight after it."),
    Curve("Weights at the cap", ("tis/clipped_fraction",), "share", "Share of tokens whose ratio passed the cap.", most=1),
    Curve(
        "Routing replay", ("replay/agreement",), "share", "Share of (token, layer) where the trainer alone takes the same experts.", most=1
    ),
    Curve("Entropy", ("train/entropy",), "nats", "Entropy of the trainer's distribution on response tokens."),
    Curve("Length", ("response/tokens_mean",), "tokens", "Mean length of a response."),
    Curve("Truncated responses", ("response/truncated_fraction",), "share", "Share cut off at the longest response.", most=1),
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
    seed: int | None = None
    settings: dict[str, str] | None = None
    """Its configuration as `run_groups.settings_of` gives it; None where it is not recorded."""
    inputs: dict[str, str] = field(default_factory=dict)
    """Digests of what it was made from."""
    versions: dict[str, str] = field(default_factory=dict)
    """Empty until the run has ended."""
    recipe_name: str = ""

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
        facts = {k: v for k, v in data.items() if k not in ("metrics", "accuracy_heldout", "settings", "inputs")}
        run = Run(path.stem, lines, facts, planned=data.get("steps"), seed=data.get("seed"), settings=data.get("settings"))
        run.inputs, run.versions, run.recipe_name = data.get("inputs", {}), data.get("versions", {}), data.get("name", "")
        return _run(path, run)
    metrics = path / "metrics.jsonl"
    if not metrics.is_file():
        raise ReportError(f"{path}: neither a run directory with metrics.jsonl nor a JSON result")
    summary = path / "summary.json"
    facts = json.loads(summary.read_text()) if summary.is_file() else {}
    run = Run(path.name, read_metrics(metrics), facts, read_history(path / HISTORY), versions=facts.get("versions", {}))
    _configured(run, path)
    return _run(path, run)


def _configured(run: Run, folder: Path) -> None:
    """What the folder of a run says of its settings."""
    config = folder / "config.yaml"
    if not config.is_file():
        return
    from omegaconf import OmegaConf

    stored = OmegaConf.load(config)
    run.planned = OmegaConf.select(stored, "verl.trainer.total_training_steps")
    if "recipe" not in stored or "verl" not in stored:
        return
    recipe, verl = (OmegaConf.to_container(stored[part], resolve=False) for part in ("recipe", "verl"))
    run.seed, run.recipe_name, run.settings = recipe["seed"], recipe["name"], settings_of(recipe, verl)
    run.inputs = {"base": _digest(folder / "base.json")}
    if recipe["task"] == "dapo-math":  # problems of the others are drawn with the seed
        run.inputs["data"] = _digest(folder / "data" / "dataset.json")


def _digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest() if path.is_file() else "not recorded"


def _run(path: Path, run: Run) -> Run:
    if not run.steps:
        raise ReportError(f"{path}: no training step is finished yet")
    return run


def _names(runs: Sequence[Run]) -> list[str]:
    """One name for each run; equal names get their place."""
    names = [run.name for run in runs]
    return [f"{n} ({i + 1})" if names.count(n) > 1 else n for i, n in enumerate(names)]


def series(found: Grouping, curve: Curve) -> tuple[list[int], list[Line], bool]:
    """Common steps, one line for each group that has values (for each key of a single run), and whether they are for a logarithmic axis."""
    several = sum(len(group.runs) for group in found.groups) > 1
    keys = curve.keys[:1] if several else curve.keys
    values = [line[key] for group in found.groups for run in group.runs for line in run.lines for key in keys if line.get(key) is not None]
    log = curve.log and all(value > 0 for value in values)
    curves = {group.label if several else key: group.curve(key, curve.least, curve.most, log) for group in found.groups for key in keys}
    steps = sorted({step for means in curves.values() for step in means})
    return steps, [_line(name, [means.get(step) for step in steps]) for name, means in curves.items() if means], log


def _line(name: str, means: Sequence[Interval | None]) -> Line:
    low, high = ([getattr(m, end) if m is not None else None for m in means] for end in ("low", "high"))
    values = [m.mean if m is not None else None for m in means]
    return Line(name, values, low, high) if any(v is not None for v in low) else Line(name, values)


def group(runs: Sequence[Run]) -> tuple[Grouping, list[Figures]]:
    """Groups of runs that differ in their seed only, and what each came to."""
    names = _names(runs)
    found = grouped(runs, names)
    called = {id(run): name for run, name in zip(runs, names, strict=True)}
    return found, [figures(one, [called[id(run)] for run in one.runs]) for one in found.groups]


def render(runs: Sequence[Run]) -> str:
    """The page."""
    found, reached = group(runs)
    drawings = []
    for curve in CURVES:
        steps, lines, log = series(found, curve)
        text = curve.text + (" Geometric mean, interval of the logarithms." if log and found.pooled else "")
        drawings.append((curve.heading, _draw(curve, steps, lines, log, text) if lines else None, text))
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
        group_columns=[Column("Group"), *(Column(one.label, number=True) for one in reached)],
        groups=[[label, *(cell(one) for one in reached)] for label, cell in GROUP_ROWS] if len(runs) > 1 else [],
        difference_columns=[Column("Key"), *(Column(one.label) for one in reached if one.differs)],
        differences=_differences(reached),
        notes=found.notes,
        pooled=found.pooled,
        confidence=f"{CONFIDENCE:.0%}",
        figures=drawings,
        check_columns=[Column("Run"), Column("Occasion"), Column("Step", number=True), Column("Check"), Column("Result")],
        checks=[row for name, run in zip(_names(runs), runs, strict=True) for row in _check_rows(name, run)],
        download=page.Download.of("runs.json", [{"name": r.name, "facts": r.facts, "metrics": r.lines} for r in runs]),
    )


def _differences(reached: Sequence[Figures]) -> list[list[str]]:
    told = [one for one in reached if one.differs]
    return [[key, *(one.differs[key] for one in told)] for key in (told[0].differs if told else ())]


def _draw(curve: Curve, steps: list[int], lines: list[Line], log: bool, text: str) -> Markup:
    x, kept, stride = thinned_lines(steps, lines, MOST_POINTS)
    text += f" Each point is the largest of {stride} steps." if stride > 1 else ""
    return line_chart(curve.heading, text, x, kept, "step", curve.label, log=log)


def share(of: Interval | None) -> str:
    """`41.4% [38.1, 44.7]`."""
    if of is None:
        return "–"
    return f"{of.mean:.1%}" + ("" if of.low is None else f" [{100 * of.low:.1f}, {100 * of.high:.1f}]")


def signed(of: Interval | None) -> str:
    """`+0.82 [+0.79, +0.85]`."""
    if of is None:
        return "–"
    return f"{of.mean:+.2f}" + ("" if of.low is None else f" [{of.low:+.2f}, {of.high:+.2f}]")


def amount(of: Interval | None) -> str:
    """`2.05 [1.98, 2.12]`, three significant digits."""
    if of is None:
        return "–"
    return page.number(of.mean, 3) + ("" if of.low is None else f" [{page.number(of.low, 3)}, {page.number(of.high, 3)}]")


GROUP_ROWS = (
    ("Seeds", lambda one: ", ".join("–" if seed is None else str(seed) for seed in one.seeds)),
    ("Steps", lambda one: str(one.steps)),
    ("Reward, last 20", lambda one: signed(one.reward_end)),
    ("Held-out accuracy, start", lambda one: share(one.accuracy_start)),
    ("Held-out accuracy, end", lambda one: share(one.accuracy_end)),
    ("Gain, run by run", lambda one: share(one.accuracy_gain)),
    ("Largest KL", lambda one: page.number(one.mismatch_kl_max)),
    ("Largest logprob difference", lambda one: page.number(one.mismatch_max_abs_max)),
    ("Mean share at the cap", lambda one: amount(one.tis_clipped_fraction)),
    ("Largest share at the cap", lambda one: page.number(one.tis_clipped_fraction_max)),
    ("Syncs verified", lambda one: f"{one.sync_verified} of {one.sync_steps}"),
    ("Seconds a step", lambda one: amount(one.seconds_per_step)),
)
"""Rows of the table of groups, and how each is told of one; a column for each group, since what is told of them is more than groups are."""


def groups_table(reached: Sequence[Figures], notes: Sequence[str]) -> Table:
    """The table of groups for a terminal."""
    title = f"means over seeds, with their {CONFIDENCE:.0%} t intervals" if any(len(one.runs) > 1 for one in reached) else "runs"
    table = Table(title=title, caption="\n".join(notes) or None, caption_justify="left")
    table.add_column("group")
    for one in reached:
        table.add_column(one.label, justify="right")
    for label, cell in GROUP_ROWS:
        table.add_row(label[0].lower() + label[1:], *(cell(one) for one in reached))
    return table


def to_dict(runs: Sequence[Run]) -> dict[str, Any]:
    """All figures of the table, and the curves, as plain data."""
    found, reached = group(runs)
    drawn = [(curve, key) for curve in CURVES for key in curve.keys]
    curves = [
        {key: [{"step": at, **asdict(mean)} for at, mean in one.curve(key, curve.least, curve.most).items()] for curve, key in drawn}
        for one in found.groups
    ]
    groups = [{**figure, "curves": curve} for figure, curve in zip(to_json(reached), curves, strict=True)]
    return {"schema": SCHEMA, "interval": "Student t over runs", "confidence": CONFIDENCE, "groups": groups, "notes": found.notes}


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

    found, _ = group(runs)
    drawn = [(curve, *series(found, curve)) for curve in curves]
    drawn = [d for d in drawn if d[2]]
    columns = min(3, len(drawn))
    rows = -(-len(drawn) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(5 * columns, 3 * rows), squeeze=False, layout="constrained")
    for place, (curve, steps, lines, log) in zip(axes.flat, drawn, strict=False):
        for line in lines:
            points = [(x, v) for x, v in zip(steps, line.values, strict=True) if v is not None]
            (drawing,) = place.plot(
                *zip(*points, strict=True), label=line.name, linewidth=1.2, marker="o" if len(points) < 12 else None, markersize=4
            )
            if line.low is not None:
                ends = [(x, a, b) for x, a, b in zip(steps, line.low, line.high, strict=True) if a is not None]
                place.fill_between(*zip(*ends, strict=True), color=drawing.get_color(), alpha=0.16, linewidth=0)
        place.set(title=curve.heading, xlabel="step", ylabel=curve.label, yscale="log" if log else "linear")
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


def write(runs: Sequence[Run], html: Path | None, png: Path | None) -> None:
    """Write the page and the PNG, where asked for. Raises `ReportError` or `PageError` in one line."""
    if html is not None:
        page.write(html, render(runs))
    if png is not None:
        write_png(png, runs)


def paths_of(targets: Sequence[Path], html: Path | None, png: Path | None, elsewhere: bool = False) -> tuple[Path | None, Path | None]:
    """Where page and PNG go: into the run's directory unless said otherwise. Raises `ReportError` when that is not one place.

    `elsewhere`: the result is asked for in another form too, so that there need be no page.
    """
    folder = targets[0] if len(targets) == 1 and targets[0].is_dir() else None
    if html is None and folder is None and not elsewhere:
        raise ReportError("say with --html where the page of several runs, or of a JSON result, goes")
    return html or (folder / "report.html" if folder else None), png or (folder / "curves.png" if folder else None)

"""The alignment report as one HTML file: verdict, findings with their places, every check, and drawings of what was measured.

What is shown is bounded (the first findings of every check, clipped texts, drawings that do not grow with their data); everything is in
the JSON report, which the page carries along where it is small. A report that contradicts itself is refused rather than shown: the
green on top of a page must never be older than the findings below it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup

from . import page
from .drawing import HEAT_LIMITS, Line, finite, finite_pairs, heat_class, heat_map, line_chart, percent, scatter, thinned
from .page import PageError, Tone, Verdict, counted, number
from .report import AGREE, DISAGREE, ERROR, SCHEMA, Report

SHOWN_FINDINGS = 200
SHOWN_METRICS = 24
"""Metrics of one check that its row shows."""
_POSITIONS = 300
"""Points of a line over positions; more than a screen can tell apart are drawn as the largest of their neighbours."""
_LOWEST = 5
"""Cells that are named under a heat map."""

_TONES: dict[str, Tone] = {AGREE: "good", DISAGREE: "bad", ERROR: "unknown"}
_WORDS = {AGREE: "agrees", DISAGREE: "disagrees", ERROR: "not checked"}
_HEADLINES = {AGREE: "Trainer and engine agree", DISAGREE: "Trainer and engine disagree", ERROR: "Could not be checked"}

Figure = tuple[Markup | None, str | Markup]
"""A drawing, None where nothing was measured, and the text below it."""


def write_html(path: Path, report: Report | Mapping[str, Any]) -> None:
    """Write the page of a report, or of what its `to_json()` gave. Raises `PageError` with one line."""
    page.write(path, render(report.to_json() if isinstance(report, Report) else report))


def render(report: Mapping[str, Any]) -> str:
    """The page of `Report.to_json()`.

    Settings that the header names: `profile`, `profile_hash` and `fault` (the injected fault, None or a description); all others are
    listed below. Raises `PageError` where `report` is no report, contradicts itself or has plots of impossible shape.
    """
    _require_whole(report)
    settings, results, verdict = report["settings"], report["results"], report["verdict"]
    fault = _fault(settings.get("fault"))
    try:
        figures = {
            "scatter": _scatter(report["plots"]),
            "position": _by_position(report["plots"]),
            "agreement": _agreement(report["plots"]),
        }
    except (KeyError, TypeError, ValueError) as error:
        text = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise PageError(f"the plots of the report cannot be drawn: {text}") from None
    facts = {"Checked": report["subject"], "Date": _time(report["date"]), "Numerics profile": _profile(settings)}
    facts |= {"Injected fault": fault} if fault else {}
    facts |= {"Versions": page.chips(report["versions"]) if report["versions"] else "not recorded"}
    shown, hidden = _shown_findings(results)
    return page.render(
        "report.html.jinja",
        kind="alignment report",
        title=f"{_WORDS[verdict] if verdict != ERROR else 'could not be checked'}: {report['subject']} · samebits alignment",
        verdict=Verdict(_TONES[verdict], _HEADLINES[verdict], _sentence(report)),
        facts=facts,
        fault=fault,
        unnoticed=bool(fault) and verdict == AGREE,
        finding_columns=[
            page.Column("Check"),
            page.Column("Finding"),
            page.Column("Place"),
            page.Column("Measured", number=True),
            page.Column("Limit", number=True),
        ],
        findings=shown,
        found=sum(len(r["findings"]) for r in results),
        hidden=hidden,
        unchecked=[(r["name"], r["error"] or "nothing was compared") for r in results if r["status"] == ERROR],
        missing=report["missing"],
        check_columns=[
            page.Column("Check"),
            page.Column("Status"),
            page.Column("Compared", number=True),
            page.Column("Findings", number=True),
            page.Column("Seconds", number=True),
            page.Column("Measured"),
        ],
        checks=[_check_row(r) for r in results],
        figures=figures,
        scale=_heat_scale() if figures["agreement"][0] else [],
        total=len(results) + len(report["missing"]),
        settings=page.flat({k: v for k, v in settings.items() if k not in ("profile", "profile_hash", "fault")}),
        download=page.Download.of("alignment.json", report),
    )


def _require_whole(report: Mapping[str, Any]) -> None:
    """Raise `PageError` unless this is a report whose verdict follows from its results."""
    if not isinstance(report, Mapping) or report.get("schema") != SCHEMA:
        raise PageError(f"not an alignment report: its schema is not {SCHEMA}")
    absent = [
        k for k in ("verdict", "subject", "date", "versions", "settings", "planned", "missing", "results", "plots") if k not in report
    ]
    keys = ("name", "status", "compared", "findings", "metrics", "seconds", "error")
    absent += [f"{k} of result {i}" for i, r in enumerate(report.get("results", ())) for k in keys if k not in r]
    if absent:
        raise PageError(f"damaged alignment report: {absent[0]} is missing")
    for r in report["results"]:
        status = DISAGREE if r["findings"] else ERROR if r["error"] is not None or r["compared"] < 1 else AGREE
        if r["status"] != status:
            raise PageError(f"damaged alignment report: {r['name']} says {r['status']}, its findings say {status}")
    statuses, have = {r["status"] for r in report["results"]}, {r["name"] for r in report["results"]}
    missing = [name for name in report["planned"] if name not in have]
    agree = statuses == {AGREE} and not missing and report["planned"]
    verdict = DISAGREE if DISAGREE in statuses else AGREE if agree else ERROR
    if report["verdict"] != verdict or report["missing"] != missing:
        raise PageError(f"damaged alignment report: it says {report['verdict']}, its results say {verdict}")


def _sentence(report: Mapping[str, Any]) -> str:
    """The verdict in figures."""
    results, missing = report["results"], report["missing"]
    if not results and not missing:
        return "No check was planned, and none was made."
    by = {status: sum(r["status"] == status for r in results) for status in (AGREE, DISAGREE, ERROR)}
    total, unchecked = len(results) + len(missing), by[ERROR] + len(missing)
    compared = sum(r["compared"] for r in results)
    if report["verdict"] == AGREE:
        return f"{'The one check agrees' if total == 1 else f'All {total} checks agree'}, over {counted(compared, 'comparison')}."
    if report["verdict"] == ERROR:
        rest = f" The other {counted(by[AGREE], 'check')} found no difference, which is no agreement." if by[AGREE] else ""
        return f"{unchecked} of {counted(total, 'check')} gave no result.{rest}"
    found = counted(sum(len(r["findings"]) for r in results), "finding")
    rest = f" {counted(unchecked, 'check')} gave no result." if unchecked else ""
    return f"{by[DISAGREE]} of {counted(total, 'check')} found differences: {found}.{rest}"


def _fault(fault: object) -> str:
    """What was injected, in words; empty where nothing was."""
    if isinstance(fault, Mapping):
        kind = fault.get("kind")
        return ", ".join([str(kind), *(f"{k} {v}" for k, v in fault.items() if k != "kind" and v is not None)]) if kind else ""
    return "" if fault in (None, False, "", "none") else str(fault)


def _profile(settings: Mapping[str, Any]) -> str | Markup:
    if not settings.get("profile"):
        return "not recorded"
    known = {"profile": settings["profile"], "hash": settings.get("profile_hash")}
    return page.chips({k: v for k, v in known.items() if v is not None})


def _time(date: str) -> Markup:
    readable = str(date).replace("T", " ").replace("+00:00", " UTC")
    return Markup('<time datetime="{}">{}</time>').format(date, readable)


def _shown_findings(results: list[Mapping[str, Any]]) -> tuple[list[list[object]], dict[str, int]]:
    """Rows of the first findings, in order, and how many each check has beyond them. Room that one check leaves goes to the others,
    so that no check's findings disappear behind another's thousands."""
    with_findings = [r for r in results if r["findings"]]
    shares, room = {}, SHOWN_FINDINGS
    for left, (index, r) in zip(
        range(len(with_findings), 0, -1), sorted(enumerate(with_findings), key=lambda pair: len(pair[1]["findings"])), strict=True
    ):
        shares[index] = min(len(r["findings"]), room // left)
        room -= shares[index]
    rows: list[list[object]] = []
    hidden: dict[str, int] = {}
    for index, r in enumerate(with_findings):
        for f in r["findings"][: shares[index]]:
            measured, limit = page.against(f["measured"], f["limit"])
            rows.append([_code(r["name"]), f["message"], page.chips(f["place"]), measured, limit])
        if len(r["findings"]) > shares[index]:
            hidden[r["name"]] = len(r["findings"]) - shares[index]
    return rows, hidden


def _code(name: object) -> Markup:
    """A dotted name, which may be broken behind its dots."""
    return Markup("<code>{}</code>").format(Markup(".<wbr>").join(page.clip(name).split(".")))


def _check_row(r: Mapping[str, Any]) -> list[object]:
    metrics = dict(list(r["metrics"].items())[:SHOWN_METRICS])
    said = page.chips({k: number(v) for k, v in metrics.items()})
    if len(r["metrics"]) > SHOWN_METRICS:
        said += f" and {len(r['metrics']) - SHOWN_METRICS} more"
    if r["error"] is not None:
        said = Markup('<span class="error">{}</span> ').format(page.clip(r["error"])) + (said if metrics else "")
    status = page.badge(_TONES[r["status"]], _WORDS[r["status"]])
    return [_code(r["name"]), status, f"{r['compared']:,}", f"{len(r['findings']):,}", f"{r['seconds']:.2f}", said]


def _scatter(plots: Mapping[str, Any]) -> Figure:
    """Logprobs of the same tokens in trainer and engine."""
    data = plots.get("scatter")
    if not data or not data["trainer"]:
        return None, ""
    pairs, lost = finite_pairs(data["engine"], data["trainer"])
    gaps = [abs(a - b) for a, b in pairs]
    exact = sum(gap == 0 for gap in gaps)
    text = "No token has two logprobs that can be drawn."
    if gaps:
        far = f"largest difference {number(max(gaps))}, mean {number(statistics.fmean(gaps))}"
        text = f"{counted(len(pairs), 'token')}, {exact:,} of them with equal logprobs; {far}."
    if lost:
        text += f" {counted(lost, 'token')} with a logprob that is no finite number cannot be drawn."
    return scatter("Logprobs of trainer and engine", text, pairs, "engine logprob", "trainer logprob"), text


def _by_position(plots: Mapping[str, Any]) -> Figure:
    """Absolute logprob difference by position in the sequence."""
    data = plots.get("by_position")
    if not data or not data["position"]:
        return None, ""
    names = ("max", "q95", "mean")
    x, columns, stride = thinned(data["position"], [data[n] for n in names], _POSITIONS)
    lines = [Line(n, column) for n, column in zip(names, columns, strict=True)]
    worst = max(((v, p) for p, v in zip(data["position"], data["max"], strict=True) if finite(v)), default=None)
    bad = sum(v is not None and not finite(v) for n in names for v in data[n])
    text = "No difference is a finite number."
    if worst is not None:
        text = "Every difference is 0." if worst[0] == 0 else f"Largest difference {number(worst[0])}, at position {number(worst[1])}."
    text += f" {counted(bad, 'value')} not finite." if bad else ""
    text += f" Each point is the largest of {stride} neighbouring positions." if stride > 1 else ""
    drawing = line_chart(
        "Logprob difference by position", text, x, lines, "position in the sequence", "absolute difference", from_zero=True
    )
    return drawing, text


def _agreement(plots: Mapping[str, Any]) -> Figure:
    """Share of routing choices on which both agree, by layer and expert."""
    data = plots.get("agreement")
    if not data or not data["layers"]:
        return None, ""
    layers, share, cells = data["layers"], data["share"], data["experts"]
    ranked = sorted((v, layer, e) for layer, row in zip(layers, cells, strict=True) for e, v in enumerate(row) if finite(v) and v < 1)
    empty = sum(not finite(v) for row in cells for v in row)
    text = f"Every expert of {counted(len(layers), 'layer')} was chosen by both for the same tokens."
    if ranked:
        lowest = ", ".join(f"layer {layer} expert {e} {percent(v, 2)} %" for v, layer, e in ranked[:_LOWEST])
        text = f"{counted(len(ranked), 'expert')} below 100 %; lowest: {lowest}."
    elif not any(finite(v) for row in cells for v in row):
        text = "No expert got a token."
    text += f" {counted(empty, 'expert')} got no token." if empty and ranked else ""
    experts = range(max(len(row) for row in cells))
    return heat_map("Agreement of routing by layer and expert", text, layers, experts, cells, share, "layer", "expert"), text


def _heat_scale() -> list[tuple[str, str]]:
    """(class, words) of a heat map's colours."""
    words = ["100 %", *(f"from {percent(least)} %" for least in HEAT_LIMITS[1:-1]), f"below {percent(HEAT_LIMITS[-2])} %"]
    return [*((heat_class(least), text) for least, text in zip(HEAT_LIMITS, words, strict=True)), ("none", "no token")]

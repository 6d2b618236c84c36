"""What the recorded steps of a run say of communication: bytes, time and exposed time, by rank and phase.

The recordings are made in the trainer's ranks (`kernels.tracing`): forward, backward and optimizer of a step, and the export of an adapter,
in which each layer's adapter is gathered. Exposed is the time in which a rank communicates and computes nothing. What is waited for
counts as well: a collective begins on the first rank and ends with the last.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

PHASES = ("forward", "backward", "optimizer", "export", "other")


def communication(records: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Means over the recorded steps, by rank and phase; None where none was recorded. Seconds and bytes of one step."""
    if not records:
        return None
    steps = sorted({record["step"] for record in records})
    by_rank: dict[int, dict[str, list[Mapping[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        for phase, found in record["phases"].items():
            by_rank[record["rank"]][phase].append(found)
    ranks = []
    for rank, phases in sorted(by_rank.items()):
        means = {phase: _mean(phases[phase], len(steps)) for phase in PHASES if phase in phases}
        ranks.append({"rank": rank, "phases": {phase: one for phase, one in means.items() if any(one[key] for key in _NUMBERS)}})
    return {"steps": steps, "ranks": ranks}


_NUMBERS = ("seconds", "communication", "compute", "bytes")


def _mean(found: Sequence[Mapping[str, Any]], steps: int) -> dict[str, Any]:
    """One phase in one step: it is in a recording once, and in a step's two recordings (train and sync) under other names."""
    volume: dict[str, dict[str, float]] = {}
    for one in found:
        for kind, counts in one["volume"].items():
            sums = volume.setdefault(kind, {"calls": 0.0, "bytes": 0.0, "unsized": 0.0})
            for key in sums:
                sums[key] += counts[key] / steps
    return {
        "seconds": sum(one["seconds"] for one in found) / steps,
        **{key: sum(one["overlap"][key] for one in found) / steps for key in ("communication", "exposed", "compute")},
        "bytes": sum(counts["bytes"] for counts in volume.values()),
        "volume": volume,
    }


def exposed_share(found: Mapping[str, Any] | None) -> float | None:
    """Exposed communication of the recorded phases over their seconds, of the rank where it is most; None where nothing was recorded."""
    if found is None:
        return None
    sums = [[sum(phase[key] for phase in rank["phases"].values()) for key in ("exposed", "seconds")] for rank in found["ranks"]]
    return max(exposed / seconds for exposed, seconds in sums if seconds > 0)


def show(found: Mapping[str, Any], console: Console) -> None:
    """The table: phases of the rank in which communication is exposed longest, and how far the ranks differ."""
    table = Table(title=f"communication of a trainer rank in a step ({len(found['steps'])} recorded), over {len(found['ranks'])} ranks")
    table.add_column("phase")
    for name in ("seconds", "collectives", "MB received", "communication", "exposed", "exposed share"):
        table.add_column(name, justify="right")
    for phase in PHASES:
        ranks = [rank["phases"][phase] for rank in found["ranks"] if phase in rank["phases"]]
        if not ranks:
            continue
        worst = max(ranks, key=lambda one: one["exposed"])
        calls = ", ".join(f"{counts['calls']:,.0f} {kind}" for kind, counts in worst["volume"].items()) or "none"
        unsized = sum(counts["unsized"] for counts in worst["volume"].values())
        size = f"{worst['bytes'] / 1e6:,.3f}" + (f" (without {unsized:,.0f} calls of unknown size)" if unsized else "")
        table.add_row(
            phase, _span(ranks, "seconds"), calls, size, _span(ranks, "communication"), _span(ranks, "exposed"),
            f"{worst['exposed'] / worst['seconds']:.1%}" if worst["seconds"] > 0 else "",
        )  # fmt: skip
    console.print(table)


def _span(ranks: Sequence[Mapping[str, Any]], key: str) -> str:
    values = [one[key] for one in ranks]
    low, high, middle = min(values), max(values), statistics.median(values)
    return f"{middle:.4f}" if high - low < 5e-5 else f"{middle:.4f} ({low:.4f} to {high:.4f})"

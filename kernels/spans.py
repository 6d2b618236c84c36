"""Arithmetic of spans of time: how long communication ran while no compute did.

A span is (start, end) with start <= end, in any one unit. Spans of a list may overlap, as streams and threads do; what is computed is about
instants: an instant counts once however many spans cover it. Nothing here knows of profilers or devices (see `tracing`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

Span = tuple[float, float]


def union(spans: Iterable[Span]) -> list[Span]:
    """The same instants in spans that are sorted, apart and not empty."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if end <= start:
            continue
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def minus(spans: Iterable[Span], others: Iterable[Span]) -> list[Span]:
    """Instants of `spans` that none of `others` covers, as `union` gives them."""
    taken, found = union(others), []
    at = 0
    for start, end in union(spans):
        while at < len(taken) and taken[at][1] <= start:
            at += 1
        place = at
        while place < len(taken) and taken[place][0] < end:
            if taken[place][0] > start:
                found.append((start, taken[place][0]))
            start = max(start, taken[place][1])
            place += 1
        if start < end:
            found.append((start, end))
    return found


def length(spans: Iterable[Span]) -> float:
    """How many instants: spans that overlap count once."""
    return sum(end - start for start, end in union(spans))


@dataclass(slots=True)
class Work:
    """What ran in one phase of one rank."""

    communication: list[Span] = field(default_factory=list)
    compute: list[Span] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Overlap:
    """Times of one phase, in the unit of its spans."""

    communication: float
    """Communication ran, whatever else did."""
    exposed: float
    """Communication ran and no compute did, of this phase or of another."""
    compute: float


def overlaps(phases: dict[str, Work]) -> dict[str, Overlap]:
    """The times of each phase. A collective belongs to the phase that started it, and work of any phase hides it."""
    compute = union(span for work in phases.values() for span in work.compute)
    return {
        name: Overlap(length(work.communication), length(minus(work.communication, compute)), length(work.compute))
        for name, work in phases.items()
    }

"""What checks say: findings with their places, one result a check, one report a run, and the verdict.

A report fails closed. It agrees only when every planned check gave a result and every result agrees; a check that raised, that was
planned and never ran, or that found nothing to compare is no agreement. Exit status: 0 agrees, 1 disagrees, 2 could not be checked.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

SCHEMA = "samebits.alignment/1"
AGREE, DISAGREE, ERROR = "agree", "disagree", "error"


@dataclass(frozen=True, slots=True)
class Place:
    """Where something differs. What does not apply stays None."""

    tensor: str | None = None
    """Name in the checkpoint or in the adapter."""
    layer: int | None = None
    """Absolute layer index."""
    expert: int | None = None
    """Logical expert id."""
    sequence: int | None = None
    """Index of the sequence in the probe."""
    token: int | None = None
    """Index of the token in its sequence, prompt included."""
    replica: int | None = None
    rank: int | None = None

    def __str__(self) -> str:
        return " ".join(f"{name} {value}" for name, value in asdict(self).items() if value is not None)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that does not agree."""

    message: str
    """One line that names the thing."""
    place: Place = Place()
    measured: float | None = None
    limit: float | None = None


@dataclass(slots=True)
class CheckResult:
    """What one check found."""

    name: str
    """Dotted, the class first: weights.adapter, routing.rows, logprobs.temperature."""
    compared: int = 0
    """How many things were compared. A check that compared nothing did not agree."""
    findings: list[Finding] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    error: str | None = None
    """One line, where the check itself could not be made."""

    @property
    def status(self) -> str:
        """AGREE, DISAGREE or ERROR."""
        if self.findings:
            return DISAGREE
        return ERROR if self.error is not None or self.compared < 1 else AGREE

    def require(self, holds: bool, message: str, place: Place = Place(), measured: float | None = None, limit: float | None = None) -> bool:
        """Count one comparison; where it does not hold, add a finding. Returns `holds`."""
        self.compared += 1
        if not holds:
            self.findings.append(Finding(message, place, measured, limit))
        return bool(holds)

    def absorb(self, other: CheckResult) -> None:
        """Add another run of the same check: counts and findings add up, of each metric the larger magnitude is kept."""
        if other.name != self.name:
            raise ValueError(f"{other.name} is not {self.name}")
        for run in (self, other):
            if run.status == ERROR and self.error is None:
                self.error = run.error or "one of the runs had nothing to compare"
        self.compared += other.compared
        self.findings += other.findings
        self.seconds += other.seconds
        for name, value in other.metrics.items():
            self.metrics[name] = max(value, self.metrics.get(name, value), key=abs)

    def to_json(self) -> dict[str, Any]:
        """Plain types, places without what does not apply."""
        out = asdict(self) | {"status": self.status}
        for finding in out["findings"]:
            finding["place"] = {k: v for k, v in finding["place"].items() if v is not None}
        return out


@dataclass(slots=True)
class Report:
    """Results of a set of checks on one pair of trainer and engine."""

    subject: str
    """Recipe, run directory or server that was checked."""
    planned: Sequence[str]
    """Names of all checks that must give a result."""
    results: list[CheckResult] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    """What the checks were made with: profile, thresholds, probe sizes, injected fault."""
    versions: dict[str, str] = field(default_factory=dict)
    plots: dict[str, Any] = field(default_factory=dict)
    """Data of the drawings: `scatter` {trainer, engine: [float]}, `by_position` {position, mean, q95, max: [..]},
    `agreement` {layers: [int], share: [float], experts: [[float] per layer]} (share of tokens that each expert got on which both agree)."""
    date: str = field(default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))

    @property
    def missing(self) -> list[str]:
        """Planned checks without a result."""
        have = {r.name for r in self.results}
        return [name for name in self.planned if name not in have]

    @property
    def verdict(self) -> str:
        """DISAGREE when anything was found to differ; otherwise ERROR when anything could not be checked."""
        statuses = {r.status for r in self.results}
        if DISAGREE in statuses:
            return DISAGREE
        return AGREE if statuses == {AGREE} and not self.missing and self.planned else ERROR

    @property
    def exit_status(self) -> int:
        """0, 1 or 2."""
        return {AGREE: 0, DISAGREE: 1, ERROR: 2}[self.verdict]

    def findings(self) -> Iterator[tuple[str, Finding]]:
        """(check, finding) of everything that differs."""
        return ((r.name, f) for r in self.results for f in r.findings)

    def to_json(self) -> dict[str, Any]:
        """The report as plain types under a versioned schema."""
        return {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "subject": self.subject,
            "date": self.date,
            "versions": dict(self.versions),
            "settings": dict(self.settings),
            "planned": list(self.planned),
            "missing": self.missing,
            "results": [r.to_json() for r in self.results],
            "plots": self.plots,
        }

    def run(self, name: str, check: Callable[[CheckResult], object]) -> CheckResult:
        """Make one check: `check` fills the result it is given. What it raises becomes the result's error, never a pass.

        Made again, it adds to the result that is there.
        """
        with recorded(name) as result:
            check(result)
        earlier = next((r for r in self.results if r.name == name), None)
        if earlier is None:
            self.results.append(result)
        else:
            earlier.absorb(result)
        return result


@contextmanager
def recorded(name: str) -> Iterator[CheckResult]:
    """A result that times its block and keeps what the block raises as its error."""
    result = CheckResult(name)
    start = time.perf_counter()
    try:
        yield result
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        result.error = f"{type(error).__name__}: {lines[-1] if lines else 'no message'}"[:600]
    finally:
        result.seconds = time.perf_counter() - start

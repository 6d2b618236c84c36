"""Statistics of an evaluation: how good a model is on a set of problems, from n graded responses to each.

`mean@n` is the share of right responses, averaged over problems; `pass@k` the chance that at least one of k responses is right,
estimated without bias from n >= k. Problems are the unit of chance: intervals come from drawing problems with replacement, since the
responses to one problem are far from independent. Counts in, floats out; nothing here reads a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import numpy as np

CONFIDENCE = 0.95
DRAWS = 10_000


@dataclass(frozen=True, slots=True)
class ProblemResult:
    """Graded responses to one problem."""

    problem: str
    """Its name or digest."""
    right: int
    responses: int
    truncated: int = 0
    """Responses that ended at the length limit."""

    def __post_init__(self) -> None:
        """Raises `ValueError` on counts that cannot be."""
        if self.responses < 1 or not 0 <= self.right <= self.responses or not 0 <= self.truncated <= self.responses:
            raise ValueError(f"problem {self.problem}: {self.right} right and {self.truncated} truncated of {self.responses} responses")


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over problems with its bootstrap interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Summary:
    """One evaluation."""

    problems: int
    responses: int
    mean: Estimate
    """mean@n."""
    pass_at: dict[int, Estimate]
    """pass@k by k."""
    truncated: float
    """Share of all responses that ended at the length limit."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON: `mean`, `pass@k`, `truncated` and the counts."""
        result: dict[str, Any] = {"problems": self.problems, "responses": self.responses, "mean": asdict(self.mean)}
        return result | {f"pass@{k}": asdict(e) for k, e in self.pass_at.items()} | {"truncated": self.truncated}


def pass_at_k(responses: int, right: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k responses is right: 1 - C(n - c, k) / C(n, k), as a product.

    Chen et al. 2021 (arXiv:2107.03374), equation 1 and its numerically stable form. Raises `ValueError` unless 1 <= k <= n.
    """
    if not 1 <= k <= responses:
        raise ValueError(f"pass@{k} needs 1 <= k <= the {responses} responses to a problem")
    if not 0 <= right <= responses:
        raise ValueError(f"{right} right of {responses} responses")
    if responses - right < k:
        return 1.0
    return 1.0 - prod(1.0 - k / i for i in range(responses - right + 1, responses + 1))


def bootstrap(values: Sequence[float], *, confidence: float = CONFIDENCE, draws: int = DRAWS, seed: int = 0) -> Estimate:
    """Mean of `values`, one a problem, with the percentile bootstrap interval of that mean (Efron 1979), drawn with `seed`.

    Raises `ValueError` on no values, a confidence outside (0, 1) or no draws.
    """
    if not len(values):
        raise ValueError("no problems to take a mean of")
    if not 0 < confidence < 1 or draws < 1:
        raise ValueError(f"a bootstrap needs a confidence within (0, 1) and a draw, not {confidence} and {draws}")
    sample = np.asarray(values, dtype=np.float64)
    # A draw of problems with replacement is a multinomial count of each: one matrix product gives all means.
    counts = np.random.default_rng(seed).multinomial(len(sample), np.full(len(sample), 1 / len(sample)), size=draws)
    means = counts @ sample / len(sample)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Estimate(float(sample.mean()), float(low), float(high))


def summarise(
    results: Sequence[ProblemResult], ks: Sequence[int] | None = None, *, confidence: float = CONFIDENCE, draws: int = DRAWS, seed: int = 0
) -> Summary:
    """mean@n, pass@k and the truncation share of an evaluation.

    `ks`: which pass@k; by default the powers of two up to the fewest responses to a problem, and that number. Every problem weighs the
    same however many responses it has. Raises `ValueError` on no results, a problem that comes twice, or a k above its responses.
    """
    names = [r.problem for r in results]
    if len(set(names)) != len(names):
        raise ValueError(f"problem {next(n for n in names if names.count(n) > 1)} comes twice")
    if not results:
        raise ValueError("no results to summarise")
    fewest = min(r.responses for r in results)
    wanted = sorted({k for k in (2**i for i in range(fewest.bit_length())) if k <= fewest} | {fewest}) if ks is None else sorted(set(ks))

    def over_problems(values: list[float]) -> Estimate:
        return bootstrap(values, confidence=confidence, draws=draws, seed=seed)

    total = sum(r.responses for r in results)
    return Summary(
        problems=len(results),
        responses=total,
        mean=over_problems([r.right / r.responses for r in results]),
        pass_at={k: over_problems([pass_at_k(r.responses, r.right, k) for r in results]) for k in wanted},
        truncated=sum(r.truncated for r in results) / total,
    )

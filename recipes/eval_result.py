"""The result of an evaluation: every response graded, the figures over them, as JSON and as tables.

Grading happens here and not when a response comes, so that responses kept earlier are graded by the grader of today, all by the same.
JSON holds a grade for each response, by which the figures can be counted again; the texts stay in `responses.jsonl`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from .eval_log import Response
from .eval_stats import Estimate, ProblemResult, Summary, summarise
from .eval_tasks import EvalProblem, EvalTask
from .grading import Grade

SCHEMA = "samebits.evaluation/1"
SHOWN_PROBLEMS = 60
"""Rows of the printed table; a longer one shows the problems that fewest responses got right."""


@dataclass(frozen=True, slots=True)
class GradedProblem:
    """A problem with its responses, by sample number, and their grades."""

    problem: EvalProblem
    responses: tuple[Response, ...]
    grades: tuple[Grade, ...]

    @property
    def right(self) -> int:
        """How many responses are right."""
        return sum(grade.correct for grade in self.grades)

    @property
    def truncated(self) -> int:
        """How many responses were cut off."""
        return sum(response.truncated for response in self.responses)

    @property
    def mean_tokens(self) -> float | None:
        """Mean length of the responses whose length is known."""
        return _mean_tokens(self.responses)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A finished evaluation."""

    title: str
    settings: Mapping[str, Any]
    problems: tuple[GradedProblem, ...]
    summary: Summary

    @property
    def n(self) -> int:
        """Responses to a problem."""
        return len(self.problems[0].responses)

    @property
    def mean_tokens(self) -> float | None:
        """Mean length over all responses whose length is known."""
        return _mean_tokens([r for p in self.problems for r in p.responses])

    def as_dict(self) -> dict[str, Any]:
        """For JSON, schema `samebits.evaluation/1`."""
        return {
            "schema": SCHEMA,
            "title": self.title,
            "settings": dict(self.settings),
            "summary": self.summary.as_dict() | {"tokens_mean": self.mean_tokens},
            "problems": [
                {
                    "problem": graded.problem.id,
                    "gold": graded.problem.gold,
                    "right": graded.right,
                    "responses": [
                        {
                            "sample": response.sample,
                            "seed": response.seed,
                            "correct": grade.correct,
                            "answer": grade.answer,
                            "truncated": response.truncated,
                            "tokens": response.tokens,
                        }
                        for response, grade in zip(graded.responses, graded.grades, strict=True)
                    ],
                }
                for graded in self.problems
            ],
        }


def _mean_tokens(responses: Sequence[Response]) -> float | None:
    known = [response.tokens for response in responses if response.tokens is not None]
    return sum(known) / len(known) if known else None


def evaluate(task: EvalTask, responses: Mapping[tuple[str, int], Response], n: int, title: str, settings: Mapping[str, Any]) -> Evaluation:
    """Grade all responses and count. Raises `KeyError` when one is missing."""
    ordered = [responses[problem.id, number] for problem in task.problems for number in range(n)]
    golds = [problem.gold for problem in task.problems for _ in range(n)]
    grades = task.grade([r.text for r in ordered], golds, [r.truncated for r in ordered])
    graded = tuple(
        GradedProblem(problem, tuple(ordered[i * n : (i + 1) * n]), tuple(grades[i * n : (i + 1) * n]))
        for i, problem in enumerate(task.problems)
    )
    counts = [ProblemResult(g.problem.id, g.right, n, g.truncated) for g in graded]
    return Evaluation(title, settings, graded, summarise(counts))


def summary_rows(evaluation: Evaluation) -> list[tuple[str, str]]:
    """The figures as (what, value) pairs."""
    summary = evaluation.summary
    rows = [(f"mean@{evaluation.n}", _percent(summary.mean))]
    rows += [(f"pass@{k}", _percent(estimate)) for k, estimate in summary.pass_at.items()]
    rows += [
        ("cut off", f"{summary.truncated:.1%}"),
        ("mean length", _tokens(evaluation.mean_tokens)),
        ("problems x responses", f"{summary.problems} x {evaluation.n}"),
    ]
    return rows


def problem_rows(evaluation: Evaluation) -> list[tuple[str, str, str, str, str]]:
    """(problem, right answer, right of n, cut off, mean length) of each problem."""
    return [
        (g.problem.id, g.problem.gold, f"{g.right} of {len(g.responses)}", str(g.truncated), _tokens(g.mean_tokens))
        for g in evaluation.problems
    ]


def print_evaluation(evaluation: Evaluation, console: Console) -> None:
    """Problems and figures, as tables."""
    order = sorted(range(len(evaluation.problems)), key=lambda i: (evaluation.problems[i].right, i))[:SHOWN_PROBLEMS]
    rest = len(evaluation.problems) - len(order)
    chosen = set(order)
    table = Table(title=f"the {len(order)} problems with fewest right responses" if rest else None)
    for name, justify in (("problem", "left"), ("answer", "left"), ("right", "right"), ("cut off", "right"), ("mean length", "right")):
        table.add_column(name, justify=justify, overflow="fold")
    for i, row in enumerate(problem_rows(evaluation)):
        if i in chosen:
            table.add_row(*row)
    console.print(table, markup=False)
    table = Table(title=f"{evaluation.settings['task']}: {evaluation.title}")
    table.add_column("what")
    table.add_column("value, 95 % interval over problems", justify="right")
    for row in summary_rows(evaluation):
        table.add_row(*row)
    console.print(table)


def _percent(estimate: Estimate) -> str:
    return f"{estimate.value:.1%} [{estimate.low:.1%}, {estimate.high:.1%}]"


def _tokens(mean: float | None) -> str:
    return "unknown" if mean is None else f"{mean:.1f} tokens"

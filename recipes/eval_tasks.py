"""What an evaluation asks: distinct problems with their right answers, and how responses to them are graded.

`arithmetic` and `mini-math` are the held-out sets that the training job evaluates on, with the task's own grader. Every other task is a
set of math problems (`aime24`, `aime25`, any source of `math_data`), graded by `grading`. A set that comes with every problem many times,
as the AIME of DAPO's repository does (30 problems, 32 rows each), counts each problem once.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import grading, math_data
from .data import GENERATED, HELD_OUT
from .generated import GeneratedTask
from .grading import Grade
from .math_data import DataError


@dataclass(frozen=True, slots=True)
class EvalProblem:
    """One problem."""

    id: str
    """Its digest, or the prompt itself where that is as short."""
    prompt: str
    """What the user says."""
    gold: str
    """The right answer."""


Grader = Callable[[Sequence[str], Sequence[str], Sequence[bool]], list[Grade]]
"""Texts, right answers, and whether each text was cut off, to one grade each."""


@dataclass(frozen=True, slots=True)
class EvalTask:
    """Problems and their grader."""

    name: str
    problems: tuple[EvalProblem, ...]
    rows: int
    """Rows that the problems came in."""
    grade: Grader

    @property
    def fingerprint(self) -> str:
        """Digest of all prompts and answers, in order."""
        content = [[p.id, p.prompt, p.gold] for p in self.problems]
        return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()


def load_task(name: str, seed: int, limit: int | None = None, template: str | None = None) -> EvalTask:
    """The task called `name`: one that generates its problems, a set that `math_data` knows, a hub name or a file.

    `seed`: the recipe's, which draws the held-out set of a generated task. `limit`: only the first so many problems. `template`: what is
    put around a math problem; None: DAPO's prompt. Raises `DataError`.
    """
    if name in GENERATED:
        drawn = GENERATED[name].draw("test", HELD_OUT, seed)
        problems = tuple(EvalProblem(p.prompt, p.prompt, p.answer) for p in drawn)
        return EvalTask(name, problems[:limit], len(problems), functools.partial(_grade_generated, GENERATED[name]))
    if Path(name).suffix in math_data.SUFFIXES and not Path(name).is_file():
        raise DataError(f"no file {name}")
    found = math_data.load_problems(name, duplicates="drop")
    around = template or math_data.TEMPLATE
    problems = tuple(EvalProblem(p.digest, p.prompt_in(around), p.answer) for p in found.problems)
    return EvalTask(name, problems[:limit], found.rows, _grade_math)


def _grade_generated(task: GeneratedTask, texts: Sequence[str], golds: Sequence[str], truncated: Sequence[bool]) -> list[Grade]:
    return [
        Grade(not cut and task.grade(text, gold) > 0, task.stated(text), cut)
        for text, gold, cut in zip(texts, golds, truncated, strict=True)
    ]


def _grade_math(texts: Sequence[str], golds: Sequence[str], truncated: Sequence[bool]) -> list[Grade]:
    return grading.grade_many(texts, golds, truncated)

"""What the tasks with generated problems share: a text that ends in one number, its reward, and verl's data files."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

Split = Literal["train", "test"]


class Generated(Protocol):
    """A problem that was made, not found."""

    @property
    def prompt(self) -> str:
        """What the user says; no two problems of a draw have the same."""

    @property
    def answer(self) -> str:
        """The right final number."""


@dataclass(frozen=True)
class GeneratedTask:
    """One task. verl takes `compute_score` as its reward function."""

    data_source: str
    ending: str
    """Regular expression of how a response states its final number, which is group `number`."""
    draw: Callable[[Split, int, int], Sequence[Generated]]
    """So many problems of a split with distinct prompts, by seed."""

    @functools.cached_property
    def _response(self) -> re.Pattern[str]:
        return re.compile(rf"(?P<steps>.*){self.ending}(?:<eos>)?", re.DOTALL)

    def stated(self, text: str) -> str | None:
        """The one final number that `text` gives; None when it gives none, several, or more text after it."""
        match = self._response.fullmatch(text)
        return None if match is None or "answer:" in match["steps"] else match["number"]

    def grade(self, text: str, answer: str) -> float:
        """+1.0 when `text` gives exactly one answer, it equals `answer` as a number, and nothing but `<eos>` follows it; else -1.0.

        A text cut before or inside the number is wrong. One cut between the whole number and `<eos>` cannot be told from a finished
        one where the end token is stripped, as verl strips it; the tasks' longest responses leave room for it.
        """
        number = self.stated(text)
        return 1.0 if number is not None and int(number) == int(answer) else -1.0

    def compute_score(
        self, data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **_: Any
    ) -> dict[str, float]:
        """verl's custom reward function: `score` (+1 or -1) and `acc` (1 or 0). Raises `ValueError` on data of another task.

        A response that was cut off (`extra_info["finish_reason"] == "length"`) is wrong, whatever it says.
        """
        if data_source != self.data_source:
            raise ValueError(f"reward of {self.data_source} was asked to grade {data_source!r}")
        truncated = (extra_info or {}).get("finish_reason") == "length"
        score = -1.0 if truncated else self.grade(solution_str, ground_truth)
        return {"score": score, "acc": float(score > 0)}

    def row(self, problem: Generated, split: Split, index: int) -> dict[str, Any]:
        """One row of a verl data file."""
        return {
            "data_source": self.data_source,
            "prompt": [{"role": "user", "content": problem.prompt}],
            "reward_model": {"style": "rule", "ground_truth": problem.answer},
            "extra_info": {"index": index, "split": split},
        }

    def write_parquet(self, folder: Path, train: int, test: int, seed: int = 0) -> tuple[Path, Path]:
        """Write `train.parquet` and `test.parquet` with so many distinct problems each; returns their paths."""
        from datasets import Dataset

        folder.mkdir(parents=True, exist_ok=True)
        paths = []
        sizes: list[tuple[Split, int]] = [("train", train), ("test", test)]
        for split, count in sizes:
            path = folder / f"{split}.parquet"
            Dataset.from_list([self.row(p, split, i) for i, p in enumerate(self.draw(split, count, seed))]).to_parquet(path)
            paths.append(path)
        return paths[0], paths[1]

"""The tiny task: two-step arithmetic with worked steps, small enough that a laptop model learns it by GRPO within minutes.

A prompt is `34*7+58=` (two-digit a and c, one-digit b from 2), its worked steps `34*7=238;238+58=296;answer:296`: 64,800 prompts,
of which a hash of the prompt holds out one in eleven. Reward: +1 for the right final number, -1 for anything else.

The pre-training corpus has slips: each of the two results is, with some probability, one off in one digit, and the text goes on with
the wrong value. A model trained on it samples right answers about (1 - slip)^2 of the time, with variance inside every GRPO group.
Everything is deterministic: by the prompt's hash, and by seed.
"""

from __future__ import annotations

import functools
import hashlib
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

DATA_SOURCE = "samebits/arithmetic"
MAX_RESPONSE_TOKENS = 26
"""Longest worked steps with the end token (25, `answer:` being one token), and one to spare."""
_HELD_OUT_ONE_IN = 11
_RESPONSE = re.compile(r"(?P<steps>.*)answer:(?P<number>[0-9]{1,9})(?:<eos>)?", re.DOTALL)

Split = Literal["train", "test"]


@dataclass(frozen=True, slots=True)
class Problem:
    """a * b + c."""

    a: int
    b: int
    c: int

    @property
    def prompt(self) -> str:
        """What the user says."""
        return f"{self.a}*{self.b}+{self.c}="

    @property
    def answer(self) -> str:
        """The right final number."""
        return str(self.a * self.b + self.c)

    @property
    def steps(self) -> str:
        """The right response, without the end token."""
        return self.steps_with(self.a * self.b, self.a * self.b + self.c)

    @property
    def held_out(self) -> bool:
        """Whether the prompt is in the test split; by its hash alone."""
        return int.from_bytes(hashlib.blake2b(self.prompt.encode(), digest_size=8).digest(), "big") % _HELD_OUT_ONE_IN == 0

    def steps_with(self, product: int, total: int) -> str:
        """The response of someone who takes a * b for `product` and product + c for `total`."""
        return f"{self.a}*{self.b}={product};{product}+{self.c}={total};answer:{total}"

    def steps_with_slips(self, rate: float, rng: random.Random) -> str:
        """The response with each result wrong in one digit with probability `rate`; the second starts from the first as written."""
        product = _slip(self.a * self.b, rate, rng)
        return self.steps_with(product, _slip(product + self.c, rate, rng))


def _slip(number: int, rate: float, rng: random.Random) -> int:
    """`number`, or with probability `rate` a number with one digit one off: the leading digit wraps within 1..9, the others in 0..9."""
    if rng.random() >= rate:
        return number
    digits = [int(d) for d in str(number)]
    place = rng.randrange(len(digits))
    moved = digits[place] + rng.choice((-1, 1))
    digits[place] = moved % 10 if place else (moved - 1) % 9 + 1
    return int("".join(map(str, digits)))


@functools.cache
def problems(split: Split) -> tuple[Problem, ...]:
    """All problems of a split, in ascending order of (a, b, c). Raises `ValueError` on an unknown split."""
    if split not in ("train", "test"):
        raise ValueError(f"unknown split {split!r}; known: train, test")
    every = (Problem(a, b, c) for a in range(10, 100) for b in range(2, 10) for c in range(10, 100))
    return tuple(p for p in every if p.held_out == (split == "test"))


def draw(split: Split, count: int, seed: int = 0) -> list[Problem]:
    """`count` distinct problems of a split, in an order given by `seed`. Raises `ValueError` when there are not so many."""
    pool = problems(split)
    if count > len(pool):
        raise ValueError(f"{split} split has {len(pool)} problems, {count} were asked for")
    return random.Random(seed).sample(pool, count)


def stated(text: str) -> str | None:
    """The one final number that `text` gives; None when it gives none, several, or more text after it."""
    match = _RESPONSE.fullmatch(text)
    return None if match is None or "answer:" in match["steps"] else match["number"]


def grade(text: str, answer: str) -> float:
    """+1.0 when `text` gives exactly one answer, it equals `answer` as a number, and nothing but `<eos>` follows it; else -1.0.

    A text cut before or inside the number is wrong. One cut between the whole number and `<eos>` cannot be told from a finished
    one where the end token is stripped, as verl strips it; `MAX_RESPONSE_TOKENS` leaves room for it.
    """
    number = stated(text)
    return 1.0 if number is not None and int(number) == int(answer) else -1.0


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **_: Any
) -> dict[str, float]:
    """verl's custom reward function: `score` (+1 or -1) and `acc` (1 or 0). Raises `ValueError` on data of another task.

    A response that was cut off (`extra_info["finish_reason"] == "length"`) is wrong, whatever it says.
    """
    if data_source != DATA_SOURCE:
        raise ValueError(f"reward of {DATA_SOURCE} was asked to grade {data_source!r}")
    truncated = (extra_info or {}).get("finish_reason") == "length"
    score = -1.0 if truncated else grade(solution_str, ground_truth)
    return {"score": score, "acc": float(score > 0)}


def row(problem: Problem, split: Split, index: int) -> dict[str, Any]:
    """One row of a verl data file."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": problem.prompt}],
        "reward_model": {"style": "rule", "ground_truth": problem.answer},
        "extra_info": {"index": index, "split": split},
    }


def write_parquet(folder: Path, train: int, test: int, seed: int = 0) -> tuple[Path, Path]:
    """Write `train.parquet` and `test.parquet` with so many distinct problems each; returns their paths."""
    from datasets import Dataset

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    sizes: list[tuple[Split, int]] = [("train", train), ("test", test)]
    for split, count in sizes:
        path = folder / f"{split}.parquet"
        Dataset.from_list([row(p, split, i) for i, p in enumerate(draw(split, count, seed))]).to_parquet(path)
        paths.append(path)
    return paths[0], paths[1]

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
from dataclasses import dataclass

from .generated import GeneratedTask, Split

DATA_SOURCE = "samebits/arithmetic"
MAX_RESPONSE_TOKENS = 26
"""Longest worked steps with the end token (25, `answer:` being one token), and one to spare."""
_HELD_OUT_ONE_IN = 11


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


TASK = GeneratedTask(DATA_SOURCE, r"answer:(?P<number>[0-9]{1,9})", draw)
stated, grade, compute_score, row, write_parquet = TASK.stated, TASK.grade, TASK.compute_score, TASK.row, TASK.write_parquet

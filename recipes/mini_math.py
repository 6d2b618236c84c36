"""The mini task: generated math with worked steps, of five families from two steps to some twenty.

`chain` is an expression computed from the inside out, `equation` a linear equation in x, `word` a short story of three or four steps,
`product` a long multiplication by partial products, `receipt` a shopping list with change. The last two make responses of 100 to 250
tokens. A response is one line a step and `answer: N` at the end, N a whole number that may be negative. Reward: +1 for the right
number, -1 for anything else.

A problem is held out when a hash of its prompt says so, one in sixteen, so no training prompt is ever a held-out one, whatever the seed.

Slips: a problem writes its solution with each result passed through a function, which may get it wrong; the text goes on with what was
written. The rate is chosen for the problem, `1 - right ** (1 / results)`, so that short and long solutions are right equally often. A
model trained on such a corpus knows the arithmetic, answers right greedily, and samples right answers about as often as the corpus does:
what GRPO needs to begin with.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .generated import GeneratedTask, Split

DATA_SOURCE = "samebits/mini-math"
MAX_PROMPT_TOKENS = 96
"""Longest prompt with the chat's markers, by the mini tokenizer, with room to spare."""
MAX_RESPONSE_TOKENS = 320
"""Longest worked solution with the end token, by the mini tokenizer, with room to spare."""
_HELD_OUT_ONE_IN = 16

Note = Callable[[int], int]
"""What the writer of a solution writes down for a result."""


def exact(result: int) -> int:
    """The `Note` of someone who never slips."""
    return result


class Writer:
    """Lines of a solution under way: each computed result is noted, and the text goes on from what was noted."""

    def __init__(self, note: Note) -> None:
        self.note, self.lines = note, []

    def step(self, left: int, sign: str, right: int) -> int:
        """`left sign right = result` as one line; returns the result as written. A quotient is rounded down."""
        written = self.note(_OPERATIONS[sign](left, right))
        self.lines.append(f"{left}{sign}{right}={written}")
        return written

    def times(self, left: int, right: int) -> int:
        """A product of larger numbers, digit by digit of `right` from the last, with a running sum."""
        total = None
        for place, digit in enumerate(reversed(str(right))):
            if digit == "0":
                continue
            part = self.step(left, "*", int(digit) * 10**place)
            total = part if total is None else self.step(total, "+", part)
        return total or 0

    def text(self, answer: int) -> str:
        """The whole solution."""
        return "\n".join([*self.lines, f"answer: {answer}"])


_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "*": lambda a, b: a * b,
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "/": lambda a, b: a // b,
}


@dataclass(frozen=True, slots=True)
class Problem:
    """A prompt and how its solution is written."""

    family: str
    prompt: str
    solve: Callable[[Writer], int]
    """Writes the lines and returns the answer as written."""

    def solution(self, note: Note = exact) -> tuple[str, int]:
        """Text and answer of someone who notes results by `note`."""
        writer = Writer(note)
        answer = self.solve(writer)
        return writer.text(answer), answer

    @property
    def steps(self) -> str:
        """The right response, without the end token."""
        return self.solution()[0]

    @property
    def answer(self) -> str:
        """The right final number."""
        return str(self.solution()[1])

    @property
    def results(self) -> int:
        """How many results the solution writes down."""
        noted: list[int] = []
        self.solution(lambda value: noted.append(value) or value)
        return len(noted)

    @property
    def held_out(self) -> bool:
        """Whether the prompt is in the test split; by its hash alone."""
        return int.from_bytes(hashlib.blake2b(self.prompt.encode(), digest_size=8).digest(), "big") % _HELD_OUT_ONE_IN == 0

    def steps_with_slips(self, right: float, rng: random.Random) -> str:
        """The response of someone whose solutions have no slip with probability `right`; 1: never a slip."""
        if right >= 1:
            return self.steps
        rate = 1 - right ** (1 / self.results)
        return self.solution(lambda value: slip(value, rng) if rng.random() < rate else value)[0]


def slip(number: int, rng: random.Random) -> int:
    """`number` with one digit one off: the leading digit wraps within 1..9, the others within 0..9. The sign stays."""
    digits = [int(d) for d in str(abs(number))]
    place = rng.randrange(len(digits))
    moved = digits[place] + rng.choice((-1, 1))
    digits[place] = moved % 10 if place else (moved - 1) % 9 + 1
    return int("".join(map(str, digits))) * (-1 if number < 0 else 1)


def chain(rng: random.Random) -> Problem:
    """Two to five operations on a running value, e.g. `(34*7+58)*6-125`."""
    start, ops = rng.randint(11, 99), []
    for i in range(rng.randint(2, 5)):
        sign = "*" if i == 0 else rng.choice("+-*")
        if sign == "*" and i and ops[-1][0] == "*":
            sign = "+"
        ops.append((sign, rng.randint(2, 9) if sign == "*" else rng.randint(11, 999)))
    text = str(start)
    for i, (sign, number) in enumerate(ops):
        text = f"({text}){sign}{number}" if sign == "*" and i else f"{text}{sign}{number}"

    def solve(w: Writer) -> int:
        value = start
        for sign, number in ops:
            value = w.step(value, sign, number)
        return value

    return Problem("chain", f"Compute {text}", solve)


def equation(rng: random.Random) -> Problem:
    """a*(x+b)+c*x=d, solved by collecting terms."""
    a, b, c, x = rng.randint(2, 9), rng.randint(2, 99), rng.randint(2, 9), rng.randint(2, 99)
    minus = a > c and rng.random() < 0.5
    d = a * (x + b) + (-c if minus else c) * x

    def solve(w: Writer) -> int:
        product = w.step(a, "*", b)
        factor = w.step(a, "-" if minus else "+", c)
        w.lines.append(f"{factor}*x+{product}={d}")
        rest = w.step(d, "-", product)
        w.lines.append(f"{factor}*x={rest}")
        return w.step(rest, "/", factor) if factor else w.note(0)

    return Problem("equation", f"Solve for x: {a}*(x+{b}){'-' if minus else '+'}{c}*x={d}", solve)


_NAMES = ("Mia", "Ben", "Tom", "Eva", "Sam", "Lea", "Max", "Ida", "Leo", "Ada", "Jan", "Zoe")
_THINGS = ("pens", "cards", "books", "stamps", "apples", "coins", "shells", "plates", "nails", "beads", "cups", "maps")


def word(rng: random.Random) -> Problem:
    """A short story of three or four steps."""
    who, thing = rng.choice(_NAMES), rng.choice(_THINGS)
    boxes, each, packs, extra = rng.randint(3, 9), rng.randint(12, 99), rng.randint(2, 9), rng.randint(11, 49)
    kind = rng.randrange(4)
    if kind == 0:
        away = rng.randint(11, boxes * each - 1)
        prompt = (
            f"{who} has {boxes} boxes with {each} {thing} each. {who} gives away {away} {thing} and then buys {packs} packs of {extra}. "
            f"How many {thing} does {who} have now?"
        )

        def solve(w: Writer) -> int:
            left = w.step(w.step(boxes, "*", each), "-", away)
            return w.step(left, "+", w.step(packs, "*", extra))

    elif kind == 1:
        days, lost = rng.randint(2, 9), rng.randint(11, 99)
        prompt = (
            f"{who} makes {each} {thing} a day for {days} days, then {extra} more a day for another {packs} days. "
            f"{lost} {thing} break. How many {thing} are left?"
        )

        def solve(w: Writer) -> int:
            first = w.step(each, "*", days)
            rate = w.step(each, "+", extra)
            return w.step(w.step(first, "+", w.step(rate, "*", packs)), "-", lost)

    elif kind == 2:
        share, rest = rng.randint(11, 99), rng.randint(1, 99)
        total = share * boxes + rest
        prompt = (
            f"{who} keeps {rest} of {total} {thing} and shares the others equally among {boxes} friends. Each friend gives {packs} to a "
            f"teacher. How many {thing} does each friend have at the end?"
        )

        def solve(w: Writer) -> int:
            return w.step(w.step(w.step(total, "-", rest), "/", boxes), "-", packs)

    else:
        other = rng.choice([name for name in _NAMES if name != who])
        more = rng.randint(11, 199)
        prompt = (
            f"{who} has {each} {thing}. {other} has {boxes} times as many and {more} more. They put all of them together and sell {packs} "
            f"lots of {extra}. How many {thing} remain?"
        )

        def solve(w: Writer) -> int:
            theirs = w.step(w.step(boxes, "*", each), "+", more)
            return w.step(w.step(theirs, "+", each), "-", w.step(packs, "*", extra))

    return Problem("word", prompt, solve)


def product(rng: random.Random) -> Problem:
    """One or two long multiplications, added or subtracted, and one number more."""
    pairs = [(rng.randint(101, 999), rng.randint(12, 999)) for _ in range(rng.randint(1, 2))]
    last = rng.randint(101, 9999)
    sign = rng.choice("+-")
    text = sign.join(f"{a}*{b}" for a, b in pairs)

    def solve(w: Writer) -> int:
        values = [w.times(a, b) for a, b in pairs]
        value = values[0]
        for other in values[1:]:
            value = w.step(value, sign, other)
        return w.step(value, "+", last)

    return Problem("product", f"Compute {text}+{last}", solve)


def receipt(rng: random.Random) -> Problem:
    """A shopping list of three to six things, paid with one sum: how much comes back?"""
    who = rng.choice(_NAMES)
    things = rng.sample(_THINGS, rng.randint(3, 6))
    lines = [(rng.randint(2, 29), rng.randint(3, 99), thing) for thing in things]
    paid = rng.randint(1, 9) * 1000 + sum(n * price for n, price, _ in lines) // 1000 * 1000
    listed = ", ".join(f"{n} {thing} at {price}" for n, price, thing in lines)

    def solve(w: Writer) -> int:
        total = 0
        for i, (n, price, _) in enumerate(lines):
            cost = w.step(price, "*", n) if n < 10 else w.times(price, n)
            total = w.step(total, "+", cost) if i else cost
        return w.step(paid, "-", total)

    return Problem("receipt", f"{who} buys {listed} and pays with {paid}. How much comes back?", solve)


FAMILIES: dict[str, Callable[[random.Random], Problem]] = {
    "chain": chain, "equation": equation, "word": word, "product": product, "receipt": receipt,
}  # fmt: skip
"""Families by name; a problem is of each with equal probability."""


def stream(split: Split, seed: int | str) -> Iterator[Problem]:
    """Endless problems of a split, by seed; a prompt may come again. Raises `ValueError` on an unknown split."""
    if split not in ("train", "test"):
        raise ValueError(f"unknown split {split!r}; known: train, test")
    rng, makers = random.Random(f"{split}/{seed}"), list(FAMILIES.values())
    while True:
        problem = rng.choice(makers)(rng)
        if problem.held_out == (split == "test"):
            yield problem


def draw(split: Split, count: int, seed: int = 0) -> list[Problem]:
    """`count` problems of a split with distinct prompts, by seed; fewer are the first of more."""
    found: dict[str, Problem] = {}
    for problem in stream(split, seed):
        if len(found) >= count:
            break
        found.setdefault(problem.prompt, problem)
    return list(found.values())


TASK = GeneratedTask(DATA_SOURCE, r"answer: ?(?P<number>-?[0-9]{1,12})", draw)
stated, grade, compute_score, row, write_parquet = TASK.stated, TASK.grade, TASK.compute_score, TASK.row, TASK.write_parquet

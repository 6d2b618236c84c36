"""Math problems for training and evaluation: read from the hub or a file, made distinct, kept apart, written as verl reads them.

A source is the name of a known set (`dapo-math-17k`, `aime24`, `aime25`), a hub name (`owner/name` or `owner/name:split`) or a local
`.parquet`, `.jsonl` or `.json` file. Of a row only the problem and its final answer are used; both the schema of DAPO-Math (chat prompt,
`reward_model.ground_truth`) and the plain one (`problem`, `answer`) are understood, and a prompt that is already in DAPO's template is
taken out of it first. So the same problems give the same rows, digest and order, whatever file they came in.

Nothing is dropped in silence: a row that cannot be used raises `DataError` in one line, and what is dropped on request is counted.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from .answers import number, tidy
from .decontaminate import Overlap, overlaps

PROMPT_HEAD = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: $Answer "
    "(without quotes) where $Answer is the answer to the problem.\n\n"
)
PROMPT_TAIL = '\n\nRemember to put your answer on its own line after "Answer:".'
"""DAPO's prompt around a problem, as in BytedTsinghua-SIA/DAPO-Math-17k (Yu et al. 2025, arXiv:2503.14476)."""
PLACE = "{problem}"
TEMPLATE = PROMPT_HEAD + PLACE + PROMPT_TAIL
"""A prompt template: text with `{problem}` once."""

MAX_ROWS_PER_PROMPT = 1.01
_PROBLEM_FIELDS = ("problem", "question", "prompt")
_ANSWER_FIELDS = ("answer", "ground_truth", "expected_answer", "final_answer", "reward_model", "solution")
_BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}")
SUFFIXES = {".parquet": "parquet", ".jsonl": "json", ".json": "json"}

Duplicates = Literal["refuse", "drop"]


class DataError(ValueError):
    """Data that cannot be used as it is. The message is one line."""


@dataclass(frozen=True, slots=True)
class KnownSet:
    """A public set and what it must look like."""

    repository: str
    split: str
    data_source: str
    problems: int | None = None
    """Distinct problems it must have."""


KNOWN = {
    "dapo-math-17k": KnownSet("BytedTsinghua-SIA/DAPO-Math-17k", "train", "math_dapo"),
    "aime24": KnownSet("HuggingFaceH4/aime_2024", "train", "aime2024", 30),
    "aime25": KnownSet("math-ai/aime25", "test", "aime2025", 30),
}


@dataclass(frozen=True, slots=True, order=True)
class MathProblem:
    """One problem. Ordered and identified by the digest of what is asked and what is right."""

    digest: str
    """First 16 hex digits of the SHA-256 of problem and answer, each in its normal form."""
    text: str = field(compare=False)
    answer: str = field(compare=False)

    @property
    def prompt(self) -> str:
        """What the user says: the problem in DAPO's template."""
        return self.prompt_in(TEMPLATE)

    def prompt_in(self, template: str) -> str:
        """What the user says, in another template."""
        return template.replace(PLACE, self.text)


@dataclass(frozen=True, slots=True)
class ProblemSet:
    """Distinct problems in the order of their digests, and how they came out of the rows."""

    name: str
    data_source: str
    problems: tuple[MathProblem, ...]
    rows: int
    """Rows of the source."""
    distinct: int
    """Distinct problems of the source."""
    settings: dict[str, Any] = field(default_factory=dict)
    removed: tuple[Overlap, ...] = ()
    """Problems taken out because they are in an evaluation set."""
    conflicting: int = 0
    """Problems taken out because they come with different answers."""
    template: str = TEMPLATE
    """What `write_parquet` puts around a problem."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 (first 32 hex digits) over the problems' digests, the template and the settings.

        Independent of file format, row order and repetition; another problem, answer, template or setting changes it.
        """
        content = {"problems": [p.digest for p in self.problems], "template": self.template.split(PLACE), "settings": self.settings}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]

    @property
    def report(self) -> dict[str, Any]:
        """What to keep beside the data: counts, fingerprint, removed problems by digest."""
        return {
            "name": self.name,
            "data_source": self.data_source,
            "rows": self.rows,
            "problems": len(self.problems),
            "rows_per_problem": round(self.rows / self.distinct, 3),
            "conflicting": self.conflicting,
            "fingerprint": self.fingerprint,
            "settings": self.settings,
            "removed": [asdict(overlap) for overlap in self.removed],
        }


def load_problems(
    source: str | Path, *, duplicates: Duplicates = "refuse", conflicts: Duplicates = "refuse", data_source: str | None = None
) -> ProblemSet:
    """Read a source into distinct problems.

    `duplicates`: "refuse" raises when there are more than 1.01 rows for each distinct problem, "drop" keeps one of each (the hub copy
    of DAPO-Math-17K holds every prompt about 100 times). `conflicts`: the same for a problem that comes with different answers; "drop"
    leaves it out and counts it. Raises `DataError` in one line on a source that is not there or not readable, on a row without problem
    or answer, and on a known set of the wrong size.
    """
    for option, value in (("duplicates", duplicates), ("conflicts", conflicts)):
        if value not in ("refuse", "drop"):
            raise DataError(f"{option} must be refuse or drop, not {value!r}")
    name = str(source)
    known = KNOWN.get(name)
    found: dict[str, tuple[MathProblem, int]] = {}
    conflicting: set[str] = set()
    count = 0
    for count, row in enumerate(rows(name), 1):
        text, answer = problem_of(row, f"{name}, row {count}")
        problem = MathProblem(_digest(text, answer), text, answer)
        key = _one_space(text)
        first, at = found.setdefault(key, (problem, count))
        if first.digest != problem.digest:
            if conflicts == "refuse":
                other = f"the problem of row {at} again, with answer {answer!r} instead of {first.answer!r}"
                raise DataError(f"{name}, row {count}: {other}; conflicts=drop leaves such problems out")
            conflicting.add(key)
    if not count:
        raise DataError(f"{name}: no rows")
    if duplicates == "refuse" and count > MAX_ROWS_PER_PROMPT * len(found):
        each = f"{count} rows for {len(found)} distinct problems ({count / len(found):.2f} each)"
        raise DataError(f"{name}: {each}; duplicates=drop keeps one of each")
    if known and known.problems and len(found) != known.problems:
        raise DataError(f"{name}: {len(found)} distinct problems, {known.problems} were expected")
    problems = tuple(sorted(problem for key, (problem, _) in found.items() if key not in conflicting))
    if not problems:
        raise DataError(f"{name}: every problem comes with different answers")
    label = data_source or (known.data_source if known else "samebits/math")
    return ProblemSet(name, label, problems, count, len(found), conflicting=len(conflicting))


def without(problems: ProblemSet, evaluation: Sequence[ProblemSet], *, words: int = 10, share: float = 0.5) -> ProblemSet:
    """`problems` without those that overlap with a problem of an evaluation set; the overlaps are in `removed`.

    Two problems overlap when their normalised texts are equal or when `share` of the shorter one's `words`-grams are in the other
    (see `decontaminate`). Raises `DataError` on impossible settings and when nothing is left.
    """
    if words < 1 or not 0 < share <= 1:
        raise DataError(f"decontamination needs words >= 1 and 0 < share <= 1, not {words} and {share}")
    reference = [p for one in evaluation for p in one.problems]
    found = overlaps([p.text for p in problems.problems], [p.text for p in reference], words=words, share=share)
    named = tuple(
        Overlap(problems.problems[o.problem].digest, reference[o.reference].digest, o.kind, o.share) for o in found
    )  # digests instead of positions: they stay true when the set changes
    dropped = {overlap.problem for overlap in named}
    left = tuple(p for p in problems.problems if p.digest not in dropped)
    if not left:
        raise DataError(f"{problems.name}: every problem overlaps with {', '.join(e.name for e in evaluation)}")
    settings = problems.settings | {
        "decontaminated_against": sorted(e.fingerprint for e in evaluation),
        "ngram_words": words,
        "ngram_share": share,
    }
    return replace(problems, problems=left, settings=settings, removed=(*problems.removed, *named))


def problem_of(row: dict[str, Any], where: str) -> tuple[str, str]:
    """Problem (out of DAPO's template) and normalised answer of one row. Raises `DataError` that begins with `where`."""
    fields = {key.lower(): value for key, value in row.items()}
    name = next((f for f in _PROBLEM_FIELDS if fields.get(f) is not None), None)
    if name is None:
        raise DataError(f"{where}: no problem; one of {', '.join(_PROBLEM_FIELDS)} is needed, there is {', '.join(row) or 'nothing'}")
    text = fields[name]
    if isinstance(text, list):
        if len(text) != 1 or not isinstance(text[0], dict) or text[0].get("role") != "user":
            raise DataError(f"{where}: {name} must be one message of the user")
        text = text[0].get("content")
    if not isinstance(text, str) or not text.strip():
        raise DataError(f"{where}: {name} is empty or no text")
    text = text.strip().removeprefix(PROMPT_HEAD.strip()).removesuffix(PROMPT_TAIL.strip()).strip()
    if not text:
        raise DataError(f"{where}: nothing but the template in {name}")
    return text, _answer_of(fields, where, list(row))


def _answer_of(fields: dict[str, Any], where: str, names: list[str]) -> str:
    name = next((f for f in _ANSWER_FIELDS if fields.get(f) is not None), None)
    if name is None:
        raise DataError(f"{where}: no answer; one of {', '.join(_ANSWER_FIELDS)} is needed, there is {', '.join(names)}")
    value = fields[name]
    if isinstance(value, dict):
        value = value.get("ground_truth")
    if name == "solution":
        boxes = _BOXED.findall(value) if isinstance(value, str) else []
        if not boxes:
            raise DataError(f"{where}: no \\boxed answer in solution")
        value = boxes[-1]
    try:
        return normalise_answer(value)
    except DataError as error:
        raise DataError(f"{where}: {error}") from None


def normalise_answer(value: Any) -> str:
    """One spelling for each answer: an integer without sign or zeros in front (`033`, `33.0`, 33 are `33`), other answers tidied.

    Raises `DataError` on an empty answer and on anything but text and finite numbers.
    """
    if isinstance(value, bool) or not isinstance(value, str | int | float) or (isinstance(value, float) and not math.isfinite(value)):
        raise DataError(f"answer {value!r} is no text and no finite number")
    boxes = _BOXED.findall(value) if isinstance(value, str) else []
    text = tidy(boxes[-1] if boxes else str(value))
    if not text:
        raise DataError(f"answer {value!r} is empty")
    literal = number(text)
    plain = literal is not None and not literal.percent and not re.search(r"[A-Za-z]", text.replace(r"\frac", ""))
    return str(literal.value) if plain and literal.value.denominator == 1 else text


def _one_space(text: str) -> str:
    return " ".join(text.split())


def _digest(text: str, answer: str) -> str:
    return hashlib.sha256(json.dumps([_one_space(text), answer]).encode()).hexdigest()[:16]


def rows(name: str) -> Iterator[dict[str, Any]]:
    """Rows of a source as they are. Raises `DataError`."""
    from datasets import disable_progress_bars, load_dataset
    from datasets.utils.logging import CRITICAL, set_verbosity

    disable_progress_bars()
    set_verbosity(CRITICAL)  # its errors are raised as well, and end in one line
    known = KNOWN.get(name)
    path = Path(name)
    local = SUFFIXES.get(path.suffix)
    if known is None and local and not path.is_file():
        raise DataError(f"no file {name}")
    if known is None and local and path.stat().st_size == 0:
        raise DataError(f"{name}: no rows")
    hub = re.fullmatch(r"([\w.-]+/[\w.-]+)(?::(\w+))?", name)
    try:
        if known is not None:
            yield from load_dataset(known.repository, split=known.split)
        elif local:
            # Streamed: a file that is read once needs no copy in the cache.
            yield from load_dataset(local, data_files=str(path), split="train", streaming=True)
        elif hub and not path.exists():
            yield from load_dataset(hub[1], split=hub[2] or "train")
        else:
            raise DataError(f"{name}: a source is {', '.join(KNOWN)}, a hub name or a {', '.join(SUFFIXES)} file")
    except DataError:
        raise
    except Exception as error:  # what `datasets` raises has no common base
        raise DataError(f"{name}: {_one_line(error)}") from None


def _one_line(error: Exception) -> str:
    cause = error.__cause__ or error
    text = " ".join(f"{cause}".split()) or type(cause).__name__
    return text if len(text) <= 200 else text[:197] + "..."


def row(problem: MathProblem, data_source: str, split: str, index: int, template: str = TEMPLATE) -> dict[str, Any]:
    """One row of a verl data file."""
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": problem.prompt_in(template)}],
        "reward_model": {"style": "rule", "ground_truth": problem.answer},
        "extra_info": {"index": index, "split": split, "problem": problem.digest},
    }


def write_parquet(problems: ProblemSet, split: str, path: Path) -> Path:
    """Write a set as verl reads it, with `<path>.report.json` beside it; returns `path`. A kill leaves the old file or the new one."""
    from datasets import Dataset

    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [row(p, problems.data_source, split, i, problems.template) for i, p in enumerate(problems.problems)]
    staging = path.with_suffix(".tmp")
    Dataset.from_list(lines).to_parquet(staging)
    path.with_suffix(".report.json").write_text(json.dumps(problems.report, indent=1) + "\n")
    os.replace(staging, path)
    return path

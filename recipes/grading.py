"""Grading of mathematical responses: what a response states as its answer, and whether that is the gold answer.

**What counts as the answer.** A response states its answer in a `\\boxed{...}` or after `Answer:` / `final answer is` (explicit), or in
a sentence `... answer is ...` (prose). The last explicit statement decides, wherever it stands: nothing is cut off before searching, and
what follows does not matter. Prose counts only where nothing explicit is said; a last line that is nothing but a bold value counts where
there is no statement at all. Without any of these the response has no answer and is wrong: its text is never compared as a whole.
Instructions repeated from the prompt (`Answer: $Answer`, `"Answer:"`, `\\boxed{}`) are no statements. `\\fbox` is not an answer's box.
A closing `</think>` ends reasoning: only what follows it is read; a reasoning part that never closes holds no answer.

**Cut responses** (`truncated`): policy `wrong` (default) grades every cut response wrong, since its last box may be an intermediate value;
`grade` grades what it says, but for a statement that the cut itself may have shortened. Hard zeros lower the mean reward of a model that
is still too long-winded, so the share of cut responses is part of the result under both.

**Overlong penalty**: equation 13 of DAPO (Yu et al. 2025, arXiv:2503.14476), "soft overlong punishment"; see `overlong_penalty`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from .answers import compare, number, tidy
from .grading_workers import SymbolicPool, shared_pool

DATA_SOURCES = ("math_dapo", "aime2024", "aime2025", "samebits/math")
"""Data sources that `compute_score` grades: DAPO-Math's own name, the AIME sets, and any other set read by `math_data`."""
TruncationPolicy = Literal["wrong", "grade"]

_READ_CHARACTERS = 1000
"""Of a line that states an answer, so much is read: a sentence ends before that."""
_THINK_END = "</think>"
_BOX = re.compile(r"\\boxed(?![A-Za-z])\s*")
_BARE_BOX = re.compile(r"\\[A-Za-z]+(?:\{[^{}]*\})*|[-−+]?[0-9][0-9,]*(?:\.[0-9]+)?|[A-Za-z]")
_ANCHOR = re.compile(
    r"answers?(?P<of>\s+(?:to|for|of)\s[^.\n:=]{0,80}?)?[*_`]{0,3}"
    r"(?:\s{0,3}(?:(?P<colon>[:：=])|(?P<verb>is|are|must be|equals)\b\s*:?)|(?P<heading>[ \t]*\n))",
    re.IGNORECASE,
)
_PLACEHOLDER = re.compile(
    r"[\s*_`]*(?:\\?\$\\?(?:\\(?:text|boxed)\{)?answer\b|\(without quotes"
    r"|[<\[{(]\s*(?:your |the |final )*answer\b|your (?:final )?answer\b)",
    re.IGNORECASE,
)
_EMPTY_BOX = re.compile(
    r"\s*(?:\\?(?:ldots|dots|cdot)|\.{2,}|…|#+|_+|\\text\{\s*)?\s*(?:your |the |final )*(?:answer)?\s*\}?\s*", re.IGNORECASE
)
_LINE_DRESS = re.compile(r"(?:[\s*_`#>]|\\\[|\$\$(?=\s)){0,80}")
_QUOTES = tuple("\"'“”‘’`")
_HEADING = re.compile(r"(?:^|\n)[\s*_#]*final[\s*_]*$", re.IGNORECASE)
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
_SPECIAL = re.compile(r"(?:<\|?/?[A-Za-z_][A-Za-z_0-9]*\|?>|</s>|\]<\]|\[e~\[)\s*$")
_SENTENCE_END = re.compile(r"(?<=[^\s.])\.(?:\s+(?=[A-Z\\(*])|\s*$)|\.?\s*<br\s*/?>")
_LEAD = re.compile(
    r"(?![^=\\$0-9]*\b(?:not|never|no|if|unless|least|most|than|between|about)\b)[A-Za-z ,'-]{0,80}?\b(?:is|are|equals)\b\s*:?\s*"
)
_REASON = re.compile(
    r"(?:\s*[,;—–]\s*|\s+)(?:(?:because|since|which|where|obtained)\b.*"
    r"|(?:is|as|so|by|due|this|with|and (?:this|it|so|hence|thus|we))\b[^0-9]*)$",
    re.DOTALL | re.IGNORECASE,
)
_LABEL = re.compile(
    r"\\(?:text|mathrm|mathbf)(?:bf|rm)?\s*\{(?:[^{}0-9]*(?::|=|\bis|\bare)|\s*\(?[A-E]\)[.:]?)\s*\}(?:\\[ ,;:]|[\s~])*(?=.)"
)
_ASIDE = re.compile(r"\s+\((?![^()]*\bmod)(?:[^()0-9]*[A-Za-z]{2}[^()0-9]*|(?:since|because|as|from|using|by)\b[^()]*)\)$")
_SECOND_THOUGHT = re.compile(r"\W*(?:no|wait|hmm|actually|correction|sorry|or|not|oops)\b", re.IGNORECASE)
_RETRACTED = re.compile(r"\b(?:or|not|wrong|incorrect|false|no)\b|n't\b|\?\s*$", re.IGNORECASE)
_BOLD_LINE = re.compile(r"\s*(?:\*\*|__)(?P<value>[^*]+?)(?:\*\*|__)\s*\.?\s*")


@dataclass(frozen=True, slots=True)
class Statement:
    """An answer as the response states it."""

    text: str
    """The value, still in the response's own words; empty when the response announces an answer and gives none."""
    whole: bool = True
    """False when the end of the text may have cut it short: a line that nothing closes."""


@dataclass(frozen=True, slots=True)
class Grade:
    """Verdict on one response."""

    correct: bool
    answer: str | None
    """What the response states; None when it states nothing."""
    truncated: bool = False


def final_statement(text: str) -> Statement | None:
    """The statement that decides, by the rules at the top of this file; None when the response has no answer."""
    if _THINK_END in text:
        text = text.rpartition(_THINK_END)[2]
    elif "<think>" in text:
        return None
    box_end, box = _last_box(text)
    explicit, prose = _last_line(text, box_end)
    if box is not None and explicit is None:
        return box
    if explicit is not None:
        return explicit
    return prose or _bold_last_line(text)


def _last_box(text: str) -> tuple[int, Statement | None]:
    """The last box that says something, and where it ends."""
    end = len(text)
    while (start := text.rfind(r"\boxed", 0, end)) >= 0:
        end = start
        head = _BOX.match(text, start)
        if head is None:
            continue
        if text[head.end() : head.end() + 1] != "{":
            bare = _BARE_BOX.match(text, head.end())
            if bare:
                return bare.end(), Statement(bare[0], bare.end() < len(text))
            continue
        close = _closing_brace(text, head.end())
        if close < 0:
            return len(text), Statement("", False)  # the text was cut inside the box
        inside = text[head.end() + 1 : close]
        if not _EMPTY_BOX.fullmatch(inside):  # `\boxed{}` is an instruction, repeated
            return close, Statement(inside)
    return -1, None


def _closing_brace(text: str, start: int) -> int:
    depth = 0
    for match in _BRACES.finditer(text, start):
        if match[0] == "{":
            depth += 1
        elif match[0] == "}":
            depth -= 1
            if depth == 0:
                return match.start()
    return -1


def _last_line(text: str, floor: int) -> tuple[Statement | None, Statement | None]:
    """Last explicit statement after position `floor`, and the last prose one where there is no explicit one."""
    prose = None
    last = {word: text.rfind(word) for word in ("answer", "Answer", "ANSWER")}
    while True:
        word = max(last, key=last.__getitem__)
        start = last[word]
        if start < max(floor, 0):
            return None, prose
        last[word] = text.rfind(word, 0, start)
        if text[start - 1 : start].isalpha() or text[start - 1 : start] in ("$", "\\"):
            continue  # part of a word, or the placeholder of the prompt
        match = _ANCHOR.match(text, start)
        if not match:
            continue
        lead = text[max(0, start - 24) : start]
        value, whole = _value_after(text, match.end())
        if _PLACEHOLDER.match(value) or (lead.rstrip("*_ ")[-1:] in _QUOTES and value[:1] in _QUOTES):
            continue
        final = lead.lower().rstrip(" *_\t").endswith("final")
        if match["heading"] and not _HEADING.search(lead):
            continue
        if match["colon"] or (final and _looks_like_value(value)):
            return Statement(value, whole), None
        if prose is None and _looks_like_value(value):
            prose = Statement(value, whole)


def _value_after(text: str, position: int) -> tuple[str, bool]:
    """The rest of the line, or the next line that is not empty; and whether a line end or a full stop closes it."""
    match = _LINE_DRESS.match(text, position)
    limit = match.end() + _READ_CHARACTERS
    stop = text.find("\n", match.end(), limit)
    line = text[match.end() : stop if stop >= 0 else limit]
    return line, stop >= 0 or limit < len(text) or bool(_SPECIAL.search(line)) or line.rstrip().endswith((".", "$", "*", "}"))


def _looks_like_value(value: str) -> bool:
    return bool(re.search(r"[0-9]|\\[A-Za-z]|\$", value))


def _bold_last_line(text: str) -> Statement | None:
    line = text.rstrip().rpartition("\n")[2]
    match = _BOLD_LINE.fullmatch(line)
    return Statement(match["value"]) if match and number(tidy(match["value"])) is not None else None


def candidates(statement: str) -> list[str]:
    """Readings of a stated value, the plainest last: as it stands, and without the sentence around it. None of a retracted value."""
    value = statement
    while (shorter := _SPECIAL.sub("", value)) != value:
        value = shorter
    readings = [value]
    value, *following = _SENTENCE_END.split(value, maxsplit=1)
    if following and _SECOND_THOUGHT.match(following[0]):
        return readings
    value = value.strip()
    lead = _LEAD.match(value) or _LABEL.match(value)
    value = value[lead.end() :] if lead else value
    reason = _REASON.search(value)
    tail = value[reason.start() :] if reason else ""
    aside = _ASIDE.search(value)
    if aside and not tail:
        tail = aside[0]
    if _RETRACTED.search(tail):
        return readings
    value = _ASIDE.sub("", _REASON.sub("", value))
    return readings if value == readings[0] else [*readings, value]


Readings = tuple[tuple[tuple[str, str], ...], ...]
"""What computer algebra has to say: right when all (answer, gold) pairs of any one entry are equal."""


def equal(answer: str, gold: str, pool: SymbolicPool | None = None) -> bool:
    """Whether a stated answer is the gold answer. Symbolic comparison runs in `pool` (default: this process's own)."""
    verdict = _decide(answer[:_READ_CHARACTERS], gold)
    return verdict if isinstance(verdict, bool) else _symbolic(verdict, pool)


@functools.lru_cache(maxsize=65536)
def _decide(answer: str, gold: str) -> bool | Readings:
    undecided = []
    for reading in candidates(answer):
        verdict = compare(reading, gold)
        if verdict is True:
            return True
        if verdict is not False:
            undecided += map(tuple, verdict)
    return tuple(undecided) if undecided else False


def _symbolic(readings: Readings, pool: SymbolicPool | None) -> bool:
    same = pool.equal if pool is not None else _symbolic_shared
    return any(all(same(answer, gold) for answer, gold in pairs) for pairs in readings)


@functools.lru_cache(maxsize=65536)
def _symbolic_shared(answer: str, gold: str) -> bool:
    return shared_pool().equal(answer, gold)


def grade(text: str, gold: str, *, truncated: bool = False, policy: TruncationPolicy = "wrong", pool: SymbolicPool | None = None) -> Grade:
    """Grade one response against its gold answer. `truncated`: it ended at the length limit and not by itself.

    Raises `ValueError` on an unknown policy or an empty gold answer, `GradingError` when symbolic comparison cannot start.
    """
    verdict, answer = _judge(text, gold, truncated, policy)
    return Grade(verdict if isinstance(verdict, bool) else _symbolic(verdict, pool), answer, truncated)


def _judge(text: str, gold: str, truncated: bool, policy: TruncationPolicy) -> tuple[bool | Readings, str | None]:
    """The verdict, or what computer algebra has to say; and the stated answer."""
    if policy not in ("wrong", "grade"):
        raise ValueError(f"unknown policy for cut responses {policy!r}; known: wrong, grade")
    if not tidy(gold):
        raise ValueError(f"no gold answer to grade against: {gold!r}")
    statement = final_statement(text)
    if statement is None:
        return False, None
    if truncated and (policy == "wrong" or not statement.whole):
        return False, statement.text
    return _decide(statement.text[:_READ_CHARACTERS], gold), statement.text


def grade_many(
    texts: Sequence[str],
    golds: Sequence[str],
    truncated: Sequence[bool] | None = None,
    *,
    policy: TruncationPolicy = "wrong",
    pool: SymbolicPool | None = None,
) -> list[Grade]:
    """`grade` of many responses, in their order; what needs computer algebra is compared side by side. Raises as `grade` does."""
    pool = pool or shared_pool()
    cut = truncated if truncated is not None else [False] * len(texts)
    judged = [_judge(text, gold, short, policy) for text, gold, short in zip(texts, golds, cut, strict=True)]
    open_readings = {verdict for verdict, _ in judged if not isinstance(verdict, bool)}
    with ThreadPoolExecutor(pool.workers) as threads:
        settled = dict(zip(open_readings, threads.map(lambda readings: _symbolic(readings, pool), open_readings), strict=True))
    return [
        Grade(verdict if isinstance(verdict, bool) else settled[verdict], answer, short)
        for (verdict, answer), short in zip(judged, cut, strict=True)
    ]


def overlong_penalty(response_tokens: int, max_response_tokens: int, buffer_tokens: int, factor: float = 1.0) -> float:
    """DAPO's soft overlong punishment (arXiv:2503.14476, equation 13), 0 to -`factor`, for the tokens of the response alone.

    With limit = `max_response_tokens` - `buffer_tokens`: 0 up to the limit, (limit - length) / buffer * factor within the buffer, and
    -factor from `max_response_tokens` on. Raises `ValueError` unless 0 < buffer < max and factor >= 0: a buffer as long as the
    response would punish every response.
    """
    if not 0 < buffer_tokens < max_response_tokens:
        raise ValueError(f"overlong buffer must be within 1..{max_response_tokens - 1} tokens, not {buffer_tokens}")
    if factor < 0 or response_tokens < 0:
        raise ValueError(f"overlong penalty takes no negative length ({response_tokens}) or factor ({factor})")
    exceed = response_tokens - (max_response_tokens - buffer_tokens)
    return -factor * min(max(exceed / buffer_tokens, 0.0), 1.0)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    *,
    truncation: TruncationPolicy = "wrong",
    max_response_tokens: int | None = None,
    overlong_buffer: int = 0,
    overlong_factor: float = 1.0,
    **_: Any,
) -> dict[str, float]:
    """verl's custom reward function for DAPO-Math: `score` is +1 or -1 plus the overlong penalty, `acc` is 1 or 0.

    Also `truncated`, `answered` (0 or 1) and `overlong` (the penalty). The keyword options come from verl's
    `reward.custom_reward_function.reward_kwargs`; the penalty is off at `overlong_buffer` 0. `extra_info["finish_reason"]` and
    `extra_info["response_tokens"]` come from the rollout. Raises `ValueError` on data of another task, on a bad buffer, and when a
    penalty is asked for and the length is not known: a penalty that is silently not applied is the fault this guards against.
    """
    if data_source not in DATA_SOURCES:
        raise ValueError(f"reward of {', '.join(DATA_SOURCES)} was asked to grade {data_source!r}")
    extra = extra_info or {}
    penalty = 0.0
    if overlong_buffer:
        if max_response_tokens is None or extra.get("response_tokens") is None:
            raise ValueError("overlong penalty needs max_response_tokens and the rollout's response_tokens, which is missing")
        penalty = overlong_penalty(int(extra["response_tokens"]), max_response_tokens, overlong_buffer, overlong_factor)
    verdict = grade(solution_str, str(ground_truth), truncated=extra.get("finish_reason") == "length", policy=truncation)
    return {
        "score": (1.0 if verdict.correct else -1.0) + penalty,
        "acc": float(verdict.correct),
        "overlong": penalty,
        "truncated": float(verdict.truncated),
        "answered": float(verdict.answer is not None),
    }

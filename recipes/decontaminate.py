"""Which training problems are also evaluation problems: the same text, or much of it word for word.

Texts are compared in a normal form (`normalised`): case, LaTeX layout, punctuation and spacing do not count. Beside equality, two
problems overlap when at least `share` of the shorter one's runs of `words` words are in the other: one common run alone is no sign,
since competition problems end in the same sentences ("... relatively prime positive integers. Find m + n.").
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

_LAYOUT = re.compile(r"\\(?:left|right|displaystyle|[dt]?frac|text|mathrm|mathbf|textbf|quad|qquad|,|;|:|!|\\)(?![A-Za-z])|\\begin|\\end")
_WORD = re.compile(r"[^\W_]+|[+*/=<>^-]")


@dataclass(frozen=True, slots=True)
class Overlap:
    """A training problem that is, wholly or in part, an evaluation problem."""

    problem: int | str
    """Position (or digest) of the training problem."""
    reference: int | str
    """Position (or digest) of the evaluation problem."""
    kind: str
    """`same text` or `n-grams`."""
    share: float
    """Share of the shorter problem's n-grams that the other one has, rounded to 3 digits; 1 for the same text."""


def normalised(text: str) -> str:
    """Words, digits and operators of `text` in lower case and one spelling, separated by single spaces."""
    text = unicodedata.normalize("NFKC", text).lower().replace("\u2212", "-")
    return " ".join(_WORD.findall(_LAYOUT.sub(" ", text)))


def ngrams(text: str, words: int) -> frozenset[str]:
    """All runs of `words` words of a normalised text; of a shorter text, the whole of it."""
    parts = text.split()
    return frozenset(" ".join(parts[i : i + words]) for i in range(max(1, len(parts) - words + 1)))


def overlaps(problems: Sequence[str], references: Sequence[str], *, words: int, share: float) -> list[Overlap]:
    """Each overlapping problem once, with the evaluation problem it has most of, in the order of `problems`."""
    texts = [normalised(r) for r in references]
    grams = [ngrams(t, words) for t in texts]
    holders: dict[str, list[int]] = defaultdict(list)
    for i, own in enumerate(grams):
        for gram in own:
            holders[gram].append(i)
    same = {text: i for i, text in reversed(list(enumerate(texts)))}
    found = []
    for i, problem in enumerate(problems):
        text = normalised(problem)
        if text in same:
            found.append(Overlap(i, same[text], "same text", 1.0))
            continue
        own = ngrams(text, words)
        common = Counter(j for gram in own for j in holders.get(gram, ()))
        shares = {j: n / min(len(own), len(grams[j])) for j, n in common.items()}
        if shares:
            best = max(sorted(shares), key=shares.__getitem__)
            if shares[best] >= share:
                found.append(Overlap(i, best, "n-grams", round(shares[best], 3)))
    return found

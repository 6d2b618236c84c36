"""When two final answers are the same: literal numbers exactly and at once, structure by structure, the rest by symbolic comparison.

`compare(answer, gold)` is True or False where reading decides, and says which `(answer, gold)` scalars need computer algebra where it
does not (`grading_workers` runs that in processes of its own). The rules, each of them a decision:

- Numbers are exact: 34.0, +34, 034 and 68/2 are 34; 33.9999999 is not. A percent sign may be read or ignored (34% is 34 or 0.34).
- Units, currency, a degree sign, a modulus and a reason in words may follow a number; a word that changes the number (`million`,
  `squared`, `or`, `not`) makes it another answer.
- An equation answers with its value: `m+n = 34`, `34 = x`. Sides that contradict each other answer nothing.
- Brackets are part of the answer: (1,2), [1,2] and (1,2] differ, in either direction. Tuples are ordered, sets and lists are not.
- An approximation (`\\approx`, trailing dots) is not a value.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from itertools import permutations

MAX_CHARACTERS = 500
"""Longer answers are not compared: no answer of the tasks is so long, and a parser's time grows with it."""

_MAX_UNORDERED = 4
"""So many parts of a set are tried in every order; a set with more of them that are not plainly equal is not equal."""

_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("−–—﹣-‐‑", "-"),
        **{chr(0xFF10 + d): str(d) for d in range(10)},
        **dict.fromkeys("\u00a0\u2009\u202f\u2007\u200a\u3000", " "),
        **dict.fromkeys("\u200b\u200c\u200d\ufeff\u2060", ""),
        **dict.fromkeys("“”„‟″", '"'),
        **dict.fromkeys("‘’", "'"),
        "÷": "/", "⁄": "/", "∕": "/", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "∗": "*",
        "π": r"\pi ", "∞": r"\infty ", "°": r"^\circ ", "±": r"\pm ", "√": r"\sqrt ", "∪": r"\cup ", "∅": r"\emptyset ",
        "≤": r"\leq ", "≥": r"\geq ", "≠": r"\neq ", "≈": r"\approx ", "≡": r"\equiv ", "…": r"\ldots ", "⇒": r"\implies ",
        "→": r"\to ", "：": ":", "，": ",", "％": "%", "＝": "=", "＄": "$", "（": "(", "）": ")", "。": ".",
        "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
    }
)  # fmt: skip
_SUPERSCRIPTS = {ord(s): d for s, d in zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-", strict=True)}
_SUPERSCRIPT_RUN = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+")
_SPACES = re.compile(r"\\[,;:!> ]|\\q?quad(?![A-Za-z])|\\(?:thinspace|medspace|enspace)(?![A-Za-z])|~|\\\\(?:\[[^\]]*\])?|\s+")
_NOISE = re.compile(
    r"\\(?:displaystyle|textstyle|limits|left|right|[lL]arge|LARGE|[hH]uge|small|normalsize|[Bb]igg?[lrm]?|phantom\{[^{}]*\}|hspace\{[^{}]*\})(?![A-Za-z])|(?<!\\)\$|\\[()\[\]]"
)
_RENAMES = (
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\(?:le|leqslant)(?![A-Za-z])"), r"\\leq"),
    (re.compile(r"\\(?:ge|geqslant)(?![A-Za-z])"), r"\\geq"),
    (re.compile(r"\\ne(?![A-Za-z])|!="), r"\\neq"),
    (re.compile(r"\\(?:dots|dotsc|cdots|hdots)(?![A-Za-z])|\.\.\."), r"\\ldots"),
    (re.compile(r"\\(?:Rightarrow|Longrightarrow|longrightarrow|rightarrow|to|therefore)(?![A-Za-z])"), r"\\implies"),
    (re.compile(r"\\(?:percent(?![A-Za-z])|%)"), "%"),
    (re.compile(r"\\[lr]brace(?![A-Za-z])"), lambda m: r"\{" if m[0][1] == "l" else r"\}"),
    (re.compile(r"\\sqrt ?\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"\\sqrt ([0-9]+)"), r"\\sqrt{\1}"),
    (re.compile(r"(?<![\\A-Za-z])sqrt ?\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])"), r"\\pi"),
    (re.compile(r"\*\*(?=[({0-9-])"), "^"),
)
_DRESS = r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:bf|rm|it|sf|tt|normal|bb)|mbox|[fh]box|boxed|emph|underline|bm|boldsymbol|pmb)"
_WRAPPED = re.compile(_DRESS + r"\s*\{")
_GROUPED_COMMA = re.compile(r"(?<=[0-9])\{,\}(?=[0-9]{3})")
_DIGITS = r"[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]{1,3}(?: [0-9]{3})+(?![0-9])|[0-9]+"
_DECIMAL = rf"[+-]? ?(?:(?:{_DIGITS})(?:\.[0-9]*)?|\.[0-9]+)"
_INTEGER_IN_BRACES = r"\{ ?([+-]? ?[0-9]+) ?\}"
_FRACTION = re.compile(rf"([+-]?) ?\\frac ?(?:{_INTEGER_IN_BRACES} ?{_INTEGER_IN_BRACES}|([0-9]) ?([0-9]))|([+-]? ?[0-9]+) ?/ ?([0-9]+)")
_NUMBER = re.compile(_DECIMAL)
_MODULUS = re.compile(r" ?(?:\\pmod ?\{[^{}]*\}|\\p?mod ?[0-9]+|\\bmod ?[0-9]+|[(,]? ?mod(?:ulo)?\.? ?[0-9]+\)?)$", re.IGNORECASE)
_DEGREE = re.compile(r" ?(?:\^ ?\{? ?\\circ ?\}?|\\degrees?(?![A-Za-z]))(?: ?[CF](?![A-Za-z]))?")
_UNIT = re.compile(
    r"( ?)(?:\\(?:text|mathrm|mbox|textrm|operatorname) ?\{([^{}]*)\}|([A-Za-z]+(?:/[A-Za-z]+)?)\.?)(?: ?\^ ?\{? ?[23] ?\}?)?"
)
_WORD = re.compile(r"[A-Za-z]+")
# Words that make another number, another answer or no answer of the number before them.
_CHANGES = frozenset(
    """hundred hundreds thousand thousands million millions billion billions trillion trillions dozen dozens half halves third thirds
    quarter quarters fourth fourths fifth fifths sixth sixths tenth tenths hundredth hundredths thousandth thousandths score plus minus
    times over divided multiplied squared cubed factorial choose power powers root sqrt pi to the mod log ln sin cos tan e i x y z n k
    or and not no nor if unless more less least most greater smaller bigger larger than about approximately around roughly except versus
    wrong incorrect false isn cannot maybe possibly perhaps instead but through from between up down repeating recurring base
    modulo equals is are was infinity""".split()
)  # fmt: skip
_SHORT_UNITS = frozenset("m g s h L cm mm km dm kg mg ml mL hr mi ft in lb oz Hz kW km/h m/s sq cu th st nd rd pt".split())
_LETTERS = re.compile(r"[A-Za-z]+")
_MACRO = re.compile(r"\\[A-Za-z]+")
_UNREADABLE = re.compile(r"[0-9)}] +[0-9]|[0-9)}] ?_|[?:'\"]|\\ldots(?![A-Za-z])|\\text(?![A-Za-z])")
"""Two numbers side by side, a numeral in another base, a ratio, a prime, dots, words: parsers read these as something else."""
_FUNCTIONS = frozenset("e i pi sqrt sin cos tan cot sec csc log ln exp max min gcd lcm binom frac".split())
_EQUALS = re.compile(r"(?<![<>!:=])=(?!=)|\\in(?![A-Za-z])")
_RELATION = re.compile(r"[<>]|\\(?:leq|geq|neq|lt|gt|approx|sim|simeq|notin|mid)(?![A-Za-z])")
_UNKNOWN = re.compile(r"[A-Za-z](?:_\{?[A-Za-z0-9]+\}?)?")
_OPEN, _CLOSE = "([{⟨", ")]}⟩"


Verdict = bool | list[list[tuple[str, str]]]
"""True, False, or what computer algebra has to say: the answer is right when all (answer, gold) pairs of any one list are equal."""


@dataclass(frozen=True, slots=True)
class Number:
    """A literal number, exact; `percent` when a percent sign follows it."""

    value: Fraction
    percent: bool = False

    def same(self, other: Number) -> bool:
        """Equal as numbers, where a percent sign of either side may be read (1/100) or ignored. Symmetric."""
        return bool(self._readings() & other._readings()) if self.percent != other.percent else self.value == other.value

    def _readings(self) -> set[Fraction]:
        return {self.value, self.value / 100} if self.percent else {self.value}


def tidy(text: str) -> str:
    """`text` in one spelling: ASCII signs and digits, one name per LaTeX macro, no layout, no dress around the whole of it."""
    text = _SUPERSCRIPT_RUN.sub(lambda m: "^{" + m[0].translate(_SUPERSCRIPTS) + "}", text).translate(_CHARACTERS)
    text = _NOISE.sub("", text)
    if "\\" in text or "*" in text or "p" in text or "!" in text or ".." in text or "s" in text:
        for pattern, new in _RENAMES:
            text = pattern.sub(new, text)
    text = _GROUPED_COMMA.sub(",", text)
    text = _SPACES.sub(" ", text.replace(r"\!", ""))
    return _undress(text)


def _undress(text: str) -> str:
    while True:
        before = text
        text = text.strip(" \t`*_✓✔✅").rstrip(".,;:").strip() if not text.endswith("\\") else text[:-1]
        match = _WRAPPED.match(text)
        start = match.end() - 1 if match else 0 if text.startswith("{") else -1
        if start >= 0 and _closing(text, start) == len(text) - 1:
            text = text[start + 1 : -1]
        elif text.startswith("(") and text.endswith(")") and _closing(text, 0) == len(text) - 1 and not _splits(text[1:-1]):
            text = text[1:-1]
        if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
            text = text[1:-1]
        text = text.removeprefix(r"\$").removeprefix("€").removeprefix("£")
        if text == before:
            return text


def _closing(text: str, start: int) -> int:
    """Index of the bracket that closes the one at `start`; -1 when nothing does."""
    depth = 0
    for i in range(start, len(text)):
        if text[i] in "([{" and text[i - 1 : i] != "\\":
            depth += 1
        elif text[i] in ")]}" and text[i - 1 : i] != "\\":
            depth -= 1
            if depth == 0:
                return i
    return -1


def number(text: str) -> Number | None:
    """The literal number that tidied `text` is, units and the like aside; None when it is anything else."""
    text = _MODULUS.sub("", text) if "mod" in text.lower() else text
    match = _FRACTION.match(text)
    if match:
        sign, top, bottom, top1, bottom1, left, right = match.groups()
        above, below = (top or top1 or left).replace(" ", ""), (bottom or bottom1 or right).replace(" ", "")
        if int(below) == 0:
            return None
        value = Fraction(int(above), int(below)) * (-1 if sign == "-" else 1)
    else:
        match = _NUMBER.match(text)
        if not match or len(match[0]) > 400:
            return None
        value = Fraction(match[0].replace(",", "").replace(" ", "").rstrip("."))
    rest = text[match.end() :]
    if not rest:
        return Number(value)
    percent = rest.lstrip()[:1] == "%" or rest.split()[:1] in (["percent"], [r"\text{percent}"])
    if percent:
        rest = rest.lstrip().removeprefix("%").removeprefix("percent").removeprefix(r"\text{percent}")
    return Number(value, percent) if _is_unit(rest) else None


def _is_unit(rest: str) -> bool:
    """Whether what follows a number only says of what: a degree sign, units, a few words that do not change it."""
    degree = _DEGREE.match(rest)
    position, words = degree.end() if degree else 0, []
    while position < len(rest):
        match = _UNIT.match(rest, position)
        if not match:
            return False
        space, dressed, bare = match.groups()
        words += _WORD.findall(dressed or bare or "")
        # Bare letters right after a number are variables, and so are one or two letters that are no unit: 34m, 34 ab.
        if bare and bare not in _SHORT_UNITS and (not space or len(bare) < 3):
            return False
        if bare and len(bare) == 1 and not space:
            return False
        position = match.end()
    return len(words) <= 6 and not any(w.lower() in _CHANGES for w in words)


def compare(answer: str, gold: str) -> Verdict:
    """Whether `answer` is `gold`, as far as reading can tell."""
    answer, gold = tidy(answer), tidy(gold)
    if not answer or not gold or len(answer) > MAX_CHARACTERS or len(gold) > MAX_CHARACTERS:
        return False
    return _compare(answer, gold)


def _compare(answer: str, gold: str) -> Verdict:
    want = number(gold)
    have = number(answer)
    if want is not None and have is not None:
        return have.same(want)
    if _RELATION.search(answer) or _RELATION.search(gold):
        return _relations(answer, gold)
    if want is None and _text(answer) == _text(gold):
        return True
    answer, gold = value_of(answer), value_of(gold)
    if not answer or not gold:
        return False
    (mine, have_parts), (kind, want_parts) = structure(answer), structure(gold)
    if mine or kind:
        return _structures(mine, have_parts, kind, want_parts)
    return _scalars(answer, gold)


def value_of(text: str) -> str:
    """What an equation says its value is: the last side, or the one before a lone unknown; "" when literal sides contradict each other."""
    text = re.split(r"\\implies|\\equiv(?![A-Za-z])", text)[-1].strip()
    sides = [side.strip() for side in _EQUALS.split(text)]
    if len(sides) == 1 or structure(text)[0] == "list":
        return text
    if sides[-1] and _UNKNOWN.fullmatch(sides[-1]) and len(sides) == 2 and number(sides[0]):
        return _undress(sides[0])
    literal = {n.value for n in map(number, sides) if n is not None}
    return _undress(sides[-1]) if len(literal) <= 1 else ""


def _relations(answer: str, gold: str) -> Verdict:
    if not (_RELATION.search(answer) and _RELATION.search(gold)):
        return False
    return True if _text(answer) == _text(gold) else [[(answer, gold)]] if _readable(answer) else False


def structure(text: str) -> tuple[str, list[str]]:
    """Kind of brackets and the parts inside: `()`, `[]`, `(]`, `[)`, `set`, `list` (no brackets), `union`, or "" for a scalar."""
    if text.startswith(r"\pm"):
        inner = text.removeprefix(r"\pm").strip()
        return "list", [inner, "-" + inner]
    unions = [p.strip() for p in re.split(r"\\cup(?![A-Za-z])", text)]
    if len(unions) > 1:
        return "union", unions
    if text.startswith(r"\{") and text.endswith(r"\}"):
        return "set", _splits(text[2:-2]) or [text[2:-2].strip()]
    if text[:1] in tuple("([") and text[-1:] in tuple(")]"):
        inner = _splits(text[1:-1])
        if inner and _closing(text, 0) == len(text) - 1:
            return text[0] + text[-1], inner
    parts = _splits(text)
    return ("list", parts) if parts else ("", [text])


def _splits(text: str) -> list[str]:
    """Parts of `text` between commas, semicolons, `and` and `or` outside brackets; [] when there are none."""
    text = re.sub(r",? ?(?:\\text ?\{ ?(?:and|or) ?\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z]))", " , ", text)
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        if c in _OPEN:
            depth += 1
        elif c in _CLOSE:
            depth -= 1
        elif c in ",;" and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    parts.append(text[start:].strip())
    return parts if len(parts) > 1 else []


def _structures(mine: str, have: list[str], kind: str, want: list[str]) -> Verdict:
    unordered = ("set", "list")
    if len(have) == len(want) == 1 and {mine, kind} <= {"", "set"}:
        return _scalars(tidy(have[0]), tidy(want[0]))  # a set of one: the solution
    if mine != kind and not (mine in unordered and kind in unordered):
        return False
    if len(have) != len(want):
        return False
    have, want = [tidy(p) for p in have], [tidy(p) for p in want]
    if not all(have) or not all(want):
        return False
    if kind not in (*unordered, "union"):
        return _all(_compare(a, g) for a, g in zip(have, want, strict=True))
    # Unordered: what is plainly equal goes together, the rest in any order.
    left, odd = list(want), []
    for part in have:
        partner = next((g for g in left if _compare(part, g) is True), None)
        if partner is None:
            odd.append(part)
        else:
            left.remove(partner)
    options: list[list[tuple[str, str]]] = []
    for order in permutations(left) if len(left) <= _MAX_UNORDERED else ():
        verdict = _all(_compare(a, g) for a, g in zip(odd, order, strict=True))
        if verdict is True:
            return True
        options += verdict or []
    return options or False


def _all(verdicts: Iterable[Verdict]) -> Verdict:
    options: list[list[tuple[str, str]]] = [[]]
    for verdict in verdicts:
        if verdict is False:
            return False
        if verdict is not True:
            options = [one + other for one in options for other in verdict]
    return True if options == [[]] else options


def _scalars(answer: str, gold: str) -> Verdict:
    have, want = number(answer), number(gold)
    if have is not None and want is not None:
        return have.same(want)
    if want is None and _text(answer) == _text(gold):
        return True
    if not (_readable(answer) and _readable(gold)) or gold.isalpha():
        return False
    if want is not None and any(r not in _FUNCTIONS for r in _LETTERS.findall(_MACRO.sub(" ", answer))):
        return False  # an unknown is left: no number
    return [[(_exact(answer, have), _exact(gold, want))]]


def _exact(text: str, literal: Number | None) -> str:
    """A decimal as a fraction: computer algebra would compare it as a rounded number."""
    return rf"\frac{{{literal.value.numerator}}}{{{literal.value.denominator}}}" if literal and "." in text else text


def _readable(text: str) -> bool:
    """Whether `text` can be a mathematical expression: no words, nothing left open."""
    if _UNREADABLE.search(text):
        return False
    if text.count("{") != text.count("}") or text.count("(") + text.count("[") != text.count(")") + text.count("]"):
        return False
    return all(len(r) == 1 or r in _FUNCTIONS for r in _LETTERS.findall(_MACRO.sub(" ", text)))


def _text(text: str) -> str:
    """For comparison as text: no spaces but between digits, no case in words (a single letter keeps its case: it is a variable)."""
    bare = re.sub(_DRESS + r" ?\{([^{}]*)\}", r"\1", text)
    bare = re.sub(r"(?<![0-9]) | (?![0-9])", "", bare)
    return bare.lower() if any(len(word) > 2 for word in _LETTERS.findall(_MACRO.sub("", bare))) else bare

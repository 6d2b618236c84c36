"""Drawings of reports, as SVG that stands inline in a page: line charts, scatters, heat maps.

Every function is pure: numbers and words in, markup out. Colours come from classes (`c0`, `h3`) that the page's style defines for light
and dark, so nothing here names one, and lines differ by dash as well. What is not finite is never dropped silently: lines mark it with a
cross on the upper edge, heat maps have a class of their own for it, scatters leave it to the caller (`finite_pairs` counts it).
Coordinates have one decimal and scatters draw each occupied spot once, so that the size of a drawing does not grow with its data.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from markupsafe import Markup

WIDTH = 360
_LEFT, _RIGHT, _BOTTOM, _LEGEND_ROW = 54, 12, 38, 18
_CHARACTER = 6.4
"""Width of a character of the drawings' 12-unit type, rounded up: for the layout of legends."""
_LOG_RATIO = 1000.0
"""Values that are not negative and spread at least this far get a logarithmic axis."""
_LARGEST, _SMALLEST = 1e300, 1e-100
LINE_STYLES = 6
_BAR = 2.0
"""Half the width of a band over a single x."""


def finite(value: float | None) -> bool:
    """Whether `value` is there and can be drawn. What is beyond 1e300 counts as infinite: differences of such values would be."""
    return value is not None and abs(value) <= _LARGEST


def _coordinate(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _step(span: float, count: int) -> float:
    """The 1, 2 or 5 times a power of ten that cuts `span` into at most `count` parts."""
    power = 10.0 ** math.floor(math.log10(span / count))
    return next(m * power for m in (1, 2, 5, 10) if m * power * count >= span * (1 - 1e-9))


@dataclass(frozen=True, slots=True)
class Axis:
    """A range of values on a line from 0 to 1."""

    label: str
    low: float
    high: float
    log: bool = False
    zero: bool = False
    """On a logarithmic axis: there are zeros, which lie at `low` under a tick of their own."""

    @classmethod
    def of(cls, values: Iterable[float | None], label: str, log: bool | None = None, from_zero: bool = False) -> Axis:
        """The axis that holds all finite `values`; logarithmic where `log` says so or, left None, where they spread far.

        A logarithmic axis holds no negative values: where there are any, it is linear after all.
        """
        shown = [float(v) if abs(v) >= _SMALLEST else 0.0 for v in values if finite(v)] or [0.0]
        low, high = min(shown), max(shown)
        positive = [v for v in shown if v > 0]
        wide = bool(positive) and low >= 0 and high / min(positive) >= _LOG_RATIO
        if positive and low >= 0 and (wide if log is None else log):
            bottom = math.floor(math.log10(min(positive)))
            top = max(math.ceil(math.log10(high)), bottom + 1)
            return cls(label, 10.0 ** (bottom - (low == 0)), 10.0**top, log=True, zero=low == 0)
        low = min(low, 0.0) if from_zero else low
        if high - low <= 1e-12 * max(abs(high), abs(low)):
            low, high = (low, low + 1.0) if low == 0 else (low - abs(low) / 2, high + abs(high) / 2)
        # Outwards to a round value, finer than the ticks so that little room is lost.
        step = _step(high - low, 10)
        return cls(label, math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step)

    def at(self, value: float) -> float:
        """Position of `value`, from 0 to 1."""
        if not self.log:
            return (value - self.low) / (self.high - self.low)
        foot = math.log10(self.low)
        return (math.log10(max(value, self.low)) - foot) / (math.log10(self.high) - foot)

    def ticks(self, count: int = 5) -> list[tuple[float, str]]:
        """(value, text) of at most about `count` round values."""
        if self.log:
            first, last = round(math.log10(self.low)), round(math.log10(self.high))
            stride = math.ceil((last - first) / count)
            powers = range(last, first - 1 + self.zero, -stride)
            return [(self.low, "0")] * self.zero + [(10.0**p, f"{10.0**p:,g}" if -3 <= p <= 4 else f"1e{p}") for p in reversed(powers)]
        step = _step(self.high - self.low, count)
        first = math.ceil(self.low / step - 1e-9)
        values = [i * step for i in range(first, math.floor(self.high / step + 1e-9) + 1)]
        large = max(abs(self.low), abs(self.high))
        if large >= 1e6 or step < 1e-4:
            digits = max(1, math.ceil(math.log10(large / step)) + 1)
            return [(v, re.sub(r"e([+-])0?", lambda m: "e" + m[1].strip("+"), f"{v:.{digits}g}")) for v in values]
        return [(v, f"{v:,.{max(0, -math.floor(math.log10(step) + 1e-9))}f}") for v in values]


@dataclass(frozen=True, slots=True)
class Plane:
    """Two axes and the rectangle of the drawing that they span."""

    x: Axis
    y: Axis
    top: float
    height: float
    width: float = WIDTH - _LEFT - _RIGHT

    def point(self, x: float, y: float) -> tuple[float, float]:
        """Where (x, y) lies in the drawing."""
        return _LEFT + self.x.at(x) * self.width, self.top + (1 - self.y.at(y)) * self.height

    def draw(self) -> Markup:
        """Grid, ticks and labels."""
        bottom, right = self.top + self.height, _LEFT + self.width
        parts = []
        for value, text in self.x.ticks():
            x = _coordinate(self.point(value, self.y.low)[0])
            parts.append(Markup('<path class="grid" d="M{} {}V{}"/>').format(x, _coordinate(self.top), _coordinate(bottom)))
            parts.append(
                Markup('<text class="tick" x="{}" y="{}" text-anchor="middle">{}</text>').format(x, _coordinate(bottom + 14), text)
            )
        for value, text in self.y.ticks():
            y = self.point(self.x.low, value)[1]
            parts.append(Markup('<path class="grid" d="M{} {}H{}"/>').format(_LEFT, _coordinate(y), _coordinate(right)))
            parts.append(Markup('<text class="tick" x="{}" y="{}" text-anchor="end">{}</text>').format(_LEFT - 5, _coordinate(y + 4), text))
        parts.append(
            Markup('<path class="axis" d="M{} {}V{}H{}"/>').format(_LEFT, _coordinate(self.top), _coordinate(bottom), _coordinate(right))
        )
        middle = _coordinate(_LEFT + self.width / 2)
        parts.append(
            Markup('<text class="label" x="{}" y="{}" text-anchor="middle">{}</text>').format(
                middle, _coordinate(bottom + 32), self.x.label
            )
        )
        middle = _coordinate(self.top + self.height / 2)
        turned = '<text class="label" x="11" y="{0}" text-anchor="middle" transform="rotate(-90 11 {0})">{1}</text>'
        parts.append(Markup(turned).format(middle, self.y.label))
        return Markup("").join(parts)


def svg(name: str, description: str, width: float, height: float, body: Markup, kind: str = "fit") -> Markup:
    """The element around a drawing. `name` and `description` are what a screen reader says; kind `fit` scales it, `natural` does not."""
    return Markup('<svg class="{}" role="img" aria-label="{}" viewBox="0 0 {} {}" width="{}" height="{}"><desc>{}</desc>{}</svg>').format(
        kind, f"{name}. {description}", *(_coordinate(v) for v in (width, height, width, height)), description, body
    )


@dataclass(frozen=True, slots=True)
class Line:
    """One named line over the x values of its chart. A missing or non-finite value interrupts it."""

    name: str
    values: Sequence[float | None]
    low: Sequence[float | None] | None = None
    """With `high`: the ends of an interval around each value, drawn as a band behind the line where both are finite."""
    high: Sequence[float | None] | None = None

    @property
    def columns(self) -> list[Sequence[float | None]]:
        """What it has for each x: values, and the ends of their intervals where it has such."""
        return [column for column in (self.values, self.low, self.high) if column is not None]


def line_chart(
    name: str,
    description: str,
    x: Sequence[float],
    lines: Sequence[Line],
    x_label: str,
    y_label: str,
    log: bool | None = None,
    from_zero: bool = False,
    limit: float | None = None,
    log_x: bool = False,
) -> Markup:
    """Lines over a common x, with a legend where there are several, and a dashed rule at `limit`.

    Raises `ValueError` where a line has not one value for each x.
    """
    if any(len(column) != len(x) for line in lines for column in line.columns):
        raise ValueError(f"{name}: a line has not as many values as there are x values")
    legend, top = _legend([line.name for line in lines] if len(lines) > 1 else [])
    everything = [v for line in lines for column in line.columns for v in column] + [limit]
    plane = Plane(Axis.of(x, x_label, log_x), Axis.of(everything, y_label, log, from_zero), top, 170)
    parts = [plane.draw(), legend]
    if limit is not None:
        y = _coordinate(plane.point(plane.x.low, limit)[1])
        parts.append(Markup('<path class="limit" d="M{} {}h{}"/>').format(_LEFT, y, _coordinate(plane.width)))
    for style, line in enumerate(lines):
        if line.low is not None and line.high is not None:
            parts.append(Markup('<path class="band b{}" d="{}"/>').format(style % LINE_STYLES, _band(plane, x, line.low, line.high)))
    for style, line in enumerate(lines):
        parts.append(Markup('<path class="line c{}" d="{}"/>').format(style % LINE_STYLES, _path(plane, x, line.values)))
    # Missing is None; a value that is there and is not finite is a fault that must be seen.
    bad = sorted({at for line in lines for at, v in zip(x, line.values, strict=True) if v is not None and not finite(v)})
    crosses = "".join(f"M{_coordinate(plane.point(at, plane.y.high)[0] - 4)} {_coordinate(top - 4)}l8 8m0 -8l-8 8" for at in bad)
    if crosses:
        parts.append(Markup('<path class="cross" d="{}"><title>not finite</title></path>').format(crosses))
    return svg(name, description, WIDTH, top + plane.height + _BOTTOM, Markup("").join(parts))


def _path(plane: Plane, x: Sequence[float], values: Sequence[float | None]) -> str:
    """A line's path; a value between two gaps becomes a dot."""
    commands, joined = [], False
    for index, (at, value) in enumerate(zip(x, values, strict=True)):
        if not finite(value):
            joined = False
            continue
        px, py = (_coordinate(c) for c in plane.point(at, value))
        commands.append(f"{'L' if joined else 'M'}{px} {py}")
        if not joined and (index + 1 == len(values) or not finite(values[index + 1])):
            commands.append("h0")
        joined = True
    return "".join(commands)


def _band(plane: Plane, x: Sequence[float], low: Sequence[float | None], high: Sequence[float | None]) -> str:
    """A closed area for each run of neighbours that have both ends; one that stands alone becomes a bar."""
    areas, at = [], 0
    whole = [finite(a) and finite(b) for a, b in zip(low, high, strict=True)]
    for there, group in groupby(whole):
        places = range(at, at := at + len(list(group)))
        if not there:
            continue
        ends = [[plane.point(x[i], column[i]) for i in places] for column in (high, low)]
        if len(places) == 1:
            ends = [[(px - _BAR, py), (px + _BAR, py)] for ((px, py),) in ends]
        outline = [*ends[0], *reversed(ends[1])]
        areas.append("M" + "L".join(f"{_coordinate(px)} {_coordinate(py)}" for px, py in outline) + "z")
    return "".join(areas)


def _legend(names: Sequence[str]) -> tuple[Markup, float]:
    """Legend of lines in rows from the top, and where the plane may begin."""
    parts, x, y = [], float(_LEFT), 12.0
    for style, name in enumerate(names):
        width = 34 + _CHARACTER * len(name)
        if x + width > WIDTH and x > _LEFT:
            x, y = float(_LEFT), y + _LEGEND_ROW
        parts.append(Markup('<path class="line c{}" d="M{} {}h22"/>').format(style % LINE_STYLES, _coordinate(x), _coordinate(y - 4)))
        parts.append(Markup('<text class="key" x="{}" y="{}">{}</text>').format(_coordinate(x + 26), _coordinate(y), name))
        x += width + 8
    return Markup("").join(parts), y + 12 if names else 12.0


def finite_pairs(x: Sequence[float | None], y: Sequence[float | None]) -> tuple[list[tuple[float, float]], int]:
    """The pairs that can be drawn, and how many cannot. Raises `ValueError` on unequal lengths."""
    if len(x) != len(y):
        raise ValueError(f"{len(x)} x values and {len(y)} y values")
    pairs = [(float(a), float(b)) for a, b in zip(x, y, strict=True) if finite(a) and finite(b)]
    return pairs, len(x) - len(pairs)


def scatter(name: str, description: str, pairs: Sequence[tuple[float, float]], x_label: str, y_label: str) -> Markup:
    """Points on two axes of the same range, with the diagonal on which both are equal."""
    both = Axis.of([v for pair in pairs for v in pair], x_label, log=False)
    plane = Plane(both, Axis(y_label, both.low, both.high), 12, WIDTH - _LEFT - _RIGHT)
    (x0, y0), (x1, y1) = plane.point(both.low, both.low), plane.point(both.high, both.high)
    # Half a unit is finer than a screen shows.
    spots = sorted({(round(2 * px) / 2, round(2 * py) / 2) for px, py in (plane.point(a, b) for a, b in pairs)})
    body = Markup('{}<path class="diagonal" d="M{} {}L{} {}"/><path class="dots" d="{}"/>').format(
        plane.draw(),
        *(_coordinate(v) for v in (x0, y0, x1, y1)),
        "".join(f"M{_coordinate(px)} {_coordinate(py)}h0" for px, py in spots),
    )
    return svg(name, description, WIDTH, plane.top + plane.height + _BOTTOM, body)


HEAT_LIMITS = (1.0, 0.99, 0.95, 0.8, 0.5, 0.0)
"""Least share of each class of a heat map, the best first; what is None or not finite has a class of its own."""
_NUMBERED = 12
"""Up to so many columns a heat map's cells are large enough for numbers."""


def heat_class(share: float | None) -> str:
    """Class of a cell: h0 is 1 exactly, h5 below one half, `none` no value."""
    return f"h{next((i for i, least in enumerate(HEAT_LIMITS) if share >= least), len(HEAT_LIMITS) - 1)}" if finite(share) else "none"


def percent(share: float, digits: int = 1) -> str:
    """A share in percent, rounded down so that only 1 itself reads 100."""
    scaled = math.floor(share * 100 * 10**digits + 1e-9) / 10**digits
    scaled = min(scaled, 100 - 10.0**-digits) if share < 1 else scaled
    return f"{scaled:.{digits}f}".removesuffix("." + "0" * digits)


def heat_map(
    name: str,
    description: str,
    rows: Sequence[object],
    columns: Sequence[object],
    cells: Sequence[Sequence[float | None]],
    totals: Sequence[float | None],
    row_label: str,
    column_label: str,
) -> Markup:
    """Shares (0 to 1) by row and column as coloured cells, with a column of `totals` before them; numbers in the cells where they fit.

    Raises `ValueError` where cells, totals and labels do not have the same shape, or a share is outside 0 to 1.
    """
    if len(cells) != len(rows) or len(totals) != len(rows) or any(len(row) != len(columns) for row in cells):
        raise ValueError(f"{name}: cells and totals do not have {len(rows)} rows and {len(columns)} columns")
    outside = next((v for row in (*cells, totals) for v in row if finite(v) and not 0 <= v <= 1), None)
    if outside is not None:
        raise ValueError(f"{name}: {outside} is no share")
    numbered = len(columns) <= _NUMBERED
    wide, high = (29, 22) if numbered else (10, 14)
    left, first, top = 36, 36 + 36, 36
    paths: dict[str, list[str]] = {}
    texts = [
        Markup('<text class="tick" x="0" y="28">{}</text><text class="tick" x="{}" y="28" text-anchor="middle">all</text>').format(
            row_label, left + 16
        ),
        Markup('<text class="label" x="{}" y="12">{}</text>').format(first, column_label),
    ]
    for r, (label, row, total) in enumerate(zip(rows, cells, totals, strict=True)):
        y = top + r * high
        texts.append(Markup('<text class="tick" x="{}" y="{}" text-anchor="end">{}</text>').format(left - 6, y + high // 2 + 4, label))
        for c, share in enumerate((total, *row)):
            x, width = (left, 32) if c == 0 else (first + (c - 1) * wide, wide)
            kind = heat_class(share)
            paths.setdefault(kind, []).append(f"M{x} {y}h{width - 1}v{high - 1}h-{width - 1}z")
            if numbered or c == 0:
                text = percent(share) if finite(share) else "–"
                mark = '<text class="cell t{}" x="{}" y="{}" text-anchor="middle">{}</text>'
                texts.append(Markup(mark).format(kind, _coordinate(x + width / 2 - 0.5), y + high // 2 + 3, text))
    every = 1 if numbered else 4
    for c in range(0, len(columns), every):
        texts.append(
            Markup('<text class="tick" x="{}" y="28" text-anchor="middle">{}</text>').format(
                _coordinate(first + c * wide + wide / 2), columns[c]
            )
        )
    body = [Markup('<path class="heat {}" d="{}"/>').format(kind, "".join(path)) for kind, path in sorted(paths.items())]
    return svg(name, description, first + len(columns) * wide + 4, top + len(rows) * high + 2, Markup("").join(body + texts), "natural")


def thinned(x: Sequence[float], columns: Sequence[Sequence[float | None]], most: int) -> tuple[list[float], list[list[float | None]], int]:
    """At most `most` points of long columns: of each run of neighbours the largest value stands for all, at the run's first x.

    What is not finite wins over any number, so that it is seen. Returns x, columns and how many neighbours one point stands for.
    """
    stride = max(1, math.ceil(len(x) / most))
    bounds = [*range(0, len(x), stride), len(x)]

    def largest(values: Sequence[float | None]) -> float | None:
        there = [v for v in values if v is not None]
        return max(there, key=lambda v: v if finite(v) else math.inf) if there else None

    return [x[a] for a in bounds[:-1]], [[largest(column[a:b]) for a, b in pairwise(bounds)] for column in columns], stride


def thinned_lines(x: Sequence[float], lines: Sequence[Line], most: int) -> tuple[list[float], list[Line], int]:
    """`thinned` for lines: of each run of neighbours the largest value stands for all, with the interval that belongs to it."""
    steps, columns, stride = thinned(x, [line.values for line in lines], most)
    bounds = [*range(0, len(x), stride), len(x)]
    kept = []
    for line, values in zip(lines, columns, strict=True):
        places = [next((i for i in range(a, b) if line.values[i] is v), a) for (a, b), v in zip(pairwise(bounds), values, strict=True)]
        low, high = (None if column is None else [column[i] for i in places] for column in (line.low, line.high))
        kept.append(Line(line.name, values, low, high))
    return steps, kept, stride

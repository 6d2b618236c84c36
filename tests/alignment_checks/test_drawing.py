"""Drawings must put every value where it belongs and lose none of those that matter: the largest, the zero, the one that is not finite."""

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from samebits.alignment_checks.drawing import (
    Axis,
    Line,
    Plane,
    finite_pairs,
    heat_class,
    heat_map,
    line_chart,
    percent,
    scatter,
    thinned,
    thinned_lines,
)

NUMBER = st.floats(-1e12, 1e12).map(lambda v: float(f"{v:.6g}"))


def elements(drawing, kind: str, name: str) -> list[ElementTree.Element]:
    root = ElementTree.fromstring(drawing)
    return [e for e in root.iter(kind) if name in e.get("class", "").split()]


def points(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"[ML]([-\d.]+) ([-\d.]+)", path)]


@settings(deadline=None)
@given(st.lists(NUMBER, min_size=1, max_size=8))
def test_an_axis_holds_its_values_in_order_and_has_few_round_ticks(values):
    axis = Axis.of(values, "x")
    at = [axis.at(v) for v in sorted(values)]
    assert at == sorted(at) and at[0] >= -1e-6 and at[-1] <= 1 + 1e-6
    ticks = axis.ticks()
    assert 1 <= len(ticks) <= 8 and len({text for _, text in ticks}) == len(ticks)
    for value, text in ticks:
        assert -1e-6 <= axis.at(value) <= 1 + 1e-6
        assert float(text.replace(",", "")) == pytest.approx(0 if axis.zero and value == axis.low else value, rel=1e-3)


@settings(deadline=None)
@given(st.lists(st.floats(), min_size=1, max_size=6))
@example([1e238, 6e-70])
@example([-1.7e308, 1.7e308])
@example([5e-324])
@example([1.0, 1.0 + 2**-52])
@example([-3e17, -3e17 + 64])
def test_no_value_makes_an_axis_or_a_chart_impossible(values):
    axis = Axis.of(values, "x")
    assert math.isfinite(axis.low) and math.isfinite(axis.high) and axis.low < axis.high
    texts = [text for _, text in axis.ticks()]
    assert texts and len(set(texts)) == len(texts)
    drawing = line_chart("n", "d", range(len(values)), [Line("a", values)], "x", "y")
    assert not re.search(r"nan|inf\b", drawing) and ElementTree.fromstring(drawing) is not None


@pytest.mark.parametrize(
    ("values", "low", "high", "log", "ticks"),
    [
        ([0, 95], 0, 100, False, ["0", "20", "40", "60", "80", "100"]),
        ([-11.2, -0.001], -12, 0, False, ["-10", "-5", "0"]),
        ([0.0, 4.2e-6], 0, 4.5e-6, False, ["0", "1e-6", "2e-6", "3e-6", "4e-6"]),
        ([3.0, 3.0], 1.5, 4.5, False, ["2", "3", "4"]),
        ([0.0], 0, 1, False, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        ([], 0, 1, False, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        ([1e-7, 2.0], 1e-7, 10, True, ["1e-7", "1e-5", "0.001", "0.1", "10"]),
        ([0.0, 1e-5, 0.5], 1e-6, 1, True, ["0", "1e-4", "0.01", "1"]),
        ([-1.0, 1e-7, 5000.0], -1000, 5000, False, ["0", "2,000", "4,000"]),
    ],
)
def test_axes_of_known_values(values, low, high, log, ticks):
    axis = Axis.of(values, "x")
    assert (axis.low, axis.high, axis.log) == (pytest.approx(low), pytest.approx(high), log)
    assert [text for _, text in axis.ticks()] == ticks


def test_a_zero_on_a_logarithmic_axis_lies_at_its_foot():
    axis = Axis.of([0.0, 1e-5, 0.5], "x")
    assert axis.at(0.0) == 0 and axis.at(1e-5) == pytest.approx(1 / 6) and axis.at(1.0) == 1


def test_lines_go_through_their_points_and_break_where_there_is_none():
    x = [0, 10, 20, 30, 40]
    drawing = line_chart("n", "d", x, [Line("a", [0.0, 1.0, None, 3.0, None]), Line("b", [4.0, 3.0, 2.0, 1.0, 0.0])], "step", "loss")
    first, second = (e.get("d") for i in (0, 1) for e in elements(drawing, "path", f"c{i}") if "L" in e.get("d") or "h0" in e.get("d"))
    assert first.count("M") == 2 and first.count("L") == 1 and first.endswith("h0")
    assert second.count("M") == 1 and second.count("L") == 4
    root = ElementTree.fromstring(drawing)
    height = float(root.get("height"))
    plane = Plane(Axis.of(x, ""), Axis.of([0, 4], ""), height - 38 - 170, 170)
    assert points(second) == [pytest.approx(plane.point(a, b), abs=0.06) for a, b in zip(x, [4, 3, 2, 1, 0], strict=True)]
    assert points(first)[2] == pytest.approx(plane.point(30, 3), abs=0.06)
    assert [t.text for t in elements(drawing, "text", "key")] == ["a", "b"]
    assert {"step", "loss"} == {t.text for t in elements(drawing, "text", "label")}
    assert not elements(drawing, "path", "cross")


def test_what_is_not_finite_is_crossed_and_a_limit_is_ruled():
    drawing = line_chart("n", "d", [0, 1, 2], [Line("a", [1.0, math.nan, 2.0])], "x", "y", limit=8.0)
    (cross,) = elements(drawing, "path", "cross")
    assert cross.get("d").count("M") == 1
    (limit,) = elements(drawing, "path", "limit")
    ends = points(elements(drawing, "path", "c0")[0].get("d"))
    assert points(limit.get("d"))[0][1] < min(y for _, y in ends)  # the axis reaches up to the limit
    only = line_chart("n", "d", [0, 1], [Line("a", [math.inf, math.nan])], "x", "y")
    assert elements(only, "path", "cross")[0].get("d").count("M") == 2


def test_lines_of_another_length_are_refused():
    with pytest.raises(ValueError, match="n: a line has not as many values"):
        line_chart("n", "d", [0, 1], [Line("a", [1.0])], "x", "y")


def test_a_scatter_puts_equals_on_the_diagonal_and_others_off_it():
    pairs = [(-4.0, -4.0), (-2.0, -2.0), (-3.0, -1.0), (-3.0, -1.0)]
    drawing = scatter("n", "d", pairs, "engine", "trainer")
    (x0, y0), (x1, y1) = points(elements(drawing, "path", "diagonal")[0].get("d"))
    dots = points(elements(drawing, "path", "dots")[0].get("d"))
    assert len(dots) == 3  # the same spot is drawn once
    off = [round((y - y0) * (x1 - x0) - (x - x0) * (y1 - y0)) for x, y in dots]
    assert sum(abs(v) < 300 for v in off) == 2 and sum(v < -3000 for v in off) == 1  # a larger trainer logprob lies above
    assert finite_pairs([1.0, math.nan, None, 2.0], [1.0, 1.0, 1.0, math.inf]) == ([(1.0, 1.0)], 3)
    with pytest.raises(ValueError, match="1 x values and 2 y values"):
        finite_pairs([1.0], [1.0, 2.0])


def test_a_heat_map_puts_each_share_in_its_cell():
    cells = [[1.0, 0.995, 0.96], [0.85, 0.6, 0.2], [math.nan, None, 1.0]]
    drawing = heat_map("n", "d", [3, 4, 5], [0, 1, 2], cells, [0.98, 0.5, math.nan], "layer", "expert")
    at = {}
    for kind in ("h0", "h1", "h2", "h3", "h4", "h5", "none"):
        at |= {spot: kind for path in elements(drawing, "path", kind) for spot in points(path.get("d").replace("h", " h"))}
    columns, lines = sorted({x for x, _ in at}), sorted({y for _, y in at})
    assert [[at[(x, y)] for x in columns] for y in lines] == [
        ["h2", "h0", "h1", "h2"],
        ["h4", "h3", "h4", "h5"],
        ["none", "none", "none", "h0"],
    ]
    texts = [t.text for t in ElementTree.fromstring(drawing).iter("text") if "cell" in t.get("class")]
    assert texts == ["98", "100", "99.5", "96", "50", "85", "60", "20", "–", "–", "–", "100"]
    ticks = [t.text for t in elements(drawing, "text", "tick")]
    assert ticks == ["layer", "all", "3", "4", "5", "0", "1", "2"]


def test_a_heat_map_of_many_experts_numbers_only_the_layers():
    drawing = heat_map("n", "d", [3], range(128), [[1.0] * 128], [0.75], "layer", "expert")
    assert [t.text for t in ElementTree.fromstring(drawing).iter("text") if "cell" in t.get("class")] == ["75"]
    assert float(ElementTree.fromstring(drawing).get("width")) > 1280


@pytest.mark.parametrize(
    ("rows", "cells", "totals"), [([1, 2], [[1.0]], [1.0, 1.0]), ([1], [[1.0, 1.0]], [1.0]), ([1], [[1.0]], []), ([1], [[-0.1]], [1.0])]
)
def test_a_heat_map_of_impossible_shape_is_refused(rows, cells, totals):
    with pytest.raises(ValueError, match="^n: "):
        heat_map("n", "d", rows, [0], cells, totals, "layer", "expert")


@pytest.mark.parametrize(
    ("share", "text", "kind"),
    [
        (1.0, "100", "h0"),
        (0.99999999, "99.9", "h1"),
        (0.99, "99", "h1"),
        (0.9899, "98.9", "h2"),
        (0.07, "7", "h5"),
        (0.0, "0", "h5"),
        (0.5, "50", "h4"),
    ],
)
def test_only_full_agreement_reads_as_100_percent(share, text, kind):
    assert percent(share) == text and heat_class(share) == kind


def test_thinning_keeps_the_largest_and_what_is_not_finite():
    x, (a, b, c), stride = thinned(range(10), [[0, 9, 1, 1, 1, 1, 7, 1, 1, 2], [1.0] * 4 + [math.nan, 5.0] + [None] * 4, [-3.0] * 10], 5)
    assert (x, a, c, stride) == ([0, 2, 4, 6, 8], [9, 1, 1, 7, 2], [-3.0] * 5, 2)
    assert b[:2] == [1.0, 1.0] and math.isnan(b[2]) and b[3:] == [None, None]
    assert thinned([5, 6], [[1, 2]], 5) == ([5, 6], [[1, 2]], 1)


def test_names_are_escaped_and_said_to_screen_readers():
    evil = '"><script>&'
    for drawing in (
        line_chart(evil, evil, [0, 1], [Line(evil, [1.0, 2.0]), Line("b", [1.0, 2.0])], evil, evil),
        scatter(evil, evil, [(1.0, 2.0)], evil, evil),
        heat_map(evil, evil, [evil], [evil], [[1.0]], [1.0], evil, evil),
    ):
        root = ElementTree.fromstring(drawing)
        assert root.get("role") == "img" and root.get("aria-label") == f"{evil}. {evil}" and root.find("desc").text == evil
        assert not list(root.iter("script"))


def test_a_band_lies_between_its_ends_and_breaks_where_one_is_missing():
    x = [0, 10, 20, 30, 40]
    low, high = [1.0, 1.5, None, 2.5, math.nan], [2.0, 3.0, 3.0, 5.0, 4.0]
    drawing = line_chart("n", "d", x, [Line("a", [1.5, 2.0, 2.5, 3.0, 3.5], low, high), Line("b", [0.0] * 5)], "step", "loss")
    (band,) = elements(drawing, "path", "band")
    assert "b0" in band.get("class").split() and band.get("d").count("z") == 2
    root = ElementTree.fromstring(drawing)
    plane = Plane(Axis.of(x, ""), Axis.of([0, 5], ""), float(root.get("height")) - 38 - 170, 170)
    (first, second) = (points(area) for area in band.get("d").split("z")[:2])
    assert first == [pytest.approx(plane.point(a, b), abs=0.06) for a, b in ((0, 2.0), (10, 3.0), (10, 1.5), (0, 1.0))]
    # what stands alone is a bar around its place, as high as its interval
    (px, top), (_, bottom) = plane.point(30, 5.0), plane.point(30, 2.5)
    assert second == [pytest.approx(p, abs=0.06) for p in ((px - 2, top), (px + 2, top), (px + 2, bottom), (px - 2, bottom))]
    with pytest.raises(ValueError, match="n: a line has not as many values"):
        line_chart("n", "d", x, [Line("a", [1.0] * 5, [1.0] * 4, [1.0] * 5)], "step", "loss")


@settings(deadline=None, max_examples=50)
@given(st.lists(st.one_of(st.none(), NUMBER), min_size=1, max_size=40), st.integers(1, 12))
def test_thinned_lines_keep_each_value_with_its_own_interval(values, most):
    low, high = ([None if v is None else v + d for v in values] for d in (-1.0, 2.0))
    x, (kept,), stride = thinned_lines(range(len(values)), [Line("a", values, low, high)], most)
    same_x, (same,), same_stride = thinned(range(len(values)), [values], most)
    assert (x, kept.values, stride) == (same_x, same, same_stride)
    for value, a, b in zip(kept.values, kept.low, kept.high, strict=True):
        assert (a, b) == ((None, None) if value is None else (value - 1.0, value + 2.0))

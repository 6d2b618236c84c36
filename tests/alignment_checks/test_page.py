"""The frame of pages: what a later page relies on, and that its colours can be read."""

import json
import math
import re
import tomllib
from pathlib import Path

import pytest

from samebits.alignment_checks import page

ROOT = Path(__file__).parents[2]
DATA = {"text": "</script><!-- & \u2028 é", "value": math.inf}


def colours(dark: bool) -> dict[str, tuple[float, ...]]:
    blocks = re.findall(r":root \{(.*?)\}", (page.TEMPLATES / "page.css").read_text(), re.DOTALL)
    pairs = re.findall(r"--([\w-]+): #([0-9a-f]{6})", blocks[0] + (blocks[1] if dark else ""))
    return {name: tuple(int(code[i : i + 2], 16) / 255 for i in (0, 2, 4)) for name, code in pairs}


def contrast(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    """Ratio of relative luminances as WCAG 2 defines it."""
    light = [
        sum(w * (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4) for w, c in zip((0.2126, 0.7152, 0.0722), rgb, strict=True))
        for rgb in (a, b)
    ]
    return (max(light) + 0.05) / (min(light) + 0.05)


@pytest.mark.parametrize("dark", [False, True])
def test_every_text_can_be_read_on_its_ground(dark):
    named = colours(dark)
    pairs = [(ink, ground) for ink in ("ink", "soft") for ground in ("ground", "sheet", "chip")]
    pairs += [(tone, f"{tone}-ground") for tone in ("good", "bad", "unknown")] + [
        ("ink", f"{tone}-ground") for tone in ("good", "bad", "unknown")
    ]
    pairs += [(f"{kind}-ink", kind) for kind in ("h0", "h1", "h2", "h3", "h4", "h5", "none")] + [("c0", "ground"), ("unknown", "sheet")]
    assert {pair: round(contrast(*(named[n] for n in pair)), 2) for pair in pairs if contrast(*(named[n] for n in pair)) < 4.5} == {}
    # Lines are graphics, for which 3 is asked.
    assert [c for c in (f"c{i}" for i in range(6)) if contrast(named[c], named["sheet"]) < 3] == []


def test_every_colour_has_a_dark_one():
    css = (page.TEMPLATES / "page.css").read_text()
    light, dark = (set(re.findall(r"--([\w-]+):", block)) for block in re.findall(r":root \{(.*?)\}", css, re.DOTALL))
    assert light == dark and set(re.findall(r"var\(--([\w-]+)\)", css)) <= light


def test_the_package_carries_its_templates():
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["samebits.alignment_checks"]
    carried = {path for pattern in data for path in page.TEMPLATES.parent.glob(pattern)}
    assert carried == set(page.TEMPLATES.iterdir()) and len(carried) >= 5


def own_page(tmp_path, body: str, **context) -> str:
    (tmp_path / "own.html.jinja").write_text(
        '{% extends "frame.html.jinja" %}{% import "macros.html.jinja" as m %}{% block body %}' + body + "{% endblock %}"
    )
    usual = {
        "title": "t",
        "kind": "k",
        "verdict": page.Verdict("good", "w", "s"),
        "facts": {},
        "download": page.Download.of("d.json", DATA),
    }
    return page.render("own.html.jinja", [tmp_path], **usual | context)


def test_a_floor_above_brings_its_own_template(tmp_path):
    columns = [page.Column("Step"), page.Column("Accuracy", number=True)]
    text = own_page(tmp_path, "{{ m.table('c', columns, [['<1>', 0.5]]) }}{{ m.figure('f', none, '') }}", columns=columns)
    assert '<td role="cell" data-label="Step" class=""><div>&lt;1&gt;</div></td>' in text
    assert '<td role="cell" data-label="Accuracy" class="number"><div>0.5</div></td>' in text
    assert "not measured" in text and text.rstrip().endswith("</html>")


def test_a_template_that_asks_for_what_is_not_there_fails(tmp_path):
    with pytest.raises(Exception, match="'forgotten' is undefined"):
        own_page(tmp_path, "{{ forgotten }}")


def test_embedded_data_reads_back_equal_and_ends_no_element():
    download = page.Download.of("d.json", DATA)
    assert json.loads(download.text) == DATA
    assert not set("<>&") & set(download.text) and download.size == len(download.text)
    assert page.Download.of("d.json", "x" * (page.EMBED_LIMIT - 2)).text is not None
    assert page.Download.of("d.json", "x" * (page.EMBED_LIMIT - 1)).text is None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.0, "0"),
        (1234567.0, "1,234,567"),
        (0.123456, "0.1235"),
        (2.682209014892578e-05, "2.682e-05"),
        (1e300, "1e+300"),
        (-math.inf, "-∞"),
        (math.nan, "not a number"),
    ],
)
def test_numbers(value, text):
    assert page.number(value) == text


def test_two_numbers_that_differ_never_read_alike():
    assert page.against(0.1, 0.1) == ("0.1", "0.1") and page.against(None, 1.0) == ("–", "1")
    assert page.against(0.10001, 0.1) == ("0.10001", "0.1")
    above = math.nextafter(0.3, 1)
    assert page.against(above, 0.3)[0] != page.against(above, 0.3)[1]
    assert page.against(math.nan, None) == ("not a number", "–")


def test_texts():
    assert page.clip("x" * 600) == "x" * 600 and page.clip("x" * 601) == "x" * 600 + "… (1 more characters)"
    assert [page.size(n) for n in (999, 1500, 2_340_000)] == ["999 bytes", "2 kB", "2.3 MB"]
    assert page.flat({"a": {"b": {"c": 1}, "d": "x"}, "e": {}, "f": [1, None]}) == {"a.b.c": "1", "a.d": "x", "e": "{}", "f": "[1, null]"}
    assert str(page.chips({})) == "–"

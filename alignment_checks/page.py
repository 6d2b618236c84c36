"""The frame of every HTML page that samebits writes: one file that needs no network, readable on a phone, in light and dark.

A page is a jinja2 template that extends `frame.html.jinja` and fills its blocks; the frame brings style, header and verdict. Templates
escape everything that is not `Markup`, and the page's content security policy lets the browser load nothing, run no script but the
page's own and apply no style but the page's own (both by hash), so that a name that slipped through could still do nothing.
A floor above gives the folder of its own templates along.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import jinja2
from markupsafe import Markup

TEMPLATES = Path(__file__).parent / "templates"
EMBED_LIMIT = 2_000_000
"""Bytes up to which a page carries the data that it was made from."""
TEXT_LIMIT = 600
"""Characters up to which a single text is shown."""

Tone = Literal["good", "bad", "unknown", "plain"]
"""`plain`: a measurement, which is neither good nor bad."""
_SYMBOLS: dict[Tone, str] = {"good": "✓", "bad": "✗", "unknown": "!", "plain": "#"}


class PageError(ValueError):
    """A page cannot be made or written. The message is one line."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What stands on top of a page."""

    tone: Tone
    word: str
    """Two or three words: what the reader came for."""
    sentence: str
    """How the word is justified, in figures."""

    @property
    def symbol(self) -> str:
        """The sign that says the same without colour."""
        return _SYMBOLS[self.tone]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    label: str
    number: bool = False
    """Whether its cells are numbers, which are aligned on the right."""


@dataclass(frozen=True, slots=True)
class Download:
    """The data of a page, to be kept as a file."""

    name: str
    size: int
    """Bytes."""
    text: Markup | None
    """What the page carries; None above `EMBED_LIMIT`."""

    @classmethod
    def of(cls, name: str, content: object) -> Download:
        """JSON of `content`, with what HTML would see as markup written as escapes that JSON reads back."""
        text = json.dumps(content, indent=1)
        text = text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
        return cls(name, len(text), Markup(text) if len(text) <= EMBED_LIMIT else None)


def clip(value: object, limit: int = TEXT_LIMIT) -> str:
    """The text of `value`, cut where it is too long to be shown, and saying so."""
    text = str(value)
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text) - limit:,} more characters)"


def number(value: float | None, digits: int = 4) -> str:
    """A number as a reader wants it: whole numbers in full, others with `digits` significant digits."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "not a number" if math.isnan(value) else "∞" if value > 0 else "-∞"
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.{digits}g}"


def against(measured: float | None, limit: float | None) -> tuple[str, str]:
    """Two numbers with as many digits as it takes to see that they differ."""
    for digits in range(4, 18):
        texts = number(measured, digits), number(limit, digits)
        if texts[0] != texts[1] or measured == limit:
            break
    return texts


def size(count: int) -> str:
    """Bytes as a reader wants them."""
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.0f} kB" if count >= 1e3 else f"{count} bytes"


def counted(count: int, thing: str, things: str | None = None) -> str:
    """`1 check`, `2 checks`."""
    return f"{count:,} {thing if count == 1 else things or thing + 's'}"


def badge(tone: Tone, word: str) -> Markup:
    """A coloured word with the sign of its tone."""
    return Markup('<span class="badge {}"><span aria-hidden="true">{}</span> {}</span>').format(tone, _SYMBOLS[tone], word)


def chips(parts: Mapping[str, object]) -> Markup:
    """Short name-value pairs in a row, the value on the next line where it is long; a dash where there are none."""
    pair = Markup('<span class="chip"><span class="name">{}</span> <span class="value">{}</span></span>')
    return Markup(" ").join(pair.format(clip(k), clip(v)) for k, v in parts.items()) or Markup("–")


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as dotted names and texts."""
    out: dict[str, str] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            out |= flat(value, f"{name}.")
        else:
            out[name] = value if isinstance(value, str) else json.dumps(value)
    return out


def _hash(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


@cache
def _frame(own_style: str, own_script: str) -> dict[str, Markup | str]:
    style, script = ((TEMPLATES / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    style, script = style + own_style, script + own_script
    policy = f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; img-src data:; base-uri 'none'; form-action 'none'"
    return {"style": Markup(style), "script": Markup(script), "policy": policy}


def render(template: str, folders: Sequence[Path] = (), *, own_style: str = "", own_script: str = "", **context: object) -> str:
    """A page from a template that extends `frame.html.jinja`; `folders` are searched before this package's own.

    `own_style` and `own_script`: CSS and JavaScript of this kind of page, after the frame's and under the same policy.

    The frame needs `title`, `kind` (what the page is), `verdict` (a `Verdict`), `facts` (name to text or Markup, shown below the
    verdict) and `download` (a `Download`).
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([*folders, TEMPLATES]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"clip": clip, "number": number, "size": size}
    text = environment.get_template(template).render(**_frame(own_style, own_script), **context)
    # A name out of JSON may hold half a surrogate pair, which no file can.
    return text.encode("utf-8", "replace").decode("utf-8")


def write(path: Path, text: str) -> None:
    """Write a page in one go, so that a reader never finds half of one. Raises `PageError` with one line."""
    staging = path.with_name(path.name + ".tmp")
    try:
        staging.write_text(text, encoding="utf-8")
        os.replace(staging, path)
    except OSError as error:
        staging.unlink(missing_ok=True) if staging.is_file() else None
        raise PageError(f"{path}: {error.strerror}") from None

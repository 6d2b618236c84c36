"""How every command ends badly, and where its result goes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import typer


def fail(message: str, status: int = 2) -> typer.Exit:
    """Print `message` as the one line of an error and return the exception to raise."""
    print(f"samebits: {message}", file=sys.stderr)
    return typer.Exit(status)


def write_json(path: Path | None, content: object) -> None:
    """Write a result where `--json` asks for it. Raises `typer.Exit(2)` with one line when it cannot be written."""
    if path is None:
        return
    try:
        path.write_text(json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise fail(f"{path}: {error.strerror}") from None

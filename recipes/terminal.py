"""How every command ends badly, and where its result goes."""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from pathlib import Path

import typer


def fail(message: str, status: int = 2) -> typer.Exit:
    """Print `message` as the one line of an error and return the exception to raise."""
    print(f"samebits: {message}", file=sys.stderr)
    return typer.Exit(status)


def quiet_job(verbose: bool) -> None:
    """The environment of a command that starts a job; before verl is imported. Not `verbose`: without what verl and vLLM say."""
    if not verbose:
        warnings.simplefilter("ignore")  # verl warns about each optional engine that is not installed
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        # vLLM obeys that from its first engine on. What it says while it is imported, on a CPU that it does without Triton, comes
        # before and would go to Python's handler of last resort.
        logging.getLogger("vllm").setLevel(logging.ERROR)
        os.environ.setdefault("VERL_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VERL_USE_EXTERNAL_MODULES", "samebits.trainer.plugin,samebits.rollout.verl_plugin")


def require_writable(*paths: Path | None) -> None:
    """Refuse, before any work, result files that cannot be written. Raises `typer.Exit(2)` with one line."""
    for path in paths:
        if path is None:
            continue
        if path.is_dir():
            raise fail(f"{path} is a folder, a file is to be written there")
        if not path.absolute().parent.is_dir():
            raise fail(f"{path}: there is no folder {path.absolute().parent}")


def write_json(path: Path | None, content: object) -> None:
    """Write a result where `--json` asks for it, whole at every moment. Raises `typer.Exit(2)` with one line when it cannot be written."""
    if path is None:
        return
    text = json.dumps(content, indent=1) + "\n"
    try:
        if path.exists() and not path.is_file():  # a pipe or a terminal
            path.write_text(text)
            return
        part = path.with_name(path.name + ".part")
        part.write_text(text)
        part.replace(path)
    except OSError as error:
        raise fail(f"{path}: {error.strerror}") from None

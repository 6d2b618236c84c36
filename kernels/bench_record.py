"""What the benchmarks of kernels have in common: a result that is saved line by line, parts that can be run alone, and one command line.

A run that is killed, by a lease that ends say, keeps every line that it had.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from samebits.quant.bench import machine

Save = Callable[[dict[str, Any]], Any]


def nowhere(result: dict[str, Any]) -> None:
    """A `Save` that keeps nothing."""


class Record:
    """A result that grows; `save` gets all of it after every change, with the seconds since the start."""

    def __init__(self, save: Save = nowhere, device: str = "cuda") -> None:
        self._save, self._start = save, time.monotonic()
        self.result: dict[str, Any] = {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), **machine(device)}

    def update(self, **values: Any) -> None:
        """Set entries of the result."""
        self.result |= values
        self.save()

    def add(self, lines: Iterable[dict[str, Any]], part: str = "results") -> None:
        """Append lines to a list of the result, each as soon as it is there."""
        for line in lines:
            self.result.setdefault(part, []).append(line)
            self.save()

    def save(self) -> None:
        """Hand over what there is."""
        self.result["seconds"] = round(time.monotonic() - self._start, 1)
        self._save(self.result)


def chosen_parts(wanted: Iterable[str] | None, known: tuple[str, ...]) -> set[str]:
    """Parts to run, all where none is named. Raises `ValueError` with one line on an unknown one."""
    parts = set(wanted or known)
    if unknown := sorted(parts - set(known)):
        raise ValueError(f"no part called {unknown[0]!r}; there are: {', '.join(known)}")
    return parts


def write(path: Path | None, result: dict[str, Any]) -> None:
    """Write a result so that the file is whole at every moment; nothing without a path."""
    if path is not None:
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps(result, indent=1) + "\n")
        part.replace(path)


def command(about: str, what: str, module: Any, argv: list[str] | None) -> int:
    """A benchmark as a command: run, shown, and written line by line where `--json` says. Returns the exit code.

    `module`: has `PARTS`, `run(save=..., parts=...)`, whose result says whether it is `right`, and `show`.
    """
    import torch

    parser = argparse.ArgumentParser(description=about.split("\n")[0])
    parser.add_argument("--json", type=Path, help="write the results here, line by line")
    parser.add_argument("--part", action="append", choices=module.PARTS, help="run only this part; may be given again")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print(f"samebits: the benchmark of {what} needs a CUDA GPU", file=sys.stderr)
        return 2
    result = module.run(save=lambda partial: write(args.json, partial), parts=args.part)
    module.show(result)
    return 0 if result["right"] else 1


def absence(error: Exception) -> str:
    """Why a peer is not there, in one line: that it is not installed, or what its import says."""
    if isinstance(error, ModuleNotFoundError):
        return f"not installed: {error}"
    return f"cannot be used: {type(error).__name__}: {error}".split("\n")[0][:300]

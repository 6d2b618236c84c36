"""One line for each phase of a build: a bar on a terminal, and elsewhere, where a bar is drawn at its end only, lines as time goes by."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

LINE_EVERY = 10.0
"""Seconds between two lines of a phase where there is no terminal."""


class Line:
    """A phase while it is entered. `shown`: say nothing otherwise."""

    def __init__(self, name: str, console: Console, shown: bool = True) -> None:
        self.name, self.console, self.shown = name, console, shown
        said = (TextColumn("{task.percentage:>3.0f}%"), TextColumn("{task.fields[text]}"), TimeElapsedColumn())
        unseen = not (shown and console.is_terminal)
        self._bar = Progress(TextColumn("{task.description}"), BarColumn(10), *said, console=console, disable=unseen)
        self._task = self._bar.add_task(name, total=1.0, text="")

    def __enter__(self) -> Line:
        self._began = self._said = time.perf_counter()
        self._bar.start()
        if self.shown and not self.console.is_terminal:
            self._print("begins")
        return self

    def update(self, done: float, text: str = "") -> None:
        """`done`: fraction of the phase. `text`: what there is to say about it."""
        self._bar.update(self._task, completed=done, text=text)
        if self.shown and not self.console.is_terminal and time.perf_counter() - self._said >= LINE_EVERY:
            self._said = time.perf_counter()
            self._print(f"{done:.0%} after {self._said - self._began:.0f} s" + (f", {text}" if text else ""))

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self._bar.update(self._task, completed=1.0)
        self._bar.stop()
        if error is None and self.shown and not self.console.is_terminal:
            self._print(f"done after {time.perf_counter() - self._began:.1f} s")

    def _print(self, text: str) -> None:
        self.console.print(f"{self.name}: {text}", highlight=False, soft_wrap=True)

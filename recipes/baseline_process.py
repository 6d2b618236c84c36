"""Runs stock verl to its end, or ends it: when it takes too long, and when a part of it failed and the rest waits for ever.

verl's driver does not end when a worker or the engine fails in a sync: the traceback is printed and the sender waits. So a job that has
printed a traceback and then neither finishes a step nor prints a line for `STALLED_S` has failed, and one that only prints after three
times as long. Not every traceback is an error: packages print some of what they do without, and an engine compiles and captures for
minutes before the first step. What verl prints is kept in a file.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

STALLED_S = 120.0
"""Seconds without a step and without a line after a traceback until the job has failed."""
_PATIENCE = 3  # times as long where it still prints
_GRACE_S = 15.0
_TRACEBACK = "Traceback (most recent call last)"
_ERROR = re.compile(r"\b((?:\w+\.)*(?:[A-Z]\w*)?(?:Error|Exception)): (.+)")
_BLAND = re.compile(r"Engine core initialization failed|EngineCore encountered an issue|RayTaskError|ActorDiedError|RayActorError")


class BaselineFailed(RuntimeError):
    """Stock verl stopped, or took too long. The message is one line."""


class _Output(threading.Thread):
    """Reads what a process prints, into a file and, when `shown`, to standard error."""

    def __init__(self, pipe, log: Path, shown: bool) -> None:
        super().__init__(daemon=True)
        self.pipe, self.log, self.shown = pipe, log, shown
        self.traced = False
        """Whether a traceback was printed."""
        self.heard = time.monotonic()
        """When it printed last."""
        self.errors: list[str] = []
        self.last = "it printed nothing"

    def run(self) -> None:
        with self.log.open("w") as log:
            for raw in self.pipe:
                line, self.heard = raw.decode(errors="replace").rstrip(), time.monotonic()
                print(line, file=log, flush=True)
                if self.shown:
                    print(line, file=sys.stderr, flush=True)
                self.traced |= _TRACEBACK in line
                found = _ERROR.search(line)
                if self.traced and found and not _BLAND.search(line):
                    self.errors.append(f"{found[1]}: {found[2][:400]}")
                self.last = line or self.last

    def cause(self) -> str:
        """The first error after the first traceback that says something, else the last line."""
        return self.errors[0] if self.errors else self.last


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    metrics: Path,
    limit: float,
    verbose: bool,
    stalled: float = STALLED_S,
) -> bool:
    """Run `command` in `folder` with exactly `environment`; a step is done whenever `metrics` grows.

    Returns whether it came to its end; False: it was ended after `limit` seconds, with `metrics` as it then was.
    Raises `BaselineFailed` when it ends badly, stands still after a traceback, for `stalled`, or has done no step after `limit` seconds.
    """
    process = subprocess.Popen(
        command,
        env=dict(environment),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    output = _Output(process.stdout, folder / "output.log", verbose)
    output.start()
    problem: str | None = None
    whole = True
    started = moved = time.monotonic()
    size = 0
    try:
        while problem is None and whole and process.poll() is None:
            time.sleep(0.2)
            now, before, size = time.monotonic(), size, metrics.stat().st_size if metrics.is_file() else 0
            if size != before or not output.traced:
                moved = now
            if now - started > limit:
                whole = False
            elif now - max(moved, output.heard) > stalled:
                problem = f"it stood still for {stalled:g} s after an error"
            elif now - moved > _PATIENCE * stalled:
                problem = f"it finished no step for {_PATIENCE * stalled:g} s after an error"
    finally:
        _end(process)
    output.join(timeout=5)
    if not whole and not size:
        problem = f"it did not end within {limit:g} s"
    if problem is None and whole and process.returncode != 0:
        problem = f"it ended with status {process.returncode}"
    if problem is not None:
        raise BaselineFailed(f"stock verl: {problem}; {output.cause()}")
    return whole


def _end(process: subprocess.Popen) -> None:
    """Let the driver shut its Ray down, then kill what is left of its group. Ray's own processes end with the driver."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()

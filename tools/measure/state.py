"""What a queue has done and is doing: `OUT/status.json`, whole at every moment, and the lock of the queue that writes it."""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from .plan import ENDED, Line

SCHEMA = "samebits.measure.status/1"
FILE = "status.json"
LOGS = "log"
_LOCK = ".queue.lock"
_TAIL = 8192
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")


class StateError(ValueError):
    """The status cannot be used. The message is one line."""


def now() -> str:
    """UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a kill leaves the old one or the new one."""
    staging = path.with_name(f".{path.name}.tmp")
    staging.write_text(text)
    os.replace(staging, path)


def log_of(out: Path, name: str) -> Path:
    """Where a line's output goes."""
    return out / LOGS / f"{name}.log"


class Status:
    """`status.json` of a folder. `lines` has, by name, what is known of each line that was ever begun."""

    def __init__(self, out: Path) -> None:
        self.path = out / FILE
        self.data: dict[str, Any] = {"schema": SCHEMA, "queue": {}, "machines": [], "refused": None, "lines": {}}
        if self.path.is_file():
            try:
                self.data |= json.loads(self.path.read_text())
                self.data["lines"].items()
            except (ValueError, TypeError, AttributeError) as error:
                raise StateError(f"{self.path} cannot be read ({error}); remove it to begin anew") from None

    @property
    def lines(self) -> dict[str, dict[str, Any]]:
        """Records by name."""
        return self.data["lines"]

    def save(self) -> None:
        """Write it."""
        write_whole(self.path, json.dumps(self.data, indent=1) + "\n")

    def states(self, lines: Sequence[Line]) -> dict[str, str]:
        """State of each line. A record of another command is not this line's: it is queued."""
        return {line.name: self._state(line) for line in lines}

    def _state(self, line: Line) -> str:
        record = self.lines.get(line.name)
        return record["state"] if record is not None and record["command"] == line.command else "queued"

    def forget(self, names: Sequence[str]) -> None:
        """Let lines be run again."""
        for name in names:
            if name in self.lines:
                self.lines[name]["state"] = "queued"


def take(out: Path) -> TextIO | None:
    """The lock of a folder's queue, held while the file is open; None: a queue has it. Children of the queue do not inherit it."""
    file = (out / _LOCK).open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def is_running(out: Path) -> bool:
    """Whether a queue works on a folder."""
    if not (out / _LOCK).exists():
        return False
    file = take(out)
    if file is not None:
        file.close()
    return file is None


def last_line(path: Path) -> str:
    """The last line with anything in it of a log, without control characters."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL))
        text = file.read().decode(errors="replace").replace("\r", "\n")
    return next((line for line in (_CONTROL.sub("", raw).strip() for raw in reversed(text.split("\n"))) if line), "")


def said(out: Path, name: str) -> str:
    """What is last heard of a line: of its log, else the step of its run, since progress is not shown in a log."""
    text, metrics = last_line(log_of(out, name)), out / "runs" / name / "metrics.jsonl"
    if text.startswith("== ") and metrics.is_file():
        found = re.match(r'\{"step": (\d+)', last_line(metrics))
        return f"step {found[1]} of the run" if found else "the run has begun"
    return text


def table(out: Path, status: Status, lines: Sequence[Line] | None = None) -> str:
    """A short table; of `lines`, if given, else of what was begun."""
    running = is_running(out)
    queue = status.data["queue"]
    if running:
        head = f"a queue runs since {queue.get('started')}"
    else:
        head = f"no queue runs; the last one {queue.get('ended') or 'was killed'}" if queue else "no queue has run here"
    rows = [head, *([f"not taken from the plan: {status.data['refused']}"] if status.data["refused"] else [])]
    states = status.states(lines) if lines is not None else {name: record["state"] for name, record in status.lines.items()}
    lanes = {line.name: line.written_lane for line in lines or ()}
    width = max((len(name) for name in states), default=0)
    for name, state in states.items():
        record = status.lines.get(name, {})
        if state == "running" and not running:
            state = "interrupted"  # with the queue that was killed
        seconds = record.get("seconds")
        if state == "running":
            seconds = time.time() - record["begun"]
        spent = "" if seconds is None or state == "queued" else f"{seconds:.0f} of {record['limit']:.0f} s"
        heard = said(out, name)[:100] if state not in ("queued", "done") else ""
        exit_status = record.get("exit")
        mark = f"exit {exit_status}" if exit_status not in (None, 0) and state in ENDED else ""
        lane = lanes.get(name) or record.get("lane", "")
        rows.append(f"{lane:>4}  {name:{width}}  {state:<11}  {spent:>16}  {mark:<8}  {heard}".rstrip())
    return "\n".join(rows)

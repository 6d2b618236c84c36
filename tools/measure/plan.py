"""Plan files: what is to be run, in which order, on which GPU.

One line each, `#` begins a comment line:

    lane | name | limit in seconds | command

lane     number of a GPU, whose lines run one after the other; `N+`: beside what runs on lane N, without waiting for it and without being
         waited for; `all`: when every earlier line has ended, with all GPUs, and no later line begins before it has ended
name     of the log and in the status; letters, digits, `.`, `_` and `-`
limit    seconds after which the command is ended
command  for `sh -c`; `wait NAME` holds the lane until an earlier line has ended
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ALL = "all"
ENDED = ("done", "failed", "timed out")
"""States of lines that have ended. The others are `queued`, `running`, and `interrupted`, which is as good as queued."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_LANE = re.compile(r"(\d+)(\+?)")


class PlanError(ValueError):
    """A plan cannot be read. The message is one line."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a plan."""

    lane: str
    """Number of a GPU, or `all`."""
    beside: bool
    """`N+`."""
    name: str
    limit: float
    """Seconds."""
    command: str

    @property
    def awaited(self) -> str | None:
        """The line that `wait NAME` waits for; None: this is a command."""
        words = self.command.split()
        return words[1] if words[0] == "wait" and len(words) == 2 else None

    @property
    def written_lane(self) -> str:
        """As in the file."""
        return self.lane + ("+" if self.beside else "")


def parse(text: str) -> list[Line]:
    """The lines of a plan. Raises `PlanError` with the number of the first one that is wrong."""
    found: list[Line] = []
    for number, raw in enumerate(text.splitlines(), start=1):
        if raw.strip() and not raw.lstrip().startswith("#"):
            try:
                found.append(_line(raw, found))
            except PlanError as error:
                raise PlanError(f"line {number}: {error}") from None
    return found


def whole(text: str) -> str:
    """`text` without a last line that has no end yet: somebody may be writing it."""
    return text[: text.rfind("\n") + 1]


def _line(raw: str, before: Sequence[Line]) -> Line:
    parts = [part.strip() for part in raw.split("|", 3)]
    if len(parts) != 4 or not parts[3]:
        raise PlanError("not `lane | name | limit in seconds | command`")
    written, name, limit, command = parts
    lane = _LANE.fullmatch(written)
    if lane is None and written != ALL:
        raise PlanError(f"lane {written!r} is no number of a GPU, N+ or {ALL}")
    if not _NAME.fullmatch(name):
        raise PlanError(f"name {name!r} is not of letters, digits, '.', '_' and '-'")
    if any(line.name == name for line in before):
        raise PlanError(f"name {name!r} is there twice")
    try:
        seconds = float(limit)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise PlanError(f"limit {limit!r} is no number of seconds")
    line = Line(str(int(lane[1])) if lane else ALL, bool(lane and lane[2]), name, seconds, command)
    if command.split()[0] == "wait" and (line.awaited is None or all(line.awaited != one.name for one in before)):
        raise PlanError(f"{command!r}: `wait NAME` takes the name of an earlier line")
    return line


def startable(lines: Sequence[Line], states: Mapping[str, str]) -> list[Line]:
    """Lines that may start now, in order. `states`: by name; a line without one is queued."""
    free: list[Line] = []
    held: set[str] = set()  # lanes with a line that has not ended
    closed: set[str] = set()  # lanes with a line that has to come first
    open_before = False  # whether any earlier line has not ended
    for line in lines:
        state = states.get(line.name, "queued")
        if state in ENDED:
            continue
        if line.lane == ALL:
            if not open_before and state != "running":
                free.append(line)
            break
        open_before = True
        if state == "running":
            if not line.beside:
                held.add(line.lane)
            continue
        if line.lane in closed or (line.lane in held and not line.beside):
            if not line.beside:
                closed.add(line.lane)
            continue
        free.append(line)
        if not line.beside:
            held.add(line.lane)
    return free

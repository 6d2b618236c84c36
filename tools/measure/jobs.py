"""Commands as process groups: started with a log, and ended whole.

A command runs in a session of its own. What it starts may leave that session (Ray's processes do), so its processes are also followed by
their parents while they live, and by a mark in their environment, which stays when a parent is gone. All of this is read from /proc.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TextIO

MARK = "MEASURE_LINE"
"""Variable that every process of a command inherits; its value is that command's alone."""
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
FOLLOW_EVERY = 1.0
"""Seconds from one look at the descendants of a running command to the next."""

Process = tuple[int, int]
"""Pid, and when it began in ticks since boot: no other process ever has both."""


def processes() -> dict[int, tuple[int, int, int]]:
    """Pid to (parent, session, begin) of all processes but zombies."""
    found = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                # The name in parentheses may itself hold spaces and parentheses.
                fields = Path(entry.path, "stat").read_text(errors="replace").rpartition(")")[2].split()
            except OSError:  # it has ended meanwhile
                continue
            if fields[0] not in "ZX":
                found[int(entry.name)] = (int(fields[1]), int(fields[3]), int(fields[19]))
    return found


def family(mark: str, session: int, known: Iterable[Process] = ()) -> set[Process]:
    """Processes that live and belong to a command: in its session, with its mark, `known` from before, or descended from one of these."""
    alive = processes()
    known = set(known)
    found = {pid for pid, (_, sid, begun) in alive.items() if sid == session or (pid, begun) in known or _marked(pid, mark)}
    children: dict[int, list[int]] = {}
    for pid, (parent, _, _) in alive.items():
        children.setdefault(parent, []).append(pid)
    open_ends = list(found)
    while open_ends:
        for child in children.get(open_ends.pop(), ()):
            if child not in found:
                found.add(child)
                open_ends.append(child)
    return {(pid, alive[pid][2]) for pid in found if pid != os.getpid()}


def _marked(pid: int, mark: str) -> bool:
    try:
        return f"{MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # another user's, or it has ended
        return False


def send(members: Iterable[Process], number: int) -> None:
    """A signal to processes; those that have ended are left out."""
    for pid, begun in members:
        if begin_of(pid) == begun:
            try:
                os.kill(pid, number)
            except (ProcessLookupError, PermissionError):
                continue


def begin_of(pid: int) -> int | None:
    """When a process began, in ticks since boot; None: there is none."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19])
    except OSError:
        return None


class Job:
    """One command that runs. `look` is to be called again and again until it says that all of it has ended."""

    def __init__(
        self, command: str, log: Path, environment: Mapping[str, str], mark: str, limit: float, grace: float, folder: Path
    ) -> None:
        self.mark, self.limit, self.grace = mark, limit, grace
        self.begun = time.monotonic()
        self.why: str | None = None
        """Why it is being ended: `timed out` or `interrupted`; None: by itself."""
        self.exit: int | None = None
        self._log: TextIO = log.open("a")
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**environment, MARK: mark},
            cwd=folder,
            start_new_session=True,
        )
        self._stage = -1  # last of ENDING that was sent
        self._next = 0.0
        self._known: set[Process] = set()
        self._followed = 0.0

    @property
    def pid(self) -> int:
        """Of the shell, which is the number of the session and of the group as well."""
        return self._process.pid

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self.begun

    def end(self, why: str) -> None:
        """Begin to end it: SIGINT to its session now, SIGTERM and SIGKILL each `grace` seconds later to all of its processes."""
        if self.why is None and self.exit is None:
            self.why = why
            self._escalate(0)

    def look(self) -> bool:
        """Whether all of it has ended; ends what is over its limit, and what the command has left behind."""
        now = time.monotonic()
        if self.exit is None:
            self.exit = self._process.poll()
            if self.exit is None:
                if now - self._followed >= FOLLOW_EVERY:
                    self._follow()
                if self.why is None and self.seconds > self.limit:
                    self.end("timed out")
                elif self._stage >= 0 and now >= self._next:
                    self._escalate(min(self._stage + 1, len(ENDING) - 1))
                return False
            if self.why is None:
                self._next = now  # what is left behind has nothing more to do; what is being ended keeps its time for that
        if not self._follow():
            self._log.close()
            return True
        if now >= self._next:
            self._escalate(max(1, min(self._stage + 1, len(ENDING) - 1)))
        return False

    def _follow(self) -> set[Process]:
        self._followed = time.monotonic()
        self._known = family(self.mark, self.pid, self._known)
        return self._known

    def _escalate(self, stage: int) -> None:
        self._stage = stage
        self._next = time.monotonic() + self.grace
        members = self._follow()
        if stage == 0:  # as Ctrl-C in a terminal: what has a session of its own is ended by who started it, as long as that works
            alive = processes()
            members = {(pid, begun) for pid, begun in members if pid in alive and alive[pid][1] == self.pid}
        send(members, ENDING[stage])


def end_left_over(mark: str, session: int, grace: float) -> int:
    """End what a command of a queue that was killed has left running; returns how many processes that were.

    The number of the session counts only where a process in it has the mark: it may be anybody's on another machine.
    """
    alive = processes()
    if not any(sid == session and _marked(pid, mark) for pid, (_, sid, _) in alive.items()):
        session = -1
    left = family(mark, session)
    count = len(left)
    for number in ENDING:
        deadline = time.monotonic() + grace
        send(left, number)
        while left and time.monotonic() < deadline:
            time.sleep(0.05)
            left = family(mark, session, left)
    return count

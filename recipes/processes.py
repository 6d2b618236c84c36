"""Which process of a job ended, and how: watched by the driver while the job runs, told in one line.

Ray says that an actor is gone, not what it was to the job nor how it ended. What it was stands in its name, under which verl started it.
How it ended only the kernel knows: processes on the driver's machine are held by a pidfd, which newer kernels (from Linux 6.15) answer
with the exit status after the process is gone. On older ones and on other nodes that part stays open. The last error that the process
printed itself comes from its log. An engine's own process is no actor: its server waits for it and leaves a note in the cluster's store.

A step in which nobody asks a process that died goes on for minutes, and a rank that waits in a collective for one that is gone may wait
for ever. So the job is given only `GRACE` seconds to end by itself, with its own error, once a process is missing.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path
from typing import Any

import ray
from ray._private import state

from samebits.rollout import ended

GRACE = 5.0
"""Seconds that a job has to end by itself after one of its processes ended."""
_ERROR = re.compile(
    r"(?:^|\s)((?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Mismatch): .+|Fatal Python error: .+|\*\*\* SIG[A-Z]+ received.*)"
)
_SERVER = re.compile(r"server_(\d+)_(\d+)")
_WORKER = re.compile(r"WorkerDict_(\d+):(\d+)$")
_ACTORS = {
    "TaskRunner": "the training loop",
    "RewardLoopWorker": "the reward worker",
}
_UNEXPECTED = ("WORKER_DIED", "NODE_DIED", "MEMORY")


def role(name: str, class_name: str, gpus_per_node: int) -> str:
    """What an actor of verl's is to the job: `trainer rank 3`, `server of engine replica 0`."""
    if found := _WORKER.search(name):
        return f"trainer rank {int(found[1]) * gpus_per_node + int(found[2])}"
    if found := _SERVER.search(name):
        return f"server of engine replica {found[1]}" + (f" (its node {found[2]})" if int(found[2]) else "")
    short = class_name.rpartition(".")[2]
    return _ACTORS.get(short, short)


def last_error(path: Path) -> str | None:
    """The last line of a process's log that states an error; None where there is none."""
    found = None
    with contextlib.suppress(OSError):
        for line in path.read_text(errors="replace").splitlines():
            if match := _ERROR.search(line):
                found = match[1].strip()
    return None if found is None else found[:300]


class Watch:
    """The processes of the job that this driver started. `logs`: Ray's folder of logs on this node."""

    def __init__(self, logs: Path, gpus_per_node: int) -> None:
        self.logs, self.gpus_per_node = logs, gpus_per_node
        self.job = ray.get_runtime_context().get_job_id()
        self.node = ray.get_runtime_context().get_node_id()
        self._held: dict[str, int] = {}
        """Actor to pidfd, of actors on this node."""
        self._since: float | None = None
        self._actors: list[dict[str, Any]] = []

    def overdue(self) -> bool:
        """Look at all processes; whether one has been missing for longer than the job's grace. Asked about once a second."""
        self._look()
        if self._since is None and (self._ended() or ended.notes(self.job)):
            self._since = time.monotonic()
        return self._since is not None and time.monotonic() - self._since > GRACE

    def told(self) -> str | None:
        """One line on the process that ended first, or None when none did but in order."""
        self._look()
        # An engine without its server ends as well, and a server without its engine does not: the note is the cause where there is one.
        notes = ended.notes(self.job)
        if notes:
            return notes[0]
        first = self._ended()
        return self._line(first[0]) if first else None

    def speaker(self, text: str) -> str | None:
        """The role of the actor in which an error arose that Ray brought as `text`: the innermost one of its trace."""
        places = re.findall(r"ray::\S+ \(pid=(\d+), ip=([^,)]+)", text)
        for actor in self._actors if places else ():
            at = (str(actor["Pid"]), actor["Address"]["IPAddress"])
            if at == places[-1] and not actor["ActorClassName"].endswith("TaskRunner"):
                return self._role(actor)
        return None

    def close(self) -> None:
        """Let go of the processes."""
        for handle in self._held.values():
            os.close(handle)
        self._held.clear()

    def _look(self) -> None:
        self._actors = [a for a in state.state.actor_table(None).values() if a["JobID"] == self.job]
        for actor in self._actors:
            here = actor["Address"]["NodeID"] == self.node
            if here and actor["State"] == "ALIVE" and actor["Pid"] and actor["ActorID"] not in self._held:
                handle = ended.hold(actor["Pid"])
                if handle is not None:
                    self._held[actor["ActorID"]] = handle

    def _ended(self) -> list[dict[str, Any]]:
        """Actors that ended without being asked to, the first one first."""
        dead = [a for a in self._actors if a["State"] == "DEAD" and _reason(a["DeathCause"]) in _UNEXPECTED]
        return sorted(dead, key=lambda a: a["EndTime"])

    def _role(self, actor: dict[str, Any]) -> str:
        return role(actor["Name"], actor["ActorClassName"], self.gpus_per_node)

    def _line(self, actor: dict[str, Any]) -> str:
        who = f"{self._role(actor)} (pid {actor['Pid']})"
        reason = _reason(actor["DeathCause"])
        if reason == "MEMORY":
            return f"{who} was ended by Ray's memory monitor, which keeps its node from running out of memory"
        if reason == "NODE_DIED":
            return f"{who} is gone with its node {actor['Address']['IPAddress']}"
        said, log = None, None
        for path in sorted(self.logs.glob(f"worker-*-{actor['Pid']}.err")):
            said, log = last_error(path), path
        where = "" if actor["Address"]["NodeID"] == self.node else f" on node {actor['Address']['IPAddress']}"
        line = f"{who}{where} {ended.words(ended.status(self._held.get(actor['ActorID'])))}"
        if said:
            return f"{line}, its last error: {said} (log: {log})"
        return f"{line}, without an error of its own" + (f" (log: {log})" if log else "")


def _reason(cause: Any) -> str:
    """Why Ray lost an actor, in the words of its protocol."""
    if cause.HasField("oom_context"):
        return "MEMORY"
    if not cause.HasField("actor_died_error_context"):
        return "OTHER"  # it never started: its creator gets that error
    context = cause.actor_died_error_context
    return context.DESCRIPTOR.enum_types_by_name["Reason"].values_by_number[context.reason].name

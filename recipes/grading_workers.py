"""Symbolic comparison with math-verify, in processes that can be killed.

Computer algebra on what a model wrote can run for ever or eat the memory (`10^{10^{10}}`, a nested power, a sum that does not end), and
math-verify's own limit is `signal.alarm`, which raises in a thread, where verl calls its reward functions. So each comparison runs in a
worker process: over its time limit the kernel or the parent kills the worker, and the next comparison starts a new one. The answer then
counts as not equal; `SymbolicPool.failures` says how often that was.

A worker also ends when its parent is gone: by the end of file on stdin and, should it be computing then, by the limit.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import logging
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from typing import IO

_MODULE = "samebits.recipes.grading_workers"
LIMIT_S = 5.0
"""Limit of one comparison in seconds of CPU time: a busy machine turns no right answer into a wrong one."""
WALL_FACTOR = 6.0
"""Wall-clock limit of one comparison, in units of its CPU limit: for what waits and does not compute."""
START_S = 120.0
"""Wall-clock limit of a worker's start (it imports sympy), in seconds."""
MEMORY_BYTES = 2 << 30
"""Address space of a worker."""


class GradingError(RuntimeError):
    """Comparison cannot work at all here (not: an answer could not be compared)."""


class _Worker:
    """One process that answers `[answer, gold]` lines with `true` or `false` lines."""

    def __init__(self) -> None:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", _MODULE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
        )
        self.buffer = b""
        if self._line(time.monotonic() + START_S) != b"ready":
            self.kill()
            raise GradingError(f"worker for symbolic comparison did not start ({sys.executable} -m {_MODULE})")

    def equal(self, answer: str, gold: str, limit_s: float) -> bool | None:
        """The verdict; None when there was none in time or the process died. The worker is dead then."""
        try:
            self.process.stdin.write(json.dumps([answer, gold, limit_s]).encode() + b"\n")
            self.process.stdin.flush()
            line = self._line(time.monotonic() + WALL_FACTOR * limit_s)
        except (BrokenPipeError, OSError):
            line = None
        if line is None:
            self.kill()
            return None
        return json.loads(line)

    def _line(self, deadline: float) -> bytes | None:
        out: IO[bytes] = self.process.stdout
        while b"\n" not in self.buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([out], [], [], left)[0]:
                return None
            chunk = os.read(out.fileno(), 65536)
            if not chunk:
                return None
            self.buffer += chunk
        line, _, self.buffer = self.buffer.partition(b"\n")
        return line

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()


class SymbolicPool:
    """Up to `workers` worker processes, started when first needed; `equal` may be called from any number of threads."""

    def __init__(self, workers: int = 2, limit_s: float = LIMIT_S) -> None:
        if workers < 1 or limit_s <= 0:
            raise ValueError(f"a pool needs at least one worker and a positive limit, not {workers} and {limit_s} s")
        self.workers = workers
        self.limit_s = limit_s
        self.failures = 0
        """Comparisons that ended without a verdict: over the limit, or the process died."""
        self._slots: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(workers):
            self._slots.put(None)
        self._lock = threading.Lock()

    def equal(self, answer: str, gold: str) -> bool:
        """Whether both are the same expression. False too when there was no verdict within the limit. Raises `GradingError`."""
        worker = self._slots.get()
        try:
            worker = worker or _Worker()
            verdict = worker.equal(answer, gold, self.limit_s)
            if verdict is None:
                worker = None
                with self._lock:
                    self.failures += 1
        except GradingError:
            worker = None
            raise
        finally:
            self._slots.put(worker)
        return bool(verdict)

    def close(self) -> None:
        """End the workers; the pool can be used again after that."""
        held = [self._slots.get() for _ in range(self.workers)]
        for worker in held:
            if worker is not None:
                worker.kill()
            self._slots.put(None)


@functools.cache
def _shared(pid: int) -> SymbolicPool:
    pool = SymbolicPool()
    atexit.register(pool.close)
    return pool


def shared_pool() -> SymbolicPool:
    """The pool of this process (a forked child gets its own)."""
    return _shared(os.getpid())


def _equal(answer: str, gold: str) -> bool:
    from latex2sympy2_extended.latex2sympy2 import NormalizationConfig, latex2sympy, normalize_latex
    from math_verify import verify

    rules = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False)
    try:
        have, want = (latex2sympy(normalize_latex(text, rules)) for text in (answer, gold))
        # Gold first: math-verify is not symmetric. Rounding at 12 digits and not at its 6: 0.333333 is not 1/3.
        return bool(verify(want, have, float_rounding=12, numeric_precision=50, timeout_seconds=None, raise_on_error=True))
    except MemoryError:
        raise
    except Exception:  # whatever the parser, sympy or the comparison raise on such text: not equal
        return False


def _serve() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    logging.disable(logging.CRITICAL)
    verdicts = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a stray print is no verdict
    _equal(r"\frac{2}{4}", r"\frac{1}{2}")
    print("ready", file=verdicts, flush=True)
    for line in sys.stdin:
        answer, gold, limit_s = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, limit_s)  # CPU time; nobody handles its signal, so the kernel ends the process
        verdict = _equal(answer, gold)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(verdict), file=verdicts, flush=True)


if __name__ == "__main__":
    _serve()

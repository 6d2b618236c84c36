"""Comparisons over random cases as commands: a seed, a number of cases, all sets of them or one, in this process or in several.

Most of the time is that of compiling kernels, which a process does one after the other, so that several end sooner. What is found is told
set by set; an interruption ends with what was compared until then.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple

import torch

INTERRUPTED = 130


class Finding(NamedTuple):
    """What was compared, and what differed first."""

    cases: int
    bytes: int
    comparisons: int  # over all cases: a tensor of a case, in a batch
    least: int  # comparisons of the case that had the fewest
    wrong: tuple[str, ...]  # about each set with a difference


Check = Callable[[int, int, int], Finding]
"""Seed, number of cases and number of a set to what is found in that set. Several processes want a function of a module."""


def summary(what: str, findings: Sequence[Finding], tell: Callable[[str], None]) -> Finding:
    """One finding of several sets; what was compared is told in a line."""
    wrong = tuple(line for f in findings for line in f.wrong)
    cases, size, compared = (sum(getattr(f, name) for f in findings) for name in ("cases", "bytes", "comparisons"))
    least = min((f.least for f in findings), default=0)
    compared_of = f"at least {least} comparisons of each, {size} bytes compared"
    tell(f"{what}: {cases} cases in {len(findings)} sets, {compared_of}, {len(wrong)} sets differ")
    return Finding(cases, size, compared, least, wrong)


def again(module: str, seed: int, cases: int, number: int) -> str:
    """The command that compares a set alone, to follow what is wrong with it."""
    return f"\n  again alone: python -m tests.support.{module} --seed {seed} --cases {cases} --set {number}"


def main(what: str, sets: Callable[[int], int], check: Check, argv: list[str] | None = None) -> int:
    """Exit code: 0 nothing differs, 1 something does, 2 there is no GPU, 130 interrupted. `sets`: how many sets so many cases are."""
    parser = argparse.ArgumentParser(description=f"Compare {what} of engine and trainer over random cases, bit for bit.")
    parser.add_argument("--seed", type=int, default=None, help="default: one of the clock's, which is printed")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--set", type=int, default=None, help="only the set of this number")
    parser.add_argument("--jobs", type=int, default=1, help="processes, each with the GPU memory of a set")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print(f"samebits: the comparison of {what} needs a CUDA GPU", file=sys.stderr)
        return 2
    seed = time.time_ns() % 1_000_000 if args.seed is None else args.seed
    numbers = range(sets(args.cases)) if args.set is None else [args.set]
    began, findings, ended = time.monotonic(), [], True
    try:
        for found in _found(check, seed, args.cases, numbers, args.jobs):
            findings.append(found)
            for line in found.wrong:
                _tell(line)
            _tell(f"{len(findings)} of {len(numbers)} sets compared after {time.monotonic() - began:.0f} s")
    except (KeyboardInterrupt, BrokenProcessPool) as error:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the line that says what was found is still to come
        ended = False
        why = "a process is gone" if isinstance(error, BrokenProcessPool) else "interrupted"
        _tell(f"{why}: {len(findings)} of {len(numbers)} sets were compared")
    wrong = summary(f"{what}, seed {seed}", findings, _tell).wrong
    return INTERRUPTED if not ended else 1 if wrong else 0


def _tell(line: str) -> None:
    print(line, flush=True)


def _found(check: Check, seed: int, cases: int, numbers: Sequence[int], jobs: int) -> Iterator[Finding]:
    """What each set comes to, as soon as it is known."""
    if jobs == 1:
        for number in numbers:
            yield check(seed, cases, number)
        return
    # A process that has a CUDA context cannot be forked.
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _end_silently)
    # Ctrl-C reaches the workers too, also while they import: they are started with it ignored, which they inherit. `submit` starts them.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        asked = [pool.submit(check, seed, cases, number) for number in numbers]
    finally:
        signal.signal(signal.SIGINT, handler)
    try:
        for done in as_completed(asked):
            yield done.result()
    except BaseException:
        for worker in multiprocessing.active_children():
            worker.terminate()  # one that has not heard of it yet
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _end_silently() -> None:
    """Of a worker: Ctrl-C reaches it too, and what there is to say the command says."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))

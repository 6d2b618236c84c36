"""Worker processes of symbolic comparison: killed at the limit, replaced, gone with their parent."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from samebits.recipes import grading_workers
from samebits.recipes.grading import grade, grade_many
from samebits.recipes.grading_workers import GradingError, SymbolicPool

from . import battery

NEVER = "9^{9^{9^{9}}}"


def alive(pid: int) -> bool:
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def held(pool: SymbolicPool):
    return [w for w in pool._slots.queue if w is not None]


@pytest.fixture()
def pool():
    pool = SymbolicPool(workers=1, limit_s=2.0)
    yield pool
    pool.close()


def test_a_comparison_that_does_not_end_is_killed_and_the_next_one_works(pool):
    pool.limit_s = 30.0
    assert pool.equal("2^{10}", "1024") and pool.failures == 0
    first = held(pool)[0].process
    pool.limit_s = 0.5
    assert pool.equal(NEVER, "34") is False
    assert pool.failures == 1 and not alive(first.pid) and not held(pool)
    pool.limit_s = 30.0
    assert pool.equal(r"\sqrt{12}", r"2\sqrt{3}") is True
    assert pool.equal(r"\sqrt{12}", r"3\sqrt{2}") is False
    assert held(pool)[0].process.pid != first.pid and pool.failures == 1


def test_a_worker_that_waits_is_killed_by_the_clock(pool, monkeypatch):
    pool.limit_s = 30.0
    assert pool.equal("1+1", "2")
    process = held(pool)[0].process
    process.send_signal(signal.SIGSTOP)  # it spends no CPU time
    monkeypatch.setattr(grading_workers, "WALL_FACTOR", 0.01)
    assert pool.equal("1+1", "2") is False and pool.failures == 1 and not alive(process.pid)


def test_the_kernel_ends_a_worker_over_its_limit_when_nobody_waits_for_it():
    worker = grading_workers._Worker()
    worker.process.stdin.write(json.dumps([NEVER, "34", 0.3]).encode() + b"\n")
    worker.process.stdin.flush()
    assert worker.process.wait(60) == -signal.SIGPROF
    worker.kill()


def test_responses_that_hang_a_parser_are_wrong(pool):
    pool.limit_s = 0.5
    rows = [c for c in battery.cases() if c["cls"] == "hang"]
    assert not any(g.correct for g in grade_many([c["text"] for c in rows], [c["gold"] for c in rows], pool=pool))
    assert 1 <= pool.failures <= len(rows)


def test_it_works_off_the_main_thread(pool):
    """math-verify's own time limit raises there."""
    pool.limit_s = 30.0
    got = []
    thread = threading.Thread(target=lambda: got.append(grade("Answer: 2 \\cdot 17", "34", pool=pool).correct))
    thread.start()
    thread.join(120)
    assert got == [True]


def test_a_worker_that_died_is_replaced(pool):
    pool.limit_s = 30.0
    assert pool.equal("1+1", "2")
    held(pool)[0].process.kill()
    held(pool)[0].process.wait()
    assert pool.equal("1+1", "2") is False and pool.failures == 1
    assert pool.equal("1+1", "2") is True


def test_a_worker_that_cannot_start_is_an_error_and_no_verdict(pool, monkeypatch):
    monkeypatch.setattr(grading_workers, "_MODULE", "samebits.recipes.no_such_module")
    with pytest.raises(GradingError, match="did not start"):
        pool.equal("1+1", "2")
    monkeypatch.undo()
    pool.limit_s = 30.0
    assert pool.equal("1+1", "2") is True


def test_close_ends_the_workers(pool):
    pool.limit_s = 30.0
    pool.equal("1+1", "2")
    pid = held(pool)[0].process.pid
    pool.close()
    assert not alive(pid) and not held(pool)


def test_no_worker_outlives_its_parent():
    program = (
        "import os, signal; from samebits.recipes.grading_workers import SymbolicPool as P; p = P(1, 30.0); p.equal('1+1', '2');"
        "print(p._slots.queue[0].process.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=os.environ)
    pid = int(out.stdout)
    deadline = time.monotonic() + 120
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(pid)


@pytest.mark.parametrize(("workers", "limit"), [(0, 1.0), (1, 0.0)])
def test_pool_needs_a_worker_and_a_limit(workers, limit):
    with pytest.raises(ValueError, match="at least one worker and a positive limit"):
        SymbolicPool(workers, limit)

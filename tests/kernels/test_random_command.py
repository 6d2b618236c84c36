"""The commands that compare random cases: progress, processes, interruptions; what differs is status 1, a machine without a GPU 2."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from tests.support import random_attention, random_command, random_experts
from tests.support.random_command import Finding

SETS = 5


def check(seed: int, cases: int, number: int) -> Finding:
    """Two cases a set; the one of number 3 differs for seed 7. Set 4 of seed 8 ends its process, set 2 of seed 9 never ends."""
    if (seed, number) == (8, 4):
        os._exit(3)
    if seed == 9 and number >= 2:
        time.sleep(600)
    return Finding(2, 10, 6, 3, ("case 6 differs",) if (seed, number) == (7, 3) else ())


def main(*words: str) -> int:
    """The command over `check`."""
    torch.cuda.is_available = lambda: True
    return random_command.main("some", lambda cases: -(-cases // 2), check, ["--cases", str(2 * SETS), *words])


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", torch.cuda.is_available)  # `main` changes it


@pytest.mark.parametrize("module", [random_attention, random_experts])
def test_no_gpu_is_one_line(module, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert module.main([]) == 2
    said = capsys.readouterr().err
    assert said.startswith("samebits: ") and said.endswith(" needs a CUDA GPU\n") and said.count("\n") == 1


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_every_set_is_compared_and_told_and_a_difference_is_status_1(jobs, capsys):
    assert main("--seed", "5", "--jobs", jobs) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split(" after ")[0] for line in said[:-1]] == [f"{n} of 5 sets compared" for n in range(1, 6)]
    assert said[-1] == "some, seed 5: 10 cases in 5 sets, at least 3 comparisons of each, 50 bytes compared, 0 sets differ"
    assert main("--seed", "7", "--jobs", jobs) == 1
    said = capsys.readouterr().out.splitlines()
    assert said.count("case 6 differs") == 1 and said[-1].endswith("1 sets differ")


def test_one_set_alone(capsys):
    assert main("--seed", "7", "--set", "3") == 1 and main("--seed", "7", "--set", "2") == 0
    assert capsys.readouterr().out.count("2 cases in 1 sets") == 2


def test_a_process_that_dies_is_told_with_what_was_compared(capsys):
    assert main("--seed", "8", "--jobs", "2") == random_command.INTERRUPTED
    said = capsys.readouterr().out.splitlines()
    assert said[-2].startswith("a process is gone: ") and said[-1].endswith("0 sets differ")


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_an_interruption_ends_at_once_with_what_was_compared(jobs):
    """Ctrl-C goes to all processes; the queue's at the end of a limit does, too."""
    # What runs in a shell's background ignores SIGINT, and so does whatever it starts.
    command = f"""
import signal
from tests.kernels.test_random_command import main
signal.signal(signal.SIGINT, signal.default_int_handler)
raise SystemExit(main("--seed", "9", "--jobs", "{jobs}"))
"""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    with subprocess.Popen([sys.executable, "-W", "ignore", "-c", command], **options) as process:
        for n in (1, 2):
            assert process.stdout.readline().startswith(f"{n} of 5 sets compared")
        os.killpg(process.pid, signal.SIGINT)
        said = process.communicate(timeout=60)[0].splitlines()
    assert process.returncode == random_command.INTERRUPTED
    assert said[0].endswith(": 2 of 5 sets were compared"), said
    assert said[1:] == ["some, seed 9: 4 cases in 2 sets, at least 3 comparisons of each, 20 bytes compared, 0 sets differ"]


@pytest.mark.parametrize("module", [random_attention, random_experts])
def test_sets_that_the_command_asks_for_are_all_there_are(module, monkeypatch):
    """Set by set, as the command has it, every case has its comparisons once."""
    asked = []
    monkeypatch.setattr(random_command, "main", lambda what, sets, check, argv: asked.append((sets, check)))
    module.main([])
    ((sets, check),) = asked
    assert check is module.on_gpu and [sets(n) for n in (1, 64, 65, 1000)] == [1, 1, 2, 16]

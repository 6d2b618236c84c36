"""The queue with real processes: lanes, limits, whole groups, kills, restarts, and lines that are appended while it runs.

Commands wait for files and not for times, so that nothing depends on how fast the machine is.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.measure import jobs, state
from tools.measure.plan import ALL, ENDED, Line, PlanError, parse, startable, whole
from tools.measure.queue import Queue

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 60.0
"""Seconds after which what should have happened has not."""


def until(what, why: str = "nothing came of it") -> None:
    deadline = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < deadline, why
        time.sleep(0.02)


class Bench:
    """A plan, a folder of results, and queues on them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.plan, self.out = folder, folder / "plan.txt", folder / "out"
        self.started: list[subprocess.Popen] = []

    def write(self, *lines: str) -> None:
        self.plan.write_text("".join(f"{line}\n" for line in lines))

    def append(self, line: str) -> None:
        with self.plan.open("a") as file:
            file.write(f"{line}\n")

    def start(self, *options: str, gpus: str = "0,1", grace: float = 1.0, **how) -> subprocess.Popen:
        command = [
            sys.executable,
            "-m",
            "tools.measure.queue",
            str(self.plan),
            str(self.out),
            "--gpus",
            gpus,
            "--grace",
            str(grace),
            *options,
        ]
        environment = {**os.environ, "HERE": str(self.folder)}
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, **how)
        self.started.append(process)
        return process

    def run(self, *options: str, gpus: str = "0,1", grace: float = 1.0) -> tuple[int, str]:
        process = self.start(*options, gpus=gpus, grace=grace)
        said, _ = process.communicate(timeout=PATIENCE)
        return process.returncode, said

    def ask(self, *options: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "tools.measure.queue", *options, str(self.out)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
        return done.returncode, done.stdout + done.stderr

    def lines(self) -> dict:
        return json.loads((self.out / state.FILE).read_text())["lines"] if (self.out / state.FILE).is_file() else {}

    def states(self) -> dict[str, str]:
        return {name: record["state"] for name, record in self.lines().items()}

    def log(self, name: str) -> str:
        return state.log_of(self.out, name).read_text()

    def there(self, name: str) -> bool:
        return (self.folder / name).exists()

    def touch(self, name: str) -> None:
        (self.folder / name).touch()

    def number(self, name: str) -> int:
        """A pid that a command has written."""
        until(lambda: self.there(name) and (self.folder / name).read_text().endswith("\n"))
        return int((self.folder / name).read_text())

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        for name, record in self.lines().items():
            assert "mark" not in record or jobs.end_left_over(record["mark"], record["session"], 1.0) == 0, name


@pytest.fixture
def bench(tmp_path):
    made = Bench(tmp_path)
    yield made
    made.close()


def wait_for(name: str) -> str:
    return f'while ! test -e "$HERE/{name}"; do sleep 0.05; done'


def alive(pid: int) -> bool:
    return pid in jobs.processes()


def test_lanes_have_their_gpu_and_all_has_every_one(bench):
    told = 'echo "gpu $CUDA_VISIBLE_DEVICES"'
    bench.write(
        f"0 | a | 60 | {told}", "# said", f"1 | b | 60 | {told}; echo 'one | two'", "", f"all | c | 60 | {told}", f"0+ | d | 60 | {told}"
    )
    code, said = bench.run(gpus="4,7")
    assert code == 0, said
    for name, gpus in {"a": "4", "b": "7", "c": "4,7", "d": "4"}.items():
        assert f"gpu {gpus}\n" in bench.log(name)
    assert "one | two\n" in bench.log("b"), "a command may hold bars"
    assert set(bench.states().values()) == {"done"} and [r["lane"] for r in bench.lines().values()] == ["0", "1", "all", "0+"]


def test_a_lane_is_in_order_others_go_on_and_beside_waits_for_nobody(bench):
    bench.write(
        f"0 | first | 60 | {wait_for('go')}; touch $HERE/first",
        "0 | second | 60 | test -e $HERE/first",
        "0+ | third | 60 | test -e $HERE/first",
        f"1 | other | 60 | {wait_for('beside')}; touch $HERE/go",
        "1+ | beside | 60 | touch $HERE/beside",
        "all | last | 60 | test -e $HERE/first -a -e $HERE/beside",
    )
    code, said = bench.run()
    assert code == 0 and set(bench.states().values()) == {"done"}, (said, bench.states())


def test_wait_holds_its_lane_until_a_line_of_another_has_ended(bench):
    bench.write(
        f"0 | a | 60 | {wait_for('go')}; touch $HERE/a; exit 1",
        "1 | w | 60 | wait a",
        "1 | b | 60 | test -e $HERE/a",
        "0+ | c | 60 | touch $HERE/go",
    )
    code, said = bench.run()
    assert bench.states() == {"a": "failed", "w": "done", "b": "done", "c": "done"} and code == 1, said


def test_a_wait_that_is_too_long_is_given_up(bench):
    bench.write(f"0 | a | 60 | {wait_for('go')}", "1 | w | 0.2 | wait a", "1 | b | 60 | touch $HERE/go")
    assert bench.run()[0] == 1 and bench.states() == {"a": "done", "w": "timed out", "b": "done"}


AWAY = """import os, subprocess, sys
environment = {} if sys.argv[2] == "waits" else None
deaf = "trap '' INT TERM; exec sleep 600"
child = subprocess.Popen(["/bin/sh", "-c", deaf], start_new_session=True, env=environment)
with open(sys.argv[1], "w") as file:
    print(child.pid, file=file)
if sys.argv[2] == "waits":
    child.wait()
"""


def test_a_command_over_its_limit_is_ended_with_all_that_it_started(bench):
    (bench.folder / "deaf.sh").write_text("trap '' INT TERM; echo $$ > $HERE/deaf; exec sleep 600\n")
    (bench.folder / "away.py").write_text(AWAY)
    away = "python $HERE/away.py $HERE/{0} {0} &"
    bench.write(f"0 | a | 2 | sh $HERE/deaf.sh & {away.format('leaves')} {away.format('waits')} sleep 600", "0 | b | 60 | echo went on")
    code, said = bench.run(grace=0.3)
    assert code == 1 and bench.states() == {"a": "timed out", "b": "done"}, said
    assert not alive(bench.number("deaf")), "a deaf child outlived its limit"
    assert not alive(bench.number("leaves")), "a child in a session of its own, whose parent is gone, outlived its limit"
    assert not alive(bench.number("waits")), "a child in a session of its own, without the mark, outlived its limit"
    assert bench.lines()["a"]["exit"] in (-signal.SIGINT, 128 + signal.SIGINT), "the shell's way to say what ended it"


def test_a_command_has_a_session_of_its_own(bench):
    """So that Ctrl-C in a terminal reaches the queue alone, which ends commands in its own way."""
    bench.write('0 | a | 60 | echo "$$ is"; python -c "import os; print(os.getsid(0), \'is\')"')
    assert bench.run()[0] == 0
    first, second = (row.split()[0] for row in bench.log("a").splitlines() if row.endswith(" is"))
    assert first == second


def test_what_a_command_leaves_behind_ends_with_it(bench):
    bench.write("0 | a | 60 | sleep 600 & echo $! > $HERE/left", "0 | b | 60 | true")
    code, said = bench.run(grace=0.3)
    assert code == 0 and not alive(bench.number("left")), said


def test_an_interrupt_ends_everything_and_the_next_start_goes_on(bench):
    hold = "echo $$ > $HERE/{0}; echo began {0}; test -e $HERE/go || exec sleep 600"
    bench.write(
        "0 | a | 60 | echo once >> $HERE/a",
        f"0 | b | 60 | {hold.format('b')}",
        f"1 | c | 60 | {hold.format('c')}",
        "1 | d | 60 | wait b",
        "all | e | 60 | true",
    )
    queue = bench.start()
    pids = [bench.number("b"), bench.number("c")]
    until(lambda: bench.states().get("a") == "done")
    assert "a queue runs" in bench.ask("--status")[1]
    queue.send_signal(signal.SIGINT)
    assert queue.wait(timeout=PATIENCE) == 130 and not any(map(alive, pids))
    assert bench.states() == {"a": "done", "b": "interrupted", "c": "interrupted"}
    code, said = bench.ask("--status")
    assert code == 0 and "was interrupted" in said and "SIGINT" in said and "began b" in said
    assert [row.split()[2] for row in said.splitlines()[1:]] == ["done", "interrupted", "interrupted", "queued", "queued"]
    bench.touch("go")
    assert bench.run()[0] == 0 and set(bench.states().values()) == {"done"}
    assert (bench.folder / "a").read_text() == "once\n", "what was done was repeated"
    assert bench.lines()["b"]["attempts"] == 2 and bench.lines()["a"]["attempts"] == 1


KEEPS = """import os, pathlib, signal, sys, time
here = pathlib.Path(sys.argv[1])

def keep(number, frame):
    time.sleep(0.5)
    (here / "kept").touch()
    sys.exit(1)

signal.signal(signal.SIGINT, keep)
(here / "pid").write_text(f"{os.getpid()}\\n")
while True:
    time.sleep(0.05)
"""


def test_what_is_interrupted_keeps_its_time_when_its_shell_is_gone(bench):
    """SIGINT ends the shell at once, but what it has started may be writing down how far it is: SIGTERM must not come early."""
    (bench.folder / "keeps.py").write_text(KEEPS)
    bench.write("0 | a | 60 | trap 'exit 1' INT; python $HERE/keeps.py $HERE & wait")
    queue = bench.start(grace=20)
    pid = bench.number("pid")
    queue.send_signal(signal.SIGTERM)
    assert queue.wait(timeout=PATIENCE) == 130 and bench.there("kept") and not alive(pid)
    assert bench.states() == {"a": "interrupted"} and bench.lines()["a"]["exit"] == 1


def test_a_queue_that_was_killed_leaves_a_whole_status_and_the_next_one_ends_what_it_left(bench):
    bench.write("0 | a | 60 | true", "0 | b | 60 | echo $$ >> $HERE/b; test -e $HERE/go || exec sleep 600")
    queue = bench.start()
    pid = bench.number("b")
    queue.kill()
    queue.wait()
    assert alive(pid), "it is the next queue that ends it"
    assert bench.states() == {"a": "done", "b": "running"}
    said = bench.ask("--status")[1]
    assert "was killed" in said and "interrupted" in said
    bench.touch("go")
    code, said = bench.run()
    assert code == 0 and "b: ended 1 processes" in said and not alive(pid)
    assert bench.lines()["b"]["attempts"] == 2 and bench.lines()["a"]["attempts"] == 1


def test_a_session_of_somebody_else_is_left_alone(tmp_path):
    stranger = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        assert jobs.end_left_over("no such mark", stranger.pid, 0.1) == 0 and stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_lines_that_are_appended_are_taken_up_and_wrong_ones_are_said(bench):
    bench.write(f"0 | a | 60 | {wait_for('go')}")
    queue = bench.start()
    until(lambda: bench.states().get("a") == "running")
    with bench.plan.open("a") as file:
        file.write("1 | b | 60 | touch $HERE/ha")
        file.flush()
        time.sleep(0.5)  # time enough to take it
        bench.append("lf")  # only now is the line whole
    until(lambda: bench.states().get("b") == "done")
    assert bench.there("half") and not bench.there("ha") and bench.states()["a"] == "running"
    bench.append("2 | far | 60 | true")
    until(lambda: "far wants lane 2" in bench.ask("--status")[1])
    bench.write(f"0 | a | 60 | {wait_for('go')}", "1 | b | 60 | touch $HERE/half", "1 | c | 60 | touch $HERE/go")
    assert queue.wait(timeout=PATIENCE) == 0
    assert bench.states() == {"a": "done", "b": "done", "c": "done"}


def test_half_a_line_is_not_taken():
    assert whole("0 | a | 1 | b\n0 | c | 1 | rm -r /tmp") == "0 | a | 1 | b\n" and whole("x") == "" and whole("a\n") == "a\n"


def test_what_failed_stays_so_until_it_is_asked_for_again(bench):
    bench.write("0 | a | 60 | echo x >> $HERE/a; test -e $HERE/good", "0 | b | 60 | echo x >> $HERE/b")
    assert bench.run()[0] == 1 and bench.run()[0] == 1
    bench.touch("good")
    assert bench.run("--again-failed")[0] == 0 and bench.run("--again", "b")[0] == 0
    assert (bench.folder / "a").read_text() == "x\n" * 2 and (bench.folder / "b").read_text() == "x\n" * 2
    code, said = bench.run("--again", "c")
    assert code == 2 and said.strip() == f"measure: --again c: no such line in {bench.plan}"


def test_some_lines_can_be_chosen(bench):
    names = ("a", "seed0", "seed1", "w", "b")
    bench.write(*(f"0 | {name} | 60 | {'wait a' if name == 'w' else f'echo x >> $HERE/{name}'}" for name in names))
    assert bench.run("--only", "seed*", "--only", "w")[0] == 0 and bench.states() == {"seed0": "done", "seed1": "done"}
    assert (
        bench.run()[0] == 0 and (bench.folder / "seed0").read_text() == "x\n" and list(bench.states()) == ["seed0", "seed1", "a", "w", "b"]
    )
    assert bench.run("--only", "c*") == (2, "measure: --only c*: no such line\n")


def test_a_line_with_another_command_is_another_line(bench):
    bench.write("0 | a | 60 | echo one >> $HERE/a")
    assert bench.run()[0] == 0
    bench.write("0 | a | 60 | echo two >> $HERE/a")
    assert bench.run()[0] == 0 and (bench.folder / "a").read_text() == "one\ntwo\n"


def test_a_queue_that_breaks_leaves_nothing_running(tmp_path, monkeypatch):
    plan = tmp_path / "plan.txt"
    plan.write_text(f"0 | a | 60 | echo $$ > {tmp_path}/pid; exec sleep 600\n")
    (tmp_path / "out").mkdir()
    queue = Queue(plan, tmp_path / "out", ["0"], grace=0.3)

    def full() -> None:
        if (tmp_path / "pid").is_file() and (tmp_path / "pid").read_text().endswith("\n"):
            raise OSError("no space left on device")

    monkeypatch.setattr(queue, "_look", full)
    with pytest.raises(OSError, match="no space left"):
        queue.run()
    assert not alive(int((tmp_path / "pid").read_text()))


def test_one_queue_works_on_a_folder(bench):
    bench.write(f"0 | a | 60 | {wait_for('go')}")
    queue = bench.start()
    until(lambda: bench.states().get("a") == "running")
    code, said = bench.run()
    assert code == 2 and said.strip() == f"measure: a queue works on {bench.out} already"
    bench.touch("go")
    assert queue.wait(timeout=PATIENCE) == 0


def test_the_time_of_the_machine_is_kept(bench):
    bench.write(f"0 | a | 60 | {wait_for('never')}", "0 | b | 60 | true")
    code, said = bench.run("--minutes", "0.01")
    assert code == 130 and bench.states() == {"a": "interrupted"} and "the time is over" in bench.ask("--status")[1], said


def test_in_the_background_it_goes_on_and_can_be_stopped(bench):
    bench.write("0 | a | 60 | echo $$ > $HERE/pid; exec sleep 600")
    # As a shell starts `command &`: with SIGINT ignored, which commands must not inherit.
    queue = bench.start("--background", preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    assert queue.wait(timeout=PATIENCE) == 0
    pid = bench.number("pid")
    assert state.is_running(bench.out) and alive(pid)
    code, said = bench.ask("--grace", "5", "--stop")
    assert code == 0 and not alive(pid) and not state.is_running(bench.out) and "SIGTERM" in said
    assert bench.lines()["a"]["exit"] == -signal.SIGINT, "SIGINT was not heard"
    assert bench.ask("--stop")[0] == 2
    assert bench.ask("--status", "--wait", "5")[0] == 0


def test_commands_have_this_checkout_as_a_package(bench):
    code = "import importlib.metadata as m, samebits.kernels as k; d = m.distribution('samebits'); "
    code += "print(k.__file__, d.version, *(e.value for e in d.entry_points))"
    bench.write(f'0 | a | 60 | python -c "{code}"; python -c "import tools, tests; print(tools.__file__)"; command -v samebits')
    assert bench.run()[0] == 0
    said = bench.log("a")
    assert f"{bench.out}/env/site/samebits/kernels/__init__.py 0.1.0 " in said and " samebits.rollout:register" in said
    assert f"{ROOT}/tools/__init__.py" in said and f"{bench.out}/env/bin/samebits" in said
    assert (bench.out / "env" / "site" / "samebits" / "quant").resolve() == ROOT / "quant"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0 | a | 60", "line 1: not `lane | name | limit in seconds | command`"),
        ("0 | a | 60 | ", "line 1: not `lane | name | limit in seconds | command`"),
        ("# a\nx | a | 60 | b", "line 2: lane 'x' is no number of a GPU, N+ or all"),
        ("all+ | a | 60 | b", "line 1: lane 'all+' is no number of a GPU, N+ or all"),
        ("0 | a/b | 60 | b", "line 1: name 'a/b' is not of letters, digits, '.', '_' and '-'"),
        ("0 | .. | 60 | b", "line 1: name '..' is not of letters, digits, '.', '_' and '-'"),
        ("0 | a | 60 | b\n1 | a | 60 | b", "line 2: name 'a' is there twice"),
        ("0 | a | soon | b", "line 1: limit 'soon' is no number of seconds"),
        ("0 | a | 0 | b", "line 1: limit '0' is no number of seconds"),
        ("0 | a | nan | b", "line 1: limit 'nan' is no number of seconds"),
        ("0 | a | 9 | wait b", "line 1: 'wait b': `wait NAME` takes the name of an earlier line"),
        ("0 | a | 9 | wait a", "line 1: 'wait a': `wait NAME` takes the name of an earlier line"),
    ],
)
def test_a_wrong_plan_is_one_line(text, says):
    with pytest.raises(PlanError) as error:
        parse(text)
    assert str(error.value) == says


def test_bad_input_is_one_line_and_nothing_begins(bench):
    bench.write("3 | a | 60 | touch $HERE/a")
    assert bench.run() == (2, "measure: a wants lane 3, here are 2 GPUs, from 0 on\n")
    bench.plan.write_text("0 | a | 60 | touch $HERE/a")
    assert bench.run() == (2, "measure: the last line has no end (a newline): it may be half written\n")
    bench.plan.unlink()
    code, said = bench.run()
    assert code == 2 and said.count("\n") == 1 and not bench.there("a")
    (bench.out / state.FILE).write_text("{")
    bench.write("0 | a | 60 | true")
    code, said = bench.run()
    assert code == 2 and said.startswith(f"measure: {bench.out / state.FILE} cannot be read")
    (bench.out / state.FILE).unlink()


LANES = st.sampled_from([("0", False), ("0", True), ("1", False), ("1", True), (ALL, False)])


@given(st.lists(LANES, max_size=12), st.randoms(use_true_random=False))
def test_any_plan_ends_in_an_order_that_its_lanes_allow(lanes, chance):
    lines = [Line(lane, beside, f"n{i}", 1.0, "true") for i, (lane, beside) in enumerate(lanes)]
    states: dict[str, str] = {}
    at = {line.name: i for i, line in enumerate(lines)}
    while True:
        for line in startable(lines, states):
            before = lines[: at[line.name]]
            unfinished = [one for one in before if states.get(one.name) not in ENDED]
            if line.lane == ALL:
                assert not unfinished
            else:
                assert not any(one.lane == ALL for one in unfinished)
                waited_for = [one for one in unfinished if one.lane == line.lane and not one.beside]
                assert not waited_for or (line.beside and all(states.get(one.name) == "running" for one in waited_for))
            states[line.name] = "running"
        running = [name for name, how in states.items() if how == "running"]
        if not running:
            break
        kinds = [lines[at[name]] for name in running]
        assert len(kinds) == 1 or all(one.lane != ALL for one in kinds)
        for lane in "01":
            assert sum(one.lane == lane and not one.beside for one in kinds) <= 1
        states[chance.choice(running)] = chance.choice(ENDED)
    assert all(states.get(line.name) in ENDED for line in lines), "a line was never started"

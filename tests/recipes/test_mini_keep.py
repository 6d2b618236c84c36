"""An interrupted build of the mini MiniMax-M3: what is kept, that the same command goes on to the same bits, and what is refused."""

import dataclasses
import json
import os
import signal
import threading
import time

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from samebits.recipes import cli, mini_keep, mini_m3, mini_progress, mini_train
from samebits.recipes.mini_keep import Interrupted, Interrupts, Position, States, Work, partial, read_tensors, what_is_kept, write_tensors
from samebits.recipes.mini_progress import Line
from samebits.recipes.mini_train import Training, train
from samebits.recipes.tiny_model import Sizes

SMALL = Sizes(
    vocab=512, hidden=64, layers=3, heads=4, kv_heads=2, experts=4, top_k=2, intermediate=32, dense=64, topk_blocks=16, max_position=512
)
CPU = torch.device("cpu")
RECIPE = Training(steps=8, tokens=512, muon_lr=0.02)  # slips from step 5 on


class Asking(Interrupts):
    """As if a signal came while step `at` is under way."""

    def __init__(self, at: int) -> None:
        self.at, self.wait, self.steps, self.number = at, False, 0, None

    @property
    def asked(self) -> int | None:
        self.steps += 1
        return signal.SIGTERM if self.steps == self.at else None


@pytest.fixture
def every_step(monkeypatch):
    """A reading at every step."""
    monkeypatch.setattr(mini_train, "REPORT_EVERY", 1)


@pytest.fixture(scope="module")
def whole():
    """Weights and losses of a training without interruption."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mini_train, "REPORT_EVERY", 1)
        weights, done = train(SMALL, RECIPE, 0, CPU, progress=False)
    return weights, [loss for _, _, loss in done.curve]


def same(one: dict, other: dict) -> bool:
    return list(one) == list(other) and all(torch.equal(one[n], w) for n, w in other.items())


# ------------------------------------------------------------------------------------------------------------------- training


def test_an_interrupted_training_ends_with_the_same_bits(tmp_path, whole, every_step):
    """Twice interrupted: in the corpus without slips, and in the one with them."""
    path = tmp_path / "training.safetensors"
    for steps, reached in ((3, 3), (3, 6)):
        with pytest.raises(Interrupted, match="SIGTERM"):
            train(SMALL, RECIPE, 0, CPU, False, States(path, Asking(steps)))
        _, position = States(path).read(CPU)
        assert position.step == reached
    assert position.drawn == [5, 1] and len(position.starts) == 2
    weights, done = train(SMALL, RECIPE, 0, CPU, False, States(path))
    assert same(weights, whole[0]) and [loss for _, _, loss in done.curve] == whole[1]
    assert (done.steps, done.tokens, len(done.starts), [s for s, *_ in done.curve]) == (8, 8 * 512, 3, list(range(1, 9)))
    assert done.seconds > sum(done.starts) + done.keeping and done.keeping >= 0


def test_a_killed_training_goes_on_from_the_last_state(tmp_path, whole, every_step, monkeypatch):
    """The state was written while training went on, and is of one moment."""
    path, steps = tmp_path / "training.safetensors", []
    balance = mini_train._balance

    def killed(*arguments):
        steps.append(1)
        if len(steps) == 5:
            raise MemoryError
        return balance(*arguments)

    monkeypatch.setattr(mini_train, "_balance", killed)
    states = States(path, every=0.0)
    write = states._write

    def late(*arguments):
        time.sleep(0.3)
        return write(*arguments)

    monkeypatch.setattr(states, "_write", late)
    with pytest.raises(MemoryError):
        train(SMALL, RECIPE, 0, CPU, False, states)
    _, position = States(path).read(CPU)
    assert 1 <= position.step <= 4
    weights, done = train(SMALL, RECIPE, 0, CPU, False, States(path))
    assert same(weights, whole[0]) and [loss for _, _, loss in done.curve] == whole[1]


def test_states_are_kept_at_intervals_and_one_at_a_time(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(mini_keep.time, "perf_counter", lambda: now[0])
    states, held = States(tmp_path / "s", every=60.0), {"w": torch.ones(2)}
    now[0] = 59.0
    assert not states.due
    now[0] = 60.0
    assert states.due
    gate = threading.Event()
    write = states._write
    monkeypatch.setattr(states, "_write", lambda *a: gate.wait() and write(*a))
    states.keep(held, Position(step=3))
    held["w"].zero_()  # training goes on
    now[0] = 200.0
    assert not states.due and not (tmp_path / "s").exists()
    gate.set()
    states.finish()
    assert states.kept == 3 and states.due and read_tensors(tmp_path / "s")[0]["w"].tolist() == [1, 1]
    assert [p.name for p in tmp_path.iterdir()] == ["s"]


def test_what_writing_raises_is_raised(tmp_path):
    states = States(tmp_path / "no folder" / "s")
    states.keep({"w": torch.ones(2)}, Position())
    with pytest.raises(OSError, match="no folder"):
        states.finish()
    states.keep({"w": torch.ones(2)}, Position())
    states.close()
    with pytest.raises(OSError, match="no folder"):
        assert states.due


def _odd(path):
    """A file whose tensors lie at odd places."""
    write_tensors(path, {str(n): torch.ones(n) for n in range(1, 9)})
    return path


def test_a_file_is_never_half_written(tmp_path, monkeypatch):
    write_tensors(tmp_path / "t", {"b": torch.ones(1), "a": torch.zeros(1)}, {"step": 1})
    tensors, about = read_tensors(tmp_path / "t")
    assert list(tensors) == ["b", "a"] and about == {"step": 1}
    odd, _ = read_tensors(_odd(tmp_path / "odd"))
    assert all(t.data_ptr() % 64 == 0 for t in odd.values())  # as torch allocates: bits of products follow from it
    (tmp_path / "odd").unlink()

    def broken(tensors, path, header):
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(mini_keep, "save_file", broken)
    with pytest.raises(KeyboardInterrupt):
        write_tensors(tmp_path / "t", {"a": torch.ones(1)}, {"step": 2})
    assert read_tensors(tmp_path / "t")[1] == {"step": 1} and [p.name for p in tmp_path.iterdir()] == ["t"]


def test_signals_wait_once_for_a_step():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with Interrupts() as interrupts:
        with pytest.raises(Interrupted, match="SIGINT"):
            os.kill(os.getpid(), signal.SIGINT)
        interrupts.asked, interrupts.wait = None, True
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupts.asked == signal.SIGTERM
        with pytest.raises(Interrupted, match="SIGTERM"):
            os.kill(os.getpid(), signal.SIGTERM)
    assert interrupts.asked == signal.SIGTERM
    with pytest.raises(Interrupted, match="SIGTERM"):
        interrupts.look()
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


# ---------------------------------------------------------------------------------------------------------------------- build


@pytest.fixture
def command(monkeypatch):
    """The command line, with small sizes and few problems."""
    monkeypatch.setattr(mini_m3, "EVALUATED", 4)
    monkeypatch.setattr(mini_m3, "MAX_RESPONSE_TOKENS", 4)
    build = mini_m3.build

    def small(out, seed, training, device, console, imports):
        training = dataclasses.replace(RECIPE, steps=training.steps)
        return build(out, seed, training, device, SMALL, Console(width=200), imports=imports)

    monkeypatch.setattr(mini_m3, "build", small)

    def run(out, *options):
        arguments = ["mini-m3", str(out), "--device", "cpu", "--steps", "8", *options]
        return CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "200"})

    return run


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Bytes of the weights of a build without interruption."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mini_m3, "EVALUATED", 4)
        patch.setattr(mini_m3, "MAX_RESPONSE_TOKENS", 4)
        out = tmp_path_factory.mktemp("whole") / "m3"
        mini_m3.build(out, 0, RECIPE, "cpu", SMALL, Console(quiet=True), progress=False)
        return weights_of(out)


def weights_of(out) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in out.glob("*.safetensors")}


def come(monkeypatch, owner: object, name: str, number: int, call: int = 1) -> None:
    """A signal at the `call`-th call of `owner.name`, once."""
    made, calls = getattr(owner, name), []

    def called(*arguments, **options):
        calls.append(1)
        if len(calls) == call:
            os.kill(os.getpid(), number)
        return made(*arguments, **options)

    monkeypatch.setattr(owner, name, called)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("where", "says"),
    [
        ((mini_train, "_balance", 3), "step 3 of the training is kept in"),
        ((mini_m3, "write_source", 1), "the trained weights are kept in"),
        ((mini_m3, "draw", 2), "the quantized checkpoint is kept in"),
    ],
)
def test_an_interrupted_command_says_what_is_kept_and_goes_on(tmp_path, monkeypatch, command, checkpoint, number, where, says):
    out = tmp_path / "m3"
    owner, name, call = where
    come(monkeypatch, owner, name, number, call)
    first = command(out)
    assert first.exit_code == 128 + number, first.output
    assert f"samebits: interrupted; {says} {partial(out)}" in first.output and "the same command goes on from there" in first.output
    assert not out.exists() and what_is_kept(out).startswith(says)
    trains = []
    taught = mini_m3.train
    monkeypatch.setattr(mini_m3, "train", lambda *a: trains.append(1) or taught(*a))
    second = command(out)
    assert second.exit_code == 0, second.output
    assert f"going on: {says} {partial(out)}" in second.output and len(trains) == ("step" in says)
    assert weights_of(out) == checkpoint and [p.name for p in tmp_path.iterdir()] == ["m3"]
    report = json.loads((out / "pretrain.json").read_text())
    assert report["trained"]["steps"] == 8 and len(report["trained"]["starts"]) == 1 + ("step" in says)


def test_nothing_is_kept_before_the_first_step(tmp_path, monkeypatch, command):
    come(monkeypatch, mini_train, "initialise", signal.SIGINT)
    result = command(tmp_path / "m3")
    assert result.exit_code == 130 and "samebits: interrupted; nothing was kept" in result.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", [(mini_train, "_balance", 8), (mini_train, "peak_tflops", 1), (mini_m3, "write_tensors", 1)])
def test_a_signal_from_the_last_step_on_keeps_the_trained_weights(tmp_path, monkeypatch, command, checkpoint, where):
    owner, name, call = where
    come(monkeypatch, owner, name, signal.SIGTERM, call)
    assert "the trained weights are kept in" in command(tmp_path / "m3").output
    assert command(tmp_path / "m3").exit_code == 0 and weights_of(tmp_path / "m3") == checkpoint


def test_what_failed_is_said_with_what_is_kept(tmp_path, monkeypatch, command):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(mini_m3, "write_source", full)
    result = command(tmp_path / "m3")
    assert result.exit_code == 2 and "No space left on device; the trained weights are kept in" in result.output


def test_a_diverged_build_keeps_nothing(tmp_path, monkeypatch, command, every_step):
    monkeypatch.setattr(mini_m3, "States", lambda path, interrupts: States(path, interrupts, every=0.0))
    entropy, calls = mini_train.F.cross_entropy, []
    monkeypatch.setattr(
        mini_train.F, "cross_entropy", lambda *a, **k: entropy(*a, **k) * (float("nan") if calls.append(1) or len(calls) == 4 else 1.0)
    )
    result = command(tmp_path / "m3")
    assert result.exit_code == 1 and "samebits: training diverged: loss nan at step 4; nothing was kept" in result.output
    assert list(tmp_path.iterdir()) == []


def test_other_options_and_other_builders_are_refused_in_one_line(tmp_path, command):
    out = tmp_path / "m3"
    with Work(out, {"seed": 0}) as work:
        write_tensors(work.folder / "trained.safetensors", {}, {})
        busy = command(out)
    assert busy.exit_code == 2 and busy.output.splitlines()[-1] == f"samebits: {partial(out)} is in use by another process"
    (partial(out) / "build.json").write_text(json.dumps({"options": {"seed": 1, "steps": 8}, "seconds": {}}))
    other = command(out)
    assert other.exit_code == 2 and "holds a build with other options (seed 1, not 0; " in other.output and "steps" not in other.output
    (partial(out) / "build.json").write_text("{")
    broken = command(out)
    assert broken.exit_code == 2 and "build.json cannot be read" in broken.output and broken.output.count("\n") == 1
    (partial(out) / "build.json").unlink()
    foreign = command(out)
    assert foreign.exit_code == 2 and "holds something that is no unfinished build" in foreign.output


def test_a_broken_state_is_refused_in_one_line(tmp_path, monkeypatch, command):
    come(monkeypatch, mini_train, "_balance", signal.SIGTERM, 2)
    command(tmp_path / "m3")
    path = partial(tmp_path / "m3") / "training.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    result = command(tmp_path / "m3")
    assert result.exit_code == 2 and f"samebits: {path} cannot be read" in result.output and result.output.count("\n") == 1
    assert path.exists()


# ------------------------------------------------------------------------------------------------------------------- progress


def test_without_a_terminal_lines_come_as_time_goes_by(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(mini_progress.time, "perf_counter", lambda: now[0])
    console = Console(width=80, force_terminal=False)
    with console.capture() as said, Line("training", console) as line:
        for second in range(25):
            now[0] = float(second)
            line.update(second / 25, f"step {second}")
    assert said.get().splitlines() == [
        "training: begins",
        "training: 40% after 10 s, step 10",
        "training: 80% after 20 s, step 20",
        "training: done after 24.0 s",
    ]
    with console.capture() as said, pytest.raises(KeyboardInterrupt), Line("training", console, shown=False):
        raise KeyboardInterrupt
    assert said.get() == ""


def test_a_line_fits_a_terminal_of_80_columns():
    console = Console(width=80, force_terminal=True, color_system=None)
    with console.capture() as said, Line("training", console) as line:
        line.update(0.62, "step 1,940, loss 0.052, 231k tokens/s")
    assert "62% step 1,940, loss 0.052, 231k tokens/s 0:00:00" in said.get() or "100% step 1,940" in said.get()
    assert "…" not in said.get()

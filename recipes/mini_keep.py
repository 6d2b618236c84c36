"""What an unfinished build of the mini MiniMax-M3 leaves behind, so that the same command goes on from there.

The folder `OUT.partial` beside OUT holds, until OUT is whole:
  build.json             options of the build, seconds of each phase so far, and what is known of the result
  training.safetensors   while it trains, at intervals and at an interrupt: fp32 weights, states of the optimizers, and how far it is
  trained.safetensors    from the end of training on: weights as they are computed with
  source/, target/       the unquantized and the quantized checkpoint
Every file is whole at every moment: it is written under another name and renamed. A state is copied on the device, which takes
milliseconds, and written by a thread while training goes on.

SIGINT and SIGTERM are `Interrupted`: at once, or while a training step is under way after it, with its state kept. A second one ends
without that.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

KEEP_EVERY = 60.0
"""Seconds of training between two states that are kept."""
_PART = ".part"


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM. `number`: which."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Interrupts:
    """SIGINT and SIGTERM as `Interrupted`, while entered (in the main thread; in others nothing is changed)."""

    def __init__(self) -> None:
        self.asked: int | None = None
        self.wait = False
        """Whether the first only sets `asked`, for someone who looks at it soon."""

    def __enter__(self) -> Interrupts:
        self._previous = {}
        if threading.current_thread() is threading.main_thread():
            self._previous = {n: signal.signal(n, self._come) for n in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def look(self) -> None:
        """Raise what was asked for and did not come through: Python drops what a handler raises inside a finalizer or a fork."""
        if self.asked is not None:
            raise Interrupted(self.asked)

    def _come(self, number: int, frame: object) -> None:
        first, self.asked = self.asked is None, number
        if not (self.wait and first):
            raise Interrupted(number)


@dataclass(slots=True)
class Position:
    """How far training is, beside its tensors."""

    step: int = 0
    drawn: list[int] = field(default_factory=lambda: [0, 0])
    """Batches taken of the corpus without slips, and of the one with them."""
    seconds: float = 0.0
    """Since the start, of all calls together."""
    starts: list[float] = field(default_factory=list)
    """Of each call: seconds to the end of its first step, which compiles."""
    keeping: float = 0.0
    """Seconds in which training waited for its state to be kept."""
    counted: float = 0.0
    """Seconds that the schedule of a budget of time has counted."""
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    """(step, seconds, loss) at every reading."""
    speeds: list[float] = field(default_factory=list)
    """Tokens a second at every reading."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], about: object = None) -> None:
    """A safetensors file with `about` (JSON) in its header and the order of the tensors, whole or not at all."""
    part = path.with_name(path.name + _PART)
    header = {"about": json.dumps(about), "names": json.dumps(list(tensors))}
    try:
        save_file({n: t.detach().cpu().contiguous() for n, t in tensors.items()}, part, header)
        part.replace(path)
    except SafetensorError as error:  # a full disk
        raise OSError(f"{path}: {error}") from None
    finally:
        part.unlink(missing_ok=True)


def read_tensors(path: Path, device: torch.device | str = "cpu") -> tuple[dict[str, Tensor], Any]:
    """Tensors, in the order in which they were given, and `about` of a file of `write_tensors`. Raises `ValueError` when it is none."""
    with _opened(path, device) as held:
        header = held.metadata()
        # Cloned: in the file tensors lie anywhere, and on a CPU the order of a product's sums follows from where its operands begin.
        return {n: held.get_tensor(n).clone() for n in json.loads(header["names"])}, json.loads(header["about"])


@contextlib.contextmanager
def _opened(path: Path, device: torch.device | str = "cpu") -> Iterator[Any]:
    try:
        with safe_open(path, "pt", device=str(device)) as held:
            yield held
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}); remove {path.parent} to begin anew") from None


class States:
    """The state of training in one file: read when it begins, written every `every` seconds and at its end."""

    def __init__(self, path: Path, interrupts: Interrupts | None = None, every: float = KEEP_EVERY) -> None:
        self.path, self.every = path, every
        self.interrupts = interrupts or Interrupts()
        self.kept: int | None = None
        """Step of the state in the file."""
        self._last = time.perf_counter()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="keep")
        self._writing: Future | None = None

    def read(self, device: torch.device) -> tuple[dict[str, Tensor], Position] | None:
        """What an earlier call kept. Raises `ValueError` when the file cannot be read."""
        if not self.path.exists():
            return None
        tensors, about = read_tensors(self.path, device)
        position = Position(**about)
        position.curve = [tuple(reading) for reading in position.curve]
        self.kept = position.step
        return tensors, position

    @property
    def due(self) -> bool:
        """Whether it is time to keep a state, and the last one is written. Raises what writing raised."""
        if self._writing is not None and self._writing.done():
            self.finish()
        return self._writing is None and time.perf_counter() - self._last >= self.every

    def keep(self, tensors: Mapping[str, Tensor], position: Position) -> None:
        """Copy the state on its device and write it in the background, after the one that is being written."""
        self.finish()
        self._last = time.perf_counter()
        copies = {n: t.detach().clone() for n, t in tensors.items()}
        ready = None
        if any(t.is_cuda for t in copies.values()):
            ready = torch.cuda.Event()
            ready.record()
        self._writing = self._pool.submit(self._write, copies, asdict(position), ready)

    def finish(self) -> None:
        """Wait until everything is written. Raises what writing raised."""
        writing, self._writing = self._writing, None
        if writing is not None:
            self.kept = writing.result()

    def close(self) -> None:
        """Wait until everything is written or has failed."""
        self._pool.shutdown()

    def _write(self, copies: dict[str, Tensor], about: dict[str, Any], ready: torch.cuda.Event | None) -> int:
        beside: contextlib.AbstractContextManager = contextlib.nullcontext()
        if ready is not None:  # a stream of its own, or training would wait for the way to the host
            ready.synchronize()
            beside = torch.cuda.stream(torch.cuda.Stream())
        with beside:
            write_tensors(self.path, copies, about)
        return about["step"]


class Work:
    """`OUT.partial` while a build has it: `record` is build.json. Entered, it is locked; left, `record` is written.

    Raises `FileExistsError` when OUT holds anything or the folder is in use, `ValueError` when it belongs to a build with other options.
    """

    def __init__(self, out: Path, options: dict[str, Any]) -> None:
        self.out, self.folder = out, partial(out)
        self.record: dict[str, Any] = {"options": json.loads(json.dumps(options)), "seconds": {}}
        self.goes_on = False
        """Whether an earlier call left something."""

    def __enter__(self) -> Work:
        if self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir())):
            raise FileExistsError(f"{self.out} is not empty")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.folder, os.O_RDONLY)
        try:
            self._take()
        except BaseException:
            os.close(self._lock)
            raise
        return self

    def _take(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FileExistsError(f"{self.folder} is in use by another process") from None
        if not (self.folder / "build.json").exists():
            if any(self.folder.iterdir()):
                raise FileExistsError(f"{self.folder} holds something that is no unfinished build")
            self.save()
            return
        held = _record(self.folder)
        ours = self.record["options"]
        differ = [f"{n} {held['options'].get(n)!r}, not {ours[n]!r}" for n in ours if held["options"].get(n) != ours[n]]
        if differ:
            raise ValueError(f"{self.folder} holds a build with other options ({'; '.join(differ)}): repeat them, or remove it")
        self.record, self.goes_on = held, True

    def __exit__(self, *_: object) -> None:
        try:
            if self.folder.exists():
                if what_is_kept(self.out) is None:
                    shutil.rmtree(self.folder)
                else:
                    self.save()
        finally:
            os.close(self._lock)

    def save(self) -> None:
        """Write `record`."""
        part = self.folder / f"build.json{_PART}"
        part.write_text(json.dumps(self.record, indent=2) + "\n")
        part.replace(self.folder / "build.json")

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the seconds of what runs inside to those of a phase."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.spent(name, time.perf_counter() - begun)

    def spent(self, name: str, seconds: float) -> None:
        """Add to the seconds of a phase."""
        self.record["seconds"][name] = self.record["seconds"].get(name, 0.0) + seconds


def partial(out: Path) -> Path:
    """Where an unfinished build of `out` is."""
    return out.absolute().with_name(out.absolute().name + ".partial")


def _record(folder: Path) -> dict[str, Any]:
    try:
        record = json.loads((folder / "build.json").read_text())
        return {n: dict(record[n]) for n in ("options", "seconds")} | record
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder / 'build.json'} cannot be read ({error}); remove {folder} to begin anew") from None


def what_is_kept(out: Path) -> str | None:
    """In words, what of an unfinished build of `out` the next call takes up; None: nothing."""
    folder = partial(out)
    if (folder / "target" / "config.json").exists() and (folder / "trained.safetensors").exists():
        return f"the quantized checkpoint is kept in {folder}, not yet measured"
    if (folder / "trained.safetensors").exists():
        return f"the trained weights are kept in {folder}"
    if (folder / "training.safetensors").exists():
        with _opened(folder / "training.safetensors") as held:
            step = json.loads(held.metadata()["about"])["step"]
        return f"step {step:,} of the training is kept in {folder}"
    return None

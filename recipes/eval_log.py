"""The folder of an evaluation: its settings, and every response as soon as it exists, so that a kill loses nothing.

settings.json     what was asked of which model; a start with other settings is refused by the names of what differs
responses.jsonl   one line a response, in the order in which they came
result.json       the last summary with every grade

A response is one `write` to a file opened for appending: a process that is killed leaves whole lines and at most one torn line at the
end, which the next start cuts off. `fsync` every few seconds bounds what a power cut can take. Responses are keyed by problem and
sample number, and each sample's seed follows from these and the run's seed: the responses of a resumed evaluation are those of an
uninterrupted one wherever the engine's do not depend on what else is in the batch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from . import run_dir
from .config import RecipeError
from .eval_tasks import EvalProblem

SYNC_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One response to be generated."""

    problem: EvalProblem
    number: int
    """0 to n - 1."""
    seed: int
    """31 bits."""

    @property
    def key(self) -> tuple[str, int]:
        """Problem id and sample number."""
        return self.problem.id, self.number


@dataclass(frozen=True, slots=True)
class Response:
    """One generated response."""

    problem: str
    sample: int
    seed: int
    text: str
    tokens: int | None
    """Length, with the end token; None where a server does not say."""
    finish: str
    """`stop`, or `length` when it was cut off."""

    @property
    def key(self) -> tuple[str, int]:
        """Problem id and sample number."""
        return self.problem, self.sample

    @property
    def truncated(self) -> bool:
        """Whether it ended at the length limit."""
        return self.finish == "length"


def samples(problems: Iterable[EvalProblem], n: int, seed: int) -> list[Sample]:
    """All samples of an evaluation, the first of every problem before the second of any."""
    every = list(problems)
    return [Sample(problem, number, sample_seed(seed, problem.id, number)) for number in range(n) for problem in every]


def sample_seed(seed: int, problem: str, number: int) -> int:
    """31-bit seed of one sample, from nothing but these."""
    key = json.dumps([seed, problem, number]).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "little") >> 1


class EvalLog:
    """An evaluation's folder, open for as long as the object is; another process that opens it is refused."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        """Raises `RecipeError`: the folder is in use, holds an evaluation with other settings, or a file in it is damaged."""
        self.folder = folder
        self.path = folder / "responses.jsonl"
        self.responses: dict[tuple[str, int], Response] = {}
        try:
            with contextlib.ExitStack() as stack:
                lock = stack.enter_context(run_dir.lock(folder, "eval"))
                self._settle(dict(settings))
                whole = self._read(dict(settings))
                self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
                os.ftruncate(self._file, whole)
                stack.pop_all()  # from here on the lock is this object's
        except OSError as error:
            raise RecipeError(f"{folder}: {error.strerror}") from None
        self._lock = lock
        self._synced = time.monotonic()

    def __enter__(self) -> EvalLog:
        return self

    def __exit__(self, *_: object) -> None:
        os.fsync(self._file)
        os.close(self._file)
        self._lock.close()

    def append(self, response: Response) -> None:
        """Keep a response. Raises `ValueError` when there is one for its sample already."""
        if response.key in self.responses:
            raise ValueError(f"problem {response.problem} has a response to sample {response.sample} already")
        line = json.dumps(asdict(response)).encode() + b"\n"
        if os.write(self._file, line) != len(line):
            raise OSError(f"{self.path}: the disk took a part of a line only")
        self.responses[response.key] = response
        if time.monotonic() - self._synced > SYNC_SECONDS:
            os.fsync(self._file)
            self._synced = time.monotonic()

    def missing(self, wanted: Iterable[Sample]) -> list[Sample]:
        """Those samples that have no response yet."""
        return [sample for sample in wanted if sample.key not in self.responses]

    def _settle(self, settings: dict[str, Any]) -> None:
        """Write the settings of a new evaluation, or compare with those of the one that is there."""
        path = self.folder / "settings.json"
        if not path.is_file():
            if self.path.is_file() and self.path.stat().st_size:
                raise RecipeError(f"{self.folder} holds responses without settings.json: choose another --out")
            write_atomically(path, settings)
            return
        try:
            theirs = json.loads(path.read_text())
            keys = [*settings, *(k for k in theirs if k not in settings)]
            changed = [
                f"{k} {_shown(theirs.get(k))} there, {_shown(settings.get(k))} now" for k in keys if theirs.get(k) != settings.get(k)
            ]
        except (ValueError, AttributeError):
            raise RecipeError(f"{path} is damaged: choose another --out") from None
        if changed:
            raise RecipeError(f"{self.folder} holds an evaluation with other settings: {'; '.join(changed)}; choose another --out")

    def _read(self, settings: dict[str, Any]) -> int:
        """Read the responses that are there; returns the length of the file without a torn last line."""
        data = self.path.read_bytes() if self.path.is_file() else b""
        whole = data.rfind(b"\n") + 1
        names = {f.name for f in fields(Response)}
        for number, line in enumerate(data[:whole].split(b"\n")[:-1], 1):
            try:
                content = json.loads(line)
                if content.keys() != names:
                    raise ValueError
            except (ValueError, AttributeError):
                raise RecipeError(f"{self.path}, line {number} is damaged: choose another --out") from None
            response = Response(**content)
            if response.key in self.responses:
                raise RecipeError(f"{self.path}, line {number}: a second response to sample {response.sample} of {response.problem}")
            if response.seed != sample_seed(settings["seed"], *response.key):
                raise RecipeError(f"{self.path}, line {number}: seed {response.seed} is not the seed of that sample")
            self.responses[response.key] = response
        return whole


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)


def write_atomically(path: Path, content: Any) -> None:
    """Write JSON under a temporary name and rename it."""
    staging = path.with_suffix(".tmp")
    with staging.open("w") as file:
        file.write(json.dumps(content, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(staging, path)

"""Weights & Biases and TensorBoard beside `metrics.jsonl`: the same numbers, and never in the way of the run.

`metrics.jsonl` is written first and is the record; trackers are fed from it. A tracker that fails is dropped with one line in
`warnings.log`, which the command line shows and the summary keeps; the run and its JSONL go on.

A run that is resumed drops the lines after its checkpoint and writes them again. TensorBoard's file is therefore written anew from
`metrics.jsonl` at each start. Weights & Biases keeps one run, whose id is in `tracking.json`; what it lacks (it was switched on late, or
failed) is sent at the start. A step that it has already is not sent twice: a resumed run takes the same step again, and only its times
differ. Values are sent as 64-bit numbers, truth values as 0 and 1; digests, which are text, stay in `metrics.jsonl`.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from .config import Recipe, Wandb
from .run_dir import atomic_text

Line = dict[str, Any]


class Tracker(Protocol):
    """Somewhere that the numbers of a step go to. Every method may raise."""

    name: str

    def write(self, line: Line) -> None:
        """One line of `metrics.jsonl`."""

    def close(self) -> None:
        """Everything is written; nothing follows."""


def numbers(line: Line) -> dict[str, float]:
    """The numbers of a line but its step; truth values as 0 and 1."""
    return {k: float(v) for k, v in line.items() if k != "step" and isinstance(v, bool | int | float)}


class TensorBoardTracker:
    """An event file in `folder`, written anew from the lines that are there."""

    name = "TensorBoard"

    def __init__(self, folder: Path, lines: Iterable[Line]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        shutil.rmtree(folder, ignore_errors=True)
        self._writer = SummaryWriter(str(folder))
        for line in lines:
            self.write(line)

    def write(self, line: Line) -> None:
        """One point for each number, in double precision (TensorBoard's plain scalars are 32-bit)."""
        for key, value in numbers(line).items():
            self._writer.add_scalar(key, value, line["step"], new_style=True, double_precision=True)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class WandbTracker:
    """One run of Weights & Biases for the whole life of the run directory."""

    name = "wandb"

    def __init__(self, folder: Path, settings: Wandb, project: str, run: str, config: dict[str, Any], lines: Iterable[Line]) -> None:
        import wandb

        self._state_path = folder / "tracking.json"
        self._state = self._read_state()
        self._run = wandb.init(
            project=settings.project or project,
            entity=settings.entity,
            name=run,
            id=self._state["id"],
            resume="allow",
            mode=settings.mode,
            dir=str(folder),
            config=config,
            settings=wandb.Settings(console="off", silent=True, disable_git=True, save_code=False, x_disable_stats=True),
        )
        for line in lines:
            self.write(line)

    def _read_state(self) -> dict[str, Any]:
        if self._state_path.is_file():
            return json.loads(self._state_path.read_text())
        state = {"id": uuid.uuid4().hex[:12], "last_step": -1}
        atomic_text(self._state_path, json.dumps(state) + "\n")
        return state

    def write(self, line: Line) -> None:
        """Send the line, unless this step was sent before."""
        if line["step"] <= self._state["last_step"]:
            return
        self._run.log(numbers(line), step=line["step"], commit=True)
        self._state["last_step"] = line["step"]
        atomic_text(self._state_path, json.dumps(self._state) + "\n")

    def close(self) -> None:
        """Finish the run, which sends what is still queued."""
        self._run.finish()


class Trackers:
    """All trackers of a run. No method raises for a tracker's sake: one that fails is dropped, with one warning."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._open: list[Tracker] = []

    def start(self, name: str, make: Callable[[], Tracker]) -> None:
        """Add the tracker that `make` returns."""
        try:
            self._open.append(make())
        except Exception as error:  # whatever a tracker raises, the run goes on
            self._failed(name, error)

    def write(self, line: Line) -> None:
        """Give a line to every tracker."""
        self._each(lambda tracker: tracker.write(line))

    def close(self) -> None:
        """Close every tracker."""
        self._each(lambda tracker: tracker.close())
        self._open = []

    def _each(self, action: Callable[[Tracker], None]) -> None:
        for tracker in list(self._open):
            try:
                action(tracker)
            except Exception as error:
                self._open.remove(tracker)
                self._failed(tracker.name, error)

    def _failed(self, name: str, error: Exception) -> None:
        text = " ".join(str(error).split())[:300]
        self._warn(f"{name} failed ({type(error).__name__}: {text}) and gets nothing more from this start; metrics.jsonl goes on")


def open_trackers(recipe: Recipe, project: str, lines: list[Line], warn: Callable[[str], None]) -> Trackers:
    """The recipe's trackers, brought up to `lines`, the ones that `metrics.jsonl` holds."""
    trackers, folder, wanted = Trackers(warn), recipe.folder, recipe.tracking
    if wanted.tensorboard:
        trackers.start("TensorBoard", lambda: TensorBoardTracker(folder / "tensorboard", lines))
    if wanted.wandb is not None:
        os.environ.setdefault("WANDB_SILENT", "true")
        config = {"name": recipe.name, "seed": recipe.seed, "profile": recipe.profile.name, "profile_hash": recipe.profile.hash}
        trackers.start("wandb", lambda: WandbTracker(folder, wanted.wandb, project, recipe.name, config, lines))
    return trackers

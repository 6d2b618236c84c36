"""The run directory: what a run leaves behind, and how it is read back.

config.yaml     the recipe's own keys and verl's complete configuration
data/           the prompts, as verl reads them, and their fingerprints
metrics.jsonl   one line for each step; line 0 is the evaluation before training
traces/         communication by step, rank and phase, where the recipe asks for it
warnings.log    what went wrong without stopping the run
tensorboard/, wandb/, tracking.json   where the recipe asks for them
adapters/       one PEFT folder for each saved step
checkpoints/    what a resume needs
summary.json    the result, written at the end
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from omegaconf import DictConfig, OmegaConf
from safetensors import SafetensorError

from .config import Recipe, RecipeError, compose_stored
from .data import RECORD, other_data

if TYPE_CHECKING:
    from torch import Tensor

    from samebits.quant.adapter import AdapterSpec

    from .tracking import Trackers

# Keys that may change between the start and the resumption of a run.
# The checkpoints lie in the run directory, which may have been moved.
_FREE_KEYS = (
    "trainer.default_local_dir",
    "trainer.total_training_steps",
    "trainer.save_freq",
    "trainer.test_freq",
    "trainer.max_actor_ckpt_to_keep",
    "actor_rollout_ref.model.override_config.samebits_parity",
)
# What the data is, its fingerprint says: the same problems may come from another place.
_FREE_OWN_KEYS = (
    "checks", "fault", "numerics.parity", "threads", "run_dir", "tracking", "cluster", "tracing",
    "data_source.train", "data_source.test", "data_source.without",
)  # fmt: skip


def lock(folder: Path, name: str, wait: float = 0.0) -> TextIO:
    """Take the lock `name` of a run directory for as long as the returned file stays open; the kernel frees it with the process.

    Waits up to `wait` seconds for a dying process to let go. Raises `RecipeError` when another process keeps it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / f".{name}.lock").open("w")
    deadline = time.monotonic() + wait
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() > deadline:
                file.close()
                raise RecipeError(f"{folder} is in use by another process") from None
            time.sleep(0.2)


def atomic_text(path: Path, text: str) -> None:
    """Write a file so that a kill leaves the old one or the new one."""
    staging = path.with_name(f".{path.name}.tmp")
    staging.write_text(text)
    os.replace(staging, path)


def warn(folder: Path, text: str) -> None:
    """Append one line to a run's `warnings.log`, which the command line shows while the run goes on."""
    with (folder / "warnings.log").open("a") as f:
        f.write(" ".join(text.split()) + "\n")


def warnings(folder: Path) -> list[str]:
    """Lines of a run's `warnings.log`."""
    path = folder / "warnings.log"
    return path.read_text(errors="replace").splitlines() if path.is_file() else []


class MetricsLog:
    """`metrics.jsonl`: append one line a step; a resumed run drops the lines that it is about to write again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        self.last_step = -1
        self.trackers: Trackers | None = None
        """Where each line goes as well, once it is on disk."""
        for line in read_metrics(path):
            self.last_step = line["step"]

    def truncate_after(self, step: int) -> None:
        """Keep only lines up to `step`; with step 0 keep none, since a fresh start evaluates again."""
        kept = [line for line in read_metrics(self.path) if step > 0 and line["step"] <= step]
        atomic_text(self.path, "".join(json.dumps(line) + "\n" for line in kept))
        self.last_step = kept[-1]["step"] if kept else -1

    def write(self, line: dict[str, Any]) -> None:
        """Append one step's metrics and force them to disk."""
        with self.path.open("a") as f:
            f.write(json.dumps(line) + "\n")
            f.flush()
            os.fsync(f.fileno())
        self.last_step = line["step"]
        if self.trackers is not None:
            self.trackers.write(line)

    def close(self) -> None:
        """Close the trackers."""
        if self.trackers is not None:
            self.trackers.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All complete lines of a metrics file; a last line cut off by a kill is left out."""
    lines = []
    for text in path.read_text(errors="replace").splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines


def prepare(recipe: Recipe, verl: DictConfig) -> None:
    """Create the run directory, or check that the one there belongs to the same run. Raises `RecipeError`."""
    path = recipe.folder / "config.yaml"
    ours = {"recipe": dataclasses.asdict(recipe), "verl": OmegaConf.to_container(verl, resolve=False)}
    if path.is_file() and _trained(recipe.folder):
        try:
            theirs = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        except Exception as error:  # yaml's and omegaconf's errors have no common base
            raise RecipeError(f"{path} cannot be read ({type(error).__name__}): choose another name or run_dir, or remove it") from None
        changed = sorted(_different(theirs, ours))
        if changed:
            raise RecipeError(
                f"{recipe.folder} holds a run with other settings ({', '.join(changed[:4])}): choose another name or run_dir, or remove it"
            )
    recipe.folder.mkdir(parents=True, exist_ok=True)
    atomic_text(path, OmegaConf.to_yaml(OmegaConf.create(ours)))


def require_same_data(folder: Path, fingerprints: dict[str, str]) -> None:
    """Refuse to go on with other data than a run started with, as its folder and its newest checkpoint record. Raises `RecipeError`."""
    if not _trained(folder):
        return
    checkpoints = sorted((folder / "checkpoints").glob(f"global_step_*/{RECORD}"), key=lambda p: int(p.parent.name.rpartition("_")[2]))
    for record in (folder / "data", *(path.parent for path in checkpoints[-1:])):
        difference = other_data(record, fingerprints)
        if difference:
            raise RecipeError(f"{folder} holds a run on other data ({difference}): choose another name or run_dir, or restore the data")


def load_run(folder: Path, overrides: Sequence[str] = ()) -> tuple[Recipe, DictConfig]:
    """Recipe and verl's configuration that a run directory was started with. Raises `RecipeError`."""
    path = folder / "config.yaml"
    try:
        stored = OmegaConf.load(path)
        return compose_stored(stored.recipe, stored.verl, overrides)
    except RecipeError:
        raise
    except Exception as error:  # yaml's and omegaconf's errors have no common base
        raise RecipeError(f"{path} cannot be read ({type(error).__name__}): it should hold the configuration of a run") from None


def adapter_of(folder: Path, spec: AdapterSpec) -> tuple[int, dict[str, Tensor]]:
    """(version, tensors) of a run's newest adapter. Raises `RecipeError` where there is none, `AdapterError` where it does not fit."""
    from samebits.quant.adapter import load_peft

    steps = sorted(int(p.name.removeprefix("step_")) for p in (folder / "adapters").glob("step_*"))
    if not steps:
        raise RecipeError(f"{folder}/adapters holds no adapter: a run writes its first with its first checkpoint")
    path = folder / "adapters" / f"step_{steps[-1]}"
    try:
        return steps[-1], load_peft(path, spec)
    except (OSError, SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise RecipeError(f"{path} cannot be read: {error}") from None


def _trained(folder: Path) -> bool:
    """Whether a run directory holds anything that a start with other settings would spoil."""
    metrics = folder / "metrics.jsonl"
    return any((folder / "checkpoints").glob("global_step_*")) or (metrics.is_file() and bool(read_metrics(metrics)))


def _different(a: Any, b: Any, prefix: str = "") -> list[str]:
    key = prefix.removeprefix("verl.")
    if key in _FREE_KEYS or prefix.removeprefix("recipe.") in _FREE_OWN_KEYS:
        return []
    if isinstance(a, dict) and isinstance(b, dict):
        return [d for k in a.keys() | b.keys() for d in _different(a.get(k), b.get(k), f"{prefix}.{k}" if prefix else str(k))]
    return [] if a == b else [key.removeprefix("recipe.")]


def repair_tracker(checkpoints: Path) -> None:
    """verl names the newest checkpoint in a file that it writes in place: a kill may leave it empty or ahead of its folder.

    Points the file at the newest complete checkpoint, or removes it when there is none.
    """
    tracker = checkpoints / "latest_checkpointed_iteration.txt"
    if not tracker.is_file():
        return
    complete = sorted(
        int(folder.name.removeprefix("global_step_"))
        for folder in checkpoints.glob("global_step_*")
        if (folder / "data.pt").is_file() and (folder / "actor" / "samebits_trainer.json").is_file()
    )
    text = tracker.read_text().strip()
    if text.isdigit() and int(text) in complete:
        return
    if complete:
        tracker.write_text(str(complete[-1]))
    else:
        tracker.unlink()

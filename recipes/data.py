"""The prompts of a recipe's task: where they come from, what identifies them, and how they get into the run directory.

A task is a module with verl's reward function and a source of problems. `arithmetic` and `mini-math` generate their own. `dapo-math` reads
`data_source`: the held-out set first, then the training set without the problems of every evaluation set. All are written as parquet
files that verl reads, always in the same order, so a resumed run finds the very same rows. Their fingerprints are kept with the run and
its checkpoints.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import arithmetic, mini_math

if TYPE_CHECKING:
    from .config import Recipe
    from .math_data import ProblemSet

GENERATED = {"arithmetic": arithmetic.TASK, "mini-math": mini_math.TASK}
"""Tasks that make their problems."""
TASKS = {
    "arithmetic": f"pkg://{arithmetic.__name__}",
    "dapo-math": f"pkg://{__package__}.grading",
    "mini-math": f"pkg://{mini_math.__name__}",
}
"""Module of each task, as verl names one; its `compute_score` is verl's reward function."""
HELD_OUT = 512
TRAIN_PROMPTS = 20000
RECORD = "dataset.json"
"""Fingerprints of a run's data, in its `data` folder and in each checkpoint."""
READ_WHOLE = 64 * 2**20
"""Bytes of a local file up to which `look_up` reads all of it."""
_PEEK_ROWS = 1000


@dataclass(frozen=True, slots=True)
class TaskData:
    """Data of a run: how many prompts, which, and how they are written."""

    train: int
    test: int
    fingerprints: dict[str, str]
    write: Callable[[Path], None]
    """Writes `train.parquet` and `test.parquet` into a folder; the same bytes each time."""


def reward_function(recipe: Recipe, max_response_length: int) -> dict[str, Any]:
    """verl's `reward.custom_reward_function` for the recipe's task."""
    options: dict[str, Any] = {}
    if recipe.task == "dapo-math":
        rules = recipe.grading
        options = {
            "truncation": rules.truncation,
            "overlong_buffer": rules.overlong_buffer,
            "overlong_factor": rules.overlong_factor,
            "max_response_tokens": max_response_length if rules.max_response_tokens is None else rules.max_response_tokens,
        }
    return {"path": TASKS.get(recipe.task), "name": "compute_score", "reward_kwargs": options}


def task_data(recipe: Recipe) -> TaskData:
    """The data of the recipe's task. Raises `math_data.DataError` in one line when it cannot be read or used as it is."""
    if recipe.task == "dapo-math":
        return _math(recipe)
    task = GENERATED[recipe.task]
    splits = {"train": task.draw("train", TRAIN_PROMPTS, recipe.seed), "test": task.draw("test", HELD_OUT, recipe.seed)}
    prints = {name: hashlib.sha256("\n".join(p.prompt for p in found).encode()).hexdigest()[:32] for name, found in splits.items()}
    return TaskData(
        TRAIN_PROMPTS, HELD_OUT, prints, lambda folder: task.write_parquet(folder, TRAIN_PROMPTS, HELD_OUT, recipe.seed) and None
    )


def _math(recipe: Recipe) -> TaskData:
    from .math_data import write_parquet

    train, test = math_sets(recipe)

    def write(folder: Path) -> None:
        write_parquet(train, "train", folder / "train.parquet")
        write_parquet(test, "test", folder / "test.parquet")

    return TaskData(len(train.problems), len(test.problems), {"train": train.fingerprint, "test": test.fingerprint}, write)


def math_sets(recipe: Recipe) -> tuple[ProblemSet, ProblemSet]:
    """Training problems, without those of any evaluation set, and held-out problems. Raises `DataError`."""
    from .math_data import TEMPLATE, load_problems, without

    source = recipe.data_source
    template = source.prompt_template or TEMPLATE

    def load(name: str) -> ProblemSet:
        found = load_problems(name, duplicates=source.duplicates, conflicts=source.conflicts)
        return replace(found, template=template)

    test = load(source.test)
    return without(load(source.train), [test, *map(load, source.without)]), test


def write_task_data(data: TaskData, folder: Path) -> tuple[Path, Path]:
    """Write train and held-out prompts and their record into `folder`; returns the paths of the two."""
    from datasets import disable_progress_bars

    disable_progress_bars()
    data.write(folder)
    write_record(folder, data.fingerprints)
    return folder / "train.parquet", folder / "test.parquet"


def write_record(folder: Path, fingerprints: dict[str, str]) -> None:
    """Keep the fingerprints of a run's data in `folder`."""
    staging = folder / f".{RECORD}"
    staging.write_text(json.dumps(fingerprints) + "\n")
    os.replace(staging, folder / RECORD)


def other_data(folder: Path, fingerprints: dict[str, str]) -> str | None:
    """In what the record in `folder` differs from `fingerprints`, in words; None when it does not."""
    try:
        recorded = json.loads((folder / RECORD).read_text())
    except FileNotFoundError:
        return f"no record of its data at {folder / RECORD}"
    except ValueError:
        return f"an unreadable record of its data at {folder / RECORD}"
    changed = [name for name in fingerprints if recorded.get(name) != fingerprints[name]]
    words = [f"{name} set {str(recorded.get(name))[:8]}, which now has fingerprint {fingerprints[name][:8]}" for name in changed]
    return " and ".join(words) or None


@dataclass(frozen=True, slots=True)
class SourceFinding:
    """What can be said of one data source without the network."""

    key: str
    source: str
    state: str
    problems: int | None = None
    """Distinct problems, as far as they are known."""
    complete: bool = False
    """Whether all of it was read."""


def look_up(recipe: Recipe) -> list[SourceFinding]:
    """The recipe's data sources, read from disk only: small files whole, of large ones the first rows; hub names in the local cache.

    Raises `DataError` on a file that is missing, unreadable or has rows that cannot be used.
    """
    if recipe.task != "dapo-math":
        return [SourceFinding("task", recipe.task, "generated", TRAIN_PROMPTS, True)]
    source = recipe.data_source
    named = [("data_source.train", source.train), ("data_source.test", source.test)]
    named += [(f"data_source.without[{i}]", name) for i, name in enumerate(source.without)]
    found = [_look_up(key, name, recipe) for key, name in named]
    if all(one.complete for one in found):
        train, _ = math_sets(recipe)
        removed = f", {len(train.removed)} of them in an evaluation set" if train.removed else ""
        found[0] = replace(found[0], state=found[0].state + removed, problems=len(train.problems))
    return found


def _look_up(key: str, name: str, recipe: Recipe) -> SourceFinding:
    from .math_data import KNOWN, load_problems

    path = Path(name)
    if name in KNOWN or (re.fullmatch(r"[\w.-]+/[\w.-]+(:\w+)?", name) and not path.exists() and not path.suffix):
        repository = KNOWN[name].repository if name in KNOWN else name.partition(":")[0]
        cached = "in the local Hugging Face cache" if _cached(repository) else "not looked up: a hub name, read when the run starts"
        return SourceFinding(key, name, f"{repository}: {cached}", KNOWN[name].problems if name in KNOWN else None)
    if not path.is_file() or path.stat().st_size <= READ_WHOLE:
        found = load_problems(name, duplicates=recipe.data_source.duplicates, conflicts=recipe.data_source.conflicts)
        return SourceFinding(key, name, f"{found.rows:,} rows, {found.distinct:,} distinct problems", found.distinct, True)
    rows = sum(1 for _ in _usable_rows(name))
    return SourceFinding(key, name, f"{path.stat().st_size / 1e6:,.0f} MB, first {rows:,} rows read and usable")


def _usable_rows(name: str) -> Iterator[tuple[str, str]]:
    from .math_data import problem_of, rows

    for number, row in enumerate(itertools.islice(rows(name), _PEEK_ROWS), 1):
        yield problem_of(row, f"{name}, row {number}")


def _cached(repository: str) -> bool:
    from huggingface_hub.constants import HF_HOME, HF_HUB_CACHE

    hub = Path(HF_HUB_CACHE) / ("datasets--" + repository.replace("/", "--"))
    prepared = Path(os.environ.get("HF_DATASETS_CACHE", Path(HF_HOME) / "datasets")) / repository.replace("/", "___").lower()
    return any(folder.is_dir() and any(folder.iterdir()) for folder in (hub / "snapshots", prepared))

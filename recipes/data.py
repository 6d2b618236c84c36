"""The prompts of a recipe's task, written once into the run directory as verl reads them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from datasets import disable_progress_bars

from . import arithmetic

if TYPE_CHECKING:
    from .config import Recipe

TASKS = {"arithmetic": f"pkg://{arithmetic.__name__}"}
"""Module of each task, as verl names one; its `compute_score` is verl's reward function."""
HELD_OUT = 512
TRAIN_PROMPTS = 20000


def write_task_data(recipe: Recipe, folder: Path) -> tuple[Path, Path]:
    """Write train and held-out prompts of the recipe's task, unless they are there; returns their paths."""
    train, test = folder / "train.parquet", folder / "test.parquet"
    if train.is_file() and test.is_file():
        return train, test
    disable_progress_bars()
    return arithmetic.write_parquet(folder, TRAIN_PROMPTS, HELD_OUT, recipe.seed)

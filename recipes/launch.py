"""The commands that start a recipe on its machines: Ray on each node, then the job on the first one."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence

from omegaconf import DictConfig

from .config import Recipe

HEAD = "HEAD_ADDRESS"
"""Stands for the address of the first node, which only its owner knows."""


def commands(recipe: Recipe, verl: DictConfig, file: str, overrides: Sequence[str]) -> list[tuple[str, str]]:
    """(where, command) in the order in which they are run. One node needs no Ray of its own: the job starts one and ends it."""
    train = shlex.join(["samebits", "train", file, *overrides])
    nodes, gpus, port = verl.trainer.nnodes, verl.trainer.n_gpus_per_node, recipe.cluster.ray_port
    if nodes == 1:
        return [("this node", train)]
    environment = "RAY_AUTH_MODE=disabled RAY_worker_niceness=0"
    # Logical GPUs on a machine without: each stands for one worker.
    slots = f"--num-gpus={gpus}" + (f" --num-cpus={max(8, os.cpu_count() or 1)}" if recipe.device == "cpu" else "")
    return [
        ("first node", f"{environment} ray start --head --node-ip-address={HEAD} --port={port} {slots} --disable-usage-stats"),
        (
            f"each of the other {nodes - 1} node{'s' if nodes > 2 else ''}",
            f"{environment} ray start --address={HEAD}:{port} {slots} --disable-usage-stats",
        ),
        ("first node", f"RAY_ADDRESS={HEAD}:{port} RAY_AUTH_MODE=disabled {train}"),
        ("every node, at the end", "ray stop"),
    ]

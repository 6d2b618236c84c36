"""`samebits bench sync`: the real sender and engine, one sync after the other, part by part, beside a plain copy of the same bytes.

The job is started as `samebits train` starts it, with trainer, engine and the first sync, and takes no step: the same adapter is sent
again and again, each time into an emptied slot, and verified as in a run.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from samebits.alignment_checks.weights import verify_sync

from .bench_step import SYNC_PARTS, full_weights
from .config import Recipe, RecipeError, load_recipe
from .job import launched, open_trainer, outcome, versions, watch_of
from .phases import sync_metrics

SCHEMA = "samebits.bench.sync/1"


@ray.remote(num_cpus=1)
class SyncRunner:
    """Driver of the repeated syncs, in the place of the training loop's."""

    def run(self, config: DictConfig, recipe: Recipe, repeat: int) -> dict[str, Any]:
        """Syncs, a first one left out, and the copy."""
        with open_trainer(config, recipe) as trainer:
            trainer.init()
            servers, version = trainer.llm_server_manager.server_handles, trainer.global_steps
            syncs = [_sync(trainer, servers, version) for _ in range(repeat + 1)][1:]
            copy = max(ray.get([s.copy_seconds.remote(syncs[0]["bytes"]) for s in servers]))
            return {"syncs": syncs, "copy_seconds": copy}


def _sync(trainer: Any, servers: Sequence[Any], version: int) -> dict[str, Any]:
    """One verified sync. Raises `WeightMismatch`."""
    ray.get([s.forget_adapter.remote() for s in servers])
    trainer.checkpoint_manager.sleep_replicas()  # as after each rollout; nothing where the recipe has no sleep
    started = time.perf_counter()
    trainer.checkpoint_manager.update_weights(version)
    whole = time.perf_counter() - started
    reports = ray.get([s.sync_report.remote() for s in servers])
    verdict = verify_sync(reports, version, trainer.recipe.profile.hash)
    return {"seconds": verdict.seconds, "whole_seconds": whole, "bytes": verdict.bytes, "tensors": verdict.tensors, **sync_metrics(reports)}


def run(recipe: str, overrides: Sequence[str], repeat: int, console: Console, verbose: bool) -> dict[str, Any]:
    """Measure `repeat` syncs of a recipe. Raises `RecipeError`, and `JobFailed` when the job stops."""
    for key in ("run_dir", "trainer.val_before_train"):
        if any(given.split("=")[0] == key for given in overrides):
            raise RecipeError(f"{key} is set by the measurement itself")
    with tempfile.TemporaryDirectory(prefix="samebits-bench-") as folder:
        own, verl = load_recipe(recipe, [*overrides, f"run_dir={folder}/run", "trainer.val_before_train=false"], planned=True)
        with launched(own, verl, verbose) as (config, options):
            watch = watch_of(config)
            job = SyncRunner.options(**options).remote().run.remote(config, own, repeat)
            with console.status("trainer and engine start, then they sync"):
                found = outcome(job, watch)
    return result(recipe, own, found)


def result(subject: str, recipe: Recipe, found: Mapping[str, Any]) -> dict[str, Any]:
    """What `SyncRunner.run` found, as the report has it: the sync of median seconds with its parts, which therefore add up."""
    syncs = found["syncs"]
    middle = sorted(syncs, key=lambda sync: sync["seconds"])[(len(syncs) - 1) // 2]
    keys = {name: f"sync/{name}_seconds" for name in SYNC_PARTS if f"sync/{name}_seconds" in middle}
    parts = {name: middle[key] for name, key in keys.items()}
    seconds, size, copy = middle["seconds"], syncs[0]["bytes"], found["copy_seconds"]
    parts["rest"] = seconds - sum(parts.values())
    packed, wide = full_weights(recipe)
    return {
        "schema": SCHEMA,
        "subject": subject,
        "device": recipe.device,
        "profile": recipe.profile.name,
        "syncs": len(syncs),
        "path": sorted({sync["sync/path"] for sync in syncs}),
        "seconds": seconds,
        "fastest": min(sync["seconds"] for sync in syncs),
        "slowest": max(sync["seconds"] for sync in syncs),
        "with_verl": statistics.median(sync["whole_seconds"] for sync in syncs),
        "parts": parts,
        "bytes": size,
        "tensors": syncs[0]["tensors"],
        "gb_per_second": size / seconds / 1e9,
        "copy_seconds": copy,
        "copy_gb_per_second": size / copy / 1e9,
        "times_a_copy": seconds / copy,
        "full_packed_bytes": packed,
        "full_bf16_bytes": wide,
        "versions": versions(),
    }


def show(found: Mapping[str, Any], console: Console) -> None:
    """The table and what it is held against."""
    span = f"{found['fastest']:.4f} to {found['slowest']:.4f}"
    table = Table(title=f"{found['subject']}: {found['syncs']} syncs by {', '.join(found['path'])}, {span} s")
    table.add_column("part")
    for name in ("seconds", "share", "GB/s"):
        table.add_column(name, justify="right")
    for name, seconds in found["parts"].items():
        rate = f"{found['bytes'] / seconds / 1e9:.3f}" if seconds > 0 and name != "rest" else ""
        table.add_row(name, f"{seconds:.5f}", f"{seconds / found['seconds']:.1%}", rate)
    table.add_row("sync", f"{found['seconds']:.5f}", "100.0%", f"{found['gb_per_second']:.3f}")
    table.add_row("with verl's part", f"{found['with_verl']:.5f}", "", "")
    table.add_row("plain copy on the device", f"{found['copy_seconds']:.6f}", "", f"{found['copy_gb_per_second']:.3f}")
    console.print(table)
    text = f"{found['bytes']:,} bytes in {found['tensors']} tensors, {found['times_a_copy']:.1f} times a plain copy of them"
    if found["full_packed_bytes"] is not None:
        text += f"; {found['bytes'] / found['full_packed_bytes']:.2%} of all weights packed, "
        text += f"{found['bytes'] / found['full_bf16_bytes']:.2%} of them in bf16"
    console.print(text)

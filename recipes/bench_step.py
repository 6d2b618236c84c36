"""`samebits bench step`: where the time and the memory of a training step go, measured on the real job.

A recipe is run for a few steps in a directory that is thrown away, a finished run is read where it lies: both are lines of `metrics.jsonl`,
and the table is made of them. The first steps are left out: there kernels are compiled and memory is found. Phases of one level add up to
the one above them; what no phase accounts for is shown as the rest. Evaluations and checkpoints are outside a step, and a full check,
which most steps do not have, is shown by itself.
"""

from __future__ import annotations

import statistics
import struct
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from . import bench_traces, memory_measured
from .config import TRACES, Recipe, RecipeError
from .phases import ENGINE, TRAINER

SCHEMA = "samebits.bench.step/1"
Line = Mapping[str, Any]
OWN = (
    "run_dir", "trainer.total_training_steps", "trainer.save_freq", "trainer.test_freq", "trainer.val_before_train", "checks.every",
    "tracing.first", "tracing.steps",
)  # fmt: skip
"""Keys that the measurement sets itself."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of a step, and what it is made of."""

    name: str
    key: str
    parts: tuple[tuple[str, str], ...] = ()
    """(name, key) of what lies inside it."""


SYNC_PARTS = ("export", "digest", "share", "write", "wait", "load", "verify")
"""What a sync is made of, in order; a path over the host has no share, one on the GPU no write. To wait for is an engine that wakes."""
PHASES = (
    Phase("rollout", "time/rollout", (("generate", "time/generate"), ("reward", "time/reward"), ("enqueue", "time/enqueue"))),
    Phase("collect", "time/collect", (("sleep", "time/sleep"),)),
    Phase("old logprobs", "time/old_logprobs"),
    Phase("full check", "time/check"),
    Phase("advantage", "time/advantage"),
    Phase("train", "time/train", (("forward", "time/forward"), ("backward", "time/backward"), ("optimizer", "time/optimizer"))),
    Phase("sync", "time/sync", (*((name, f"sync/{name}_seconds") for name in SYNC_PARTS), ("wake", "time/wake"))),
    Phase("check of the sync", "time/sync_check"),
)


class NotMeasured(ValueError):
    """A run has nothing to show. The message is one line."""


def run(
    recipe: str, overrides: Sequence[str], steps: int, warm_up: int, console: Console, verbose: bool, traced: int = 1
) -> dict[str, Any]:
    """Run a recipe in a directory of its own: `warm_up` steps, `steps` that are measured, and `traced` whose communication is recorded.

    Recorded steps are slower and are not measured. Raises `RecipeError`, and `JobFailed` when the job stops.
    """
    from .config import load_recipe
    from .job import train
    from .run_dir import read_metrics

    taken = [key for key in OWN for given in overrides if given.split("=")[0] == key]
    if taken:
        raise RecipeError(f"{taken[0]} is set by the measurement itself")
    with tempfile.TemporaryDirectory(prefix="samebits-bench-") as folder:
        values = (f"{folder}/run", warm_up + steps + traced, -1, -1, "false", 0, warm_up + steps + 1, traced)
        own, verl = load_recipe(recipe, [*overrides, *(f"{k}={v}" for k, v in zip(OWN, values, strict=True))], planned=True)
        train(own, verl, console, verbose)
        found = measured(recipe, own, read_metrics(own.folder / "metrics.jsonl"), warm_up)
        return found | _recorded(own, verl, found["tokens"])


def of_run(folder: Path, warm_up: int) -> dict[str, Any]:
    """Measure what a run has left. Raises `RecipeError`, `NotMeasured`."""
    from .run_dir import load_run, read_metrics

    recipe, verl = load_run(folder)
    found = measured(str(folder), recipe, read_metrics(folder / "metrics.jsonl"), warm_up)
    return found | _recorded(recipe, verl, found["tokens"])


def _recorded(recipe: Recipe, verl: DictConfig, tokens: Mapping[str, float | None]) -> dict[str, Any]:
    """What lies beside a run's metrics: its GPUs, the recordings of its ranks, and what was planned of their memory."""
    from samebits.kernels import tracing

    folder = recipe.folder / TRACES
    records = tracing.read(folder)
    every = (tokens["prompt"] or 0) + (tokens["response"] or 0)
    return {
        "gpus": verl.trainer.nnodes * verl.trainer.n_gpus_per_node,
        "communication": bench_traces.communication(records),
        "plan": memory_measured.compare(recipe, verl, every, records, memory_measured.engine_records(folder)),
    }


def measured(subject: str, recipe: Recipe, lines: Sequence[Line], warm_up: int) -> dict[str, Any]:
    """The result of `metrics.jsonl`'s `lines`, without the first `warm_up` steps and those that were recorded. Raises `NotMeasured`."""
    recorded = range(recipe.tracing.first, recipe.tracing.first + recipe.tracing.steps)
    trained = [line for line in lines if line["step"] > 0 and line["step"] not in recorded]
    steps = trained[warm_up:]
    if not steps:
        raise NotMeasured(f"{subject}: {len(trained)} steps, of which the first {warm_up} are left out: there is none to measure")
    seconds, shares = _times(steps)
    tokens = _tokens(steps)
    return {
        "schema": SCHEMA,
        "subject": subject,
        "device": recipe.device,
        "profile": recipe.profile.name,
        "kv_cache": recipe.profile.kv_cache,
        "ablation": vars(recipe.ablation),
        "steps": len(steps),
        "warm_up": warm_up,
        "seconds": seconds,
        "share": shares,
        "full_check_seconds": _mean(line["time/check"] for line in trained if "time/check" in line),
        "tokens": tokens,
        "first": _first(trained),
        "memory": {"trainer": _memory(steps, TRAINER), "engine": _memory(steps, ENGINE)},
        "sync": _sync(recipe, steps),
        "versions": _versions(),
    }


def _versions() -> dict[str, str]:
    from .job import versions

    return versions()


def _mean(values: Iterable[float]) -> float | None:
    found = [float(value) for value in values]
    return statistics.fmean(found) if found else None


def _times(steps: Sequence[Line]) -> tuple[dict[str, Any], dict[str, float]]:
    """Mean seconds of a step and of each phase, nested by name; and shares of the step, by name of the phase and `phase/part`."""

    def mean(key: str) -> float:
        return statistics.fmean(float(line.get(key, 0.0)) for line in steps)

    def there(key: str) -> bool:
        return any(key in line for line in steps)

    step = mean("time/step")
    phases: dict[str, Any] = {}
    for phase in PHASES:
        if not there(phase.key):
            continue
        parts = {name: mean(key) for name, key in phase.parts if there(key)}
        if parts:
            parts["rest"] = mean(phase.key) - sum(parts.values())
        phases[phase.name] = {"seconds": mean(phase.key), "parts": parts}
    rest = step - sum(phase["seconds"] for phase in phases.values())
    phases["rest"] = {"seconds": rest, "parts": {}}
    shares = {}
    for name, phase in phases.items():
        shares[name] = phase["seconds"] / step
        shares |= {f"{name}/{part}": value / step for part, value in phase["parts"].items()}
    times = [float(line["time/step"]) for line in steps]
    return {"step": step, "fastest": min(times), "slowest": max(times), "phases": phases}, shares


def _tokens(steps: Sequence[Line]) -> dict[str, float | None]:
    """Tokens of a step and rates in tokens a second; None where a run did not record them."""
    prompt, response = (_mean(line[f"tokens/{name}"] for line in steps if f"tokens/{name}" in line) for name in ("prompt", "response"))
    if prompt is None or response is None:
        return {"prompt": None, "response": None, "generated_per_second": None, "trained_per_second": None, "per_second": None}
    generate, train, step = (_mean(line[f"time/{name}"] for line in steps) for name in ("generate", "train", "step"))
    return {
        "prompt": prompt,
        "response": response,
        "generated_per_second": response / generate,
        "trained_per_second": (prompt + response) / train,
        "per_second": (prompt + response) / step,
    }


def _first(trained: Sequence[Line]) -> dict[str, Any] | None:
    """What step 1 drew and computed, with its loss as fp32: the same for the same batch, however many ranks share it. None without it."""
    line = next((line for line in trained if line["step"] == 1), None)
    if line is None or "samples/digest" not in line or "train/loss" not in line:
        return None
    loss = struct.unpack("f", struct.pack("f", line["train/loss"]))[0]
    return {"samples": line["samples/digest"], "loss": loss, "max_abs": line["mismatch/max_abs"]}


def _memory(steps: Sequence[Line], prefix: str) -> dict[str, dict[str, int]]:
    """Largest peak over the steps, by phase and kind."""
    found: dict[str, dict[str, int]] = {}
    for line in steps:
        for key, size in line.items():
            if key.startswith(prefix):
                phase, kind = key.removeprefix(prefix).split("/")
                kinds = found.setdefault(phase, {})
                kinds[kind] = max(int(size), kinds.get(kind, 0))
    return found


def _sync(recipe: Recipe, steps: Sequence[Line]) -> dict[str, Any]:
    """What went over the wire in a sync, beside what whole weights would be."""
    packed, wide = full_weights(recipe)
    sent = int(steps[-1]["sync/bytes"])
    return {
        "bytes": sent,
        "tensors": int(steps[-1]["sync/tensors"]),
        "seconds": _mean(line["sync/seconds"] for line in steps),
        "paths": sorted({line["sync/path"] for line in steps if "sync/path" in line}),
        "full_packed_bytes": packed,
        "full_bf16_bytes": wide,
        "share_of_packed": None if packed is None else sent / packed,
        "share_of_bf16": None if wide is None else sent / wide,
    }


def full_weights(recipe: Recipe) -> tuple[int | None, int | None]:
    """Bytes of all weights of the recipe's model, as its checkpoint has them and in bf16; None where the checkpoint is not here."""
    from samebits.quant.checkpoint import Checkpoint, CheckpointError

    from .plan_tables import model_of_config

    try:
        checkpoint = Checkpoint(recipe.model_path)
    except CheckpointError:
        return None, None
    model = model_of_config(checkpoint.config, recipe.model_path.name)
    router, ends = model.moe_layers * model.experts * model.hidden, 2 * model.vocabulary * model.hidden
    weights = model.expert_parameters + model.projection_parameters + router + ends
    return sum(file.stat().st_size for file in recipe.model_path.glob("*.safetensors")), 2 * weights


def show(result: Mapping[str, Any], console: Console) -> None:
    """The tables."""
    seconds, tokens = result["seconds"], result["tokens"]
    span = f"{seconds['fastest']:.3f} to {seconds['slowest']:.3f}"
    title = f"{result['subject']}: a step of {seconds['step']:.3f} s ({span} in {result['steps']} steps)"
    table = Table(title=f"{title}, {result['profile']} on {result['device']}")
    table.add_column("phase")
    for name in ("seconds", "share"):
        table.add_column(name, justify="right")
    for name, phase in seconds["phases"].items():
        table.add_row(name, f"{phase['seconds']:.4f}", f"{result['share'][name]:.1%}")
        for part, value in phase["parts"].items():
            table.add_row(f"  {part}", f"{value:.4f}", f"{result['share'][f'{name}/{part}']:.1%}", style="dim")
    console.print(table)
    if result["full_check_seconds"] is not None:
        console.print(f"a full check takes {result['full_check_seconds']:.3f} s, in the first step of a start and each of checks.every")
    if tokens["prompt"] is not None:
        console.print(
            f"{tokens['prompt']:,.0f} prompt and {tokens['response']:,.0f} response tokens a step: {tokens['generated_per_second']:,.0f} "
            f"generated, {tokens['trained_per_second']:,.0f} trained and {tokens['per_second']:,.0f} overall a second"
        )
    show_memory(result["memory"], console)
    if result.get("communication") is not None:
        bench_traces.show(result["communication"], console)
    if result.get("plan") is not None:
        memory_measured.show(result["plan"], console)
    sync = result["sync"]
    text = (
        f"a sync sends {sync['bytes']:,} bytes in {sync['tensors']} tensors by {', '.join(sync['paths']) or 'a path that was not recorded'}"
    )
    if sync["full_packed_bytes"] is not None:
        text += f"; all weights are {sync['full_packed_bytes']:,} bytes packed ({sync['share_of_packed']:.2%}), "
        text += f"{sync['full_bf16_bytes']:,} in bf16 ({sync['share_of_bf16']:.2%})"
    console.print(text)


def show_memory(memory: Mapping[str, Mapping[str, Mapping[str, int]]], console: Console) -> None:
    """Peaks by role and phase; nothing where none was measured."""
    kinds = sorted({kind for phases in memory.values() for found in phases.values() for kind in found})
    if not kinds:
        return
    table = Table(title="peak memory of a process, MiB")
    for name in ("role", "phase"):
        table.add_column(name)
    for kind in kinds:
        table.add_column(kind, justify="right")
    for role, phases in memory.items():
        for phase, found in phases.items():
            table.add_row(role, phase, *(f"{found[kind] / 2**20:,.1f}" if kind in found else "" for kind in kinds))
    console.print(table)

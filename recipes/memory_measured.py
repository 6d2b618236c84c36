"""What a plan says of memory beside what a run of the same recipe measured, by role, phase and GPU.

Held parts (base, adapter, moments; weights, slots, cache) are counted from the tensors of each rank and must be the plan's. Peaks of phases
come from torch's allocator: on CUDA as it kept them, on a CPU from the recorded step, for the trainer alone; the engine's processes tell
only their resident set there, in which libraries lie that no plan knows. Of a phase with work in it the plan is an estimate, of the Hopper
kernels: the references that compute on a CPU keep more.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from .config import Recipe
from .memory import engine_parts, trainer_parts
from .memory_parts import trainer_state
from .validate import examine

NEAR = 0.10
"""How far a measurement may lie from its prediction."""
NOTES = (
    "held parts are counted, work is estimated; a pool of graphs, NCCL's buffers and the CUDA context are outside of torch's allocator",
    "allocated is what tensors had; the allocator holds more (reserved), by blocks of other sizes that it keeps",
)
ASLEEP = (
    "torch's allocator goes on counting what an engine gave back when it went to sleep: while an adapter is loaded its cache is not there"
)


def compare(
    recipe: Recipe, verl: DictConfig, tokens: float, records: Sequence[Mapping[str, Any]], engines: Sequence[Mapping[str, Any]]
) -> dict[str, Any] | None:
    """Prediction and measurement; None where no step was recorded.

    Args:
        tokens: of a step, prompts and responses of all ranks. records: of `kernels.tracing.read`. engines: of `engine_records`.
    """
    if not records:
        return None
    found = examine(recipe, verl, planned=True)
    gpus = found.layout.gpus
    micro_batch = int(min(-(-tokens // gpus), verl.actor_rollout_ref.actor.ppo_max_token_len_per_gpu))
    phases = trainer_parts(recipe, verl, found, micro_batch)
    cards = [counted["card"] for one in engines for counted in one["held"] if "card" in counted]
    engine, _ = engine_parts(recipe, verl, found, min(cards, default=None))
    last = max(record["step"] for record in records)
    of_step = [record for record in records if record["step"] == last]
    held = {record["rank"]: record["held"] for record in of_step if record["stretch"] == "train"}
    return {
        "micro_batch_tokens": micro_batch,
        "held": [
            *_held("trainer", trainer_state(recipe, found), held),
            *_held(
                "engine",
                {
                    "weights": engine["engine: base"],
                    "adapter_slots": engine["engine: adapter slots"],
                    "kv_cache": engine["engine: KV cache"],
                },
                {f"{one['replica']}.{rank}": counted for one in engines for rank, counted in enumerate(one["held"])},
            ),
        ],
        "phases": [*_trainer_phases(phases, of_step, held), *_engine_phases(engine, engines)],
        "notes": [*NOTES, *_of_the_engine(verl, cards)],
    }


def _of_the_engine(verl: DictConfig, cards: Sequence[int]) -> list[str]:
    """What the numbers of an engine on CUDA rest on."""
    if not cards:
        return []
    rollout = verl.actor_rollout_ref.rollout
    share = (
        f"the engine takes {rollout.gpu_memory_utilization:g} of a card's {min(cards) / 1e6:,.0f} MB, and its cache what is left of that"
    )
    return [share, *([ASLEEP] if rollout.free_cache_engine else [])]


def engine_records(folder: Path) -> list[dict[str, Any]]:
    """What the engine ranks held in the last recorded step of a run; nothing where none was recorded."""
    files = sorted(folder.glob("engines_*.json"), key=lambda file: int(file.stem.rpartition("_")[2]))
    return json.loads(files[-1].read_text()) if files else []


def _held(role: str, planned: Mapping[str, float], counted: Mapping[Any, Mapping[str, int]]) -> list[dict[str, Any]]:
    return [
        {"role": role, "part": part, "planned": size, "counted": {str(rank): one[part] for rank, one in sorted(counted.items())}}
        for part, size in planned.items()
    ]


def _trainer_phases(
    planned: Mapping[str, Mapping[str, float]], records: Sequence[Mapping[str, Any]], held: Mapping[int, Mapping[str, int]]
) -> list[dict[str, Any]]:
    found = []
    for phase, parts in planned.items():
        measured = {}
        for record in records:
            peak = record["phases"].get(phase, {}).get("peak")
            if peak is not None:  # on a CPU beside what was held; gradients of the step before are gone by then
                beside = sum(size for part, size in held[record["rank"]].items() if part != "gradient") if record["device"] == "cpu" else 0
                measured[str(record["rank"])] = peak + beside
        found.append(_phase("trainer", phase, parts, measured, "allocated"))
    return found


def _engine_phases(planned: Mapping[str, float], engines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for phase in dict.fromkeys(name for one in engines for name in one["memory"]):
        kinds = [set(one["memory"].get(phase, {})) for one in engines]
        kind = "allocated" if all("allocated" in known for known in kinds) else "resident"
        measured = {str(one["replica"]): one["memory"][phase][kind] for one in engines if kind in one["memory"].get(phase, {})}
        parts = {name: size for name, size in planned.items() if phase == "rollout" or name != "engine: one forward"}
        found.append(_phase("engine", phase, parts, measured, kind))
    return found


def _phase(role: str, phase: str, parts: Mapping[str, float], measured: Mapping[str, int], kind: str) -> dict[str, Any]:
    total = sum(parts.values())
    ratio = max(measured.values()) / total if measured and kind == "allocated" else None
    return {
        "role": role,
        "phase": phase,
        "parts": dict(parts),
        "planned": total,
        "measured": dict(measured),
        "kind": kind,
        "ratio": ratio,
        "near": None if ratio is None else abs(ratio - 1) <= NEAR,
    }


def show(found: Mapping[str, Any], console: Console) -> None:
    """Two tables: what is held, and the peaks of phases."""
    table = Table(title="held by each process, MB: planned and counted")
    for name in ("role", "part"):
        table.add_column(name)
    for name in ("planned", "counted, least", "counted, most"):
        table.add_column(name, justify="right")
    for row in found["held"]:
        sizes = row["counted"].values()
        counted = [f"{size / 1e6:,.3f}" for size in (min(sizes), max(sizes))] if sizes else ["", ""]
        table.add_row(row["role"], row["part"], f"{row['planned'] / 1e6:,.3f}", *counted)
    console.print(table)
    table = Table(title=f"peaks, MB: planned and measured (a micro-batch of {found['micro_batch_tokens']:,} tokens a rank)")
    for name in ("role", "phase", "largest parts planned"):
        table.add_column(name)
    for name in ("planned", "measured, each process", "of planned"):
        table.add_column(name, justify="right")
    for row in found["phases"]:
        largest = sorted(row["parts"].items(), key=lambda part: -part[1])[:3]
        parts = ", ".join(f"{name.partition(': ')[2]} {size / 1e6:,.1f}" for name, size in largest)
        sizes = ", ".join(f"{size / 1e6:,.1f}" for size in row["measured"].values()) + ("" if row["kind"] == "allocated" else " resident")
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.0%}" + ("" if row["near"] else " (not near)")
        table.add_row(row["role"], row["phase"], parts, f"{row['planned'] / 1e6:,.1f}", sizes, ratio)
    console.print(table)
    for note in found["notes"]:
        console.print(f"  - {note}", highlight=False, soft_wrap=True, markup=False)

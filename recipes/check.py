"""`samebits train RECIPE --check`: what a recipe will do and whether it can, from files and arithmetic alone.

No GPU, no weights, no network. A recipe that is wrong raises `RecipeError`, as `samebits train` would; one whose plan passes a GPU's
memory raises `DoesNotFit`. What this version of samebits cannot run of a sound recipe is listed, since a plan is of use before that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from .config import Recipe, RecipeError, load_recipe
from .data import SourceFinding, look_up
from .launch import commands
from .math_data import DataError
from .memory import MemoryReport, Phase, engine_shortage, plan
from .validate import Validated, examine, require_enough


class DoesNotFit(RuntimeError):
    """The plan passes a GPU's memory. The message is one line."""


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that a check found."""

    recipe: Recipe
    verl: DictConfig
    found: Validated
    data: tuple[SourceFinding, ...]
    memory: MemoryReport
    commands: tuple[tuple[str, str], ...]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        layout, profile = self.found.layout, self.recipe.profile
        return {
            "name": self.recipe.name,
            "runnable": not self.found.missing and self.found.checkpoint_here,
            "missing": list(self.found.missing),
            "checkpoint_here": self.found.checkpoint_here,
            "model": self.found.model.title,
            "gpu": self.found.gpu.title if self.found.gpu else None,
            "layout": asdict(layout) | {"gpus": layout.gpus, "replicas": layout.replicas},
            "profile": {"name": profile.name, "hash": profile.hash, "weights_hash": profile.weights_hash, "kv_cache": profile.kv_cache},
            "data": [asdict(one) for one in self.data],
            "memory": self.memory.to_dict(),
            "commands": [{"where": where, "command": command} for where, command in self.commands],
        }


def check(file: str, overrides: Sequence[str] = ()) -> Report:
    """Compose and check a recipe. Raises `RecipeError` on a wrong one, `DoesNotFit` when its plan passes a GPU's memory."""
    recipe, verl = load_recipe(file, overrides, planned=True)
    found = examine(recipe, verl, planned=True)
    try:
        data = tuple(look_up(recipe))
    except DataError as error:
        raise RecipeError(str(error)) from None
    if data[0].problems is not None:
        require_enough(verl, data[0].problems)
    memory = plan(recipe, verl, found)
    for phase in memory.phases:
        if phase.short:
            raise DoesNotFit(_shortage(phase, recipe, verl, found))
    if (shortage := engine_shortage(recipe, verl, found)) is not None:
        raise DoesNotFit(shortage)
    return Report(recipe, verl, found, data, memory, tuple(commands(recipe, verl, file, overrides)))


def _shortage(phase: Phase, recipe: Recipe, verl: DictConfig, found: Validated) -> str:
    largest = max(phase.parts, key=phase.parts.__getitem__)
    share = recipe.cluster.usable_share
    return (
        f"does not fit: phase {phase.name} needs {phase.total / 1e9:.1f} GB of each {found.gpu.title}, {phase.usable / 1e9:.1f} of "
        f"{found.gpu.memory_gb:.1f} GB are usable (cluster.usable_share={share}): {phase.short / 1e9:.1f} GB missing; "
        f"largest part: {largest}, {phase.parts[largest] / 1e9:.1f} GB"
    )


def _size(count: float) -> str:
    return f"{count / 1e9:,.2f} GB" if abs(count) >= 1e8 else f"{count / 1e6:,.2f} MB"


def show(report: Report, console: Console) -> None:
    """Print a report."""
    recipe, verl, found = report.recipe, report.verl, report.found
    layout, profile, rollout = found.layout, recipe.profile, verl.actor_rollout_ref.rollout

    def line(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True, markup=False)

    gpu = found.gpu.title if found.gpu else recipe.device
    here = "" if found.checkpoint_here else f" (sizes of {recipe.architecture}; no checkpoint at {recipe.model_path} yet)"
    line(f"{recipe.name}: {found.model.title} on {layout.nodes} x {layout.gpus_per_node} {gpu}{here}")
    line(f"numerics: {profile.name}, {profile.activations} activations, KV cache {profile.kv_cache}, hash {profile.hash}")
    spread = f"experts over {layout.expert_ranks}, sequences over {layout.engine_gpus}" if layout.engine_gpus > 1 else "one GPU each"
    if layout.tensor_ranks > 1:
        spread = f"experts, heads and all large weights over {layout.tensor_ranks} GPUs each"
    line(f"layout: {layout.replicas} engine replicas ({spread}), trainer sharded over {layout.fsdp} of {layout.gpus} ranks")
    samples = verl.data.train_batch_size * rollout.n
    line(
        f"step: {verl.data.train_batch_size} prompts x {rollout.n} = {samples:,} samples, {samples // layout.gpus} a rank; "
        f"{verl.data.max_prompt_length:,} + {verl.data.max_response_length:,} tokens; {verl.trainer.total_training_steps} steps"
    )
    line(f"adapter: rank {recipe.lora.rank} on {recipe.lora.targets}, {report.memory.adapter_parameters:,} parameters")
    line("sync: " + ", ".join(f"{_size(count)} {what}" for what, count in report.memory.sync.items()))
    for one in report.data:
        known = f", {one.problems:,} problems" if one.problems is not None and not one.complete else ""
        line(f"{one.key}: {one.source}: {one.state}{known}")
    console.print(_memory_table(report.memory))
    if report.memory.sequences is not None:
        line(f"KV cache of {report.memory.sequences:,} full-length sequences on each engine GPU")
    line("memory of a node: " + ", ".join(f"{_size(count)} {what}" for what, count in report.memory.host.items()))
    for text in report.memory.assumptions:
        line(f"  - {text}")
    line("start:")
    for where, command in report.commands:
        line(f"  # {where}")
        line(f"  {command}")
    if found.missing:
        line("this version of samebits cannot run the recipe:")
        for text in found.missing:
            line(f"  - {text}")
    elif not found.checkpoint_here:
        maker = "mini-m3" if recipe.architecture == "mini-m3" else "quantize SOURCE"
        line(f"samebits {maker} {recipe.model} makes the checkpoint that the recipe trains")


def _memory_table(memory: MemoryReport) -> Table:
    table = Table(title="memory of each GPU", title_justify="left")
    table.add_column("")
    for phase in memory.phases:
        table.add_column(phase.name, justify="right")
    names = dict.fromkeys(name for phase in memory.phases for name in phase.parts)
    for name in names:
        values = [phase.parts.get(name, 0.0) for phase in memory.phases]
        if any(values):
            table.add_row(name, *(_size(value) if value else "" for value in values))
    table.add_section()
    table.add_row("together", *(_size(phase.total) for phase in memory.phases), style="bold")
    if memory.phases[0].usable is not None:
        table.add_row("usable", *(_size(phase.usable or 0.0) for phase in memory.phases))
        table.add_row("left", *(_size((phase.usable or 0.0) - phase.total) for phase in memory.phases))
    return table

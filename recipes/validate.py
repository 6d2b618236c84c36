"""Everything about a recipe that can be known to be wrong before anything starts.

Each rule raises `RecipeError` in one line. The rules come from faults that real runs had: settings that were accepted and then did
nothing, or that made trainer and engine disagree.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from samebits.quant.adapter import AdapterSpec, ModelShape, target_roles
from samebits.quant.checkpoint import Checkpoint, CheckpointError
from samebits.quant.profile import ProfileMismatch, require_same

from .config import Recipe, RecipeError, verl_defaults
from .data import TASKS

_VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def validate(recipe: Recipe, verl: DictConfig) -> AdapterSpec:
    """Check a composed recipe; returns what its adapter must consist of. Raises `RecipeError`."""
    _types(verl)
    for key in ("trainer.n_gpus_per_node", "trainer.nnodes", "data.train_batch_size", "actor_rollout_ref.rollout.max_model_len"):
        value = OmegaConf.select(verl, key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise RecipeError(f"{key} must be a whole number of at least 1, not {value!r}")
    spec = _model(recipe)
    _sampling(verl)
    _correction(verl)
    _sync(verl)
    _batches(verl)
    if recipe.task not in TASKS:
        raise RecipeError(f"task: unknown task {recipe.task!r}; known: {', '.join(TASKS)}")
    if recipe.fault.kind not in (None, "skip_sync"):
        raise RecipeError(f"fault.kind: unknown fault {recipe.fault.kind!r}; known: skip_sync")
    if not recipe.checks.max_kl > 0:
        raise RecipeError(f"checks.max_kl must be positive, not {recipe.checks.max_kl}")
    if not recipe.checks.kl_warn > 0:
        raise RecipeError(f"checks.kl_warn must be positive, not {recipe.checks.kl_warn}")
    if recipe.checks.every < 0:
        raise RecipeError(f"checks.every must not be negative, it is {recipe.checks.every}")
    if not 0 <= recipe.seed < 2**31:
        raise RecipeError(f"seed must lie within 0 and 2147483647, not {recipe.seed}")
    if recipe.name != Path(recipe.name).name or recipe.name in ("", ".", ".."):
        raise RecipeError(f"name must be the plain name of a folder, not {recipe.name!r}; for another place set run_dir")
    if not verl.actor_rollout_ref.actor.optim.lr > 0:
        raise RecipeError(f"actor_rollout_ref.actor.optim.lr must be positive, not {verl.actor_rollout_ref.actor.optim.lr}")
    if recipe.threads is not None and recipe.threads < 1:
        raise RecipeError(f"threads must be at least 1, not {recipe.threads}")
    return spec


def _types(verl: DictConfig) -> None:
    """verl's configuration is untyped: hold each value against the type of its default."""
    defaults = dict(_leaves(verl_defaults()))
    for key, value in _leaves(verl):
        default = defaults.get(key)
        if default is None or value is None or isinstance(default, str) or isinstance(value, type(default)):
            continue
        if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
            continue
        if isinstance(value, str) or isinstance(default, bool) != isinstance(value, bool):
            raise RecipeError(f"{key}: expected {type(default).__name__}, got {value!r}")


def _leaves(config: DictConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key in config:
        if OmegaConf.is_missing(config, key) or OmegaConf.is_interpolation(config, key):
            continue
        value = config[key]
        if isinstance(value, DictConfig):
            yield from _leaves(value, f"{prefix}{key}.")
        elif not isinstance(value, ListConfig):
            yield f"{prefix}{key}", value


def _model(recipe: Recipe) -> AdapterSpec:
    profile = recipe.profile
    try:
        roles = target_roles(recipe.lora.targets)
    except ValueError as error:
        raise RecipeError(str(error)) from None
    if recipe.numerics.hash is not None and recipe.numerics.hash != profile.hash:
        raise RecipeError(f"numerics.hash is {recipe.numerics.hash}, but profile {profile.name} has hash {profile.hash}")
    if not recipe.model:
        raise RecipeError("model: no checkpoint is named")
    try:
        checkpoint = Checkpoint(recipe.model_path)
        require_same("the checkpoint", checkpoint.weights_hash, f"profile {profile.name}", profile.weights_hash)
        shape = ModelShape.from_config(checkpoint.config)
    except (CheckpointError, ProfileMismatch, ValueError) as error:
        raise RecipeError(f"model: {error}") from None
    if not (recipe.model_path / "tokenizer.json").is_file():
        raise RecipeError(f"model: {recipe.model_path} has no tokenizer.json")
    if recipe.lora.rank not in _VLLM_RANKS:
        raise RecipeError(f"lora.rank: vLLM serves ranks {', '.join(map(str, _VLLM_RANKS))}, not {recipe.lora.rank}")
    if recipe.lora.alpha <= 0:
        raise RecipeError(f"lora.alpha must be positive, not {recipe.lora.alpha}")
    return AdapterSpec(shape, recipe.lora.rank, roles, profile.lora)


def _sampling(verl: DictConfig) -> None:
    rollout = verl.actor_rollout_ref.rollout
    name = "actor_rollout_ref.rollout"
    if not rollout.temperature > 0:
        raise RecipeError(f"{name}.temperature must be positive for training, not {rollout.temperature}")
    if rollout.top_p != 1.0:
        raise RecipeError(
            f"{name}.top_p={rollout.top_p} renormalises the engine's logprobs over the kept tokens, which the trainer does not know: "
            "use top_p=1"
        )
    if rollout.top_k not in (-1, 0):
        raise RecipeError(
            f"{name}.top_k={rollout.top_k} renormalises the engine's logprobs over the kept tokens, which the trainer does not know: "
            "use top_k=-1"
        )
    if rollout.logprobs_mode != "processed_logprobs":
        raise RecipeError(
            f"{name}.logprobs_mode={rollout.logprobs_mode} ignores the temperature ({rollout.temperature}) that the trainer applies: "
            "use processed_logprobs"
        )
    if rollout.n < 2:
        raise RecipeError(f"{name}.n={rollout.n}: GRPO compares samples of one prompt, so it needs at least 2")
    room = verl.data.max_prompt_length + verl.data.max_response_length
    if rollout.max_model_len is not None and rollout.max_model_len < room:
        raise RecipeError(f"{name}.max_model_len={rollout.max_model_len} is less than prompt plus response ({room})")


def _correction(verl: DictConfig) -> None:
    correction = verl.algorithm.rollout_correction
    loss = verl.actor_rollout_ref.actor.policy_loss.loss_mode
    if loss != "samebits_tis":
        raise RecipeError(
            f"importance sampling is configured (algorithm.rollout_correction.rollout_is={correction.rollout_is}) but inactive: "
            f"actor_rollout_ref.actor.policy_loss.loss_mode={loss}, use samebits_tis"
        )
    if correction.rollout_is != "token":
        raise RecipeError(f"algorithm.rollout_correction.rollout_is={correction.rollout_is}: the objective corrects by token")
    if not correction.bypass_mode:
        raise RecipeError(
            "importance sampling is configured but inactive: algorithm.rollout_correction.bypass_mode=false recomputes old logprobs, "
            "while rollout logprobs are the old logprobs here"
        )
    cap = correction.rollout_is_threshold
    if isinstance(cap, str) or not cap >= 1:
        raise RecipeError(f"algorithm.rollout_correction.rollout_is_threshold={cap}: the cap must be a number of at least 1")
    if not verl.actor_rollout_ref.rollout.calculate_log_probs:
        raise RecipeError("importance sampling is configured but inactive: actor_rollout_ref.rollout.calculate_log_probs=false")
    if verl.actor_rollout_ref.actor.use_kl_loss or verl.algorithm.use_kl_in_reward:
        raise RecipeError("a KL term needs a reference model, which the objective does not use")
    if verl.actor_rollout_ref.actor.loss_agg_mode != "token-mean":
        raise RecipeError(f"actor_rollout_ref.actor.loss_agg_mode={verl.actor_rollout_ref.actor.loss_agg_mode}: use token-mean")


def _sync(verl: DictConfig) -> None:
    rollout = verl.actor_rollout_ref.rollout
    if rollout.name != "samebits":
        raise RecipeError(f"actor_rollout_ref.rollout.name={rollout.name}: adapters are synced by the samebits rollout only")
    if "dummy" in rollout.load_format:
        raise RecipeError(f"actor_rollout_ref.rollout.load_format={rollout.load_format} leaves the base random: use safetensors")
    if verl.actor_rollout_ref.model.lora.get("merge", False):
        raise RecipeError("actor_rollout_ref.model.lora.merge=true would round the adapter into 16-bit weights")
    if rollout.enable_rollout_routing_replay and not rollout.enable_prefix_caching:
        raise RecipeError("actor_rollout_ref.rollout.enable_prefix_caching=false: vLLM keeps the routes to replay with its cached blocks")
    if verl.trainer.v1.trainer_mode != "sync":
        raise RecipeError(f"trainer.v1.trainer_mode={verl.trainer.v1.trainer_mode}: one optimizer step a batch needs sync")


def _batches(verl: DictConfig) -> None:
    batch, mini = verl.data.train_batch_size, verl.actor_rollout_ref.actor.ppo_mini_batch_size
    if mini != batch or verl.actor_rollout_ref.actor.ppo_epochs != 1:
        raise RecipeError(
            f"one optimizer step a batch: ppo_mini_batch_size ({mini}) must equal data.train_batch_size ({batch}) and ppo_epochs be 1"
        )
    ranks = verl.trainer.n_gpus_per_node * verl.trainer.nnodes
    samples = batch * verl.actor_rollout_ref.rollout.n
    if samples % ranks:
        raise RecipeError(f"{batch} prompts x {verl.actor_rollout_ref.rollout.n} samples do not divide over {ranks} ranks")
    steps = verl.trainer.total_training_steps
    if not isinstance(steps, int) or steps < 1:
        raise RecipeError(f"trainer.total_training_steps must be a number of at least 1, not {steps!r}")
    longest = verl.data.max_prompt_length + verl.data.max_response_length
    budget = verl.actor_rollout_ref.actor.ppo_max_token_len_per_gpu
    if budget < longest:
        raise RecipeError(f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={budget} cannot hold one sequence of {longest} tokens")

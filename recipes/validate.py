"""Everything about a recipe that can be known to be wrong before anything starts.

Each rule raises `RecipeError` in one line. The rules come from faults that real runs had: settings that were accepted and then did
nothing, or that made trainer and engine disagree.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from samebits.quant.adapter import AdapterSpec, target_roles
from samebits.quant.checkpoint import Checkpoint, CheckpointError
from samebits.quant.profile import Format, ProfileMismatch, require_same
from samebits.quant.roles import Role

from .config import DataSource, Grading, Recipe, RecipeError, require_device, verl_defaults
from .data import TASKS
from .layout import Spread, require_engine_limits, require_whole, spread
from .math_data import PLACE
from .plan_tables import Gpu, Model, PlanError, adapter_shape, get_gpu, get_model, model_of_config
from .support import missing

_SIZES = (
    "trainer.n_gpus_per_node",
    "trainer.nnodes",
    "data.train_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "actor_rollout_ref.rollout.max_model_len",
    "actor_rollout_ref.rollout.max_num_seqs",
    "actor_rollout_ref.rollout.max_num_batched_tokens",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    "actor_rollout_ref.rollout.engine_kwargs.vllm.max_lora_rank",
)
SYNC_FAULTS = ("skip_sync", "wrong_tensor")
"""Faults on an adapter's way to an engine replica."""
FAULTS = (*SYNC_FAULTS, "oom", "hang")


@dataclass(frozen=True, slots=True)
class Validated:
    """What a sound recipe amounts to."""

    spec: AdapterSpec
    """What its adapter must consist of."""
    model: Model
    layout: Spread
    gpu: Gpu | None
    checkpoint_here: bool
    missing: tuple[str, ...]
    """What this version cannot run of it (see `support`)."""


def validate(recipe: Recipe, verl: DictConfig) -> AdapterSpec:
    """Check a composed recipe that is to run here and now; returns what its adapter must consist of. Raises `RecipeError`."""
    found = examine(recipe, verl, planned=True)
    if found.missing:
        raise RecipeError(found.missing[0])
    require_device(recipe.device)
    if not found.checkpoint_here:
        _model(recipe, planned=False)
    return found.spec


def examine(recipe: Recipe, verl: DictConfig, *, planned: bool = False) -> Validated:
    """Check a composed recipe. Raises `RecipeError` in one line naming the key.

    What this version cannot run is returned. `planned`: the checkpoint may be absent where `architecture` names its sizes.
    """
    _types(verl)
    require_whole(verl, *_SIZES)
    gpu = _gpu(recipe)
    model, here = _model(recipe, planned)
    spec = _adapter(recipe, model)
    _numerics(recipe, gpu)
    _sampling(verl)
    _correction(verl)
    _sync(recipe, verl)
    layout = spread(verl, model)
    _expert_parallel(recipe, verl, model, layout)
    require_engine_limits(verl, model, recipe.lora.rank)
    _batches(verl)
    _task(recipe, verl)
    _own_keys(recipe, verl, layout.replicas)
    return Validated(spec, model, layout, gpu, here, tuple(missing(recipe, verl, model, layout, gpu)))


def require_enough(verl: DictConfig, problems: int) -> None:
    """A batch larger than the data would leave an epoch without a step. Raises `RecipeError`."""
    if verl.data.train_batch_size > problems:
        raise RecipeError(f"data.train_batch_size={verl.data.train_batch_size} is more than the {problems} training problems")


def _fault(recipe: Recipe, replicas: int) -> None:
    fault = recipe.fault
    if fault.kind is not None and fault.kind not in FAULTS:
        raise RecipeError(f"fault.kind: unknown fault {fault.kind!r}; known: {', '.join(FAULTS)}")
    if fault.step < 0:
        raise RecipeError(f"fault.step must not be negative, it is {fault.step}")
    if fault.replica is None:
        return
    if fault.kind not in SYNC_FAULTS:
        raise RecipeError(f"fault.replica={fault.replica} would do nothing: only {' and '.join(SYNC_FAULTS)} befall a replica")
    if not 0 <= fault.replica < replicas:
        raise RecipeError(f"fault.replica={fault.replica}: the recipe has engine replicas 0 to {replicas - 1}")


def _own_keys(recipe: Recipe, verl: DictConfig, replicas: int) -> None:
    _fault(recipe, replicas)
    if not recipe.checks.max_kl > 0:
        raise RecipeError(f"checks.max_kl must be positive, not {recipe.checks.max_kl}")
    if not recipe.checks.kl_warn > 0:
        raise RecipeError(f"checks.kl_warn must be positive, not {recipe.checks.kl_warn}")
    if recipe.folder.exists() and not recipe.folder.is_dir():
        raise RecipeError(f"run_dir {recipe.folder}: is no folder")
    if recipe.tracing.first < 1 or recipe.tracing.steps < 0:
        raise RecipeError(f"tracing: step {recipe.tracing.first} and {recipe.tracing.steps} steps are no steps of a run")
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
    tracked = recipe.tracking.wandb
    if tracked is not None and tracked.mode not in ("online", "offline"):
        raise RecipeError(f"tracking.wandb.mode must be online or offline, not {tracked.mode!r}")
    if not 0 < recipe.cluster.usable_share <= 1:
        raise RecipeError(f"cluster.usable_share must lie within 0 and 1, not {recipe.cluster.usable_share}")
    if not 0 < recipe.cluster.ray_port < 65536:
        raise RecipeError(f"cluster.ray_port must be a port, not {recipe.cluster.ray_port}")


def _task(recipe: Recipe, verl: DictConfig) -> None:
    """The task, its data and its grading; what it does not read must not be set."""
    if recipe.task not in TASKS:
        near = difflib.get_close_matches(recipe.task, TASKS, 1)
        raise RecipeError(f"task: unknown task {recipe.task!r}; known: {', '.join(TASKS)}" + (f"; did you mean {near[0]}?" if near else ""))
    manager = verl.reward.reward_manager.name
    if manager != "naive":
        raise RecipeError(f"reward.reward_manager.name={manager} would do nothing: the rollout grades; see the keys of grading")
    source, grading = recipe.data_source, recipe.grading
    if recipe.task != "dapo-math":
        for name, have, default in (("data_source", source, DataSource()), ("grading", grading, Grading())):
            changed = [key for key in vars(default) if getattr(have, key) != getattr(default, key)]
            if changed:
                raise RecipeError(f"{name}.{changed[0]} would do nothing: task {recipe.task} does not read it")
        return
    for key in ("train", "test"):
        if not getattr(source, key):
            raise RecipeError(f"data_source.{key}: task dapo-math needs a known set, a hub name or a file")
    for key in ("duplicates", "conflicts"):
        if getattr(source, key) not in ("refuse", "drop"):
            raise RecipeError(f"data_source.{key} must be refuse or drop, not {getattr(source, key)!r}")
    if source.prompt_template is not None and source.prompt_template.count(PLACE) != 1:
        raise RecipeError(f"data_source.prompt_template must hold {PLACE} once")
    if grading.truncation not in ("wrong", "grade"):
        raise RecipeError(f"grading.truncation must be wrong or grade, not {grading.truncation!r}")
    longest = verl.data.max_response_length
    limit = longest if grading.max_response_tokens is None else grading.max_response_tokens
    if not 1 <= limit <= longest:
        raise RecipeError(f"grading.max_response_tokens={limit} must lie within 1 and data.max_response_length={longest}")
    if not 0 <= grading.overlong_buffer < limit:
        raise RecipeError(
            f"grading.overlong_buffer={grading.overlong_buffer} must be less than the longest response ({limit}): "
            "as long, it would punish every response"
        )
    if not grading.overlong_factor >= 0:
        raise RecipeError(f"grading.overlong_factor must not be negative, not {grading.overlong_factor}")


def _types(verl: DictConfig) -> None:
    """verl's configuration is untyped: hold each value against the type of its default."""
    defaults = _default_leaves()
    for key, value in _leaves(verl):
        default = defaults.get(key)
        if default is None or value is None or isinstance(default, str) or isinstance(value, type(default)):
            continue
        if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
            continue
        if isinstance(value, str) or isinstance(default, bool) != isinstance(value, bool):
            raise RecipeError(f"{key}: expected {type(default).__name__}, got {value!r}")


@functools.cache
def _default_leaves() -> dict[str, Any]:
    return dict(_leaves(verl_defaults()))


def _leaves(config: DictConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key in config:
        if OmegaConf.is_missing(config, key) or OmegaConf.is_interpolation(config, key):
            continue
        value = config[key]
        if isinstance(value, DictConfig):
            yield from _leaves(value, f"{prefix}{key}.")
        elif not isinstance(value, ListConfig):
            yield f"{prefix}{key}", value


def _gpu(recipe: Recipe) -> Gpu | None:
    try:
        return get_gpu(recipe.cluster.gpu) if recipe.cluster.gpu is not None else None
    except PlanError as error:
        raise RecipeError(f"cluster.gpu: {error}") from None


def _model(recipe: Recipe, planned: bool) -> tuple[Model, bool]:
    """Sizes of the model, and whether its checkpoint is here."""
    try:
        named = get_model(recipe.architecture) if recipe.architecture is not None else None
    except PlanError as error:
        raise RecipeError(f"architecture: {error}") from None
    if not recipe.model:
        raise RecipeError("model: no checkpoint is named")
    if named is not None and planned and not recipe.model_path.exists():
        return named, False
    profile = recipe.profile
    try:
        checkpoint = Checkpoint(recipe.model_path)
        require_same("the checkpoint", checkpoint.weights_hash, f"profile {profile.name}", profile.weights_hash)
        model = model_of_config(checkpoint.config, recipe.model_path.name)
    except (CheckpointError, ProfileMismatch, ValueError) as error:
        raise RecipeError(f"model: {error}") from None
    if not (recipe.model_path / "tokenizer.json").is_file():
        raise RecipeError(f"model: {recipe.model_path} has no tokenizer.json")
    if named is not None:
        for size in ("layers", "dense_layers", "hidden", "heads", "kv_heads", "head_dim", "experts", "expert_intermediate", "vocabulary"):
            have, want = getattr(model, size), getattr(named, size)
            if have != want:
                raise RecipeError(
                    f"architecture: {recipe.architecture} has {size} {want}, the checkpoint at {recipe.model_path} has {have}"
                )
    return model, True


def _adapter(recipe: Recipe, model: Model) -> AdapterSpec:
    try:
        roles = target_roles(recipe.lora.targets)
    except ValueError as error:
        raise RecipeError(f"lora.targets: {error}") from None
    held: tuple[Role, ...] = tuple(role for role in roles if all(model.matrix(role)) and model.count(role))
    if not held:
        raise RecipeError(f"lora.targets={recipe.lora.targets}: {model.title} has none of these weights")
    if recipe.lora.alpha <= 0:
        raise RecipeError(f"lora.alpha must be positive, not {recipe.lora.alpha}")
    return AdapterSpec(adapter_shape(model), recipe.lora.rank, held, recipe.profile.lora)


def _numerics(recipe: Recipe, gpu: Gpu | None) -> None:
    profile, parity = recipe.profile, recipe.numerics.parity
    if parity not in ("auto", "bitwise"):
        raise RecipeError(f"numerics.parity must be auto or bitwise, not {parity!r}")
    if parity == "bitwise" and (recipe.device != "cuda" or profile.activations == Format.FP32):
        raise RecipeError(
            f"numerics.parity=bitwise does not hold with profile {profile.name} on {recipe.device}: torch sums batches of other shapes in "
            "other orders there, and logprobs agree to some 1e-5 nats only; it is a promise of w4a16 on a GPU from Hopper on"
        )
    if recipe.numerics.hash is not None and recipe.numerics.hash != profile.hash:
        raise RecipeError(f"numerics.hash is {recipe.numerics.hash}, but profile {profile.name} has hash {profile.hash}")
    if profile.activations == "nvfp4" and gpu is not None and not gpu.nvfp4_mma:
        raise RecipeError(f"numerics.profile={profile.name} multiplies NVFP4 by NVFP4, which {gpu.title} cannot: use w4a16")


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
    if verl.algorithm.adv_estimator != "grpo":
        raise RecipeError(f"algorithm.adv_estimator={verl.algorithm.adv_estimator}: advantages are those of grpo, which needs no critic")


def _correction(verl: DictConfig) -> None:
    correction = verl.algorithm.rollout_correction
    loss = verl.actor_rollout_ref.actor.policy_loss.loss_mode
    if loss != "samebits_tis":
        raise RecipeError(
            f"importance sampling is configured (algorithm.rollout_correction.rollout_is={correction.rollout_is}) but inactive: "
            f"actor_rollout_ref.actor.policy_loss.loss_mode={loss}, use samebits_tis"
        )
    if correction.rollout_is != "token":
        raise RecipeError(
            f"algorithm.rollout_correction.rollout_is={correction.rollout_is}: the objective corrects by token; "
            "ablation.importance_sampling=false leaves that out"
        )
    if not correction.bypass_mode:
        raise RecipeError(
            "importance sampling is configured but inactive: algorithm.rollout_correction.bypass_mode=false recomputes old logprobs, "
            "while rollout logprobs are the old logprobs here; ablation.recompute_old_logprobs=true measures the other way"
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


def _sync(recipe: Recipe, verl: DictConfig) -> None:
    rollout = verl.actor_rollout_ref.rollout
    if rollout.name != "samebits":
        raise RecipeError(f"actor_rollout_ref.rollout.name={rollout.name}: adapters are synced by the samebits rollout only")
    if "dummy" in rollout.load_format:
        raise RecipeError(f"actor_rollout_ref.rollout.load_format={rollout.load_format} leaves the base random: use safetensors")
    if verl.actor_rollout_ref.model.lora.get("merge", False):
        raise RecipeError("actor_rollout_ref.model.lora.merge=true would round the adapter into 16-bit weights")
    if recipe.checks.routing_replay and not rollout.enable_rollout_routing_replay:
        raise RecipeError(
            "actor_rollout_ref.rollout.enable_rollout_routing_replay=false, but checks.routing_replay wants the engine's expert choices "
            "replayed in the trainer"
        )
    if rollout.enable_rollout_routing_replay and not rollout.enable_prefix_caching:
        raise RecipeError("actor_rollout_ref.rollout.enable_prefix_caching=false: vLLM keeps the routes to replay with its cached blocks")
    if verl.trainer.v1.trainer_mode != "sync":
        raise RecipeError(f"trainer.v1.trainer_mode={verl.trainer.v1.trainer_mode}: one optimizer step a batch needs sync")
    if verl.skip.rollout_tq.enable:
        raise RecipeError("skip.rollout_tq.enable=true would take samples out of a service that this job does not start")


def _expert_parallel(recipe: Recipe, verl: DictConfig, model: Model, layout: Spread) -> None:
    """Experts that stay with the ranks of the trainer: whole ones, on the GPUs."""
    wanted = recipe.expert_parallel.trainer
    if not isinstance(wanted, bool):
        raise RecipeError(f"expert_parallel.trainer must be true or false, not {wanted!r}: the ranks are those of fsdp_config.fsdp_size")
    if not wanted:
        return
    key = "expert_parallel.trainer=true"
    if not model.experts:
        raise RecipeError(f"{key} would do nothing: {model.title} has no routed experts")
    if model.experts % layout.fsdp:
        raise RecipeError(
            f"{key}: the {model.experts} experts of {model.title} do not divide over the {layout.fsdp} ranks that hold the trainer"
        )
    if verl.actor_rollout_ref.actor.fsdp_config.offload_policy:
        raise RecipeError(f"{key} keeps experts on the GPUs, actor_rollout_ref.actor.fsdp_config.offload_policy=true off them: use one")


def _batches(verl: DictConfig) -> None:
    batch, mini = verl.data.train_batch_size, verl.actor_rollout_ref.actor.ppo_mini_batch_size
    if mini != batch or verl.actor_rollout_ref.actor.ppo_epochs != 1:
        raise RecipeError(
            f"one optimizer step a batch: ppo_mini_batch_size ({mini}) must equal data.train_batch_size ({batch}) and ppo_epochs be 1"
        )
    steps = verl.trainer.total_training_steps
    if not isinstance(steps, int) or steps < 1:
        raise RecipeError(f"trainer.total_training_steps must be a number of at least 1, not {steps!r}")
    longest = verl.data.max_prompt_length + verl.data.max_response_length
    budget = verl.actor_rollout_ref.actor.ppo_max_token_len_per_gpu
    if budget < longest:
        raise RecipeError(f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={budget} cannot hold one sequence of {longest} tokens")

"""Recipes: a short YAML file over a shared base over verl's own configuration, composed and validated before anything starts.

A recipe has samebits' own keys (the fields of `Recipe`) and, beside them, any section of verl's configuration. `samebits train
RECIPE key=value` overrides either kind. Everything wrong is found here, in one line, before an engine or a GPU is asked for. How files and
overrides become one configuration is in `compose`.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from samebits.quant.profile import NumericsProfile, get_profile

from .compose import (
    RECIPES,
    RecipeError,
    composed_defaults,
    key_paths,
    merge,
    parse_overrides,
    recipe_layers,
    refuse_nulls,
    refuse_verl_overlong,
    verl_defaults,
)
from .data import reward_function

TRACES = "traces"
"""Folder of a run with the recordings of `tracing`."""
PARITY = "parity"
"""Folder of a run in which the first logprob that broke `numerics.parity=bitwise` is recorded."""


@dataclass
class Numerics:
    """Which bits both sides compute with."""

    profile: str = "auto"
    """Numerics profile; auto: w4a16-fp32 on CPU, w4a16 on a GPU."""
    kv_cache: str = "auto"
    """KV cache format; auto: the profile's own, or nvfp4, or nvfp4-e4m3: attention reads NVFP4 as E4M3, as on Blackwell."""
    hash: str | None = None
    """Hash the profile must have; unset: any."""
    parity: str = "auto"
    """bitwise: every logprob of the trainer must have the bits of the engine's, or the job stops; auto: `checks` say how near is enough."""


@dataclass
class Engine:
    """How an engine replica works, where no bit depends on it."""

    split_indexer: bool = True
    """The ranks of a tensor-parallel replica share the scoring of index keys."""


@dataclass
class Lora:
    """The adapter."""

    targets: str = "all"
    """all, attention, experts, shared, dense or single roles, comma-separated."""
    rank: int = 32
    alpha: int = 32


@dataclass
class Recompute:
    """What the trainer computes again in backward to keep less; whole layers are verl's `enable_gradient_checkpointing`."""

    experts: bool = False
    """Gate and up of experts and MLPs, where the Hopper kernels run."""


@dataclass
class ExpertParallel:
    """Who holds whole experts, while tokens travel."""

    trainer: Any = False
    """true: each training rank its share of a layer's routed experts and adapters, over the ranks of verl's `fsdp_size`; false: they
    are sharded and gathered for each forward, like everything else. No bool, which would take a number of ranks for true."""


@dataclass
class Checks:
    """When the job stops by itself."""

    max_kl: float = 0.03
    """Highest `mismatch/kl` of a step."""
    kl_warn: float = 5.0e-3
    """`mismatch/kl` from which on a full check warns."""
    every: int = 50
    """Steps from one full check to the next; the first step of every start has one as well. 0: only that one."""
    routing_replay: bool = True
    """The trainer replays the engine's expert choices; false allows a run without."""
    base_weights: bool = True
    """Compare the engine's base weights with the checkpoint before the first step."""


@dataclass
class Ablation:
    """What the objective or the step leave out on purpose, to measure what it is worth. The defaults leave nothing out."""

    importance_sampling: bool = True
    """Weigh tokens by min(exp(trainer - engine), cap); false: every weight is 1."""
    recompute_old_logprobs: bool = False
    """Take the old logprobs of the objective from an extra forward of the trainer, not from the engine."""


@dataclass
class DataSource:
    """Problems of task `dapo-math`: a known set (dapo-math-17k, aime24, aime25), a hub name, or a parquet, jsonl or json file."""

    train: str | None = None
    test: str | None = None
    """Held-out problems, which are also taken out of `train`."""
    without: list[str] = field(default_factory=list)
    """More sets whose problems are taken out of `train`."""
    duplicates: str = "refuse"
    """More than 1.01 rows for each distinct problem: refuse, or drop all but one of each."""
    conflicts: str = "refuse"
    """A problem that comes with different answers: refuse, or drop it."""
    prompt_template: str | None = None
    """Text around `{problem}`; unset: DAPO's."""


@dataclass
class Grading:
    """How task `dapo-math` grades a response."""

    truncation: str = "wrong"
    """What a response that was cut off is worth: wrong, or grade what it says."""
    overlong_buffer: int = 0
    """Tokens before `max_response_tokens` over which the penalty grows to `overlong_factor`; 0: no penalty."""
    overlong_factor: float = 1.0
    max_response_tokens: int | None = None
    """Length from which the penalty is whole; unset: data.max_response_length."""


@dataclass
class Wandb:
    """A Weights & Biases run beside metrics.jsonl."""

    project: str | None = None
    """Unset: trainer.project_name."""
    entity: str | None = None
    mode: str = "online"
    """online, or offline: written into the run directory, for `wandb sync`."""


@dataclass
class Tracking:
    """Where the numbers of metrics.jsonl go as well."""

    wandb: Wandb | None = None
    tensorboard: bool = False


@dataclass
class Cluster:
    """The machines, as far as verl has no key for them."""

    gpu: str | None = None
    """Accelerator, as hardware.yaml names it; unset: memory is planned and compared with nothing."""
    usable_share: float = 0.945
    """Share of a GPU's memory that the plan may fill; the rest is runtime, communication buffers and fragmentation."""
    ray_port: int = 6379
    """Port of the Ray head."""


@dataclass
class Tracing:
    """Steps in which every trainer rank records its kernels and collectives into `traces/`; they take longer than others."""

    first: int = 1
    """The first of them."""
    steps: int = 0


@dataclass
class Fault:
    """A fault injected on purpose, to see that the job stops."""

    kind: str | None = None
    """skip_sync: from `step` on, adapters are no longer sent. wrong_tensor: from `step` on, one bit of one tensor changes on its way to
    the engine. oom: the trainer runs out of memory in the backward of step `step`: on a GPU it asks for twice what there is.
    hang: the trainer waits in that backward until it is ended."""
    step: int = 1
    replica: int | None = None
    """Engine replica that skip_sync or wrong_tensor befalls; unset: all."""


@dataclass
class Recipe:
    """The keys of a recipe that are samebits' own."""

    name: str = "run"
    run_dir: str | None = None
    """Where everything goes; default `runs/<name>`."""
    device: str = "auto"
    """auto, cpu or cuda."""
    model: str = ""
    """Folder of a checkpoint quantized by samebits, or the name of a shipped one."""
    architecture: str | None = None
    """Sizes of the checkpoint, as models.yaml names them: lets `--check` plan before the checkpoint is there."""
    task: str = "arithmetic"
    seed: int = 0
    threads: int | None = None
    """CPU threads of trainer and engine, which take turns; default: all cores."""
    numerics: Numerics = field(default_factory=Numerics)
    engine: Engine = field(default_factory=Engine)
    lora: Lora = field(default_factory=Lora)
    recompute: Recompute = field(default_factory=Recompute)
    expert_parallel: ExpertParallel = field(default_factory=ExpertParallel)
    checks: Checks = field(default_factory=Checks)
    ablation: Ablation = field(default_factory=Ablation)
    data_source: DataSource = field(default_factory=DataSource)
    grading: Grading = field(default_factory=Grading)
    tracking: Tracking = field(default_factory=Tracking)
    cluster: Cluster = field(default_factory=Cluster)
    tracing: Tracing = field(default_factory=Tracing)
    fault: Fault = field(default_factory=Fault)

    @property
    def folder(self) -> Path:
        """Absolute run directory."""
        return Path(self.run_dir or f"runs/{self.name}").absolute()

    @property
    def model_path(self) -> Path:
        """Absolute checkpoint folder; names without a slash are looked up among the shipped ones first."""
        shipped = RECIPES / self.model
        return shipped if self.model and "/" not in self.model and shipped.is_dir() else Path(self.model).absolute()

    @property
    def profile(self) -> NumericsProfile:
        """The numerics profile of this recipe. Raises `ValueError`."""
        name = self.numerics.profile
        if name == "auto":
            name = "w4a16" if self.device == "cuda" else "w4a16-fp32"
        return get_profile(name, self.numerics.kv_cache)


_OWN_KEYS = {f.name for f in dataclasses.fields(Recipe)}


def load_recipe(path: str | Path, overrides: Sequence[str] = (), *, planned: bool = False) -> tuple[Recipe, DictConfig]:
    """Compose a recipe file with command-line overrides. `planned`: for machines that are not this one, whose GPUs do not matter.

    Returns the recipe's own keys and verl's complete configuration, not yet validated (see `validate.validate`).
    Raises `RecipeError` on a missing file, bad YAML, an unknown key or a value of the wrong type.
    """
    return _composed([*recipe_layers(Path(path)), parse_overrides(overrides)], verl_defaults(), planned)


def compose_stored(own: DictConfig, verl: DictConfig, overrides: Sequence[str] = ()) -> tuple[Recipe, DictConfig]:
    """The configuration that a run was started with, `own` and complete `verl`, with overrides. Raises `RecipeError`."""
    base = OmegaConf.create(OmegaConf.to_container(verl))
    OmegaConf.set_struct(base, True)
    OmegaConf.set_struct(base.actor_rollout_ref.rollout.engine_kwargs, False)
    return _composed([own, parse_overrides(overrides)], base)


def _composed(layers: Sequence[DictConfig], verl: DictConfig, planned: bool = False) -> tuple[Recipe, DictConfig]:
    own = OmegaConf.structured(Recipe)
    for layer in layers:
        refuse_verl_overlong(layer)
        _require_sections(layer)
        own = merge(own, {k: v for k, v in layer.items() if k in _OWN_KEYS}, suggestion)
        verl = merge(verl, {k: v for k, v in layer.items() if k not in _OWN_KEYS | {"base"}}, suggestion)
    refuse_nulls(verl)
    recipe: Recipe = OmegaConf.to_object(own)
    recipe.device = _device(recipe.device, planned, recipe.cluster.gpu is not None)
    try:
        return recipe, _derive(recipe, verl)
    except ValueError as error:
        raise RecipeError(str(error)) from None


def _require_sections(layer: DictConfig) -> None:
    for name, default in vars(Recipe()).items():
        if dataclasses.is_dataclass(default) and name in layer and not isinstance(layer[name], DictConfig):
            raise RecipeError(f"{name} is a section of keys, not {layer[name]!r}")


def suggestion(key: str) -> str:
    """`; did you mean ...?` for a mistyped key: one like it beside it, else one of the same name elsewhere, else one like it."""
    known = [*key_paths(OmegaConf.structured(Recipe(tracking=Tracking(wandb=Wandb())))), *key_paths(composed_defaults())]
    above, _, name = key.rpartition(".")
    beside = [path for path in known if path.rpartition(".")[0] == above]
    same_name = [path for path in known if path.rpartition(".")[2] == name]
    near = difflib.get_close_matches(key, beside, 1, 0.8) or same_name[:1] or difflib.get_close_matches(key, known, 1, 0.8)
    return f"; did you mean {near[0]}?" if near else ""


def require_device(device: str) -> None:
    """Raise `RecipeError` when this machine has no such device."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise RecipeError("device=cuda, but no CUDA GPU is available")


def _device(device: str, planned: bool, gpu_named: bool) -> str:
    import torch

    if device not in ("auto", "cpu", "cuda"):
        raise RecipeError(f"device must be auto, cpu or cuda, not {device!r}")
    if not planned:
        require_device(device)
    if device == "auto":
        return "cuda" if torch.cuda.is_available() or (planned and gpu_named) else "cpu"
    return device


def _derive(recipe: Recipe, verl: DictConfig) -> DictConfig:
    """Set what follows from the recipe's own keys in verl's configuration."""
    folder = recipe.folder
    profile_options = {
        "profile": recipe.profile.name,
        "kv_cache": recipe.numerics.kv_cache,
        "targets": recipe.lora.targets,
        "rank": recipe.lora.rank,
        "split_indexer": recipe.engine.split_indexer,
    }
    derived = {
        "actor_rollout_ref.model.path": str(recipe.model_path),
        "actor_rollout_ref.model.lora_rank": recipe.lora.rank,
        "actor_rollout_ref.model.lora_alpha": recipe.lora.alpha,
        "actor_rollout_ref.model.target_modules": recipe.lora.targets,
        "actor_rollout_ref.rollout.dtype": "float32" if recipe.profile.activations == "float32" else "bfloat16",
        "actor_rollout_ref.rollout.seed": recipe.seed,
        "actor_rollout_ref.actor.fsdp_config.seed": recipe.seed,
        "actor_rollout_ref.actor.fsdp_config.router_replay": {
            "_target_": "verl.workers.config.EngineRouterReplayConfig",
            "mode": "R3" if verl.actor_rollout_ref.rollout.enable_rollout_routing_replay else "disabled",
        },
        "actor_rollout_ref.rollout.n_gpus_per_node": verl.trainer.n_gpus_per_node,
        "actor_rollout_ref.rollout.prompt_length": verl.data.max_prompt_length,
        "actor_rollout_ref.rollout.response_length": verl.data.max_response_length,
        "data.seed": recipe.seed,
        "reward.custom_reward_function": reward_function(recipe, verl.data.max_response_length),
        "trainer.device": recipe.device,
        "trainer.experiment_name": recipe.name,
        "trainer.default_local_dir": str(folder / "checkpoints"),
    }
    OmegaConf.set_struct(verl, False)
    for key, value in derived.items():
        OmegaConf.update(verl, key, value)
    own = {"samebits_profile": recipe.profile.name, "samebits_kv_cache": recipe.numerics.kv_cache}
    own["samebits_recompute_experts"] = recipe.recompute.experts
    own["samebits_expert_parallel"] = recipe.expert_parallel.trainer
    verl.actor_rollout_ref.model.override_config = OmegaConf.merge(verl.actor_rollout_ref.model.override_config, own)
    # verl's V1 trainer reads the correction from the algorithm, the loss reads it from the actor: keep one.
    verl.actor_rollout_ref.actor.policy_loss.rollout_correction = {
        "_target_": "verl.trainer.config.algorithm.RolloutCorrectionConfig",
        **OmegaConf.to_container(verl.algorithm.rollout_correction, resolve=True),
    }
    if not recipe.ablation.importance_sampling:
        verl.actor_rollout_ref.actor.policy_loss.rollout_correction.rollout_is = None
    trainer = {
        "samebits_parity": str(folder / PARITY) if recipe.numerics.parity == "bitwise" else None,
        "samebits_old_logprobs": "recomputed" if recipe.ablation.recompute_old_logprobs else "rollout",
    }
    verl.actor_rollout_ref.model.override_config = OmegaConf.merge(verl.actor_rollout_ref.model.override_config, trainer)
    engine = verl.actor_rollout_ref.rollout.engine_kwargs.get("vllm") or {}
    executor = "uni" if verl.actor_rollout_ref.rollout.tensor_model_parallel_size == 1 else "mp"
    engine_options = {"additional_config": {"samebits": profile_options}, "distributed_executor_backend": executor}
    verl.actor_rollout_ref.rollout.engine_kwargs["vllm"] = OmegaConf.merge(engine_options, engine)
    if recipe.device == "cpu":
        OmegaConf.update(verl, "actor_rollout_ref.rollout.free_cache_engine", False)
        # vLLM rewinds a request's random generator after a partial prefill, which a CPU generator cannot do.
        OmegaConf.update(verl, "actor_rollout_ref.rollout.enable_chunked_prefill", False)
        OmegaConf.update(verl, "ray_kwargs.ray_init.num_cpus", 32)
        OmegaConf.update(verl, "ray_kwargs.ray_init.num_gpus", verl.trainer.n_gpus_per_node * verl.trainer.nnodes)
    OmegaConf.update(verl, "actor_rollout_ref.rollout.enable_sleep_mode", verl.actor_rollout_ref.rollout.free_cache_engine)
    OmegaConf.set_struct(verl, True)
    return verl

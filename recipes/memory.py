"""What each GPU of a recipe holds in each phase of a step, and what a sync sends: arithmetic over formats, sizes and settings.

Every GPU is a training rank and an engine rank at once. While it generates, the trainer's state stays beside the engine's share of the
memory (`gpu_memory_utilization`); while it trains, the engine has given its weights and caches back where `free_cache_engine` is set;
during a sync both have their weights. Bytes are decimal (1 GB = 1e9 bytes). Estimates are marked in the assumptions.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from omegaconf import DictConfig

from samebits.quant.roles import EXPERT_ROLES

from .config import Recipe
from .plan_tables import BITS, Model
from .planning import PAGE_TOKENS
from .support import ENGINE_BITS, held_weights, keeps_packed, packed_weights
from .validate import Validated

SLOTS = 2
"""Adapter versions that an engine holds: the one in use and the next."""
LOGITS_CHUNK = 3 * 4 * 2**25
"""Bytes of the logits of one chunk in the trainer's head, with their softmax and gradient in fp32."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Memory of one GPU in one phase. Bytes."""

    name: str
    parts: dict[str, float]
    usable: float | None
    """What a plan may fill of a GPU; None where no GPU is named."""

    @property
    def total(self) -> float:
        """All parts together."""
        return sum(self.parts.values())

    @property
    def short(self) -> float:
        """Bytes that do not fit."""
        return max(0.0, self.total - self.usable) if self.usable is not None else 0.0


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Memory of a recipe, and the bytes of a sync."""

    phases: tuple[Phase, ...]
    sequences: int | None
    """Sequences of full length whose caches fit an engine GPU; None where no GPU is named."""
    host: dict[str, float]
    """Bytes of memory of a node, by use."""
    adapter_parameters: int
    sync: dict[str, float]
    """Bytes of one sync, by what is sent."""
    assumptions: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"phases": [asdict(p) | {"total": p.total, "short": p.short} for p in self.phases]}


def plan(recipe: Recipe, verl: DictConfig, found: Validated) -> MemoryReport:
    """Memory by phase. A KV pool that does not hold one whole sequence counts as short in `generate`."""
    model, layout, rollout, actor = found.model, found.layout, verl.actor_rollout_ref.rollout, verl.actor_rollout_ref.actor
    profile = recipe.profile
    width = 4 if profile.activations == "float32" else 2
    trainable = _trainable(found)
    parameters = sum(trainable)
    base = model.expert_bytes("nvfp4") + model.other_bytes("nvfp4")
    usable = found.gpu.memory_gb * 1e9 * recipe.cluster.usable_share if found.gpu else None

    packed = keeps_packed(profile)
    weights = (packed_weights if packed else held_weights)(model, layout.expert_ranks, layout.tensor_ranks)
    slots = SLOTS * width * (trainable[0] / layout.expert_ranks + trainable[1])
    step_tokens = rollout.max_num_batched_tokens
    work = step_tokens * _layer_width(model) * 4 + rollout.max_num_seqs * model.vocabulary * 4 * 2
    sequence = rollout.max_model_len or verl.data.max_prompt_length + verl.data.max_response_length
    pages = -(-sequence // PAGE_TOKENS) * PAGE_TOKENS
    kv_bits = {"nvfp4": "nvfp4", "bfloat16": "bf16", "float32": "fp32"}[profile.kv_cache]
    one_sequence = pages * (model.kv_bytes_per_token(kv_bits) / layout.tensor_ranks + model.index_bytes_per_token(kv_bits))
    budget = found.gpu.memory_gb * 1e9 * rollout.gpu_memory_utilization if found.gpu else None
    pool = one_sequence if budget is None else max(one_sequence, budget - weights - slots - work)
    engine = {"engine: base": weights, "engine: adapter slots": slots, "engine: one forward": work, "engine: KV cache": pool}

    state = {
        "trainer: base, its shard": 0.0 if actor.fsdp_config.param_offload else base / layout.fsdp,
        "trainer: adapter, fp32": 0.0 if actor.fsdp_config.param_offload else 4 * parameters / layout.fsdp,
        "trainer: moments": 0.0 if actor.fsdp_config.optimizer_offload else 8 * parameters / layout.fsdp,
    }
    tokens = actor.ppo_max_token_len_per_gpu
    per_layer = _largest_layer(model, found)
    kept = 2 * model.hidden * width
    recomputed = _layer_width(model) * 4
    layers_kept = kept if verl.actor_rollout_ref.model.enable_gradient_checkpointing else recomputed
    if recipe.recompute.experts and layers_kept == recomputed:
        layers_kept -= 4 * 2 * (model.experts_per_token * model.expert_intermediate + model.shared_intermediate)
    training = {
        "trainer: base, its shard": base / layout.fsdp,
        "trainer: adapter, fp32": 4 * parameters / layout.fsdp,
        "trainer: moments": 8 * parameters / layout.fsdp,
        "trainer: gradient": 4 * parameters / layout.fsdp,
        "trainer: layers gathered": 2 * per_layer if layout.fsdp > 1 else 0.0,
        "trainer: embedding and head gathered": 2 * model.vocabulary * model.hidden * 2 if layout.fsdp > 1 else 0.0,
        "trainer: head in fp32": model.vocabulary * model.hidden * 4,
        "trainer: activations kept": tokens * model.layers * layers_kept,
        "trainer: one layer, forward and backward": tokens * recomputed * 2,
        "trainer: logits": LOGITS_CHUNK,
    }
    asleep = rollout.free_cache_engine
    resident = {"engine: adapter slots": slots} if asleep else engine
    syncing = {k: v for k, v in engine.items() if k != "engine: KV cache"} if asleep else engine
    gathering = {"trainer: adapter of one layer gathered": 6 * parameters / max(1, model.layers)}
    phases = (
        Phase("generate", state | engine, usable),
        Phase("train", training | resident, usable),
        Phase("sync", state | gathering | syncing, usable),
    )
    sent = 2.0 * parameters
    ranks = layout.gpus_per_node
    host = {"adapter, a copy for each rank and one file for each replica": sent * (ranks + max(1, ranks // layout.engine_gpus))}
    if asleep:
        host["engine weights put aside"] = weights * ranks
    if actor.fsdp_config.param_offload or actor.fsdp_config.optimizer_offload:
        host["trainer state put aside"] = (base / layout.fsdp + 12 * parameters / layout.fsdp) * ranks
    return MemoryReport(
        phases=phases,
        sequences=None if budget is None else int((budget - weights - slots - work) // one_sequence),
        host=host,
        adapter_parameters=parameters,
        sync={
            "to each replica": sent,
            "to all replicas": sent * layout.replicas,
            "gathered by each trainer rank": 4.0 * parameters * (layout.fsdp - 1) / layout.fsdp,
        },
        assumptions=_assumptions(recipe, found, packed, sequence, kv_bits, asleep),
    )


def _assumptions(recipe: Recipe, found: Validated, packed: bool, sequence: int, kv: str, asleep: bool) -> tuple[str, ...]:
    share = recipe.cluster.usable_share
    margin = (
        f"margin: {1 - share:.1%} of {found.gpu.title}'s {found.gpu.memory_gb:g} GB are left free for runtime, communication and graphs"
        if found.gpu
        else "cluster.gpu is not set: nothing is compared with a GPU's memory"
    )
    base = (
        f"engine base: packed, experts over {found.layout.expert_ranks} GPUs, the rest {_rest(found.layout.tensor_ranks)}"
        if packed
        else f"engine base: rebuilt in {ENGINE_BITS} bits, as for fp32 activations"
    )
    return (
        margin,
        base,
        f"KV cache: {kv.upper()}, sequences of {sequence:,} tokens; the rest of gpu_memory_utilization is its pool",
        "one forward and one layer: estimated from the widths of a layer's projections in fp32",
        "trainer: base packed; each layer gathered with the next one, the largest counted twice",
        "while training the engine keeps its adapter slots only" if asleep else "while training the engine keeps all it has",
    )


def _rest(tensor_ranks: int) -> str:
    return "on each" if tensor_ranks == 1 else f"over {tensor_ranks} but for indexer and router; adapters of it counted whole on each"


def _trainable(found: Validated) -> tuple[int, int]:
    """Adapter parameters of routed experts and of all else."""
    experts = rest = 0
    for role in found.spec.roles:
        count = found.model.count(role) * found.spec.rank * sum(found.model.matrix(role))
        experts, rest = (experts + count, rest) if role in EXPERT_ROLES else (experts, rest + count)
    return experts, rest


def _largest_layer(model: Model, found: Validated) -> float:
    """Bytes of the largest layer as the trainer gathers it: packed base and fp32 adapter."""
    base = model.expert_bytes("nvfp4") / max(1, model.moe_layers) + model.projection_parameters * BITS["mxfp8"] / 8 / model.layers
    return base + 4 * sum(_trainable(found)) / max(1, model.moe_layers)


def _layer_width(model: Model) -> int:
    """Elements that one token's way through a layer with routed experts makes: what projections and experts put out."""
    attention = 2 * model.heads * model.head_dim + 2 * model.kv_heads * model.head_dim + 4 * model.hidden
    experts = model.experts_per_token * (3 * model.expert_intermediate + model.hidden) + 3 * model.shared_intermediate
    return attention + experts

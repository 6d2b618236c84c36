"""What each GPU of a recipe holds in each phase of a step, and what a sync sends: arithmetic over formats, sizes and settings.

Every GPU is a training rank and an engine rank at once. While it generates, the trainer's state stays beside the engine's share of the
memory (`gpu_memory_utilization`); while it trains, the engine has given its weights and caches back where `free_cache_engine` is set;
during a sync both have their weights. Bytes are decimal (1 GB = 1e9 bytes). Estimates are marked in the assumptions.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from omegaconf import DictConfig

from . import memory_parts as parts
from .config import Recipe
from .plan_tables import Model
from .support import ENGINE_BITS, keeps_packed
from .validate import Validated


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
    """Sequences of full length whose caches fit an engine GPU; None where no GPU is named. With none the engine does not start."""
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
    """Memory by phase. A KV pool that does not hold one whole sequence is planned for one, see `MemoryReport.sequences`."""
    layout, rollout, actor = found.layout, verl.actor_rollout_ref.rollout, verl.actor_rollout_ref.actor
    parameters = parts.trainable(found).total
    usable = found.gpu.memory_gb * 1e9 * recipe.cluster.usable_share if found.gpu else None
    engine, sequences = engine_parts(recipe, verl, found)
    weights, slots = engine["engine: base"], engine["engine: adapter slots"]
    held = parts.trainer_state(recipe, found)
    state = {
        "trainer: base, its shard": 0.0 if actor.fsdp_config.param_offload else held["base"],
        "trainer: adapter, fp32": 0.0 if actor.fsdp_config.param_offload else held["adapter"],
        "trainer: moments": 0.0 if actor.fsdp_config.optimizer_offload else held["moments"],
    }
    training = trainer_parts(recipe, verl, found, actor.ppo_max_token_len_per_gpu)["backward"]
    asleep = rollout.free_cache_engine
    resident = {} if asleep else engine
    syncing = {k: v for k, v in engine.items() if k != "engine: KV cache"} if asleep else engine
    phases = (
        Phase("generate", state | engine, usable),
        Phase("train", training | resident, usable),
        Phase("sync", state | parts.sending(found) | syncing, usable),
    )
    sent = 2.0 * parameters
    ranks = layout.gpus_per_node
    host = {"adapter, a copy for each rank and one file for each replica": sent * (ranks + max(1, ranks // layout.engine_gpus))}
    if asleep:
        host["engine weights and adapter slots put aside"] = (weights + slots) * ranks
    if actor.fsdp_config.param_offload or actor.fsdp_config.optimizer_offload:
        host["trainer state put aside"] = sum(held.values()) * ranks
    return MemoryReport(
        phases=phases,
        sequences=sequences,
        host=host,
        adapter_parameters=parameters,
        sync={
            "to each replica": sent,
            "to all replicas": sent * layout.replicas,
            "gathered by each trainer rank": 4.0 * parameters * (layout.fsdp - 1) / layout.fsdp,
        },
        assumptions=_assumptions(recipe, found, parts.longest(verl), asleep),
    )


def engine_parts(recipe: Recipe, verl: DictConfig, found: Validated, card: float | None = None) -> tuple[dict[str, float], int | None]:
    """Parts of an engine rank, and how many sequences of full length its cache holds (None on a CPU, and where no size is known).

    The cache has what is left of the engine's share of the GPU, in whole pages; on a CPU, and where the recipe says so, a size of its own.
    A pool that does not hold one sequence is planned for one. card: as `memory_parts.engine_budget` takes it.
    """
    rollout = verl.actor_rollout_ref.rollout
    weights, slots = parts.engine_weights(recipe, verl, found), parts.adapter_slots(recipe, found)
    work = rollout.max_num_batched_tokens * _layer_width(found.model) * 4 + rollout.max_num_seqs * found.model.vocabulary * 4 * 2
    page, one_sequence = parts.sequence_bytes(recipe, verl, found)
    room, budget = parts.fixed_cache(recipe, verl), parts.engine_budget(recipe, verl, found, card)
    if room is None and budget is not None:
        room = budget - weights - slots - work
    named = {"engine: base": weights, "engine: adapter slots": slots, "engine: one forward": work}
    if room is None:
        return named | {"engine: KV cache": one_sequence}, None
    room = room // page * page
    cache = named | {"engine: KV cache": max(one_sequence, room)}
    return cache, None if recipe.device == "cpu" and found.gpu is None else max(0, int(room // one_sequence))


def engine_shortage(recipe: Recipe, verl: DictConfig, found: Validated) -> str | None:
    """One line where the engine's share of a GPU does not hold one sequence of full length: then vLLM does not start. Else None."""
    engine, sequences = engine_parts(recipe, verl, found)
    if sequences != 0:
        return None
    longest, (_, one) = parts.longest(verl), parts.sequence_bytes(recipe, verl, found)
    fixed, rollout = parts.fixed_cache(recipe, verl), "actor_rollout_ref.rollout"
    if fixed is not None:
        key = f"{rollout}.engine_kwargs.vllm.kv_cache_memory_bytes={fixed:.0f}"
        return f"does not fit: {key} holds no sequence of {longest:,} tokens, which takes {one / 1e9:.2f} GB on each GPU"
    memory = found.gpu.memory_gb * 1e9
    share, needed = verl.actor_rollout_ref.rollout.gpu_memory_utilization, sum(engine.values())
    held = ", ".join(f"{size / 1e9:.1f} GB {name.removeprefix('engine: ')}" for name, size in engine.items() if name != "engine: KV cache")
    least = math.ceil(1000 * needed / memory) / 1000
    advice = f"it takes {least:.3f} at least" if least <= 1 else "no share is enough: spread the engine over more GPUs"
    return (
        f"does not fit: {rollout}.gpu_memory_utilization={share:g} gives the engine {memory * share / 1e9:.1f} of {found.gpu.title}'s "
        f"{memory / 1e9:.1f} GB, which do not hold {held} and the {one / 1e9:.2f} GB KV cache of one sequence of {longest:,} tokens: "
        f"{advice}"
    )


def trainer_parts(recipe: Recipe, verl: DictConfig, found: Validated, tokens: int) -> dict[str, dict[str, float]]:
    """Parts of a trainer rank by phase (forward, backward, optimizer, export), with `tokens` in its largest micro-batch."""
    model, parameters, ranks = found.model, parts.trainable(found).total, found.layout.fsdp
    held = parts.trainer_state(recipe, found)
    state = {
        "trainer: base, its shard": held["base"],
        "trainer: adapter, fp32": held["adapter"],
        "trainer: moments": held["moments"],
    }
    packed, adapter = parts.largest_layer(verl, found)
    gathered = {
        "trainer: layers gathered": 2 * (packed + adapter) if ranks > 1 else 0.0,
        "trainer: embedding and head gathered": 2 * model.vocabulary * model.hidden * 2 if ranks > 1 else 0.0,
    }
    kept = {
        "trainer: activations kept": tokens * parts.kept_per_token(recipe, verl, found),
        "trainer: adapter values kept": parts.kept_adapters(recipe, verl, found),
    }
    gradient = {"trainer: gradient": 4 * parameters / ranks}
    forward, backward = (tokens * size for size in parts.layer_work(recipe, found))
    again = tokens * _layer_width(model) * 2 if verl.actor_rollout_ref.model.enable_gradient_checkpointing else 0.0
    head = parts.head_work(recipe, model, tokens)
    # What a layer keeps is freed while its gradients come, whole and once more to be scattered; shards of gradients add up behind it.
    layer = _larger("trainer: one layer, again and backward", again + backward, "trainer: gradient of a layer, whole", 2 * adapter)
    early = parts.exporting(found, parameters) if parts.exported_early(found) else 0.0
    stepping = _larger("trainer: square roots of moments", 4 * parameters / ranks, "trainer: masters rounded and gathered", early)
    first = state | gathered | kept | {"trainer: gradient": 4 * parameters / ranks / max(1, model.layers)}
    return {
        "forward": state | gathered | kept | _larger("trainer: one layer", forward, "trainer: logits", head[0]),
        "backward": first | _larger(*layer.popitem(), "trainer: logits", head[1]),
        "optimizer": state | gradient | stepping,
        "export": state | parts.sending(found),
    }


def _larger(first: str, size: float, second: str, other: float) -> dict[str, float]:
    """Of two that are not there at the same time the larger."""
    return {first: size} if size >= other else {second: other}


def _assumptions(recipe: Recipe, found: Validated, sequence: int, asleep: bool) -> tuple[str, ...]:
    packed, kv = keeps_packed(recipe.profile), recipe.profile.kv_cache
    share = recipe.cluster.usable_share
    margin = (
        f"margin: {1 - share:.1%} of {found.gpu.title}'s {found.gpu.memory_gb:.1f} GB are left free for runtime, communication and graphs"
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
        f"KV cache: {str(kv).upper()}, sequences of {sequence:,} tokens; the rest of gpu_memory_utilization is its pool",
        "base, adapter, moments, slots and cache are counted; activations, one forward and one layer are estimated from the widths of "
        "projections and what the Hopper kernels keep",
        "trainer: base packed; each layer gathered with the next one, the largest counted twice",
        "while training the engine has its weights and slots on the host and no cache"
        if asleep
        else "while training the engine keeps all it has",
    )


def _rest(tensor_ranks: int) -> str:
    return "on each" if tensor_ranks == 1 else f"over {tensor_ranks} but for indexer, router and the A of every adapter"


def _layer_width(model: Model) -> int:
    """Elements that one token's way through a layer with routed experts makes: what projections and experts put out."""
    attention = 2 * model.heads * model.head_dim + 2 * model.kv_heads * model.head_dim + 4 * model.hidden
    experts = model.experts_per_token * (3 * model.expert_intermediate + model.hidden) + 3 * model.shared_intermediate
    return attention + experts

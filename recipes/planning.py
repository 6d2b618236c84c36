"""What fits and what it costs, before there is a machine: memory of a serving layout, and bytes and operations of a training step.

Plain arithmetic from architecture and formats. Models and accelerators come from `models.yaml` and `hardware.yaml`, which name their
sources. Every plan lists the assumptions that its numbers rest on; bytes are decimal (1 GB = 1e9 bytes). Nothing is measured here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from samebits.quant.roles import ATTENTION_ROLES, DENSE_ROLES, EXPERT_ROLES, LORA_ROLES, SHARED_ROLES

from .plan_tables import BITS, Gpu, Model, PlanError

PAGE_TOKENS = 128
"""Tokens of a KV page (MSA's block)."""
USABLE_SHARE = 0.945
"""Share of a GPU's memory that weights and KV cache may fill; the rest is runtime, activations and graphs. An assumption: with the index
cache counted, any share from 0.934 to 0.961 gives the 76 and 28 sequences that are published for 4 B300."""
WEIGHTS_FOR_KV = {"nvfp4": "nvfp4", "fp8": "mxfp8", "bf16": "mxfp8"}


@dataclass(frozen=True, slots=True)
class Layout:
    """How an engine spreads a model over `size` GPUs: `dep` or `tp`."""

    kind: str
    size: int

    def weights_per_gpu(self, model: Model, weights: str) -> float:
        """Bytes. dep: a share of the experts and all of the rest; tp: a share of everything."""
        experts, rest = model.expert_bytes(weights), model.other_bytes(weights)
        return experts / self.size + (rest if self.kind == "dep" else rest / self.size)

    def kv_share(self, model: Model) -> float:
        """Part of a sequence's K and V that each GPU holds: all of it (dep), or its KV heads, of which it has at least one (tp)."""
        return 1.0 if self.kind == "dep" else 1 / min(self.size, model.kv_heads)

    @property
    def meaning(self) -> str:
        """In words."""
        if self.kind == "dep":
            return f"attention data-parallel (each sequence on one GPU, all but routed experts on every GPU), experts over {self.size}"
        return f"tensor-parallel over {self.size} (each sequence on all of them; KV heads split, index keys on every GPU)"


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What fits on a serving layout. Bytes; `per GPU` where not said otherwise."""

    model: str
    kv: str
    index: str
    weights: str
    kv_bytes_per_token: float
    index_bytes_per_token: float
    index_read: float
    """Bytes the indexer reads of each token of the context, a layer."""
    dense_read: float
    """Bytes dense attention would read of each token of the context, a layer."""
    weights_per_gpu: float
    usable_per_gpu: float
    room_per_gpu: float
    """Left for caches; negative when not even the weights fit."""
    cache_per_sequence: float
    """Bytes of one full sequence on a GPU that holds it."""
    sequences: int
    """Full-length sequences at a time, on all GPUs together."""
    share_window: tuple[float, float]
    """Usable shares, from and below, that give the same number of sequences."""
    limit: str
    assumptions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Bytes and operations of one training step. Bytes are per GPU where the name says so."""

    model: str
    tokens: int
    adapter_parameters: dict[str, int]
    """By group of roles."""
    sync_bytes: int
    """Adapter as sent to each engine replica."""
    base_per_gpu: float
    layer_gathered: float
    """Largest layer's packed base, whole, while it is computed."""
    adapter_state_per_gpu: float
    activations_per_gpu: float
    trainer_per_gpu: float
    """Sum of the four above."""
    gathered_per_gpu: float
    """Bytes of base that each GPU receives in a step."""
    train_flops: float
    train_seconds: float
    gather_seconds: float
    decode_bytes_per_gpu: float
    """Read for one new token of every running sequence of a GPU."""
    decode_seconds: float
    """Lower bound of one decode step, from memory bandwidth."""
    generate_seconds: float
    """Lower bound of the whole generation."""
    assumptions: tuple[str, ...]

    @property
    def parameters(self) -> int:
        """Trainable parameters."""
        return sum(self.adapter_parameters.values())


def get_layout(text: str, model: Model, gpus: int) -> tuple[Layout, int]:
    """A layout such as `dep4` or `tp8`, and how many replicas of it `gpus` GPUs hold.

    Raises `PlanError` on another form and on sizes that do not divide: GPUs by the layout, experts (dep) or heads (tp) by its size.
    """
    match = re.fullmatch(r"(dep|tp)([0-9]+)", text.lower())
    if not match or not int(match[2]):
        raise PlanError(f"layout must be dep<N> or tp<N>, not {text!r}")
    layout = Layout(match[1], int(match[2]))
    if gpus < 1 or gpus % layout.size:
        raise PlanError(f"{gpus} GPUs do not hold whole replicas of {text}")
    for what, number in (("experts", model.experts), *((("heads", model.heads),) if layout.kind == "tp" else ())):
        if number % layout.size:
            raise PlanError(f"{model.title} has {number} {what}, which {text} does not divide")
    return layout, gpus // layout.size


def plan_memory(
    model: Model,
    gpu: Gpu,
    gpus: int,
    layout: str,
    context: int,
    *,
    kv: str = "nvfp4",
    index: str | None = None,
    weights: str | None = None,
    usable_share: float = USABLE_SHARE,
) -> MemoryPlan:
    """How many sequences of `context` tokens fit. `index` (default: as `kv`) and `weights` (default: the checkpoint that goes with
    `kv`) are formats. Raises `PlanError` on unknown formats, impossible sizes and a share outside (0, 1].
    """
    if context < 1 or not 0 < usable_share <= 1:
        raise PlanError(f"a plan needs a context of a token or more and a usable share in (0, 1], not {context} and {usable_share}")
    if kv not in WEIGHTS_FOR_KV:
        raise PlanError(f"unknown KV format {kv!r}; known: {', '.join(WEIGHTS_FOR_KV)}")
    spread, replicas = get_layout(layout, model, gpus)
    index = index or kv
    weights = weights or WEIGHTS_FOR_KV[kv]
    held = spread.weights_per_gpu(model, weights)
    memory = gpu.memory_gb * 1e9
    room = memory * usable_share - held
    tokens = -(-context // PAGE_TOKENS) * PAGE_TOKENS
    # Index keys have one head that every GPU of a tensor-parallel group needs.
    each = tokens * (model.kv_bytes_per_token(kv) * spread.kv_share(model) + model.index_bytes_per_token(index))
    fits = max(0, int(room // each))
    window = ((held + fits * each) / memory if fits else 0.0, (held + (fits + 1) * each) / memory)
    published = weights in model.checkpoint_gb
    assumptions = (
        f"usable share of a GPU's memory: {usable_share:.3f} of {gpu.memory_gb:.1f} GB; {fits} sequences a GPU for any share in "
        f"[{window[0]:.3f}, {window[1]:.3f})",
        f"weights: {weights.upper()} experts counted from the sizes, the rest "
        + (f"as published ({model.checkpoint_gb[weights]:g} GB in all)" if published else "counted (published size unknown)"),
        f"index cache: included, {index.upper()}, {model.index_bytes_per_token(index):,.0f} bytes a token"
        if model.sparse
        else "index cache: none, attention is dense",
        f"layout: {spread.meaning}; {replicas} replica{'s' if replicas > 1 else ''}",
        f"every sequence at its full {context:,} tokens, in pages of {PAGE_TOKENS}; no prefix shared; no drafter",
    )
    return MemoryPlan(
        model=model.title,
        kv=kv,
        index=index,
        weights=weights,
        kv_bytes_per_token=model.kv_bytes_per_token(kv),
        index_bytes_per_token=model.index_bytes_per_token(index),
        index_read=model.index_read_per_token_and_layer(index),
        dense_read=model.dense_read_per_token_and_layer(kv),
        weights_per_gpu=held,
        usable_per_gpu=memory * usable_share,
        room_per_gpu=room,
        cache_per_sequence=each,
        sequences=fits * (gpus if spread.kind == "dep" else replicas),
        share_window=window,
        limit="weights" if room < 0 else "KV cache of one sequence" if not fits else "KV cache",
        assumptions=assumptions,
    )


def plan_step(
    model: Model,
    gpu: Gpu,
    gpus: int,
    *,
    layout: str,
    samples: int,
    prompt_tokens: int,
    response_tokens: int,
    rank: int = 32,
    weights: str = "nvfp4",
    kv: str = "nvfp4",
    micro_batch_tokens: int = 32768,
    utilisation: float = 0.3,
    usable_share: float = USABLE_SHARE,
) -> StepPlan:
    """Bytes and operations of a step: `samples` responses generated, then trained on, by the same GPUs; frozen base, LoRA on every role.

    Operations: 2 a weight and token forward, 2 for the gradient of the input (the base has no gradient of its own), 2 for the forward
    that is computed again: 6 * active weights * tokens; attention adds 4 * heads * head width * keys a layer, three times. The base
    stays packed and sharded over all GPUs and is gathered layer by layer, twice for each micro-batch. Raises `PlanError`.
    """
    if min(samples, prompt_tokens, response_tokens, rank, micro_batch_tokens) < 1 or not 0 < utilisation <= 1:
        raise PlanError("a step needs at least one sample, token and rank, and a utilisation in (0, 1]")
    spread, replicas = get_layout(layout, model, gpus)
    sequence = prompt_tokens + response_tokens
    memory = plan_memory(model, gpu, gpus, layout, sequence, kv=kv, weights=weights, usable_share=usable_share)
    tokens = samples * sequence
    groups = {"attention": ATTENTION_ROLES, "experts": EXPERT_ROLES, "shared": SHARED_ROLES, "dense": DENSE_ROLES}
    adapters = {name: sum(model.count(r) * rank * sum(model.matrix(r)) for r in roles) for name, roles in groups.items()}
    trained = sum(adapters.values())
    base = model.expert_bytes(weights) + model.other_bytes(weights)
    per_layer = model.expert_bytes(weights) / model.moe_layers + (model.projection_parameters * BITS["mxfp8"] / 8) / model.layers
    state = trained * (4 + 4 + 8 + 2) / gpus
    activations = micro_batch_tokens * model.layers * model.hidden * 2
    micro_batches = -(-tokens // (gpus * micro_batch_tokens))
    gathered = 2 * micro_batches * base * (gpus - 1) / gpus
    keys = min(sequence / 2, model.sparse.blocks * model.sparse.block) if model.sparse else sequence / 2
    dense_keys = sequence / 2
    width = 4 * model.heads * model.head_dim
    attention = width * (model.dense_layers * dense_keys + model.moe_layers * keys)
    flops = tokens * (6 * model.active_parameters + 3 * attention)
    at_once = max(1, min(samples, memory.sequences))
    holders = gpus if spread.kind == "dep" else replicas
    cache = model.decode_read(prompt_tokens + response_tokens // 2, kv, kv)
    reads = spread.weights_per_gpu(model, weights) + at_once / holders * cache * (1 if spread.kind == "dep" else spread.kv_share(model))
    decode = reads / (gpu.memory_tb_s * 1e12)
    waves = -(-samples // at_once)
    return StepPlan(
        model=model.title,
        tokens=tokens,
        adapter_parameters=adapters,
        sync_bytes=2 * trained,
        base_per_gpu=base / gpus,
        layer_gathered=per_layer,
        adapter_state_per_gpu=state,
        activations_per_gpu=activations,
        trainer_per_gpu=base / gpus + per_layer + state + activations,
        gathered_per_gpu=gathered,
        train_flops=flops,
        train_seconds=flops / (gpus * gpu.bf16_tflops * 1e12 * utilisation),
        gather_seconds=gathered / (gpu.link_gb_s * 1e9),
        decode_bytes_per_gpu=reads,
        decode_seconds=decode,
        generate_seconds=waves * response_tokens * decode,
        assumptions=(
            f"{samples:,} samples of {prompt_tokens:,} + {response_tokens:,} tokens; rank {rank} on {', '.join(r for r in LORA_ROLES[:4])} "
            "and every MLP and expert projection",
            f"trainer: base packed ({weights.upper()} experts), sharded over {gpus} GPUs, gathered twice for each of {micro_batches} "
            f"micro-batches of {micro_batch_tokens:,} tokens a GPU; fp32 master, gradient and two moments, bf16 copy, sharded",
            "activations: the input of each layer in bf16, the rest computed again; working memory of one layer not counted",
            f"training at {utilisation:.0%} of the dense BF16 rate; gathers at the link's full rate, overlap not counted",
            f"decoding bound by memory bandwidth alone: {at_once:,} of {samples:,} sequences at a time, {waves} round"
            f"{'s' if waves > 1 else ''}; every weight of a GPU is read in every decode step; prefill not counted",
        ),
    )

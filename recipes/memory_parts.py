"""Bytes of what a trainer rank and an engine rank hold, part by part, and of the memory that work takes: what every memory plan adds up.

Held parts are counted: with a checkpoint here from the shapes in its config, otherwise from the sizes of its architecture (then without
norms and global scales, which are some 1e-5 of a model). What work takes is an estimate from the widths of projections, by the operations
that keep tensors for backward.
"""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import DictConfig

from samebits.quant.checkpoint import Checkpoint
from samebits.quant.ranks import ROW_ROLES
from samebits.quant.roles import ATTENTION_ROLES, DENSE_ROLES, EXPERT_ROLES, SHARED_ROLES, Role
from samebits.quant.sizes import plan_weights
from samebits.trainer import early_export
from samebits.trainer.export import BATCH_BYTES

from .config import Recipe
from .plan_tables import BITS, Model
from .planning import PAGE_TOKENS
from .support import held_weights, keeps_packed, packed_weights
from .validate import Validated

SLOTS = 2
"""Adapter versions that an engine holds: the one in use and the next."""
CHUNK_LOGITS = {"cuda": 1 << 27, "cpu": 1 << 25}
"""Logits that the trainer's head has at a time, as `trainer.head` has it."""
TILE_INPUTS = 128
"""Inputs of a chunk of a matrix as the kernels read it; the last one is filled up with zeros."""
CPU_KV_BYTES = 1 << 30
"""What a job on a CPU gives the engine's KV cache."""


@dataclass(frozen=True, slots=True)
class Trainable:
    """Adapter parameters: `experts` of the routed experts, `rest` of all else."""

    experts: int
    rest: int

    @property
    def total(self) -> int:
        """Both."""
        return self.experts + self.rest


def trainable(found: Validated) -> Trainable:
    """The adapter of a recipe."""
    experts = rest = 0
    for role in found.spec.roles:
        count = found.model.count(role) * found.spec.rank * sum(found.model.matrix(role))
        experts, rest = (experts + count, rest) if role in EXPERT_ROLES else (experts, rest + count)
    return Trainable(experts, rest)


def exported_early(found: Validated) -> bool:
    """Whether the adapter is exported behind the optimizer's step, and all of it is held until it is sent."""
    return found.gpu is not None and early_export.fits(2 * trainable(found).total, found.gpu.memory_gb * 1e9)


def exporting(found: Validated, values: float | None = None) -> float:
    """What masters take while they leave the trainer: the values of a batch, or of `values` parameters; of a batch half in fp32 twice, of
    this rank's shard, and half once more between gathering and being put in order."""
    batch, ranks = min(trainable(found).total, BATCH_BYTES / 2), found.layout.fsdp
    return 2.0 * (batch if values is None else values) + 4.0 * batch / ranks + (batch if ranks > 1 else 0.0)


def sending(found: Validated) -> dict[str, float]:
    """What the trainer has of an adapter while it is sent: the buffer, and beside it a batch of masters, or all that was exported early."""
    total = trainable(found).total
    beside = max(exporting(found), 2.0 * total if exported_early(found) else 0.0)
    return {"trainer: adapter to send": 2.0 * total, "trainer: masters rounded and gathered": beside}


def base(recipe: Recipe, found: Validated) -> float:
    """Packed base as the trainer holds it over all ranks: the checkpoint's bytes, but one global scale for gate and up of an expert."""
    model = found.model
    if not found.checkpoint_here:
        return model.expert_bytes("nvfp4") + model.other_bytes("nvfp4")
    return plan_weights(Checkpoint(recipe.model_path).config, recipe.profile).total - 4 * model.moe_layers * model.experts


def trainer_state(recipe: Recipe, found: Validated) -> dict[str, float]:
    """What a trainer rank holds between steps: shards of FSDP2 along first dimensions, of equal size where the ranks divide them."""
    parameters, ranks = trainable(found).total, found.layout.fsdp
    return {"base": base(recipe, found) / ranks, "adapter": 4 * parameters / ranks, "moments": 8 * parameters / ranks}


def largest_layer(verl: DictConfig, found: Validated) -> tuple[float, float]:
    """Bytes of (packed base, fp32 adapter) of the largest layer as the trainer gathers it: without experts where these stay on their
    ranks."""
    model, sizes = found.model, trainable(found)
    spread = bool(verl.actor_rollout_ref.model.override_config.get("samebits_expert_parallel", False)) and found.layout.fsdp > 1
    packed = model.projection_parameters * BITS["mxfp8"] / 8 / model.layers
    experts = 0.0 if spread else model.expert_bytes("nvfp4") / max(1, model.moe_layers)
    return packed + experts, 4 * ((0 if spread else sizes.experts) / max(1, model.moe_layers) + sizes.rest / model.layers)


def engine_weights(recipe: Recipe, verl: DictConfig, found: Validated) -> float:
    """The base on one engine GPU: matrices, embedding and head, norms, routing biases, rotary table."""
    model, packed, split = found.model, keeps_packed(recipe.profile), found.layout.tensor_ranks
    matrices = (packed_weights if packed else held_weights)(model, found.layout.expert_ranks, split)
    if packed and "nvfp4" in model.checkpoint_gb:
        return matrices  # published with all that belongs to it
    matrices += _tile_extras(model, found.layout.expert_ranks, split) if packed else 0
    width = 2 if packed else 4
    ends = model.hidden * model.vocabulary * (width - 2)  # embedding and head beyond those of the line above
    norms = model.hidden * (2 * model.layers + 1) + 2 * model.head_dim * model.layers
    norms += 2 * model.sparse.index_dim * model.moe_layers if model.sparse else 0
    biases = 0 if packed else 4 * model.moe_layers * model.experts  # packed, they are counted with the routers
    return matrices + ends / split + norms * width + biases + longest(verl) * (model.head_dim // 2) * 4


def _tile_extras(model: Model, expert_ranks: int, split: int) -> float:
    """Bytes of tiles beyond packed matrices: inputs up to whole chunks, two global scales an expert (gate and up share one)."""
    extra = 8.0 * model.moe_layers * model.experts / expert_ranks
    for role in (*EXPERT_ROLES, *ATTENTION_ROLES, *SHARED_ROLES, *DENSE_ROLES, Role.INDEX_Q, Role.INDEX_K):
        n, k = model.matrix(role)
        bits = BITS["nvfp4" if role in EXPERT_ROLES else "mxfp8"]
        ranks = expert_ranks if role in EXPERT_ROLES else split if role in ROW_ROLES else 1
        extra += model.count(role) * n * (-k % TILE_INPUTS) * bits / 8 / ranks
    return extra


def adapter_slots(recipe: Recipe, found: Validated) -> float:
    """Slots of adapter versions in the engine's compute dtype; on packed weights q, k and v (and the indexer's rows) share one pair.

    The shared pair's B has the ranks of all three for every row: zeros outside of its own. Of a replica on several GPUs each
    has A whole and its rows of B, but for the indexer, which is whole.
    """
    model, width, split = found.model, _width(recipe), found.layout.tensor_ranks
    count = trainable(found).experts / found.layout.expert_ranks
    for role in set(found.spec.roles) - set(EXPERT_ROLES):
        rows, inputs = model.matrix(role)
        count += model.count(role) * found.spec.rank * (inputs + (rows / split if role in ROW_ROLES else rows))
    heads = [role for role in (Role.ATTN_Q, Role.ATTN_K, Role.ATTN_V) if role in found.spec.roles]
    if keeps_packed(recipe.profile) and heads:
        rows = sum(model.matrix(role)[0] for role in (Role.ATTN_Q, Role.ATTN_K, Role.ATTN_V)) / split
        index = sum(model.matrix(role)[0] for role in (Role.INDEX_Q, Role.INDEX_K))
        own = sum(model.matrix(role)[0] for role in heads) / split
        stacked = model.layers * rows + model.moe_layers * index
        count += found.spec.rank * (len(heads) * stacked - model.layers * own)
    return SLOTS * width * count


def sequence_bytes(recipe: Recipe, verl: DictConfig, found: Validated) -> tuple[float, float]:
    """Bytes on one engine GPU of K, V and index keys of one page over all layers, and of one sequence of full length in whole pages."""
    model, bits = found.model, BITS[{"nvfp4": "nvfp4", "bfloat16": "bf16", "float32": "fp32"}[recipe.profile.kv_cache]]
    # Pages of one size for all layers: those without an indexer have its room, too.
    heads = 2 * model.kv_heads / found.layout.tensor_ranks + (1 if model.sparse else 0)
    page = PAGE_TOKENS * model.layers * heads * model.head_dim * bits / 8
    return page, -(-longest(verl) // PAGE_TOKENS) * page


def longest(verl: DictConfig) -> int:
    """Tokens of the longest sequence that the engine takes."""
    return verl.actor_rollout_ref.rollout.max_model_len or verl.data.max_prompt_length + verl.data.max_response_length


def kept_per_token(recipe: Recipe, verl: DictConfig, found: Validated) -> float:
    """Bytes that forward keeps of each token over all layers.

    A layer keeps, in the compute dtype: stream and residual before both norms (the first layer has no residual), what the norms put out, q
    and k before and after norm and rotation, v, attention's output, the narrow products of every adapter, and gate and up of each expert
    of a token unless they are recomputed; in fp32 attention's log-sum-exp and the router's scores. With gradient checkpointing stream and
    residual of each layer. That is what the Hopper kernels keep. Torch's references on a CPU keep more: q, k and v once again in
    padded buckets, both sides of attention's softmax, and the rows that are gathered for experts with their activation.
    The last norm's two inputs are not in here.
    """
    model, width, rank = found.model, _width(recipe), found.spec.rank
    streams = 2 * model.layers - 1
    if verl.actor_rollout_ref.model.enable_gradient_checkpointing:
        return streams * model.hidden * width
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    roles = set(found.spec.roles)

    def narrow(group: tuple[Role, ...]) -> int:
        return rank * len(roles & set(group))

    attention = 3 * q + 3 * kv + narrow(ATTENTION_ROLES)
    halves = 0 if recipe.recompute.experts else 2
    dense = halves * model.dense_intermediate + narrow(DENSE_ROLES)
    shared = halves * model.shared_intermediate + narrow(SHARED_ROLES)
    routed = model.experts_per_token * (halves * model.expert_intermediate + narrow(EXPERT_ROLES))
    if recipe.device == "cpu":
        sequence = verl.data.max_prompt_length + verl.data.max_response_length
        attention += (q + 2 * kv + 2 * model.heads * sequence) * (2 if recipe.profile.accumulation == "float64" else 1)
        routed += model.experts_per_token * (model.hidden + model.expert_intermediate)
    scores = 4 * (model.layers * model.heads + model.moe_layers * (2 * model.experts + 6 * model.experts_per_token))
    hidden = (streams + 4 * model.layers) * model.hidden
    return width * (hidden + model.layers * attention + model.dense_layers * dense + model.moe_layers * (shared + routed)) + scores


def kept_adapters(recipe: Recipe, verl: DictConfig, found: Validated) -> float:
    """The adapter's values in the compute dtype, whole on every rank, which forward keeps beside them; none with checkpointing."""
    if verl.actor_rollout_ref.model.enable_gradient_checkpointing:
        return 0.0
    return _width(recipe) * trainable(found).total


def _width(recipe: Recipe) -> int:
    """Bytes of an element in the compute dtype."""
    return 4 if recipe.profile.activations == "float32" else 2


def layer_work(recipe: Recipe, found: Validated) -> tuple[float, float]:
    """Bytes for each token that the widest part of one layer, its experts, takes beside what is kept: in forward, in backward."""
    model, width = found.model, _width(recipe)
    pairs, inner, hidden = model.experts_per_token, model.expert_intermediate, model.hidden
    forward = pairs * (width * inner + 4 * hidden) + 2 * width * hidden
    # Gradient of the activation, of gate and up, the activation again, then fp32 rows of the input's gradient.
    backward = pairs * (width * 4 * inner + 4 * hidden) + 4 * width * hidden
    return forward, backward


def head_work(recipe: Recipe, model: Model, tokens: int) -> tuple[float, float]:
    """Bytes of the ends of the model, in forward and at the beginning of backward.

    What the last norm keeps (and, in chunks, the head) and one chunk of fp32 logits; in backward also its gradient, and that in two bf16
    parts (on a CPU the head in fp32).
    """
    cpu = recipe.device == "cpu"
    rows = min(tokens, max(1, CHUNK_LOGITS[recipe.device] // model.vocabulary))
    ends = (3 if tokens > rows else 2) * model.hidden * _width(recipe) * tokens
    chunk = rows * model.vocabulary * 4
    return ends + chunk, ends + 3 * chunk + (4 * model.vocabulary * model.hidden if cpu else 0)


def engine_budget(recipe: Recipe, verl: DictConfig, found: Validated, card: float | None = None) -> float | None:
    """Bytes that vLLM takes of one engine GPU, weights and work included; None where the GPU is not known.

    card: memory of the GPU as its driver tells it, where the recipe runs; otherwise it is that of the recipe's `cluster.gpu`.
    """
    memory = card or (found.gpu.memory_gb * 1e9 if found.gpu else None)
    return None if memory is None else memory * verl.actor_rollout_ref.rollout.gpu_memory_utilization


def fixed_cache(recipe: Recipe, verl: DictConfig) -> float | None:
    """Bytes of a KV cache that is given by itself, whatever else the engine holds; None where it is what is left of a share of the GPU.

    A job on a CPU gives it in its environment, which wins there.
    """
    if recipe.device == "cpu":
        return float(CPU_KV_BYTES)
    given = (verl.actor_rollout_ref.rollout.engine_kwargs.get("vllm") or {}).get("kv_cache_memory_bytes")
    return float(given) if given else None

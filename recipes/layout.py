"""How a recipe spreads over GPUs, and what the engine takes: every size that must divide another, found before there is a GPU.

A run is colocated: each GPU trains one FSDP rank's share and serves one rank of an engine replica, in turns. A replica may be spread over
GPUs of one node (`tensor_model_parallel_size`): outputs and whole experts are split and no sum is, so that it has the bits of one GPU.
Plans may also spread whole experts with each sequence on one GPU (`data_parallel_size`, `expert_parallel_size`). Pipeline stages are
refused.
"""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf

from samebits.quant.ranks import indivisible

from .config import RecipeError
from .plan_tables import Model

ROLLOUT = "actor_rollout_ref.rollout"
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM serves."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Who does what on how many GPUs."""

    nodes: int
    gpus_per_node: int
    engine_gpus: int
    """GPUs of one engine replica."""
    expert_ranks: int
    """GPUs over which a replica's experts are spread."""
    tensor_ranks: int
    """GPUs over which a replica's other weights and KV heads are spread."""
    fsdp: int
    """GPUs over which the trainer's parameters are sharded."""

    @property
    def gpus(self) -> int:
        """All of them: one training rank each."""
        return self.nodes * self.gpus_per_node

    @property
    def replicas(self) -> int:
        """Engine replicas."""
        return self.gpus // self.engine_gpus


def require_whole(verl: DictConfig, *keys: str) -> None:
    """Each key must hold a whole number of at least 1, or nothing."""
    for key in keys:
        value = OmegaConf.select(verl, key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise RecipeError(f"{key} must be a whole number of at least 1, not {value!r}")


def spread(verl: DictConfig, model: Model) -> Spread:
    """The parallel layout of a recipe. Raises `RecipeError` naming the key whose size does not divide or is not possible."""
    rollout, actor = verl.actor_rollout_ref.rollout, verl.actor_rollout_ref.actor
    sizes = ("tensor_model_parallel_size", "data_parallel_size", "expert_parallel_size", "pipeline_model_parallel_size")
    require_whole(verl, *(f"{ROLLOUT}.{size}" for size in sizes))
    gpus = verl.trainer.nnodes * verl.trainer.n_gpus_per_node
    tp, dp, ep = rollout.tensor_model_parallel_size, rollout.data_parallel_size, rollout.expert_parallel_size
    if rollout.pipeline_model_parallel_size > 1:
        raise RecipeError(
            f"{ROLLOUT}.pipeline_model_parallel_size={rollout.pipeline_model_parallel_size}: the engine has no pipeline stages, "
            "spread it by tensor_model_parallel_size"
        )
    if tp > 1:
        _require_tensor_parallel(verl, model, tp, dp, ep)
        dp = tp
    elif ep not in (1, dp):
        raise RecipeError(f"{ROLLOUT}.expert_parallel_size={ep} must be 1 or data_parallel_size ({dp}): experts spread over a whole engine")
    if model.experts % ep:
        raise RecipeError(f"{ROLLOUT}.expert_parallel_size={ep} does not divide the {model.experts} experts of {model.title}")
    if tp == 1 and gpus % dp:
        machines = f"trainer.nnodes={verl.trainer.nnodes} x trainer.n_gpus_per_node={verl.trainer.n_gpus_per_node}"
        raise RecipeError(f"{machines} GPUs do not hold whole engines of {ROLLOUT}.data_parallel_size={dp}")
    if tp == 1 and dp > 1 and dp % verl.trainer.n_gpus_per_node:
        raise RecipeError(
            f"{ROLLOUT}.data_parallel_size={dp} must be a multiple of trainer.n_gpus_per_node={verl.trainer.n_gpus_per_node}: "
            "verl gives such an engine whole nodes"
        )
    fsdp = actor.fsdp_config.fsdp_size
    if isinstance(fsdp, bool) or not isinstance(fsdp, int) or not (fsdp == -1 or (fsdp >= 1 and gpus % fsdp == 0)):
        raise RecipeError(f"actor_rollout_ref.actor.fsdp_config.fsdp_size={fsdp} must be -1 (all) or divide the {gpus} GPUs")
    samples = verl.data.train_batch_size * rollout.n
    if samples % gpus:
        raise RecipeError(f"data.train_batch_size={verl.data.train_batch_size} x {rollout.n} samples do not divide over {gpus} ranks")
    return Spread(verl.trainer.nnodes, verl.trainer.n_gpus_per_node, dp, tp if tp > 1 else ep, tp, gpus if fsdp == -1 else fsdp)


def _require_tensor_parallel(verl: DictConfig, model: Model, tp: int, dp: int, ep: int) -> None:
    """What a replica on `tp` GPUs needs of model and machines. Raises `RecipeError`."""
    key = f"{ROLLOUT}.tensor_model_parallel_size={tp}"
    intermediates = [size for size in (model.shared_intermediate, model.dense_intermediate) if size]
    odd = indivisible(tp, kv_heads=model.kv_heads, hidden=model.hidden, intermediates=intermediates)
    if odd or tp > model.experts:
        raise RecipeError(f"{key} does not divide the {odd or f'{model.experts} experts'} of {model.title}: use more replicas instead")
    if dp > 1:
        raise RecipeError(f"{key} with {ROLLOUT}.data_parallel_size={dp}: an engine is spread by one of them; more replicas take no key")
    if ep not in (1, tp):
        raise RecipeError(f"{ROLLOUT}.expert_parallel_size={ep} must be 1 or tensor_model_parallel_size ({tp}), over which experts spread")
    if verl.trainer.n_gpus_per_node % tp:
        raise RecipeError(f"{key} does not divide trainer.n_gpus_per_node={verl.trainer.n_gpus_per_node}: a replica lies on one node")


def require_engine_limits(verl: DictConfig, model: Model, rank: int) -> None:
    """What vLLM refuses only once it starts: ranks, lengths, tokens of a step. Raises `RecipeError`."""
    rollout = verl.actor_rollout_ref.rollout
    if not 0 < rollout.gpu_memory_utilization <= 1:
        raise RecipeError(f"{ROLLOUT}.gpu_memory_utilization must lie within 0 and 1, not {rollout.gpu_memory_utilization}")
    if rank not in LORA_RANKS:
        raise RecipeError(f"lora.rank: vLLM serves ranks {', '.join(map(str, LORA_RANKS))}, not {rank}")
    served = (rollout.engine_kwargs.get("vllm") or {}).get("max_lora_rank")
    if served is not None and rank > served:
        raise RecipeError(f"lora.rank={rank} is above the engine's {ROLLOUT}.engine_kwargs.vllm.max_lora_rank={served}")
    room = verl.data.max_prompt_length + verl.data.max_response_length
    longest = rollout.max_model_len
    if longest is not None and longest < room:
        raise RecipeError(f"{ROLLOUT}.max_model_len={longest} is less than prompt plus response ({room})")
    if model.context is not None and max(room, longest or 0) > model.context:
        raise RecipeError(f"{ROLLOUT}.max_model_len={max(room, longest or 0)} is more than the {model.context} tokens of {model.title}")
    tokens = rollout.max_num_batched_tokens
    if not rollout.enable_chunked_prefill and tokens < (longest or room):
        raise RecipeError(
            f"{ROLLOUT}.max_num_batched_tokens={tokens} cannot hold a prompt of {longest or room} tokens, and prefill is not chunked"
        )

"""How a recipe spreads over GPUs, and what the engine takes: every size that must divide another, found before there is a GPU.

A run is colocated: each GPU trains one FSDP rank's share and serves one rank of an engine replica, in turns. Inside a replica only
whole experts may be spread (`expert_parallel_size`), each sequence staying on one GPU (`data_parallel_size`). Tensor and pipeline
parallelism are refused: a sum split over ranks is rounded in another order than the trainer's, so the bits would differ.
"""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf

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
    if model.heads % tp:
        raise RecipeError(f"{ROLLOUT}.tensor_model_parallel_size={tp} does not divide the {model.heads} heads of {model.title}")
    for key, size in (("tensor_model_parallel_size", tp), ("pipeline_model_parallel_size", rollout.pipeline_model_parallel_size)):
        if size > 1:
            raise RecipeError(
                f"{ROLLOUT}.{key}={size} splits what the trainer computes in one piece, so the bits would differ: "
                "spread an engine by data_parallel_size and expert_parallel_size"
            )
    if ep not in (1, dp):
        raise RecipeError(f"{ROLLOUT}.expert_parallel_size={ep} must be 1 or data_parallel_size ({dp}): experts spread over a whole engine")
    if model.experts % ep:
        raise RecipeError(f"{ROLLOUT}.expert_parallel_size={ep} does not divide the {model.experts} experts of {model.title}")
    if gpus % dp:
        machines = f"trainer.nnodes={verl.trainer.nnodes} x trainer.n_gpus_per_node={verl.trainer.n_gpus_per_node}"
        raise RecipeError(f"{machines} GPUs do not hold whole engines of {ROLLOUT}.data_parallel_size={dp}")
    if dp > 1 and dp % verl.trainer.n_gpus_per_node:
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
    return Spread(verl.trainer.nnodes, verl.trainer.n_gpus_per_node, dp, ep, gpus if fsdp == -1 else fsdp)


def require_engine_limits(verl: DictConfig, model: Model, rank: int) -> None:
    """What vLLM refuses only once it starts: ranks, lengths, tokens of a step. Raises `RecipeError`."""
    rollout = verl.actor_rollout_ref.rollout
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

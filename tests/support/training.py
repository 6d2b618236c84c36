"""The training engine as verl's own classes build it, without Ray, and batches as verl's V1 trainer hands them over."""

from __future__ import annotations

import os
import socket
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from tensordict import TensorDict


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start_group(rank: int = 0, world: int = 1, port: int | None = None) -> None:
    """A gloo process group through verl's own (patched) function."""
    import verl.utils.distributed as distributed

    import samebits.trainer.plugin  # noqa: F401

    if not dist.is_initialized():
        port = port or free_port()
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        distributed.initialize_global_process_group_ray()


def model_config(path: Path, **changes):
    from verl.workers.config import HFModelConfig

    settings = dict(
        path=str(path),
        lora_rank=8,
        lora_alpha=16,
        target_modules="all",
        enable_gradient_checkpointing=False,
        override_config={"samebits_profile": "w4a16-fp32"},
    )
    return HFModelConfig(**settings | changes)


def engine(path: Path, replay: bool = False, lr: float = 1e-2, warmup: int = 0, model: dict | None = None, **engine_changes):
    """An initialized engine out of verl's registry."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig
    from verl.workers.config.engine import EngineRouterReplayConfig
    from verl.workers.engine import EngineRegistry

    import samebits.trainer.plugin  # noqa: F401

    config = FSDPEngineConfig(
        strategy="fsdp2", router_replay=EngineRouterReplayConfig(mode="R3" if replay else "disabled"), **engine_changes
    )
    built = EngineRegistry.new(
        model_type="language_model",
        backend="fsdp2",
        model_config=model_config(path, **(model or {})),
        engine_config=config,
        optimizer_config=FSDPOptimizerConfig(lr=lr, lr_warmup_steps=warmup, total_training_steps=10, weight_decay=0.0),
        checkpoint_config=CheckpointConfig(),
    )
    built.initialize()
    return built


def loss_function(cap: float = 2.0, rollout_is: str | None = "token"):
    """verl's actor loss with our policy loss inside, as its worker makes it."""
    from verl.trainer.config.algorithm import RolloutCorrectionConfig
    from verl.workers.config import FSDPActorConfig
    from verl.workers.config.actor import PolicyLossConfig
    from verl.workers.utils.losses import ppo_loss

    policy = PolicyLossConfig(
        loss_mode="samebits_tis", rollout_correction=RolloutCorrectionConfig(rollout_is=rollout_is, rollout_is_threshold=cap)
    )
    config = FSDPActorConfig(strategy="fsdp2", policy_loss=policy, rollout_n=1, ppo_micro_batch_size_per_gpu=1, use_dynamic_bsz=True)
    return partial(ppo_loss, config=config)


def nested(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def batch(
    prompts: list[list[int]],
    responses: list[list[int]],
    rollout_logprobs: list[torch.Tensor],
    advantages: list[torch.Tensor],
    routes: list[torch.Tensor] | None = None,
    max_tokens: int = 10**6,
    temperature: float = 1.0,
) -> TensorDict:
    """A mini-batch. `routes` [prompt + response - 1, layers, k] is padded with a row of zeros, as verl pads it."""
    from verl.utils import tensordict_utils as tu

    p = [torch.tensor(x) for x in prompts]
    r = [torch.tensor(x) for x in responses]
    mask = nested([torch.ones(len(x), dtype=torch.int64) for x in r])
    fields = {
        "prompts": nested(p),
        "responses": nested(r),
        "input_ids": nested([torch.cat(x) for x in zip(p, r, strict=True)]),
        "position_ids": nested([torch.arange(len(a) + len(b)) for a, b in zip(p, r, strict=True)]),
        "response_mask": mask,
        "loss_mask": mask,
        "rollout_log_probs": nested(rollout_logprobs),
        "old_log_probs": nested([x.clone() for x in rollout_logprobs]),
        "advantages": nested(advantages),
    }
    if routes is not None:
        fields["routed_experts"] = nested([torch.cat((x, torch.zeros_like(x[:1]))) for x in routes])
    scalars = dict(
        temperature=temperature,
        max_token_len_per_gpu=max_tokens,
        use_dynamic_bsz=True,
        global_batch_size=len(p),
        calculate_entropy=False,
    )
    return tu.get_tensordict(fields, scalars)


def random_batch(count: int, vocab: int, seed: int = 0, **kwargs) -> TensorDict:
    """`count` sequences of different lengths with random log-probabilities and advantages."""
    g = torch.Generator().manual_seed(seed)
    prompts, responses = [], []
    for i in range(count):
        prompts.append(torch.randint(3, vocab, (3 + i % 4,), generator=g).tolist())
        responses.append(torch.randint(3, vocab, (2 + (5 * i) % 7,), generator=g).tolist())
    logprobs = [-torch.rand(len(r), generator=g) * 4 for r in responses]
    advantages = [torch.full((len(r),), float(torch.randn((), generator=g))) for r in responses]
    return batch(prompts, responses, logprobs, advantages, **kwargs)

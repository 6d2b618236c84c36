"""The objective: policy gradient with truncated importance weights against the rollout's own log-probabilities.

    loss = - sum_t A_t * stop_grad(min(exp(lp_t - lp_rollout_t), cap)) * lp_t / (response tokens of the GLOBAL batch)

The engine's log-probabilities are the old log-probabilities: one optimizer step a batch and no extra forward. Against the standard
PPO loss this leaves out the clipped ratio (the step is on-policy up to numerics, which the weight corrects) and the KL penalty.

Two ablations are there to be measured against it: no weight at all, and the weight against old log-probabilities that the trainer
computed itself, as trainers do that do not trust the engine's (it is then 1 up to the trainer's own noise, and the difference of the two
sides goes uncorrected).

A micro-batch knows only its own tokens, so its loss is its sum divided by the global count, times the number of data-parallel ranks
because FSDP averages gradients over ranks. The sum over micro-batches and the mean over ranks is then the global token mean, for any
split. Metrics are made in the same way, as parts that add up (or whose maximum is taken), never as means of means.

Differences are `trainer minus rollout`. Masked slots may hold anything, NaN included. The log-ratio is clamped to +-20 before it is
exponentiated, so every result is finite as long as the unmasked inputs are numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

POLICY_LOSS = "samebits_tis"
DEFAULT_CAP = 2.0
MAX_LOG_RATIO = 20.0


class Part(NamedTuple):
    """One micro-batch's share of a metric of the global batch."""

    value: float
    how: str
    """How shares become the metric: "sum" over micro-batches and mean over ranks, or "max" over all."""


def tis_loss(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    total_tokens: float,
    ranks: int = 1,
    cap: float | None = DEFAULT_CAP,
    old_logprobs: Tensor | None = None,
) -> tuple[Tensor, dict[str, Part]]:
    """Loss and metrics of one micro-batch.

    Args:
        logprobs, rollout_logprobs, advantages: fp32, all of one shape, e.g. [B, R]; gradient goes to `logprobs` only.
        mask: bool or 0/1, same shape: the response tokens that count.
        total_tokens: response tokens of the global batch, over all micro-batches and ranks. ranks: data-parallel size.
        cap: largest importance weight; None for no weights (every one is 1).
        old_logprobs: what the weight is against instead of `rollout_logprobs`, same shape. `mismatch/*` stays against the rollout.
    Returns:
        The scalar loss and the metrics mismatch/kl (mean of exp(d) - d - 1), mismatch/max_abs (of d), tis/mean (of the weights that
        were used), tis/max_raw (largest ratio before the cap), tis/clipped_fraction and objective/loss: the loss summed in fp64, whose
        bits as fp32 do not tell how the batch was cut over micro-batches and ranks.
    Raises `ValueError` when shapes differ: nothing is broadcast.
    """
    old = rollout_logprobs if old_logprobs is None else old_logprobs
    shapes = {"logprobs": logprobs, "rollout_logprobs": rollout_logprobs, "advantages": advantages, "mask": mask, "old_logprobs": old}
    if len({tuple(t.shape) for t in shapes.values()}) != 1:
        raise ValueError("the objective takes tensors of one shape, not " + ", ".join(f"{n} {tuple(t.shape)}" for n, t in shapes.items()))
    mask = mask.bool()
    # Masked slots are replaced before any arithmetic: NaN times zero would be NaN, in the loss and in its gradient.
    lp = torch.where(mask, logprobs.float(), 0.0)
    with torch.no_grad():
        d = torch.where(mask, logprobs.float() - rollout_logprobs.float(), 0.0)
        clamped = d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio = torch.where(mask, logprobs.float() - old.float(), 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        weight = torch.where(mask, torch.ones_like(ratio) if cap is None else ratio.clamp(max=cap), 0.0)
        advantage = torch.where(mask, advantages.float(), 0.0)
    share = ranks / max(total_tokens, 1.0)
    loss = -(advantage * weight * lp).sum() * share
    metrics = {
        # exp(d) - 1 - d of a tiny d is all cancellation in fp32 and would come out negative.
        "mismatch/kl": Part(((torch.expm1(clamped.double()) - clamped.double()) * mask).sum().item() * share, "sum"),
        "mismatch/max_abs": Part(d.abs().max().item() if d.numel() else 0.0, "max"),
        "tis/mean": Part(weight.sum().item() * share, "sum"),
        "tis/max_raw": Part((ratio * mask).max().item() if d.numel() else 0.0, "max"),
        "objective/loss": Part(-(advantage.double() * weight.double() * lp.detach().double()).sum().item() * share, "sum"),
        "tis/clipped_fraction": Part(0.0 if cap is None else ((ratio > cap) & mask).sum().item() * share, "sum"),
    }
    return loss, metrics


class _Collected(NamedTuple):
    metrics: dict[str, Part]
    rollout: Tensor | None


_collected: ContextVar[_Collected | None] = ContextVar("samebits_metrics", default=None)


@contextmanager
def collect_metrics(rollout_logprobs: Tensor | None = None) -> Iterator[dict[str, Part]]:
    """Catch the metrics of the losses computed inside.

    `rollout_logprobs` [B, R] of the micro-batch, where its old log-probabilities are others: verl hands a policy loss the old ones only.

    verl wraps whatever a policy loss returns as metrics into a mean over micro-batches, which is wrong for every metric here.
    So the loss below returns none to verl, and the engine, which calls verl's loss function inside this context, adds them itself.
    """
    metrics: dict[str, Part] = {}
    token = _collected.set(_Collected(metrics, rollout_logprobs))
    try:
        yield metrics
    finally:
        _collected.reset(token)


def samebits_tis(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """verl's policy loss `samebits_tis`: `tis_loss` with the rollout's log-probabilities as `old_log_prob` (all [B, R]).

    The cap is `policy_loss.rollout_correction.rollout_is_threshold`; `rollout_is` null there leaves the weights out. Raises `ValueError`
    on another aggregation than token-mean and on weights that verl computed by itself, which would be applied twice.
    """
    if loss_agg_mode != "token-mean":
        raise ValueError(f"policy loss {POLICY_LOSS} needs loss_agg_mode=token-mean, not {loss_agg_mode}")
    if rollout_is_weights is not None:
        raise ValueError(f"policy loss {POLICY_LOSS} computes the importance weights itself; leave rollout_is of the algorithm unset")
    collected = _collected.get()
    if collected is None:
        raise RuntimeError(f"policy loss {POLICY_LOSS} runs only inside the samebits training engine")
    info, correction = config.global_batch_info, config.policy_loss.rollout_correction
    cap = None if correction.rollout_is is None else float(correction.rollout_is_threshold)
    rollout, old = (old_log_prob, None) if collected.rollout is None else (collected.rollout, old_log_prob)
    sizes = info["batch_num_tokens"], info["dp_size"]
    loss, metrics = tis_loss(log_prob, rollout, advantages, response_mask, *sizes, cap=cap, old_logprobs=old)
    collected.metrics.update(metrics)
    return loss, {}


def register() -> None:
    """Register the policy loss with verl."""
    from verl.trainer.ppo.core_algos import register_policy_loss

    register_policy_loss(POLICY_LOSS)(samebits_tis)

"""Does the trainer's loss do what it should, on vectors whose answers are known?

Importance weights min(exp(trainer - rollout), cap), their direction, masks and denominators, micro-batches, and metrics before the cap.
The vectors are small enough to be computed by hand.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .pair import Pair
from .probes import Probes
from .report import CheckResult, Place

LOG_RATIOS = (0.1, -1.5, 0.8, -10.0, 0.3)
WEIGHTS = (math.exp(0.1), math.exp(-1.5), 2.0, math.exp(-10.0), math.exp(0.3))
CAP = 2.0


def ratio(pair: Pair, result: CheckResult) -> None:
    """Weights of known log-ratios with the recipe's cap, the direction of the ratio, and the gradient -A w / tokens of each token."""
    result.require(
        pair.trainer.cap == CAP,
        f"the recipe caps importance weights at {pair.trainer.cap}, not {CAP}",
        measured=pair.trainer.cap,
        limit=CAP,
    )
    rollout = torch.full((1, 5), -2.0)
    lp = (rollout + torch.tensor([LOG_RATIOS])).requires_grad_()
    loss, metrics = _loss(lp, rollout, torch.ones(1, 5), torch.ones(1, 5, dtype=torch.bool), 5)
    loss.backward()
    for i, (have, want) in enumerate(zip((-lp.grad[0] * 5).tolist(), WEIGHTS, strict=True)):
        message = f"log-ratio {LOG_RATIOS[i]}: importance weight {have:.4g}, known {want:.4g}"
        result.require(math.isclose(have, want, rel_tol=1e-4, abs_tol=1e-7), message, Place(token=i), have, want)
    known = {
        "tis/max_raw": math.exp(0.8),
        "tis/mean": sum(WEIGHTS) / 5,
        "tis/clipped_fraction": 0.2,
        "mismatch/max_abs": 10.0,
        "mismatch/kl": sum(math.exp(d) - 1 - d for d in LOG_RATIOS) / 5,
    }
    for name, want in known.items():
        have = metrics[name].value
        result.require(math.isclose(have, want, rel_tol=1e-4), f"{name} is {have:.4g}, known {want:.4g}", measured=have, limit=want)


def mask(pair: Pair, result: CheckResult) -> None:
    """Masked tokens count nowhere, whatever they hold; loss over unequal micro-batches is the mean over all tokens."""
    lp = torch.tensor([[-1.0, float("nan"), -3.0]], requires_grad=True)
    rollout = torch.tensor([[-1.0, float("-inf"), -3.0]])
    kept = torch.tensor([[True, False, True]])
    loss, metrics = _loss(lp, rollout, torch.tensor([[1.0, float("nan"), -1.0]]), kept, 2)
    loss.backward()
    result.require(
        math.isclose(loss.item(), -1.0, rel_tol=1e-5),
        f"loss with a masked NaN is {loss.item():.4g}, known -1",
        measured=loss.item(),
        limit=-1.0,
    )
    gradient = lp.grad[0].tolist()
    wanted = [-0.5, 0.0, 0.5]
    result.require(
        gradient == wanted,
        f"gradient with a masked token is {gradient}, known {wanted}: the mask or its denominator is wrong",
        Place(token=1),
    )
    mean = metrics["tis/mean"].value
    result.require(
        math.isclose(mean, 1.0, rel_tol=1e-5), f"mean weight with a masked token is {mean:.4g}, known 1", measured=mean, limit=1.0
    )
    # One token of loss 1 and nine of loss 0 in two micro-batches: 0.1, not 0.5.
    parts = [_loss(torch.full((1, 1), -1.0), torch.full((1, 1), -1.0), torch.ones(1, 1), torch.ones(1, 1), 10)[0]]
    parts.append(_loss(torch.full((1, 9), -1.0), torch.full((1, 9), -1.0), torch.zeros(1, 9), torch.ones(1, 9), 10)[0])
    total = float(sum(parts))
    result.require(
        math.isclose(total, 0.1, rel_tol=1e-5),
        f"loss of micro-batches of 1 and 9 tokens is {total:.4g}, known 0.1",
        measured=total,
        limit=0.1,
    )


def split(pair: Pair, probes: Probes, result: CheckResult) -> None:
    """The trainer's loss and gradients of a real batch do not depend on how it is cut into micro-batches."""
    samples = [s for s in probes.samples[0] if len(s.tokens) < 200][:4]
    routes = None if any(s.routes is None for s in samples) else [s.routes for s in samples]
    advantages = [torch.full((len(s.ids),), 1.0 if i % 2 else -1.0) for i, s in enumerate(samples)]
    whole, _, gradients = pair.trainer.loss_and_gradients(samples, advantages, routes)
    longest = max(len(s.tokens) for s in samples)
    cut, _, others = pair.trainer.loss_and_gradients(samples, advantages, routes, max_tokens=longest)
    limit = pair.limits.gradient
    # The loss is a sum that nearly cancels: its scale is that of its terms, one logprob of some nats a token.
    message = f"loss is {whole:.6g} in one piece and {cut:.6g} in micro-batches"
    result.require(abs(whole - cut) <= limit * 0.1, message, measured=cut, limit=whole)
    result.require(bool(gradients) and gradients.keys() == others.keys(), "micro-batches leave other parameters without gradient")
    for name, g in gradients.items():
        error, size = (g - others[name]).norm().item(), g.norm().item()
        message = f"gradient of {name} differs between one piece and micro-batches by {error / max(size, 1e-30):.2g}"
        result.require(error <= limit * size + 1e-7, message, Place(tensor=name), error, limit * size)


def _loss(logprobs: Tensor, rollout: Tensor, advantages: Tensor, keep: Tensor, tokens: int):
    # Through the module, so that what the trainer calls is what is checked.
    from samebits.trainer import objective

    return objective.tis_loss(logprobs, rollout, advantages, keep, tokens, cap=CAP)

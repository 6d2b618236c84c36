"""Do both sides give a sequence the same probability, token by token, on every path that a job can take?

d = trainer minus engine, in nats. k1 = -mean(d) and k3 = mean(exp(d) - 1 - d) both estimate KL(engine || trainer) on tokens that the
engine sampled (Schulman, "Approximating KL divergence"): k3 is never negative and has the lower variance, k1 keeps the sign.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .limits import Limits
from .pair import Pair, Sample
from .probes import LONG_RESPONSE, TEMPERATURES, Probes
from .report import CheckResult, Place

SCATTER = 2000
"""Points of the drawing."""


def difference_metrics(trainer: Tensor, engine: Tensor) -> dict[str, float]:
    """k1, k3, mean, extremes and quantiles of trainer minus engine, fp32 [T] each."""
    d = (trainer.double() - engine.double()).flatten()
    if not len(d):
        return {}
    bounded = d.clamp(-20, 20)
    magnitude = d.abs()
    return {
        "tokens": float(len(d)),
        "k1": -d.mean().item(),
        "k3": (torch.expm1(bounded) - bounded).mean().item(),
        "mean": d.mean().item(),
        "max_abs": magnitude.max().item(),
        "abs_q50": magnitude.quantile(0.5).item(),
        "abs_q95": magnitude.quantile(0.95).item(),
        "abs_q99": magnitude.quantile(0.99).item(),
    }


def check_values(result: CheckResult, engine: Sequence[Tensor | None], counts: Sequence[int]) -> bool:
    """The engine's logprobs [response] are there, as many as tokens, numbers, and not positive."""
    good = True
    for i, (row, count) in enumerate(zip(engine, counts, strict=True)):
        if row is None or len(row) != count:
            found = "no" if row is None else len(row)
            good &= result.require(False, f"sequence {i} has {found} logprobs for {count} response tokens", Place(sequence=i))
            continue
        wrong = ~torch.isfinite(row) | (row > 1e-6)
        token = int(wrong.int().argmax()) if wrong.any() else None
        value = row[token].item() if token is not None else None
        message = f"sequence {i}: logprob of response token {token} is {value}"
        good &= result.require(not wrong.any(), message, Place(sequence=i, token=token), value, 0.0)
    return good


def check_agreement(
    result: CheckResult,
    trainer: Sequence[Tensor],
    engine: Sequence[Tensor],
    limits: Limits,
    what: str = "",
    first_token: Sequence[int] | None = None,
) -> None:
    """KL, mean and maximum of the difference over sequences of logprobs [T] each; names the worst sequence and token.

    `first_token`: index in its sequence of the token that row 0 of each entry scores; default 0.
    """
    metrics = difference_metrics(torch.cat(list(trainer)), torch.cat(list(engine)))
    prefix = f"{what}/" if what else ""
    result.metrics |= {f"{prefix}{name}": value for name, value in metrics.items()}
    if not result.require(bool(metrics), f"{what or 'no sequences'}: there is nothing to compare"):
        return
    worst = max(range(len(trainer)), key=lambda i: (trainer[i] - engine[i]).abs().max().item() if len(trainer[i]) else 0.0)
    token = int((trainer[worst] - engine[worst]).abs().argmax())
    place = Place(sequence=worst, token=token + (first_token[worst] if first_token is not None else 0))
    suffix = f" ({what})" if what else ""
    shift = _shift_hint(trainer, engine)
    for name, value, limit in (("k3", metrics["k3"], limits.kl_fail), ("max_abs", metrics["max_abs"], limits.max_abs)):
        message = f"trainer and engine logprobs differ{suffix}: {name} {value:.3g}, limit {limit:.3g}, worst at {place}{shift}"
        if not result.require(value <= limit, message, place, value, limit):
            return
    message = f"trainer logprobs are shifted against the engine's{suffix}: mean difference {metrics['mean']:+.3g}, limit {limits.mean:.3g}"
    result.require(abs(metrics["mean"]) <= limits.mean, message, place, metrics["mean"], limits.mean)


def _shift_hint(trainer: Sequence[Tensor], engine: Sequence[Tensor]) -> str:
    """Whether the engine's rows fit better one token earlier or later."""
    longest = max(range(len(trainer)), key=lambda i: len(trainer[i]))
    a, b = trainer[longest], engine[longest]
    if len(a) < 8:
        return ""
    here = (a - b).abs().mean().item()
    for shift, (x, y) in {1: (a[1:], b[:-1]), -1: (a[:-1], b[1:])}.items():
        if (x - y).abs().mean().item() < 0.2 * here:
            return f"; off by one: the engine's value at a token is the trainer's at the token {'after' if shift > 0 else 'before'} it"
    return ""


def generated(pair: Pair, probes: Probes, result: CheckResult) -> dict[str, Any]:
    """Generated and prompt tokens of every replica against the trainer; returns the drawings' data."""
    scatter: dict[str, list[float]] = {"trainer": [], "engine": []}
    rows: list[tuple[Tensor, int]] = []
    for samples, trained in zip(probes.samples, probes.trained, strict=True):
        if not check_values(result, [s.logprobs for s in samples], [len(s.ids) for s in samples]):
            continue
        ours = [t[len(s.prompt) - 1 :] for t, s in zip(trained, samples, strict=True)]
        theirs = [s.logprobs for s in samples]
        check_agreement(result, ours, theirs, pair.limits, "generated", [len(s.prompt) for s in samples])
        scored = [
            (t[: len(s.prompt) - 1], s.prompt_logprobs) for t, s in zip(trained, samples, strict=True) if s.prompt_logprobs is not None
        ]
        scored = [(t, p) for t, p in scored if len(p)]
        check_agreement(result, [t for t, _ in scored], [p for _, p in scored], pair.limits, "prompt", [1] * len(scored))
        for a, b in [*zip(ours, theirs, strict=True), *scored]:
            scatter["trainer"] += a.tolist()
            scatter["engine"] += b.tolist()
        rows += [
            (torch.cat((p - q, a - b)), 1)
            for (p, q), a, b in zip(scored, ours[len(ours) - len(scored) :], theirs[len(theirs) - len(scored) :], strict=True)
        ]
    value = result.metrics.get("generated/k3", 0.0)
    result.metrics["kl_warn_exceeded"] = float(value > pair.limits.kl_warn)
    step = max(1, len(scatter["trainer"]) // SCATTER)
    return {"scatter": {k: v[::step] for k, v in scatter.items()}, "by_position": _by_position([r for r, _ in rows])}


def _by_position(differences: Sequence[Tensor]) -> dict[str, list[float]]:
    """Mean, 95 % quantile and maximum of the difference in ranges of positions that double."""
    edges = [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192]
    out: dict[str, list[float]] = {"position": [], "mean": [], "q95": [], "max": []}
    for first, last in itertools.pairwise(edges):
        part = torch.cat([d[first:last] for d in differences]) if differences else torch.zeros(0)
        if len(part):
            out["position"].append(first)
            out["mean"].append(part.mean().item())
            out["q95"].append(part.abs().quantile(0.95).item())
            out["max"].append(part.abs().max().item())
    return out


def temperature(pair: Pair, probes: Probes, result: CheckResult) -> None:
    """At temperatures other than 1 both sides divide the logits by it, once."""
    replica = pair.replicas[0]
    prompts = probes.prompts[:5]
    for t in TEMPERATURES:
        samples = replica.run(prompts, probes.response, temperature=t, prompt_logprobs=False)
        if not check_values(result, [s.logprobs for s in samples], [len(s.ids) for s in samples]):
            return
        theirs = [s.logprobs for s in samples]

        def scored(value: float, samples: list[Sample] = samples) -> list[Tensor]:
            return [row[len(s.prompt) - 1 :] for row, s in zip(probes.score(samples, value), samples, strict=True)]

        ours = scored(t)
        before = len(result.findings)
        check_agreement(result, ours, theirs, pair.limits, f"temperature {t}", [len(s.prompt) for s in samples])
        if len(result.findings) > before:
            _name_temperature(result, t, torch.cat(theirs), {"1 (raw logits)": scored(1.0), f"{t * t:.3g} (divided twice)": scored(t * t)})


def _name_temperature(result: CheckResult, wanted: float, theirs: Tensor, candidates: dict[str, list[Tensor]]) -> None:
    for name, rows in candidates.items():
        if (torch.cat(rows) - theirs).abs().max().item() < 0.02:
            result.require(False, f"at temperature {wanted} the two sides agree if one of them computes at temperature {name}")
    ratio = torch.cat(candidates["1 (raw logits)"]) / wanted
    if (ratio - theirs).abs().max().item() < 0.02:
        result.require(False, f"at temperature {wanted} the engine's logprobs were divided by it, not the logits")


def variants(pair: Pair, probes: Probes, result: CheckResult) -> None:
    """Alone and in a batch, with and without prefix cache, whole and chunked prefill, generated and scored: each against the trainer."""
    replica = pair.replicas[0]
    prompts = probes.prompts
    runs: dict[str, list[Sample]] = {}
    replica.drop_prefix_cache()
    runs["alone"] = [replica.run([p], probes.response, prompt_logprobs=False)[0] for p in prompts[2:4]]
    runs["cold cache"] = replica.run([prompts[-1], probes.long], LONG_RESPONSE, prompt_logprobs=False)
    runs["warm cache"] = replica.run([prompts[-1], probes.long], LONG_RESPONSE, prompt_logprobs=False)
    cold, warm = ([s.cached for s in runs[name]] for name in ("cold cache", "warm cache"))
    result.require(max(cold[1:]) == 0, f"a first request found {max(cold[1:])} tokens in an empty prefix cache", measured=max(cold[1:]))
    result.require(
        min(warm) >= 128, f"a repeated prompt of {len(prompts[-1])} tokens found {min(warm)} in the prefix cache", measured=min(warm)
    )
    replica.drop_prefix_cache()
    # The first prompt takes most of a step's budget, so the long one is cut.
    runs["chunked prefill"] = replica.run([probes.filler, probes.long], LONG_RESPONSE, prompt_logprobs=False)[1:]
    everything = [s for samples in runs.values() for s in samples]
    if not check_values(result, [s.logprobs for s in everything], [len(s.ids) for s in everything]):
        return
    scored = iter(probes.score(everything))
    for name, samples in runs.items():
        ours = [next(scored)[len(s.prompt) - 1 :] for s in samples]
        check_agreement(result, ours, [s.logprobs for s in samples], pair.limits, name, [len(s.prompt) for s in samples])


def prompt(pair: Pair, probes: Probes, result: CheckResult) -> None:
    """The engine's logprobs of generated tokens are its prompt logprobs of the same tokens."""
    replica = pair.replicas[0]
    samples = [s for s in probes.samples[0] if len(s.tokens) < 400]
    if not check_values(result, [s.logprobs for s in samples], [len(s.ids) for s in samples]):
        return
    replica.drop_prefix_cache()
    again = replica.run([s.tokens for s in samples])
    theirs = [a.prompt_logprobs[len(s.prompt) - 1 :] for s, a in zip(samples, again, strict=True)]
    check_agreement(
        result, theirs, [s.logprobs for s in samples], pair.limits, "scored against generated", [len(s.prompt) for s in samples]
    )


def reference(pair: Pair, probes: Probes, result: CheckResult, model: Any) -> None:
    """Engine and trainer against the plain reference forward (W + BA): what both have wrong shows here."""
    sample = probes.samples[0][2]
    want = model.logprobs(sample.tokens)
    trained = probes.trained[0][2]
    engine = torch.cat((sample.prompt_logprobs, sample.logprobs))
    for who, row in (("trainer", trained), ("engine", engine)):
        check_agreement(result, [want], [row], pair.limits, f"reference against {who}", [1])

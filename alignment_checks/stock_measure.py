"""How far a server's logprobs are from the oracle's, what rounding explains of it, and which fault explains the rest.

Everything is measured in nats over points (position, token id) that the server itself named: the tokens of the probe and the likeliest
ones beside them. Root mean squares, so that a few wrong tokens count. In models with experts rounding sends some tokens to other
experts, on each side to others, which moves single logprobs a hundred times as far as rounding does; there the tenth of the points that
differ most is set aside, and held only against `BASE_MULTIPLE` times what such flips do to the oracle and to the base.

- **noise**: server without adapter against the oracle without adapter. No adapter is in it, so it is rounding alone, once the base check
  has shown that it is about the rounding error of bf16 (`BASE_MULTIPLE` times at most).
- **growth**: how much larger than there rounding errors are with the adapter and at the points in question, measured on the oracle itself
  with every module's output rounded to bf16; 1 at least.
- **limit** = `NOISE_MULTIPLE` x noise x growth: what a correct server may differ by from the oracle with the adapter.
- **effect**: oracle with against oracle without the adapter. The comparison decides where effect >= `EFFECT_MULTIPLE` x limit: then no
  server that ignores the adapter can be within the limit.
- **applied**: the multiple of the effect that the server shows, <server - base, effect> / <effect, effect>, with its standard error from
  leaving out one sequence at a time. Noise averages out of it, so it still decides where the effect is below the limit: it agrees within
  `APPLIED_RANGE` of 1 with an error of at most `APPLIED_ERROR`, disagrees three errors outside that range, and in between nothing is
  decided.

With vLLM 0.31 on CPU in bf16 a correct server is 0.9 to 1.4 times noise x growth from the oracle. The mildest fault, one projection
ignored, is at least `EFFECT_MULTIPLE` limits away where it is loaded alone, because its effect is enlarged until it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .oracle import Oracle
from .peft_adapter import Delta
from .report import CheckResult, Place
from .stock_client import Answer

BASE_MULTIPLE = 8.0
NOISE_MULTIPLE = 3.0
EFFECT_MULTIPLE = 4.0
APPLIED_ERROR, APPLIED_RANGE = 0.06, 0.25
RESOLUTION = 1e-5
"""Nats below which nothing is told apart: fp32 logprobs of about 10 nats, printed in decimal."""
AMPLIFY_MOST = 2**12
ASIDE = 0.1
"""Share of the points that is set aside in models with experts."""


class CannotTellError(RuntimeError):
    """The measurement cannot decide. One line."""


@dataclass(frozen=True, slots=True)
class Noise:
    """The measured floor."""

    base: float
    """Server without adapter against oracle without adapter, rms in nats, in models with experts without what is set aside."""
    whole: float
    """The same over all points."""
    rounding: float
    """What rounding to bf16 does to the oracle at the same points."""

    def growth(self, rounding: float) -> float:
        """How much larger than at the base probe rounding errors are at other points or with an adapter."""
        return rounding / max(self.rounding, 1e-12)

    def limit(self, growth: float) -> float:
        """What a correct server may differ by from the oracle."""
        return NOISE_MULTIPLE * max(self.base, RESOLUTION) * max(1.0, growth)


def rms(values: Tensor, aside: float = 0.0) -> float:
    """Root mean square of all but the share `aside` of largest magnitude."""
    squares = values.double().square().sort().values
    return float(squares[: max(1, round(len(squares) * (1 - aside)))].mean().sqrt())


def said(answers: Sequence[Answer]) -> Tensor:
    """The server's logprobs of all points of `answers`, [P] fp64."""
    return torch.tensor([value for answer in answers for _, _, value in answer.logprobs], dtype=torch.float64)


class Expected:
    """The oracle's logprobs at the points of a set of answers, for any adapter."""

    def __init__(self, oracle: Oracle, answers: Sequence[Answer]):
        """`answers`: what the server said, which fixes tokens (as many in each answer) and points."""
        self._oracle = oracle
        self.answers = list(answers)
        self.base = self.values()
        self.aside = ASIDE if oracle.has_experts else 0.0
        self._rounding: Tensor | None = None

    def values(self, deltas: Sequence[Delta] = (), temperature: float = 1.0, shift: int = 0) -> Tensor:
        """[P] fp64 in the order of `said`. `temperature` and `shift` (positions) are those of a server that misreports."""
        with self._oracle.adapted(deltas) as oracle:
            logits_NTV = oracle.logits([answer.tokens for answer in self.answers])
        found = []
        for answer, logits_TV in zip(self.answers, logits_NTV, strict=True):
            logprobs_TV = torch.log_softmax(logits_TV.double() / temperature, -1)
            at = torch.tensor([p - 1 + shift for p, _, _ in answer.logprobs]).clamp(0, len(answer.tokens) - 1)
            found.append(logprobs_TV[at, torch.tensor([token for _, token, _ in answer.logprobs])].cpu())
        return torch.cat(found)

    def rounding(self, deltas: Sequence[Delta], exact: Tensor) -> Tensor:
        """How far the oracle moves when every module's output is rounded to bf16, [P]. `exact` is the unrounded answer."""
        with self._oracle.rounded():
            return self.values(deltas) - exact

    @property
    def base_rounding(self) -> Tensor:
        """The same without the adapter."""
        if self._rounding is None:
            self._rounding = self.rounding((), self.base)
        return self._rounding

    def size(self, difference: Tensor) -> float:
        """Root mean square of a difference [P], in models with experts without what is set aside."""
        return rms(difference, self.aside)

    def place(self, difference: Tensor) -> Place:
        """Where a difference [P] is largest."""
        worst = int(difference.abs().argmax())
        for sequence, answer in enumerate(self.answers):
            if worst < len(answer.logprobs):
                return Place(sequence=sequence, token=answer.logprobs[worst][0])
            worst -= len(answer.logprobs)
        raise IndexError(worst)

    def applied(self, shown: Tensor, effect: Tensor) -> tuple[float, float]:
        """(multiple of the effect that is shown, its standard error), by leaving out one sequence at a time."""
        sizes = [len(answer.logprobs) for answer in self.answers]
        dots = torch.stack([(s * e).sum() for s, e in zip(shown.split(sizes), effect.split(sizes), strict=True)])
        norms = torch.stack([e.square().sum() for e in effect.split(sizes)])
        if float(norms.sum()) == 0:
            return 0.0, float("inf")
        without = (dots.sum() - dots) / (norms.sum() - norms)
        count = len(sizes)
        error = ((count - 1) / count * (without - without.mean()).square().sum()).sqrt() if count > 1 else torch.tensor(float("inf"))
        return float(dots.sum() / norms.sum()), float(error)


def compare(result: CheckResult, expected: Expected, deltas: Sequence[Delta], noise: Noise, what: str, exact: Tensor | None = None) -> None:
    """Hold a server's answers against W + scale B A and fill `result`; see the rule at the top.

    Raises `CannotTellError` where effect and noise are too close.
    """
    exact = expected.values(deltas) if exact is None else exact
    shown = said(expected.answers)
    difference, effect = shown - exact, exact - expected.base
    rounding = expected.rounding(deltas, exact)
    growth = noise.growth(expected.size(rounding))
    distance, size, limit = expected.size(difference), expected.size(effect), noise.limit(growth)
    share, error = expected.applied(shown - expected.base, effect)
    result.metrics |= {"distance": distance, "limit": limit, "effect": size, "growth": growth, "applied": share}
    if math.isfinite(error):  # it is not where there is no effect or one sequence alone
        result.metrics["applied_error"] = error
    result.compared += len(shown)
    if distance > limit:
        why = explain(expected, deltas, limit)
        result.require(False, f"{what}: {why} (applied at {share:.2f} of its effect)", expected.place(difference), distance, limit)
        return
    if expected.aside:
        most = BASE_MULTIPLE * max(noise.whole, rms(expected.base_rounding), rms(rounding), RESOLUTION)
        result.require(rms(difference) <= most, f"{what}: some tokens are far off", expected.place(difference), rms(difference), most)
    if size < EFFECT_MULTIPLE * limit:
        decide_applied(result, share, error, f"{what} (effect {size:.2g} nats, limit {limit:.2g})", expected.place(difference))


def hold(result: CheckResult, expected: Expected, deltas: Sequence[Delta], adapted: bool, noise: Noise, words: str) -> None:
    """Hold one turn of a conversation that mixes base and adapter against the side it belongs to."""
    part = CheckResult(result.name)
    if adapted:
        compare(part, expected, deltas, noise, words)
    else:
        shown = said(expected.answers)
        difference = shown - expected.base
        limit = noise.limit(noise.growth(expected.size(expected.base_rounding)))
        distance = expected.size(difference)
        if distance > limit and expected.size(shown - expected.values(deltas)) < distance:
            part.require(False, f"{words}: the answer is the adapter's", expected.place(difference), distance, limit)
        else:
            part.require(distance <= limit, f"{words}: the answer is not the base's", expected.place(difference), distance, limit)
        part.metrics["distance"] = distance
    merge(result, part, words.split(" the ")[0].replace(" ", "_"))


def merge(result: CheckResult, part: CheckResult, prefix: str) -> None:
    """Make a part's findings, counts and metrics (under `prefix`) those of the whole."""
    result.compared += part.compared
    result.findings += part.findings
    result.metrics |= {f"{prefix}.{key}": value for key, value in part.metrics.items()}


def decide_applied(result: CheckResult, share: float, error: float, what: str, place: Place | None = None) -> None:
    """Agree or not by the multiple of the effect that is shown, where it is known well enough. Raises `CannotTellError` where not."""
    if abs(share - 1) - 3 * error > APPLIED_RANGE:
        result.require(False, f"{what}: applied at {share:.2f} ± {error:.2f} of its effect", place or Place(), share, 1 + APPLIED_RANGE)
    elif error <= APPLIED_ERROR and abs(share - 1) <= APPLIED_RANGE:
        result.compared += 1
    else:
        raise CannotTellError(f"adapter effect too small to tell: {what}: applied at {share:.2f} ± {error:.2f}; more prompts may decide")


def explain(expected: Expected, deltas: Sequence[Delta], limit: float) -> str:
    """The single fault that explains what the server said to within `limit`, in words; or that none does."""
    shown = said(expected.answers)
    candidates: list[tuple[str, Sequence[Delta]]] = [("the adapter is not applied", [])] if deltas else []
    roles = list(dict.fromkeys(d.target.role for d in deltas))
    if len(roles) > 1:
        candidates += [(f"{role} is not applied", [d for d in deltas if d.target.role != role]) for role in roles]
        groups = {"no expert projection is": "experts.", "no attention projection is": ("q_proj", "k_proj", "v_proj", "o_proj")}
        for words, start in groups.items():
            rest = [d for d in deltas if not d.target.role.startswith(start)]
            if 0 < len(rest) < len(deltas):
                candidates.append((f"{words} applied", rest))
    if any(abs(d.scale - d.plain_scale) > 1e-6 * abs(d.scale) for d in deltas):
        plain = [d.scaled(d.plain_scale / d.scale) for d in deltas]
        candidates.append(("scaled by lora_alpha / r of the configuration: alpha_pattern, rank_pattern or rsLoRA is ignored", plain))
    candidates += [(f"scaled {f:g} times", [d.scaled(f) for d in deltas]) for f in (2.0, 0.5, 4.0, 0.25) if deltas]
    found = [(expected.size(shown - expected.values(changed)), words) for words, changed in candidates]
    for shift in (1, -1):
        found.append((expected.size(shown - expected.values(deltas, shift=shift)), f"logprobs are those of the token at {shift:+d}"))
    temperature = _temperature(expected, deltas, shown)
    if temperature is not None:
        found.append((expected.size(shown - expected.values(deltas, temperature)), f"logprobs are at temperature {temperature:.2f}"))
    distance, words = min(found, key=lambda pair: pair[0])  # of equals the first, which says more
    return words if distance <= 1.5 * limit else "differs from W + scale B A by more than rounding, and no single fault explains it"


def _temperature(expected: Expected, deltas: Sequence[Delta], shown: Tensor) -> float | None:
    """The temperature that fits best: differences of logprobs at one position are inversely proportional to it."""
    exact = expected.values(deltas)
    keys = [(s, p) for s, answer in enumerate(expected.answers) for p, _, _ in answer.logprobs]
    groups: dict[tuple[int, int], list[int]] = {}
    for i, key in enumerate(keys):
        groups.setdefault(key, []).append(i)
    ours = torch.cat([exact[g] - exact[g].mean() for g in groups.values()])
    theirs = torch.cat([shown[g] - shown[g].mean() for g in groups.values()])
    dot = float((ours * theirs).sum())
    return float(ours.square().sum()) / dot if dot > 0 else None


def same_points(first: Sequence[Answer], second: Sequence[Answer]) -> Tensor:
    """second - first [P'] over the points that both have, which are at least the tokens of the probe."""
    found = []
    for one, two in zip(first, second, strict=True):
        values = {(p, t): v for p, t, v in two.logprobs}
        found += [values[p, t] - v for p, t, v in one.logprobs if (p, t) in values]
    return torch.tensor(found, dtype=torch.float64)


def enlargement(expected: Expected, deltas: Sequence[Delta], noise: Noise, what: str) -> float:
    """Power of two, 1 at least, by which B must be multiplied so that its effect stands out of the noise.

    Raises `CannotTellError` where B is zero or no factor up to `AMPLIFY_MOST` is enough.
    """
    factor = 1.0
    while factor <= AMPLIFY_MOST:
        enlarged = [d.scaled(factor) for d in deltas]
        exact = expected.values(enlarged)
        size = expected.size(exact - expected.base)
        if size == 0:
            raise CannotTellError(f"adapter effect too small to tell: {what}: every product B A is zero")
        wanted = 1.25 * EFFECT_MULTIPLE * noise.limit(noise.growth(expected.size(expected.rounding(enlarged, exact))))
        if size >= wanted:
            return factor
        factor *= 2.0 ** max(1, min(8, math.ceil(math.log2(wanted / size))))
    raise CannotTellError(
        f"adapter effect too small to tell: {what}: even {AMPLIFY_MOST} times as large it does not stand out of the noise"
    )

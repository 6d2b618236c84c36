"""Which checks there are, in which order they are made, and how a report comes out of them.

Checks that only look come first; those that replace the adapter come last and give it back. All of a class are planned before the first
is made, so that a check that never ran is missed.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from . import adapters, bisect, logprobs, objective, routing
from .adapters import EFFECT_TOKENS
from .pair import Pair
from .probes import Probes
from .reference_m3 import ReferenceM3
from .report import CheckResult, Finding, Place, Report

CLASSES = ("weights", "routing", "logprobs", "objective")
ADAPTER_SCALE = 1.0
"""Size of the random adapter that both sides compute with: large enough to move every logprob."""
SHOWN_STEPS = 3


class Suite:
    """The checks of one pair."""

    def __init__(self, pair: Pair, seed: int = 0, **probe_options: Any) -> None:
        self.pair = pair
        self.probes = Probes(pair, seed, **probe_options)
        self.plots: dict[str, Any] = {}
        self.steps: list[bisect.Step] = []
        self._model: ReferenceM3 | None = None

    def reference(self, adapter: dict) -> ReferenceM3:
        """The plain forward with an adapter."""
        if self._model is None:
            packed = self.pair.trainer.profile.kv_cache == "nvfp4"
            self._model = ReferenceM3(self.pair.checkpoint.folder, packed_kv=packed, tokens=self.pair.vocabulary)
        self._model.set_adapter(adapter)
        return self._model

    def operations(self, result: CheckResult) -> None:
        """The same tokens through both sides, operation by operation; the first one that parts is named."""
        tokens = self.probes.prompts[-1]
        self.steps = bisect.compare(self.pair.trainer.record(tokens), self.pair.replicas[0].record(tokens), self.pair.limits)
        result.compared += len(self.steps)
        result.metrics["operations/largest"] = max(s.difference for s in self.steps)
        parting = bisect.first_parting(self.steps)
        if parting is not None:
            message = f"the forwards part at {parting.point}: difference {parting.difference:.3g}, explained {parting.limit:.3g}"
            place = Place(tensor=parting.point, layer=parting.layer, token=parting.token)
            result.require(False, message, place, parting.difference, parting.limit)

    def run(self, names: Iterable[str], report: Report, on_result: Callable[[CheckResult], object] | None = None) -> Report:
        """Make the checks `names`, in the order of `CHECKS`, into `report`."""
        wanted = set(names)
        for name, check in CHECKS.items():
            if name in wanted:
                result = report.run(name, functools.partial(check, self))
                if on_result is not None:
                    on_result(result)
        report.plots = self.plots
        return report


CHECKS: dict[str, Callable[[Suite, CheckResult], object]] = {
    "weights.base": lambda s, r: adapters.base(s.pair, r),
    "weights.coverage": lambda s, r: adapters.coverage(s.pair, r),
    "weights.held": lambda s, r: adapters.held(s.pair, r),
    "routing.rows": lambda s, r: routing.rows(s.pair, s.probes, r),
    "routing.agreement": lambda s, r: s.plots.update(agreement=routing.agreement(s.pair, s.probes, r)),
    "routing.replay": lambda s, r: routing.replay(s.pair, s.probes, r),
    "routing.batching": lambda s, r: routing.batching(s.pair, s.probes, r),
    "routing.blocks": lambda s, r: routing.blocks(s.pair, s.probes, r),
    "logprobs.generated": lambda s, r: s.plots.update(logprobs.generated(s.pair, s.probes, r)),
    "logprobs.prompt": lambda s, r: logprobs.prompt(s.pair, s.probes, r),
    "logprobs.temperature": lambda s, r: logprobs.temperature(s.pair, s.probes, r),
    "logprobs.variants": lambda s, r: logprobs.variants(s.pair, s.probes, r),
    "logprobs.operations": lambda s, r: s.operations(r),
    "logprobs.reference": lambda s, r: logprobs.reference(s.pair, s.probes, r, s.reference(adapters.intended(s.pair))),
    "objective.ratio": lambda s, r: objective.ratio(s.pair, r),
    "objective.mask": lambda s, r: objective.mask(s.pair, r),
    "objective.split": lambda s, r: objective.split(s.pair, s.probes, r),
    "weights.effect": lambda s, r: adapters.effect(s.pair, s.probes, r, s.reference({})),
    "weights.isolation": lambda s, r: adapters.isolation(s.pair, s.probes, r),
    "weights.prefix_cache": lambda s, r: adapters.prefix_cache(s.pair, s.probes, r),
}
"""Name to check, in the order in which they are made."""


def names_of(which: str) -> list[str]:
    """Checks of a class, of all, or one by its own name. Raises `ValueError` on another word."""
    found = [n for n in CHECKS if which in ("all", n, n.split(".")[0])]
    if not found:
        raise ValueError(f"there is no check {which!r}; classes: all, {', '.join(CLASSES)}; checks: {', '.join(CHECKS)}")
    return found


def probe_lengths(seed: int) -> tuple[int, ...]:
    """Prompt lengths for run `seed` of many: the block's edges, and others that change from run to run."""
    g = random.Random(seed)
    draws = ((1, 3), (2, 40), (8, 24), (EFFECT_TOKENS, 140), (127, 129), (1, 260), (129, 420))
    return tuple(g.randint(*bounds) for bounds in draws)


def advance(pair: Pair, seed: int) -> None:
    """One step of the trainer: another adapter under the next version."""
    pair.trainer.randomise(seed, ADAPTER_SCALE, pair.trainer.engine.adapter_version + 1)


def prepare(pair: Pair, seed: int = 0) -> None:
    """A first adapter on both sides, as after a job's start."""
    pair.wire = None
    pair.trainer.randomise(seed, ADAPTER_SCALE, 1)
    pair.sync()


def names_place(place: Place, findings: Iterable[Finding]) -> bool:
    """Whether some finding names everything that `place` names."""
    wanted = {k: v for k, v in asdict(place).items() if v is not None}
    return any(all(_names(finding, key, value) for key, value in wanted.items()) for finding in findings)


def _names(finding: Finding, key: str, value: object) -> bool:
    if getattr(finding.place, key) == value:
        return True
    return key == "tensor" and str(value) in finding.message

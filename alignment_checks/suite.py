"""Which checks there are, in which order they are made, and how a report comes out of them.

Checks that only look come first; those that replace the adapter come last and give it back. All of a class are planned before the first
is made, so that a check that never ran is missed.
"""

from __future__ import annotations

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

    def checks(self) -> dict[str, Callable[[CheckResult], object]]:
        """Name to check, in order."""
        pair, probes = self.pair, self.probes
        return {
            "weights.base": lambda r: adapters.base(pair, r),
            "weights.coverage": lambda r: adapters.coverage(pair, r),
            "weights.held": lambda r: adapters.held(pair, r),
            "routing.rows": lambda r: routing.rows(pair, probes, r),
            "routing.agreement": lambda r: self.plots.update(agreement=routing.agreement(pair, probes, r)),
            "routing.replay": lambda r: routing.replay(pair, probes, r),
            "routing.batching": lambda r: routing.batching(pair, probes, r),
            "routing.blocks": lambda r: routing.blocks(pair, probes, r),
            "logprobs.generated": lambda r: self.plots.update(logprobs.generated(pair, probes, r)),
            "logprobs.prompt": lambda r: logprobs.prompt(pair, probes, r),
            "logprobs.temperature": lambda r: logprobs.temperature(pair, probes, r),
            "logprobs.variants": lambda r: logprobs.variants(pair, probes, r),
            "logprobs.operations": self._operations,
            "logprobs.reference": lambda r: logprobs.reference(pair, probes, r, self._reference(adapters.intended(pair))),
            "objective.ratio": lambda r: objective.ratio(pair, r),
            "objective.mask": lambda r: objective.mask(pair, r),
            "objective.split": lambda r: objective.split(pair, probes, r),
            "weights.effect": lambda r: adapters.effect(pair, probes, r, self._reference({})),
            "weights.isolation": lambda r: adapters.isolation(pair, probes, r),
            "weights.prefix_cache": lambda r: adapters.prefix_cache(pair, probes, r),
        }

    def _reference(self, adapter: dict) -> ReferenceM3:
        if self._model is None:
            packed = self.pair.trainer.profile.kv_cache == "nvfp4"
            self._model = ReferenceM3(self.pair.checkpoint.folder, packed_kv=packed)
        self._model.set_adapter(adapter)
        return self._model

    def _operations(self, result: CheckResult) -> None:
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
        """Make the checks `names`, in the order of `checks`, into `report`."""
        wanted = set(names)
        for name, check in self.checks().items():
            if name in wanted:
                result = report.run(name, check)
                if on_result is not None:
                    on_result(result)
        report.plots = self.plots
        return report


def names_of(which: str) -> list[str]:
    """Checks of a class, of all, or one by its own name. Raises `ValueError` on another word."""
    everything = list(Suite.checks(_Names()))  # type: ignore[arg-type]
    if which == "all":
        return everything
    found = [n for n in everything if n == which or n.split(".")[0] == which]
    if not found:
        raise ValueError(f"there is no check {which!r}; classes: all, {', '.join(CLASSES)}; checks: {', '.join(everything)}")
    return found


class _Names:
    """Stands in for a suite where only the names are asked for."""

    pair = probes = None
    _operations = staticmethod(lambda r: None)


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

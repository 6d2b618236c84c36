"""The checks and their faults on an engine wired as on a GPU: packed tiles, MSA pages, slots by token, bf16 activations.

The ops are the torch references on a CPU. In bf16 a logprob may differ by more than many faults move it, so only checks that can tell
are made: what is held, by its bits; block choices; the operations one by one.
"""

from __future__ import annotations

import os

import pytest

from samebits.alignment_checks import suite
from samebits.alignment_checks.faults import CATALOGUE
from samebits.alignment_checks.report import DISAGREE, Report
from tests.support.gpu_wiring import as_on_a_gpu

pytestmark = pytest.mark.slow
TELLING = ("weights.base", "weights.coverage", "weights.held", "routing.rows", "routing.blocks", "logprobs.operations")
OVERRIDES = ["device=cpu", "numerics.profile=w4a16"]


@pytest.fixture(scope="module")
def wired():
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    os.environ.setdefault("VERL_USE_EXTERNAL_MODULES", "samebits.trainer.plugin,samebits.rollout.verl_plugin")
    from samebits.alignment_checks import pair as pairs
    from samebits.alignment_checks.limits import Limits
    from samebits.recipes.config import load_recipe
    from samebits.recipes.validate import validate
    from samebits.recipes.verify_cli import _vocabulary

    recipe, verl = load_recipe("recipes/tiny_m3_grpo.yaml", OVERRIDES)
    validate(recipe, verl)
    with as_on_a_gpu():
        return pairs.start(verl, recipe.model_path, Limits.of(recipe.profile), _vocabulary(recipe.model_path))


def telling(name: str) -> list[str]:
    return [check for check in CATALOGUE[name].caught_by if check in TELLING]


def injected(pair, name: str, checks: list[str]):
    suite.prepare(pair)
    with CATALOGUE[name].inject(pair) as place:
        suite.advance(pair, 1)
        pair.sync()
        return place, suite.Suite(pair, long=False).run(checks, Report(name, checks))


@pytest.mark.parametrize("name", sorted(n for n in CATALOGUE if telling(n) and CATALOGUE[n].replicas == 1))
def test_fault_is_caught_and_named(wired, name):
    place, report = injected(wired, name, telling(name))
    assert {r.name: r.status for r in report.results} == dict.fromkeys(telling(name), DISAGREE), [r.error for r in report.results]
    assert suite.names_place(place, (f for _, f in report.findings())), (place, [f.message for _, f in report.findings()][:5])

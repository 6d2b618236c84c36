"""One real pair of trainer and engines for all tests of the session: the shipped tiny model, two replicas."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session")
def pair():
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    os.environ.setdefault("VERL_USE_EXTERNAL_MODULES", "samebits.trainer.plugin,samebits.rollout.verl_plugin")
    from samebits.alignment_checks import pair as pairs
    from samebits.alignment_checks.limits import Limits
    from samebits.recipes.config import load_recipe
    from samebits.recipes.validate import validate
    from samebits.recipes.verify_cli import _vocabulary

    recipe, verl = load_recipe("recipes/tiny_m3_grpo.yaml", ["device=cpu"])
    validate(recipe, verl)
    return pairs.start(verl, recipe.model_path, Limits.of(recipe.profile), _vocabulary(recipe.model_path), replicas=2)


@pytest.fixture
def synced(pair):
    """The pair one step after its first sync, with nothing wrong."""
    from samebits.alignment_checks import suite

    suite.prepare(pair)
    suite.advance(pair, 1)
    pair.sync()
    return pair

"""The checks and their faults on an engine wired as on a GPU: packed tiles, MSA pages, slots by token, bf16 activations.

The ops are the torch references on a CPU. Every fault of the engine and of what it holds is injected, since each reaches this engine by
another way than the one of CPUs, and a sample of the others. In bf16 a logprob may differ by more than a fault moves it: checks that
only weigh logprobs are left out where others can tell, and a fault that moves too little for one of its checks is left to its others.
"""

from __future__ import annotations

import os

import pytest
import torch

from samebits.alignment_checks import suite
from samebits.alignment_checks.faults import CATALOGUE
from samebits.alignment_checks.faults.engine import OPERATIONS
from samebits.alignment_checks.report import DISAGREE, Report
from samebits.kernels.expert_tiles import NVFP4Tiles
from samebits.recipes.cli import app
from samebits.rollout.pages import PageCache
from tests.support.gpu_wiring import as_on_a_gpu

pytestmark = pytest.mark.slow
RECIPE, OVERRIDES = "recipes/tiny_m3_grpo.yaml", ["device=cpu", "numerics.profile=w4a16"]
WEIGHING = {"logprobs.generated", "logprobs.reference"}
TOO_SMALL = {
    ("projection_adapter_ignored", "weights.effect"),
    *(("router_in_bf16", check) for check in OPERATIONS),
    ("rounding_by_batch", "logprobs.variants"),
}
OTHER_ENGINES = {"base_in_bf16", "global_scale_of_one_half"}
OTHERS = ("no_op_sync", "gate_up_swapped", "routes_without_last_row", "replay_without_effect", "ratio_swapped")


@pytest.fixture(scope="session")
def wired():
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    os.environ.setdefault("VERL_USE_EXTERNAL_MODULES", "samebits.trainer.plugin,samebits.rollout.verl_plugin")
    import samebits.trainer.engine as trainer_engine
    from samebits.alignment_checks import pair as pairs
    from samebits.alignment_checks.limits import Limits
    from samebits.recipes.config import load_recipe
    from samebits.recipes.validate import validate
    from samebits.recipes.verify_cli import _vocabulary

    recipe, verl = load_recipe(RECIPE, OVERRIDES)
    validate(recipe, verl)
    with as_on_a_gpu(trainer_engine):
        return pairs.start(verl, recipe.model_path, Limits.of(recipe.profile), _vocabulary(recipe.model_path))


def telling(name: str) -> list[str]:
    """Checks that can tell the fault on this engine."""
    able = [check for check in CATALOGUE[name].caught_by if (name, check) not in TOO_SMALL]
    return [check for check in able if check not in WEIGHING] or able


def of_the_engine() -> list[str]:
    """Faults of the engine and of buffers that this engine can have and some check can tell, on one replica."""
    faults = (f for f in CATALOGUE.values() if f.seam in ("engine", "weights") and f.replicas == 1)
    return [f.name for f in faults if telling(f.name) and f.name not in OTHER_ENGINES]


@pytest.mark.parametrize("name", [*of_the_engine(), *OTHERS])
def test_fault_is_caught_and_named(wired, name):
    suite.prepare(wired)
    with CATALOGUE[name].inject(wired) as place:
        suite.advance(wired, 1)
        wired.sync()
        report = suite.Suite(wired, long=False).run(telling(name), Report(name, telling(name)))
    assert {r.name: r.status for r in report.results} == dict.fromkeys(telling(name), DISAGREE), [r.error for r in report.results]
    assert suite.names_place(place, (f for _, f in report.findings())), (place, [f.message for _, f in report.findings()][:5])


def test_no_fault_no_alarm(wired):
    """After all those faults were injected and removed, and with every check."""
    suite.prepare(wired)
    suite.advance(wired, 1)
    wired.sync()
    names = suite.names_of("all")
    report = suite.Suite(wired).run(names, Report("clean", names))
    assert [(r.name, r.error, [f.message for f in r.findings]) for r in report.results if r.status != "agree"] == []
    assert report.exit_status == 0 and not report.missing


def test_both_sides_are_wired_as_on_a_gpu(wired):
    layer = wired.replicas[0].model.model.layers[1]
    assert isinstance(layer.self_attn.attn, PageCache) and layer.self_attn.kernels
    assert isinstance(layer.block_sparse_moe.experts.w2, NVFP4Tiles) and layer.self_attn.o_proj.tiles is not None
    assert next(iter(wired.replicas[0].model.adapters())).slots.by_token
    assert wired.trainer.module.layers[1].mlp.w2.codes.dtype is torch.int32 and wired.trainer.profile.name == "w4a16"


@pytest.mark.parametrize("name", sorted(OTHER_ENGINES))
def test_a_fault_that_this_engine_cannot_have_is_one_line_and_status_2(wired, name, monkeypatch, capfd):
    from samebits.alignment_checks import pair as pairs

    monkeypatch.setattr(pairs, "start", lambda *rest: wired)
    with pytest.raises(SystemExit) as end:
        app(["verify", "weights", RECIPE, *OVERRIDES, "--check", "weights.base", "--inject", name])
    said = capfd.readouterr().err
    assert end.value.code == 2, said
    assert len(said.strip().splitlines()) == 1 and "samebits: this engine keeps its experts packed" in said, said

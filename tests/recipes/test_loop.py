"""The training loop's own hooks, without a job around them."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

import samebits.trainer.plugin  # noqa: F401  patches verl before its trainer is imported
from samebits.recipes.run_dir import MetricsLog, read_metrics


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    from samebits.recipes import loop

    trainer = loop.SamebitsTrainer.__new__(loop.SamebitsTrainer)
    trainer.log, trainer._step_metrics = MetricsLog(tmp_path / "metrics.jsonl"), {}
    found = {"accuracy/heldout": 0.5, "accuracy/samples": 8}
    monkeypatch.setattr(loop.PPOTrainerSync, "_validate", lambda self: dict(found))
    return trainer


def test_evaluation_of_a_fresh_run_is_line_zero(trainer):
    trainer.global_steps = 0
    trainer._validate()
    (line,) = read_metrics(trainer.log.path)
    assert line["step"] == 0 and line["accuracy/heldout"] == 0.5 and line["accuracy/samples"] == 8


def test_evaluation_before_a_resumed_step_is_not_filed_under_a_step(trainer):
    trainer.log.write({"step": 10, "reward/mean": 0.0})
    trainer.global_steps = 10
    trainer._validate()
    assert read_metrics(trainer.log.path) == [{"step": 10, "reward/mean": 0.0}]
    assert trainer._take_step_metrics() == {}, "the evaluation would be written into the line of step 11"


def test_evaluation_after_a_step_joins_its_line(trainer):
    trainer.global_steps = 10
    trainer._step_metrics = {"time/rollout": 1.0}
    trainer._validate()
    assert read_metrics(trainer.log.path) == []
    assert trainer._take_step_metrics()["accuracy/heldout"] == 0.5


def test_a_penalty_for_length_makes_no_right_answer_wrong(trainer, monkeypatch):
    from samebits.recipes import loop

    monkeypatch.setattr(loop.PPOTrainerSync, "_val_metrics_update", lambda self, *a, **k: {})
    graded = {"reward": [0.0, -0.25, -1.0, 1.0], "acc": [1.0, 1.0, 0.0, 1.0]}
    found = trainer._val_metrics_update(["math_dapo"] * 4, list("abcd"), graded, [])
    assert found == {"accuracy/heldout": 0.75, "accuracy/samples": 4}


KEYS = ("mismatch/kl", "mismatch/max_abs")


def step_metrics(kl: float) -> dict[str, float]:
    return {
        "critic/score/mean": 0.5,
        "response_length/mean": 25.0,
        **{f"actor/{key}": kl for key in KEYS},
    }


@pytest.mark.parametrize("kl", [1e-9, 0.5])
def test_a_checkpoint_waits_for_the_step_s_line_and_is_not_made_of_a_step_that_failed(trainer, monkeypatch, kl):
    from samebits.recipes import loop

    events = []
    trainer.recipe = SimpleNamespace(checks=SimpleNamespace(max_kl=1e-3))
    trainer._save_due = False
    monkeypatch.setattr(loop.PPOTrainerSync, "_compute_metrics", lambda self, *a, **k: None)
    monkeypatch.setattr(trainer, "_save_now", lambda: events.append([line["step"] for line in read_metrics(trainer.log.path)]))
    trainer._step_metrics = {"sync/verified": True, "response/truncated_fraction": 0.25}
    trainer._save_checkpoint()
    assert events == []
    timing = {"update_actor": 1.0, "update_weights": 1.0, "step": 3.0}
    if kl > 1e-3:
        with pytest.raises(loop.AgreementLost, match="step 4: mismatch/kl"):
            trainer._compute_metrics(None, step_metrics(kl), timing, 4, 0)
        assert events == []
        return
    trainer._compute_metrics(None, step_metrics(kl), timing, 4, 0)
    assert events == [[4]], "saved before its line was written, or not at all"
    trainer._compute_metrics(None, step_metrics(kl), timing, 5, 0)
    assert events == [[4]], "saved where verl did not ask for it"
    (first, _) = read_metrics(trainer.log.path)
    assert first["response/truncated_fraction"] == 0.25


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_rank_is_not_balanced_and_two_are(trainer, monkeypatch, ranks):
    from samebits.recipes import loop

    trainer.actor_rollout_wg = SimpleNamespace(world_size=ranks)
    trainer.tokenizer = SimpleNamespace(eos_token_id=2)
    monkeypatch.setattr(loop.SamebitsTrainer, "_get_required_batch_multiple", lambda self, ranks: 3)
    monkeypatch.setattr(loop.PPOTrainerSync, "_balance_batch", lambda self, batch, metrics, *a, **k: "balanced")
    seen = []

    def upsample(batch, multiple, token):
        seen.append((batch, multiple, token))
        return "padded"

    monkeypatch.setattr(loop, "upsample_batch_to_divisible_size", upsample)
    result = trainer._balance_batch("batch", {})
    assert (result, seen) == (("padded", [("batch", 3, 2)]) if ranks == 1 else ("balanced", []))


def test_a_recipe_is_validated_without_importing_verl():
    """A refused recipe answers at once: verl takes seconds to import."""
    import subprocess

    code = (
        "import sys\n"
        "from samebits.recipes.config import load_recipe\n"
        "from samebits.recipes.validate import validate\n"
        "validate(*load_recipe('recipes/tiny_m3_grpo.yaml', ['device=cpu']))\n"
        "print('verl' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"

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
    trainer.recipe = SimpleNamespace(checks=SimpleNamespace(max_kl=1e-3), numerics=SimpleNamespace(parity="auto"))
    trainer._save_due = False
    trainer.config = SimpleNamespace(trainer=SimpleNamespace(logger=["console"]))
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


def test_the_ranks_are_sent_what_the_trainer_reads_and_no_more(trainer, monkeypatch):
    import torch
    from tensordict import TensorDict
    from transfer_queue import KVBatchMeta

    from samebits.recipes import loop
    from samebits.recipes.samples import SampleStore
    from samebits.trainer.batch import _RESPONSE_FIELDS, BLOCKS, ROUTES
    from tests.support.training import nested

    def score(sent):
        asked.append(sent)
        return TensorDict({"log_probs": nested([torch.ones(2)])}, batch_size=[1])

    asked = []
    monkeypatch.setattr(loop.PPOTrainerSync, "_update_actor", lambda self, batch, metrics: asked.append(batch))
    trainer.config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(temperature=0.5)))
    trainer.actor_rollout_wg = SimpleNamespace(compute_log_prob=score)
    trainer.samples = SampleStore()
    needed = {"input_ids", "loss_mask", "prompts", "responses", ROUTES, BLOCKS}
    fields = needed | {*_RESPONSE_FIELDS, "rm_scores", "position_ids"}
    columns = {name: nested([torch.ones(2)]) for name in fields} | {"num_turns": [2], "uid": ["u"], "extra_fields": [{}]}
    trainer.samples.kv_batch_put(["a"], "train", columns, [{}])
    batch = KVBatchMeta(keys=["a"], tags=[{}], partition_id="train", extra_info={"epochs": 1})
    assert trainer._update_actor(batch, {}) is batch
    trainer._score(batch)
    learned, scored = ({*one.columns} for one in asked)
    assert learned == needed | {*_RESPONSE_FIELDS, "uid"} and scored == needed | {"response_mask"}
    assert asked[0].extra_info == {"epochs": 1} and asked[1].extra_info["temperature"] == 0.5 and batch.extra_info == {"epochs": 1}
    assert trainer.samples.columns(["a"], "train", ["log_probs"])["log_probs"].values().tolist() == [1.0, 1.0]


def test_a_trainer_s_log_is_closed_however_the_job_ends(monkeypatch):
    from samebits.recipes import job, loop

    events = []
    log = SimpleNamespace(close=lambda: events.append("log"))
    monkeypatch.setattr(loop, "SamebitsTrainer", lambda config, recipe: events.append("trainer") or SimpleNamespace(log=log))
    with pytest.raises(OSError, match="no room"), job.open_trainer(None, None):
        raise OSError("no room")
    assert events == ["trainer", "log"]


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


@pytest.mark.parametrize("largest", [0.0, 6e-8])
def test_bitwise_parity_allows_no_difference_in_a_step(trainer, monkeypatch, largest):
    from samebits.recipes import loop

    trainer.recipe = SimpleNamespace(checks=SimpleNamespace(max_kl=1e-3), numerics=SimpleNamespace(parity="bitwise"))
    trainer._save_due = False
    trainer.config = SimpleNamespace(trainer=SimpleNamespace(logger=["console"]))
    monkeypatch.setattr(loop.PPOTrainerSync, "_compute_metrics", lambda self, *a, **k: None)
    metrics = step_metrics(0.0) | {"actor/mismatch/max_abs": largest}
    timing = {"update_actor": 1.0, "update_weights": 1.0, "step": 3.0}
    if largest:
        with pytest.raises(loop.AgreementLost, match="step 4: mismatch/max_abs 6.000e-08 breaks numerics.parity=bitwise"):
            trainer._compute_metrics(None, metrics, timing, 4, 0)
    else:
        trainer._compute_metrics(None, metrics, timing, 4, 0)


class Called:
    """A method of a Ray actor."""

    def __init__(self, answer) -> None:
        self.remote = answer


@pytest.fixture
def lost(tmp_path, monkeypatch):
    """(folder, server, taps of both sides): a run whose trainer recorded a difference, and an engine that computes it again."""
    import torch
    from safetensors.torch import save_file

    from samebits.recipes import parity
    from samebits.trainer.parity import RECORD, TAPS

    points = ["model.embed_tokens", "model.layers.0.self_attn.q", "model.norm"]
    taps = {name: torch.randn(3, 4, generator=torch.Generator().manual_seed(i)) for i, name in enumerate(points)}
    folder = tmp_path / "run"
    (folder / "parity").mkdir(parents=True)
    save_file(taps, folder / "parity" / TAPS)
    (folder / "parity" / RECORD).write_text('{"tokens": [5, 6, 7]}')
    engine = {name: t.clone() for name, t in taps.items()}
    asked = []

    def rpc(method, args=()):
        asked.append(method)
        if method == "samebits_recorded":
            save_file(engine, args[0])
            return [list(engine)]
        return [None]

    server = SimpleNamespace(
        wake_up=Called(lambda: asked.append("wake")),
        clear_kv_cache=Called(lambda: asked.append("clear")),
        collective_rpc=Called(rpc),
        generate_batch=Called(lambda prompts, params, keys: asked.append((prompts, params[0]["max_tokens"]))),
    )
    monkeypatch.setattr(parity.ray, "get", lambda answer: answer)
    return SimpleNamespace(folder=folder, server=server, engine=engine, asked=asked, points=points)


def test_the_first_operation_that_differs_is_found_in_the_engine_s_own_forward(lost):
    from samebits.recipes.parity import parting_operation

    assert "the difference lies in decoding" in parting_operation(lost.server, lost.folder)
    assert lost.asked == ["wake", "clear", "samebits_record", ([[5, 6, 7]], 1), "samebits_recorded"]
    lost.engine["model.norm"][0, 0] += 1
    lost.engine["model.layers.0.self_attn.q"][2, 1] += 1e-6
    assert parting_operation(lost.server, lost.folder) == "the first operation that differs is model.layers.0.self_attn.q, at token 2"


def test_an_engine_in_graphs_or_without_an_answer_is_said(lost, monkeypatch):
    from samebits.recipes.parity import parting_operation

    lost.engine.clear()
    assert "CUDA graphs" in parting_operation(lost.server, lost.folder)
    (lost.folder / "parity" / "difference.json").unlink()
    assert parting_operation(lost.server, lost.folder).startswith("the operation was not found (FileNotFoundError: ")


def test_a_trainer_that_lost_parity_ends_the_job_with_its_line_and_the_operation(trainer, monkeypatch):
    from ray.exceptions import RayTaskError

    from samebits.recipes import loop
    from samebits.trainer.parity import ParityLost

    def failing(error):
        def update(self, batch, metrics):
            raise RayTaskError("update_actor", "traceback", error)

        monkeypatch.setattr(loop.PPOTrainerSync, "_update_actor", update)

    monkeypatch.setattr(trainer, "_shipment", lambda batch, fields: batch)
    trainer.recipe = SimpleNamespace(folder="run")
    trainer.llm_server_manager = SimpleNamespace(server_handles=["server"])
    monkeypatch.setattr(loop, "parting_operation", lambda server, folder: f"{server} {folder}: the first operation is q")
    failing(ParityLost("step 2: sample 3: token 9"))
    with pytest.raises(loop.AgreementLost, match="^step 2: sample 3: token 9; server run: the first operation is q$"):
        trainer._update_actor(SimpleNamespace(), {})
    failing(ValueError("other"))
    with pytest.raises(RayTaskError):
        trainer._update_actor(SimpleNamespace(), {})


def test_recomputed_old_logprobs_are_those_of_the_responses(trainer, monkeypatch):
    import torch
    from tensordict import TensorDict

    from samebits.recipes import loop
    from tests.support.training import nested

    scored, put = [], []
    trainer.samples = SimpleNamespace(kv_batch_get=lambda *a: data, kv_batch_put=lambda keys, partition, fields: put.append(fields))
    rows = [torch.arange(5.0), torch.arange(7.0) + 10]  # whole sequences; row t scores token t + 1
    masks = [torch.ones(2, dtype=torch.int64), torch.ones(3, dtype=torch.int64)]
    data = TensorDict({"log_probs": nested(rows), "response_mask": nested(masks)}, batch_size=[2])
    monkeypatch.setattr(loop.SamebitsTrainer, "_score", lambda self, batch: scored.append(batch))
    batch = SimpleNamespace(keys=["a", "b"], partition_id="train")
    trainer._recompute_old_logprobs(batch)
    assert scored == [batch] and set(put[0].keys()) == {"old_log_probs"}
    assert [row.tolist() for row in put[0]["old_log_probs"].unbind()] == [[2.0, 3.0], [13.0, 14.0, 15.0]]
    assert trainer._step_metrics["time/old_logprobs"] >= 0

"""The engine as verl's workers use it: out of the registry, through verl's mini-batch loop and its own actor loss."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from torch.distributed.checkpoint import FileSystemReader

from samebits.quant.adapter import load_peft
from samebits.trainer.batch import BatchError
from tests.support.training import batch, engine, loss_function, random_batch, start_group

VOCAB = 96


@pytest.fixture(scope="module", autouse=True)
def process_group():
    # It stays: vLLM keeps the process's groups, and an engine that another test starts here would look for this one.
    start_group()


def train(built, data, loss=None):
    with built.train_mode():
        out = built.train_batch(data, loss_function=loss or loss_function())
        built.lr_scheduler_step()
    return out


def metric(out, name):
    value = out["metrics"][name]
    return type(value).aggregate_dp([value])  # as verl's worker merges ranks and micro-batches


def adapter(built) -> dict[str, torch.Tensor]:
    return dict(built.get_per_tensor_param(base_sync_done=True)[0])


def test_a_step_changes_the_adapter_and_nothing_else(m3):
    built = engine(m3)
    frozen = {n: p.detach().full_tensor().clone() for n, p in built.module.named_parameters() if not p.requires_grad}
    before = adapter(built)
    out = train(built, random_batch(6, VOCAB))
    after = adapter(built)
    built.module.spec.check(after)
    assert built.adapter_version == 1 and out["metrics"]["grad_norm"] > 0
    changed = [n for n in after if not torch.equal(after[n], before[n])]
    assert all("lora_B" in n for n in changed) and len(changed) > 60, "B leaves zero; A has no gradient in the first step"
    for name, parameter in built.module.named_parameters():
        if name in frozen:
            assert torch.equal(parameter.detach().full_tensor(), frozen[name]), name


def test_peft_config_names_version_and_numerics(m3):
    built = engine(m3)
    train(built, random_batch(4, VOCAB))
    _, config = built.get_per_tensor_param(layered_summon=False, base_sync_done=True)
    assert (config["r"], config["lora_alpha"]) == (8, 8), "the scale is inside B"
    origin, tensors = config["samebits"], adapter(built)
    assert (origin["version"], origin["profile"]) == (1, built.module.profile.hash)
    announced = {name: (shape, origin["dtype"]) for name, shape in origin["shapes"].items()}
    assert announced == {name: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()}
    assert {"w1", "w2", "w3", "q_proj", "gate_proj"} <= set(config["target_modules"])


def test_the_base_is_never_sent(m3):
    built = engine(m3)
    with pytest.raises(RuntimeError, match="load_format=safetensors"):
        built.get_per_tensor_param(base_sync_done=False)
    assert all(".lora_" in n for n, _ in built.get_per_tensor_param()[0])


def test_micro_batches_do_not_change_gradient_loss_or_metrics(m3):
    results = []
    for max_tokens in (10**6, 24):
        built = engine(m3)
        train(built, random_batch(6, VOCAB, seed=9))  # so that A has a gradient, too
        data = random_batch(6, VOCAB, seed=1, max_tokens=max_tokens)
        with built.train_mode(zero_grad_on_exit=False):
            built.optimizer_zero_grad()
            out = built.forward_backward_batch(data, loss_function(), forward_only=False)
        grads = {n: p.grad.full_tensor().clone() for n, p in built.module.adapter_parameters()}
        results.append((out, grads))
    (whole, grads), (split, split_grads) = results
    assert len(whole["loss"]) == 1 and len(split["loss"]) > 2
    assert sum(split["loss"]) == pytest.approx(sum(whole["loss"]), rel=1e-4)
    for name in grads:
        torch.testing.assert_close(split_grads[name], grads[name], rtol=1e-3, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    for name in ("mismatch/kl", "mismatch/max_abs", "tis/mean", "tis/max_raw", "tis/clipped_fraction", "actor/pg_loss"):
        assert metric(split, name) == pytest.approx(metric(whole, name), rel=1e-4), name


def test_metrics_are_those_of_the_batch(m3):
    built = engine(m3)
    data = random_batch(5, VOCAB, max_tokens=20)
    with built.eval_mode():
        lp = built.infer_batch(data.clone(), loss_function=None)["model_output"]["log_probs"]
    prompts, ends = data["prompts"].offsets().diff().tolist(), data["responses"].offsets().diff().tolist()
    trainer = torch.cat([row[p - 1 : p - 1 + r] for row, p, r in zip(lp.unbind(), prompts, ends, strict=True)])
    d = trainer - data["rollout_log_probs"].values()
    out = train(built, data)
    assert metric(out, "mismatch/kl") == pytest.approx((d.exp() - d - 1).mean().item(), rel=1e-4)
    assert metric(out, "mismatch/max_abs") == pytest.approx(d.abs().max().item(), rel=1e-5)
    assert metric(out, "tis/max_raw") == pytest.approx(d.max().exp().item(), rel=1e-4)
    assert metric(out, "tis/mean") == pytest.approx(d.exp().clamp(max=2).mean().item(), rel=1e-4)


def test_logprobs_of_the_rollout_policy_give_weight_one(m3):
    built = engine(m3)
    data = random_batch(4, VOCAB)
    with built.eval_mode():
        lp = built.infer_batch(data.clone(), loss_function=None)["model_output"]["log_probs"]
    prompts, ends = data["prompts"].offsets().diff().tolist(), data["responses"].offsets().diff().tolist()
    own = [row[p - 1 : p - 1 + r] for row, p, r in zip(lp.unbind(), prompts, ends, strict=True)]
    exact = batch(
        [x.tolist() for x in data["prompts"].unbind()],
        [x.tolist() for x in data["responses"].unbind()],
        own,
        list(data["advantages"].unbind()),
    )
    out = train(built, exact)
    assert metric(out, "mismatch/max_abs") == 0 and metric(out, "tis/mean") == pytest.approx(1.0)


def test_phases_of_a_step_are_among_its_metrics(m3):
    built = engine(m3)
    data = random_batch(4, VOCAB, max_tokens=24)
    with built.eval_mode():
        built.infer_batch(random_batch(4, VOCAB), loss_function=None)
    out = train(built, data)
    seconds = {name: metric(out, f"phase/{name}/seconds") for name in ("score", "forward", "backward", "optimizer")}
    assert all(value > 0 for value in seconds.values())
    assert metric(out, "phase/backward/resident") > 1 << 20
    again = train(built, random_batch(4, VOCAB))
    assert "phase/score/seconds" not in again["metrics"], "scoring of the step before is counted again"


def test_old_logprobs_that_the_trainer_recomputed_are_what_the_weight_is_against(m3):
    data = random_batch(5, VOCAB, max_tokens=20)
    plain = metric(train(engine(m3), data.clone()), "mismatch/max_abs")
    built = engine(m3, model={"override_config": {"samebits_profile": "w4a16-fp32", "samebits_old_logprobs": "recomputed"}})
    with built.eval_mode():
        lp = built.infer_batch(data.clone(), loss_function=None)["model_output"]["log_probs"]
    prompts, ends = data["prompts"].offsets().diff().tolist(), data["responses"].offsets().diff().tolist()
    trainer = torch.cat([row[p - 1 : p - 1 + r] for row, p, r in zip(lp.unbind(), prompts, ends, strict=True)])
    data["old_log_probs"].values().copy_(trainer - 0.25)
    out = train(built, data.clone())
    assert metric(out, "tis/mean") == pytest.approx(torch.tensor(0.25).exp().item(), rel=1e-4)
    assert metric(out, "mismatch/max_abs") == pytest.approx(plain, rel=1e-5), "the difference to the rollout is no longer reported"
    data["old_log_probs"].values()[1] = torch.nan
    with pytest.raises(BatchError, match="old_log_probs, which the trainer recomputed"):
        train(built, data)


def test_without_importance_sampling_every_weight_is_one(m3):
    found = []
    for rollout_is in ("token", None):
        out = train(engine(m3), random_batch(5, VOCAB), loss_function(rollout_is=rollout_is))
        found.append({name: metric(out, name) for name in ("actor/pg_loss", "tis/mean", "tis/max_raw")})
    weighted, plain = found
    assert plain["tis/mean"] == pytest.approx(1.0) and weighted["tis/mean"] < 0.5
    assert plain["tis/max_raw"] == weighted["tis/max_raw"], "the ratio that was not used is reported all the same"
    assert plain["actor/pg_loss"] != pytest.approx(weighted["actor/pg_loss"], rel=0.1)


def test_an_unknown_source_of_old_logprobs_is_refused(m3):
    with pytest.raises(ValueError, match="samebits_old_logprobs must be rollout or recomputed"):
        engine(m3, model={"override_config": {"samebits_old_logprobs": "engine"}})


def own_routes(built, data):
    """The routes that the engine itself would choose, as a rollout returns them."""
    ids = data["input_ids"]
    lengths = ids.offsets().diff().tolist()
    with torch.no_grad():
        out = built.module(ids.values(), lengths, ids.values().roll(-1), torch.ones(sum(lengths)), capture=True)
    return [r[:-1] for r in out.routes.split(lengths)]


def test_replay_reports_what_it_did(m3):
    built = engine(m3, replay=True)
    routes = own_routes(built, random_batch(5, VOCAB))
    rows = sum(len(r) for r in routes)
    out = train(built, random_batch(5, VOCAB, routes=routes, max_tokens=20))
    assert metric(out, "replay/layers") == 2 and metric(out, "replay/rows") == rows
    assert metric(out, "replay/agreement") == pytest.approx(1.0)
    changed = [r.clone() for r in routes]
    changed[0][:, 1] = (changed[0][:, 1] + 1) % 8
    out = train(built, random_batch(5, VOCAB, routes=changed, max_tokens=20))
    assert 0.5 < metric(out, "replay/agreement") < 0.99


def test_replayed_routes_change_the_loss(m3):
    built = engine(m3, replay=True)
    routes = own_routes(built, random_batch(5, VOCAB))
    permuted = [torch.where(r >= 0, (r + 2) % 8, r) for r in routes]
    losses = []
    for given in (routes, permuted):
        with built.train_mode():
            losses.append(built.forward_backward_batch(random_batch(5, VOCAB, routes=given), loss_function())["loss"][0])
    assert losses[0] != losses[1]


def test_incomplete_batches_stop_before_training(m3):
    built = engine(m3, replay=True)
    with built.train_mode(), pytest.raises(BatchError, match="no routed_experts"):
        built.train_batch(random_batch(3, VOCAB), loss_function=loss_function())
    data = random_batch(3, VOCAB, routes=own_routes(built, random_batch(3, VOCAB)))
    del data["rollout_log_probs"]
    with built.train_mode(), pytest.raises(BatchError, match=r"no rollout_log_probs.*calculate_log_probs"):
        built.train_batch(data, loss_function=loss_function())
    assert built.adapter_version == 0


def test_a_gradient_that_is_not_finite_stops_the_run(m3):
    built = engine(m3)
    data = random_batch(3, VOCAB)
    data["advantages"].values()[0] = float("inf")
    with built.train_mode(), pytest.raises(RuntimeError, match="adapter version 0; no step was taken"):
        built.train_batch(data, loss_function=loss_function())
    assert built.adapter_version == 0


@pytest.mark.parametrize("warmup", [0, 5])
def test_resume_continues_bit_for_bit(m3, tmp_path, warmup):
    straight = engine(m3, warmup=warmup)
    for seed in range(2):
        train(straight, random_batch(5, VOCAB, seed=seed))
    random_state = torch.get_rng_state()
    straight.save_checkpoint(str(tmp_path / "ck"), global_step=2)
    resumed = engine(m3, lr=1e-2, warmup=warmup)
    torch.manual_seed(99)
    resumed.load_checkpoint(str(tmp_path / "ck"))
    assert resumed.adapter_version == 2
    assert torch.equal(torch.get_rng_state(), random_state)
    for seed in (2, 3):
        losses = [train(e, random_batch(5, VOCAB, seed=seed))["loss"] for e in (straight, resumed)]
        assert losses[0] == losses[1]
    states = [{n: e.optimizer.state[p] | {"master": p.detach()} for n, p in e.module.adapter_parameters()} for e in (straight, resumed)]
    for name in states[0]:
        for key in ("master", "exp_avg", "exp_avg_sq", "step"):
            a, b = (s[name][key] for s in states)
            assert torch.equal(getattr(a, "to_local", lambda a=a: a)(), getattr(b, "to_local", lambda b=b: b)()), (name, key)
    assert straight.lr_scheduler.state_dict() == resumed.lr_scheduler.state_dict()
    assert resumed.adapter_version == 4


@pytest.mark.parametrize(("options", "where"), [({"fused": True}, "meta"), ({"capturable": True}, "meta"), ({}, "cpu")])
def test_a_restored_count_of_steps_lies_where_the_optimizer_s_kernel_reads_it(options, where):
    """A fused kernel on a GPU reads a count on the host through its address: an illegal access. Device meta stands for the GPU."""
    from samebits.trainer.checkpointing import AdapterCheckpointManager  # brings verl, which the plugin comes before

    parameter = torch.nn.Parameter(torch.empty(3, device="meta"))
    manager = object.__new__(AdapterCheckpointManager)
    manager.optimizer = SimpleNamespace(param_groups=[{"params": [parameter], **options}], state={})
    manager.model = SimpleNamespace(adapter_parameters=lambda: [("w", parameter)])
    state = manager._tensors()
    state["step"]["w"].fill_(7)
    manager._restore(state)
    found = manager.optimizer.state[parameter]
    assert found["step"].device.type == where and {found[key].device.type for key in ("exp_avg", "exp_avg_sq")} == {"meta"}


def test_a_checkpoint_holds_the_adapter_as_it_was_sent_and_not_the_base(m3, tmp_path):
    built = engine(m3)
    train(built, random_batch(4, VOCAB))
    sent = {n: t.clone() for n, t in adapter(built).items()}
    built.save_checkpoint(str(tmp_path / "ck"), global_step=1)
    on_disk = load_peft(tmp_path / "ck" / "peft", built.module.spec)
    assert all(torch.equal(on_disk[n], sent[n]) for n in sent)
    with safe_open(tmp_path / "ck" / "peft" / "adapter_model.safetensors", "pt") as f:
        assert f.metadata()["adapter_version"] == "1" and f.metadata()["profile"] == built.module.profile.hash
    stored = FileSystemReader(tmp_path / "ck" / "state").read_metadata().state_dict_metadata
    trained = {n for n, _ in built.module.adapter_parameters()}
    assert set(stored) == {f"{kind}.{n}" for kind in ("master", "exp_avg", "exp_avg_sq", "step") for n in trained}


def test_old_checkpoints_are_dropped(m3, tmp_path):
    built = engine(m3)
    for step in (1, 2, 3):
        built.save_checkpoint(str(tmp_path / f"ck{step}"), global_step=step, max_ckpt_to_keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ck2", "ck3"]


def test_a_foreign_or_incomplete_checkpoint_is_refused(m3, tmp_path):
    built = engine(m3)
    with pytest.raises(ValueError, match="no complete checkpoint"):
        built.load_checkpoint(str(tmp_path))
    built.save_checkpoint(str(tmp_path / "ck"))
    with pytest.raises(ValueError, match="has alpha 16.0, this run has 8.0"):
        engine(m3, model={"lora_alpha": 8}).load_checkpoint(str(tmp_path / "ck"))


def test_device_hooks_that_verl_calls(m3):
    built = engine(m3)
    for kwargs in ({}, {"optimizer": False, "grad": False}, {"model": False, "grad": False}):
        built.to("cpu", **kwargs)
    train(built, random_batch(3, VOCAB))
    built.to("cpu")
    with built.eval_mode(), built.disable_adapter():
        base = built.infer_batch(random_batch(3, VOCAB))["model_output"]["log_probs"]
    with built.eval_mode():
        own = built.infer_batch(random_batch(3, VOCAB))["model_output"]["log_probs"]
    assert not torch.equal(base.values(), own.values())


@pytest.mark.parametrize(("layers", "experts"), [(False, False), (True, False), (False, True)])
def test_what_is_computed_again_in_backward_is_configured(m3, layers, experts):
    override = {"samebits_profile": "w4a16-fp32"} | ({"samebits_recompute_experts": True} if experts else {})
    module = engine(m3, model={"enable_gradient_checkpointing": layers, "override_config": override}).module
    assert all(layer.checkpointing is layers and layer.mlp.recompute is experts for layer in module.layers)
    assert all(layer.mlp.shared.recompute is experts for layer in module.layers if layer.is_moe)


@pytest.mark.parametrize(
    ("model", "config", "message"),
    [
        ({"lora_rank": 0}, {}, "lora_rank 0"),
        ({"lora_adapter_path": "somewhere"}, {}, "lora_adapter_path"),
        ({"use_fused_kernels": True}, {}, "use_fused_kernels"),
        ({"target_modules": "all-linear"}, {}, "unknown LoRA target 'all-linear'"),
        ({"override_config": {"samebits_profile": "w5a5"}}, {}, "unknown numerics profile 'w5a5'"),
        ({"override_config": {"samebits_recompute": True}}, {}, "unknown override_config samebits_recompute; known: samebits_profile"),
        ({"override_config": {"samebits_recompute_experts": "yes"}}, {}, "samebits_recompute_experts must be true or false, not 'yes'"),
        ({"override_config": {"samebits_expert_parallel": 2}}, {}, "samebits_expert_parallel must be true or false, not 2"),
        ({"override_config": {"samebits_expert_parallel": True}}, {"offload_policy": True}, "samebits_expert_parallel with offload_policy"),
        ({}, {"pad_to_length": True}, "pad_to_length"),
    ],
)
def test_settings_without_effect_are_refused(m3, model, config, message):
    with pytest.raises(ValueError, match=message):
        engine(m3, model=model, **config)

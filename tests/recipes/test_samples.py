"""The store of samples against a plain dictionary of rows, and under verl's replay buffer, padding and trainer."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict

import samebits.trainer.plugin  # noqa: F401  patches verl before its trainer is imported
from samebits.recipes.samples import SampleStore
from samebits.rollout.batch_loop import _tag, token_columns

KINDS = ("jagged", "even", "scalar", "object")
KEYS = [f"k{i}" for i in range(7)]


def column(kind: str, rows: int, seed: int):
    """A column of `rows` rows, as somebody puts it, and its rows."""
    g = torch.Generator().manual_seed(seed)
    if kind == "scalar":
        made = torch.randint(-9, 9, (rows,), generator=g)
        return made, list(made)
    if kind == "object":
        made = [{"n": seed + i} for i in range(rows)]
        return (NonTensorStack(*made) if seed % 2 else made), made
    lengths = [3] * rows if kind == "even" else torch.randint(1, 5, (rows,), generator=g).tolist()
    parts = [torch.randint(-9, 9, (n, 2), generator=g).to(torch.int16) for n in lengths]
    return (torch.stack(parts) if kind == "even" else torch.nested.as_nested_tensor(parts, layout=torch.jagged)), parts


subsets = st.lists(st.sampled_from(KEYS), min_size=1, max_size=7, unique=True)


puts = st.tuples(subsets, st.sets(st.sampled_from(KINDS), min_size=1), st.integers(0, 99))


@given(st.lists(puts, min_size=1, max_size=5), subsets, subsets)
def test_rows_come_back_as_they_were_put_last(puts, gone, asked):
    store, model = SampleStore(), {}
    for keys, kinds, seed in puts:
        made = {kind: column(kind, len(keys), seed) for kind in sorted(kinds)}
        as_dict = seed % 3 == 0
        fields = {("x" if kind in ("jagged", "even") else kind): put for kind, (put, _) in made.items()}
        store.kv_batch_put(keys, "p", fields if as_dict else TensorDict(fields, batch_size=len(keys)), [{"seed": seed}] * len(keys))
        for kind, (_, rows) in made.items():
            for key, row in zip(keys, rows, strict=True):
                model.setdefault(key, {})["x" if kind in ("jagged", "even") else kind] = row
        for key in keys:
            model[key] |= {"tag": seed}
    assert store.kv_list() == {"p": {key: {"seed": row["tag"]} for key, row in model.items()}}
    assert list(store.kv_list("p")["p"]) == list(model), "the order in which samples were first put"
    gone = [key for key in gone if key in model]
    if gone:
        store.kv_clear(gone, "p")
    model = {key: row for key, row in model.items() if key not in gone}
    asked = [key for key in asked if key in model]
    if not asked:
        return
    for name in ("x", "scalar", "object"):
        rows = [model[key].get(name) for key in asked]
        if any(row is None for row in rows) and not all(row is None for row in rows):
            with pytest.raises(ValueError, match=rf"only \d of {len(rows)} samples have the field {name}"):
                store.kv_batch_get(asked, "p", [name])
            continue
        found = store.kv_batch_get(asked, "p", [name])
        assert found.batch_size == (len(asked),) and (name in found) == (rows[0] is not None)
        if rows[0] is None:
            continue
        have = found.get(name).tolist() if name == "object" else found[name].unbind()
        if name == "object":
            assert have == rows
            continue
        assert found[name].is_nested == (name == "x")
        assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(have, rows, strict=True))


def test_a_column_is_handed_on_as_it_was_put():
    store = SampleStore()
    put, _ = column("jagged", 3, 1)
    store.kv_batch_put(["a", "b", "c"], "p", {"x": put, "y": put})
    found = store.columns(["a", "b", "c"], "p")
    assert found["x"] is put and found["y"] is put
    assert store.columns(["b", "a", "c"], "p", ["x"])["x"] is not put


def test_what_does_not_fit_is_refused():
    store = SampleStore()
    with pytest.raises(ValueError, match="neither fields nor tags"):
        store.kv_batch_put(["a"], "p")
    with pytest.raises(ValueError, match="2 rows of x for 1 keys"):
        store.kv_batch_put(["a"], "p", {"x": torch.ones(2)})
    with pytest.raises(ValueError, match="2 rows of tags for 1 keys"):
        store.kv_batch_put(["a"], "p", tags=[{}, {}])
    assert store.kv_list() == {}, "what was refused left a trace"
    store.kv_batch_put(["a"], "p", {"x": torch.ones(1)})
    store.kv_batch_put(["b"], "p", {"x": ["text"]})
    for ask in (store.kv_batch_get, store.kv_clear):
        with pytest.raises(ValueError, match="partition 'p' has no sample 'z'"):
            ask(["a", "z"], "p")
        with pytest.raises(ValueError, match="partition 'q' has no sample 'a'"):
            ask(["a"], "q")
    with pytest.raises(ValueError, match="field x was put as columns of different kinds"):
        store.kv_batch_get(["a", "b"], "p")
    with pytest.raises(ValueError, match="field y is a nested tensor of another kind than jagged"):
        store.kv_batch_put(["a"], "p", {"y": torch.nested.as_nested_tensor([torch.ones(2)], layout=torch.strided)})


def a_trainer(monkeypatch, groups: int, samples: int, multiple: int):
    """The training loop's class without a job, its store filled by one step of `groups` prompts; and what verl samples from it."""
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
    from verl.workers.rollout.replica import TokenOutput

    from samebits.recipes import loop
    from samebits.recipes.config import load_recipe

    trainer = loop.SamebitsTrainer.__new__(loop.SamebitsTrainer)
    _, trainer.config = load_recipe("recipes/tiny_m3_grpo.yaml", ["device=cpu"])
    trainer.samples, trainer.use_critic, trainer.global_steps = SampleStore(), False, 3
    loop.keep_samples_in(trainer.samples)
    trainer.actor_rollout_wg = SimpleNamespace(world_size=1)
    trainer.tokenizer = SimpleNamespace(eos_token_id=2)
    trainer._rollout_moe_lb_metrics_accumulator = None
    trainer.resource_pool_manager = SimpleNamespace(get_n_gpus=lambda: 1)
    monkeypatch.setattr(loop.SamebitsTrainer, "_get_required_batch_multiple", lambda self, ranks: multiple)
    g = np.random.default_rng(groups)
    keys = [f"000003-{i:05d}_{j}_0" for i in range(groups) for j in range(samples)]
    prompts = [g.integers(3, 99, 1 + g.integers(9)).tolist() for _ in keys]
    outputs = [
        TokenOutput(
            token_ids=(ids := g.integers(3, 99, 1 + g.integers(9)).tolist()),
            log_probs=(-g.random(len(ids))).tolist(),
            routed_experts=g.integers(0, 8, (len(prompt) + len(ids), 3, 2)).astype(np.int16),
            extra_fields={"global_steps": 2},
        )
        for prompt in prompts
    ]
    scores = g.choice([-1.0, 0.0, 0.3, 1.0], len(keys)).tolist()
    columns = dict(token_columns(prompts, outputs, scores))
    columns |= {"num_turns": [2] * len(keys), "uid": [key.split("_")[0] for key in keys]}
    tags = [_tag(3, len(prompt), output) for prompt, output in zip(prompts, outputs, strict=True)]
    trainer.samples.kv_batch_put(keys, "train", columns, tags)
    uids = list(dict.fromkeys(columns["uid"]))
    trainer.samples.kv_batch_put(uids, "train", tags=[{"is_prompt": True, "status": "finished", "global_steps": 3} for _ in uids])
    buffer = ReplayBuffer("sync", {}, None, "drop", {}, train_batch_size=groups, gen_batch_size=groups)
    batch, _ = buffer.sample(global_steps=3, partition_id="train", batch_size=groups)
    assert batch.keys == keys, "verl sampled other rows, or in another order"
    return trainer, trainer._balance_batch(batch, {})


@pytest.mark.parametrize(("normed", "masked"), [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize(("groups", "samples", "multiple"), [(3, 4, 1), (2, 3, 4), (1, 2, 5), (5, 8, 40)])
def test_advantages_and_means_have_the_bits_of_verl_s(monkeypatch, groups, samples, multiple, normed, masked):
    from samebits.recipes import loop

    trainer, batch = a_trainer(monkeypatch, groups, samples, multiple)
    if masked:
        mask = trainer.samples.columns(batch.keys, "train", ["response_mask"])["response_mask"].clone()
        mask.values()[::3] = 0
        trainer.samples.kv_batch_put(batch.keys, "train", {"response_mask": mask})
    trainer.config.algorithm.norm_adv_by_std_in_grpo = normed
    assert len(batch) % multiple == 0 and sum(tag.get("is_padding", False) for tag in batch.tags) == len(batch) - groups * samples
    loop.PPOTrainerSync._compute_old_log_prob(trainer, batch, {})
    loop.PPOTrainerSync._compute_advantage(trainer, batch, {})
    want = trainer.samples.columns(batch.keys, "train", ["advantages"])["advantages"]
    metrics = {}
    timing = {"step": 1.0, "gen": 1.0, "adv": 1.0, "update_actor": 1.0, "update_weights": 1.0}
    loop.PPOTrainerSync._compute_metrics(trainer, batch, metrics, timing, 3, 0)
    assert trainer._compute_advantage(batch, {}) is batch
    found = trainer.samples.columns(batch.keys, "train", ["advantages"])["advantages"]
    assert found is not want and found.dtype == want.dtype and torch.equal(found.offsets(), want.offsets())
    assert torch.equal(found.values().view(torch.int32), want.values().view(torch.int32))
    assert found.values().any()
    means = trainer._means(batch)
    assert means == {key: metrics[key] for key in ("critic/score/mean", "response_length/mean")}
    trainer.samples.kv_clear(batch.keys, "train")
    assert trainer.samples.kv_list("train") == {"train": {}}, "a step left samples behind"


@pytest.mark.parametrize("logger", [[], ["console"]])
def test_metrics_of_verl_are_made_for_its_loggers_only(monkeypatch, tmp_path, logger):
    from samebits.recipes import loop
    from samebits.recipes.run_dir import MetricsLog, read_metrics

    trainer, batch = a_trainer(monkeypatch, 2, 2, 1)
    trainer.config.trainer.logger = logger
    trainer.recipe = SimpleNamespace(checks=SimpleNamespace(max_kl=1.0), numerics=SimpleNamespace(parity="auto"))
    trainer.log, trainer._step_metrics, trainer._save_due = MetricsLog(tmp_path / "metrics.jsonl"), {}, False
    monkeypatch.setattr(
        loop.PPOTrainerSync, "_compute_metrics", lambda self, batch, metrics, *a: metrics.update(trainer._means(batch), all=1)
    )
    metrics = {"actor/mismatch/kl": 0.0, "actor/mismatch/max_abs": 0.0}
    trainer._compute_metrics(batch, metrics, {"update_actor": 1.0, "update_weights": 1.0, "step": 3.0}, 3, 0)
    assert ("all" in metrics) == bool(logger)
    (line,) = read_metrics(trainer.log.path)
    assert line["reward/mean"] == metrics["critic/score/mean"] and line["response/tokens_mean"] == metrics["response_length/mean"]

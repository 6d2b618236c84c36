"""A batch of prompts through the batch loop, with stand-ins for the server and for the store of samples."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict

import samebits.trainer.plugin  # noqa: F401  patches verl before its workers are imported

FINISH = ["stop", "length", "stop", "stop"]


class Server:
    """Answers two samples of each of two prompts; the second sample of the first prompt is cut off."""

    def __init__(self) -> None:
        self.generate_batch = SimpleNamespace(remote=self._generate)

    def _generate(self, prompts, params, keys):
        from verl.workers.rollout.replica import TokenOutput

        assert len({param["seed"] for param in params}) == len(prompts) == 4
        return [
            TokenOutput(
                token_ids=[3, 4],
                log_probs=[-0.5, -0.25],
                routed_experts=np.full((len(prompt) + 2, 3, 2), -1, dtype=np.int16),
                stop_reason="completed",
                extra_fields={"global_steps": 1, "adapter_version": 1, "finish_reason": FINISH[i]},
            )
            for i, prompt in enumerate(prompts)
        ]


class Tokenizer:
    def apply_chat_template(self, messages, **_):
        return [len(messages[0]["content"]), 7]

    def decode(self, ids, **_):
        return "text"


@pytest.mark.parametrize(("validate", "filtered"), [(False, False), (False, True), (True, False)])
def test_what_is_put_for_each_sample(monkeypatch, validate, filtered):
    from samebits.rollout import batch_loop

    put = []

    def keep(keys, partition_id, fields=None, tags=None):
        put.append({"keys": keys, "partition_id": partition_id, "fields": fields, "tags": tags})

    monkeypatch.setattr(batch_loop.ray, "get", lambda calls: calls)
    graded = []
    monkeypatch.setattr(batch_loop, "_reward_function", lambda config: lambda **kwargs: graded.append(kwargs) or {"score": 1.0})
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "n": 2}
    config = OmegaConf.create(
        {
            "actor_rollout_ref": {"rollout": sampling | {"calculate_log_probs": True, "val_kwargs": sampling}},
            "data": {},
            "algorithm": {"filter_groups": {"enable": filtered}},
        }
    )
    loop = batch_loop.BatchLoop(config, [Server()], Tokenizer(), 0, SimpleNamespace(kv_batch_put=keep))
    rows = {
        "uid": ["u0", "u1"],
        "index": [0, 1],
        "global_steps": [1, 1],
        "raw_prompt": [[{"role": "user", "content": "ab"}], [{"role": "user", "content": "abc"}]],
        "data_source": ["d", "d"],
        "reward_model": [{"ground_truth": "1"}, {"ground_truth": "2"}],
        "extra_info": [{"index": 0}, {"index": 1}],
        "validate": [validate, validate],
    }
    loop.generate_sequences(TensorDict({k: NonTensorStack(*v) for k, v in rows.items()}, batch_size=[2]))
    assert loop.truncated_fraction == 0.25
    assert [call["extra_info"]["finish_reason"] for call in graded] == FINISH
    assert [call["ground_truth"] for call in graded] == ["1", "1", "2", "2"]
    samples, done = put
    assert samples["partition_id"] == ("val" if validate else "train")
    assert samples["keys"] == ["u0_0_0", "u0_1_0", "u1_0_0", "u1_1_0"] and done["keys"] == ["u0", "u1"]
    columns = set(samples["fields"].keys())
    assert columns.isdisjoint({"raw_prompt", "extra_info", "index", "multi_modal_inputs"})
    assert {"uid", "input_ids", "rollout_log_probs", "routed_experts", "rm_scores", "loss_mask"} <= columns
    assert ({"data_source", "reward_model"} <= columns) == validate
    assert ("extra_fields" in columns) == (validate or filtered) and "metrics" not in columns
    if "extra_fields" in columns:
        assert list(samples["fields"]["extra_fields"])[1]["reward_extra_info"] == {"score": 1.0}
    rows = {name: [row.tolist() for row in samples["fields"][name].unbind()] for name in ("rm_scores", "rollout_log_probs", "input_ids")}
    assert rows["rm_scores"] == [[0.0, 1.0]] * 4 and rows["rollout_log_probs"] == [[-0.5, -0.25]] * 4
    assert rows["input_ids"] == [[2, 7, 3, 4]] * 2 + [[3, 7, 3, 4]] * 2
    assert [(len(t), t.dtype) for t in samples["fields"]["routed_experts"].unbind()] == [(4, torch.int16)] * 4
    assert [tag["seq_len"] for tag in samples["tags"]] == [4] * 4 and {tag["status"] for tag in done["tags"]} == {"finished"}


@st.composite
def sampled(draw):
    count = draw(st.integers(1, 5))
    ids = st.lists(st.integers(0, 200_000), min_size=1, max_size=6)
    prompts, responses = ([draw(ids) for _ in range(count)] for _ in range(2))
    scores = draw(st.lists(st.floats(-2, 2), min_size=count, max_size=count))
    return prompts, responses, scores, draw(st.booleans()), draw(st.booleans()), draw(st.integers(0, 99))


@given(sampled())
def test_columns_are_the_samples_one_after_the_other(case):
    from verl.workers.rollout.replica import TokenOutput

    from samebits.rollout.batch_loop import token_columns

    prompts, responses, scores, scored, routed, seed = case
    g = np.random.default_rng(seed)
    outputs = [
        TokenOutput(
            token_ids=response,
            log_probs=(-g.random(len(response))).tolist() if scored else None,
            routed_experts=g.integers(-1, 9, (len(prompt) + len(response), 3, 2)).astype(np.int16) if routed else None,
        )
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    found = token_columns(prompts, outputs, scores)
    want = {
        "prompts": [torch.tensor(p) for p in prompts],
        "responses": [torch.tensor(r) for r in responses],
        "response_mask": [torch.ones(len(r), dtype=torch.int64) for r in responses],
        "loss_mask": [torch.ones(len(r), dtype=torch.int64) for r in responses],
        "rm_scores": [torch.tensor([0.0] * (len(r) - 1) + [s]) for r, s in zip(responses, scores, strict=True)],
        "input_ids": [torch.tensor(p + r) for p, r in zip(prompts, responses, strict=True)],
    }
    if scored:
        want["rollout_log_probs"] = [torch.tensor(o.log_probs, dtype=torch.float32) for o in outputs]
    if routed:
        want["routed_experts"] = [torch.from_numpy(o.routed_experts) for o in outputs]
    assert set(found) == set(want)
    for name, rows in want.items():
        have = found[name].unbind()
        assert len(have) == len(rows) and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(have, rows, strict=True)), name

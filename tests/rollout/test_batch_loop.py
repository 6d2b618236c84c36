"""A batch of prompts through the batch loop, with a stand-in for the server and for the transfer queue."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
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
    monkeypatch.setattr(batch_loop.tq, "kv_batch_put", lambda **kwargs: put.append(kwargs))
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
    loop = batch_loop.BatchLoop(config, [Server()], Tokenizer(), seed=0)
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
    assert torch.equal(samples["fields"]["rm_scores"], torch.tensor([[0.0, 1.0]] * 4))
    assert torch.equal(samples["fields"]["rollout_log_probs"], torch.tensor([[-0.5, -0.25]] * 4))
    assert [(len(t), t.dtype) for t in samples["fields"]["routed_experts"].unbind()] == [(4, torch.int16)] * 4
    assert torch.equal(samples["fields"]["input_ids"][2], torch.tensor([3, 7, 3, 4]))

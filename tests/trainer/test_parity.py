"""Equal bits or nothing: the first token that differs is named and recorded, before anything is learned."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from samebits.trainer.parity import RECORD, TAPS, ParityLost, first_difference
from tests.support.training import batch, engine, loss_function, random_batch, start_group

VOCAB = 96


@pytest.fixture(scope="module", autouse=True)
def process_group():
    # It stays: vLLM keeps the process's groups, and an engine that another test starts here would look for this one.
    start_group()


def packed(data) -> torch.Tensor:
    """A trainer that agrees: row t holds the rollout's logprob of token t + 1, other rows a value of their own."""
    out = torch.arange(data["input_ids"].values().numel()).float() + 100
    ends, lengths = data["input_ids"].offsets()[1:].tolist(), data["responses"].offsets().diff().tolist()
    for end, length, row in zip(ends, lengths, data["rollout_log_probs"].unbind(), strict=True):
        out[end - 1 - length : end - 1] = row
    return out


def test_every_response_token_is_compared_and_only_those():
    data = random_batch(4, VOCAB)
    assert first_difference(packed(data), data) is None
    prompts, ends = data["prompts"].offsets().diff().tolist(), data["input_ids"].offsets().tolist()
    responses = data["responses"].offsets().diff().tolist()
    found = []
    for at in range(len(packed(data))):
        logprobs = packed(data)
        logprobs[at] = torch.nextafter(logprobs[at], torch.tensor(1e9))
        difference = first_difference(logprobs, data)
        if difference is not None:
            found.append((difference.row, difference.token))
            assert difference.prompt == prompts[difference.row] and ends[difference.row] + difference.token - 1 == at
            assert difference.trainer != difference.engine
    assert found == [(row, p + j) for row, (p, r) in enumerate(zip(prompts, responses, strict=True)) for j in range(r)]


def test_a_zero_of_another_sign_and_a_masked_token():
    data = random_batch(2, VOCAB)
    data["rollout_log_probs"].values()[3] = 0.0
    logprobs = packed(data)
    at = int((logprobs == 0).nonzero()[0])
    logprobs[at] = -0.0
    assert first_difference(logprobs, data) is not None, "-0 and 0 are other bits"
    data["response_mask"].values()[3] = 0
    assert first_difference(logprobs, data) is None


@pytest.fixture(scope="module")
def built(m3):
    return engine(m3)


def agreeing(built, nudged: int | None = None):
    """A batch whose rollout logprobs are the trainer's own; the one at index `nudged` is one unit in the last place off."""
    data = random_batch(4, VOCAB, seed=3)
    with built.eval_mode():
        lp = built.infer_batch(data.clone(), loss_function=None)["model_output"]["log_probs"]
    prompts, ends = data["prompts"].offsets().diff().tolist(), data["responses"].offsets().diff().tolist()
    own = [row[p - 1 : p - 1 + r].clone() for row, p, r in zip(lp.unbind(), prompts, ends, strict=True)]
    if nudged is not None:
        own[2][nudged] = torch.nextafter(own[2][nudged], torch.tensor(1.0))
    tokens = [[x.tolist() for x in data[name].unbind()] for name in ("prompts", "responses")]
    return batch(*tokens, own, list(data["advantages"].unbind()))


def step(built, data) -> None:
    with built.train_mode():
        built.train_batch(data, loss_function=loss_function())


def test_one_unit_in_the_last_place_stops_the_step_and_is_recorded(built, tmp_path):
    built.parity = tmp_path / "parity"
    version = built.adapter_version
    data = agreeing(built, nudged=1)
    before = {n: t.clone() for n, t in built.get_per_tensor_param()[0]}
    prompt = int(data["prompts"].offsets().diff()[2])
    with pytest.raises(ParityLost, match=f"step {version + 1}: sample 2: token {prompt + 1} .prompt of {prompt} tokens") as error:
        step(built, data)
    assert "\n" not in str(error.value)
    assert built.adapter_version == version
    assert all(torch.equal(before[n], t) for n, t in built.get_per_tensor_param()[0])
    record = json.loads((built.parity / RECORD).read_text())
    assert record["tokens"] == data["input_ids"].unbind()[2].tolist()[: prompt + 1] and record["message"] == str(error.value)
    taps = load_file(built.parity / TAPS)
    assert {"model.embed_tokens", "model.norm"} <= set(taps) and all(len(t) == prompt + 1 for n, t in taps.items() if "layers" in n)


def test_equal_bits_are_learned_from(built, tmp_path):
    built.parity = tmp_path / "parity"
    version = built.adapter_version
    step(built, agreeing(built))
    assert built.adapter_version == version + 1 and not built.parity.exists()


def test_bitwise_is_refused_where_the_kernels_do_not_run(m3, tmp_path):
    with pytest.raises(ValueError, match="numerics.parity=bitwise needs bf16 activations on a GPU"):
        engine(m3, model={"override_config": {"samebits_profile": "w4a16-fp32", "samebits_parity": str(tmp_path)}})

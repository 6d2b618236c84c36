"""Faults of the sampler and of the sampled tokens on the runner that vLLM has on GPUs (V2), whose sampler is another than that of CPUs."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.v1.worker.gpu.sample import states
from vllm.v1.worker.gpu.sample.sampler import Sampler

from samebits.alignment_checks.faults import CATALOGUE

VOCABULARY = 8


@pytest.fixture
def pair(monkeypatch):
    """vLLM's own V2 sampler, without the buffers that only a GPU can map, in a pair with nothing else."""
    monkeypatch.setattr(states, "apply_temperature", lambda logits, rows, temperature: logits.div_(temperature[rows][:, None]))
    sampler, sampling = object.__new__(Sampler), object.__new__(states.SamplingStates)
    temperature = torch.tensor([0.5, 4.0])
    sampling.temperature = SimpleNamespace(np=temperature.numpy(), gpu=temperature)
    sampler.sampling_states, sampler.logprobs_mode = sampling, "processed_logprobs"
    model = SimpleNamespace(_forbidden=None, lm_head=SimpleNamespace(weight=torch.empty(VOCABULARY, 1, device="meta")))
    runner = SimpleNamespace(sampler=sampler, get_model=lambda: model)
    worker = SimpleNamespace(worker=SimpleNamespace(model_runner=runner))
    core = SimpleNamespace(engine_core=SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker)))
    llm = SimpleNamespace(llm_engine=SimpleNamespace(engine_core=core))
    return SimpleNamespace(replicas=[SimpleNamespace(llm=llm, model=model)], vocabulary=VOCABULARY, sampler=sampler)


def divided(sampler) -> list[float]:
    logits = torch.full((2, 1), 8.0)
    sampler.sampling_states.apply_temperature(logits, torch.tensor([1, 0]), np.array([1, 0]))
    return logits[:, 0].tolist()


def test_temperature_is_divided_by_twice_and_once_again_afterwards(pair):
    assert divided(pair.sampler) == [2.0, 16.0]
    with CATALOGUE["temperature_twice"].inject(pair):
        assert divided(pair.sampler) == [0.5, 32.0]
    assert divided(pair.sampler) == [2.0, 16.0]


def test_logprobs_of_raw_logits(pair):
    with CATALOGUE["raw_logprobs"].inject(pair):
        assert pair.sampler.logprobs_mode == "raw_logprobs"
    assert pair.sampler.logprobs_mode == "processed_logprobs"


def test_banned_tokens_lie_where_the_logits_are(pair):
    model = pair.replicas[0].model
    with CATALOGUE["token_banned"].inject(pair):
        assert model._forbidden.device == model.lm_head.weight.device and len(model._forbidden) == 3
    assert model._forbidden is None

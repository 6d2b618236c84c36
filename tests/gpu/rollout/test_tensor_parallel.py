"""A replica of two and of four GPUs, with CUDA graphs and experts over peer memory, against one GPU, bit for bit.

The model and the lengths are those of `test_same_bits`; what one GPU gives is asked of an engine that is gone before the others start.
"""

from __future__ import annotations

import gc
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")
if not torch.cuda.is_available() or torch.cuda.device_count() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)

from safetensors.torch import save_file

from samebits.alignment_checks.in_run import check_bases
from samebits.alignment_checks.weights import base_digests, verify_sync
from samebits.quant.adapter import Manifest
from samebits.quant.checkpoint import Checkpoint
from samebits.quant.profile import get_profile
from tests.rollout.conftest import LARGE, Engine, same_bits, usual_options
from tests.support import random_m3

from .test_same_bits import CACHES, LENGTHS, RANK, SIZES, TOKENS, adapter, prompt

_KEPT: list[Engine] = []


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return random_m3.build(tmp_path_factory.mktemp("m3"), **SIZES)


def started(folder, kv_cache: str, world: int) -> Engine:
    os.environ.update(
        HF_HUB_OFFLINE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR", VLLM_WORKER_MULTIPROC_METHOD="spawn"
    )
    from vllm import LLM

    made = Engine.__new__(Engine)
    made.llm = LLM(
        str(folder),
        max_model_len=4096,
        gpu_memory_utilization=0.2,
        tensor_parallel_size=world,
        **LARGE,
        **usual_options("w4a16", RANK, kv_cache=kv_cache),
    )
    made.profile = get_profile("w4a16", kv_cache).hash
    return made


def _graphs(worker) -> int:
    return len(worker.model_runner.cudagraph_manager.graphs)


def outcome(folder, kv_cache: str, world: int, where) -> SimpleNamespace:
    """All that an engine of `world` GPUs says."""
    engine = started(folder, kv_cache, world)
    try:
        assert all(engine.llm.collective_rpc(_graphs)), "no CUDA graph was captured"
        tensors = adapter(7)
        save_file(tensors, where / "7.safetensors")
        sent = Manifest.of(tensors, 7, engine.profile, world=world)
        held = list(engine.llm.collective_rpc("samebits_load_adapter", args=(str(where / "7.safetensors"), sent.to_json())))
        report = {"tensors": 1, "bytes": sent.bytes, "seconds": 1.0, "sent": sent.to_json(), "held": held}
        assert verify_sync([report], 7, engine.profile).ranks == world
        expected = base_digests(Checkpoint(folder), world)
        assert check_bases(expected, [list(engine.llm.collective_rpc("samebits_base_digests"))]).status == "agree"
        prompts = [prompt(n, n) for n in LENGTHS] + [prompt(40 + i, i) for i in range(40)]
        sampled = engine.run(prompts, versions=7, tokens=TOKENS, prompt_logprobs=None, seed=3)
        engine.llm.reset_prefix_cache()
        whole = engine.run([p + out.ids[:-1] for p, out in zip(prompts, sampled, strict=True)], versions=7)
        return SimpleNamespace(sampled=sampled, whole=whole)
    finally:
        core = engine.llm.llm_engine.engine_core
        if world == 1:
            core.shutdown()
        else:  # the ranks' processes end; what of vLLM is in this one stays, since its own shutdown waits for sockets that are in use
            core.engine_core.model_executor.shutdown()
            _KEPT.append(engine)
        del engine
        gc.collect()
        torch.cuda.empty_cache()


@pytest.mark.parametrize("kv_cache", CACHES)
def test_replicas_of_several_gpus_have_the_bits_of_one(folder, kv_cache, tmp_path):
    want = outcome(folder, kv_cache, 1, tmp_path)
    for world in (2, 4):
        if torch.cuda.device_count() < world:
            continue
        have = outcome(folder, kv_cache, world, tmp_path)
        for a, b in zip(have.sampled + have.whole, want.sampled + want.whole, strict=True):
            assert a.ids == b.ids and np.array_equal(a.routes, b.routes)
            assert same_bits(a.logprobs, b.logprobs) and same_bits(a.prompt_logprobs, b.prompt_logprobs)

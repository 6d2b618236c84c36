"""An engine with NVFP4 pages and CUDA graphs gives its memory back and takes it again: what it held, and the bits it computes.

Memory in which graphs and views lie is mapped again at the same addresses; of the cache it holds anything then. One engine: vLLM's
allocator for sleep serves one in a process.
"""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("vllm")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from tests.rollout.conftest import LARGE, UNTUNED, Engine, same_bits, usual_options
from tests.support import random_m3

from .test_same_bits import RANK, SIZES, TOKENS, adapter, prompt

PROMPTS = [prompt(n, n) for n in (3, 127, 300, 2049)] + [prompt(40 + i, i) for i in range(20)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")
    from vllm import LLM

    made = Engine(
        LLM(
            str(random_m3.build(tmp_path_factory.mktemp("m3"), **SIZES)),
            max_model_len=4096,
            gpu_memory_utilization=0.1,
            enable_sleep_mode=True,
            kv_cache_dtype="nvfp4",
            kernel_config=UNTUNED,
            **LARGE,
            **usual_options("w4a16", RANK),
        ),
        "nvfp4",
        "w4a16",
    )
    yield made
    made.close()


def free() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def sample(engine: Engine, version: int) -> list:
    return engine.run(PROMPTS, versions=version, tokens=TOKENS, temperature=0, prompt_logprobs=None)


def same(one: list, other: list) -> bool:
    pairs = zip(one, other, strict=True)
    return all(a.ids == b.ids and same_bits(a.logprobs, b.logprobs) and (a.routes == b.routes).all() for a, b in pairs)


def test_what_was_asleep_has_the_same_bits_and_takes_the_next_adapter(engine, tmp_path):
    llm = engine.llm
    assert engine.runner.cudagraph_manager.graphs, "no CUDA graph was captured"
    engine.load(adapter(7), 7, tmp_path)
    first, base = sample(engine, 7), engine.rpc("samebits_base_digests")
    held = engine.rpc("samebits_held_bytes")
    parts = {name: size for name, size in held.items() if name != "card"}
    awake = free()
    llm.sleep(level=1)
    asleep = free()
    print(f"\nsleep gave back {(asleep - awake) / 1e6:,.1f} MB of {sum(parts.values()) / 1e6:,.1f} MB held ({parts})")
    assert asleep - awake >= 0.98 * sum(parts.values())
    llm.wake_up(tags=["weights"])
    assert asleep - free() < 0.5 * held["kv_cache"], "the cache woke with the weights"
    assert engine.rpc("samebits_base_digests") == base
    engine.load(adapter(8), 8, tmp_path)
    llm.wake_up(tags=["kv_cache"])
    llm.reset_prefix_cache()
    assert free() - awake < 0.1 * held["kv_cache"], "not all of it was taken again"
    other, again = sample(engine, 8), sample(engine, 7)
    assert same(first, again) and not same(first, other)
    assert [out.cached for out in other] == [0] * len(PROMPTS)


def test_sleep_right_after_sampling_and_with_the_base_read_between(engine):
    """As a step with a full check does it, twice."""
    llm, base, first = engine.llm, engine.rpc("samebits_base_digests"), sample(engine, 7)
    for _ in range(2):
        llm.sleep(level=1)
        llm.wake_up(tags=["weights"])
        assert engine.rpc("samebits_base_digests") == base
        llm.sleep(level=1)
        llm.wake_up(tags=["weights"])
        llm.wake_up(tags=["kv_cache"])
        assert same(first, sample(engine, 7))

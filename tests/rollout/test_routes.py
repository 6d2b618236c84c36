"""Routes of finished requests: complete, by absolute layer, however the scheduler cut the work."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from samebits.alignment_checks.reference_m3 import ReferenceM3

from .conftest import prompt

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def fresh(engine):
    engine.clear()
    engine.llm.reset_prefix_cache()


def test_shape_dtype_and_dense_rows(engine):
    for n, tokens in ((1, 1), (7, 1), (7, 5), (300, 3)):
        (out,) = engine.run([prompt(n, n)], tokens=tokens)
        assert out.routes.dtype == np.int16 and out.routes.shape == (n + tokens - 1, 3, 2)
        assert (out.routes[:, 0] == -1).all()
        moe = out.routes[:, 1:]
        assert ((moe >= 0) & (moe < 8)).all() and (moe[..., 0] < moe[..., 1]).all()


def test_routes_are_the_reference(engine, checkpoint):
    ids = prompt(600)
    (out,) = engine.run([ids], tokens=9)
    _, want = ReferenceM3(checkpoint)(ids + out.ids[:-1])
    assert torch.equal(torch.from_numpy(out.routes).long(), want)
    assert not np.array_equal(out.routes[:, 1], out.routes[:, 2])


def test_requests_of_one_batch_keep_their_own(engine):
    prompts = [prompt(n, n) for n in (3, 150, 31, 64)]
    together = engine.run(prompts, tokens=6)
    for p, t in zip(prompts, together, strict=True):
        engine.llm.reset_prefix_cache()
        (alone,) = engine.run([p + t.ids[:-1]])
        assert np.array_equal(t.routes, alone.routes)


def test_chunked_prefill(engine, monkeypatch):
    prompts = [prompt(n, n) for n in (290, 410)]
    whole = engine.run(prompts, tokens=4, temperature=0)
    engine.llm.reset_prefix_cache()
    monkeypatch.setattr(engine.scheduler, "max_num_scheduled_tokens", 96)
    chunked = engine.run(prompts, tokens=4, temperature=0)
    for a, b in zip(whole, chunked, strict=True):
        assert a.ids == b.ids
        assert np.array_equal(a.routes, b.routes)


def test_decode_and_prefill_of_the_same_tokens(engine):
    ids = prompt(520)
    (out,) = engine.run([ids], tokens=20)
    engine.llm.reset_prefix_cache()
    (again,) = engine.run([ids + out.ids[:-1]])
    assert np.array_equal(out.routes, again.routes)


def test_prefix_cache_hit_brings_the_rows_of_its_blocks(engine):
    ids = prompt(400)
    (first,) = engine.run([ids], tokens=3, prompt_logprobs=None, temperature=0)
    (second,) = engine.run([ids], tokens=3, prompt_logprobs=None, temperature=0)
    assert first.cached == 0 and second.cached >= 256
    assert np.array_equal(first.routes, second.routes)


def test_preemption(engine):
    prompts = [prompt(120, n) for n in range(3)]
    free = engine.run(prompts, tokens=40, prompt_logprobs=None, temperature=0)
    engine.llm.reset_prefix_cache()
    pool = engine.scheduler.kv_cache_manager.block_pool
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - 4)  # 3 requests of 2 blocks each do not fit
    preempted = []
    original = engine.scheduler._preempt_request
    engine.scheduler._preempt_request = lambda request, *a, **k: (preempted.append(request), original(request, *a, **k))[1]
    try:
        tight = engine.run(prompts, tokens=40, prompt_logprobs=None, temperature=0)
    finally:
        engine.scheduler._preempt_request = original
        pool.free_blocks(taken)
    assert preempted
    for a, b in zip(free, tight, strict=True):
        assert a.ids == b.ids
        assert np.array_equal(a.routes, b.routes)


def test_a_silent_layer_fails_the_step(engine, monkeypatch):
    layer = engine.model.get_submodule("model.layers.2.block_sparse_moe")
    connector = engine.runner._routes
    seen = []
    complete = connector._capturer.require_complete

    def require_complete(step):
        seen.append(step.copy())
        complete(step)

    monkeypatch.setattr(connector._capturer, "require_complete", require_complete)
    engine.run([prompt(4)])
    (step,) = seen
    assert (step[:, 1:] >= 0).all() and (connector._capturer.device_buffer == -1).all()
    monkeypatch.setattr(layer, "capture_fn", None)
    step[1:3, 2] = -1
    with pytest.raises(RuntimeError, match=r"no routes of some of 4 tokens from layers \[2\]"):
        complete(step)

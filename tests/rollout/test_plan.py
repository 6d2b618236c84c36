"""How a step's sequences become padded calls: every query once, every key at its place, no key of another sequence."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from samebits.rollout import paged as attention
from samebits.rollout.paged import PAGE, PagedCache, StepPlan, plan


def step(queries: list[int], lengths: list[int], pages: int = 64):
    """starts, lengths and a block table whose pages are all different."""
    starts = np.concatenate(([0], np.cumsum(queries))).astype(np.int64)
    width = max(math.ceil(n / PAGE) for n in lengths)
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(1))[: len(lengths) * width].view(len(lengths), width)
    return starts, np.array(lengths, dtype=np.int64), table


CASES = {
    "decode": ([1] * 5, [1, 40, 127, 128, 129]),
    "decode over pages": ([1] * 4, [600, 20, 513, 512]),
    "prefill": ([7, 300, 1, 130], [7, 300, 1, 130]),
    "chunk after a cached prefix": ([60, 1, 5], [188, 400, 5]),
    "a sequence without queries": ([3, 0, 2], [3, 9, 130]),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("limit", [1 << 25, 4000])
def test_every_query_once_and_every_key_at_its_position(case, limit, monkeypatch):
    monkeypatch.setattr(attention, "_SCORES", limit)
    queries, lengths = CASES[case]
    starts, length, table = step(queries, lengths)
    seen = []
    for bucket in plan(starts, length, table, heads=4):
        query = torch.arange(starts[-1])[:, None] if bucket.query is None else bucket.query
        for r in range(bucket.q_pos.shape[0]):
            inside = bucket.q_pos[r] >= 0
            tokens = query[r][inside]
            sequence = int(np.searchsorted(starts, tokens[0].item(), side="right") - 1)
            seen += tokens.tolist()
            first = lengths[sequence] - queries[sequence]
            assert torch.equal(bucket.q_pos[r][inside], first + tokens - int(starts[sequence]))
            for position in range(bucket.keys.shape[1]):
                at = position if position < lengths[sequence] else 0
                assert bucket.keys[r, position] == table[sequence, at // PAGE] * PAGE + at % PAGE
            assert bucket.q_pos[r].max() < bucket.keys.shape[1]
    assert sorted(seen) == list(range(int(starts[-1])))


def test_a_decode_step_is_few_calls_and_reads_tokens_not_pages():
    lengths = [13 + i % 28 for i in range(256)]
    starts, length, table = step([1] * 256, lengths, pages=300)
    (bucket,) = plan(starts, length, table, heads=4)
    assert bucket.query is None
    assert bucket.keys.shape == (256, 40)


def test_padding_is_bounded():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 3000, 60).tolist()
    starts, length, table = step([1] * 60, lengths, pages=60 * 24)
    for bucket in plan(starts, length, table, heads=4):
        contexts = bucket.q_pos[:, 0] + 1
        assert bucket.keys.shape[1] <= max(64, 1.5 * contexts.min().item())


def _cache(sparse: bool) -> PagedCache:
    cache = object.__new__(PagedCache)
    torch.nn.Module.__init__(cache)
    cache.num_heads, cache.kv_heads, cache.dim, cache.packed, cache.dtype = 4, 2, 16, False, torch.float32
    cache.scale, cache.prefix = 0.25, "layer"
    cache.sparse = attention.SparseConfig(PAGE, 2, 0, 1) if sparse else None
    return cache


@pytest.mark.parametrize("sparse", [False, True])
def test_nan_in_pages_of_others_and_in_unwritten_rows_changes_nothing(sparse, monkeypatch):
    queries, lengths = [1, 5, 1], [300, 450, 3]
    starts, length, table = step(queries, lengths)
    buckets = plan(starts, length, table, heads=4)
    g = torch.Generator().manual_seed(0)
    q = torch.randn(7, 4, 16, generator=g)
    parts = [torch.randn(7, n, 16, generator=g) for n in (2, 2)]
    index = [torch.randn(7, 2, 16, generator=g), torch.randn(7, 1, 16, generator=g)] if sparse else []
    rows = torch.randn(64 * PAGE, 5, 16, generator=g)
    used = torch.zeros(64 * PAGE, dtype=torch.bool)
    slots = []
    for r, n in enumerate(lengths):
        keys = [int(table[r, p // PAGE]) * PAGE + p % PAGE for p in range(n)]
        used[keys] = True
        slots += keys[n - queries[r] :]
    monkeypatch.setattr(
        attention, "get_forward_context", lambda: SimpleNamespace(attn_metadata={"layer": StepPlan(torch.tensor(slots), buckets)})
    )
    outs = []
    for fill in (0.0, float("nan")):
        cache = _cache(sparse)
        filled = torch.where(used[:, None, None], rows, torch.tensor(fill))
        cache.bind_kv_cache(filled.view(64, 1, PAGE, 5 * 16))
        outs.append(cache(q, *parts, *index))
    assert torch.isfinite(outs[1]).all()
    assert torch.equal(outs[0], outs[1])

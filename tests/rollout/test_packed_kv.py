"""The NVFP4 cache: real packed rows in vLLM's pages, and every key, value and index key as `quant.kv` defines it."""

from __future__ import annotations

import pytest
import torch

from samebits.alignment_checks.reference_m3 import ReferenceM3
from samebits.quant import kv
from samebits.rollout.paged import PagedCache

from .conftest import prompt, same_bits

pytestmark = pytest.mark.slow


def test_what_is_read_back_is_what_the_format_gives(packed_engine, monkeypatch):
    written: dict[str, list] = {}
    write = PagedCache._write

    def record(self, slots, *parts):
        written.setdefault(self.prefix, []).append((slots.clone(), [p.clone() for p in parts]))
        write(self, slots, *parts)

    monkeypatch.setattr(PagedCache, "_write", record)
    packed_engine.llm.reset_prefix_cache()
    packed_engine.run([prompt(300), prompt(20, 1)], tokens=5)
    assert len(written) == 3
    for name, steps in written.items():
        cache = packed_engine.model.get_submodule(name)
        assert cache.kv_cache.dtype == torch.uint8 and cache.kv_cache.shape[1:] == (1, 128, 72 * 5)
        assert len(steps) == 5
        for slots, (k, v, *index) in steps:
            have = cache.read_back(slots[:, None])
            for x, back in zip((k, v, *index), have, strict=False):
                assert same_bits(back[:, 0].contiguous(), kv.read(kv.write(x), 128))
                assert not torch.equal(back[:, 0], x)
        assert (len(steps[0][1]) == 3) == (name != "model.layers.0.self_attn.attn")


def test_logprobs_are_the_reference_with_rounded_keys_and_values(packed_engine, engine, checkpoint):
    """Looser than with an exact cache: a last-bit difference before the rounding can become a step of it."""
    ids = prompt(640)
    (out,) = packed_engine.run([ids])
    logits, _ = ReferenceM3(checkpoint, packed_kv=True)(ids)
    want = logits.log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]]
    (exact,) = engine.run([ids])
    difference = (out.prompt_logprobs - want).abs()
    assert difference.mean() < 1e-4 and difference.max() < 5e-3
    assert (exact.prompt_logprobs - want).abs().mean() > 100 * difference.mean()

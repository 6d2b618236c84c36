"""1000 random cases each, on a GPU: an engine's attention and experts have the trainer's bits, in batches of 1, 7 and 64 and in prefill.

The seed is the clock's, and printed (`-s`, or where the test fails) with how many cases and bytes were compared; that every case was, in
every one of these batches, is counted. A case that differs is named with the command that repeats its set.
"""

import time

import pytest
import torch

from tests.support import random_attention, random_experts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize("part", [random_attention, random_experts], ids=["attention", "experts"])
def test_a_thousand_cases_have_the_same_bits(part):
    pytest.importorskip("triton")
    found = part.run(time.time_ns() % 1_000_000, 1000, part.Limits(), part.fast_ops(), "cuda")
    assert not found.wrong and found.cases == 1000
    each = part.comparisons(part.Limits())
    assert found.least == each and found.comparisons == 1000 * each

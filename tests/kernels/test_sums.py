"""Sums in fp64 give a row the same fp32 bits in every batch, order and number of threads; sums in fp32 are what they were."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits.kernels import moe as experts
from samebits.kernels.activation import SwiGLU, swiglu_oai_halves
from samebits.kernels.linear import LoRA, lora_linear
from samebits.kernels.msa import attend, block_scores
from samebits.kernels.norm import gemma_rms_norm
from samebits.kernels.sums import add_product, product, summed_in, wide


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 40), st.integers(1, 600), st.integers(1, 48), st.integers(0, 1 << 20))
def test_a_product_is_the_exact_one_rounded_once(tokens, inputs, outputs, seed):
    """`math.fsum` rounds the exact sum of exact products to fp64. What differs from it must lie at the middle between two fp32 numbers."""
    x, w = normal(tokens, inputs, seed=seed), normal(outputs, inputs, seed=seed + 1)
    with summed_in("float64"):
        have = product(x, w)
        assert torch.equal(have[-1:], product(x[-1:], w)) and torch.equal(have[:, -1:], product(x, w[-1:]))
    assert have.dtype is torch.float32
    exact = math.fsum((x[-1].double() * w[-1].double()).tolist())
    assert have[-1, -1] == torch.tensor(exact, dtype=torch.float64).float()


def test_a_sum_that_is_added_is_not_rounded_before():
    x, w = torch.tensor([[1.0, 2.0**-24]]), torch.ones(1, 2)
    out = torch.tensor([[2.0**-24]])
    with summed_in("float64"):
        assert product(x, w).item() == 1.0, "a tie, to even"
        assert add_product(out, x, w).item() == 1 + 2.0**-23, "both halves together are one unit in the last place"


def operations():
    """Name and (operation of rows of x [T, 64], T at most 33)."""
    w, a, b = normal(48, 64, seed=1), normal(1, 8, 64, seed=2), normal(1, 48, 8, seed=3)
    w13, w2 = normal(4, 64, 64, seed=4), normal(4, 64, 32, seed=5)
    router, bias = normal(4, 64, seed=6), normal(4, seed=7)

    def routed(x):
        ids, weights = experts.route_topk(product(x, router), bias, 2, 2.0)
        return experts.moe(x, w13, w2, ids, weights, SwiGLU())

    return {
        "lora_linear": lambda x: lora_linear(x, w, LoRA(a, b)),
        "lora_linear by slot": lambda x: lora_linear(x, w, LoRA(a, b), torch.zeros(len(x), dtype=torch.int64)),
        "norm": lambda x: gemma_rms_norm(x, normal(64, seed=8), 1e-6),
        "swiglu": lambda x: swiglu_oai_halves(*x[:, :62].chunk(2, -1), SwiGLU()),  # no whole vectors
        "router and experts": routed,
    }


@pytest.mark.parametrize("name", operations())
def test_a_row_of_an_operation_knows_nothing_of_its_batch(name):
    run, x = operations()[name], normal(33, 64, seed=9)
    with summed_in("float64"):
        whole = run(x)
        assert whole.dtype is torch.float32
        for at in range(len(x)):
            assert torch.equal(run(x[at : at + 1]), whole[at : at + 1]), f"row {at} alone"
        assert torch.equal(run(x[5:22]), whole[5:22])


def test_norm_and_router_round_their_sums_once():
    x, w = normal(5, 1000, seed=10), normal(1000, seed=11)
    logits, ids = normal(6, 8, seed=12), torch.arange(8).expand(6, -1)
    with summed_in("float64"):
        normed, weights = gemma_rms_norm(x, w, 1e-6), experts.route_weights(logits, ids, 2.0)
    exact = (x.double().square().sum(-1, keepdim=True) / 1000 + 1e-6).rsqrt().float()
    assert torch.equal(normed, x * exact * (1 + w))
    scores = logits.double().sigmoid().float()
    assert torch.equal(weights, scores / scores.double().sum(-1, keepdim=True).float() * 2.0)


def test_an_adapter_has_the_same_bits_with_and_without_slots():
    """The engine tells tokens' slots, the trainer has one for all."""
    x, w, lora = normal(9, 64), normal(48, 64, seed=1), LoRA(normal(2, 8, 64, seed=2), normal(2, 48, 8, seed=3))
    slots = torch.tensor([0, 1, 0, -1, 1, 1, 0, 0, -1])
    with summed_in("float64"):
        mixed = lora_linear(x, w, lora, slots)
        for slot in (0, 1):
            alone = lora_linear(x, w, LoRA(lora.a[slot : slot + 1], lora.b[slot : slot + 1]))
            assert torch.equal(mixed[slots == slot], alone[slots == slot])
        assert torch.equal(mixed[slots == -1], lora_linear(x, w)[slots == -1])


def test_attention_of_a_query_knows_nothing_of_the_length_it_is_padded_to():
    q, k, v = normal(1, 37, 4, 64), normal(1, 37, 2, 64, seed=1), normal(1, 37, 2, 64, seed=2)
    at = torch.arange(37)[None]
    with summed_in("float64"):
        whole = attend(q, k, v, at, 0.1)
        scores = block_scores(q[:, :, :2], k[:, :, 0], at, 16)
        assert whole.dtype is scores.dtype is torch.float32
        for t in (0, 1, 15, 16, 30):
            one = slice(t, t + 1)
            assert torch.equal(attend(q[:, one], k[:, : t + 1], v[:, : t + 1], at[:, one], 0.1), whole[:, one])
            alone = block_scores(q[:, one, :2], k[:, : t + 1, 0], at[:, one], 16)
            assert torch.equal(alone, scores[:, one, :, : alone.shape[-1]])


def test_fp32_is_the_default_and_comes_back():
    x, w = normal(3, 8), normal(2, 8, seed=1)
    assert wide(x).dtype is torch.float32 and torch.equal(product(x, w), F.linear(x, w))
    with pytest.raises(RuntimeError, match="inside"), summed_in("float64"):
        assert wide(x).dtype is torch.float64
        with summed_in("float32"):
            assert wide(x).dtype is torch.float32
        raise RuntimeError("inside")
    assert wide(x).dtype is torch.float32
    with pytest.raises(ValueError, match="float32 or float64, not nvfp4"), summed_in("nvfp4"):
        pass

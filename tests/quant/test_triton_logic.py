"""What of the Triton kernels can be shown without a GPU: the division by reciprocal, and the kernels in Triton's interpreter."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch

from samebits.quant import nvfp4
from tests.support.interpreter import interpreted

MIDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """fp32 fused multiply-add of fp32 arrays: the product is exact in fp64, and the sum is made exact in two parts before rounding."""
    product, c = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + c
    # Knuth's two-sum: total + error is exact. Rounding to odd makes the second rounding, to fp32, the only one that counts.
    part = total - product
    error = (product - (total - part)) + (c - part)
    bits = total.view(np.int64)
    even = (bits & 1 == 0) & (error != 0)
    toward = np.where((error > 0) == (total > 0), 1, -1)
    return np.where(even, (bits + toward).view(np.float64), total).astype(np.float32)


def quotient(x: np.ndarray, d: np.ndarray, steps: int) -> np.ndarray:
    """The kernel's quotient."""
    r = np.float32(1) / d
    q = x * r
    for _ in range(steps):
        q = fma(fma(-q, d, x), r, q)
    return q


def near_ties(x: np.ndarray, reach: int) -> tuple[np.ndarray, np.ndarray]:
    """Each x with every divisor within `reach` fp32 steps of x / (half-way point): elsewhere a code cannot be in doubt."""
    centre = (x[:, None].astype(np.float64) / np.array(MIDS)).astype(np.float32)
    d = (centre[..., None].view(np.int32) + np.arange(-reach, reach + 1, dtype=np.int32)).view(np.float32)
    return np.broadcast_to(x[:, None, None], d.shape).ravel(), d.ravel()


def codes(q: np.ndarray) -> torch.Tensor:
    return nvfp4.encode_e2m1(torch.from_numpy(q))


@pytest.mark.parametrize("fraction_bits", [7, 10])  # bf16, fp16
def test_one_step_decides_every_code_of_16_bit_inputs(fraction_bits):
    """All significands, all divisors that could tell. Powers of two change nothing: no step under- or overflows."""
    x = (1 + np.arange(2**fraction_bits) / 2**fraction_bits).astype(np.float32)
    x, d = near_ties(x, 16)
    assert torch.equal(codes(quotient(x, d, 1)), codes(x / d))
    assert not torch.equal(codes(quotient(x, d, 0)), codes(x / d))  # without a step some would be wrong


def test_two_steps_give_the_rounded_quotient_of_fp32_inputs():
    g = np.random.default_rng(0)
    x = g.uniform(1, 2, 200_000).astype(np.float32)
    d = g.uniform(1, 2, x.size).astype(np.float32)
    close_x, close_d = near_ties(x[:20_000], 3)
    edge = np.array([1, 1 + 2.0**-23, 2 - 2.0**-23, 1.5], np.float32)
    x = np.concatenate((x, close_x, np.repeat(edge, 4)))
    d = np.concatenate((d, close_d, np.tile(edge, 4)))
    assert np.array_equal(quotient(x, d, 2), x / d)
    # At the smallest divisor, 2^-99, and the largest: still no under- or overflow.
    for power in (-99, 125):
        scale = np.float32(2.0) ** np.float32(power)
        q = (x / d)[: 200_000 // 4]
        assert np.array_equal(quotient(x[: q.size] * scale, d[: q.size] * scale, 2), q)


def test_the_emulated_fma_rounds_once():
    a, b = np.float32(1 + 2.0**-12), np.float32(1 - 2.0**-12)
    assert fma(np.array([a]), np.array([b]), np.array([-1], np.float32))[0] == np.float32(-(2.0**-24))
    # 1 + 2^-24 is a tie that goes to 1 alone; with 2^-60 more it must go up, and fp64 alone would lose that.
    tiny = np.array([2.0**-30], np.float32)
    assert fma(tiny, tiny, np.array([1], np.float32))[0] == 1
    assert fma(np.array([2.0**-12 * (1 + 2.0**-23)], np.float32), np.array([2.0**-12], np.float32), np.array([1], np.float32))[0] > 1


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_kernels_in_the_interpreter_give_the_bytes_of_torch():
    assert interpreted("tests.quant.interpret_triton") == "same bytes"

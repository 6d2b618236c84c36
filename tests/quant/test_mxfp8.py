"""Golden vectors of every rule in `quant.mxfp8`, the E8M0 faults of other packers among them, then properties."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits.quant import mxfp8
from samebits.quant.nvfp4 import NonFiniteWeight


def block(*values: float) -> torch.Tensor:
    return torch.tensor(list(values) + [0.0] * (32 - len(values)))


def exponent(amax: float) -> int:
    return int(mxfp8.exponent_byte(torch.tensor(amax))) - mxfp8.BIAS


@pytest.mark.parametrize(
    ("amax", "expected"),
    [
        (448.0, 0),  # frexp alone says 1
        (224.0, -1),
        (448.0 * 2**20, 20),
        (957.0, 2),  # rounding down gives 1, and 957/2 saturates
        (4.8046875, -6),  # rounding to nearest gives -7, and the value clips
        (150.0, -1),  # byte 126
        (449.0, 1),
        (math.nextafter(448.0, 0), 0),
        (1e-45, -127),  # the smallest fp32: clamped
        (3e38, 120),
    ],
)
def test_exponent_is_rounded_up(amax, expected):
    assert exponent(amax) == expected


@pytest.mark.parametrize("power", range(-20, 21))
def test_exponent_around_every_power_of_two(power):
    exact = torch.tensor(448.0 * 2.0**power)
    up, down = torch.nextafter(exact, torch.tensor(math.inf)), torch.nextafter(exact, torch.tensor(0.0))
    assert [exponent(float(x)) for x in (down, exact, up)] == [power, power, power + 1]


def test_largest_values_do_not_clip():
    assert mxfp8.dequantize(mxfp8.quantize(block(957.0)))[0].item() == 960.0  # not 896
    kept = mxfp8.dequantize(mxfp8.quantize(block(4.8046875)))[0].item()
    assert kept == pytest.approx(4.8046875, rel=1 / 16) and kept == 5.0  # 307.5 rounds to 320 = 5 * 2^6


def test_golden_block():
    # Amax 896 has exponent 1; values are halved and rounded to E4M3: 448, 1 (0x38), -1.0625 (tie, to 1.0), 1.1875 (tie, to 1.25).
    t = mxfp8.quantize(block(896.0, 2.0, -2.125, 2.375))
    assert t.exponents.tolist() == [128]
    assert t.codes[:5].tolist() == [0x7E, 0x38, 0xB8, 0x3A, 0x00]
    assert mxfp8.dequantize(t)[:4].tolist() == [896.0, 2.0, -2.0, 2.5]


def test_zero_block_has_byte_zero():
    t = mxfp8.quantize(torch.cat((block(), block(448.0))))
    assert t.exponents.tolist() == [0, 127] and not t.codes[:32].any()
    assert not mxfp8.dequantize(t)[:32].any()


def test_tiny_block_is_scaled_by_the_smallest_power():
    t = mxfp8.quantize(block(2.0**-127))
    assert t.exponents.tolist() == [0] and t.codes[0].item() == 0x38
    assert mxfp8.dequantize(t)[0].item() == 2.0**-127


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_weights_raise_with_the_name(bad):
    with pytest.raises(NonFiniteWeight, match="q_proj: holds NaN or infinity"):
        mxfp8.quantize(block(1.0, bad), "q_proj")


@pytest.mark.parametrize("shape", [(), (48,), (4, 33)])
def test_last_dimension_must_be_a_multiple_of_32(shape):
    with pytest.raises(ValueError, match="multiple of 32"):
        mxfp8.quantize(torch.ones(shape))


@st.composite
def tensors(draw) -> torch.Tensor:
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    w = torch.randn(4, 3, 32, generator=g)
    size = torch.exp2(torch.randn(4, 3, 1, generator=g) * draw(st.floats(0.0, 20.0)))
    return (w * size * (torch.rand(4, 3, 1, generator=g) > 0.2)).flatten(1)


@settings(max_examples=40, deadline=None)
@given(tensors())
def test_quantizing_dequantized_values_again_keeps_the_values(w):
    values = mxfp8.dequantize(mxfp8.quantize(w))
    assert torch.equal(mxfp8.dequantize(mxfp8.quantize(values)), values)


@settings(max_examples=40, deadline=None)
@given(tensors())
def test_error_is_at_most_half_a_step_and_nothing_clips(w):
    t = mxfp8.quantize(w)
    s = mxfp8.scale_of(t.exponents).repeat_interleave(32, -1)
    assert (w.abs() <= 448 * s).all()
    # E4M3 has three fraction bits; below 2^-6 its steps are 2^-9.
    step = torch.exp2(torch.floor(torch.log2((w / s).abs().clamp_min(2.0**-6))) - 3) * s
    assert ((mxfp8.dequantize(t) - w).abs() <= step / 2).all()


@settings(max_examples=20, deadline=None)
@given(tensors(), st.permutations(range(4)))
def test_permuting_rows_permutes_bytes(w, order):
    a, b = mxfp8.quantize(w), mxfp8.quantize(w[list(order)])
    assert torch.equal(a.codes[list(order)], b.codes) and torch.equal(a.exponents[list(order)], b.exponents)

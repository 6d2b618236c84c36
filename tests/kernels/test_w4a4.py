"""W4A4: exact sums in any order, single operations elsewhere, and so results that neither batch nor library moves."""

import math
from fractions import Fraction

import pytest
import torch

from samebits.kernels import w4a4
from samebits.kernels.activation import SwiGLU, swiglu_oai_halves
from samebits.kernels.moe import W4A4
from samebits.quant import activations, nvfp4
from samebits.quant.blocks import e4m3_values
from samebits.quant.nvfp4 import NVFP4Tensor
from tests.support.w4a4_cases import EXPERTS, HIDDEN, STATIC, Layer, tokens


def exact(t: NVFP4Tensor, row: int) -> list[Fraction]:
    values = nvfp4.decode_e2m1(nvfp4.unpack(t.codes[row]))
    scales = e4m3_values(t.block_scales[row]).repeat_interleave(16)
    return [Fraction(v.item()) * Fraction(s.item()) for v, s in zip(values, scales, strict=True)]


def extreme(rows: int, k: int, seed: int) -> NVFP4Tensor:
    """Codes and scales at the ends of their ranges: the largest, and the smallest subnormal, beside anything."""
    g = torch.Generator().manual_seed(seed)
    scales = torch.randint(0, 0x7F, (rows, k // 16), generator=g).to(torch.uint8)
    kind = torch.rand(scales.shape, generator=g)
    scales[kind < 0.4], scales[kind > 0.8] = 0x7E, 0x01
    codes = torch.randint(0, 256, (rows, k // 2), generator=g).to(torch.uint8)
    codes[0] = 0x77  # all of them 6
    return NVFP4Tensor(codes, scales, torch.ones(()))


def test_a_part_of_the_sum_is_exact_in_fp64_and_in_any_order():
    x, w = extreme(3, w4a4.EXACT, 0), extreme(4, w4a4.EXACT, 1)
    left, right = w4a4.unscaled(x), w4a4.unscaled(w)
    have = left @ right.t()
    for i in range(3):
        for j in range(4):
            assert Fraction(have[i, j].item()) == sum(a * b for a, b in zip(exact(x, i), exact(w, j), strict=True))
    for seed in range(3):
        order = torch.randperm(w4a4.EXACT, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(left[:, order] @ right[:, order].t(), have)
    # The bound of the docstring: all codes and scales the largest, in units of the smallest product.
    assert 16 * 36 * 448**2 * (w4a4.EXACT // 16) / 2.0**-20 < 2**53 < 16 * 36 * 448**2 * (w4a4.EXACT // 8) / 2.0**-20


@pytest.mark.parametrize("static", [False, True])
def test_a_product_is_the_exact_sum_rounded_once_times_the_global_scales(static):
    x = torch.randn(5, 1072, generator=torch.Generator().manual_seed(2)) * 3
    weight = nvfp4.quantize(torch.randn(7, 1072, generator=torch.Generator().manual_seed(3)))
    scale = torch.tensor(5.0 / 2688) if static else None
    t = activations.quantize_static(x, scale) if static else activations.quantize_per_token(x)
    have = w4a4.block_product(x, weight, scale)
    for i in range(5):
        g = t.global_scale if static else t.global_scale[i]
        for j in range(7):
            total = float(sum(a * b for a, b in zip(exact(t, i), exact(weight, j), strict=True)))
            assert have[i, j] == torch.tensor(total, dtype=torch.float64).float() * (g * weight.global_scale)
    # What the engines' own emulations multiply, which rounds values first.
    seen = activations.dequantize_static(t) if static else nvfp4.dequantize(t)
    want = seen.double() @ nvfp4.dequantize(weight).double().t()
    assert (have.double() - want).norm() < 1e-6 * want.norm()


@pytest.mark.parametrize("scales", [W4A4(), STATIC], ids=["per token", "static"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_token_has_its_bits_alone_and_in_any_batch(scales, dtype):
    layer, batch = Layer(), tokens(23, dtype)
    whole = layer.out(batch, scales, "cpu")
    assert whole.isfinite().all() and 2 not in batch[1]
    order = torch.randperm(23)
    assert torch.equal(layer.out(tuple(t[order] for t in batch), scales, "cpu"), whole[order])
    for rows in (slice(0, 1), slice(22, 23), slice(4, 9)):
        assert torch.equal(layer.out(tuple(t[rows] for t in batch), scales, "cpu"), whole[rows])


def test_sums_of_adapters_do_not_depend_on_how_they_are_cut(monkeypatch):
    g = torch.Generator().manual_seed(4)
    x, w = torch.randn(9, 77, generator=g).bfloat16(), torch.randn(13, 77, generator=g).bfloat16()
    have = w4a4.tree_linear(x, w)
    assert torch.allclose(have.double(), x.double() @ w.double().t(), rtol=1e-6, atol=1e-6)
    for held in (1, 77 * 5, 77 * 13 * 4):
        monkeypatch.setattr(w4a4, "_HELD", held)
        assert torch.equal(w4a4.tree_linear(x, w), have)
    assert torch.equal(w4a4.tree_linear(x[3:4], w[:, :]), have[3:4])


def test_the_exponential_is_right_to_a_few_units_in_the_last_place():
    x = torch.cat((torch.linspace(-699, 699, 4001, dtype=torch.float64), torch.linspace(-1, 1, 4001, dtype=torch.float64)))
    have = w4a4.exp(x)
    for a, b in zip(x.tolist(), have.tolist(), strict=True):
        assert abs(b - math.exp(a)) < 2e-15 * math.exp(a)
    ends = w4a4.exp(torch.tensor([0.0, -1e9, 1e9, math.nan], dtype=torch.float64)).tolist()
    assert ends[0] == 1 and 0 < ends[1] < 1e-300 < 1e300 < ends[2] < math.inf and math.isnan(ends[3])


def test_swiglu_and_its_gradient_are_those_of_the_others():
    g = torch.Generator().manual_seed(5)
    gate, up = (torch.randn(50, 8, generator=g) * 6 for _ in range(2))
    results = []
    for call in (swiglu_oai_halves, w4a4.swiglu):
        a, b = gate.clone().requires_grad_(), up.clone().requires_grad_()
        out = call(a, b, SwiGLU(), torch.float32)
        out.square().sum().backward()
        results.append((out.detach(), a.grad, b.grad))
    for want, have in zip(*results, strict=True):
        torch.testing.assert_close(have, want, rtol=2e-6, atol=2e-6)


def test_gradients_of_an_adapter_are_those_of_plain_products():
    g = torch.Generator().manual_seed(6)
    x, w = torch.randn(6, 32, generator=g).requires_grad_(), torch.randn(5, 32, generator=g).requires_grad_()
    (w4a4._TreeLinear.apply(x, w).square().sum()).backward()
    have, x.grad = (x.grad, w.grad), None
    w.grad = None
    (x @ w.t()).square().sum().backward()
    for a, b in zip(have, (x.grad, w.grad), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_other_weights_are_refused():
    with pytest.raises(ValueError, match="W4A4 multiplies NVFP4 weights, got Tensor"):
        w4a4.block_product(torch.zeros(1, 16), torch.zeros(3, 16), None)


def test_the_cases_are_those_that_are_said():
    x, ids, _, slots = tokens(40)
    assert HIDDEN > w4a4.EXACT and set(ids.unique().tolist()) == set(range(EXPERTS)) - {2} and set(slots.tolist()) == {-1, 0, 1}
    assert x.float().abs().amax(1).min() > 1

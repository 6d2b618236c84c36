"""W4A4 activations: a token is independent of its neighbours, gradients pass, NaN stays visible. The bits are in test_golden.py."""

import pytest
import torch

from samebits.quant import activations, nvfp4

SCALE = torch.tensor(0.004)


def tokens(*shape: int, dtype=torch.bfloat16) -> torch.Tensor:
    return (torch.randn(*shape, 64, generator=torch.Generator().manual_seed(3)) * 4).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_token_alone_has_the_same_bits(dtype):
    x = tokens(2, 5, dtype=dtype)
    static, token = activations.quantize_static(x, SCALE), activations.quantize_per_token(x)
    assert token.global_scale.shape == (2, 5) and token.codes.shape == (2, 5, 32) and token.block_scales.shape == (2, 5, 4)
    for i, j in ((0, 0), (1, 3)):
        for have, alone in ((static, activations.quantize_static(x[i, j], SCALE)), (token, activations.quantize_per_token(x[i, j]))):
            assert torch.equal(have.codes[i, j], alone.codes) and torch.equal(have.block_scales[i, j], alone.block_scales)
        assert token.global_scale[i, j] == activations.quantize_per_token(x[i, j]).global_scale


def test_round_trip_is_quantize_and_dequantize_with_a_straight_gradient():
    for scale in (None, SCALE):
        x = tokens(3).requires_grad_()
        y = activations.round_trip(x, scale)
        if scale is None:
            want = nvfp4.dequantize(activations.quantize_per_token(x), torch.bfloat16)
        else:
            want = activations.dequantize_static(activations.quantize_static(x, scale), torch.bfloat16)
        assert y.dtype == torch.bfloat16 and torch.equal(y, want) and not torch.equal(y, x)
        (y * 2).sum().backward()
        assert (x.grad == 2).all()


def test_values_are_near():
    x = tokens(8, dtype=torch.float32)
    for y in (activations.round_trip(x), activations.round_trip(x, activations.input_scale(x.abs().amax()))):
        assert ((y - x).norm() / x.norm()).item() < 0.12


def test_nan_stays_in_its_block_or_token():
    x = tokens(3, dtype=torch.float32)
    x[1, 20] = float("nan")
    static = activations.round_trip(x, SCALE)
    assert static[1, 16:32].isnan().all() and not static[1, :16].isnan().any() and not static[0].isnan().any()
    token = activations.round_trip(x)
    assert token[1].isnan().all() and not token[[0, 2]].isnan().any()


def test_zero_tokens_are_zero():
    x = torch.zeros(2, 32)
    t = activations.quantize_per_token(x)
    assert not t.codes.any() and not t.block_scales.any() and not t.global_scale.any()
    assert not activations.round_trip(x).any() and not activations.round_trip(x, SCALE).any()


def test_a_last_dimension_of_another_size_raises():
    for f in (activations.quantize_per_token, lambda x: activations.quantize_static(x, SCALE)):
        with pytest.raises(ValueError, match="multiple of 16"):
            f(torch.ones(2, 24))

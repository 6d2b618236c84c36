"""Gemma RMS norm against its formula in fp64, and where it rounds."""

import pytest
import torch

from samebits.kernels.norm import gemma_rms_norm, gemma_rms_norm_add

G = torch.Generator().manual_seed(0)
X, RESIDUAL, WEIGHT = torch.randn(5, 96, generator=G), torch.randn(5, 96, generator=G), torch.randn(96, generator=G) * 0.2


def reference(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (1 + WEIGHT.double())


def test_formula_with_zero_centred_weight():
    torch.testing.assert_close(gemma_rms_norm(X, WEIGHT, 1e-6).double(), reference(X), rtol=1e-6, atol=1e-7)
    unit = gemma_rms_norm(X, torch.zeros(96), 0.0)
    torch.testing.assert_close(unit.square().mean(-1), torch.ones(5))


def test_eps_is_inside_the_root():
    assert gemma_rms_norm(torch.full((1, 96), 1e-3), torch.zeros(96), 1e-6)[0, 0].item() == pytest.approx(0.5**0.5, rel=1e-5)
    assert not gemma_rms_norm(torch.zeros(1, 96), WEIGHT, 1e-6).any()


def test_bf16_is_computed_in_fp32_and_rounded_once():
    x, w = X.bfloat16(), WEIGHT.bfloat16()
    out = gemma_rms_norm(x, w, 1e-6)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, gemma_rms_norm(x.float(), w.float(), 1e-6).bfloat16())


def test_norm_per_head_is_the_norm_of_each_row():
    x = X.view(5, 2, 48)
    together = gemma_rms_norm(x, WEIGHT[:48], 1e-6)
    assert torch.equal(together[3, 1], gemma_rms_norm(x[3, 1], WEIGHT[:48], 1e-6))


def test_fused_add_takes_the_norm_before_the_sum_is_rounded():
    x, residual = X.bfloat16(), RESIDUAL.bfloat16()
    out, total = gemma_rms_norm_add(x, residual, WEIGHT, 1e-6)
    exact = x.float() + residual.float()
    assert torch.equal(total, exact.bfloat16()) and total.dtype == out.dtype == torch.bfloat16
    assert torch.equal(out, gemma_rms_norm(exact, WEIGHT, 1e-6).bfloat16())
    assert not torch.equal(out, gemma_rms_norm(total, WEIGHT, 1e-6))  # the other order gives other bits


def test_gradients_are_the_formula_s():
    x64, w64 = X.double().requires_grad_(), WEIGHT.double().requires_grad_()
    (x64 / (x64.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + w64)).square().sum().backward()
    x, w = X.clone().requires_grad_(), WEIGHT.clone().requires_grad_()
    gemma_rms_norm(x, w, 1e-6).square().sum().backward()
    torch.testing.assert_close(x.grad.double(), x64.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(w.grad.double(), w64.grad, rtol=1e-4, atol=1e-5)

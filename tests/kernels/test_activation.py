"""swiglu-oai against hand-computed values and fp64; its clamps are not symmetric."""

import math

import torch

from samebits.kernels.activation import SwiGLU, swiglu_oai


def one(gate: float, up: float, params: SwiGLU) -> float:
    return swiglu_oai(torch.tensor([gate, up]), params).item()


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-6)


def test_golden_values():
    p = SwiGLU()
    assert (p.alpha, p.beta, p.limit) == (1.702, 1.0, 7.0)
    assert close(one(1.0, 2.0, p), 3 * sigmoid(1.702))
    assert one(0.0, 5.0, p) == 0.0
    assert close(one(2.0, -1.0, p), 0.0)  # up + 1 is zero


def test_gate_is_clamped_above_only_and_up_on_both_sides():
    p = SwiGLU()
    assert one(100.0, 0.5, p) == one(7.0, 0.5, p)
    assert close(one(-8.0, 0.5, p), -8.0 * sigmoid(-8 * 1.702) * 1.5) and one(-8.0, 0.5, p) != one(-7.0, 0.5, p)
    assert one(1.0, 100.0, p) == one(1.0, 7.0, p) and one(1.0, -100.0, p) == one(1.0, -7.0, p)


def test_constants_are_used():
    assert close(one(1.0, 2.0, SwiGLU(alpha=0.5, beta=3.0)), 5 * sigmoid(0.5))
    assert close(one(9.0, 0.0, SwiGLU(limit=2.0)), 2 * sigmoid(2 * 1.702))


def test_halves_are_not_interleaved():
    # Distinct values: gate 1 to 4, up 10 to 40 under a wide limit.
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0, 10.0, 20.0, 30.0, 40.0]])
    out = swiglu_oai(x, SwiGLU(limit=100.0))
    g, u = x.double().chunk(2, -1)
    torch.testing.assert_close(out.double(), g * torch.sigmoid(1.702 * g) * (u + 1), rtol=1e-6, atol=0)


def test_bf16_input_gives_fp32():
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    out = swiglu_oai(x, SwiGLU())
    assert out.dtype == torch.float32 and torch.equal(out, swiglu_oai(x.float(), SwiGLU()))


def test_no_gradient_beyond_a_clamp():
    x = torch.tensor([8.0, 1.0, -8.0, 1.0], requires_grad=True)  # gates 8, 1; ups -8, 1
    swiglu_oai(x, SwiGLU()).sum().backward()
    assert x.grad[0] == 0 and x.grad[2] == 0 and x.grad[1] != 0 and x.grad[3] != 0


def test_gradient_is_that_of_the_formula():
    x = torch.randn(50, 12, generator=torch.Generator().manual_seed(1)) * 4  # some gates and ups beyond a clamp
    x32, x64 = x.clone().requires_grad_(), x.double().requires_grad_()
    weight = torch.arange(1.0, 7.0)
    (swiglu_oai(x32, SwiGLU(beta=0.5)) * weight).sum().backward()
    g, u = x64.chunk(2, -1)
    g, u = g.clamp(max=7), u.clamp(-7, 7)
    (g * torch.sigmoid(1.702 * g) * (u + 0.5) * weight).sum().backward()
    assert (x > 7).any() and (x < -7).any()
    torch.testing.assert_close(x32.grad.double(), x64.grad, rtol=1e-4, atol=1e-5)

"""Rotary embedding against vLLM's own cache and arithmetic, byte for byte where both are fp32."""

import pytest
import torch

from samebits.kernels.rope import apply_rope, rope_table

THETA, ROTARY, DIM = 5_000_000.0, 64, 128


@pytest.fixture(scope="module")
def vllm_rope():
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    with set_current_vllm_config(VllmConfig()):
        yield RotaryEmbedding(DIM, ROTARY, 8192, THETA, True, torch.float32)


def test_table_has_the_bytes_of_vllm_s_cache(vllm_rope):
    cos, sin = rope_table(8192, ROTARY, THETA)
    want_cos, want_sin = vllm_rope.cos_sin_cache.chunk(2, dim=-1)
    assert torch.equal(cos, want_cos) and torch.equal(sin, want_sin)


def test_rotation_is_vllm_s(vllm_rope):
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(7, 4, DIM, generator=g), torch.randn(7, 2, DIM, generator=g)
    positions = torch.tensor([0, 1, 5, 127, 128, 2049, 8191])
    want_q, want_k = vllm_rope.forward_native(positions, q.flatten(1).clone(), k.flatten(1).clone())
    cos, sin = (t[positions] for t in rope_table(8192, ROTARY, THETA))
    torch.testing.assert_close(apply_rope(q, cos, sin).flatten(1), want_q, rtol=0, atol=1e-6)
    torch.testing.assert_close(apply_rope(k, cos, sin).flatten(1), want_k, rtol=0, atol=1e-6)


def test_halves_are_rotated_and_the_rest_passes():
    x = torch.zeros(1, 1, DIM)
    x[0, 0, 3], x[0, 0, 32 + 5], x[0, 0, 64:] = 1.0, 1.0, torch.arange(64.0)
    angle = torch.arange(1.0, 33.0)[None] / 10
    out = apply_rope(x, angle.cos(), angle.sin())[0, 0]
    assert out[3].item() == pytest.approx(torch.cos(torch.tensor(0.4)).item())  # pair (3, 35): x cos
    assert out[35].item() == pytest.approx(torch.sin(torch.tensor(0.4)).item())  # and x sin
    assert out[5].item() == pytest.approx(-torch.sin(torch.tensor(0.6)).item())  # pair (5, 37): -y sin
    assert out[37].item() == pytest.approx(torch.cos(torch.tensor(0.6)).item())
    assert torch.equal(out[64:], torch.arange(64.0))
    assert out[:64].count_nonzero() == 4


def test_scores_depend_on_the_distance_alone():
    g = torch.Generator().manual_seed(1)
    q, k = torch.randn(1, 1, DIM, generator=g), torch.randn(1, 1, DIM, generator=g)
    cos, sin = rope_table(200, ROTARY, 10000.0)

    def score(i: int, j: int) -> float:
        return (apply_rope(q, cos[[i]], sin[[i]]) * apply_rope(k, cos[[j]], sin[[j]])).sum().item()

    assert score(10, 3) == pytest.approx(score(150, 143), rel=1e-4)
    assert score(10, 3) != pytest.approx(score(10, 4), rel=1e-3)


def test_bf16_is_rotated_in_fp32_and_rounded_once():
    x = torch.randn(3, 2, DIM, generator=torch.Generator().manual_seed(2)).bfloat16()
    cos, sin = rope_table(3, ROTARY, THETA)
    out = apply_rope(x, cos, sin)
    assert out.dtype == torch.bfloat16 and torch.equal(out, apply_rope(x.float(), cos, sin).bfloat16())


def test_gradient_is_rotated_back():
    x = torch.randn(5, 2, DIM, generator=torch.Generator().manual_seed(3)).requires_grad_()
    grad = torch.randn(5, 2, DIM, generator=torch.Generator().manual_seed(4))
    cos, sin = rope_table(5, ROTARY, THETA)
    apply_rope(x, cos, sin).backward(grad)
    # A rotation is orthogonal: its transpose undoes it.
    torch.testing.assert_close(apply_rope(x.grad, cos, sin), grad, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(x.grad, grad, atol=1e-2)

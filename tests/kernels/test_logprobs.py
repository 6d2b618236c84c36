"""Log-probabilities of tokens: the hand-computed temperature case, forbidden tokens, gradients against fp64."""

import pytest
import torch

from samebits.kernels.logprobs import token_logprob_rows

G = torch.Generator().manual_seed(0)
LOGITS = torch.randn(6, 50, generator=G) * 3
IDS = torch.randint(50, (6, 2), generator=G)
TEMPERATURE = torch.linspace(0.5, 2.0, 6)


def test_temperature_divides_the_logits():
    out, entropy = token_logprob_rows(torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([[0]]), torch.tensor([0.5]))
    assert out.item() == pytest.approx(-0.1429, abs=1e-4) and entropy is None
    assert token_logprob_rows(torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([[0]]))[0].item() == pytest.approx(-0.4076, abs=1e-4)


def test_values_are_log_softmax_s_bit_for_bit():
    want = (LOGITS / TEMPERATURE[:, None]).log_softmax(-1).gather(-1, IDS)
    assert torch.equal(token_logprob_rows(LOGITS, IDS, TEMPERATURE)[0], want)
    assert torch.equal(token_logprob_rows(LOGITS, IDS)[0], LOGITS.log_softmax(-1).gather(-1, IDS))


def test_a_token_that_cannot_come_adds_nothing_to_the_entropy():
    logits = LOGITS.clone()
    logits[:, 7] = float("-inf")
    without = torch.cat((logits[:, :7], logits[:, 8:]), 1)
    have, want = (token_logprob_rows(x, IDS[:, :1] * 0, None, True)[1] for x in (logits, without))
    torch.testing.assert_close(have, want)


def test_gradients_of_values_and_entropy():
    grads = []
    for dtype in (torch.float32, torch.float64):
        x = LOGITS.clone().to(dtype).requires_grad_()
        out, entropy = token_logprob_rows(x, IDS, TEMPERATURE.to(dtype), True)
        (out.sum() + 2 * entropy.sum()).backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads[0].double(), grads[1], rtol=1e-4, atol=1e-6)

"""The head on a GPU: chunks that change no bit, forward and backward, and fp64."""

import pytest
import torch

from samebits.kernels.linear import frozen_linear
from samebits.kernels.logprobs import token_logprob_rows
from samebits.trainer.head import TILE, token_logprobs
from tests.support.row_checks import close, same

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
ROWS, HIDDEN, VOCABULARY = 300, 512, 9000


def test_chunks_change_no_bit():
    g = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN, device="cuda", generator=g).bfloat16()
    weight = (torch.randn(VOCABULARY, HIDDEN, device="cuda", generator=g) / 8).bfloat16()
    labels = torch.randint(VOCABULARY, (ROWS,), device="cuda", generator=g)
    temperature = torch.linspace(0.6, 1.4, ROWS, device="cuda")
    results = []
    for elements in (None, VOCABULARY * (TILE + 70), VOCABULARY * 7):
        leaf = hidden.clone().requires_grad_()
        logprobs, entropy = token_logprobs(leaf, weight, labels, temperature, True, elements)
        (logprobs * labels.sin() + entropy * 0.3).sum().backward()
        results.append((logprobs, entropy, leaf.grad))
    for part in results[1:]:
        for name, have, want in zip(("log-probability", "entropy", "gradient"), part, results[0], strict=True):
            same(name, have, want)
    leaf = hidden.double().requires_grad_()
    table = (leaf @ weight.double().T / temperature.double()[:, None]).log_softmax(-1)
    want, want_entropy = table.gather(-1, labels[:, None])[:, 0], -(table.exp() * table).sum(-1)
    (want * labels.double().sin() + want_entropy * 0.3).sum().backward()
    logprobs, entropy, grad = results[0]
    close("log-probability", logprobs, want, 1e-6)
    close("entropy", entropy, want_entropy, 1e-5)
    close("gradient", grad, leaf.grad, 3e-3)


def test_first_rows_of_a_head_have_the_bits_of_the_whole():
    """Rows without a token are left out; how inputs are split into sums goes by the rows of the whole head."""
    g = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(n, 1024, generator=g).bfloat16().cuda() for n in (40, 1100))
    labels, temperature = torch.arange(40).cuda(), torch.ones(40).cuda()
    part, _ = token_logprobs(hidden, weight[:1000], labels, temperature, head_rows=1100)
    logits = frozen_linear(hidden, weight)[:, :1000].contiguous()
    assert torch.equal(part, token_logprob_rows(logits, labels[:, None], temperature, False)[0].squeeze(-1))

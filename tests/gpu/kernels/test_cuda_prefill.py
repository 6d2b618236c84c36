"""The CUDA prefill kernel on a Hopper GPU: the bits of the Triton kernel, whatever lengths, formats and choices, and that it is used."""

import pytest
import torch

from samebits.kernels import cuda_module, cuda_prefill, msa_ops
from samebits.kernels.msa_ops import Packed
from tests.support import cuda_prefill_gpu as support

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"),
]
RUN = support.OnGPU()


@pytest.fixture(scope="module", autouse=True)
def bindings():
    pytest.importorskip("triton")
    if reason := cuda_module.absence(torch.device("cuda")):
        pytest.skip(reason)


@pytest.mark.parametrize("form", support.FORMS)
def test_bits_of_the_triton_kernel(form):
    """Ragged and whole sequences, tails of 127 to 129 tokens, shuffled tables, NaN where nothing was written, more than 16 x 128 tokens."""
    names = []
    for name, asked in support.cases(form, "cuda", dry=False):
        want, have = RUN.reference(asked), RUN.ours(asked)
        assert want[0].isfinite().all(), name
        assert support.difference(have, want) is None, name
        names.append(name)
    assert len(names) >= 7


@pytest.mark.parametrize("form", support.FORMS)
@pytest.mark.parametrize("alike", [1, 64])
def test_chunks_of_a_long_context(form, alike):
    """Far beyond 16 blocks, where tiles walk many blocks."""
    for new in (2048, 300):
        asked = support.long_case(form, new, alike, "cuda")
        assert support.difference(RUN.ours(asked), RUN.reference(asked)) is None, new


@pytest.mark.parametrize("form", support.FORMS)
def test_random_lengths(form):
    """Requests of any length, some tokens of each."""
    g = torch.Generator().manual_seed(7)
    for seed in range(6):
        total = torch.randint(1, 4000, (5,), generator=g).tolist()
        new = [int(torch.randint(1, min(n, 90) + 1, (), generator=g)) for n in total]
        case = support.make(new, total, "bf16", seed=seed, device="cuda")
        cache = case.packed if form == "packed" else case.cache
        asked = support.Asked(case.q, cache, support.choices(case.batch, 4, 1 + 15 * (seed % 2), seed), case.batch, case.packed, 0.1)
        assert support.difference(RUN.ours(asked), RUN.reference(asked)) is None, (new, total)


@pytest.mark.parametrize(("heads", "groups", "topk"), [(6, 2, 16), (5, 1, 8), (16, 1, 4), (8, 8, 1)])
def test_other_heads_and_counts(heads, groups, topk):
    case = support.make(*support.TAILS, "bf16", groups=groups, heads=heads, device="cuda")
    chosen = support.choices(case.batch, groups, topk=topk)
    for cache in (case.cache, case.packed):
        asked = support.Asked(case.q, cache, chosen, case.batch, case.packed, 0.1)
        assert support.difference(RUN.ours(asked), RUN.reference(asked)) is None


def test_replay_in_a_graph():
    """Captured once, replayed with other queries and choices."""
    asked = next(support.cases("bf16", "cuda", dry=False))[1]
    RUN.ours(asked)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = RUN.ours(asked)
    for seed in range(3):
        asked.q.normal_()
        asked.chosen.copy_(support.choices(asked.batch, 4, seed=seed + 5))
        graph.replay()
        assert support.difference(captured, RUN.reference(asked)) is None


@pytest.mark.parametrize("form", support.FORMS)
def test_it_is_what_attention_runs(form, monkeypatch):
    asked = support.long_case(form, 2048, 1, "cuda")
    called, attend = [], cuda_prefill.attend
    monkeypatch.setattr(cuda_prefill, "attend", lambda *args: called.append(1) or attend(*args))
    have = msa_ops.sparse_attention(asked.q, asked.cache, asked.chosen, asked.batch, asked.scale)
    assert called and torch.equal(have.view(torch.int16), RUN.reference(asked)[0].view(torch.int16))


def test_gradients_have_the_bits_of_triton_forward(monkeypatch):
    """They are of its output and its sums."""
    whole = [4200, 300, 129]
    case = support.make(whole, whole, "bf16", device="cuda")
    chosen, upstream = support.choices(case.batch, 4), torch.randn_like(case.q)

    def gradients() -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in (case.q, case.packed.keys, case.packed.values)]
        packed = Packed(leaves[1], leaves[2], case.packed.start, case.packed.blocks)
        msa_ops.sparse_attention(leaves[0], packed, chosen, case.batch, 0.1).backward(upstream)
        return [x.grad for x in leaves]

    assert cuda_prefill.wanted(case.q, case.packed, chosen, case.batch)
    have = gradients()
    monkeypatch.setattr(cuda_prefill, "wanted", lambda *args: False)
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(have, gradients(), strict=True))

"""The CUDA prefill kernel on a Hopper GPU: the bits of the Triton kernel, whatever the lengths, formats, choices and variants."""

import pytest
import torch

from tests.support import cuda_prefill_gpu as support

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"),
]
RUN = support.OnGPU()


@pytest.fixture(scope="module", autouse=True)
def bindings():
    pytest.importorskip("triton")
    pytest.importorskip("cuda.bindings")


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
def test_random_lengths(form):
    """Requests of any length, some tokens of each."""
    g = torch.Generator().manual_seed(7)
    for seed in range(6):
        total = torch.randint(1, 4000, (5,), generator=g).tolist()
        new = [int(torch.randint(1, min(n, 90) + 1, (), generator=g)) for n in total]
        case = support.make(new, total, "nvfp4" if form == "packed" else form, seed=seed, device="cuda")
        cache = case.packed if form == "packed" else case.cache
        asked = support.Asked(case.q, cache, support.choices(case.batch, 4, 1 + 15 * (seed % 2), seed), case.batch, case.packed, 0.1)
        assert support.difference(RUN.ours(asked), RUN.reference(asked)) is None, (new, total)


@pytest.mark.parametrize(("form", "variant"), [(form, v) for form, variants in support.VARIANTS.items() for v in variants])
def test_variants_have_the_same_bits(form, variant):
    asked = next(support.cases(form, "cuda", dry=False))[1]
    assert support.difference(RUN.ours(asked, variant), RUN.reference(asked)) is None


@pytest.mark.parametrize(("heads", "groups", "topk"), [(6, 2, 16), (5, 1, 8), (16, 1, 4), (8, 8, 1)])
def test_other_heads_and_counts(heads, groups, topk):
    case = support.make(*support.TAILS, "bf16", groups=groups, heads=heads, device="cuda")
    chosen = support.choices(case.batch, groups, topk=topk)
    for cache in (case.cache, case.packed):
        asked = support.Asked(case.q, cache, chosen, case.batch, case.packed, 0.1)
        assert support.difference(RUN.ours(asked), RUN.reference(asked)) is None


def test_replay_in_a_graph():
    """Captured once, replayed with other queries and choices."""
    asked = next(support.cases("nvfp4", "cuda", dry=False))[1]
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

"""Decode attention in one launch on a GPU: the bits of the Triton kernels, in every variant, batch and place."""

import pytest
import torch

from samebits.kernels import cuda_attend, msa_ops
from samebits.kernels.cuda_attend import Variant
from samebits.kernels.msa import SparseConfig
from samebits.kernels.msa_ops import Batch, Pages
from tests.support.cuda_attend_cases import with_any_scales
from tests.support.msa_cases import make, with_weights_that_vanish
from tests.support.msa_gpu import same

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]
SCALE = msa_ops.default_scale()
VARIANTS = [None, *(Variant(unit) for unit in cuda_attend.UNITS), Variant(2, wide=True), Variant(4, wide=True)]
VARIANTS += [Variant(16, 4, False, True), Variant(4, 8, True, True)]


@pytest.fixture(scope="module", autouse=True)
def kernels():
    pytest.importorskip("triton")
    pytest.importorskip("cuda.bindings")
    from samebits.kernels import triton_msa

    return triton_msa


def both(kernels, q, cache, chosen, batch, variant=None, rounded=False, scale=SCALE):
    """Results of the CUDA and the Triton kernels: output and log of the sum."""
    have = cuda_attend.attend(q, cache, chosen, batch, scale, lse=True, rounded=rounded, variant=variant)
    return have, kernels.attend(q, cache, chosen, batch, scale, lse=True, rounded=rounded)


def equal(kernels, *args, **options) -> bool:
    have, want = both(kernels, *args, **options)
    return all(same(a, b) for a, b in zip(have, want, strict=True))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("requests", [1, 7, 32, 64])
def test_batches_of_decode(kernels, requests, variant):
    """Shuffled tables, unused pages full of NaN, tails of 127, 128, 129 and any other number of keys, past 16 blocks and not."""
    tails = (127, 128, 129, 1, 64)
    total = [(17 + 5 * r) % 40 * 128 + tails[r % 5] for r in range(requests)]
    case = make([1] * requests, total, "nvfp4", device="cuda", seed=requests)
    chosen = msa_ops.index_topk(case.index_q, case.index, case.batch, SparseConfig())
    (have, lse), (want, sums) = both(kernels, case.q, case.cache, chosen, case.batch, variant)
    assert same(have, want) and same(lse, sums) and have.isfinite().all()


@pytest.mark.parametrize("heads", [1, 5, 8, 16])
def test_heads_tokens_and_padding(kernels, heads):
    case = make([1, 8, 2, 5], [2175, 2177, 129, 5003], "nvfp4", groups=2, heads=2 * heads, device="cuda", seed=heads)
    case.batch.position[[3, 15]] = -1
    chosen = msa_ops.index_topk(case.index_q, case.index, case.batch, SparseConfig())
    for variant in VARIANTS:
        assert equal(kernels, case.q, case.cache, chosen, case.batch, variant), variant


@pytest.mark.parametrize("variant", VARIANTS[:6])
def test_rounded_reads_and_any_scales(kernels, variant):
    case = make([1, 2, 1], [2500, 129, 700], "nvfp4", device="cuda", seed=11)
    scales = case.cache.data.cpu()
    with_any_scales(scales)
    case.cache.data.copy_(scales)
    chosen = msa_ops.index_topk(case.index_q, case.index, case.batch, SparseConfig())
    for rounded in (False, True):
        assert equal(kernels, case.q, case.cache, chosen, case.batch, variant, rounded=rounded)


@pytest.mark.parametrize("variant", VARIANTS[:6])
def test_weights_that_vanish(kernels, variant):
    total = [2500, 129, 700]
    case, _ = with_weights_that_vanish(make([1, 1, 1], total, "nvfp4", device="cuda", seed=12), total)
    chosen = msa_ops.index_topk(case.index_q, case.index, case.batch, SparseConfig())
    assert equal(kernels, case.q, case.cache, chosen, case.batch, variant, scale=0.5)


def test_company_does_not_matter():
    case = make([1] * 40, [300 + 97 * r for r in range(40)], "nvfp4", device="cuda", seed=2)
    chosen = msa_ops.index_topk(case.index_q, case.index, case.batch, SparseConfig())
    want = cuda_attend.attend(case.q, case.cache, chosen, case.batch, SCALE)[0]
    for r in (0, 11, 39):
        start = torch.tensor([0, 1], dtype=torch.int32, device="cuda")
        batch = Batch(start, start[:1], case.batch.position[r : r + 1], 1)
        alone = Pages(case.cache.data, case.cache.table[r : r + 1])
        assert same(cuda_attend.attend(case.q[r : r + 1], alone, chosen[r : r + 1], batch, SCALE)[0], want[r : r + 1])


@pytest.mark.parametrize("variant", VARIANTS[1:6])
def test_replay_in_a_graph(kernels, variant):
    """Captured once between its neighbours of a decode step, replayed with other queries and lengths, 50 times in a row."""
    case = make([1] * 33, [2500 + 31 * r for r in range(33)], "nvfp4", device="cuda", seed=7)

    def step(by):
        chosen = msa_ops.index_topk(case.index_q, case.index, case.batch, SparseConfig())
        return chosen, by(case.q, case.cache, chosen, case.batch, SCALE)[0]

    def ours(*args):
        return cuda_attend.attend(*args, variant=variant)

    step(ours)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(ours)
    for _ in range(5):
        case.q.normal_()
        case.index_q.normal_()
        case.batch.position.sub_(3)
        for _ in range(10):
            graph.replay()
        want = step(kernels.attend)
        assert torch.equal(captured[0], want[0]) and same(captured[1], want[1])

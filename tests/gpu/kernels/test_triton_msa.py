"""The MSA kernels on a GPU: choices of the reference, attention within rounding of it, and results that do not depend on company."""

import pytest
import torch

from samebits.kernels import msa, msa_ops
from samebits.kernels.msa import SparseConfig
from samebits.kernels.msa_ops import Batch, Pages, batch_of
from samebits.quant import kv
from tests.support.msa_cases import FORMATS, make, vanishing, with_weights_that_vanish
from tests.support.msa_gpu import distance, same

pytest_plugins = ("tests.support.msa_gpu",)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
CONFIG = SparseConfig()
SCALE = msa_ops.default_scale()
RAGGED = ([1, 8, 2, 5, 1, 3, 1, 1, 4], [1, 2048, 127, 128, 129, 2049, 2177, 5003, 3968])


@pytest.fixture(scope="module", autouse=True)
def kernels():
    pytest.importorskip("triton")
    from samebits.kernels import triton_msa

    return triton_msa


def part(case, rows: list[int]):
    """Some of a case's tokens as requests of one token each: batch, queries, and the pages of their requests."""
    at = torch.tensor(rows, device="cuda")
    request = case.batch.request[at].long()
    batch = Batch(
        torch.arange(len(rows) + 1, dtype=torch.int32, device="cuda"),
        torch.arange(len(rows), dtype=torch.int32, device="cuda"),
        case.batch.position[at],
        1,
    )
    return batch, at, request


@pytest.mark.parametrize("form", FORMATS)
def test_choice_equals_the_reference_ties_included(form, reference):
    case = make(*RAGGED, form, integers=True, device="cuda")
    want = reference(lambda: msa_ops.index_topk(case.index_q, case.index, case.batch, CONFIG))
    for keys in (case.index, case.packed_index):
        assert torch.equal(msa_ops.index_topk(case.index_q, keys, case.batch, CONFIG), want)
    assert (want[:, :, -1] >= 0).any() and (want[0, 0] == torch.tensor([0] + [-1] * 15, device="cuda")).all()


@pytest.mark.parametrize(
    "config",
    [SparseConfig(init_blocks=1), SparseConfig(local_blocks=3, init_blocks=2), SparseConfig(topk=32), SparseConfig(local_blocks=0)],
)
def test_other_forced_blocks_and_counts(config, reference):
    case = make(*RAGGED, "nvfp4", integers=True, device="cuda", seed=1)
    want = reference(lambda: msa_ops.index_topk(case.index_q, case.index, case.batch, config))
    assert torch.equal(msa_ops.index_topk(case.index_q, case.index, case.batch, config), want)


@pytest.mark.parametrize("total", [131072, 131071, 130944, 130945])
def test_choice_over_a_long_context(total, reference):
    case = make([2], [total], "nvfp4", groups=4, heads=64, integers=True, device="cuda", seed=total)
    want = reference(lambda: msa_ops.index_topk(case.index_q, case.index, case.batch, CONFIG))
    assert torch.equal(msa_ops.index_topk(case.index_q, case.index, case.batch, CONFIG), want)
    out = msa_ops.sparse_attention(case.q, case.cache, want, case.batch, SCALE)
    exact = reference(lambda: msa_ops.sparse_attention(case.q.float(), case.cache, want, case.batch, SCALE))
    assert distance(out, exact) < 6e-3


@pytest.mark.parametrize("form", FORMATS)
def test_random_scores_choose_what_fp64_chooses(form, kernels, reference):
    """A chosen block may score below one that is not chosen by rounding only."""
    case = make(*RAGGED, form, device="cuda", seed=2)
    scores = kernels.index_scores(case.index_q, case.index, case.batch)
    chosen = msa_ops.index_topk(case.index_q, case.index, case.batch, CONFIG)
    want = reference(lambda: msa_ops.index_topk(case.index_q, case.index, case.batch, CONFIG))
    different = 0
    for t in range(len(case.q)):
        position, start = int(case.batch.position[t]), int(case.packed_index.start[case.batch.request[t]])
        k = case.packed_index.keys[start : start + position + 1].double()
        own = position // 128
        exact = torch.nn.functional.pad(case.index_q[t].double() @ k.T, (0, (own + 1) * 128 - position - 1), value=-1e300)
        exact = exact.view(-1, own + 1, 128).amax(-1)
        assert (scores[t, :, : own + 1] - exact).abs().max() < 1e-4 * exact.abs().max()
        for g in range(4):
            ids = chosen[t, g][chosen[t, g] >= 0].long()
            assert own in ids and len(ids) == min(16, own + 1) and (ids.diff() > 0).all()
            rest = torch.ones(own + 1, dtype=torch.bool, device="cuda").index_fill(0, ids, False)
            ranked = ids[ids != own]
            if rest.any() and len(ranked):
                assert exact[g, ranked].min() > exact[g, rest].max() - 1e-4 * exact.abs().max()
            different += int(not torch.equal(chosen[t, g], want[t, g]))
    assert different <= 2


@pytest.mark.parametrize("form", FORMATS)
def test_attention_is_within_rounding_of_fp32(form, reference):
    case = make(*RAGGED, form, device="cuda", seed=3)
    chosen = msa_ops.index_topk(case.index_q, case.index, case.batch, CONFIG)
    want = reference(lambda: msa_ops.sparse_attention(case.q.float(), case.cache, chosen, case.batch, SCALE))
    have = msa_ops.sparse_attention(case.q, case.cache, chosen, case.batch, SCALE)
    # An output is one bf16 rounding (2^-9 at most) of sums whose weights were rounded to bf16.
    assert distance(have, want) < 6e-3 and have.isfinite().all()
    first = case.cache.data.view(torch.uint8)
    assert (first == 0xFF).any() or (first == 0x7F).any()  # there were NaN to stumble over


def test_padding_gives_no_choice_and_zeros():
    case = make([3, 2], [700, 300], "nvfp4", device="cuda")
    position = case.batch.position.clone()
    position[[1, 4]] = -1
    batch = case.batch._replace(position=position)
    chosen = msa_ops.index_topk(case.index_q, case.index, batch, CONFIG)
    assert (chosen[[1, 4]] == -1).all() and (chosen[[0, 2, 3], :, 0] >= 0).all()
    out = msa_ops.sparse_attention(case.q, case.cache, chosen, batch, SCALE)
    assert not out[[1, 4]].any() and out[[0, 2, 3]].flatten(1).any(1).all()
    # A request that is all padding may have a table that says nothing.
    position[3] = -1
    table = case.cache.table.clone()
    table[1] = 2**30
    chosen = msa_ops.index_topk(case.index_q, Pages(case.index.data, table), batch, CONFIG)
    assert same(msa_ops.sparse_attention(case.q, Pages(case.cache.data, table), chosen, batch, SCALE)[:3], out[:3])
    assert (chosen[3:] == -1).all()


def test_decode_prefill_and_training_have_the_same_bits():
    """1000 queries at random places of ragged sequences: as one training batch over packed keys, as chunked prefill over pages, and in
    decode, alone and in batches of 7 and 64. bf16 training reads the values that NVFP4 pages hold.
    """
    total = [4200, 1, 300, 2049, 128, 129, 127, 3000]
    case = make(total, total, "nvfp4", device="cuda", seed=4)
    chosen = msa_ops.index_topk(case.index_q, case.packed_index, case.batch, CONFIG)
    out = msa_ops.sparse_attention(case.q, case.packed, chosen, case.batch, SCALE)
    paged = msa_ops.index_topk(case.index_q, case.index, case.batch, CONFIG)
    assert torch.equal(paged, chosen)
    assert same(msa_ops.sparse_attention(case.q, case.cache, chosen, case.batch, SCALE), out)

    # Chunked prefill: the last third of every request.
    new = [-(-n // 3) for n in total]
    batch = batch_of(new, total, "cuda")
    ends = torch.tensor(total).cumsum(0).tolist()
    rows = torch.cat([torch.arange(e - n, e, device="cuda") for n, e in zip(new, ends, strict=True)])
    assert torch.equal(msa_ops.index_topk(case.index_q[rows], case.index, batch, CONFIG), chosen[rows])
    assert same(msa_ops.sparse_attention(case.q[rows], case.cache, chosen[rows], batch, SCALE), out[rows])

    pick = torch.randperm(sum(total), generator=torch.Generator().manual_seed(0))[:1000].tolist()
    for size in (1, 7, 64):
        for first in range(0, 1000, size):
            batch, at, request = part(case, pick[first : first + size])
            table = case.index.table[request]
            assert torch.equal(msa_ops.index_topk(case.index_q[at], Pages(case.index.data, table), batch, CONFIG), chosen[at])
            have = msa_ops.sparse_attention(case.q[at], Pages(case.cache.data, table), chosen[at], batch, SCALE)
            assert same(have, out[at]), (size, first)


@pytest.mark.parametrize("form", ["bf16", "fp8"])
def test_other_pages_have_the_bits_of_packed_keys_too(form):
    case = make(*RAGGED, form, device="cuda", seed=5)
    chosen = msa_ops.index_topk(case.index_q, case.packed_index, case.batch, CONFIG)
    assert torch.equal(msa_ops.index_topk(case.index_q, case.index, case.batch, CONFIG), chosen)
    want = msa_ops.sparse_attention(case.q, case.packed, chosen, case.batch, SCALE)
    assert same(msa_ops.sparse_attention(case.q, case.cache, chosen, case.batch, SCALE), want)


def test_rounded_reads_have_the_bits_of_the_rounded_values(kernels):
    """NVFP4 pages read as E4M3 against packed bf16 of what the reference reads so, with scales that saturate: scores and attention."""
    total = [2500, 129, 700]
    case = make(total, total, "nvfp4", device="cuda", seed=11)
    for data in (case.cache.data, case.index.data):
        scales = data.view(*data.shape[:-2], -1)[..., 8192:]
        scales[torch.rand(scales.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(0)) < 0.01] = 0x7E
    slots = [msa_ops._slots(case.cache, r, n) for r, n in enumerate(total)]
    k, v = kv.read_pages(case.cache.data, torch.cat(slots), 128, torch.bfloat16, rounded=True)
    packed = case.packed._replace(keys=k, values=v)
    slots = [msa_ops._slots(case.index, r, n) for r, n in enumerate(total)]
    index = kv.read_index_pages(case.index.data, torch.cat(slots), 128, torch.bfloat16, rounded=True)
    assert (k != case.packed.keys).any() and k.float().abs().max() == 448
    valid = torch.arange(case.index.table.shape[1], device="cuda") <= (case.batch.position // 128)[:, None]
    scores = [
        kernels.index_scores(case.index_q, keys, case.batch, rounded=True)[..., : max(total) // 128 + 1]
        for keys in (case.index, case.packed_index._replace(keys=index))
    ]
    seen = valid[:, None, : scores[0].shape[-1]]
    assert same(*(s.masked_fill(~seen, 0.0) for s in scores))
    chosen = msa_ops.index_topk(case.index_q, case.index, case.batch, CONFIG, rounded=True)
    have = msa_ops.sparse_attention(case.q, case.cache, chosen, case.batch, SCALE, rounded=True)
    assert same(have, msa_ops.sparse_attention(case.q, packed, chosen, case.batch, SCALE)) and have.isfinite().all()


@pytest.mark.parametrize("rounded", [False, True])
def test_pages_have_the_bits_of_packed_keys_where_weights_vanish(rounded):
    """Outputs near the least number that fp32 has: a format's factor must not decide what is left of a product."""
    total = [2500, 129, 700]
    case, held = with_weights_that_vanish(make(total, total, "nvfp4", device="cuda", seed=12), total)
    chosen = msa_ops.index_topk(case.index_q, case.index, case.batch, CONFIG)
    want = msa_ops.sparse_attention(case.q, held[rounded], chosen, case.batch, 0.5)
    assert vanishing(want) > 1000
    assert same(msa_ops.sparse_attention(case.q, case.cache, chosen, case.batch, 0.5, rounded=rounded), want)
    rows = torch.tensor([2499, 2628, 3328], device="cuda")  # the last token of each, in programs of their own for parts of it
    start = torch.arange(4, dtype=torch.int32, device="cuda")
    batch = Batch(start, start[:3], case.batch.position[rows], 1)
    assert same(msa_ops.sparse_attention(case.q[rows], case.cache, chosen[rows], batch, 0.5, rounded=rounded), want[rows])


def test_scores_do_not_depend_on_the_number_of_programs(kernels):
    case = make([1, 8], [9000, 4000], "nvfp4", device="cuda", seed=6)
    own = case.batch.position // 128
    valid = torch.arange(case.index.table.shape[1], device="cuda") <= own[:, None]
    results = [
        kernels.index_scores(case.index_q, case.index, case.batch, programs).masked_fill(~valid[:, None], 0.0) for programs in (1, 7, 5000)
    ]
    assert same(results[0], results[1]) and same(results[0], results[2])


def test_replay_in_a_graph():
    """Captured once, replayed with other queries and lengths."""
    case = make([1] * 6, [2500, 129, 4000, 2049, 700, 3001], "nvfp4", device="cuda", seed=7)

    def step():
        chosen = msa_ops.index_topk(case.index_q, case.index, case.batch, CONFIG)
        return chosen, msa_ops.sparse_attention(case.q, case.cache, chosen, case.batch, SCALE)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        case.q.normal_()
        case.index_q.normal_()
        case.batch.position.sub_(3)
        graph.replay()
        want = step()
        assert torch.equal(captured[0], want[0]) and same(captured[1], want[1])


def test_the_reference_agrees_with_itself_on_cpu(reference):
    """The reference that the other tests lean on is `kernels.msa` itself."""
    case = make([2], [600], "bf16", device="cuda", seed=8)
    chosen = reference(lambda: msa_ops.index_topk(case.index_q, case.index, case.batch, CONFIG))
    k = case.packed_index.keys.float()
    want = msa.select_blocks(case.index_q[None].cpu(), k[None].cpu(), case.batch.position[None].long().cpu(), CONFIG)
    assert torch.equal(chosen.cpu(), want[0])

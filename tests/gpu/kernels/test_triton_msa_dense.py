"""Dense attention on a GPU: within rounding of fp64, and bits that no company, number of programs or kind of cache changes."""

import pytest
import torch

from samebits.kernels import msa_ops
from samebits.kernels.msa_ops import Batch, Packed, Pages, batch_of
from samebits.quant import kv
from tests.support.msa_cases import FORMATS, make, one_buffer, vanishing, with_weights_that_vanish
from tests.support.msa_gpu import distance, same

pytest_plugins = ("tests.support.msa_gpu",)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
SCALE = msa_ops.default_scale()
# Ends of tiles (64), blocks (128) and chunks (512), and one before and after; one context of many chunks.
TOTAL = [1, 63, 64, 65, 127, 128, 129, 511, 512, 513, 1024, 1025, 5003]


@pytest.fixture(scope="module", autouse=True)
def kernels():
    pytest.importorskip("triton")
    from samebits.kernels import triton_msa_dense_ops

    return triton_msa_dense_ops


def last(case, total, new):
    """The last `new` tokens of each request as a batch, and their rows among all."""
    counts = [min(new, n) for n in total]
    ends = torch.tensor(total).cumsum(0).tolist()
    rows = torch.cat([torch.arange(e - n, e, device="cuda") for n, e in zip(counts, ends, strict=True)])
    return batch_of(counts, total, "cuda"), rows


def exact(case, t):
    """fp64 attention [H, 128] of one token over packed keys."""
    position, start = int(case.batch.position[t]), int(case.packed.start[case.batch.request[t]])
    k, v = (x[start : start + position + 1].double() for x in (case.packed.keys, case.packed.values))
    q = case.q[t].double().view(k.shape[1], -1, 128)
    weights = (torch.einsum("ghd,kgd->ghk", q, k) * SCALE).softmax(-1)
    return torch.einsum("ghk,kgd->ghd", weights, v).flatten(0, 1)


@pytest.mark.parametrize("form", FORMATS)
def test_decode_prefill_and_training_have_the_same_bits_and_those_of_fp64_within_rounding(form):
    """All tokens of ragged requests as one training batch; as prefill from pages of which unused parts are NaN and tables are shuffled; the
    last of them in chunks of 130, 4, 3 and 2 tokens; and 500 at random places in decode, alone and in batches of 7 and 64."""
    case = make(TOTAL, TOTAL, form, device="cuda", seed=1)
    out = msa_ops.dense_attention(case.q, case.packed, case.batch, SCALE)
    assert out.isfinite().all()
    first = case.cache.data.view(torch.uint8)
    assert (first == 0xFF).any() or (first == 0x7F).any()  # there were NaN to stumble over
    g = torch.Generator().manual_seed(0)
    pick = torch.randperm(sum(TOTAL), generator=g)[:500].tolist()
    # One bf16 rounding (2^-9 at most) of sums whose weights were rounded to bf16.
    assert distance(torch.stack([out[t] for t in pick[:100]]), torch.stack([exact(case, t) for t in pick[:100]])) < 4e-3

    assert same(msa_ops.dense_attention(case.q, case.cache, case.batch, SCALE), out)
    _, data, _ = one_buffer(case.cache.data, case.index.data)
    assert not data.is_contiguous() and same(msa_ops.dense_attention(case.q, Pages(data, case.cache.table), case.batch, SCALE), out)
    for new in (130, 4, 3, 2):
        batch, rows = last(case, TOTAL, new)
        assert same(msa_ops.dense_attention(case.q[rows], case.cache, batch, SCALE), out[rows]), new
    for size, count in ((1, 20), (7, 140), (64, 500)):
        for at in range(0, count, size):
            rows = torch.tensor(pick[at : at + size], device="cuda")
            n, request = len(rows), case.batch.request[rows].long()
            each = torch.arange(n + 1, dtype=torch.int32, device="cuda")
            pages = Pages(case.cache.data, case.cache.table[request])
            have = msa_ops.dense_attention(case.q[rows], pages, Batch(each, each[:n], case.batch.position[rows], 1), SCALE)
            assert same(have, out[rows]), (size, at)


def test_rounded_reads_have_the_bits_of_the_rounded_values():
    """NVFP4 pages read as E4M3, in prefill and decode, against packed bf16 of what the reference reads so, with scales that saturate."""
    total = [2500, 129, 700]
    case = make(total, total, "nvfp4", device="cuda", seed=11)
    scales = case.cache.data.view(*case.cache.data.shape[:-2], -1)[..., 8192:]
    scales[torch.rand(scales.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(0)) < 0.01] = 0x7E
    slots = torch.cat([msa_ops._slots(case.cache, r, n) for r, n in enumerate(total)])
    k, v = kv.read_pages(case.cache.data, slots, 128, torch.bfloat16, rounded=True)
    assert (k != case.packed.keys).any() and k.float().abs().max() == 448
    want = msa_ops.dense_attention(case.q, case.packed._replace(keys=k, values=v), case.batch, SCALE)
    assert same(msa_ops.dense_attention(case.q, case.cache, case.batch, SCALE, rounded=True), want) and want.isfinite().all()
    for new in (1, 3):
        batch, rows = last(case, total, new)
        assert same(msa_ops.dense_attention(case.q[rows], case.cache, batch, SCALE, rounded=True), want[rows]), new


@pytest.mark.parametrize("rounded", [False, True])
def test_pages_have_the_bits_of_packed_keys_where_weights_vanish(rounded):
    """Outputs near the least number that fp32 has, in prefill and decode: a format's factor must not decide what is left of a product."""
    total = [2500, 129, 700]
    case, held = with_weights_that_vanish(make(total, total, "nvfp4", device="cuda", seed=12), total)
    want = msa_ops.dense_attention(case.q, held[rounded], case.batch, 0.5)
    assert vanishing(want) > 1000
    assert same(msa_ops.dense_attention(case.q, case.cache, case.batch, 0.5, rounded=rounded), want)
    for new in (1, 3):
        batch, rows = last(case, total, new)
        assert same(msa_ops.dense_attention(case.q[rows], case.cache, batch, 0.5, rounded=rounded), want[rows]), new


def test_decode_beside_prefill_and_padding(kernels):
    """One batch of requests with 1, 0, 4, 5 and 200 tokens, some of them padding, and padding behind all requests."""
    total, new = [900, 300, 1500, 700, 600], [1, 0, 4, 5, 200]
    case = make(total, total, "nvfp4", device="cuda", seed=2)
    want = msa_ops.dense_attention(case.q, case.packed, case.batch, SCALE)
    batch, ends = batch_of(new, total, "cuda"), torch.tensor(total).cumsum(0).tolist()
    rows = torch.cat([torch.arange(e - n, e, device="cuda") for n, e in zip(new, ends, strict=True)])
    padding = torch.tensor([2, 7, 50], device="cuda")
    position = torch.cat((batch.position.index_fill(0, padding, -1), batch.position.new_full((3,), -1)))
    request = torch.cat((batch.request, batch.request.new_full((3,), 4)))
    q = torch.cat((case.q[rows], case.q[:3]))
    out = msa_ops.dense_attention(q, case.cache, batch._replace(position=position, request=request), SCALE)
    real = position >= 0
    assert same(out[:-3][real[:-3]], want[rows][real[:-3]]) and not out[~real].any()


def test_results_do_not_depend_on_how_work_is_cut(kernels, monkeypatch):
    """Query tokens of a program, stages, and requests of a launch."""
    total = [1300, 700, 64]
    case = make(total, total, "bf16", device="cuda", seed=3)
    want = msa_ops.dense_attention(case.q, case.packed, case.batch, SCALE)
    for tokens, stages in ((4, 2), (8, 2)):
        monkeypatch.setattr(kernels, "TOKENS", tokens)
        monkeypatch.setattr(kernels, "STAGES", {0: stages, 1: 1, 2: 1})
        assert same(msa_ops.dense_attention(case.q, case.packed, case.batch, SCALE), want)
    batch, rows = last(case, total, 1)
    monkeypatch.setattr(kernels, "PARTS", 1)  # a request a launch
    assert same(msa_ops.dense_attention(case.q[rows], case.cache, batch, SCALE), want[rows])


def test_fewer_heads_a_group_and_strided_inputs():
    total = [700, 30]
    case = make(total, total, "bf16", groups=2, heads=6, device="cuda", seed=4)
    out = msa_ops.dense_attention(case.q, case.packed, case.batch, SCALE)
    assert distance(torch.stack([out[t] for t in (0, 5, 699, 729)]), torch.stack([exact(case, t) for t in (0, 5, 699, 729)])) < 4e-3
    both = torch.cat((case.packed.keys, case.packed.values), 1)  # as a fused projection gives them
    views = case.packed._replace(keys=both[:, :2], values=both[:, 2:])
    q = torch.cat((case.q, case.q), 1)[:, :6]
    assert not q.is_contiguous() and same(msa_ops.dense_attention(q, views, case.batch, SCALE), out)


def test_replay_in_a_graph():
    """Captured once, replayed with other queries, lengths and tables."""
    total = [2500, 129, 4000, 512]
    case = make([1] * 4, total, "nvfp4", device="cuda", seed=5)

    def step():
        return msa_ops.dense_attention(case.q, case.cache, case.batch, SCALE)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        case.q.normal_()
        case.batch.position.sub_(3)
        case.cache.table[0, :8] = case.cache.table[0, :8].flip(0)
        graph.replay()
        assert same(captured, step())


def gradients(case, grad, dtype):
    q, k, v = (t.to(dtype).detach().requires_grad_() for t in (case.q, case.packed.keys, case.packed.values))
    out = msa_ops.dense_attention(q, case.packed._replace(keys=k, values=v), case.batch, SCALE)
    return out, torch.autograd.grad(out, (q, k, v), grad.to(dtype))


@pytest.mark.parametrize("total", [[1], [127, 128, 129, 1, 64], [1500, 700, 3], [4100]])
def test_gradients_are_those_of_fp32_within_bf16_rounding(total, reference):
    case = make(total, total, "nvfp4", device="cuda", seed=sum(total))
    grad = torch.randn(case.q.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).bfloat16()
    out, have = gradients(case, grad, torch.bfloat16)
    assert same(out, msa_ops.dense_attention(case.q, case.packed, case.batch, SCALE))
    want_out, want = reference(lambda: gradients(case, grad, torch.float32))
    assert distance(out, want_out) < 4e-3
    for name, a, b in zip("qkv", have, want, strict=True):
        if b.any():
            assert distance(a, b) < 1e-2, name
        else:  # a token that sees itself alone has no gradient of its query and key
            assert a.float().abs().max() < 1e-2 * grad.abs().max(), name


def test_gradients_have_the_same_bits_every_time_and_in_every_company():
    total = [1800, 50, 1025]
    case = make(total, total, "bf16", device="cuda", seed=9)
    grad = torch.randn_like(case.q)
    first, second = (gradients(case, grad, torch.bfloat16)[1] for _ in range(2))
    assert all(same(a, b) for a, b in zip(first, second, strict=True))
    rows = slice(1800, 1850)
    q, k, v = (x[rows].clone().requires_grad_() for x in (case.q, case.packed.keys, case.packed.values))
    batch = batch_of([50], device="cuda")
    out = msa_ops.dense_attention(q, Packed(k, v, batch.start[:1], 1), batch, SCALE)
    alone = torch.autograd.grad(out, (q, k, v), grad[rows])
    assert all(same(a, b[rows]) for a, b in zip(alone, first, strict=True))


def test_gradients_of_a_part_are_refused():
    case = make([5], [300], "bf16", device="cuda")
    with pytest.raises(ValueError, match="every token"):
        msa_ops.dense_attention(case.q.clone().requires_grad_(), case.packed, case.batch, SCALE)

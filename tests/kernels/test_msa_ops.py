"""`kernels.msa_ops` on the CPU: pages of all formats against packed keys, batches, `kv_insert`, and the argument errors."""

import pytest
import torch

from samebits.kernels import msa, msa_ops
from samebits.kernels.linear import LoRA, lora_linear
from samebits.kernels.linear_tiles import pack_linear
from samebits.kernels.msa import SparseConfig
from samebits.kernels.msa_ops import Pages, batch_of
from samebits.kernels.norm import gemma_rms_norm
from samebits.kernels.rope import apply_rope
from samebits.quant import kv, mxfp8
from tests.support.msa_cases import FORMATS, insert_case, make, one_buffer, without_indexer

CONFIG = SparseConfig(topk=4)


def test_batch_of_lists_positions_and_requests():
    batch = batch_of([2, 0, 3], [5, 4, 3])
    assert batch.start.tolist() == [0, 2, 2, 5] and batch.request.tolist() == [0, 0, 2, 2, 2]
    assert batch.position.tolist() == [3, 4, 0, 1, 2] and batch.most == 3
    assert batch_of([3]).position.tolist() == [0, 1, 2]


@pytest.mark.parametrize("form", FORMATS)
def test_pages_give_what_packed_keys_give(form):
    case = make([1, 3, 2], [129, 900, 127], form, groups=2, heads=4)
    chosen = msa_ops.index_topk(case.index_q, case.index, case.batch, CONFIG)
    assert torch.equal(chosen, msa_ops.index_topk(case.index_q, case.packed_index, case.batch, CONFIG))
    out = msa_ops.sparse_attention(case.q.float(), case.cache, chosen, case.batch, 0.1)
    assert torch.equal(out, msa_ops.sparse_attention(case.q.float(), case.packed, chosen, case.batch, 0.1))
    assert out.isfinite().all()
    assert (case.cache.data == 0xFF).any() if form == "nvfp4" else case.cache.data.isnan().any()  # there were NaN to stumble over


def test_a_request_equals_the_padded_reference():
    case = make([3], [700], "bf16", groups=2, heads=4)
    chosen = msa_ops.index_topk(case.index_q, case.index, case.batch, CONFIG)
    position = case.batch.position[None].long()
    k, v = case.packed.keys.float()[None], case.packed.values.float()[None]
    assert torch.equal(chosen, msa.select_blocks(case.index_q[None], case.packed_index.keys[None], position, CONFIG)[0])
    out = msa_ops.sparse_attention(case.q.float(), case.cache, chosen, case.batch, 0.1)
    assert torch.equal(out, msa.attend(case.q.float()[None], k, v, position, 0.1, chosen[None])[0])


@pytest.mark.parametrize("form", FORMATS)
def test_dense_attention_over_pages_and_packed_keys_is_the_padded_reference(form):
    case = make([1, 3, 2], [129, 300, 127], form, groups=2, heads=4)
    out = msa_ops.dense_attention(case.q.float(), case.cache, case.batch, 0.1)
    assert torch.equal(out, msa_ops.dense_attention(case.q.float(), case.packed, case.batch, 0.1))
    keys, values = (x[129:429].float()[None] for x in (case.packed.keys, case.packed.values))
    position = torch.tensor([[297, 298, 299]])
    assert torch.equal(out[1:4], msa.attend(case.q[None, 1:4].float(), keys, values, position, 0.1)[0])


def test_padding_chooses_nothing_and_gives_zeros():
    case = make([2, 1], [300, 200], "nvfp4", groups=2, heads=4)
    batch = case.batch._replace(position=torch.tensor([298, -1, -1], dtype=torch.int32))
    chosen = msa_ops.index_topk(case.index_q, case.index, batch, CONFIG)
    out = msa_ops.sparse_attention(case.q, case.cache, chosen, batch, 0.1)
    assert (chosen[1:] == -1).all() and (chosen[0, :, 0] >= 0).all()
    assert not out[1:].any() and out[0].any()


def test_choice_goes_to_the_tensor_that_is_given():
    case = make([2], [300], "bf16", groups=2, heads=4)
    out = torch.full((2, 2, 4), 7, dtype=torch.int32)
    assert msa_ops.index_topk(case.index_q, case.index, case.batch, CONFIG, out) is out
    assert torch.equal(out, msa_ops.index_topk(case.index_q, case.index, case.batch, CONFIG))


def test_gradients_reach_packed_keys():
    case = make([130, 20], [130, 20], "bf16", groups=2, heads=4)
    chosen = msa_ops.index_topk(case.index_q, case.packed_index, case.batch, CONFIG)
    q, k, v = (t.float().requires_grad_() for t in (case.q, case.packed.keys, case.packed.values))
    msa_ops.sparse_attention(q, case.packed._replace(keys=k, values=v), chosen, case.batch, 0.1).square().sum().backward()
    assert all(t.grad.flatten(1).any(1).all() for t in (k, v)) and q.grad[1:130].flatten(1).any(1).all()


@pytest.mark.parametrize("form", FORMATS)
def test_insert_norms_rotates_and_writes(form):
    args, (cache, index_cache) = insert_case(form, tokens=5, heads=4, groups=2, exact=False)
    q, k, v, index_q, index_k, norms, table, position, slots = args
    blank = cache.clone()
    q_out, index_q_out = msa_ops.kv_insert(*args, cache, index_cache)
    cos, sin = (t[position.long()] for t in table)

    def turned(x, weight):
        return apply_rope(gemma_rms_norm(x, weight, 1e-6), cos, sin)

    assert torch.equal(q_out, turned(q, norms.q)) and torch.equal(index_q_out, turned(index_q, norms.index_q))
    written = slots >= 0
    assert written.sum() == 4
    k, v, index_k = turned(k, norms.k)[written], v[written], turned(index_k[:, None], norms.index_k)[written, 0]
    at = slots[written]
    if form == "nvfp4":
        have_k, have_v = kv.read_pages(cache, at, 128)
        assert torch.equal(have_k, kv.round_trip(k.float())) and torch.equal(have_v, kv.round_trip(v.float()))
        assert torch.equal(kv.read_index_pages(index_cache, at, 128), kv.round_trip(index_k.float()))
    else:
        rows = cache.view(torch.uint8).transpose(1, 2).reshape(-1, 2, 256 * cache.dtype.itemsize)[at].view(cache.dtype)
        assert torch.equal(rows.float(), torch.cat((k, v), -1).to(cache.dtype).float())
        index_rows = index_cache.view(torch.uint8).reshape(-1, 128 * cache.dtype.itemsize)[at].view(cache.dtype)
        assert torch.equal(index_rows.float(), index_k.to(cache.dtype).float())
    untouched = torch.ones(cache.shape[0] * 128, dtype=torch.bool).index_fill(0, at, False)
    page = int((untouched.view(-1, 128).all(1)).nonzero()[0]) if untouched.view(-1, 128).all(1).any() else None
    if page is not None:
        assert torch.equal(cache.view(torch.uint8)[page], blank.view(torch.uint8)[page])


@pytest.mark.parametrize("form", FORMATS)
def test_pages_of_one_buffer_are_written_and_read_as_pages_of_their_own(form):
    """Main KV and index keys of a page beside one another: pages lie further apart than they are long."""
    args, caches = insert_case(form, tokens=9, heads=4, groups=2)
    buffer, *views = one_buffer(*caches)
    before = buffer.view(torch.uint8).clone()
    want, have = msa_ops.kv_insert(*args, *caches), msa_ops.kv_insert(*args, *views)
    assert all(torch.equal(a, b) for a, b in zip(want, have, strict=True))
    assert torch.equal(buffer.view(torch.uint8), one_buffer(*caches)[0].view(torch.uint8)) and not torch.equal(
        buffer.view(torch.uint8), before
    )
    case = make([2, 1], [400, 129], form, groups=2, heads=4)
    _, cache, index = one_buffer(case.cache.data, case.index.data)
    assert not cache.is_contiguous() and not index.is_contiguous()
    chosen = msa_ops.index_topk(case.index_q, case.index, case.batch, CONFIG)
    assert torch.equal(msa_ops.index_topk(case.index_q, Pages(index, case.index.table), case.batch, CONFIG), chosen)
    out = msa_ops.sparse_attention(case.q, case.cache, chosen, case.batch, 0.1)
    assert torch.equal(msa_ops.sparse_attention(case.q, Pages(cache, case.cache.table), chosen, case.batch, 0.1), out)


@pytest.mark.parametrize("form", FORMATS)
def test_a_layer_without_an_indexer_inserts_the_same_keys(form):
    (q, k, v, _, _, norms, *rest), (cache, _) = insert_case(form, tokens=9, heads=4, groups=2)
    args, (want, index) = insert_case(form, tokens=9, heads=4, groups=2)
    norms = norms._replace(index_q=None, index_k=None)
    q_out, none = msa_ops.kv_insert(q, k, v, None, None, norms, *rest, cache, None)
    assert none is None and torch.equal(q_out, msa_ops.kv_insert(*args, want, index)[0])
    assert torch.equal(cache.view(torch.uint8), want.view(torch.uint8))


def read_back(cache, index, slots, dtype):
    """(k, v, index k) of tokens, as an engine reads them."""
    if cache.dtype == torch.uint8:
        return *kv.read_pages(cache, slots, 128, dtype), kv.read_index_pages(index, slots, 128, dtype)
    both = msa_ops._pick(cache.transpose(1, 2), slots // 128, slots % 128).to(dtype)
    return both[..., :128], both[..., 128:], msa_ops._pick(index, slots // 128, slots % 128).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", [*FORMATS, None])
def test_training_heads_are_what_the_pages_give_back(form, dtype):
    args, caches = insert_case(form or "bf16", tokens=9, heads=4, groups=2, exact=False)
    q, k, v, index_q, index_k, norms, table, position, slots = args
    if dtype == torch.float32 and form in (None, "bf16"):
        caches = [c.float() for c in caches]
    q, k, v, index_q, index_k = (x.to(dtype) for x in (q, k, v, index_q, index_k))
    want_q, want_index_q = msa_ops.kv_insert(q, k, v, index_q, index_k, norms, table, position, slots, *caches)
    have = msa_ops.rotate_heads(q, k, v, index_q, index_k, norms, table, position, form)
    assert torch.equal(have[0], want_q) and torch.equal(have[3], want_index_q)
    written = slots >= 0
    want = read_back(*caches, slots[written], dtype)
    for name, a, b in zip(("k", "v", "index k"), (have[1], have[2], have[4]), want, strict=True):
        assert a.dtype == dtype and torch.equal(a[written], b), name
    assert all(
        torch.equal(a, b) for a, b in zip(msa_ops.rotate_heads(q, k, v, None, None, norms, table, position, form)[:3], have, strict=False)
    )


@pytest.mark.parametrize("form", [*FORMATS, None])
def test_gradients_of_training_heads_pass_the_cache_and_skip_the_indexer(form):
    """As if nothing were rounded on the way to the cache; autograd through the formula in fp64 is the judge."""
    args, _ = insert_case("bf16", tokens=5, heads=4, groups=2, exact=False)
    *heads, norms, table, position, _ = args
    heads = [x.float().requires_grad_() for x in heads]
    out = msa_ops.rotate_heads(*heads, norms, table, position, form)
    grads = [torch.randn_like(x) for x in out[:3]]
    assert not out[3].requires_grad and not out[4].requires_grad
    have = torch.autograd.grad(out[:3], heads[:3], grads)

    def formula(x, weight):
        x = x.double()
        y = x * (x.square().mean(-1, keepdim=True) + norms.eps).rsqrt() * (1 + weight.double())
        cos, sin = (t[position.long()].double()[:, None] for t in table)
        n = cos.shape[-1]
        a, b = y[..., :n], y[..., n : 2 * n]
        return torch.cat((a * cos - b * sin, b * cos + a * sin, y[..., 2 * n :]), -1)

    turned = formula(heads[0], norms.q), formula(heads[1], norms.k)
    want = (*torch.autograd.grad(turned, heads[:2], [g.double() for g in grads[:2]]), grads[2])
    for a, b in zip(have, want, strict=True):
        assert (a - b).norm() < 1e-5 * b.norm()


def test_an_unknown_cache_form_is_refused():
    args, _ = insert_case("bf16", tokens=2, heads=2, groups=1)
    with pytest.raises(ValueError, match="cache form must be one of nvfp4, fp8, bf16 or None, got 'int8'"):
        msa_ops.rotate_heads(*args[:8], "int8")


def test_half_an_indexer_is_refused():
    args, (cache, index) = insert_case("bf16", tokens=2, heads=2, groups=1)
    for call in (lambda: msa_ops.kv_insert(*args, cache, None), lambda: msa_ops.kv_insert(*without_indexer(args), cache, index)):
        with pytest.raises(ValueError, match="an indexer needs"):
            call()


def test_the_projection_in_one_op_is_its_parts():
    """Adapters of q and v by slot, none of k; every row of the weight goes to the head it is of."""
    args, caches = insert_case("nvfp4", tokens=7, heads=4, groups=2)
    _, others = insert_case("nvfp4", tokens=7, heads=4, groups=2)
    norms, table, position, slots = args[5:]
    g = torch.Generator().manual_seed(1)
    weight = mxfp8.quantize(torch.randn(11 * 128, 64, generator=g))
    x = torch.randn(7, 64, generator=g)
    loras = msa_ops.HeadLoRA(*(LoRA(torch.randn(2, 4, 64, generator=g), torch.randn(2, n * 128, 4, generator=g)) for n in (4, 2, 2)))
    loras, ids = loras._replace(k=None), torch.tensor([0, 1, -1, 0, 1, 1, 0])
    rest = (norms, table, position, slots)
    have = msa_ops.project_insert(x, pack_linear(weight), loras, ids, *rest, *caches)
    y, first = [], 0
    for rows, lora in ((4, loras.q), (2, None), (2, loras.v), (2, None), (1, None)):
        part = mxfp8.MXFP8Tensor(*(t[first * 128 : (first + rows) * 128] for t in weight))
        y.append(lora_linear(x, part, lora, ids if lora else None).view(7, rows, 128))
        first += rows
    want = msa_ops.kv_insert(*y[:4], y[4][:, 0], *rest, *others)
    assert all(torch.equal(a, b) for a, b in zip((*have, *caches), (*want, *others), strict=True))
    with pytest.raises(ValueError, match="a projection of 1000 rows does not fit 2 KV heads"):
        odd = pack_linear(mxfp8.MXFP8Tensor(*(t[:1000] for t in weight)))
        msa_ops.project_insert(x, odd, None, None, *rest, *caches)


def test_e4m3_pages_saturate():
    args, (cache, index_cache) = insert_case("fp8", tokens=3, heads=2, groups=1)
    args[2][0] = 1e4  # a value
    msa_ops.kv_insert(*args, cache, index_cache)
    assert cache[args[8][0] // 128, 0, args[8][0] % 128, 128:].float().eq(448).all()


def test_index_pages_are_k_slots():
    g = torch.Generator().manual_seed(0)
    k = torch.randn(200, 128, generator=g)
    slots = torch.randperm(256, generator=g)[:200]
    index, main = torch.zeros(kv.index_page_shape(2, 128), dtype=torch.uint8), torch.zeros(kv.page_shape(2, 1, 128), dtype=torch.uint8)
    kv.write_index_pages(index, slots, k)
    kv.write_pages(main, slots, k[:, None], k[:, None])
    assert torch.equal(index, main[:, 0]) and index.nbytes == 2 * 128 * 72
    assert torch.equal(kv.read_index_pages(index, slots, 128), kv.round_trip(k))
    with pytest.raises(ValueError, match="index pages must be"):
        kv.read_index_pages(main, slots, 128)


def test_dense_attention_of_padding_and_its_gradients():
    case = make([70, 20], [70, 20], "bf16", groups=2, heads=4)
    batch = case.batch._replace(position=case.batch.position.index_fill(0, torch.tensor([69]), -1))
    q, k, v = (t.float().requires_grad_() for t in (case.q, case.packed.keys, case.packed.values))
    out = msa_ops.dense_attention(q, case.packed._replace(keys=k, values=v), batch, 0.1)
    assert not out[69].any() and out[68].any()
    out.square().sum().backward()
    seen = torch.arange(90) != 69
    assert all(torch.equal(t.grad.flatten(1).any(1), seen) for t in (k, v))
    assert q.grad[1:69].flatten(1).any(1).all() and not q.grad[69].any()


def test_wrong_pages_are_refused():
    case = make([1], [300], "nvfp4", groups=2, heads=4)
    with pytest.raises(ValueError, match="pages must be uint8"):
        msa_ops.sparse_attention(case.q, Pages(case.index.data, case.index.table), torch.zeros(1, 2, 4, dtype=torch.int32), case.batch, 0.1)


def test_rounded_reads_are_e4m3_of_what_the_pages_hold():
    """Choice and attention over NVFP4 pages read as E4M3 against packed keys and values rounded so."""
    case = make([3, 1], [300, 2500], "nvfp4", seed=12)
    index = case.packed_index._replace(keys=kv.round_e4m3(case.packed_index.keys))
    packed = case.packed._replace(keys=kv.round_e4m3(case.packed.keys), values=kv.round_e4m3(case.packed.values))
    chosen = msa_ops.index_topk(case.index_q, case.index, case.batch, CONFIG, rounded=True)
    assert torch.equal(chosen, msa_ops.index_topk(case.index_q, index, case.batch, CONFIG))
    have, plain = (msa_ops.sparse_attention(case.q, case.cache, chosen, case.batch, 0.1, rounded=r) for r in (True, False))
    assert torch.equal(have, msa_ops.sparse_attention(case.q, packed, chosen, case.batch, 0.1))
    assert not torch.equal(have, plain)

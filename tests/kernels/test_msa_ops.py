"""`kernels.msa_ops` on the CPU: pages of all formats against packed keys, batches, `kv_insert`, and the argument errors."""

import pytest
import torch

from samebits.kernels import msa, msa_ops
from samebits.kernels.msa import SparseConfig
from samebits.kernels.msa_ops import Pages, batch_of
from samebits.kernels.norm import gemma_rms_norm
from samebits.kernels.rope import apply_rope
from samebits.quant import kv
from tests.support.msa_cases import FORMATS, insert_case, make

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

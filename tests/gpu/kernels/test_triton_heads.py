"""On a GPU: rows of heads have the same bits in pages, in training and behind the projection; in any batch, in pages of one buffer."""

import pytest
import torch

from samebits.kernels import msa_ops
from samebits.kernels.linear import LoRA
from samebits.kernels.linear_tiles import pack_linear
from samebits.kernels.msa import SparseConfig
from samebits.kernels.msa_ops import HeadLoRA, Pages
from samebits.quant import kv, mxfp8
from tests.support.msa_cases import FORMATS, insert_case, make, one_buffer, without_indexer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.fixture(scope="module", autouse=True)
def kernels():
    pytest.importorskip("triton")
    from samebits.kernels import triton_msa_rotate

    return triton_msa_rotate


def bits(x):
    return x.contiguous().view(torch.uint8)


def same(have, want):
    return all(a is b or torch.equal(bits(a), bits(b)) for a, b in zip(have, want, strict=True))


def distance(have, want):
    return ((have.double() - want.double()).norm() / want.double().norm()).item()


def read_back(cache, index, slots):
    """K, V and index keys of tokens, as an engine reads them."""
    if cache.dtype == torch.uint8:
        return *kv.read_pages(cache, slots, 128, torch.bfloat16), kv.read_index_pages(index, slots, 128, torch.bfloat16)
    both = msa_ops._pick(cache.transpose(1, 2), slots // 128, slots % 128).bfloat16()
    return both[..., :128], both[..., 128:], msa_ops._pick(index, slots // 128, slots % 128).bfloat16()


@pytest.mark.parametrize("tokens", [1, 40, 700])
@pytest.mark.parametrize("form", FORMATS)
def test_training_has_the_bits_that_the_engine_reads_from_its_pages(form, tokens):
    args, caches = insert_case(form, tokens, device="cuda", exact=False, seed=tokens)
    args[2][0] *= 2.0**-11  # values that become zeros of both signs
    args[8][0] = 7 if tokens == 1 else args[8][0]  # which has no page otherwise
    _, *views = one_buffer(*caches)
    q, index_q = msa_ops.kv_insert(*args, *views)
    have = msa_ops.rotate_heads(*args[:8], form)
    slots = args[8]
    written = slots >= 0
    k, v, index_k = read_back(*views, slots[written])
    assert same((have[0], have[3]), (q, index_q))
    assert same([x[written] for x in (have[1], have[2], have[4])], (k, v, index_k))
    dense = msa_ops.rotate_heads(*without_indexer(args)[:8], form)
    assert same(dense[:3], have[:3]) and dense[3:] == (None, None)


@pytest.mark.parametrize("form", FORMATS)
def test_pages_of_one_buffer_hold_the_same_bytes_and_are_read_the_same(form):
    args, caches = insert_case(form, 300, device="cuda", exact=False)
    buffer, *views = one_buffer(*caches)
    want, have = msa_ops.kv_insert(*args, *caches), msa_ops.kv_insert(*args, *views)
    assert same(have, want) and same([buffer], [one_buffer(*caches)[0]])
    dense, (cache, _) = insert_case(form, 300, device="cuda", exact=False)
    q, none = msa_ops.kv_insert(*without_indexer(dense), cache, None)
    assert none is None and same((q, cache), (want[0], caches[0]))
    case = make([1, 3, 2], [2500, 700, 129], form, device="cuda")
    _, cache, index = one_buffer(case.cache.data, case.index.data)
    config = SparseConfig()
    chosen = msa_ops.index_topk(case.index_q, case.index, case.batch, config)
    assert torch.equal(msa_ops.index_topk(case.index_q, Pages(index, case.index.table), case.batch, config), chosen)
    out = msa_ops.sparse_attention(case.q, case.cache, chosen, case.batch, 0.1)
    assert same([msa_ops.sparse_attention(case.q, Pages(cache, case.cache.table), chosen, case.batch, 0.1)], [out])


def test_main_keys_and_index_keys_can_have_two_formats():
    args, (cache, _) = insert_case("nvfp4", 50, device="cuda")
    _, (_, index) = insert_case("bf16", 50, device="cuda")
    msa_ops.kv_insert(*args, cache, index)
    want = []
    for form in ("nvfp4", "bf16"):
        again, pages = insert_case(form, 50, device="cuda")
        msa_ops.kv_insert(*again, *pages)
        want.append(pages)
    assert same((cache, index), (want[0][0], want[1][1]))


@pytest.mark.parametrize("tokens", [1, 3, 17, 130])
def test_a_token_has_the_bits_of_a_larger_batch(tokens):
    (*heads, norms, table, position, slots), caches = insert_case("nvfp4", 900, device="cuda", exact=False)
    q, index_q = msa_ops.kv_insert(*heads, norms, table, position, slots, *caches)
    rows = slice(500, 500 + tokens)
    _, others = insert_case("nvfp4", 900, device="cuda", exact=False)
    have = msa_ops.kv_insert(*(x[rows] for x in heads), norms, table, position[rows], slots[rows], *others)
    assert same(have, (q[rows], index_q[rows]))
    assert same(read_back(*others, slots[rows]), read_back(*caches, slots[rows]))


@pytest.mark.parametrize("heads", [2, 12, 64])
def test_gradients_of_heads_against_fp64(heads):
    """Straight through the cache: what the pages round does not show."""
    (*x, norms, table, position, _), _ = insert_case("bf16", 300, heads=heads, groups=2, device="cuda", exact=False)
    x = [t.clone().requires_grad_() for t in x]
    out = msa_ops.rotate_heads(*x, norms, table, position, "nvfp4")
    assert not out[3].requires_grad and not out[4].requires_grad
    grads = [torch.randn(t.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).bfloat16() for t in out[:3]]
    have = torch.autograd.grad(out[:3], x[:3], grads)
    cos, sin = (t[position.long()].double()[:, None] for t in table)

    def formula(y, weight):
        y = y * (y.square().mean(-1, keepdim=True) + norms.eps).rsqrt() * (1 + weight.double())
        a, b = y[..., :32], y[..., 32:64]
        return torch.cat((a * cos - b * sin, b * cos + a * sin, y[..., 64:]), -1)

    exact = [t.detach().double().requires_grad_() for t in x[:2]]
    turned = [formula(t, w) for t, w in zip(exact, norms[:2], strict=True)]
    assert distance(out[0], turned[0]) < 5e-3
    want = torch.autograd.grad(turned, exact, [g.double() for g in grads[:2]])
    assert all(distance(a, b) < 3e-3 for a, b in zip(have, want, strict=False))
    assert torch.equal(have[2], grads[2])


@pytest.mark.parametrize("tokens", [1, 30, 60, 300])
@pytest.mark.parametrize(("form", "adapters"), [("nvfp4", 0), ("nvfp4", 1), ("nvfp4", 3), ("fp8", 1), ("bf16", 0)])
def test_the_projection_in_one_launch_has_the_bits_of_its_parts(form, adapters, tokens):
    """M3's heads over a K that is no multiple of 128 or of a shrink's part; K has no adapter."""
    heads, groups, k = 64, 4, 2400
    args, caches = insert_case(form, tokens, device="cuda")
    norms, table, position, slots = args[5:]
    _, *views = one_buffer(*caches)
    g = torch.Generator("cuda").manual_seed(tokens)

    def normal(*shape):
        return torch.randn(*shape, generator=g, device="cuda")

    weight = pack_linear(mxfp8.quantize(normal(77 * 128, k) * 0.05))
    x = normal(tokens, k).bfloat16()

    def adapter(n):
        return LoRA(normal(adapters, 32, k).bfloat16() * 0.05, normal(adapters, n * 128, 32).bfloat16() * 0.05)

    loras = HeadLoRA(adapter(heads), None, adapter(groups)) if adapters else None
    # The first token asks for the first adapter, so that one token is no batch without any; every so many ask for none.
    asked = (torch.arange(tokens, device="cuda") + 1) % (adapters + 1) - 1
    ids = asked.int() if adapters > 1 else None
    rest = (x, weight, loras, ids, norms, table, position, slots)
    have = msa_ops.project_insert(*rest, *views)
    want = msa_ops._project_apart(*rest, *caches, (heads, groups))
    assert same(have, want) and same(views, caches)
    plain = msa_ops.project_insert(x, weight, None, None, *rest[4:], *views)
    changed = (plain[0] != have[0]).flatten(1).any(1)
    assert torch.equal(changed, asked >= 0 if adapters > 1 else torch.full_like(changed, adapters > 0))

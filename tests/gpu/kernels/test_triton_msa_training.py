"""On a GPU: gradients of attention over packed keys, and `kv_insert`."""

import pytest
import torch

from samebits.kernels import msa_ops
from samebits.kernels.msa import SparseConfig
from tests.support.msa_cases import FORMATS, insert_case, make
from tests.support.msa_gpu import distance

pytest_plugins = ("tests.support.msa_gpu",)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
CONFIG = SparseConfig()
SCALE = msa_ops.default_scale()


@pytest.fixture(scope="module", autouse=True)
def kernels():
    pytest.importorskip("triton")
    from samebits.kernels import triton_msa

    return triton_msa


def gradients(case, chosen, grad, dtype):
    q, k, v = (t.to(dtype).detach().requires_grad_() for t in (case.q, case.packed.keys, case.packed.values))
    out = msa_ops.sparse_attention(q, case.packed._replace(keys=k, values=v), chosen, case.batch, SCALE)
    return out, torch.autograd.grad(out, (q, k, v), grad.to(dtype))


@pytest.mark.parametrize("total", [[1], [127, 128, 129, 1], [2500, 700, 3], [4100]])
def test_gradients_are_those_of_fp32_within_bf16_rounding(total, reference):
    case = make(total, total, "nvfp4", device="cuda", seed=sum(total))
    chosen = msa_ops.index_topk(case.index_q, case.packed_index, case.batch, CONFIG)
    grad = torch.randn(case.q.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).bfloat16()
    out, have = gradients(case, chosen, grad, torch.bfloat16)
    exact, want = reference(lambda: gradients(case, chosen, grad, torch.float32))
    assert distance(out, exact) < 6e-3
    for name, a, b in zip("qkv", have, want, strict=True):
        if b.any():
            assert distance(a, b) < 1e-2, name
        else:  # a token that sees itself alone has no gradient of its query and key
            assert a.float().abs().max() < 1e-2 * grad.abs().max(), name


def test_gradients_have_the_same_bits_every_time_and_no_token_is_left_out():
    total = [3000, 50, 2049]
    case = make(total, total, "bf16", device="cuda", seed=9)
    chosen = msa_ops.index_topk(case.index_q, case.packed_index, case.batch, CONFIG)
    grad = torch.randn_like(case.q)
    first, second = (gradients(case, chosen, grad, torch.bfloat16)[1] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert first[2].flatten(1).any(1).all()  # every token's value is seen at least by itself


def test_a_key_that_nobody_chose_has_no_gradient():
    case = make([2000], [2000], "bf16", device="cuda", seed=10)
    chosen = torch.full((2000, 4, 16), -1, dtype=torch.int32, device="cuda")
    chosen[:, :, 0] = (torch.arange(2000, device="cuda") // 128)[:, None]
    chosen[128:, :2, 0], chosen[128:, :2, 1] = 0, chosen[128:, :2, 0].clone()
    _, (_, k, v) = gradients(case, chosen, torch.randn_like(case.q), torch.bfloat16)
    packed_out = msa_ops.sparse_attention(case.q, case.packed, chosen, case.batch, SCALE)
    changed = case.packed.values.clone()
    changed[:128, 2:] = 100.0  # groups 2 and 3 of later blocks do not look there
    again = msa_ops.sparse_attention(case.q, case.packed._replace(values=changed), chosen, case.batch, SCALE)
    assert torch.equal(again[128:, 32:], packed_out[128:, 32:]) and not torch.equal(again[:128], packed_out[:128])
    assert k[:128, :2].abs().mean() > 0 and v[128:, 2:].flatten(1).any(1).all()


def test_gradients_of_a_part_are_refused():
    case = make([5], [300], "bf16", device="cuda")
    chosen = torch.zeros(5, 4, 16, dtype=torch.int32, device="cuda")
    q = case.q.clone().requires_grad_()
    with pytest.raises(ValueError, match="every token"):
        msa_ops.sparse_attention(q, case.packed, chosen, case.batch, SCALE)


@pytest.mark.parametrize("form", FORMATS)
def test_insert_writes_the_bytes_of_the_reference(form, reference):
    """Integers, whose squares sum exactly in any order: every byte of the pages, those that nobody wrote included."""
    args, caches = insert_case(form, tokens=700)
    want = msa_ops.kv_insert(*args, *caches)  # on the CPU, where square roots are rounded correctly
    on_gpu, others = insert_case(form, tokens=700)
    on_gpu = [t.cuda() if isinstance(t, torch.Tensor) else t for t in on_gpu]
    on_gpu[5] = type(on_gpu[5])(*(w.cuda() for w in on_gpu[5][:4]), on_gpu[5].eps)
    on_gpu[6] = tuple(t.cuda() for t in on_gpu[6])
    others = [c.cuda() for c in others]
    have = msa_ops.kv_insert(*on_gpu, *others)
    for a, b in zip(have, want, strict=True):
        assert torch.equal(a.cpu(), b)
    for a, b in zip(others, caches, strict=True):
        assert torch.equal(a.view(torch.uint8).cpu(), b.view(torch.uint8))


def test_insert_then_attend_equals_the_training_path(reference):
    """What `kv_insert` puts into NVFP4 pages is what the trainer's round trip gives, up to the order of one sum."""
    args, (cache, index) = insert_case("nvfp4", tokens=400, device="cuda", exact=False)
    q, index_q = msa_ops.kv_insert(*args, cache, index)
    args2, (cache2, index2) = insert_case("nvfp4", tokens=400, device="cuda", exact=False)
    q2, index_q2 = reference(lambda: msa_ops.kv_insert(*args2, cache2, index2))
    for a, b in ((q, q2), (index_q, index_q2)):
        assert (a != b).float().mean() < 2e-3 and distance(a, b) < 1e-3
    assert (cache != cache2).float().mean() < 2e-3 and (index != index2).float().mean() < 2e-3

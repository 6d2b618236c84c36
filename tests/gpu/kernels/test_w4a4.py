"""W4A4 on a GPU: the bytes of the CPU, step by step and through the experts."""

import pytest
import torch

from samebits.kernels import w4a4
from samebits.kernels.activation import SwiGLU
from samebits.kernels.moe import W4A4
from samebits.quant import activations, nvfp4
from tests.support.msa_gpu import same
from tests.support.w4a4_cases import STATIC, Layer, tokens

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.fixture(scope="module")
def layer():
    return Layer()


@pytest.mark.parametrize("scales", [W4A4(), STATIC], ids=["per token", "static"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("count", [1, 2, 7, 33, 129])
def test_experts_have_the_bytes_of_the_cpu(layer, count, dtype, scales):
    """An expert without tokens, one token, odd counts; with adapters in two slots and none, and without adapters at all."""
    batch = tokens(count, dtype, seed=count)
    for adapters in (True, False):
        want, have = (layer.out(batch, scales, device, adapters) for device in ("cpu", "cuda"))
        assert want.isfinite().all() and same(have, want)
    if count > 2:
        rows = slice(1, 2)
        assert same(layer.out(tuple(t[rows] for t in batch), scales, "cuda", False), have[rows])


@pytest.fixture(params=[False, True])
def tf32(request):
    """Set and restored here: it is no attribute that pytest's monkeypatch could give back."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = request.param
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def test_products_of_many_shapes_have_the_bytes_of_the_cpu_whatever_torch_may_do_in_fp32(tf32):
    g = torch.Generator().manual_seed(0)
    for rows, n, k in ((1, 3, 16), (3, 40, 1024), (65, 70, 1040), (128, 256, 3072), (5, 64, 6144)):
        x = torch.randn(rows, k, generator=g) * torch.rand(rows, 1, generator=g) * 20
        x[0] = 0
        weight = nvfp4.quantize(torch.randn(n, k, generator=g))
        for scale in (None, torch.tensor(11.0 / 2688)):
            on_gpu = scale if scale is None else scale.cuda()
            codes = [
                activations.quantize_per_token(part) if own is None else activations.quantize_static(part, own)
                for part, own in ((x.cuda(), on_gpu), (x, scale))
            ]
            assert all(same(a.cpu(), b) for a, b in zip(*codes, strict=True))
            have = w4a4.block_product(x.cuda(), type(weight)(*(t.cuda() for t in weight)), on_gpu)
            assert same(have.cpu(), w4a4.block_product(x, weight, scale)), (rows, n, k)


def test_single_operations_have_the_bytes_of_the_cpu():
    g = torch.Generator().manual_seed(1)
    gate, up = (torch.randn(1 << 20, generator=g) * 8 for _ in range(2))
    for dtype in (torch.bfloat16, torch.float32):
        want = w4a4.swiglu(gate, up, SwiGLU(), dtype)
        assert same(w4a4.swiglu(gate.cuda(), up.cuda(), SwiGLU(), dtype).cpu(), want)
    x = torch.linspace(-750, 750, 1 << 20, dtype=torch.float64)
    assert same(w4a4.exp(x.cuda()).cpu(), w4a4.exp(x))
    a, b = torch.randn(33, 6144, generator=g).bfloat16(), torch.randn(32, 6144, generator=g).bfloat16()
    assert same(w4a4.tree_linear(a.cuda(), b.cuda()).cpu(), w4a4.tree_linear(a, b))

"""The Triton kernels on a GPU: bytes of the CPU reference, errors that name the tensor, one host sync."""

import warnings

import numpy as np
import pytest
import torch

from samebits.quant import activations, kv, layouts, mxfp8, nvfp4
from samebits.quant.mxfp8 import MXFP8Tensor
from samebits.quant.nvfp4 import NonFiniteWeight, NVFP4Tensor
from tests.quant.test_triton_logic import near_ties
from tests.support.quant_cases import inputs, same_bytes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def cpu(t):
    return type(t)(*(part.cpu() for part in t))


def cuda(t):
    return type(t)(*(part.cuda() for part in t))


@pytest.fixture(params=["triton", "torch"])
def path(request, monkeypatch):
    """Both ways a CUDA tensor can go: the kernels, and the reference on the device."""
    if request.param == "torch":
        monkeypatch.setattr(nvfp4, "fast_path", lambda x: False)
        monkeypatch.setattr(mxfp8, "fast_path", lambda x: False)
    else:
        pytest.importorskip("triton")
        assert nvfp4.fast_path(torch.ones(16, device="cuda"))
    return request.param


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_are_those_of_the_cpu(path, dtype):
    for name, x in inputs(dtype, rows=777):
        scales = torch.rand(x.shape[:-2], generator=torch.Generator().manual_seed(1)) + 0.01
        for given in (None, scales, torch.ones(()), torch.tensor(2.0**-90)):
            want = nvfp4.quantize(x, given)
            have = nvfp4.quantize(x.cuda(), None if given is None else given.cuda())
            assert same_bytes(have, want), (name, given)
            for out in DTYPES:
                assert same_bytes((nvfp4.dequantize(cuda(want), out),), (nvfp4.dequantize(want, out),)), (name, out)
        want = mxfp8.quantize(x)
        assert same_bytes(mxfp8.quantize(x.cuda()), want), name
        for out in DTYPES:
            assert same_bytes((mxfp8.dequantize(cuda(want), out),), (mxfp8.dequantize(want, out),)), (name, out)


def test_every_finite_bf16_under_many_scales(path):
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = x[x.isfinite()]
    x = x[torch.randperm(x.numel(), generator=torch.Generator().manual_seed(0))]
    x = torch.cat((x, x[: -x.numel() % 32])).view(-1, 32)
    assert same_bytes(mxfp8.quantize(x.cuda()), mxfp8.quantize(x))
    for g in torch.exp2(torch.linspace(-90, 116, 97)):
        assert same_bytes(nvfp4.quantize(x.cuda(), g.cuda()), nvfp4.quantize(x, g)), g


@pytest.mark.parametrize("dtype", DTYPES)
def test_quotients_next_to_half_way_points(path, dtype):
    """Divisors that could tell a rounded quotient from an approximate one: one matrix a case, its block scale 1, its g the divisor."""
    bits = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 10}[dtype]
    x = (1 + np.arange(2**bits) / 2**bits).astype(np.float32)
    if dtype is torch.float32:
        x = np.random.default_rng(0).uniform(1, 2, 1024).astype(np.float32)
    x, d = (torch.from_numpy(np.ascontiguousarray(part)) for part in near_ties(x, 8))
    block = torch.zeros(len(x), 1, 16, dtype=dtype)
    block[:, 0, 0], block[:, 0, 1], block[:, 0, 2] = (6 * d).to(dtype), x.to(dtype), -x.to(dtype)
    want = nvfp4.quantize(block, d)
    assert (want.block_scales == 0x38).float().mean() > 0.9
    assert same_bytes(nvfp4.quantize(block.cuda(), d.cuda()), want)


def test_every_byte_is_decoded(path):
    codes = torch.arange(256, dtype=torch.uint8).repeat_interleave(32).view(256, 32)
    nv = NVFP4Tensor(codes[:, :8].repeat(128, 1), torch.arange(127, dtype=torch.uint8).repeat(259)[: 256 * 128, None], torch.tensor(0.37))
    assert same_bytes((nvfp4.dequantize(cuda(nv)),), (nvfp4.dequantize(nv),))
    finite = codes[(torch.arange(256) & 0x7F) != 0x7F]
    mx = MXFP8Tensor(finite.repeat(255, 1), torch.arange(255, dtype=torch.uint8).repeat_interleave(254)[:, None])
    for dtype in (torch.float32, torch.bfloat16):
        assert same_bytes((mxfp8.dequantize(cuda(mx), dtype),), (mxfp8.dequantize(mx, dtype),))
    nan = MXFP8Tensor(torch.tensor([[0x7F] + [0x38] * 31] * 2, dtype=torch.uint8), torch.tensor([[127], [255]], dtype=torch.uint8))
    values = mxfp8.dequantize(cuda(nan)).cpu()
    assert values[0].isnan().tolist() == [True] + [False] * 31 and values[1].isnan().all()
    assert nvfp4.dequantize(cuda(nv._replace(block_scales=torch.full_like(nv.block_scales, 0x7F)))).isnan().all()


def test_views_of_any_stride_and_offset(path):
    base = torch.randn(64, 257, generator=torch.Generator().manual_seed(0)).bfloat16()
    for x in (base[:, 1:], base.flatten()[1 : 1 + 64 * 32].view(64, 32), base[:, :64].t(), base[::3, :32], base[5, 1:33]):
        device = base.cuda().as_strided(x.shape, x.stride(), x.storage_offset())
        assert same_bytes(nvfp4.quantize(device), nvfp4.quantize(x.contiguous()))
        assert same_bytes(mxfp8.quantize(device), mxfp8.quantize(x.contiguous()))


def test_empty_and_many_matrices(path):
    for shape in ((0, 32), (3, 0, 32), (0, 4, 32)):
        assert same_bytes(nvfp4.quantize(torch.ones(shape, device="cuda")), nvfp4.quantize(torch.ones(shape)))
        assert same_bytes(mxfp8.quantize(torch.ones(shape, device="cuda")), mxfp8.quantize(torch.ones(shape)))
    x = torch.randn(70_000, 32, generator=torch.Generator().manual_seed(0))
    t = activations.quantize_per_token(x)
    assert same_bytes((nvfp4.dequantize(cuda(t)),), (nvfp4.dequantize(t),))
    assert same_bytes(nvfp4.quantize(x.view(70_000, 1, 32).cuda()), nvfp4.quantize(x.view(70_000, 1, 32)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_weights_raise_with_the_name(path, dtype, bad):
    for place in (0, 4097, 3 * 128 * 96 - 1):
        w = torch.ones(3, 128, 96, dtype=dtype, device="cuda")
        w.view(-1)[place] = bad
        for call in (
            lambda w=w: nvfp4.quantize(w, name="w1"),
            lambda w=w: nvfp4.quantize(w, torch.ones((), device="cuda"), "w1"),
            lambda w=w: nvfp4.quantize(w, torch.ones(3, device="cuda"), "w1"),
            lambda w=w: mxfp8.quantize(w, "w1"),
        ):
            with pytest.raises(NonFiniteWeight, match="^w1: holds NaN or infinity$"):
                call()


def test_a_global_scale_out_of_range_raises(path):
    for g in (0.0, -1.0, 2.0**-91, 2.0**118):
        with pytest.raises(ValueError, match="w1: global scale must lie within"):
            nvfp4.quantize(torch.ones(4, 32, device="cuda"), torch.tensor(g, device="cuda"), "w1")


@pytest.mark.parametrize("quantize", [nvfp4.quantize, mxfp8.quantize])
def test_one_host_sync_to_quantize_and_none_to_dequantize(quantize):
    pytest.importorskip("triton")
    w = torch.randn(256, 256, device="cuda")
    module = nvfp4 if quantize is nvfp4.quantize else mxfp8
    packed = quantize(w)
    module.dequantize(packed)
    try:
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            packed = quantize(w)
            syncs = sum("synchroniz" in str(s.message) for s in seen)
            module.dequantize(packed)
            after = sum("synchroniz" in str(s.message) for s in seen)
            nvfp4.quantize(w, name=None)
            unnamed = sum("synchroniz" in str(s.message) for s in seen)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (syncs, after, unnamed) == (1, 1, 1)


def test_kv_activations_and_layouts_on_the_device(path):
    g = torch.Generator().manual_seed(0)
    x = (torch.randn(300, 2, 128, generator=g) * 4).bfloat16()
    assert same_bytes((kv.write(x.cuda()),), (kv.write(x),))
    for rounded in (False, True):
        want = kv.read(kv.write(x), 128, torch.bfloat16, rounded)
        assert same_bytes((kv.read(kv.write(x).cuda(), 128, torch.bfloat16, rounded),), (want,))
    pages, slots = torch.zeros(kv.page_shape(4, 2, 128), dtype=torch.uint8), torch.randperm(512, generator=g)[:300]
    on_device = pages.cuda()
    kv.write_pages(pages, slots, x, -x)
    kv.write_pages(on_device, slots.cuda(), x.cuda(), -x.cuda())
    assert same_bytes((on_device,), (pages,))
    assert same_bytes(kv.read_pages(on_device, slots.cuda(), 128, rounded=True), kv.read_pages(pages, slots, 128, rounded=True))
    scale = activations.input_scale(x.abs().amax())
    assert same_bytes((activations.input_scale(x.cuda().abs().amax()),), (scale,))
    assert same_bytes(activations.quantize_static(x.cuda(), scale.cuda()), activations.quantize_static(x, scale))
    assert same_bytes(activations.quantize_per_token(x.cuda()), activations.quantize_per_token(x))
    for s in (None, scale):
        have = activations.round_trip(x.cuda(), None if s is None else s.cuda())
        assert same_bytes((have,), (activations.round_trip(x, s),))
    scales = torch.randint(0, 256, (3, 130, 7), dtype=torch.uint8, generator=g)
    assert same_bytes((layouts.swizzle(scales.cuda()),), (layouts.swizzle(scales),))

"""The MXFP8 linear layer on a GPU: fp64 from dequantised weights, bits that no batch may move, gradients."""

import pytest
import torch

from samebits.kernels.linear import LoRA, lora_linear
from samebits.kernels.linear_tiles import pack_linear, unpack_linear
from samebits.quant import mxfp8

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def layer(n: int, k: int, slots: int = 2, rank: int = 32):
    g = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int):
        return torch.randn(shape, device="cuda", generator=g)

    # Rows from 2^-8 to 2^4 times the usual size: many exponents.
    packed = mxfp8.quantize(normal(n, k) * torch.exp2(torch.linspace(-8, 4, n, device="cuda"))[:, None] / k**0.5)
    return packed, LoRA((normal(slots, rank, k) / k**0.5).bfloat16(), (normal(slots, n, rank) * 0.3).bfloat16())


def reference(x, packed, lora=None, slots=None):
    out = x.double() @ mxfp8.dequantize(packed).double().mT
    for s in range(0 if lora is None else len(lora.a)):
        mask = torch.ones(len(x), 1, device="cuda") * (s == 0) if slots is None else (slots == s).double()[:, None]
        out = out + mask * (x.double() @ lora.a[s].double().mT @ lora.b[s].double().mT)
    return out


def distance(have, want) -> float:
    return ((have.double() - want.double()).norm() / want.double().norm()).item()


@pytest.mark.parametrize(("n", "k"), [(8192, 6144), (512, 8192), (70, 160)])
def test_values_and_bits(n, k):
    packed, lora = layer(n, k)
    tiles = pack_linear(packed)
    assert all(torch.equal(a, b) for a, b in zip(unpack_linear(tiles), packed, strict=True))
    x = torch.randn(1500, k, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).bfloat16()
    slots = torch.arange(1500, device="cuda") % 3 - 1
    for adapter, which in ((None, None), (lora, None), (lora, slots)):
        whole = lora_linear(x, tiles, adapter, which)
        assert distance(whole, reference(x, packed, adapter, which)) < 4e-3
        # 100 tokens are in tiles of 128, 512 in whole ones of 256; 600 and 768 make a last wave of 8192 outputs that 132
        # multiprocessors take in quarters.
        parts = ((0, 1), (3, 20), (40, 80), (100, 160), (40, 140), (9, 521), (5, 605), (7, 775))
        for part in (slice(*ends) for ends in parts):
            assert torch.equal(lora_linear(x[part], tiles, adapter, None if which is None else which[part]), whole[part]), part
    base = lora_linear(x, tiles)
    assert torch.equal(lora_linear(x, tiles, LoRA(lora.a, torch.zeros_like(lora.b)), slots), base)
    assert torch.equal(lora_linear(x, tiles, lora, slots)[slots < 0], base[slots < 0])


def test_every_code_and_exponent():
    codes = torch.arange(256, dtype=torch.uint8, device="cuda")
    codes = codes[(codes & 0x7F) != 0x7F]
    codes = torch.cat((codes, codes[:2])).view(8, 32).repeat(125, 4)
    exponents = torch.arange(42, 167, dtype=torch.uint8, device="cuda").repeat_interleave(8)[:, None].repeat(1, 4)
    packed = mxfp8.MXFP8Tensor(codes, exponents)
    x = torch.eye(128, device="cuda").bfloat16()
    assert torch.equal(lora_linear(x, pack_linear(packed)), mxfp8.dequantize(packed, torch.bfloat16).t())


@pytest.mark.parametrize("slotted", [False, True])
def test_gradients_against_fp64_autograd(slotted):
    packed, lora = layer(300, 544)
    tiles = pack_linear(packed)
    x0 = torch.randn(200, 544, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).bfloat16()
    slots = torch.arange(200, device="cuda") % 3 - 1 if slotted else None
    results = []
    for dtype, call, weight in ((torch.float64, reference, packed), (torch.bfloat16, lora_linear, tiles)):
        x, a, b = (t.to(dtype).clone().requires_grad_() for t in (x0, *lora))
        out = call(x, weight, LoRA(a, b), slots)
        (out * torch.linspace(-1, 1, 300, device="cuda").to(out.dtype)).sum().backward()
        results.append((x.grad, a.grad, b.grad))
    for want, have in zip(*results, strict=True):
        assert distance(have, want) < 1e-2

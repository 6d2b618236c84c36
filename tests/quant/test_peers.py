"""Bytes of other packers beside ours: nvidia-modelopt, compressed-tensors, torchao, and vLLM's own reference for activations.

On normal, uniform and sparse bf16 weights every byte of modelopt's is equal. The others, and everyone on heavy tails, may differ by a
named rule; each difference is counted under its rule, and one that no rule explains fails. The rules:

    rounded twice   they form amax * (1/6), 1/g or x * (1/(s g)), we one quotient: the exact value lies next to a half-way point
    zero block      its scale is 1 here; 0.125 in compressed-tensors, 2^-6 in torchao
    zero scale      a block scale that is 0 in fp32 (modelopt: becomes 1) or in E4M3 (compressed-tensors: becomes 0.125), ours 2^-9
    minimum scale   torchao has no scale below 2^-6
    tiny tensor     our global scale is at least 2^-90, and 1 for a tensor of zeros
    signed zero     -0.0 has code 0 here and code 8 there
    rounded log     log2(amax / 448) rounded to the integer below, just above 448 * 2^k: one exponent less, and the largest value clips
    tiny block      torchao scales a block of exponent byte 0 by 1 and not by 2^127
"""

import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from samebits.quant import activations, layouts, mxfp8, nvfp4
from samebits.quant.nvfp4 import NVFP4Tensor

PEERS = Path(sys.prefix) / "peers"  # where `make test` puts them
if PEERS.is_dir():
    sys.path.append(str(PEERS))

SHAPE = (192, 512)


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"needs {package}, which `make test` installs")


def weights(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(11)
    normal = torch.randn(SHAPE, generator=g)
    return {
        "normal": (normal * 0.02).to(dtype),
        "uniform": (torch.rand(SHAPE, generator=g) - 0.5).to(dtype),
        "sparse": (normal * (torch.rand(SHAPE, generator=g) > 0.95)).to(dtype),
    }


def heavy(dtype: torch.dtype) -> torch.Tensor:
    """Elements, and blocks, that differ by many powers of two; some blocks of zeros, some negative zeros."""
    g = torch.Generator().manual_seed(12)
    blocks = torch.randn(SHAPE[0], SHAPE[1] // 32, 1, generator=g) * 8
    w = torch.randn(SHAPE, generator=g) * torch.exp2(torch.randn(SHAPE, generator=g) * 3)
    w = (w.unflatten(-1, (-1, 32)) * torch.exp2(blocks) * (blocks < 14)).flatten(-2)
    w[:, ::7] *= torch.rand(SHAPE[0], 1, generator=g) > 0.1
    return w.to(dtype)


def e4m3(byte: torch.Tensor) -> torch.Tensor:
    return byte.view(torch.float8_e4m3fn).double()


def next_to(exact: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Whether `exact` is within 2^-20 of half-way between the values a and b."""
    middle = (a + b) / 2
    return (exact - middle).abs() <= middle * 2.0**-20


def nvfp4_differences(w: torch.Tensor, ours: NVFP4Tensor, theirs: NVFP4Tensor, floor: dict[str, float]) -> Counter:
    """Count of differing blocks and codes by rule. `floor`: rule to the scale that they put in the place of smaller ones."""
    found: Counter = Counter()
    x = w.double().unflatten(-1, (-1, 16))
    s, s2 = ours.block_scales, theirs.block_scales
    g = ours.global_scale.double()
    ratio = x.abs().amax(-1) / (6 * g)
    other = s != s2
    explained = torch.zeros_like(other)
    zero = other & (ratio == 0) & (s == 0x38) & torch.isin(e4m3(s2), torch.tensor(list(floor.values()), dtype=torch.float64))
    found["zero block"] += int(zero.sum())
    explained |= zero
    for rule, value in floor.items():
        here = other & (e4m3(s2) == value) & (e4m3(s) < value) & (ratio < value) & (ratio > 0)
        found[rule] += int(here.sum())
        explained |= here
    twice = other & ~explained & ((s.int() - s2.int()).abs() == 1) & next_to(ratio, e4m3(s), e4m3(s2))
    found["rounded twice"] += int(twice.sum())
    found["unexplained scale"] += int((other & ~explained & ~twice).sum())
    c, c2 = (nvfp4.unpack(t.codes).unflatten(-1, (-1, 16)) for t in (ours, theirs))
    other = (c != c2) & ~other[..., None]
    zero = other & ((c | c2) == 8) & (x == 0)
    values = nvfp4.decode_e2m1(c & 7).double(), nvfp4.decode_e2m1(c2 & 7).double()
    neighbours = ((c & 7).int() - (c2 & 7).int()).abs() == 1
    twice = other & ~zero & neighbours & next_to(x.abs() / (e4m3(s) * g)[..., None], *values)
    found["signed zero"] += int(zero.sum())
    found["rounded twice"] += int(twice.sum())
    found["unexplained code"] += int((other & ~zero & ~twice).sum())
    return +found


def equal(ours: tuple, theirs: tuple) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


# -- modelopt ------------------------------------------------------------------------------------------------------------------


def modelopt_nvfp4(w: torch.Tensor) -> NVFP4Tensor:
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    packed, scales, g = NVFP4QTensor.quantize(w, 16)
    return NVFP4Tensor(packed._quantized_data, scales.view(torch.uint8), g)


def modelopt_mxfp8(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from modelopt.torch.quantization.qtensor.mxfp8_tensor import MXFP8QTensor

    packed, exponents = MXFP8QTensor.quantize(w)
    return packed._quantized_data.view(torch.uint8), exponents


@needs("modelopt")
@pytest.mark.parametrize("name", ["normal", "uniform", "sparse"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_modelopt_has_the_same_bytes(name, dtype):
    w = weights(dtype)[name]
    assert equal(nvfp4.quantize(w), modelopt_nvfp4(w))
    assert equal(mxfp8.quantize(w), modelopt_mxfp8(w))
    theirs = modelopt_nvfp4(w)
    assert torch.equal(nvfp4.dequantize(nvfp4.quantize(w)), nvfp4.dequantize(theirs))


@needs("modelopt")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_modelopt_on_heavy_tails(dtype):
    w = heavy(dtype)
    assert nvfp4_differences(w, nvfp4.quantize(w), modelopt_nvfp4(w), {"zero scale": 1.0}) == {}
    assert equal(mxfp8.quantize(w), modelopt_mxfp8(w))
    # A block so small beside the tensor that amax / (6 g) underflows.
    w[3, :32] = torch.tensor(2.0**-130, dtype=dtype)
    w[4, :16] = 2.0**100
    assert nvfp4_differences(w, nvfp4.quantize(w), modelopt_nvfp4(w), {"zero scale": 1.0}) == {"zero scale": 2}


@needs("modelopt")
def test_modelopt_on_tensors_without_a_global_scale():
    """Rule `tiny tensor`."""
    zeros, tiny = torch.zeros(2, 32), torch.full((2, 32), 1e-26)
    assert modelopt_nvfp4(zeros).global_scale == 0 and nvfp4.quantize(zeros).global_scale == 1
    assert modelopt_nvfp4(tiny).global_scale < 2.0**-90 == nvfp4.quantize(tiny).global_scale
    assert not nvfp4.dequantize(nvfp4.quantize(zeros)).any()


@needs("modelopt")
def test_modelopt_rounds_the_logarithm():
    """Rule `rounded log`: fp32 amax one step above 448 * 2^10. In bf16 no value lies that close."""
    w = torch.zeros(1, 32)
    w[0, 0] = torch.nextafter(torch.tensor(448.0 * 2**10), torch.tensor(1e9))
    assert mxfp8.quantize(w).exponents.item() == 127 + 11 and modelopt_mxfp8(w)[1].item() == 127 + 10
    every = torch.arange(1, 0x7F80, dtype=torch.int16).view(torch.bfloat16)
    blocks = torch.cat((every, every[-1:]))[:, None] * torch.tensor([1] + [0] * 31, dtype=torch.bfloat16)
    assert equal(mxfp8.quantize(blocks), modelopt_mxfp8(blocks))


# -- torchao -------------------------------------------------------------------------------------------------------------------


def torchao_mxfp8(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    exponents, codes = to_mx(w, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
    return codes.view(torch.uint8), exponents.view(torch.uint8)


def torchao_nvfp4(w: torch.Tensor, g: torch.Tensor) -> NVFP4Tensor:
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

    scales, codes = nvfp4_quantize(w, 16, g)
    return NVFP4Tensor(codes.view(torch.uint8), scales.view(torch.uint8), g)


@needs("torchao")
@pytest.mark.parametrize("name", ["normal", "uniform", "sparse"])
def test_torchao_mxfp8_has_the_same_bytes(name):
    for dtype in (torch.bfloat16, torch.float32):
        w = weights(dtype)[name]
        assert equal(mxfp8.quantize(w), torchao_mxfp8(w))


@needs("torchao")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_torchao_mxfp8_on_heavy_tails(dtype):
    w = heavy(dtype)
    assert equal(mxfp8.quantize(w), torchao_mxfp8(w))
    # Rule `tiny block`: same exponent, other codes.
    w = torch.full((1, 32), 2.0**-125, dtype=dtype)
    ours, theirs = mxfp8.quantize(w), torchao_mxfp8(w)
    assert ours.exponents.item() == theirs[1].item() == 0 and ours.codes.all() and not theirs[0].any()


@needs("torchao")
def test_torchao_nvfp4_differs_by_named_rules():
    counts = {}
    for name, w in [*weights().items(), ("heavy tails", heavy(torch.bfloat16))]:
        ours = nvfp4.quantize(w)
        counts[name] = nvfp4_differences(w, ours, torchao_nvfp4(w, ours.global_scale), {"minimum scale": 2.0**-6})
    assert {name: dict(found) for name, found in counts.items()} == TORCHAO


@needs("torchao")
def test_torchao_swizzles_alike():
    from torchao.prototype.mx_formats.utils import from_blocked, to_blocked

    for m, s in ((1, 1), (128, 4), (129, 7), (300, 32)):
        scales = torch.randint(0, 256, (m, s), dtype=torch.uint8, generator=torch.Generator().manual_seed(m))
        assert torch.equal(layouts.swizzle(scales).flatten(), to_blocked(scales).flatten())
        assert torch.equal(layouts.unswizzle(layouts.swizzle(scales), m, s), from_blocked(to_blocked(scales), m, s))


# -- compressed-tensors --------------------------------------------------------------------------------------------------------


def compressed_nvfp4(w: torch.Tensor) -> NVFP4Tensor:
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.quant_scheme import NVFP4A16
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args = NVFP4A16["weights"]
    w = w.float()
    inverse = generate_gparam(w.amin(), w.amax())
    blocks = w.unflatten(-1, (-1, 16))
    scales, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args, inverse)
    state = {"weight": w, "weight_scale": scales, "weight_global_scale": inverse}
    packed = NVFP4PackedCompressor.compress(state, QuantizationScheme(targets=["Linear"], weights=args))
    return NVFP4Tensor(packed["weight_packed"], packed["weight_scale"].view(torch.uint8), 1 / inverse.reshape(()))


@needs("compressed_tensors")
def test_compressed_tensors_differs_by_named_rules():
    counts = {}
    for name, w in [*weights().items(), ("heavy tails", heavy(torch.bfloat16))]:
        ours, theirs = nvfp4.quantize(w), compressed_nvfp4(w)
        torch.testing.assert_close(theirs.global_scale, ours.global_scale, rtol=2.0**-22, atol=0)
        counts[name] = nvfp4_differences(w, ours, theirs, {"zero scale": 0.125})
    assert {name: dict(found) for name, found in counts.items()} == COMPRESSED_TENSORS


# Differing blocks and codes, of 6144 blocks and 98304 codes a weight.
TORCHAO = {
    "normal": {"rounded twice": 73},
    "uniform": {"rounded twice": 64},
    "sparse": {"zero block": 2721, "signed zero": 25115},
    "heavy tails": {"zero block": 208, "minimum scale": 3662, "rounded twice": 7, "signed zero": 272},
}
COMPRESSED_TENSORS = {
    "normal": {"rounded twice": 110},
    "uniform": {},
    "sparse": {"zero block": 2721},
    "heavy tails": {"zero block": 208, "zero scale": 2494},
}


# -- vLLM ----------------------------------------------------------------------------------------------------------------------


@needs("vllm")
def test_static_activations_are_vllm_s_reference():
    from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import ref_nvfp4_quant, ref_nvfp4_quant_dequant

    for w in [*weights().values(), heavy(torch.bfloat16), heavy(torch.float32)]:
        for scale in (activations.input_scale(w.abs().amax()), torch.tensor(0.003), torch.tensor(1.0)):
            t = activations.quantize_static(w, scale)
            codes, scales = ref_nvfp4_quant(w, 1 / scale, 16)
            assert torch.equal(nvfp4.decode_e2m1(nvfp4.unpack(t.codes)), codes)
            assert torch.equal(t.block_scales.view(torch.float8_e4m3fn).float(), scales)
            assert torch.equal(activations.round_trip(w, scale), ref_nvfp4_quant_dequant(w, 1 / scale, 16))

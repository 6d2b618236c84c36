"""Every edge rule against its golden vector, in every input dtype that holds the input, and the golden vectors against exact arithmetic."""

import json
import struct

import pytest
import torch

from samebits.quant import activations, kv, mxfp8, nvfp4
from samebits.quant.nvfp4 import NVFP4Tensor
from tests.support import exact_formats

FILES = {name: json.loads((exact_formats.GOLDEN / f"{name}.json").read_text()) for name in ("nvfp4", "mxfp8", "activations", "kv")}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def floats(text: str) -> torch.Tensor:
    return torch.tensor(struct.unpack(f">{len(text) // 8}f", bytes.fromhex(text)), dtype=torch.float32)


def octets(text: str) -> torch.Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)


def bits(x: torch.Tensor) -> list[int]:
    return x.reshape(-1).view(torch.int32).tolist()


def inputs(x: torch.Tensor) -> list[torch.Tensor]:
    """`x` in each dtype that holds it exactly."""
    return [x.to(d) for d in DTYPES if bits(x.to(d).float()) == bits(x)]


@pytest.mark.parametrize("rule", FILES["nvfp4"])
def test_nvfp4(rule):
    golden = FILES["nvfp4"][rule]
    given = floats(golden["given_scale"]).reshape(()) if golden["given_scale"] else None
    for x in inputs(floats(golden["x"])):
        t = nvfp4.quantize(x, given)
        assert nvfp4.unpack(t.codes).tolist() == octets(golden["codes"]).tolist(), x.dtype
        assert t.block_scales.tolist() == octets(golden["block_scales"]).tolist(), x.dtype
        assert bits(t.global_scale) == bits(floats(golden["global_scale"])), x.dtype
    values = nvfp4.dequantize(t)
    assert values.isfinite().all() == (rule != "largest given scale")  # 2688 * 2^117 is beyond fp32


@pytest.mark.parametrize("rule", FILES["mxfp8"])
def test_mxfp8(rule):
    golden = FILES["mxfp8"][rule]
    for x in inputs(floats(golden["x"])):
        t = mxfp8.quantize(x)
        assert t.codes.tolist() == octets(golden["codes"]).tolist(), x.dtype
        assert t.exponents.tolist() == octets(golden["exponents"]).tolist(), x.dtype
    assert mxfp8.dequantize(t).isfinite().all() == (rule != "largest fp32")  # which is rounded up to 2^128


@pytest.mark.parametrize("rule", FILES["activations"])
def test_activations(rule):
    golden = FILES["activations"][rule]
    for x in inputs(floats(golden["x"])):
        t = activations.quantize_static(x, floats(golden["input_scale"]))
        assert nvfp4.unpack(t.codes).tolist() == octets(golden["codes"]).tolist(), x.dtype
        assert t.block_scales.tolist() == octets(golden["block_scales"]).tolist(), x.dtype
        assert torch.equal(activations.dequantize_static(t), floats(golden["values"])), x.dtype
        token = activations.quantize_per_token(x)
        assert nvfp4.unpack(token.codes).tolist() == octets(golden["token_codes"]).tolist(), x.dtype
        assert token.block_scales.tolist() == octets(golden["token_block_scales"]).tolist(), x.dtype
        assert bits(token.global_scale) == bits(floats(golden["token_scale"])), x.dtype


def test_re_rounded_read_of_every_code_under_every_scale():
    """Bytes 0 to 0x7E as scales; 0x7F is NaN and counts as 0. Eight codes and their negatives fill a block."""
    want = torch.stack([octets(row) for row in FILES["kv"]["rounded"]] + [torch.zeros(8, dtype=torch.uint8)])
    codes = nvfp4.pack(torch.arange(16, dtype=torch.uint8)).expand(128, -1)
    rows = torch.cat((codes, torch.arange(128, dtype=torch.uint8)[:, None]), dim=-1)
    for dtype in (torch.float32, torch.bfloat16):
        values = kv.read(rows, 16, dtype, rounded=True)
        as_e4m3 = values.float().to(torch.float8_e4m3fn).view(torch.uint8)
        assert torch.equal(values.float(), as_e4m3.view(torch.float8_e4m3fn).float())
        assert torch.equal(as_e4m3[:, :8], want) and torch.equal(as_e4m3[:, 8:], want | 0x80)


def test_the_product_of_a_re_rounded_read_is_exact_in_fp16():
    """The hardware multiplies in fp16, this code in fp32: both are exact."""
    table = nvfp4.decode_e2m1(torch.arange(8, dtype=torch.uint8))
    scale = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    product = scale.float()[:, None] * table
    assert torch.equal((scale.half()[:, None] * table.half()).float(), product)


def test_golden_files_are_what_exact_arithmetic_gives(tmp_path, monkeypatch):
    monkeypatch.setattr(exact_formats, "GOLDEN", tmp_path)
    exact_formats.main()
    assert {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in FILES} == FILES


@pytest.mark.parametrize("given", [None, 0.001, 2.0**-7])
def test_nvfp4_is_exact_arithmetic_on_random_tensors(given):
    g = torch.Generator().manual_seed(7)
    for spread in (0.0, 2.0, 8.0):
        x = torch.randn(32, generator=g) * torch.exp2(torch.randn(32, generator=g) * spread)
        t = nvfp4.quantize(x, None if given is None else torch.tensor(given))
        scale = None if given is None else exact_formats.F(float(torch.tensor(given)))
        codes, scales, global_scale = exact_formats.nvfp4(x.tolist(), scale)
        assert nvfp4.unpack(t.codes).tolist() == codes and t.block_scales.tolist() == scales
        assert t.global_scale.item() == float(global_scale)


def test_mxfp8_and_activations_are_exact_arithmetic_on_random_tensors():
    g = torch.Generator().manual_seed(8)
    for spread in (0.0, 2.0, 8.0):
        x = torch.randn(64, generator=g) * torch.exp2(torch.randn(64, generator=g) * spread)
        m = mxfp8.quantize(x)
        assert (m.codes.tolist(), m.exponents.tolist()) == exact_formats.mxfp8(x.tolist())
        scale = activations.input_scale(x.abs().amax() / 2)
        t = activations.quantize_static(x, scale)
        codes, scales, values = exact_formats.static_activations(x.tolist(), exact_formats.F(scale.item()))
        assert nvfp4.unpack(t.codes).tolist() == codes and t.block_scales.tolist() == scales
        assert activations.dequantize_static(t).tolist() == [float(v) for v in values]
        t = activations.quantize_per_token(x)
        codes, scales, decode = exact_formats.token_activations(x.tolist())
        assert nvfp4.unpack(t.codes).tolist() == codes and t.block_scales.tolist() == scales
        assert t.global_scale.item() == float(decode)


def test_every_sixteen_bit_pattern_is_encoded_as_thresholds_say():
    """All finite fp16 and bf16 values through the integer arithmetic, against seven comparisons."""
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).float()
        x = x[x.isfinite()]
        code = sum((x.abs() > m) if i % 2 == 0 else (x.abs() >= m) for i, m in enumerate(exact_formats.MIDS))
        assert torch.equal(nvfp4.encode_e2m1(x), code.to(torch.uint8) | ((x < 0).to(torch.uint8) << 3))


def test_every_e8m0_byte_reads_as_its_power():
    exact = [2.0 ** (b - 127) for b in range(255)]
    assert mxfp8.scale_of(torch.arange(255, dtype=torch.uint8)).tolist() == exact
    assert mxfp8.scale_of(torch.tensor([255], dtype=torch.uint8)).isnan().all()


def test_a_given_global_scale_must_be_in_range():
    for bad in (0.0, 2.0**-91, -1.0, 2.0**118):
        with pytest.raises(ValueError, match=r"w1: global scale must lie within"):
            nvfp4.quantize(torch.ones(16), torch.tensor(bad), "w1")


def test_dequantize_casts_last():
    t = NVFP4Tensor(torch.tensor([0x53] * 8, dtype=torch.uint8), torch.tensor([0x39], dtype=torch.uint8), torch.tensor(0.3))
    for dtype in DTYPES:
        want = (torch.tensor([1.5, 3.0]).repeat(8) * (torch.tensor(1.125) * torch.tensor(0.3))).to(dtype)
        assert torch.equal(nvfp4.dequantize(t, dtype), want)

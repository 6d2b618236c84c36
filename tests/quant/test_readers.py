"""Other tools' weights become our formats without being quantized again, and a pair of experts' scales is never guessed."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from samebits.quant import mxfp8, nvfp4, readers
from samebits.quant.mxfp8 import MXFP8Tensor
from samebits.quant.nvfp4 import NVFP4Tensor
from samebits.quant.readers import CheckpointError, Kind, rescaled, share_scale
from samebits.quant.shards import Shards

MODULE = "model.layers.1.block_sparse_moe.experts.5.w1"


def load(folder, parts: dict[str, torch.Tensor]):
    """`parts` by leaf, through a file."""
    folder.mkdir(exist_ok=True)
    save_file({f"{MODULE}.{leaf}": t for leaf, t in parts.items()}, folder / "x.safetensors")
    return readers.describe(MODULE, {n.rpartition(".")[2]: e for n, e in Shards(folder).entries.items()})


def weight(seed: int = 0, n: int = 24, k: int = 64) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)).bfloat16()


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.float().view(torch.int32), b.float().view(torch.int32))


# ------------------------------------------------------------------------------------------------------------------- formats


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_plain_weights_are_read_as_they_are(tmp_path, dtype):
    w = weight().to(dtype)
    found = load(tmp_path, {"weight": w})
    assert found.kind is Kind.PLAIN and found.shape == (24, 64) and found.kind.format is None and found.nbytes == w.nbytes
    got = readers.read(found)
    assert got.dtype == dtype and torch.equal(got, w)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_modelopt_nvfp4_keeps_every_byte(tmp_path, shape):
    t = nvfp4.quantize(weight())
    parts = {
        "weight": t.codes,
        "weight_scale": t.block_scales.view(torch.float8_e4m3fn),
        "weight_scale_2": t.global_scale.reshape(shape),
        "input_scale": torch.tensor(0.5),
        "k_scale": torch.tensor(1.0),
    }
    found = load(tmp_path, parts)
    got = readers.read(found)
    assert found.kind is Kind.NVFP4 and found.shape == (24, 64) and found.name == f"{MODULE}.weight"
    assert isinstance(got, NVFP4Tensor) and got.global_scale.shape == ()
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(got, t, strict=True))
    assert readers.read_activation_scale(found) == 0.5
    assert found.nbytes == 24 * 32 + 24 * 4 + 4


@pytest.mark.parametrize("leaf, kind", [("weight_scale", Kind.MXFP8), ("weight_scale_inv", Kind.MXFP8_MINIMAX)])
@pytest.mark.parametrize("exponent_dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_mxfp8_of_every_naming_keeps_every_byte(tmp_path, leaf, kind, exponent_dtype):
    t = mxfp8.quantize(weight())
    found = load(tmp_path, {"weight": t.codes.view(torch.float8_e4m3fn), leaf: t.exponents.view(exponent_dtype)})
    got = readers.read(found)
    assert found.kind is kind and found.shape == (24, 64)
    assert isinstance(got, MXFP8Tensor) and torch.equal(got.codes, t.codes) and torch.equal(got.exponents, t.exponents)
    assert got.codes.dtype == got.exponents.dtype == torch.uint8


def compressed(t: NVFP4Tensor, dividing: float) -> dict[str, torch.Tensor]:
    return {
        "weight_packed": t.codes,
        "weight_scale": t.block_scales.view(torch.float8_e4m3fn),
        "weight_global_scale": torch.tensor([dividing], dtype=torch.float32),
    }


def by_division(t: NVFP4Tensor, dividing: float) -> torch.Tensor:
    """code * (s / G) in fp32, as compressed-tensors defines a value."""
    s = t.block_scales.view(torch.float8_e4m3fn).float() / torch.tensor(dividing, dtype=torch.float32)
    return (nvfp4.decode_e2m1(nvfp4.unpack(t.codes)).unflatten(-1, (-1, 16)) * s[..., None]).flatten(-2)


@pytest.mark.parametrize("power", [-9, 0, 5, 11, 40])
def test_reciprocal_scales_are_exact_at_powers_of_two(tmp_path, power):
    t = nvfp4.quantize(weight(), torch.tensor(2.0**-power))
    found = load(tmp_path, compressed(t, 2.0**power))
    got = readers.read(found)
    assert found.kind is Kind.NVFP4_RECIPROCAL and found.name == f"{MODULE}.weight_packed"
    assert torch.equal(got.codes, t.codes) and torch.equal(got.block_scales, t.block_scales)
    assert got.global_scale == 2.0**-power and got.global_scale.shape == ()
    assert same(nvfp4.dequantize(got), by_division(t, 2.0**power))


def test_other_reciprocal_scales_are_rounded_once(tmp_path):
    g = torch.Generator().manual_seed(1)
    different = 0
    for i in range(40):
        dividing = (torch.rand((), generator=g) * 4000 + 1).item()
        t = nvfp4.quantize(weight(i))
        found = load(tmp_path / str(i), compressed(t, dividing))
        got = readers.read(found)
        exact = 1 / torch.tensor(dividing, dtype=torch.float32).double()
        assert got.global_scale == exact.float() and got.global_scale.dtype == torch.float32  # correctly rounded
        a, b = nvfp4.dequantize(got), by_division(t, dividing)
        assert ((a - b).abs() <= b.abs() * 2.0**-21).all()
        different += not same(a, b)
    assert different > 0  # so the reciprocal is not exact in general, and nobody may say so


def test_reciprocal_activation_scale_becomes_multiplicative(tmp_path):
    t = nvfp4.quantize(weight())
    found = load(tmp_path, compressed(t, 8.0) | {"input_global_scale": torch.tensor([32.0])})
    assert readers.read_activation_scale(found) == 1 / 32


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan, 3e38, 1e-40])
def test_unusable_global_scales_are_refused(tmp_path, value):
    t = nvfp4.quantize(weight())
    with pytest.raises(CheckpointError, match=rf"x.safetensors: tensor {MODULE}.weight_global_scale is .*, no usable global scale"):
        readers.read(load(tmp_path / "ct", compressed(t, value)))
    if value != 3e38:
        parts = {"weight": t.codes, "weight_scale": t.block_scales.view(torch.float8_e4m3fn), "weight_scale_2": torch.tensor(value)}
        with pytest.raises(CheckpointError, match=rf"{MODULE}.weight_scale_2 is .*, no usable global scale"):
            readers.read(load(tmp_path / "mo", parts))


@pytest.mark.parametrize("byte", [0x7F, 0xFF, 0x80, 0xB8])
def test_nan_and_negative_block_scales_are_refused(tmp_path, byte):
    t = nvfp4.quantize(weight())
    t.block_scales[3, 1] = byte
    with pytest.raises(CheckpointError, match=f"{MODULE}.weight_scale holds a NaN or negative block scale"):
        readers.read(load(tmp_path, compressed(t, 1.0)))


@pytest.mark.parametrize(
    "code, exponent, message", [(0x7F, 0, "weight holds NaN"), (0xFF, 0, "weight holds NaN"), (0, 0xFF, "weight_scale holds a NaN")]
)
def test_nan_in_mxfp8_is_refused(tmp_path, code, exponent, message):
    t = mxfp8.quantize(weight())
    t.codes[2, 7], t.exponents[5, 1] = code, exponent
    with pytest.raises(CheckpointError, match=f"{MODULE}.{message}"):
        readers.read(load(tmp_path, {"weight": t.codes.view(torch.float8_e4m3fn), "weight_scale": t.exponents}))


E4M3, U8 = torch.float8_e4m3fn, torch.uint8


@pytest.mark.parametrize(
    "parts, message",
    [
        ({"weight": ((24, 32), U8), "weight_scale": ((24, 4), E4M3)}, "weight_scale_2 is missing"),
        ({"weight": ((24, 32), U8), "weight_scale_2": ((), torch.float32)}, "weight_scale is missing"),
        ({"weight_packed": ((24, 32), U8), "weight_scale": ((24, 4), E4M3)}, "weight_global_scale is missing"),
        ({"weight": ((24, 64), E4M3)}, "weight_scale is missing"),
        ({"weight_scale": ((24, 4), E4M3)}, f"weight_scale has no {MODULE}.weight"),
        ({"weight": ((24, 64), torch.int32)}, "weight is I32: a format without a reader"),
        # FP8 with fp32 scales of any kind, and MXFP4: no reader, and nothing that may pass for MXFP8 or NVFP4.
        ({"weight": ((24, 64), E4M3), "weight_scale": ((), torch.float32)}, "weight_scale is F32 .* a format without a reader"),
        ({"weight": ((24, 64), E4M3), "weight_scale_inv": ((1, 1), torch.float32)}, "weight_scale_inv is F32 .* a format without a reader"),
        ({"weight": ((24, 64), E4M3), "weight_scale": ((24, 4), U8)}, "weight_scale is U8 .* a format without a reader"),
        (
            {"weight_packed": ((24, 32), U8), "weight_scale": ((24, 2), U8), "weight_global_scale": ((1,), torch.float32)},
            "weight_scale is U8 .* a format without a reader",
        ),
        (
            {"weight": ((24, 64), E4M3), "weight_scale": ((24, 2), U8), "weight_scale_2": ((), torch.float32)},
            "does not belong to a weight in F8_E4M3",
        ),
        ({"weight": ((24, 64), torch.bfloat16), "weight_scale": ((24, 2), U8)}, "weight_scale does not belong to a weight in BF16"),
        (
            {"weight": ((24, 32), U8), "weight_scale": ((24, 4), U8), "weight_scale_2": ((), torch.float32)},
            "is U8 .*, not F8_E4M3",
        ),
        (
            {"weight": ((24, 32), U8), "weight_scale": ((24, 4), E4M3), "weight_scale_2": ((), torch.bfloat16)},
            "is BF16 .*, not F32",
        ),
        ({"weight": ((24, 64), E4M3), "weight_scale": ((24, 2), torch.float32)}, "weight_scale is F32 .*, not U8"),
        ({"weight": ((24, 20), U8), "weight_scale": ((24, 2), E4M3), "weight_scale_2": ((), torch.float32)}, "multiple of 16"),
        ({"weight": ((24, 40), E4M3), "weight_scale": ((24, 1), U8)}, "multiple of 32"),
        (
            {"weight": ((24, 32), U8), "weight_scale": ((24, 4), E4M3), "weight_scale_2": ((2,), torch.float32)},
            "weight_scale_2 is F32 .2., not",
        ),
    ],
)
def test_everything_else_is_refused_by_name(tmp_path, parts, message):
    with pytest.raises(CheckpointError, match=f"x.safetensors: .*{message}"):
        load(tmp_path, {leaf: torch.zeros(shape).to(dtype) for leaf, (shape, dtype) in parts.items()})


def test_declared_methods_that_tensors_do_not_tell_are_refused():
    for method in ("modelopt", "compressed-tensors", "mxfp8"):
        readers.check_declared({"quantization_config": {"quant_method": method}}, "x")
    readers.check_declared({}, "x")
    with pytest.raises(CheckpointError, match="^x: quantization method 'gptq' has no reader"):
        readers.check_declared({"quantization_config": {"quant_method": "gptq"}}, "x")
    with pytest.raises(CheckpointError, match="method 'awq'"):
        readers.check_declared({"text_config": {"quantization_config": {"quant_method": "awq"}}}, "x")
    rotated = {"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"R1": {}}}}
    with pytest.raises(CheckpointError, match="rotated"):
        readers.check_declared({"quantization_config": rotated}, "x")


# -------------------------------------------------------------------------------------------------- pairs with different scales


def tensor(scales: list[float], global_scale: float, seed: int = 0) -> NVFP4Tensor:
    """One row for each block scale, all codes from 1 to 15 in it."""
    codes = torch.stack([torch.arange(16).roll(seed + i) for i in range(len(scales))]).to(torch.uint8)
    s = torch.tensor(scales).to(torch.float8_e4m3fn)
    assert torch.equal(s.float(), torch.tensor(scales))
    return NVFP4Tensor(nvfp4.pack(codes), s.view(torch.uint8)[:, None], torch.tensor(global_scale, dtype=torch.float32))


def check_shared(gate: NVFP4Tensor, up: NVFP4Tensor, want: float) -> None:
    a, b = share_scale(gate, up, ("gate", "up"))
    assert a.global_scale == b.global_scale == want
    for old, new in ((gate, a), (up, b)):
        assert torch.equal(new.codes, old.codes) and same(nvfp4.dequantize(new), nvfp4.dequantize(old))
    swapped = share_scale(up, gate, ("up", "gate"))
    assert torch.equal(swapped[0].block_scales, b.block_scales) and torch.equal(swapped[1].block_scales, a.block_scales)


def test_equal_scales_are_left_alone():
    gate, up = tensor([448.0, 1.0], 0.3), tensor([3.0, 448.0], 0.3)
    a, b = share_scale(gate, up, ("gate", "up"))
    assert a is gate and b is up


def test_a_power_of_two_goes_into_the_block_scales():
    check_shared(tensor([448.0, 0.875], 0.3), tensor([448.0, 2.0**-4], 0.3 / 4), want=torch.tensor(0.3).item())


def test_the_larger_scale_is_taken_where_both_would_do():
    check_shared(tensor([1.0, 3.0], 0.5), tensor([2.0, 0.5], 0.125), want=0.5)


def test_the_smaller_scale_is_taken_where_only_it_keeps_the_bits():
    check_shared(tensor([1.0, 256.0], 1.5 * 2.0**-12), tensor([448.0, 1.0], 2.0**-12), want=2.0**-12)


def test_the_smaller_scale_is_taken_where_the_larger_would_lose_bits():
    gate, up = tensor([112.0, 1.0], 0.25), tensor([448.0, 2.0**-9], 0.0625)
    assert rescaled(up, gate.global_scale) is None
    check_shared(gate, up, want=0.0625)


def test_a_scale_between_the_two_is_found():
    gate, up = tensor([224.0, 1.0], 0.25), tensor([448.0, 6 * 2.0**-9], 0.0625)
    assert rescaled(up, gate.global_scale) is None and rescaled(gate, up.global_scale) is None
    check_shared(gate, up, want=0.125)


def test_a_ratio_that_every_block_scale_can_take_is_no_power_of_two():
    check_shared(tensor([448.0, 1.0], 1.5 * 2.0**-12), tensor([1.5, 12.0], 2.0**-12), want=1.5 * 2.0**-12)


def test_every_row_is_verified(monkeypatch):
    monkeypatch.setattr(readers, "_ROWS", 2)
    good = [448.0] * 5
    check_shared(tensor(good, 0.5), tensor(good, 0.25), want=0.5)
    for i in range(5):
        bad = list(good)
        bad[i] = 2.0**-9
        with pytest.raises(CheckpointError):
            share_scale(tensor(good, 0.5), tensor(bad, 0.25), ("gate", "up"))


def test_a_block_of_zeros_takes_any_scale():
    gate, up = tensor([448.0, 1.0], 1.5), tensor([1.5, 1.25], 1.0)
    with pytest.raises(CheckpointError):
        share_scale(gate, up, ("gate", "up"))
    up.codes[1] = torch.tensor([0x80, 0x08, 0x00, 0x88, 0, 0, 0, 0], dtype=torch.uint8)  # +0 and -0
    check_shared(gate, up, want=1.5)


@pytest.mark.parametrize(
    "gate, up",
    [
        (([448.0, 1.0], 4.83e-5), ([448.0, 1.0], 3.85e-5)),  # as found in a published checkpoint
        (([448.0, 1.0], 10.0), ([448.0, 1.0], 1.0)),
        (([448.0, 1.0], 0.25), ([448.0, 2.0**-9], 0.125)),  # a power of two, but one bit too many on either side
        (([448.0], 1.0), ([448.0], 1.0000001)),
    ],
)
def test_anything_else_is_refused_with_both_names_and_scales(gate, up):
    with pytest.raises(CheckpointError, match=r"^experts\.5\.w1 and experts\.5\.w3 have global scales .* and .*, which cannot be made one"):
        share_scale(tensor(*gate), tensor(*up), ("experts.5.w1", "experts.5.w3"))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 0x7E), min_size=1, max_size=6),
    st.lists(st.integers(0, 0x7E), min_size=1, max_size=6),
    st.sampled_from([1.0, 0.5, 2.0**-3, 2.0**-7, 1.5, 0.3, 3e-5]),
    st.integers(0, 99),
)
def test_no_value_ever_changes(gate_bytes, up_bytes, ratio, seed):
    g = torch.Generator().manual_seed(seed)

    def make(scales: list[int], scale: float) -> NVFP4Tensor:
        codes = torch.randint(0, 256, (len(scales), 8), generator=g, dtype=torch.int32).to(torch.uint8)
        return NVFP4Tensor(codes, torch.tensor(scales, dtype=torch.uint8)[:, None], torch.tensor(scale))

    gate, up = make(gate_bytes, 0.37), make(up_bytes, 0.37 * ratio)
    try:
        a, b = share_scale(gate, up, ("gate", "up"))
    except CheckpointError:
        return
    assert torch.equal(a.global_scale, b.global_scale)
    assert same(nvfp4.dequantize(a), nvfp4.dequantize(gate)) and same(nvfp4.dequantize(b), nvfp4.dequantize(up))


# --------------------------------------------------------------------------------------------------- against the real writer


def test_compressed_tensors_own_nvfp4(tmp_path):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme

    scheme: QuantizationScheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
    for dividing, exact in ((1024.0, True), (875.3, False)):
        w = weight().float()
        g = torch.tensor([dividing])
        s = (g * w.unflatten(-1, (-1, 16)).abs().amax(-1) / 6).to(torch.float8_e4m3fn)
        state = NVFP4PackedCompressor.compress({"weight": w, "weight_scale": s.float(), "weight_global_scale": g}, scheme)
        theirs = NVFP4PackedCompressor.decompress(state, scheme)["weight"]
        found = load(tmp_path / str(dividing), dict(state))
        ours = nvfp4.dequantize(readers.read(found))
        assert found.kind is Kind.NVFP4_RECIPROCAL and found.shape == (24, 64)
        if exact:
            assert same(ours, theirs)
        else:
            torch.testing.assert_close(ours, theirs.float(), rtol=2.0**-8, atol=0)  # theirs is in bf16


def test_compressed_tensors_own_mxfp8(tmp_path):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.mxfp8 import MXFP8QuantizationCompressor
    from compressed_tensors.quantization import preset_name_to_scheme

    scheme = preset_name_to_scheme("MXFP8A16", ["Linear"])
    w = weight().float()
    scale = mxfp8.scale_of(mxfp8.quantize(w).exponents)
    state = MXFP8QuantizationCompressor.compress({"weight": w, "weight_scale": scale}, scheme)
    found = load(tmp_path, dict(state))
    ours, want = readers.read(found), mxfp8.quantize(w)
    assert found.kind is Kind.MXFP8
    assert torch.equal(ours.exponents, want.exponents) and torch.equal(ours.codes, want.codes)

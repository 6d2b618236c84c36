"""What of the MSA kernels can be shown without a GPU: their decoding, by running its PTX text, and the kernels in the interpreter."""

import re
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from samebits.quant import kv, nvfp4
from samebits.quant.blocks import e4m3_values
from tests.support.interpreter import interpreted

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")


def bf16_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Two bf16 products a register, rounded to nearest even, subnormals kept."""
    halves = []
    for shift in (0, 16):
        x, y = (torch.from_numpy(((v >> np.uint32(shift)) & np.uint32(0xFFFF)).astype(np.int64)) for v in (a, b))
        x, y = (v.to(torch.int16).view(torch.bfloat16).double() for v in (x, y))
        halves.append((x * y).to(torch.bfloat16).view(torch.int16).numpy().astype(np.int64).astype(np.uint32) & np.uint32(0xFFFF))
    return halves[0] | halves[1] << np.uint32(16)


def run_ptx(text: str, outputs: int, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """Run the few instructions that the decoders use on uint32 arrays."""
    registers = {f"${outputs + i}": x for i, x in enumerate(inputs)}

    def value(name: str):
        if name in registers:
            return registers[name]
        return np.uint32(int(name[2:], 16) if name.startswith("0f") else int(name, 0))

    for line in text.splitlines():
        line = line.strip().rstrip(";")
        if not line or line[0] in "{}" or line.startswith(".reg"):
            continue
        name, rest = line.split(None, 1)
        target, *operands = [part.strip() for part in rest.split(",")]
        args = [value(x) for x in operands]
        if name == "mov.b32":
            result = args[0]
        elif name == "shr.u32":
            result = args[0] >> args[1]
        elif name == "shl.b32":
            result = args[0] << args[1]
        elif name == "add.u32":
            result = args[0] + args[1]
        elif name == "mul.rn.f32":
            result = (args[0].view(np.float32) * args[1].view(np.float32)).view(np.uint32)
        elif name == "cvt.rn.satfinite.e4m3x2.f32":
            high, low = (kv.round_e4m3(torch.from_numpy(x.view(np.float32).copy())).to(torch.float8_e4m3fn).view(torch.uint8) for x in args)
            result = low.numpy().astype(np.uint32) | high.numpy().astype(np.uint32) << np.uint32(8)
        elif name == "cvt.u32.u16":
            result = args[0] & np.uint32(0xFFFF)
        elif name == "and.b32":
            result = args[0] & args[1]
        elif name == "or.b32":
            result = args[0] | args[1]
        elif name == "mul.lo.u32":
            result = (args[0].astype(np.uint64) * np.uint64(args[1]) & np.uint64(0xFFFFFFFF)).astype(np.uint32)
        elif name == "prmt.b32":
            both = args[0].astype(np.uint64) | np.asarray(args[1]).astype(np.uint64) << np.uint64(32)
            result = np.zeros_like(args[0])
            for i in range(4):
                byte = both >> (np.asarray(args[2]).astype(np.uint64) >> np.uint64(4 * i) & np.uint64(7)) * np.uint64(8) & np.uint64(0xFF)
                result = result | byte.astype(np.uint32) << np.uint32(8 * i)
        elif name == "mul.rn.bf16x2":
            a, b = np.broadcast_arrays(args[0], args[1])
            result = bf16_product(a, b)
        else:
            raise AssertionError(f"unknown instruction {name}")
        registers[target] = result
    return [registers[f"${i}"] for i in range(outputs)]


def halves(x: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 values of the two bf16 of each register."""
    return tuple(torch.from_numpy(((x >> np.uint32(s)) << np.uint32(16)).view(np.float32).copy()) for s in (0, 16))


@pytest.fixture(scope="module")
def tiles():
    from samebits.kernels import triton_msa_tiles

    return triton_msa_tiles


def all_scales(tiles) -> tuple[np.ndarray, torch.Tensor]:
    """Every finite scale byte in both halves, as the kernel prepares it, and its value."""
    byte = np.arange(0x7F, dtype=np.uint32)
    raw = (byte & 0x7F) << 4
    (prepared,) = run_ptx(tiles._SCALE_ASM.value, 1, [raw | raw << 16])
    return prepared, e4m3_values(torch.arange(0x7F, dtype=torch.uint8))


def test_every_code_under_every_scale(tiles):
    """Codes are exact: value * 2^-7, for all 16 codes at each of the eight places of a word and all 127 finite scales."""
    prepared, scale = all_scales(tiles)
    words = np.array([sum(((c + 5 * place) % 16) << 4 * place for place in range(8)) for c in range(16)], np.uint32)
    word, s = (a.ravel() for a in np.meshgrid(words, prepared, indexing="ij"))
    out = run_ptx(tiles._E2M1_ASM.value, 4, [word, s])
    values = scale.repeat(16)
    for i in range(4):
        for side, have in enumerate(halves(out[i])):
            code = torch.from_numpy((word >> np.uint32(4 * i + 16 * side) & 15).astype(np.uint8))
            want = nvfp4.decode_e2m1(code) * values * 2.0**-7
            assert torch.equal(have.view(torch.int32), want.view(torch.int32)), (i, side)


def test_scale_bytes_of_two_words(tiles):
    """Every scale byte at every place of each of two words, beside any others, as `block_scales` prepares it; NaN and signs too."""
    byte, place = (a.ravel().astype(np.uint32) for a in np.meshgrid(np.arange(256), np.arange(4), indexing="ij"))
    rest = np.random.default_rng(0).integers(0, 2**32, byte.size, dtype=np.uint32)
    words = rest & ~(np.uint32(0xFF) << np.uint32(8) * place) | byte << np.uint32(8) * place
    other = np.random.default_rng(1).permutation(byte.size)
    (have,) = run_ptx(tiles._BYTE_SCALE_ASM.value, 1, [words, words[other], place, place[other]])
    raw = (byte & 0x7F) << 4
    (want,) = run_ptx(tiles._SCALE_ASM.value, 1, [raw | raw[other] << 16])
    assert np.array_equal(have, want)


def test_both_scales_of_a_key_at_once(tiles):
    """All pairs of scale bytes, NaN too, as `block_scales` has them: four places up, one in each half."""
    first, second = (a.ravel().astype(np.uint32) for a in np.meshgrid(np.arange(128), np.arange(128), indexing="ij"))
    have = (first | second << 8) * np.uint32(tiles.SCALE_COPIES.value) & np.uint32(tiles.SCALE_BITS.value)
    assert np.array_equal(have, first << 4 | second << 20)


def test_every_value_that_nvfp4_holds_is_rounded_as_the_reference_rounds(tiles):
    """Codes times scales, times 2^-7, in bf16: to E4M3 and back, saturating at 448."""
    scale = e4m3_values(torch.arange(0x7F, dtype=torch.uint8))
    values = (nvfp4.decode_e2m1(torch.arange(16, dtype=torch.uint8))[:, None] * scale).flatten()
    bits = (values / 128).bfloat16().view(torch.int16).numpy().astype(np.int64).astype(np.uint32) & 0xFFFF
    (have,) = run_ptx(tiles._ROUND_ASM.value, 1, [bits | np.roll(bits, 5) << 16])
    want = kv.round_e4m3(values) / 128
    assert torch.equal(halves(have)[0].view(torch.int32), want.view(torch.int32))
    assert torch.equal(halves(have)[1].view(torch.int32), want.roll(5).view(torch.int32))


def test_every_weight_beside_nvfp4_values_is_multiplied_by_what_they_lack(tiles):
    """All bf16 numbers from 0 to 1, subnormal ones too."""
    bits = np.arange(0x3F81, dtype=np.uint32)
    (have,) = run_ptx(tiles._UNIT_ASM.value, 1, [bits | np.roll(bits, 7) << 16])
    want = torch.from_numpy((bits << 16).view(np.float32).copy()) * 128
    assert want[-1] == 128 and torch.equal(halves(have)[0], want) and torch.equal(halves(have)[1], want.roll(7))


def test_every_e4m3_byte(tiles):
    byte = np.arange(256, dtype=np.uint32)
    byte = byte[byte & 0x7F != 0x7F]
    first = byte | np.roll(byte, 1) << 8 | np.roll(byte, 2) << 16 | np.roll(byte, 3) << 24
    second = np.roll(first, 7)
    out = run_ptx(tiles._E4M3_ASM.value, 4, [first, second])
    for i in range(4):
        for word, have in zip((first, second), halves(out[i]), strict=True):
            bits = torch.from_numpy((word >> np.uint32(8 * i) & 0xFF).astype(np.uint8))
            assert torch.equal(have, bits.view(torch.float8_e4m3fn).float()), i


def test_the_decoders_have_the_instructions_they_are_said_to_have(tiles):
    """Four instructions for two codes, and one shift a word."""
    names = re.findall(r"^([a-z0-9.]+) ", tiles._E2M1_ASM.value, re.M)
    assert names.count("and.b32") == 8 and names.count("mul.lo.u32") == 4 and names.count("mul.rn.bf16x2") == 4
    assert names.count("shr.u32") == 1 and len(names) == 18  # with .reg


def test_kernels_in_the_interpreter_give_the_results_of_torch():
    assert interpreted("tests.kernels.interpret_msa") == "same results"


def test_decoding_without_ptx_has_the_bits_of_the_reference():
    assert interpreted("tests.kernels.interpret_decode") == "same bits"

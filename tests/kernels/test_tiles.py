"""The kernels' order of packed weights: bits come back, each goes where the docstrings say, what cannot be read is refused."""

from importlib.util import find_spec

import pytest
import torch

from samebits.kernels.activation import SwiGLU
from samebits.kernels.expert_tiles import NVFP4Tiles, pack_experts, unpack_experts
from samebits.kernels.linear import LoRA, lora_linear
from samebits.kernels.linear_tiles import pack_linear, unpack_linear
from samebits.kernels.moe import moe
from samebits.quant import mxfp8, nvfp4
from samebits.quant.mxfp8 import MXFP8Tensor
from samebits.quant.nvfp4 import NVFP4Tensor
from tests.support.interpreter import interpreted

G = torch.Generator().manual_seed(0)


def equal(a, b) -> bool:
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


def random_experts(n: int, k: int) -> NVFP4Tensor:
    codes = torch.randint(0, 256, (3, n, k // 2), dtype=torch.uint8, generator=G)
    scales = torch.randint(1, 0x7F, (3, n, k // 16), dtype=torch.uint8, generator=G)
    return NVFP4Tensor(codes, scales, torch.tensor([0.5, 2.0, 3e-5]))


@pytest.mark.parametrize(("n", "k"), [(48, 32), (96, 48), (130, 256), (7, 144), (1, 16)])
def test_experts_come_back(n, k):
    packed = random_experts(n, k)
    tiles = pack_experts(packed)
    assert tiles.codes.shape == (3, -(-k // 128), n, 16) and tiles.scales.shape == (3, -(-k // 128), n)
    assert equal(unpack_experts(tiles), packed)
    # As many bytes as before, in whole chunks.
    assert sum(t.nbytes for t in tiles[:2]) * k == sum(t.nbytes for t in packed[:2]) * -(-k // 128) * 128


def test_every_scale_comes_back_and_every_bit_is_where_the_docstring_says():
    codes = torch.zeros(1, 254, 128, dtype=torch.uint8)
    scales = torch.full((1, 254, 16), 0x38, dtype=torch.uint8)
    scales[0, :127, 3] = torch.arange(127, dtype=torch.uint8)  # byte 0 stands over zeros
    element = 128 + 5 * 16 + 9  # chunk 1, plane 5, input 9
    codes[0, 200, element // 2] = 0b1110 << 4  # odd: the high nibble; sign, magnitude 6
    tiles = pack_experts(NVFP4Tensor(codes, scales, torch.ones(1)))
    assert equal(unpack_experts(tiles), (codes, scales, torch.ones(1)))
    # Plane 5 is in the second word, turned by 6; an odd input's sign is 31 and its magnitude 24..22 before the turn.
    assert tiles.codes[0, 1, 200, 9].item() & 0xFFFFFFFF == 1 << 5 | 6 << 28
    assert tiles.codes.count_nonzero() == 1
    codes.zero_()
    codes[0, 3, (7 * 16 + 4) // 2] = 0b1111  # plane 7 is in the mixed word, turned by 8: bits 23, and 16..14
    assert pack_experts(NVFP4Tensor(codes, scales, torch.ones(1))).codes[0, 0, 3, 4:6].tolist() == [1 << 23 | 3 << 14, 1 << 16]
    # 1.0 is exponent 10 of E5M3; 2^-9, the smallest E4M3, is exponent 1; 448 = 1.75 * 2^8 is exponent 18, fraction 6.
    for row, want in ((0x38, 10 * 8), (1, 8), (0x7E, 18 * 8 + 6), (0, 0)):
        four = tiles.scales[0, 0, row].item() & 0xFFFFFFFF  # the byte 3 of four, turned left by 4: its upper half comes in at the bottom
        assert (four >> 28 | (four & 15) << 4, four >> 4 & 0xFF) == (want, 10 * 8)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: t._replace(block_scales=t.block_scales.index_fill(1, torch.tensor([2]), 0x7F)), "w13: a block scale is NaN or negative"),
        (lambda t: t._replace(block_scales=t.block_scales | 0x80), "w13: a block scale is NaN or negative"),
        (lambda t: t._replace(block_scales=t.block_scales * 0), "w13: a block scale is 0 over codes that are not"),
        (lambda t: t._replace(global_scale=torch.tensor(1.0)), "w13: needs a stack"),
        (lambda t: t._replace(global_scale=torch.tensor([1.0, 2.0**101, 1.0])), "w13: a global scale is beyond 2\\^100"),
        (lambda t: NVFP4Tensor(*(part[0] for part in t)), "w13: needs a stack"),
    ],
)
def test_what_the_kernels_cannot_read_is_refused(change, text):
    with pytest.raises(ValueError, match=f"^{text}"):
        pack_experts(change(random_experts(8, 32)), "w13")


@pytest.mark.parametrize(("n", "k"), [(48, 32), (96, 160), (130, 256), (7, 96)])
def test_a_matrix_comes_back(n, k):
    packed = mxfp8.quantize(torch.randn(n, k, generator=G))
    tiles = pack_linear(packed)
    assert tiles.codes.shape == (-(-k // 128), n, 16) and tiles.scales.shape == (-(-k // 128), n)
    assert equal(unpack_linear(tiles), packed)
    assert unpack_linear(tiles).codes.is_contiguous()


def test_bytes_of_a_matrix_are_where_the_docstring_says():
    codes, exponents = torch.zeros(5, 256, dtype=torch.uint8), torch.full((5, 8), 127, dtype=torch.uint8)
    codes[3, 128 + 6 * 16 + 11] = 0x9C
    codes[4, 1 * 16 + 2] = 0x9D
    exponents[2, 4 + 3] = 99
    tiles = pack_linear(MXFP8Tensor(codes, exponents))
    # Plane 6: in place, in the high half of the second word. Plane 1: the other bits of the low half of the first.
    assert tiles.codes[1, 3, 11].item() & (1 << 64) - 1 == (1 << 31 | 0x1C << 20) << 32
    assert tiles.codes[0, 4, 2].item() == 1 << 19 | (0x1D >> 3) << 11 | 0x1D & 7 and tiles.codes.count_nonzero() == 2
    four = tiles.scales[1, 2].item() & 0xFFFFFFFF
    assert (four >> 7 | four << 25) & 0xFFFFFFFF == sum((b + 88) << 8 * j for j, b in enumerate((127, 127, 127, 99)))


@pytest.mark.parametrize(
    ("code", "exponent", "text"),
    [
        (0x7F, 127, "qkv: holds NaN"),
        (0xFF, 127, "qkv: holds NaN"),
        (1, 41, "qkv: a block's exponent is outside of -85..39"),
        (1, 167, "qkv: a block's exponent is outside of -85..39"),
        (0, 167, "qkv: a block of zeros has an exponent above 39"),
    ],
)
def test_a_matrix_out_of_range_is_refused(code, exponent, text):
    with pytest.raises(ValueError, match=f"^{text}"):
        pack_linear(MXFP8Tensor(torch.full((2, 32), code, dtype=torch.uint8), torch.full((2, 1), exponent, dtype=torch.uint8)), "qkv")
    zeros = MXFP8Tensor(torch.zeros(2, 32, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.uint8))
    assert equal(unpack_linear(pack_linear(zeros)), zeros)


def test_on_cpu_tiles_compute_what_their_tensors_do():
    w13, w2 = (nvfp4.quantize(torch.randn(4, *shape, generator=G)) for shape in ((96, 80), (80, 48)))
    x, ids, weights = torch.randn(9, 80, generator=G), torch.tensor([[0, 2], [3, 1], [1, 2]]).repeat(3, 1), torch.rand(9, 2, generator=G)
    out = moe(x, pack_experts(w13), pack_experts(w2), ids, weights, SwiGLU())
    assert torch.equal(out, moe(x, w13, w2, ids, weights, SwiGLU()))
    assert isinstance(pack_experts(w13), NVFP4Tiles)
    packed, lora = mxfp8.quantize(torch.randn(40, 96, generator=G)), LoRA(torch.randn(1, 4, 96), torch.randn(1, 40, 4))
    y = torch.randn(9, 96, generator=G)
    assert torch.equal(lora_linear(y, pack_linear(packed), lora), lora_linear(y, packed, lora))


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_kernels_in_the_interpreter_compute_what_the_reference_does():
    assert interpreted("tests.kernels.interpret_moe") == "as the reference"


def test_matrices_are_unpacked_as_many_at_a_time_as_there_is_room_for(monkeypatch):
    from samebits.kernels import expert_tiles

    packed = random_experts(48, 160)
    tiles, inner, sizes = pack_experts(packed), expert_tiles._unpack, []
    monkeypatch.setattr(expert_tiles, "_unpack", lambda words, *rest: sizes.append(len(words)) or inner(words, *rest))
    one = 48 * 256  # nibbles of a matrix, in whole chunks
    for room, want in ((3 * one, [3]), (3 * one - 1, [2, 1]), (1, [1, 1, 1])):
        monkeypatch.setattr(expert_tiles, "_NIBBLES", room)
        sizes.clear()
        assert equal(unpack_experts(tiles), packed) and sizes == want

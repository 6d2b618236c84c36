"""Decoding without PTX, in Triton's interpreter: `TRITON_INTERPRET=1 python -m tests.kernels.interpret_decode`.

These are the plain operations that kernels take where there is no PTX, as on AMD: every code under every scale, every E4M3 byte and every
block exponent must come out with the bits of the reference, and be a bf16 number, since that is what the values are cast to there. The PTX
itself is compared with the same reference in `test_triton_msa_logic`, and on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from samebits.kernels import triton_msa_tiles as msa_tiles
from samebits.kernels import triton_tiles
from samebits.kernels.expert_tiles import pack_experts
from samebits.kernels.linear_tiles import pack_linear
from samebits.quant import kv, mxfp8, nvfp4
from samebits.quant.blocks import e4m3_values
from samebits.quant.mxfp8 import MXFP8Tensor
from samebits.quant.nvfp4 import NVFP4Tensor


@triton.jit
def nibble_kernel(words_ptr, scales_ptr, out_ptr, rounded_ptr, N: tl.constexpr):
    """Four codes of each of N words under its scale, and the same read as E4M3."""
    at = tl.arange(0, N)
    scales = msa_tiles.block_scales(tl.load(scales_ptr + at))
    values = msa_tiles.nibbles(tl.load(words_ptr + at), scales)
    places = at[:, None, None] * 4 + tl.arange(0, 2)[None, :, None] * 2 + tl.arange(0, 2)[None, None, :]
    tl.store(out_ptr + places, values)
    tl.store(rounded_ptr + places, msa_tiles.rounded(values))


@triton.jit
def scale_kernel(words_ptr, bytes_ptr, pairs_ptr, N: tl.constexpr):
    """Scales of N words: of each of their bytes, and of the two low ones at once."""
    at = tl.arange(0, N)
    words = tl.load(words_ptr + at)
    place = tl.arange(0, 4)
    each = tl.broadcast_to(words[:, None], [N, 4])
    tl.store(bytes_ptr + at[:, None] * 4 + place[None, :], msa_tiles.byte_scales(each, tl.broadcast_to(place[None, :], [N, 4])))
    tl.store(pairs_ptr + at[:, None] * 2 + tl.arange(0, 2)[None, :], msa_tiles.key_scales(words, False))


@triton.jit
def byte_kernel(words_ptr, out_ptr, N: tl.constexpr):
    """Four E4M3 bytes of each of N words."""
    at = tl.arange(0, N)
    places = at[:, None, None] * 4 + tl.arange(0, 2)[None, :, None] * 2 + tl.arange(0, 2)[None, None, :]
    tl.store(out_ptr + places, msa_tiles.e4m3_bytes(tl.load(words_ptr + at)))


@triton.jit
def weight_kernel(words_ptr, scales_ptr, out_ptr, ROWS: tl.constexpr, MX: tl.constexpr):
    """A chunk of packed weights."""
    row = tl.arange(0, ROWS)
    words = tl.load(words_ptr + row[:, None] * 16 + tl.arange(0, 16)[None, :])
    tile = triton_tiles.weight_tile(words, tl.load(scales_ptr + row), ROWS, MX)
    tl.store(out_ptr + row[:, None] * 128 + tl.arange(0, 128)[None, :], tile)


def same(name: str, have: torch.Tensor, want: torch.Tensor) -> None:
    """Equal bits, all of them bf16 numbers."""
    if not torch.equal(have.view(torch.int32), want.view(torch.int32)):
        raise SystemExit(f"{name}: {int((have.view(torch.int32) != want.view(torch.int32)).sum())} of {have.numel()} values differ")
    if not torch.equal(have.bfloat16().float(), have):
        raise SystemExit(f"{name}: not all values are bf16 numbers")


def scales_of(byte: torch.Tensor) -> torch.Tensor:
    """Values of E4M3 scale bytes as the kernels read them: no sign, and 480 where the format has NaN."""
    value = e4m3_values((byte & 0x7F).to(torch.uint8))
    return torch.where(value.isnan(), torch.full_like(value, 480.0), value)


def pages() -> None:
    """Codes, scales and bytes of pages."""
    word = torch.tensor([sum(((c + 5 * place) % 16) << 4 * place for place in range(4)) for c in range(16)])
    words, scales = (x.flatten() for x in torch.meshgrid(word, torch.arange(128), indexing="ij"))
    out, rounded = torch.empty(2048, 4), torch.empty(2048, 4)
    nibble_kernel[(1,)](words.to(torch.int16), scales.to(torch.int32), out, rounded, 2048)
    codes = (words[:, None] >> 4 * torch.arange(4)) & 15
    want = nvfp4.decode_e2m1(codes.to(torch.uint8)) * scales_of(scales)[:, None]
    same("codes under scales", out, want / 128)
    same("read as E4M3", rounded, kv.round_e4m3(want) / 128)

    byte = torch.arange(256)
    words = byte | byte.roll(1) << 8 | byte.roll(2) << 16 | byte.roll(3) << 24
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    four = torch.stack([byte.roll(i) for i in range(4)], dim=1)
    out = torch.empty(256, 4)
    byte_kernel[(1,)](words, out, 256)
    value = scales_of(four)
    same("E4M3 bytes", out, torch.where(four > 0x7F, -value, value))
    each, pairs = torch.empty(256, 4), torch.empty(256, 2)
    scale_kernel[(1,)](words, each, pairs, 256)
    same("scales of bytes", each, value / 128)
    same("scales of pairs", pairs, value[:, :2] / 128)


def weights() -> None:
    """All pairs of codes under all scales of experts; all codes and exponents of MXFP8."""
    codes = torch.arange(256, dtype=torch.uint8).view(4, 64).repeat(126, 1)
    scales = torch.arange(1, 127, dtype=torch.uint8).repeat_interleave(4)[:, None].expand(-1, 8)
    packed = NVFP4Tensor(*(torch.nn.functional.pad(t, (0, 0, 0, 8))[None] for t in (codes, scales)), torch.ones(1))
    tiles = pack_experts(packed)
    out = torch.empty(512, 128)
    weight_kernel[(1,)](tiles.codes[0, 0], tiles.scales[0, 0], out, 512, False)
    same("weights of experts", (out * triton_tiles.NVFP4_UNIT.value)[:504], nvfp4.dequantize(packed)[0][:504])

    byte = torch.tensor([b for b in range(256) if b & 0x7F != 0x7F] + [0, 0], dtype=torch.uint8).view(2, 128)
    exponents = torch.arange(42, 167, dtype=torch.uint8).repeat_interleave(2)[:, None].expand(-1, 4)
    packed = MXFP8Tensor(byte.repeat(125, 1), exponents.contiguous())
    tiles = pack_linear(packed)
    words, scales = (torch.nn.functional.pad(t[0], (0, 0) * (t.dim() - 2) + (0, 6)) for t in (tiles.codes, tiles.scales))
    out = torch.empty(256, 128)
    weight_kernel[(1,)](words, scales, out, 256, True)
    same("weights of projections", (out * triton_tiles.MXFP8_UNIT.value)[:250], mxfp8.dequantize(packed))


def main() -> None:
    """All."""
    if not triton_tiles.INTERPRETED:
        raise SystemExit("set TRITON_INTERPRET=1")
    pages()
    weights()
    print("same bits")


if __name__ == "__main__":
    main()

"""MXFP8 matrices in the order in which the Hopper kernels read them: an exact, reversible permutation of their bytes.

As `expert_tiles`, with a byte where that has a nibble. A chunk is 128 consecutive inputs (K) of one output row, 8 planes of 16:
    codes   int64 [chunks, N, 16]: words 2i and 2i + 1 of a row hold inputs 2i and 2i + 1 of each of the 8 planes
    scales  int32 [chunks, N]: the bytes j are the E8M0 exponents of inputs 32 j .. 32 j + 31, two planes, plus 88, turned left by 7 bits
Planes 0 and 1 are in the low half of the first word, 2 and 3 in that of the second, 4 to 7 likewise in the high halves. Of the two, the
even one lies where one mask takes it out as two bf16 of 2^-120 times their values, signs at bits 15 and 31, magnitudes at 10..4 and
26..20; the odd one has the bits that are left: turned right by 4, sign and upper four bits of the magnitude are in place, and shifted
left by 4 the lower three. The scales come into bf16's exponent by a mask, those of odd bytes after a turn by 8.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from samebits.quant.mxfp8 import MXFP8Tensor

CHUNK, PLANES, BLOCK = 128, 8, 32
# The kernels make bf16 values 2^-32 of the true ones; exponents within these bytes keep all of those normal.
LOWEST, HIGHEST = 42, 166
BIAS = 88  # 2^-32 for that, 2^120 for how the codes read


class MXFP8Tiles(NamedTuple):
    """An MXFP8 matrix [N, K] in the kernels' order. Inputs beyond `inputs` pad the last chunk with zeros."""

    codes: Tensor  # int64 [ceil(K / 128), N, 16]
    scales: Tensor  # int32 [ceil(K / 128), N]
    inputs: int  # K


def _turn_left(four: Tensor, bits: int) -> Tensor:
    """32 bits in each int64, turned."""
    return (four << bits | four >> (32 - bits)) & 0xFFFFFFFF


def pack_linear(weight: MXFP8Tensor, name: str = "weight") -> MXFP8Tiles:
    """Reorder an MXFP8 matrix [N, K].

    Raises `ValueError` with `name` for what the kernels cannot read: not a matrix, a NaN, a block of more than zeros with an exponent
    outside of -85..39 (weights beyond 2^47 or below 2^-76).
    """
    codes, exponents = weight
    if codes.dim() != 2:
        raise ValueError(f"{name}: needs a matrix [N, K], got {tuple(codes.shape)}")
    n, k = codes.shape
    chunks = -(-k // CHUNK)
    if ((codes & 0x7F) == 0x7F).any():
        raise ValueError(f"{name}: holds NaN")
    filled = (codes.view(n, -1, BLOCK) & 0x7F).amax(-1) != 0
    if (filled & ((exponents < LOWEST) | (exponents > HIGHEST))).any():
        raise ValueError(f"{name}: a block's exponent is outside of {LOWEST - 127}..{HIGHEST - 127}")
    if (exponents > HIGHEST).any():
        raise ValueError(f"{name}: a block of zeros has an exponent above {HIGHEST - 127}")
    # [chunks, N, pair of inputs, word, half of the word, plane of two, input of two]
    code = F.pad(codes, (0, chunks * CHUNK - k)).view(n, chunks, 2, 2, 2, 8, 2).permute(1, 0, 5, 3, 2, 4, 6).int()
    even, odd = code[..., 0, :], code[..., 1, :]
    words = torch.zeros(code.shape[:-2], dtype=torch.int32, device=codes.device)
    for which in range(2):
        at, other = 16 * which, 16 * (1 - which)
        words |= (even[..., which] >> 7) << (15 + at) | (even[..., which] & 0x7F) << (4 + at)
        # Turned right by 4, the lowest four bits of one half are the highest of the other.
        words |= (odd[..., which] >> 7) << (3 + other) | (odd[..., which] >> 3 & 15) << (11 + at) | (odd[..., which] & 7) << at
    words = words.view(torch.int64).view(chunks, n, 16)
    four = F.pad(exponents, (0, chunks * 4 - k // BLOCK)) + BIAS
    four = four.view(n, chunks, 4).transpose(0, 1).contiguous().view(torch.int32)[..., 0].long() & 0xFFFFFFFF
    return MXFP8Tiles(words, _turn_left(four, 7).to(torch.int32).contiguous(), k)


def unpack_linear(tiles: MXFP8Tiles) -> MXFP8Tensor:
    """The tensor that `pack_linear` was given, byte for byte."""
    words, scales, k = tiles
    chunks, n, _ = words.shape
    word = torch.stack((words & 0xFFFFFFFF, words >> 32 & 0xFFFFFFFF), dim=-1).view(chunks, n, 8, 2, 2)  # pair, word, half
    code = torch.empty(chunks, n, 8, 2, 2, 2, 2, dtype=torch.uint8, device=words.device)  # ..., plane of two, input of two
    for which in range(2):
        at, other = 16 * which, 16 * (1 - which)
        code[..., 0, which] = ((word >> (15 + at) & 1) << 7 | word >> (4 + at) & 0x7F).to(torch.uint8)
        code[..., 1, which] = ((word >> (3 + other) & 1) << 7 | (word >> (11 + at) & 15) << 3 | word >> at & 7).to(torch.uint8)
    codes = code.permute(1, 0, 4, 3, 5, 2, 6).reshape(n, -1)[:, :k]
    four = _turn_left(scales.long() & 0xFFFFFFFF, 25).to(torch.int32)
    exponents = four[..., None].contiguous().view(torch.uint8).view(chunks, n, 4).transpose(0, 1).reshape(n, -1)[:, : k // BLOCK] - BIAS
    return MXFP8Tensor(codes.contiguous(), exponents.contiguous())

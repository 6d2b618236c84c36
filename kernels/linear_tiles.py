"""MXFP8 matrices in the order in which the Hopper kernels read them: an exact, reversible permutation of their bytes.

As `expert_tiles`, with a byte where that has a nibble. A chunk is 128 consecutive inputs (K) of one output row, 8 planes of 16:
    codes   int64 [chunks, N, 16]: byte j (little endian) of word c is input c of plane j, E4M3
    scales  int32 [chunks, N]: byte j is the E8M0 exponent of inputs 32 j .. 32 j + 31, two planes
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


class MXFP8Tiles(NamedTuple):
    """An MXFP8 matrix [N, K] in the kernels' order. Inputs beyond `inputs` pad the last chunk with zeros."""

    codes: Tensor  # int64 [ceil(K / 128), N, 16]
    scales: Tensor  # int32 [ceil(K / 128), N]
    inputs: int  # K


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
    planes = F.pad(codes, (0, chunks * CHUNK - k)).view(n, chunks, PLANES, 16)
    words = planes.permute(1, 0, 3, 2).contiguous().view(torch.int64)[..., 0]
    scales = F.pad(exponents, (0, chunks * 4 - k // BLOCK)).view(n, chunks, 4).transpose(0, 1).contiguous().view(torch.int32)[..., 0]
    return MXFP8Tiles(words.contiguous(), scales.contiguous(), k)


def unpack_linear(tiles: MXFP8Tiles) -> MXFP8Tensor:
    """The tensor that `pack_linear` was given, byte for byte."""
    words, scales, k = tiles
    chunks, n, _ = words.shape
    codes = words[..., None].contiguous().view(torch.uint8).view(chunks, n, 16, PLANES).permute(1, 0, 3, 2).reshape(n, -1)[:, :k]
    exponents = scales[..., None].contiguous().view(torch.uint8).view(chunks, n, 4).transpose(0, 1).reshape(n, -1)[:, : k // BLOCK]
    return MXFP8Tensor(codes.contiguous(), exponents.contiguous())

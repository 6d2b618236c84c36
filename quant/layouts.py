"""Scale layouts: linear, as checkpoints hold block scales, and 128x4 swizzled, as tensor cores of Blackwell read them.

Linear is [M, S]: a row of S scales for each row of the matrix. Swizzled, rows are padded to a multiple of 128 and scales to a multiple
of 4, both with zero bytes; a tile of 128 x 4 scales is 512 consecutive bytes, tiles in row-major order, and inside a tile the scale of
row m and column s lies at

    16 * (m % 32) + 4 * (m // 32) + s                     (m < 128, s < 4)

so that the four column scales of rows m, m + 32, m + 64, m + 96 are 16 consecutive bytes. Source: cuBLAS, "1D block scaling factors
layout". The same layout serves NVFP4 (16 elements a scale) and MXFP8 (32).
"""

from __future__ import annotations

import torch
from torch import Tensor

ROWS, COLUMNS = 128, 4


def padded_shape(rows: int, columns: int) -> tuple[int, int]:
    """Rows and columns of a swizzled scale matrix."""
    return -(-rows // ROWS) * ROWS, -(-columns // COLUMNS) * COLUMNS


def swizzle(scales: Tensor) -> Tensor:
    """Linear scales [..., M, S] (one byte each) to swizzled [..., Mp, Sp], padding zero. The shape only counts the bytes."""
    m, s = scales.shape[-2:]
    rows, columns = padded_shape(m, s)
    padded = torch.zeros(*scales.shape[:-2], rows, columns, dtype=torch.uint8, device=scales.device)
    padded[..., :m, :s] = scales.view(torch.uint8)
    tiles = padded.unflatten(-1, (-1, COLUMNS)).unflatten(-3, (-1, 4, 32))  # [..., row tile, m // 32, m % 32, column tile, s]
    swizzled = tiles.movedim(-2, -4).transpose(-3, -2)  # [..., row tile, column tile, m % 32, m // 32, s]
    return swizzled.reshape(padded.shape).view(scales.dtype)


def unswizzle(scales: Tensor, rows: int, columns: int) -> Tensor:
    """Swizzled scales [..., Mp, Sp] (or flat [..., Mp * Sp]) to linear [..., rows, columns]; the padding is dropped, whatever it holds.

    Raises `ValueError` when the bytes are not those of a swizzled `rows` x `columns` matrix.
    """
    m, s = padded_shape(rows, columns)
    data = scales.view(torch.uint8)
    if data.shape[-1] == m * s and (data.dim() == 1 or tuple(data.shape[-2:]) != (m, s)):
        data = data.unflatten(-1, (m, s))
    if tuple(data.shape[-2:]) != (m, s):
        raise ValueError(f"swizzled scales of {rows} x {columns} are {m} x {s} bytes, got {tuple(scales.shape)}")
    tiles = data.reshape(*data.shape[:-2], m // ROWS, s // COLUMNS, 32, 4, COLUMNS)
    linear = tiles.transpose(-3, -2).movedim(-4, -2).reshape(*data.shape[:-2], m, s)
    return linear[..., :rows, :columns].contiguous().view(scales.dtype)

"""Kernels around the helpers of `triton_rows`, and one beside them, for the tests of both."""

from __future__ import annotations

import triton
import triton.language as tl

from samebits.kernels.triton_rows import inverse_root, tree_sum


@triton.jit
def sums_kernel(x_ptr, sum_ptr, inverse_ptr, rows, eps, R: tl.constexpr, W: tl.constexpr):
    """`tree_sum` of fp32 rows, and `inverse_root` of it."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    x = tl.load(x_ptr + row[:, None] * W + tl.arange(0, W)[None, :], mask=(row < rows)[:, None], other=0.0)
    total = tree_sum(x)
    tl.store(sum_ptr + row, total, mask=row < rows)
    tl.store(inverse_ptr + row, inverse_root(total, eps), mask=row < rows)


@triton.jit
def divide_kernel(x_ptr, by_ptr, columns, BLOCK: tl.constexpr):
    """Rows divided in place, as a sampler does that knows nothing of what comes after."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * columns + at, mask=at < columns)
    tl.store(x_ptr + row * columns + at, x / tl.load(by_ptr + row), mask=at < columns)

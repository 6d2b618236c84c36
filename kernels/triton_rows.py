"""Triton kernels of single rows: Gemma RMS norm with and without residual, rotary embedding, SwiGLU-OAI, forward and backward.

A row's bits depend on that row alone. Whatever is not a sum is the arithmetic of the torch code beside which a kernel stands, product for
product (nothing is contracted), and every sum has one order that no tile, warp or batch can move: the tree of `tree_sum`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tree_sum(x):
    """Sums [R] of rows of fp32 [R, W], W a power of two: neighbours first, x[2i] + x[2i + 1], and so on up.

    A sum of two is the same in either order, so the result is the same in every layout, with any number of warps. A row padded with zeros
    on the right has the sum of the shorter tree.
    """
    for _ in tl.static_range(20):
        if x.shape[1] > 1:
            x = tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]), axis=2)
    return tl.reshape(x, [x.shape[0]])


@triton.jit
def inverse_root(mean, eps):
    """1 / sqrt(mean + eps), root and quotient correctly rounded."""
    return tl.math.div_rn(tl.full(mean.shape, 1.0, tl.float32), tl.math.sqrt_rn(mean + eps))

"""Products with a frozen dense weight on the tensor cores: bf16 activations times a bf16 or fp32 matrix, sums in fp32. Head and router.

A product of two bf16 is exact in fp32. An fp32 weight is cut into three bf16 parts, which together are the weight, bit for bit: three exact
products, of which the first parts' are summed apart from the small ones. So logits are fp32 sums of exact products with either weight.

    out   = x W^T      K in steps of 16 ascending, parts of `part_of(N)` inputs one after the other
    dx    = g W        N in the same way; g cut into two bf16 parts, 16 bits of its 24; with an fp32 W both are, without the product
                       of the two low parts

Tensor cores cut off bits below the sum so far, always toward zero. Over a vocabulary that would add up; so a part's sum starts at zero
and is added to the others' with a rounded fp32 addition. What is left out of g is 2^-17 of an element, 256 times less than what rounding
dx to bf16 leaves out; rounding g itself to bf16 would cost about as much as that again.

Nothing of this order depends on the batch: tiles differ with the number of rows, and where W is small, parts go to programs of their own
while there are few rows, but a row's sums are added in the same order. Weights are the left operand in `out`: a tile has at least 64 of
their rows, so that every tile is computed by the same kind of matrix instruction.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_tiles import bf16, dot, on, settled

SMALL = 1024
"""Outputs up to which a product is cut along K for the sake of parallelism."""
SPLIT_TOKENS = 2048
"""Rows up to which the parts of a small product go to programs of their own."""
ROWS = 64
"""Step along N in the gradient."""


class Cut(NamedTuple):
    """How a product is cut into programs. Speed alone depends on it."""

    weights: int  # rows of W, or columns in the gradient
    tokens: int
    depth: int
    warps: int
    stages: int


def part_of(outputs: int) -> int:
    """Inputs whose products are summed on their own."""
    return 256 if outputs <= SMALL else 2048


def cut_of(tokens: int, outputs: int, full: bool) -> Cut:
    """The fastest of a sweep on an H200. `full`: the weight is fp32, whose low parts go interleaved in steps of `depth`."""
    if full or outputs <= SMALL:
        return Cut(64, 16 if tokens <= 16 else 64, 64, 4, 3)
    if tokens <= 16:
        return Cut(128, 16, 64, 4, 5)
    if tokens <= 64:
        return Cut(128, 64, 64, 4, 4)
    return Cut(128, 128, 64, 8, 4)


def back_cut(tokens: int) -> Cut:
    """The same of the gradient."""
    return Cut(128, 64, ROWS, 4, 4) if tokens <= 64 else Cut(128, 128, ROWS, 8, 3)


@triton.jit
def _place(bands, tiles, GROUP: tl.constexpr):
    """Band and tile of a program: neighbours share a band, and GROUP tiles take all bands before the next ones do."""
    program, full = tl.program_id(0), GROUP * bands
    first = program // full * GROUP
    size = tl.minimum(tiles - first, GROUP)
    return program % full // size, first + program % full % size


@triton.jit
def _inside(tile, count, SIZE: tl.constexpr):
    """Rows of a tile, counted from its first; those outside are read as the last one, so that only the inner dimension needs a mask."""
    return tl.minimum(tl.arange(0, SIZE), count - 1 - tile * SIZE)


@triton.jit
def _product_kernel(
    x_ptr, w_ptr, out_ptr, tokens, outputs, K, x_stride, w_stride, bands, tiles, parts,
    FULL: tl.constexpr, SPLIT: tl.constexpr, EVEN: tl.constexpr, PART: tl.constexpr,
    BW: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """fp32 [tokens, outputs], or [parts, tokens, outputs] where SPLIT, one part a program."""
    band, tile = _place(bands, tiles, 8)
    n, t, k = band * BW + tl.arange(0, BW), tile * BT + tl.arange(0, BT), tl.arange(0, BK)
    w_at = w_ptr + (band * BW).to(tl.int64) * w_stride + _inside(band, outputs, BW)[:, None] * w_stride + k[None, :]
    x_at = x_ptr + (tile * BT).to(tl.int64) * x_stride + _inside(tile, tokens, BT)[None, :] * x_stride + k[:, None]
    first, last = 0, parts
    if SPLIT:
        first = tl.program_id(1)
        last = first + 1
        out_ptr += first.to(tl.int64) * tokens * outputs
    total = tl.zeros([BW, BT], tl.float32)
    for part in range(first, last):
        acc = tl.zeros([BW, BT], tl.float32)
        rest = tl.zeros([BW, BT], tl.float32)
        for start in tl.range(part * PART, tl.minimum(part * PART + PART, K), BK, num_stages=STAGES):
            if EVEN:
                w, x = tl.load(w_at + start), tl.load(x_at + start)
            else:
                w = tl.load(w_at + start, mask=(start + k < K)[None, :], other=0.0)
                x = tl.load(x_at + start, mask=(start + k < K)[:, None], other=0.0)
            if FULL:
                high = bf16(w)
                w -= high.to(tl.float32)
                middle = bf16(w)
                acc = dot(high, x, acc)
                rest = dot(middle, x, rest)
                rest = settled(dot(bf16(w - middle.to(tl.float32)), x, rest))
            else:
                acc = dot(w, x, acc)
        total += acc + rest if FULL else acc
    out_at = t.to(tl.int64)[None, :] * outputs + n[:, None]
    tl.store(out_ptr + out_at, total, mask=(n < outputs)[:, None] & (t < tokens)[None, :])


@triton.jit
def _sum_kernel(partial_ptr, out_ptr, elements, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """The parts of a product, in ascending order."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = at < elements
    total = tl.zeros([BLOCK], tl.float32)
    for _ in tl.static_range(PARTS):
        total += tl.load(partial_ptr + at, mask=real, other=0.0)
        partial_ptr += elements
    tl.store(out_ptr + at, total, mask=real)


@triton.jit
def _cut_kernel(grad_ptr, high_ptr, low_ptr, elements, BLOCK: tl.constexpr):
    """fp32 into two bf16 parts: tensor cores take both from shared memory then, which registers could not feed as fast."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = at < elements
    g = tl.load(grad_ptr + at, mask=real, other=0.0)
    high = bf16(g)
    tl.store(high_ptr + at, high, mask=real)
    tl.store(low_ptr + at, bf16(g - high.to(tl.float32)), mask=real)


@triton.jit
def _gradient_kernel(
    high_ptr, low_ptr, w_ptr, out_ptr, tokens, outputs, K, w_stride, bands, tiles, parts,
    FULL: tl.constexpr, EVEN: tl.constexpr, PART: tl.constexpr,
    BH: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """bf16 [tokens, K] = both parts of grad [tokens, outputs] times W."""
    band, tile = _place(bands, tiles, 8)
    h, t, n = band * BH + tl.arange(0, BH), tile * BT + tl.arange(0, BT), tl.arange(0, BN)
    at = _inside(tile, tokens, BT)[:, None] * outputs + n[None, :]
    w_at = n[:, None] * w_stride + h[None, :]
    high_ptr += (tile * BT).to(tl.int64) * outputs
    low_ptr += (tile * BT).to(tl.int64) * outputs
    total = tl.zeros([BT, BH], tl.float32)
    for part in range(parts):
        acc = tl.zeros([BT, BH], tl.float32)
        for start in tl.range(part * PART, tl.minimum(part * PART + PART, outputs), BN, num_stages=STAGES):
            if EVEN:
                high, low, w = tl.load(high_ptr + at), tl.load(low_ptr + at), tl.load(w_ptr + w_at)
            else:
                real = start + n < outputs
                high = tl.load(high_ptr + at, mask=real[None, :], other=0.0)
                low = tl.load(low_ptr + at, mask=real[None, :], other=0.0)
                w = tl.load(w_ptr + w_at, mask=real[:, None] & (h < K)[None, :], other=0.0)
            high_ptr += BN
            low_ptr += BN
            w_ptr += BN * w_stride
            if FULL:
                w_high = bf16(w)
                acc = dot(high, w_high, acc)
                acc = dot(high, bf16(w - w_high.to(tl.float32)), acc)
                acc = dot(low, w_high, acc)
            else:
                acc = dot(high, w, acc)
                acc = dot(low, w, acc)
        total += acc
    tl.store(out_ptr + t.to(tl.int64)[:, None] * K + h[None, :], bf16(total), mask=(t < tokens)[:, None] & (h < K)[None, :])


def product(x: Tensor, weight: Tensor, cut: Cut | None = None, split: bool | None = None, whole: int | None = None) -> Tensor:
    """x bf16 [T, K] times weight [N, K] transposed: fp32 [T, N]. `cut` and `split` change no bit.

    `whole`: rows of the matrix that `weight` is a part of; what is summed on its own follows them, so that a part gives the whole's bits.
    """
    (tokens, inputs), outputs, full = x.shape, len(weight), weight.dtype is torch.float32
    out = torch.empty(tokens, outputs, dtype=torch.float32, device=x.device)
    if not out.numel():
        return out
    x, weight = (m if m.stride(1) == 1 else m.contiguous() for m in (x, weight))
    cut = cut or cut_of(tokens, outputs, full)
    part = part_of(whole or outputs)
    parts = triton.cdiv(inputs, part)
    split = ((whole or outputs) <= SMALL and tokens <= SPLIT_TOKENS if split is None else split) and parts > 1
    into = torch.empty(parts, tokens, outputs, dtype=torch.float32, device=x.device) if split else out
    bands, tiles = triton.cdiv(outputs, cut.weights), triton.cdiv(tokens, cut.tokens)
    with on(x):
        _product_kernel[(bands * tiles, parts if split else 1)](
            x, weight, into, tokens, outputs, inputs, x.stride(0), weight.stride(0), bands, tiles, parts,
            FULL=full, SPLIT=split, EVEN=inputs % cut.depth == 0, PART=part,
            BW=cut.weights, BT=cut.tokens, BK=cut.depth, STAGES=cut.stages, num_warps=cut.warps,
        )  # fmt: skip
        if split:
            _sum_kernel[(triton.cdiv(out.numel(), 1024),)](into, out, out.numel(), PARTS=parts, BLOCK=1024, num_warps=4)
    return out


def gradient(grad: Tensor, weight: Tensor, cut: Cut | None = None) -> Tensor:
    """grad fp32 [T, N] times weight [N, K]: bf16 [T, K]. `cut` changes no bit."""
    (tokens, outputs), inputs = grad.shape, weight.shape[1]
    out = torch.empty(tokens, inputs, dtype=torch.bfloat16, device=grad.device)
    if not out.numel():
        return out
    grad, weight = grad.contiguous(), weight if weight.stride(1) == 1 else weight.contiguous()
    parts = torch.empty(2, tokens, outputs, dtype=torch.bfloat16, device=grad.device)
    cut = cut or back_cut(tokens)
    bands, tiles = triton.cdiv(inputs, cut.weights), triton.cdiv(tokens, cut.tokens)
    with on(grad):
        _cut_kernel[(triton.cdiv(grad.numel(), 2048),)](grad, *parts, grad.numel(), BLOCK=2048, num_warps=4)
        _gradient_kernel[(bands * tiles,)](
            *parts, weight, out, tokens, outputs, inputs, weight.stride(0), bands, tiles, triton.cdiv(outputs, 2048),
            FULL=weight.dtype is torch.float32, EVEN=outputs % cut.depth == 0 and inputs % cut.weights == 0, PART=2048,
            BH=cut.weights, BT=cut.tokens, BN=cut.depth, STAGES=cut.stages, num_warps=cut.warps,
        )  # fmt: skip
    return out


class DenseLinear(torch.autograd.Function):
    """`kernels.linear.frozen_linear` of bf16 [T, K] on CUDA."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, whole: int | None = None) -> Tensor:
        """See the module."""
        ctx.save_for_backward(weight)
        return product(x, weight, whole=whole)

    @staticmethod
    def backward(ctx, grad: Tensor):
        """See the module."""
        return gradient(grad.float(), *ctx.saved_tensors) if ctx.needs_input_grad[0] else None, None, None

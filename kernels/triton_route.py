"""Triton kernels of the router: choice and weights of experts from fp32 logits, and the gradient.

The choice orders by integers that rise with the float (NaN above all) and fall with the id, so that ties go to the lower id and no two are
equal. A token's weights are sigmoids over their sum, added in the order of the ids given: replayed ids, where they are those of the choice,
get the choice's bits. An id outside of the logits gets the weight NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_rows import sigmoid
from .triton_tiles import on

LEAST = tl.constexpr(-(2**63))


@triton.jit
def _keys(scores, col, E: tl.constexpr):
    """int64 order of scores [R, W]: LEAST for columns that are no expert."""
    bits = scores.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    bits = tl.where(scores != scores, 0x7FFFFFFF, bits)
    return tl.where(col < E, bits.to(tl.int64) * 4096 + (E - 1 - col), LEAST)


@triton.jit
def _choose_kernel(
    logits_ptr, bias_ptr, ids_ptr, weights_ptr, tokens, stride, scale,
    BIASED: tl.constexpr, E: tl.constexpr, TOP: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    row, col = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, W)[None, :]
    real = (row < tokens)[:, None] & (col < E)
    row = row.to(tl.int64)
    s = sigmoid(tl.load(logits_ptr + row[:, None] * stride + col, mask=real, other=0.0))
    biased = s
    if BIASED:
        biased = s + tl.load(bias_ptr + col, mask=col < E, other=0.0).to(tl.float32)
    keys = _keys(biased, col, E)
    bound = tl.max(keys, axis=1)
    for _ in tl.static_range(TOP - 1):
        bound = tl.max(tl.where(keys < bound[:, None], keys, LEAST), axis=1)
    chosen = keys >= bound[:, None]
    place = tl.cumsum(chosen.to(tl.int32), axis=1) - 1
    total = tl.zeros([R], tl.float32)
    for i in tl.static_range(TOP):
        # One of these is not 0: the sum is that one.
        total += tl.sum(tl.where(chosen & (place == i), s, 0.0), axis=1)
    at = row[:, None] * TOP + place
    tl.store(ids_ptr + at, tl.broadcast_to(col, [R, W]).to(tl.int64), mask=chosen & real)
    share = tl.math.div_rn(s, tl.broadcast_to(total[:, None], [R, W]))
    tl.store(weights_ptr + at, share * scale, mask=chosen & real)


@triton.jit
def _score(logits_ptr, ids_ptr, row, i, real, stride, E: tl.constexpr, TOP: tl.constexpr):
    """Id and sigmoid [R] of choice `i`."""
    expert = tl.load(ids_ptr + row * TOP + i, mask=real, other=0)
    known = real & (expert >= 0) & (expert < E)
    return expert, sigmoid(tl.load(logits_ptr + row * stride + expert, mask=known, other=float("nan")))


@triton.jit
def _weights_kernel(logits_ptr, ids_ptr, weights_ptr, tokens, stride, scale, E: tl.constexpr, TOP: tl.constexpr, R: tl.constexpr):
    row = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)
    real = row < tokens
    total = tl.zeros([R], tl.float32)
    for i in tl.static_range(TOP):
        _, s = _score(logits_ptr, ids_ptr, row, i, real, stride, E, TOP)
        total += s
    for i in tl.static_range(TOP):
        _, s = _score(logits_ptr, ids_ptr, row, i, real, stride, E, TOP)
        tl.store(weights_ptr + row * TOP + i, tl.math.div_rn(s, total) * scale, mask=real)


@triton.jit
def _gradient_kernel(
    logits_ptr, ids_ptr, grad_ptr, out_ptr, tokens, stride, scale, E: tl.constexpr, TOP: tl.constexpr, R: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    """Of logits [R, E]: for each choice scale / total * (g - sum(g s) / total) * s (1 - s), added where an id comes twice."""
    row, col = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64), tl.arange(0, W)[None, :]
    real = row < tokens
    total, along = tl.zeros([R], tl.float32), tl.zeros([R], tl.float32)
    for i in tl.static_range(TOP):
        _, s = _score(logits_ptr, ids_ptr, row, i, real, stride, E, TOP)
        total += s
        along += s * tl.load(grad_ptr + row * TOP + i, mask=real, other=0.0)
    out = tl.zeros([R, W], tl.float32)
    for i in tl.static_range(TOP):
        expert, s = _score(logits_ptr, ids_ptr, row, i, real, stride, E, TOP)
        g = tl.load(grad_ptr + row * TOP + i, mask=real, other=0.0)
        g = scale / total * (g - along / total) * (s * (1.0 - s))
        out += tl.where(col == expert[:, None], g[:, None], 0.0)
    tl.store(out_ptr + row[:, None] * E + col, out, mask=real[:, None] & (col < E))


def _rows(logits: Tensor) -> tuple[Tensor, int, int]:
    """Logits with rows that lie together, the width of a tile, and its rows."""
    width = triton.next_power_of_2(logits.shape[1])
    return logits if logits.stride(1) == 1 else logits.contiguous(), width, max(1, 512 // width)


class RouteTopK(torch.autograd.Function):
    """`moe.route_topk` of fp32 logits [T, E] on CUDA."""

    @staticmethod
    def forward(ctx, logits: Tensor, bias: Tensor | None, top_k: int, scale: float) -> tuple[Tensor, Tensor]:
        """See the module."""
        (tokens, experts), device = logits.shape, logits.device
        if not 0 < top_k <= experts:
            raise ValueError(f"top_k is {top_k}, but there are {experts} experts")
        ids = torch.empty(tokens, top_k, dtype=torch.int64, device=device)
        weights = torch.empty(tokens, top_k, dtype=torch.float32, device=device)
        if tokens:
            rows, width, each = _rows(logits)
            with on(logits):
                _choose_kernel[(triton.cdiv(tokens, each),)](
                    rows, bias if bias is None else bias.contiguous(), ids, weights, tokens, rows.stride(0), scale,
                    BIASED=bias is not None, E=experts, TOP=top_k, R=each, W=width, num_warps=4, enable_fp_fusion=False,
                )  # fmt: skip
        ctx.scale = scale
        ctx.save_for_backward(logits, ids)
        ctx.mark_non_differentiable(ids)
        ctx.set_materialize_grads(False)
        return ids, weights

    @staticmethod
    def backward(ctx, grad_ids: None, grad: Tensor | None):
        """See the module."""
        return None if grad is None else _gradient(*ctx.saved_tensors, grad, ctx.scale), None, None, None


class RouteWeights(torch.autograd.Function):
    """`moe.route_weights` of fp32 logits [T, E] on CUDA."""

    @staticmethod
    def forward(ctx, logits: Tensor, ids: Tensor, scale: float) -> Tensor:
        """See the module."""
        rows, _, _ = _rows(logits)
        ids = ids.contiguous()
        weights = torch.empty(ids.shape, dtype=torch.float32, device=logits.device)
        if weights.numel():
            with on(logits):
                _weights_kernel[(triton.cdiv(len(ids), 128),)](
                    rows, ids, weights, len(ids), rows.stride(0), scale,
                    E=logits.shape[1], TOP=ids.shape[1], R=128, num_warps=4, enable_fp_fusion=False,
                )  # fmt: skip
        ctx.scale = scale
        ctx.save_for_backward(logits, ids)
        return weights

    @staticmethod
    def backward(ctx, grad: Tensor):
        """See the module."""
        return _gradient(*ctx.saved_tensors, grad, ctx.scale), None, None


def _gradient(logits: Tensor, ids: Tensor, grad: Tensor, scale: float) -> Tensor:
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    if out.numel():
        rows, width, each = _rows(logits)
        with on(logits):
            _gradient_kernel[(triton.cdiv(len(ids), each),)](
                rows, ids, grad.contiguous(), out, len(ids), rows.stride(0), scale,
                E=logits.shape[1], TOP=ids.shape[1], R=each, W=width, num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip
    return out

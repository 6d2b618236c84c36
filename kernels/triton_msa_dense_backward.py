"""Gradients of dense attention over packed keys on CUDA, and the autograd function that joins them to the forward kernel.

With P = 2^(factor q.k - lse), delta = sum(dO * O) and dS = P (dO.v - delta):  dQ = scale dS K,  dK = scale dS^T Q,  dV = P^T dO.

A program of `grad_query_kernel` takes some query tokens of a KV group through the keys that they see; one of `grad_keys_kernel` takes a
tile of keys through the query tokens that see it. No two programs write to one place, so nothing is atomic and gradients are the same bits
in every run.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .msa_ops import Batch
from .triton_msa_dense import owner
from .triton_msa_tiles import OPERAND

QUERIES, QUERY_KEYS = 8, 64  # query tokens of a dQ program, and keys of its tiles
KEYS, KEY_QUERIES = 128, 4  # keys of a dK, dV program, and query tokens of its tiles


@triton.jit
def _rows(pointer, row, inside):
    """Operand [N, 128] of contiguous rows."""
    return tl.load(pointer + row[:, None] * 128 + tl.arange(0, 128)[None, :], mask=inside[:, None], other=0.0).to(OPERAND)


@triton.jit
def _denominator(lse_ptr, row, inside):
    """log2 of the softmax's sum; infinity for rows that do not exist or saw no key, whose weights so are 0."""
    lse = tl.load(lse_ptr + row, mask=inside, other=float("inf"))
    return tl.where(lse == float("-inf"), float("inf"), lse)


@triton.jit
def _query_tiles(
    query, grad, lse, delta, out, position, keys_ptr, values_ptr, begin, end, limit, token_stride, factor,
    KEYS: tl.constexpr, MASKED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dQ / scale of the keys from `begin` to `end`, added to `out`."""
    key, column = tl.arange(0, KEYS), tl.arange(0, 128)
    for at in tl.range(begin, end, KEYS, num_stages=STAGES):
        place = (at + key)[:, None] * token_stride + column[None, :]
        if MASKED:
            k = tl.load(keys_ptr + place, mask=(at + key < limit)[:, None], other=0.0).to(OPERAND)
            v = tl.load(values_ptr + place, mask=(at + key < limit)[:, None], other=0.0).to(OPERAND)
        else:
            k, v = tl.load(keys_ptr + place).to(OPERAND), tl.load(values_ptr + place).to(OPERAND)
        p = tl.exp2(tl.dot(query, tl.trans(k)) * factor - lse[:, None])
        if MASKED:
            p = tl.where((at + key)[None, :] <= position[:, None], p, 0.0)
        ds = p * (tl.dot(grad, tl.trans(v)) - delta[:, None])
        out = tl.dot(ds.to(OPERAND), k, out)
    return out


@triton.jit(do_not_specialize=["requests"])
def grad_query_kernel(
    query_ptr,  # [T, G * HEADS, 128]
    keys_ptr,  # [T, G, 128] by strides
    values_ptr,
    grad_ptr,  # [T, G * HEADS, 128], of the output
    lse_ptr,  # fp32 [T, G * HEADS]
    delta_ptr,  # fp32 [T, G * HEADS]
    grad_query_ptr,
    start_ptr,  # int32 [R + 1]
    position_ptr,  # int32 [T]
    token_stride,
    head_stride,
    factor,
    scale,
    requests,
    G: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dQ of TOKENS query tokens of a request and a KV group a program."""
    N: tl.constexpr = TOKENS * 16
    group = tl.program_id(0) % G
    tile = tl.num_programs(0) // G - 1 - tl.program_id(0) // G
    request = owner(start_ptr, tile, requests, TOKENS)
    first, end = tl.load(start_ptr + request), tl.load(start_ptr + request + 1)
    token = first + (tile - (first // TOKENS + request)) * TOKENS + tl.arange(0, N) // 16
    if tl.min(token, axis=0) < end:
        head = tl.arange(0, N) % 16
        inside = (token < end) & (head < HEADS)
        row = (token.to(tl.int64) * G + group) * HEADS + head
        position = tl.load(position_ptr + token, mask=token < end, other=-1)
        newest = tl.max(position, axis=0) + 1
        oldest = tl.minimum(tl.min(tl.where(position >= 0, position, 0x7FFFFFFF), axis=0), newest - 1) + 1
        query, grad = _rows(query_ptr, row, inside), _rows(grad_ptr, row, inside)
        lse = _denominator(lse_ptr, row, inside)
        delta = tl.load(delta_ptr + row, mask=inside, other=0.0)
        keys_ptr += first.to(tl.int64) * token_stride + group * head_stride
        values_ptr += first.to(tl.int64) * token_stride + group * head_stride
        whole = oldest // KEYS * KEYS
        out = tl.zeros([N, 128], tl.float32)
        out = _query_tiles(
            query, grad, lse, delta, out, position, keys_ptr, values_ptr, 0, whole, whole, token_stride, factor, KEYS, False, STAGES
        )
        out = _query_tiles(
            query, grad, lse, delta, out, position, keys_ptr, values_ptr, whole, newest, newest, token_stride, factor, KEYS, True, STAGES
        )
        at = grad_query_ptr + row[:, None] * 128 + tl.arange(0, 128)[None, :]
        tl.store(at, (out * scale).to(grad_query_ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _key_tiles(
    k, v, grad_k, grad_v, place, query_ptr, grad_ptr, lse_ptr, delta_ptr, position_ptr, begin, end, last, group, factor,
    G: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, MASKED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dK / scale and dV of the query tokens from `begin` to `end`, added; tokens from `last` on do not exist."""
    item, head = tl.arange(0, TOKENS * 16) // 16, tl.arange(0, TOKENS * 16) % 16
    for at in tl.range(begin, end, TOKENS, num_stages=STAGES):
        token = at + item
        inside = (token < last) & (head < HEADS)
        row = (token.to(tl.int64) * G + group) * HEADS + head
        q, g = _rows(query_ptr, row, inside), _rows(grad_ptr, row, inside)
        lse = _denominator(lse_ptr, row, inside)
        delta = tl.load(delta_ptr + row, mask=inside, other=0.0)
        p = tl.exp2(tl.dot(k, tl.trans(q)) * factor - lse[None, :])
        if MASKED:
            position = tl.load(position_ptr + token, mask=inside, other=-1)
            p = tl.where(place[:, None] <= position[None, :], p, 0.0)
        grad_v = tl.dot(p.to(OPERAND), g, grad_v)
        ds = p * (tl.dot(v, tl.trans(g)) - delta[None, :])
        grad_k = tl.dot(ds.to(OPERAND), q, grad_k)
    return grad_k, grad_v


@triton.jit(do_not_specialize=["requests"])
def grad_keys_kernel(
    query_ptr,
    keys_ptr,
    values_ptr,
    grad_ptr,
    lse_ptr,
    delta_ptr,
    grad_keys_ptr,  # [T, G, 128], contiguous
    grad_values_ptr,
    start_ptr,  # int32 [R + 1]
    position_ptr,  # int32 [T]
    token_stride,
    head_stride,
    factor,
    scale,
    requests,
    G: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dK and dV of KEYS keys of a request and a KV group a program."""
    group, tile = tl.program_id(0) % G, tl.program_id(0) // G  # early keys, which most queries see, first
    request = owner(start_ptr, tile, requests, KEYS)
    first, end = tl.load(start_ptr + request), tl.load(start_ptr + request + 1)
    begin = first + (tile - (first // KEYS + request)) * KEYS
    if begin < end:
        key, column = begin + tl.arange(0, KEYS), tl.arange(0, 128)
        real = (key < end)[:, None]
        at = key.to(tl.int64)[:, None] * token_stride + group * head_stride + column[None, :]
        k = tl.load(keys_ptr + at, mask=real, other=0.0).to(OPERAND)
        v = tl.load(values_ptr + at, mask=real, other=0.0).to(OPERAND)
        grad_k = tl.zeros([KEYS, 128], tl.float32)
        grad_v = tl.zeros([KEYS, 128], tl.float32)
        # Tokens of a packed request are its keys: those at the tile's own places see some of it, later ones all.
        middle = tl.minimum(begin + KEYS, end)
        place = key - first
        grad_k, grad_v = _key_tiles(
            k, v, grad_k, grad_v, place, query_ptr, grad_ptr, lse_ptr, delta_ptr, position_ptr, begin, middle, end, group, factor,
            G, HEADS, TOKENS, True, STAGES,
        )  # fmt: skip
        grad_k, grad_v = _key_tiles(
            k, v, grad_k, grad_v, place, query_ptr, grad_ptr, lse_ptr, delta_ptr, position_ptr, middle, end, end, group, factor,
            G, HEADS, TOKENS, False, STAGES,
        )  # fmt: skip
        at = (key.to(tl.int64)[:, None] * G + group) * 128 + column[None, :]
        tl.store(grad_keys_ptr + at, (grad_k * scale).to(grad_keys_ptr.dtype.element_ty), mask=real)
        tl.store(grad_values_ptr + at, grad_v.to(grad_values_ptr.dtype.element_ty), mask=real)


def gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, batch: Batch, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(dQ, dK, dV) of attention over packed keys, of which every token is a query at its own place."""
    tokens, heads, _ = q.shape
    groups = k.shape[1]
    grad = grad.contiguous()
    if k.stride() != v.stride() or k.stride(2) != 1:
        k, v = k.contiguous(), v.contiguous()
    grad_q = torch.empty_like(q, memory_format=torch.contiguous_format)
    grad_k, grad_v = (torch.empty(k.shape, dtype=k.dtype, device=k.device) for _ in range(2))
    if not tokens:
        return grad_q, grad_k, grad_v
    delta = torch.linalg.vecdot(out.float(), grad.float())
    requests = batch.start.numel() - 1
    shared = (q.contiguous(), k, v, grad, lse, delta)
    numbers = (batch.start, batch.position, k.stride(0), k.stride(1), scale * math.log2(math.e), scale, requests)
    sizes = {"G": groups, "HEADS": heads // groups, "num_warps": 8}
    grad_query_kernel[((tokens // QUERIES + requests) * groups,)](
        *shared, grad_q, *numbers, **sizes, TOKENS=QUERIES, KEYS=QUERY_KEYS, STAGES=2
    )
    grad_keys_kernel[((tokens // KEYS + requests) * groups,)](
        *shared, grad_k, grad_v, *numbers, **sizes, TOKENS=KEY_QUERIES, KEYS=KEYS, STAGES=2
    )
    return grad_q, grad_k, grad_v


class PackedDense(torch.autograd.Function):
    """Forward kernel over packed keys with these gradients."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, attend, batch: Batch, scale: float):
        """`attend()` gives (output, lse)."""
        out, lse = attend()
        ctx.scale, ctx.most = scale, batch.most
        ctx.save_for_backward(q, k, v, out, lse, batch.start, batch.request, batch.position)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        """Gradients of q, k and v."""
        q, k, v, out, lse, start, request, position = ctx.saved_tensors
        batch = Batch(start, request, position, ctx.most)
        with torch.cuda.device(q.device) if q.is_cuda else torch.no_grad():
            return *gradients(grad, q, k, v, out, lse, batch, ctx.scale), None, None, None

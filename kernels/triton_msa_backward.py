"""Gradients of MSA attention over packed keys on CUDA, and the autograd function that joins them to the forward kernel.

With P = 2^(factor q.k - lse), delta = sum(dO * O) and dS = P (dO.v - delta):  dQ = scale dS K,  dK = scale dS^T Q,  dV = P^T dO.

dQ goes as the forward pass does, a program for each query and KV group over the query's blocks. dK and dV are turned around: the choices
are sorted by block, and a program for each block and KV group goes through the queries that chose it, four tokens of 16 heads at a time. No
two programs write to one place, so nothing is atomic and gradients are the same bits in every run.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_msa_tiles import OPERAND

ROWS = tl.constexpr(16)
TOKENS = 4  # of a tile of the dK, dV kernel


@triton.jit
def grad_query_kernel(
    query_ptr,  # [T, G * HEADS, 128]
    keys_ptr,  # [T, G, 128] by strides
    values_ptr,
    grad_ptr,  # [T, G * HEADS, 128], of the output
    lse_ptr,  # fp32 [T, G * HEADS]
    delta_ptr,  # fp32 [T, G * HEADS]
    grad_query_ptr,
    start_ptr,  # int32 [R], first token
    request_ptr,  # int32 [T]
    position_ptr,  # int32 [T]
    chosen_ptr,  # int32 [T, G, TOPK]
    token_stride,
    head_stride,
    factor,
    scale,
    G: tl.constexpr,
    HEADS: tl.constexpr,
    TOPK: tl.constexpr,
    KEYS: tl.constexpr,  # keys of a tile
):
    """dQ of one query token and KV group a program: of one group after the other, whose keys stay in the L2 cache."""
    program, tokens = tl.program_id(0).to(tl.int64), tl.num_programs(0) // G
    token, group = program % tokens, program // tokens
    row = token * G + group
    position = tl.load(position_ptr + token)
    first = tl.load(start_ptr + tl.load(request_ptr + token))
    head = tl.arange(0, ROWS)
    column = tl.arange(0, 128)
    at = (row * HEADS + head)[:, None] * 128 + column[None, :]
    real = (head < HEADS)[:, None]
    query = tl.load(query_ptr + at, mask=real, other=0.0).to(OPERAND)
    grad = tl.load(grad_ptr + at, mask=real, other=0.0).to(OPERAND)
    lse = tl.load(lse_ptr + row * HEADS + head, mask=head < HEADS, other=0.0)
    delta = tl.load(delta_ptr + row * HEADS + head, mask=head < HEADS, other=0.0)
    places = tl.sum((tl.load(chosen_ptr + row * TOPK + tl.arange(0, TOPK)) >= 0).to(tl.int32), axis=0)
    key = tl.arange(0, KEYS)
    out = tl.zeros([ROWS, 128], tl.float32)
    for tile in range(0, places * (128 // KEYS)):
        place = tl.load(chosen_ptr + row * TOPK + tile // (128 // KEYS)) * 128 + tile % (128 // KEYS) * KEYS + key
        seen = place <= position
        base = (first + place).to(tl.int64)[:, None] * token_stride + group * head_stride + column[None, :]
        k = tl.load(keys_ptr + base, mask=seen[:, None], other=0.0).to(OPERAND)
        v = tl.load(values_ptr + base, mask=seen[:, None], other=0.0).to(OPERAND)
        p = tl.exp2(tl.dot(query, tl.trans(k)) * factor - lse[:, None])
        p = tl.where(seen[None, :], p, 0.0)
        ds = p * (tl.dot(grad, tl.trans(v)) - delta[:, None])
        out = tl.dot(ds.to(OPERAND), k, out)
    tl.store(grad_query_ptr + at, (out * scale).to(grad_query_ptr.dtype.element_ty), mask=real)


@triton.jit
def grad_keys_kernel(
    query_ptr,
    keys_ptr,
    values_ptr,
    grad_ptr,
    lse_ptr,
    delta_ptr,
    grad_keys_ptr,  # [T, G, 128], contiguous
    grad_values_ptr,
    first_ptr,  # int32 [blocks], first token of each block
    count_ptr,  # int32 [blocks], its tokens; 0 for a block that does not exist
    begin_ptr,  # int32 [blocks * G + 1], where the queries of each block and group begin in `token_ptr`
    token_ptr,  # int32, query tokens sorted by block and group
    position_ptr,  # int32 [T]
    token_stride,
    head_stride,
    factor,
    scale,
    G: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """dK and dV of one block and KV group a program: of one group after the other, so that those which run at a time share queries."""
    blocks = tl.num_programs(0) // G
    block, group = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    program = block * G + group
    count = tl.load(count_ptr + block)
    if count > 0:
        first = tl.load(first_ptr + block).to(tl.int64)
        key, column = tl.arange(0, 128), tl.arange(0, 128)
        real = (key < count)[:, None]
        base = (first + key)[:, None] * token_stride + group * head_stride + column[None, :]
        k = tl.load(keys_ptr + base, mask=real, other=0.0).to(OPERAND)
        v = tl.load(values_ptr + base, mask=real, other=0.0).to(OPERAND)
        place = tl.load(position_ptr + first + key, mask=key < count, other=0x7FFFFFFF)
        grad_k = tl.zeros([128, 128], tl.float32)
        grad_v = tl.zeros([128, 128], tl.float32)
        item = tl.arange(0, TOKENS * 16) // 16
        head = tl.arange(0, TOKENS * 16) % 16
        end = tl.load(begin_ptr + program + 1)
        for at in range(tl.load(begin_ptr + program), end, TOKENS):
            inside = (at + item < end) & (head < HEADS)
            token = tl.load(token_ptr + at + item, mask=inside, other=0)
            position = tl.load(position_ptr + token, mask=inside, other=-1)
            row = (token * G + group).to(tl.int64) * HEADS + head
            q = tl.load(query_ptr + row[:, None] * 128 + column[None, :], mask=inside[:, None], other=0.0).to(OPERAND)
            g = tl.load(grad_ptr + row[:, None] * 128 + column[None, :], mask=inside[:, None], other=0.0).to(OPERAND)
            lse = tl.load(lse_ptr + row, mask=inside, other=0.0)
            delta = tl.load(delta_ptr + row, mask=inside, other=0.0)
            p = tl.exp2(tl.dot(k, tl.trans(q)) * factor - lse[None, :])
            p = tl.where(place[:, None] <= position[None, :], p, 0.0)
            grad_v = tl.dot(p.to(OPERAND), g, grad_v)
            ds = p * (tl.dot(v, tl.trans(g)) - delta[None, :])
            grad_k = tl.dot(ds.to(OPERAND), q, grad_k)
        out = ((first + key)[:, None] * G + group) * 128 + column[None, :]
        tl.store(grad_keys_ptr + out, (grad_k * scale).to(grad_keys_ptr.dtype.element_ty), mask=real)
        tl.store(grad_values_ptr + out, grad_v.to(grad_values_ptr.dtype.element_ty), mask=real)


class ByBlock(NamedTuple):
    """Who chose what: the choices of a packed batch, turned around."""

    first: Tensor  # int32 [blocks]
    count: Tensor  # int32 [blocks]
    begin: Tensor  # int32 [blocks * G + 1]
    token: Tensor  # int32 [T * G * topk], those without a block last


def by_block(chosen: Tensor, start: Tensor, request: Tensor) -> ByBlock:
    """Sort choices int32 [T, G, topk] by block. `start` int32 [R + 1], `request` int32 [T]. No host sync."""
    tokens, groups, topk = chosen.shape
    lengths = start.diff()
    blocks = (lengths + 127) // 128
    ends = blocks.cumsum(0, dtype=torch.int32)
    most = tokens // 128 + blocks.numel()  # at least as many as there are
    block = torch.arange(most, dtype=torch.int32, device=chosen.device)
    owner = torch.searchsorted(ends, block, right=True).clamp_max(blocks.numel() - 1)
    place = block - (ends - blocks)[owner]
    first = start[owner] + place * 128
    count = (lengths[owner] - place * 128).clamp(0, 128)
    group = torch.arange(groups, dtype=torch.int32, device=chosen.device)[:, None]
    key = ((ends - blocks)[request.long()][:, None, None] + chosen) * groups + group
    key = torch.where(chosen < 0, most * groups, key).flatten()
    ordered, order = key.sort(stable=True)
    bounds = torch.arange(most * groups + 1, dtype=torch.int32, device=chosen.device)
    begin = torch.searchsorted(ordered, bounds).int()
    return ByBlock(first.int(), count.int(), begin, (order // (groups * topk)).int())


def gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    chosen: Tensor,
    start: Tensor,
    request: Tensor,
    position: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dQ, dK, dV) of attention over packed keys; `start` int32 [R + 1]."""
    tokens, heads, _ = q.shape
    groups, topk = chosen.shape[1:]
    grad = grad.contiguous()
    if k.stride() != v.stride() or k.stride(2) != 1:
        k, v = k.contiguous(), v.contiguous()
    grad_q = torch.empty_like(q, memory_format=torch.contiguous_format)
    grad_k, grad_v = (torch.empty(k.shape, dtype=k.dtype, device=k.device) for _ in range(2))
    if not tokens:
        return grad_q, grad_k, grad_v
    delta = torch.linalg.vecdot(out.float(), grad.float())
    shared = (q.contiguous(), k, v, grad, lse, delta)
    numbers = (k.stride(0), k.stride(1), scale * math.log2(math.e), scale)
    sizes = {"G": groups, "HEADS": heads // groups}
    grad_query_kernel[(tokens * groups,)](
        *shared, grad_q, start, request, position, chosen, *numbers, **sizes, TOPK=topk, KEYS=64, num_warps=4, num_stages=3
    )
    lists = by_block(chosen, start, request)
    grad_keys_kernel[(lists.first.numel() * groups,)](
        *shared, grad_k, grad_v, *lists, position, *numbers, **sizes, TOKENS=TOKENS, num_warps=8, num_stages=2
    )
    return grad_q, grad_k, grad_v


class PackedAttention(torch.autograd.Function):
    """Forward kernel over packed keys with these gradients."""

    @staticmethod
    def forward(
        ctx, q: Tensor, k: Tensor, v: Tensor, attend, chosen: Tensor, start: Tensor, request: Tensor, position: Tensor, scale: float
    ):
        """`attend()` gives (output, lse)."""
        out, lse = attend()
        ctx.scale = scale
        ctx.save_for_backward(q, k, v, out, lse, chosen, start, request, position)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        """Gradients of q, k and v."""
        q, k, v, out, lse, chosen, start, request, position = ctx.saved_tensors
        with torch.cuda.device(q.device) if q.is_cuda else torch.no_grad():
            return *gradients(grad, q, k, v, out, lse, chosen, start, request, position, ctx.scale), *[None] * 6

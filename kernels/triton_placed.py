"""The weighted sum over a token's choices, in Triton, of result rows that lie anywhere."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_tiles import bf16, on


@triton.jit
def _combine_placed_kernel(y_ptr, place_ptr, weights_ptr, out_ptr, H, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """out [T, H] = sum of weights [T, k] * y[place[T, k]], in the order of the choices: the sum of `triton_group.combine`."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(TOP_K):
        weight = tl.load(weights_ptr + token * TOP_K + choice)
        row = tl.load(place_ptr + token * TOP_K + choice).to(tl.int64)
        total += weight * tl.load(y_ptr + row * H + column, mask=column < H, other=0.0)
    tl.store(out_ptr + token * H + column, bf16(total), mask=column < H)


def combine_placed(y: Tensor, place: Tensor, weights: Tensor) -> Tensor:
    """Sum bf16 [T, H] of y fp32 [*, H] at `place` int64 [T, k], times weights fp32 [T, k], one choice after the other."""
    tokens, k = place.shape
    h = y.shape[1]
    out = torch.empty(tokens, h, dtype=torch.bfloat16, device=y.device)
    if tokens:
        with on(y):
            _combine_placed_kernel[(tokens, triton.cdiv(h, 1024))](y, place, weights, out, h, TOP_K=k, BLOCK=1024, num_warps=4)
    return out

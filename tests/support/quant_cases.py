"""Inputs on which two implementations of the formats are to agree in every byte."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def same_bytes(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    """Whether two tuples of tensors have equal shapes, dtypes and bytes."""

    def raw(t: Tensor) -> Tensor:
        return t.detach().cpu().reshape(-1).contiguous().view(torch.uint8)

    return all(x.shape == y.shape and x.dtype == y.dtype and torch.equal(raw(x), raw(y)) for x, y in zip(a, b, strict=True))


def inputs(dtype: torch.dtype, rows: int = 33) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor [..., K], K a multiple of 32, on CPU."""
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    wide = 0.5 if dtype is torch.float16 else 6.0
    yield "normal", normal(rows, 64).to(dtype)
    yield "uniform", (torch.rand(rows, 96, generator=g) - 0.5).to(dtype)
    yield "sparse", (normal(rows, 64) * (torch.rand(rows, 64, generator=g) > 0.95)).to(dtype)
    yield "heavy tails", (normal(rows, 160) * torch.exp2(normal(rows, 160) * wide)).to(dtype)
    yield "zeros", torch.zeros(3, 32).to(dtype)
    yield "stack", (normal(3, rows, 96) * torch.tensor([1.0, 50.0, 0.02])[:, None, None]).to(dtype)
    ties = torch.tensor([6.0, -0.0, 0.0, 0.25, -0.25, 0.75, -0.75, 1.25, 1.75, 2.5, -2.5, 3.5, -3.5, 5.0, -5.0, -0.1])
    yield "ties", ties.repeat(4).view(2, 32).to(dtype)
    yield "row", normal(64).to(dtype)
    if dtype is not torch.float16:
        yield "large", torch.tensor([[3.0e38, -1.0e38] * 32]).to(dtype)
        yield "tiny", (normal(4, 64) * 1e-25).to(dtype)
        yield "subnormal", (normal(4, 64) * 1e-39).to(dtype)
        yield "subnormal beside normal", torch.cat((normal(4, 64), normal(4, 64) * 1e-40)).to(dtype)

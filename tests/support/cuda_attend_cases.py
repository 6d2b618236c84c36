"""Cases of `kernels.cuda_attend` whose results have only one right bit pattern, whoever adds in which order."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from samebits.kernels.msa_ops import BLOCK, DIM, Batch, Pages
from samebits.quant import kv, nvfp4
from samebits.quant.blocks import e4m3_values

from .msa_cases import make

SCALE = 0.5 * math.log(2)


class Exact(NamedTuple):
    batch: Batch
    q: Tensor
    cache: Pages
    chosen: Tensor


def exact_case(new: list[int], total: list[int], groups: int, heads: int, seed: int = 0) -> Exact:
    """Scores are even integers from -8 to 8, so that with `SCALE` weights are powers of two; values have few bits: all sums are exact.

    Every query head looks at two dimensions of its own, keys and values differ everywhere, and so do blocks' maxima.
    """
    case = make(new, total, "nvfp4", groups=groups, heads=heads * groups, seed=seed)
    g = torch.Generator().manual_seed(seed)
    data = case.cache.data
    planes = data.view(data.shape[0], groups, 2, BLOCK * 72)
    codes, scales = planes[..., : BLOCK * 64], planes[..., BLOCK * 64 :]
    small = torch.tensor([0, 2, 4, 10, 12], dtype=torch.uint8)  # 0, 1, 2, -1, -2
    pairs = [small[torch.randint(0, 5, codes[:, :, 0].shape, generator=g)] for _ in range(2)]
    codes[:, :, 0] = pairs[0] | pairs[1] << 4
    scales[:, :, 0] = 0x40  # 2.0
    codes[:, :, 1] = torch.randint(0, 256, codes[:, :, 1].shape, generator=g, dtype=torch.uint8)
    scales[:, :, 1] = 0x38 + 8 * torch.randint(0, 2, scales[:, :, 1].shape, generator=g, dtype=torch.uint8)  # 1.0 or 2.0
    q = torch.zeros_like(case.q)
    for row in q.view(-1, DIM):
        row[torch.randperm(DIM, generator=g)[:2]] = torch.randint(0, 2, (2,), generator=g).bfloat16() * 2 - 1
    return Exact(case.batch, q, case.cache, random_choice(case.batch.position, groups, g))


def random_choice(position: Tensor, groups: int, g: torch.Generator) -> Tensor:
    """int32 [T, G, 16]: ascending blocks up to the query's own, that one among them, then -1."""
    chosen = torch.full((len(position), groups, 16), -1, dtype=torch.int32)
    for t, p in enumerate(position.tolist()):
        for group in range(groups):
            others = torch.randperm(p // BLOCK, generator=g)[:15]
            blocks = torch.cat((others, torch.tensor([p // BLOCK]))).sort().values
            chosen[t, group, : len(blocks)] = blocks.int()
    return chosen


def with_any_scales(data: Tensor, seed: int = 0) -> None:
    """Saturating and NaN scales here and there in NVFP4 pages, in place."""
    scales = data.view(*data.shape[:-2], -1)[..., BLOCK * 64 :]
    g = torch.Generator().manual_seed(seed)
    for byte in (0x7E, 0x7F):
        scales[torch.rand(scales.shape, generator=g) < 0.02] = byte


def all_values(rounded: bool) -> Tensor:
    """fp32 [16 codes, 256 scale bytes]: what a code under a scale byte is read as. Signs of scales are not looked at, NaN is 480, or 0."""
    byte = torch.arange(256)
    scale = e4m3_values((byte & 0x7F).to(torch.uint8))
    scale = torch.where(scale.isnan(), 0.0 if rounded else 480.0, scale)
    values = nvfp4.decode_e2m1(torch.arange(16, dtype=torch.uint8))[:, None] * scale
    return kv.round_e4m3(values) if rounded else values

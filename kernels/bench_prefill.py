"""Attention of many queries for `bench_msa`: choices that neighbours share, and the Triton kernel beside the one in CUDA C++.

Random choices are those of each query by itself, as random keys have it. `alike`: every 64 queries choose by the index query of the first.
Where attention goes to `cuda_prefill`, the Triton kernel has a line of its own, with the same queries, keys and choices in the same
process, and it is told whether their bits are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import cuda_module, cuda_prefill, triton_msa
from .msa_ops import Batch, Packed, Pages

TOGETHER = 64  # queries with one choice
KINDS = ("", ", alike")  # of choices, at the end of a line's name


def together(index_q: Tensor) -> Tensor:
    """Index queries [T, G, D], each the first of its TOGETHER."""
    return index_q[::TOGETHER].repeat_interleave(TOGETHER, 0)[: len(index_q)].contiguous()


def in_triton(
    head: dict[str, Any],
    name: str,
    kind: str,
    call: tuple[Tensor, Pages | Packed, Tensor, Batch, float],
    lse: bool,
    timed: Callable[[list[Callable[[], Any]]], float],
    equal: dict[str, bool],
) -> Iterator[dict[str, Any]]:
    """The Triton kernel's line of `name` with choices of `kind`, if attention goes elsewhere; `equal` is told of the bits.

    Args:
        call: arguments of `attend`: queries, cache, choices, batch, scale. timed: microseconds of calls.
    """
    q, cache, chosen, _, _ = call
    if not cuda_prefill.takes(q, cache, chosen):
        return
    if reason := cuda_module.absence(q.device):
        yield head | {"name": f"{name}, CUDA{kind}", "error": reason}
        return
    have, want = triton_msa.attend(*call, lse=lse), triton_msa.attend_in_triton(*call, lse=lse)
    same = all(a is b or torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(have, want, strict=True))
    equal[f"{name}, CUDA{kind} {head['format']}"] = same
    yield head | {"name": f"{name}, Triton{kind}", "us": timed([partial(triton_msa.attend_in_triton, *call, lse=lse)])}

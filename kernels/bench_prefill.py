"""Lines of the CUDA prefill kernel for `bench_msa`: beside the Triton kernel, with its queries, keys and choices, in the same process.

Each line says whether its bits are the Triton kernel's. Choices are those of the benchmark, at random for each query, and some that
neighbours share: every 64 queries choose by the index query of the first.
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


def together(index_q: Tensor) -> Tensor:
    """Index queries [T, G, D], each the first of its TOGETHER."""
    return index_q[::TOGETHER].repeat_interleave(TOGETHER, 0)[: len(index_q)].contiguous()


def beside(
    head: dict[str, Any],
    name: str,
    call: tuple[Tensor, Pages | Packed, Tensor, Batch, float],
    alike: Tensor,
    lse: bool,
    timed: Callable[[list[Callable[[], Any]]], float],
    equal: dict[str, bool],
) -> Iterator[dict[str, Any]]:
    """`name` in CUDA; then both kernels with the choices `alike`. `equal` is told of every comparison.

    Args:
        call: arguments of `attend`: queries, cache, choices, batch, scale. timed: microseconds of calls.
    """
    q, cache, chosen, batch, scale = call
    if reason := cuda_module.absence(q.device):
        yield head | {"name": f"{name}, CUDA", "error": reason}
        return
    for kind, blocks in (("", chosen), (", alike", alike)):
        args = (q, cache, blocks, batch, scale, lse)
        want = triton_msa.attend(*args)
        if kind:
            yield head | {"name": name + kind, "us": timed([partial(triton_msa.attend, *args)])}
        line = head | {"name": f"{name}, CUDA{kind}"}
        try:
            have = cuda_prefill.attend(*args)
            same = all(a is b or torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(have, want, strict=True))
            equal[f"{line['name']} {head['format']}"] = same
            line["us"] = timed([partial(cuda_prefill.attend, *args)])
        except (RuntimeError, ImportError, OSError, ValueError) as error:  # of this kernel, which nothing else depends on
            line["error"] = f"{type(error).__name__}: {error}".split("\n")[0]
            equal[f"{line['name']} {head['format']}"] = False
        yield line

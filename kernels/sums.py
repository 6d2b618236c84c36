"""In which dtype torch's operations add up what they add up: fp32, or fp64 where a profile says so (`NumericsProfile.accumulation`).

A BLAS chooses the order of a sum by the shape of the product and by the number of threads, so on a CPU a row's fp32 sum has other last bits
in another batch. By itself that is 1e-6. Where the result is then rounded to a coarse grid, as K and V are for an NVFP4 cache, a value near
the middle between two codes takes one on one side and the other on the other, which is a difference of some percent. Sums in fp64, rounded
to fp32 once, have the same fp32 bits in any order but where the exact sum lies within about 2^-50 of the middle between two fp32 numbers.

Only forward sums are meant: gradients stay fp32. Kernels on CUDA have one order whatever the batch and do not ask.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.nn.functional as F
from torch import Tensor

_dtype: ContextVar[torch.dtype] = ContextVar("samebits_sums", default=torch.float32)
_DTYPES = {"float32": torch.float32, "float64": torch.float64}


@contextmanager
def summed_in(accumulation: str) -> Iterator[None]:
    """Inside, the operations of this package add up in `accumulation`, "float32" or "float64". Raises `ValueError` for another name."""
    if accumulation not in _DTYPES:
        raise ValueError(f"sums are formed in {' or '.join(_DTYPES)}, not {accumulation}")
    token = _dtype.set(_DTYPES[accumulation])
    try:
        yield
    finally:
        _dtype.reset(token)


def wide(x: Tensor) -> Tensor:
    """`x` in the dtype of sums."""
    return x.to(_dtype.get())


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., K] times weight [N, K] transposed: fp32 [..., N]."""
    return F.linear(wide(x), wide(weight)).float()


def add_product(out: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """`out` fp32 [T, N] plus x [T, K] times weight [N, K] transposed, added before the one rounding: fp32 [T, N]."""
    return torch.addmm(wide(out), wide(x), wide(weight).t()).float()

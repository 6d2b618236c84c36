"""What the GPU tests of attention share: the torch reference on the device, and two ways to compare."""

from __future__ import annotations

import pytest
import torch

from samebits.kernels import msa_ops


@pytest.fixture
def reference(monkeypatch):
    """Call with the ops to have the torch reference on the device."""

    def run(call):
        with monkeypatch.context() as m:
            m.setattr(msa_ops, "_kernels_take", lambda *_: False)
            return call()

    return run


def distance(have: torch.Tensor, want: torch.Tensor) -> float:
    """Relative, in norm."""
    return ((have.double() - want.double()).norm() / want.double().norm()).item()


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits, NaN and signed zeros included, of the same shape and dtype."""
    if a.shape != b.shape or a.dtype is not b.dtype:
        return False
    return torch.equal(*(x.contiguous().view(-1).view(torch.uint8) for x in (a, b)))

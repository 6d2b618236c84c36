"""Engine and trainer wired as on a GPU, on a CPU: packed tiles, MSA pages, slots by token, with the torch references of the kernels.

What differs from a GPU is who computes the ops. Whatever is started inside the block keeps that wiring afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch


@contextmanager
def as_on_a_gpu(*also: ModuleType) -> Iterator[None]:
    """An engine started inside takes itself to be on a GPU whose kernels fit it. `also`: more modules whose `takes_tiles` says so."""
    from samebits.rollout import attention, quantization, slots

    patch = pytest.MonkeyPatch()
    try:
        for module in (quantization, *also):
            patch.setattr(module, "takes_tiles", lambda device, dtype: dtype is torch.bfloat16)
        patch.setattr(attention, "kernels_attend", lambda config, dtype: True)
        original = slots.AdapterSlots.__init__

        def init(self, *args, **options):
            original(self, *args, **options)
            self.by_token = True

        patch.setattr(slots.AdapterSlots, "__init__", init)
        yield
    finally:
        patch.undo()

"""What CUDA's handles do, with host memory: torch's own reductions of CPU storages, by files in shared memory.

A buffer is named by a handle, opened by another process, and is the same memory there. Only the device is not a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from samebits.rollout.ipc import NotShareable


class HostHandles:
    """`samebits.rollout.ipc.Handles` on the CPU. Counts what it opened and collected."""

    def __init__(self, uuid: str = "host-0", refuses: str | None = None) -> None:
        self.name, self.refuses = uuid, refuses
        self.opened = self.collected = self.shared = 0
        self.kept: list[Any] = []

    def uuid(self, device: torch.device) -> str | None:
        return self.name

    def share(self, flat: Tensor) -> Any:
        self.shared += 1
        storage = flat.untyped_storage()
        manager, handle, size = storage._share_filename_cpu_()
        return manager, handle, size, tuple(flat.shape), flat.dtype

    def open(self, handle: Any, device: torch.device) -> Tensor:
        if self.refuses is not None:
            raise NotShareable(self.refuses)
        self.opened += 1
        manager, name, size, shape, dtype = handle
        storage = reductions.rebuild_storage_filename(torch.UntypedStorage, manager, name, size)
        return torch.empty(0, dtype=dtype).set_(storage, 0, shape, torch.empty(shape, device="meta").stride())

    def collect(self) -> None:
        self.collected += 1

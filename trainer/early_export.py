"""An adapter's export that is begun behind the optimizer's kernels, and is there when the rollout's update asks for it.

verl takes the step in one call to a trainer worker and asks for the adapter in a later one. Between them the host waits for the gradient's
norm, collects metrics, answers the driver, perhaps writes a checkpoint, and wakes the rollout: long enough to round and gather the
adapter on a stream of its own. It is the same export, only sooner; digests are still taken when it is drained.

The whole adapter is held until then, on every rank. So that training does not run out of memory by it, adapters beyond a sixteenth of the
device's memory are exported when they are asked for. All ranks must decide alike, because gathering is collective: the rule depends on
nothing but the adapter's size and the kind of device. On a CPU nothing would run beside anything else, and nothing is begun.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from functools import lru_cache

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from samebits.quant.adapter import AdapterSpec

Names = str | tuple[str, ...]
SHARE = 16
"""Part of a device's memory that an adapter may take to be exported early, as a divisor."""


def fits(size: float, memory: float) -> bool:
    """Whether an adapter of `size` bytes is exported early on a GPU that has `memory` bytes."""
    return size * SHARE <= memory


def worthwhile(spec: AdapterSpec, device: torch.device) -> bool:
    """Whether an adapter of this spec is exported early on `device`."""
    if device.type != "cuda":
        return False
    size = sum(torch.Size(shape).numel() for shape in spec.shapes().values()) * getattr(torch, spec.dtype).itemsize
    return fits(size, torch.cuda.get_device_properties(device).total_memory)


@lru_cache(maxsize=1)
def _side_stream(device: torch.device) -> torch.cuda.Stream | None:
    """One for all exports: the allocator keeps freed memory for the stream that had it."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


class EarlyExport:
    """Tensors of an adapter, or stacks of them, that are being made."""

    def __init__(self, version: int, tensors: Iterable[tuple[Names, Tensor]], masters: Iterable[Tensor], device: torch.device) -> None:
        """Drains `tensors` at once, behind what is queued on the current stream of `device`; where that is a GPU, without waiting for it.

        Args:
            version: of the adapter.
            tensors: name and tensor, or names and a stack, made of the masters when they are asked for.
            masters: parameters, sharded or not. They may be moved off the device meanwhile; their memory is not given to others before the
                export has read it.
        """
        self.version, self._device = version, device
        self._stream = _side_stream(device)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            self._tensors = list(tensors)
        if self._stream is not None:
            with torch.no_grad():
                for master in masters:
                    (master.to_local() if isinstance(master, DTensor) else master).record_stream(self._stream)

    def drain(self) -> Iterator[tuple[Names, Tensor]]:
        """The tensors for the current stream, once; each is let go when it has been handed over."""
        tensors, self._tensors = self._tensors[::-1], []
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        while tensors:
            name, tensor = tensors.pop()
            if self._stream is not None:
                tensor.record_stream(torch.cuda.current_stream(self._device))
            yield name, tensor

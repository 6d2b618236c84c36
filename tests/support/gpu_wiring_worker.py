"""A worker extension that wires the engine of its process as on a GPU: for replicas whose ranks are processes of their own."""

from __future__ import annotations

from samebits.rollout.worker import WorkerExtension
from tests.support.gpu_wiring import as_on_a_gpu

_WIRING = as_on_a_gpu()
_WIRING.__enter__()  # to the end of the process; vLLM imports this before it builds the model


class WiredWorker(WorkerExtension):
    """`WorkerExtension`, in a process that takes itself to be on a GPU whose kernels fit it."""

"""A worker extension whose CPU worker sleeps as a GPU's: for engines in a process of their own."""

from __future__ import annotations

from samebits.rollout.worker import WorkerExtension
from tests.support import sleeping_cpu

sleeping_cpu.install()  # to the end of the process; vLLM imports this before it builds the worker


class SleepingWorker(WorkerExtension):
    """`WorkerExtension`, in a process whose memory sleeps."""

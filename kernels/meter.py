"""Seconds and peak memory of the phases of one process, measured where the work is done and cheap enough to be always on.

Phases follow each other: to enter one is to leave the one before. On CUDA a boundary is an event in the stream, so a phase lasts as long
as the device worked or waited in it and nobody waits for the device but who asks for the results; elsewhere it is the host's clock. Peaks
start anew at each boundary: what the caching allocator handed out and what it held on CUDA, the resident set of the process elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # of the resident set: proc(5), clear_refs


@dataclass(slots=True)
class Phase:
    """What a phase took, over all the times that it was entered."""

    seconds: float = 0.0
    memory: dict[str, int] = field(default_factory=dict)
    """Largest bytes by kind: `allocated` and `reserved` on CUDA, `resident` elsewhere (missing where the system does not tell)."""


class Meter:
    """Phases of one process on one device."""

    def __init__(self, device: torch.device | str, listener: Callable[[str | None], None] | None = None) -> None:
        """`listener` is told each phase when it begins, and None when one ends (see `tracing.boundary`)."""
        self.device = torch.device(device)
        self._listener = listener
        self._cuda = self.device.type == "cuda"
        self._name: str | None = None
        self._start: Any = None
        self._done: list[tuple[str, Any, Any, dict[str, int]]] = []

    def enter(self, name: str) -> None:
        """A phase begins, and with it the one that runs ends."""
        self.stop()
        self._name = name
        self._reset_peaks()
        if self._listener is not None:
            self._listener(name)
        self._start = self._now()

    def stop(self) -> None:
        """The running phase ends, if there is one."""
        if self._name is not None:
            self._done.append((self._name, self._start, self._now(), self._peaks()))
            self._name = None
            if self._listener is not None:
                self._listener(None)

    def take(self) -> dict[str, Phase]:
        """Phases since the last call, in the order in which they were first entered; the running one is ended."""
        self.stop()
        done, self._done = self._done, []
        found: dict[str, Phase] = {}
        for name, start, end, peaks in done:
            phase = found.setdefault(name, Phase())
            phase.seconds += self._seconds(start, end)
            for kind, size in peaks.items():
                phase.memory[kind] = max(size, phase.memory.get(kind, 0))
        return found

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _seconds(self, start: Any, end: Any) -> float:
        if not self._cuda:
            return end - start
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def _reset_peaks(self) -> None:
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        try:
            _CLEAR.write_text(_RESET_PEAK)
        except OSError:  # another system, or not allowed: peaks are then those of the process since its start
            return

    def _peaks(self) -> dict[str, int]:
        if self._cuda:
            return {
                "allocated": torch.cuda.max_memory_allocated(self.device),
                "reserved": torch.cuda.max_memory_reserved(self.device),
            }
        return resident_peak()


def resident_peak() -> dict[str, int]:
    """{"resident": bytes} of this process at its peak, as Linux keeps it; empty on another system."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return {}
    peak = next((line for line in lines if line.startswith("VmHWM:")), None)  # in KiB
    return {} if peak is None else {"resident": int(peak.split()[1]) * 1024}

"""Recording of a trainer rank's kernels and collectives in chosen steps, by phase: the time and the volume of communication.

torch's profiler runs for a whole step or sync of a rank, and the phases of `kernels.meter` stand in its trace as annotations. Only sums
leave it: a file for each step, stretch and rank in the folder that `SAMEBITS_TRACE` names. Without that variable nothing here runs.

On CUDA a kernel belongs to the phase in which it was launched; NCCL's and our peer kernels are communication, any other kernel is compute.
A collective's kernel also waits for the ranks that come later, so its time is not the link's alone. On a CPU gloo's own spans are
communication, and compute are the operations on the other threads that call no further operation. Recording slows the host down, more so on
a CPU. A CPU has no statistics of its allocator but here: the memory of a phase beside what was held when the recording began.
"""

from __future__ import annotations

import functools
import gc
import json
import math
import os
import tempfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .spans import Overlap, Work, overlaps

VARIABLE = "SAMEBITS_TRACE"
OUTSIDE = "other"
"""Phase of what no phase holds."""
_PREFIX = "samebits:"
PEER_KERNELS = ("_publish_kernel", "_routes_kernel", "_pull_kernel", "_push_kernel", "exchange_kernel")
"""Triton kernels that read or write the memory of other GPUs, by the names of their functions."""
_SIZES = {
    "float": 4, "double": 8, "bfloat16": 2, "half": 2, "byte": 1, "unsigned char": 1, "char": 1, "signed char": 1, "bool": 1, "short": 2,
    "int": 4, "long": 8, "long int": 8, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip
_COLLECTIVES = {
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "broadcast_": "broadcast",
    "send": "send",
    "recv_": "recv",
}
Event = Mapping[str, Any]


@dataclass(slots=True)
class Volume:
    """Collectives of one kind in one phase."""

    calls: int = 0
    bytes: int = 0
    """What the rank receives: of an all_gather the others' parts, of a reduce_scatter (ring) as much as it sends, of an all_reduce (ring)
    2 (W - 1) / W of its tensor, of an all_to_all all, its own part included."""
    unsized: int = 0
    """Calls whose bytes the profiler did not tell."""


@dataclass(slots=True)
class PhaseTrace:
    """What one phase of a recording held. Seconds and bytes."""

    seconds: float = 0.0
    overlap: Overlap = field(default_factory=lambda: Overlap(0.0, 0.0, 0.0))
    volume: dict[str, Volume] = field(default_factory=dict)
    peak: int | None = None
    """Most bytes at a time: on CUDA all that the allocator handed out; on a CPU what came since the recording began, beside what was
    held."""


class Tracer:
    """Records the steps `first` to `first + steps - 1` of this process into `folder`."""

    def __init__(self, folder: Path, first: int, steps: int) -> None:
        self.folder, self.wanted = folder, range(first, first + steps)
        self._annotation: Any = None
        self._phase = OUTSIDE
        self._recording = False
        self._peaks: dict[str, int] = {}

    def boundary(self, phase: str | None) -> None:
        """A phase begins, or none: what `meter.Meter` tells."""
        if self._annotation is not None:
            self._annotation.__exit__(None, None, None)
            self._annotation = None
            if _on_cuda():  # the meter has started the allocator's peak anew at the phase's beginning
                self._peaks[self._phase] = max(torch.cuda.max_memory_allocated(), self._peaks.get(self._phase, 0))
        if phase is not None and self._recording:
            self._phase = phase
            self._annotation = torch.profiler.record_function(_PREFIX + phase)
            self._annotation.__enter__()

    @contextmanager
    def recording(self, stretch: str, step: int, held: Callable[[], dict[str, int]] | None = None) -> Iterator[None]:
        """Record the block where `step` is wanted. `held`: bytes that the rank holds when the block begins, by what they are."""
        if step not in self.wanted:
            yield
            return
        holds = held() if held is not None else {}
        cuda, self._peaks = _on_cuda(), {}
        activities = [torch.profiler.ProfilerActivity.CPU] + ([torch.profiler.ProfilerActivity.CUDA] if cuda else [])
        profiler = torch.profiler.profile(activities=activities, record_shapes=True, profile_memory=not cuda)
        profiler.start()
        self._recording = True
        try:
            yield
        finally:
            self.boundary(None)
            self._recording = False
            if cuda:
                torch.cuda.synchronize()
            profiler.stop()
        events = _exported(profiler)
        del profiler
        gc.collect()  # it has weak references to the parameters, which therefore could not be moved to another device
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        phases = summary(events, world)
        for name, peak in self._peaks.items():
            phases[name].peak = peak
        found = {name: asdict(phase) for name, phase in phases.items()}
        content = {"step": step, "stretch": stretch, "rank": rank, "device": "cuda" if cuda else "cpu", "held": holds, "phases": found}
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / f"{stretch}_step_{step}_rank_{rank}.json").write_text(json.dumps(content) + "\n")


@functools.cache
def tracer() -> Tracer | None:
    """The recorder that this process's environment asks for, or None."""
    wanted = json.loads(os.environ.get(VARIABLE, "{}"))
    return Tracer(Path(wanted["folder"]), wanted["first"], wanted["steps"]) if wanted.get("steps") else None


def boundary() -> Callable[[str | None], None] | None:
    """What a `meter.Meter` of this process tells its phases, or None."""
    found = tracer()
    return None if found is None else found.boundary


@contextmanager
def recording(stretch: str, step: int, held: Callable[[], dict[str, int]] | None = None) -> Iterator[None]:
    """`Tracer.recording` of this process; nothing where nothing is to be recorded."""
    found = tracer()
    if found is None:
        yield
        return
    with found.recording(stretch, step, held):
        yield


def _on_cuda() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def read(folder: Path) -> list[dict[str, Any]]:
    """All recordings of a folder, by step, stretch and rank."""
    found = [json.loads(file.read_text()) for file in folder.glob("*_step_*_rank_*.json")]
    return sorted(found, key=lambda one: (one["step"], one["stretch"], one["rank"]))


def _exported(profiler: torch.profiler.profile) -> list[Event]:
    with tempfile.TemporaryDirectory(prefix="samebits-trace-") as folder:
        file = f"{folder}/trace.json"
        profiler.export_chrome_trace(file)
        return json.loads(Path(file).read_text())["traceEvents"]


def summary(events: Sequence[Event], world: int) -> dict[str, PhaseTrace]:
    """Phases of a trace as Kineto exports it (times in microseconds), in the order in which they first began. `world`: ranks."""
    marks = sorted(
        (e["ts"], e["ts"] + e["dur"], e["name"].removeprefix(_PREFIX))
        for e in events
        if e.get("cat") == "user_annotation" and e["name"].startswith(_PREFIX)
    )
    starts = [mark[0] for mark in marks]

    def phase_at(moment: float) -> str:
        place = bisect_right(starts, moment) - 1
        return marks[place][2] if place >= 0 and moment < marks[place][1] else OUTSIDE

    found = {name: PhaseTrace() for _, _, name in marks} | {OUTSIDE: PhaseTrace()}
    for start, end, name in marks:
        found[name].seconds += (end - start) * 1e-6
    for name, overlap in overlaps(_work(events, phase_at)).items():
        found[name].overlap = overlap
    for moment, kind, size in _collectives(events, world):
        volume = found[phase_at(moment)].volume.setdefault(kind, Volume())
        volume.calls += 1
        if size is None:
            volume.unsized += 1
        else:
            volume.bytes += size
    for name, peak in _peaks(events, marks).items():
        found[name].peak = peak
    return found


def _work(events: Sequence[Event], phase_at: Callable[[float], str]) -> dict[str, Work]:
    """Spans of communication and compute by phase, in seconds."""
    found: dict[str, Work] = defaultdict(Work)
    kernels = [e for e in events if e.get("cat") == "kernel"]
    if kernels:
        launched = {e["args"]["correlation"]: e["ts"] for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver") and "args" in e}
        for e in kernels:
            work = found[phase_at(launched.get(e["args"].get("correlation"), e["ts"]))]
            (work.communication if is_communication(e["name"]) else work.compute).append(_span(e))
        return found
    for e in events:
        if e.get("ph") == "X" and e["name"].startswith("gloo:"):
            found[phase_at(e["ts"])].communication.append(_span(e))
    for e in _leaves(e for e in events if e.get("cat") == "cpu_op"):
        if not e["name"].startswith(("c10d::", "_c10d_functional::")):
            found[phase_at(e["ts"])].compute.append(_span(e))
    return found


def is_communication(kernel: str) -> bool:
    """Whether a CUDA kernel moves data between GPUs: NCCL's and ours over peer memory."""
    return kernel.startswith("nccl") or kernel in PEER_KERNELS


def _span(event: Event) -> tuple[float, float]:
    return event["ts"] * 1e-6, (event["ts"] + event["dur"]) * 1e-6


def _leaves(events: Iterable[Event]) -> Iterator[Event]:
    """Operations in which no other operation of their thread lies."""
    threads: dict[Any, list[Event]] = defaultdict(list)
    for e in events:
        threads[e["tid"]].append(e)
    for inside in threads.values():
        inside.sort(key=lambda e: (e["ts"], -e["dur"]))
        for e, following in zip(inside, [*inside[1:], None], strict=True):
            if following is None or following["ts"] >= e["ts"] + e["dur"]:
                yield e


def _collectives(events: Sequence[Event], world: int) -> Iterator[tuple[float, str, int | None]]:
    """(moment, kind, bytes) of each collective, as torch.distributed was asked for it: the same for NCCL and gloo."""
    # Lists of tensors come without a dtype. Of NCCL a record inside the call says it, of gloo the span that works on it.
    told = ((e["ts"], e["args"]) for e in events if e.get("name") == "record_param_comms" and "dtype" in e.get("args", {}))
    records = sorted(told, key=lambda record: record[0])  # two may begin at one moment
    typed = sorted(
        (e["ts"], math.prod(e["args"]["Input Dims"][0]), e["args"]["Input type"][0])
        for e in events
        if str(e.get("name")).startswith("gloo:") and e.get("args", {}).get("Input Dims")
    )
    for e in events:
        kind = _COLLECTIVES.get(e["name"].removeprefix("c10d::")) if e.get("cat") == "cpu_op" and e["name"].startswith("c10d::") else None
        if kind is None:
            continue
        counts = [_count(dims) for dims in e["args"].get("Input Dims", [])]
        dtype = next((t for t in e["args"].get("Input type", []) if _size(t)), None)
        if dtype is None:
            dtype = next((args["dtype"] for at, args in records if e["ts"] <= at <= e["ts"] + e["dur"]), None)
        if dtype is None:
            dtype = next((t for at, count, t in typed if at >= e["ts"] and count in counts), None)
        size = _size(dtype)
        yield e["ts"], kind, None if size is None or not counts else size * _elements(kind, counts, world)


def _elements(kind: str, counts: list[int], world: int) -> int:
    """Elements received, of a call whose first arguments have `counts` elements (see `Volume.bytes`)."""
    first, second = counts[0], counts[1] if len(counts) > 1 else 0
    if kind in ("all_gather", "reduce_scatter"):
        return abs(first - second) if first and second else (first or second) * (world - 1)  # lists of lists have no sizes
    return 2 * first * (world - 1) // world if kind == "all_reduce" else first


def _count(dims: Any) -> int:
    """Elements of a tensor or of a list of tensors, by their sizes."""
    if dims and isinstance(dims[0], list):
        return sum(map(_count, dims))
    return math.prod(dims) if dims else 0


def _size(dtype: str | None) -> int | None:
    return None if dtype is None else _SIZES.get(dtype.removeprefix("c10::").lower())


def _peaks(events: Sequence[Event], marks: Sequence[tuple[float, float, str]]) -> dict[str, int]:
    """Most bytes at a time on a CPU by phase, of what was allocated in the recording; empty where its memory was not recorded."""
    changes = sorted(
        (e["ts"], e["args"]["Addr"], e["args"]["Bytes"])
        for e in events
        if e.get("name") == "[memory]" and e["args"].get("Device Type") == 0
    )
    if not changes:
        return {}
    found: dict[str, int] = {}
    live: dict[int, int] = {}
    now, at = 0, 0
    for start, end, name in marks:
        while at < len(changes) and changes[at][0] < start:
            now, at = now + _change(live, changes[at]), at + 1
        found[name] = max(now, found.get(name, 0))
        while at < len(changes) and changes[at][0] < end:
            now, at = now + _change(live, changes[at]), at + 1
            found[name] = max(now, found[name])
    return found


def _change(live: dict[int, int], change: tuple[float, int, int]) -> int:
    """Bytes more or less; what was allocated before the recording is not ours to free."""
    _, address, size = change
    if size >= 0:
        live[address] = size
        return size
    return -live.pop(address, 0)

"""`samebits quantize`: a whole checkpoint on disk into a numerics profile's formats, shard by shard.

`convert_plan` checks everything that headers tell before anything is written. Output shard i holds the modules whose weights lie in
source shard i, so nothing depends on timing: the bytes are the same for any number of workers and after any number of kills.

In memory are, for each worker, the tensors of one module (gate and up of an expert together) and the working copies of some million
elements: less than one shard. The partner of a gate or up that lies in another shard is read from there.

A weight in 16 or 32 bits is quantized by its role. One that is quantized already is taken as it is where its format is the profile's,
and refused otherwise: nothing is quantized twice. Vision tensors are copied, the MTP module is left out.

While the work lasts, the target holds a state file with the digest of each finished shard. A second run with the same source and
profile checks those digests and writes only what is missing or different. config.json is written last, so an unfinished target is no
model to anyone.
"""

from __future__ import annotations

import errno
import fcntl
import fnmatch
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from . import mxfp8, nvfp4, readers
from .checkpoint import TORCH_DTYPES
from .convert_plan import Item, Job, Plan
from .mxfp8 import MXFP8Tensor
from .nvfp4 import NVFP4Tensor
from .profile import Format, NumericsProfile
from .shards import INDEX, TEMPORARY, CheckpointError, ShardWriter, file_bytes, file_digest, spec_bytes, write_bytes, write_text
from .sizes import GB

STATE = ".samebits-quantize.json"
SIDE_FILES = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template*",
    "*.jinja",
    "generation_config.json",
    "*processor_config.json",
    "LICENSE*",
    "*.py",
)
"""Files beside the weights that are copied as they are."""
_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True)
class Report:
    """What a conversion did."""

    files: int
    tensors: int
    source_bytes: int
    bytes: int
    taken_over: int
    """Weights that were quantized already and kept byte for byte (scales of a gate and up pair excepted)."""
    resumed: int
    """Shards that an earlier run had finished."""
    left_out: dict[str, int]
    """Source tensors that have no place in the result: reason to count."""


class Stopped(Exception):
    """Another worker failed."""


def convert(
    source: str | Path,
    target: str | Path,
    profile: NumericsProfile,
    workers: int | None = None,
    on_start: Callable[[int], None] = lambda total: None,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> Report:
    """Write `source` (an HF checkpoint of MiniMax-M3) to `target` in the formats of `profile`.

    Args:
        source: folder with config.json and safetensors files in 16 or 32 bits, or in a format that `readers` knows.
        target: empty or absent, or what an interrupted run with the same source and profile left.
        workers: threads, one shard each. Default: one for each core, at most 8.
        on_start: called once with the number of source bytes. on_bytes: called, from any thread, with bytes done since the last call.
    Raises:
        CheckpointError: in one line that names the file or tensor. `NonFiniteWeight`: a weight holds NaN or infinity.
    """
    source, target = Path(source), Path(target)
    try:
        plan = Plan(source, profile)
        _check_target(source, target)
        target.mkdir(parents=True, exist_ok=True)
        with _lock(target):
            run = _Run(plan, target, workers, on_bytes)
            on_start(plan.source_bytes)
            run.all()
            return run.report()
    except OSError as error:
        raise CheckpointError(f"{error.filename or target}: {error.strerror}") from None


def _check_target(source: Path, target: Path) -> None:
    if target.resolve() == source.resolve():
        raise CheckpointError(f"{target} is the source itself")
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target} is no folder")
    if not target.exists() or (target / STATE).is_file():
        return
    if [p for p in target.iterdir() if not p.name.startswith(TEMPORARY)]:
        try:
            ours = "samebits" in json.loads((target / "config.json").read_text())
        except (OSError, ValueError):
            ours = False
        raise CheckpointError(f"{target} already holds a finished checkpoint" if ours else f"{target} is not empty")


@contextmanager
def _lock(target: Path) -> Iterator[None]:
    fd = os.open(target, os.O_RDONLY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise CheckpointError(f"{target} is being written by another process") from None
        yield
    finally:
        os.close(fd)


class _Run:
    """One run over a locked target."""

    def __init__(self, plan: Plan, target: Path, workers: int | None, on_bytes: Callable[[int], None]) -> None:
        self.plan, self.target, self.profile, self.on_bytes = plan, target, plan.profile, on_bytes
        self.workers = max(1, min(workers or min(8, os.cpu_count() or 1), len(plan.jobs)))
        self.fingerprint = plan.fingerprint()
        self.specs = {job.file: job.specs(self.profile) for job in plan.jobs}
        self.finished: dict[str, str] = self._load_state()
        self.resumed = 0
        self._stop, self._mutex = threading.Event(), threading.Lock()
        for left in target.glob(f"{TEMPORARY}*"):
            left.unlink()
        for path in target.glob("*.safetensors"):
            if path.name not in self.specs:
                raise CheckpointError(f"{path} is no part of this conversion; remove it")
        self._check_room()
        self._save_state()

    def _load_state(self) -> dict[str, str]:
        path = self.target / STATE
        if not path.is_file():
            return {}
        try:
            state = json.loads(path.read_text())
            if state["fingerprint"] == self.fingerprint:
                return dict(state["finished"])
        except (ValueError, KeyError, TypeError):
            pass
        raise CheckpointError(f"{self.target} holds an unfinished conversion of another source or profile; remove it first")

    def _save_state(self) -> None:
        state = {"fingerprint": self.fingerprint, "finished": dict(sorted(self.finished.items()))}
        write_text(self.target / STATE, json.dumps(state) + "\n")

    def _check_room(self) -> None:
        need = sum(file_bytes(tensors) for file, tensors in self.specs.items() if not (self.target / file).is_file())
        free = shutil.disk_usage(self.target).free
        if need > free:
            raise CheckpointError(f"{self.target} has no room: {need / GB:.1f} GB are needed, {free / GB:.1f} GB are free")

    def all(self) -> None:
        """Write every shard, then everything else, config.json last."""
        threads = torch.get_num_threads()
        try:
            with ThreadPoolExecutor(self.workers, initializer=torch.set_num_threads, initargs=(max(1, threads // self.workers),)) as pool:
                try:
                    futures = [pool.submit(self._shard, job) for job in self.plan.jobs]
                    errors = [e for e in (f.exception() for f in futures) if e is not None]
                except BaseException:
                    self._stop.set()
                    raise
        finally:
            torch.set_num_threads(threads)
        for error in sorted(errors, key=lambda e: isinstance(e, Stopped)):
            raise error
        self._rest()

    def _shard(self, job: Job) -> None:
        try:
            if self._stop.is_set():
                raise Stopped
            path = self.target / job.file
            if job.file in self.finished and path.is_file() and file_digest(path) == self.finished[job.file]:
                self.on_bytes(job.nbytes)
                with self._mutex:
                    self.resumed += 1
                return
            with ShardWriter(path, self.specs[job.file]) as writer:
                for unit in _units(job.items):
                    if self._stop.is_set():
                        raise Stopped
                    _write(unit, writer, self.profile)
                    self.on_bytes(sum(i.nbytes for i in unit))
            digest = file_digest(path)
            with self._mutex:
                self.finished[job.file] = digest
                self._save_state()
        except BaseException:
            self._stop.set()
            raise

    def _rest(self) -> None:
        for path in sorted(self.plan.source.iterdir()):
            if path.is_file() and any(fnmatch.fnmatch(path.name, pattern) for pattern in SIDE_FILES):
                write_bytes(self.target / path.name, path.read_bytes())
        placed = {name: file for file, tensors in self.specs.items() for name in tensors}
        index = {"metadata": {"total_size": self._bytes()}, "weight_map": dict(sorted(placed.items()))}
        write_text(self.target / INDEX, json.dumps(index, indent=2) + "\n")
        write_text(self.target / "config.json", json.dumps(self.plan.output_config(), indent=2) + "\n")
        (self.target / STATE).unlink()

    def _bytes(self) -> int:
        return sum(spec_bytes(spec) for tensors in self.specs.values() for spec in tensors.values())

    def report(self) -> Report:
        """What was done."""
        return Report(
            files=len(self.specs),
            tensors=sum(map(len, self.specs.values())),
            source_bytes=self.plan.source_bytes,
            bytes=self._bytes(),
            taken_over=self.plan.taken_over,
            resumed=self.resumed,
            left_out=dict(self.plan.left_out),
        )


def _units(items: list[Item]) -> Iterator[tuple[Item, ...]]:
    """Items in order of name, gate and up of an expert as one unit where both are in this shard."""
    by_module = {i.stored.module: i for i in items}
    done: set[str] = set()
    for module, item in sorted(by_module.items()):
        if module in done:
            continue
        partner = by_module.get(item.partner.module) if item.partner is not None else None
        unit = (item,) if partner is None else (item, partner)
        done.update(i.stored.module for i in unit)
        yield unit


def _write(unit: tuple[Item, ...], writer: ShardWriter, profile: NumericsProfile) -> None:
    """Write one module, or gate and up of an expert."""
    first = unit[0]
    pair = (first.stored,) if first.partner is None else (first.stored, first.partner)
    weights = [readers.read(stored) for stored in pair]
    scale = None
    if all(isinstance(w, NVFP4Tensor) for w in weights) and len(pair) == 2:
        weights = list(readers.share_scale(*weights, names=tuple(stored.name for stored in pair)))
    elif first.role is not None and profile.weight_format(first.role) is Format.NVFP4 and isinstance(weights[0], Tensor):
        scale = nvfp4.shared_scale({stored.name: w for w, stored in zip(weights, pair, strict=True)})
    for item, weight in zip(unit, weights, strict=False):  # the partner may belong to another shard
        _write_item(item, weight, scale, writer, profile)


def _write_item(item: Item, weight: readers.Weight, scale: Tensor | None, writer: ShardWriter, profile: NumericsProfile) -> None:
    """`scale`: global scale of a weight that is to become NVFP4."""
    module, name = item.stored.module, item.stored.name
    fmt = None if item.role is None else profile.weight_format(item.role)
    for part in _rows(weight) if isinstance(weight, Tensor) else (weight,):
        if fmt is Format.NVFP4 and isinstance(part, Tensor):
            part = nvfp4.quantize(part, scale, name=name)
        elif fmt is Format.MXFP8 and isinstance(part, Tensor):
            part = mxfp8.quantize(part, name=name)
        if isinstance(part, NVFP4Tensor):
            writer.write(f"{module}.weight", part.codes)
            writer.write(f"{module}.weight_scale", part.block_scales.view(torch.float8_e4m3fn))
        elif isinstance(part, MXFP8Tensor):
            writer.write(f"{module}.weight", part.codes.view(torch.float8_e4m3fn))
            writer.write(f"{module}.weight_scale", part.exponents)
        elif fmt is None:
            writer.write(module, part)
        else:
            part = part.to(TORCH_DTYPES[fmt])
            nvfp4.require_finite(part, name)
            writer.write(module if item.stored.bare else f"{module}.weight", part)
    if fmt is Format.NVFP4:
        writer.write(f"{module}.weight_scale_2", weight.global_scale if isinstance(weight, NVFP4Tensor) else scale.float())
        if item.keep_activation_scale:
            writer.write(f"{module}.input_scale", readers.read_activation_scale(item.stored))


def _rows(w: Tensor) -> Iterator[Tensor]:
    """Row blocks of some million elements."""
    if w.dim() == 0:
        return iter((w,))
    step = max(1, _CHUNK * w.shape[0] // max(1, w.numel()))
    return (w[i : i + step] for i in range(0, w.shape[0], step))

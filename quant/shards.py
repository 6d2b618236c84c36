"""Safetensors files by their headers: which tensors a folder holds and where, whether every file is whole, and writing a new one.

A header says everything about a file's length, so a truncated file is found without reading its data. A folder with
`model.safetensors.index.json` must hold exactly the files and tensors that the index names; without one, every `*.safetensors`
file counts. A file is written tensor by tensor under a temporary name and renamed when it is complete and on disk, so that a final
name never holds less than the whole file. Its layout is the one that the safetensors library gives the same tensors.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

INDEX = "model.safetensors.index.json"
TEMPORARY = ".samebits-tmp-"
"""Files of this prefix are unfinished and may be removed whenever no one is writing."""
DTYPES: dict[str, torch.dtype] = {  # in the order in which the safetensors library lays tensors out, last first
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ORDER = {name: i for i, name in enumerate(DTYPES)}
_LARGEST_HEADER = 100_000_000
_NUMBERED = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
_PIECE = 1 << 26


class CheckpointError(ValueError):
    """A checkpoint is missing, incomplete or of another kind."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one stored tensor lies."""

    file: Path
    dtype: str
    """As safetensors names it, e.g. `BF16`."""
    shape: tuple[int, ...]
    start: int
    """Offset of the first byte in the file."""
    nbytes: int

    def read(self) -> Tensor:
        """The tensor, in memory of its own. Raises `CheckpointError` when the file became shorter or unreadable."""
        data = torch.empty(self.nbytes, dtype=torch.uint8)
        view, done = memoryview(data.numpy()), 0
        try:
            with open(self.file, "rb", buffering=0) as f:
                f.seek(self.start)
                while done < self.nbytes:
                    got = f.readinto(view[done : done + _PIECE])
                    if not got:
                        raise CheckpointError(f"{self.file} is truncated: it ends inside a tensor")
                    done += got
        except OSError as error:
            raise CheckpointError(f"{self.file} cannot be read: {error.strerror}") from None
        return data.view(DTYPES[self.dtype]).reshape(self.shape)


def read_header(path: Path) -> dict[str, Entry]:
    """Entries of one safetensors file by tensor name. Raises `CheckpointError` when the file is truncated or not what it claims."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as f:
            length = int.from_bytes(f.read(8), "little")
            if 8 <= size < 8 + length <= _LARGEST_HEADER:
                raise CheckpointError(f"{path} is truncated: {size} bytes, its header alone has {length}")
            if size < 8:
                raise CheckpointError(f"{path} is truncated: {size} bytes")
            if length > _LARGEST_HEADER:
                raise CheckpointError(f"{path} is no safetensors file")
            header = f.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    try:
        described = json.loads(header, object_pairs_hook=lambda pairs: _unique(pairs, path))
        described.pop("__metadata__", None)
        entries = {n: _entry(path, d, 8 + length) for n, d in described.items()}
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{path} is no safetensors file: its header is unreadable") from None
    end = 8 + length
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if entry.start != end or entry.nbytes != math.prod(entry.shape) * DTYPES[entry.dtype].itemsize:
            raise CheckpointError(f"{path}: the header gives tensor {name} a place that does not fit its shape or its neighbours")
        end += entry.nbytes
    if size != end:
        what = "is truncated:" if size < end else "does not match its header:"
        raise CheckpointError(f"{path} {what} {size} bytes instead of {end}")
    return entries


def _unique(pairs: list[tuple[str, Any]], path: Path) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        names = [n for n, _ in pairs]
        twice = next(n for n in names if names.count(n) > 1)
        raise CheckpointError(f"{path}: tensor {twice} is there twice")
    return out


def _entry(path: Path, described: Mapping[str, Any], base: int) -> Entry:
    start, stop = described["data_offsets"]
    shape = tuple(int(n) for n in described["shape"])
    if described["dtype"] not in DTYPES:
        raise CheckpointError(f"{path}: holds dtype {described['dtype']!r}, which is not supported")
    if min((start, stop - start, *shape)) < 0:
        raise ValueError("negative")
    return Entry(path, described["dtype"], shape, base + start, stop - start)


class Shards:
    """All tensors of a checkpoint folder.

    Raises `CheckpointError` in one line when a file is missing, left over, truncated or unreadable, or a tensor is there twice,
    missing, or without an entry in the index.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise CheckpointError(f"no folder {folder}")
        present = sorted(p.name for p in self.folder.glob("*.safetensors") if not p.name.startswith("."))
        placed = self._index()
        self.files = self._complete(present, placed)
        self.entries: dict[str, Entry] = {}
        for file in self.files:
            for name, entry in read_header(self.folder / file).items():
                if name in self.entries:
                    raise CheckpointError(f"{self.folder}: tensor {name} is both in {self.entries[name].file.name} and in {file}")
                self.entries[name] = entry
        if placed is not None:
            self._check_places(placed)

    def _index(self) -> dict[str, str] | None:
        path = self.folder / INDEX
        if not path.is_file():
            return None
        try:
            placed = json.loads(path.read_text(), object_pairs_hook=lambda pairs: _unique(pairs, path))["weight_map"]
            if not all(isinstance(f, str) and f == os.path.basename(f) for f in placed.values()):
                raise TypeError
        except CheckpointError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError):
            raise CheckpointError(f"{path} is no index of safetensors files") from None
        return placed

    def _complete(self, present: list[str], placed: dict[str, str] | None) -> list[str]:
        if placed is not None:
            wanted = sorted(set(placed.values()))
            for file in wanted:
                if file not in present:
                    raise CheckpointError(f"{self.folder}: shard {file} is missing; {INDEX} names it")
            for file in present:
                if file not in wanted:
                    raise CheckpointError(f"{self.folder}: {file} is not named by {INDEX}")
        if not present:
            raise CheckpointError(f"{self.folder} holds no safetensors file")
        for file in present if placed is None else ():
            numbered = _NUMBERED.fullmatch(file)
            for i in range(1, int(numbered[3]) + 1) if numbered else ():
                sibling = f"{numbered[1]}-{i:05d}-of-{numbered[3]}.safetensors"
                if sibling not in present:
                    raise CheckpointError(f"{self.folder}: shard {sibling} is missing")
        return present

    def _check_places(self, placed: dict[str, str]) -> None:
        for name, file in placed.items():
            if name not in self.entries:
                raise CheckpointError(f"{self.folder / file}: tensor {name} is missing; {INDEX} places it there")
            if self.entries[name].file.name != file:
                raise CheckpointError(f"{self.folder}: {INDEX} places tensor {name} in {file}, but {self.entries[name].file.name} holds it")
        for name, entry in self.entries.items():
            if name not in placed:
                raise CheckpointError(f"{entry.file}: tensor {name} has no entry in {INDEX}")

    def read(self, name: str) -> Tensor:
        """One tensor by its stored name."""
        return self.entries[name].read()


Spec = tuple[str, tuple[int, ...]]
"""dtype as safetensors names it, and shape."""


def spec_bytes(spec: Spec) -> int:
    """Bytes of a tensor of this dtype and shape."""
    return math.prod(spec[1]) * DTYPES[spec[0]].itemsize


def _header(tensors: Mapping[str, Spec]) -> tuple[bytes, dict[str, int]]:
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets, at = {}, 0
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: (-_ORDER[item[1][0]], item[0])):
        offsets[name] = at
        end = at + spec_bytes((dtype, shape))
        described[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, offsets


def file_bytes(tensors: Mapping[str, Spec]) -> int:
    """Size of the file that `ShardWriter` writes for these tensors."""
    return len(_header(tensors)[0]) + sum(spec_bytes(s) for s in tensors.values())


class ShardWriter:
    """Writes one safetensors file whose tensors are known beforehand, in any order and in pieces.

    Use as a context manager: leaving it renames the finished file to `path`; leaving it by an exception removes what was written.
    Raises `ValueError` when a tensor was written in part, twice or with another dtype.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Spec]) -> None:
        self.path, self.tensors = path, tensors
        self._header, self._offsets = _header(tensors)
        self._written = dict.fromkeys(tensors, 0)
        self._temporary = _temporary(path)

    def __enter__(self) -> ShardWriter:
        self._fd = os.open(self._temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            self._put(memoryview(self._header), 0)
        except BaseException:
            self._discard()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is None:
                for name, spec in self.tensors.items():
                    if self._written[name] != spec_bytes(spec):
                        raise ValueError(f"{name}: {self._written[name]} of {spec_bytes(spec)} bytes were written")
                os.fsync(self._fd)
                os.replace(self._temporary, self.path)
        finally:
            self._discard()

    def _discard(self) -> None:
        os.close(self._fd)
        self._temporary.unlink(missing_ok=True)  # it is gone when it was renamed

    def write(self, name: str, part: Tensor) -> None:
        """Append `part` (CPU; the next rows, or all) to what was written of tensor `name`."""
        if part.dtype != DTYPES[self.tensors[name][0]]:
            raise ValueError(f"{name} is {part.dtype}, not {self.tensors[name][0]}")
        data = part.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        if self._written[name] + data.nbytes > spec_bytes(self.tensors[name]):
            raise ValueError(f"{name}: more was written than it has")
        self._put(memoryview(data), len(self._header) + self._offsets[name] + self._written[name])
        self._written[name] += data.nbytes

    def _put(self, data: memoryview, at: int) -> None:
        while data:
            done = os.pwrite(self._fd, data[:_PIECE], at)
            data, at = data[done:], at + done


def _temporary(path: Path) -> Path:
    return path.with_name(f"{TEMPORARY}{path.name}.part")  # no pattern for finished files matches it


def write_text(path: Path, text: str) -> None:
    """Write a small file whole or not at all."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Write a small file whole or not at all."""
    temporary = _temporary(path)
    with open(temporary, "wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)


def file_digest(path: Path) -> str:
    """BLAKE2b-128 of a file's bytes, as hex."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, lambda: hashlib.blake2b(digest_size=16)).hexdigest()

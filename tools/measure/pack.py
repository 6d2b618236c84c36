"""Carry a folder away in small files, and put it together elsewhere, byte for byte.

    python -m tools.measure.pack pack FOLDER PARTS [--what all|results|state] [--part-bytes N] [--slice-bytes N] [--files N]
    python -m tools.measure.pack slice PARTS NUMBER TO
    python -m tools.measure.pack unpack FOLDER PARTS [PARTS ...]

`pack` writes numbered parts and a manifest with digests into the empty or new folder PARTS, and says how many slices that is. A slice is
as much as may be carried at once: some parts, and the manifest. `slice` puts slice NUMBER, from 0 on, into the folder TO. `unpack` takes
the folders to which slices were carried, refuses parts that are missing, damaged or of another packing by name, and writes nothing then.

What is packed of a folder:

all       everything
results   of a queue's folder, what figures are made of: status, logs, results, runs without checkpoints and adapters
state     that, and of each run that is not finished the newest checkpoint, as far as resuming needs it

The files' bytes follow each other in the order of their paths, and are cut into blocks, which are compressed by xz where that saves more
than a twentieth. Needs nothing but Python.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import os
import shutil
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

SCHEMA = "samebits.measure.pack/1"
MANIFEST = "manifest.json"
BLOCK = 1 << 20
WORTH = 0.95
"""A block is kept compressed where it has at most this share of its bytes."""
PRESET = 1
"""Of xz: weights and moments become hardly smaller with more, and packing several times slower."""
_STATE = "checkpoints"
_LEFT_OUT = ("adapters", "env", "cache", "__pycache__")
"""Folders that no figure is made of, wherever they lie."""
_KEPT_SUFFIXES = (".json", ".jsonl", ".log", ".txt", ".yaml", ".html", ".png", ".xml")


class PackError(ValueError):
    """Nothing was packed or unpacked. The message is one line."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much may lie in what is carried."""

    part: int = 15_000_000
    """Bytes of a file."""
    slice: int = 60_000_000
    """Bytes of a slice."""
    files: int = 8
    """Files of a slice, the manifest among them."""


def selected(folder: Path, what: str) -> list[str]:
    """Relative paths of files to pack, sorted. Raises `PackError`."""
    if not folder.is_dir():
        raise PackError(f"{folder} is no folder")
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    if what == "all":
        return files
    found = [name for name in files if _is_result(PurePosixPath(name))]
    return sorted({*found, *_checkpoints(folder)}) if what == "state" else found


def _is_result(path: PurePosixPath) -> bool:
    left_out = any(part in (*_LEFT_OUT, _STATE) or part.endswith(".partial") for part in path.parts[:-1])
    return not left_out and path.suffix in _KEPT_SUFFIXES and not path.name.startswith(".")


def _checkpoints(folder: Path) -> Iterator[str]:
    """Files of the newest complete checkpoint of each run below `folder` that has no summary yet. Its PEFT folder is for others."""
    for tracker in folder.rglob(f"{_STATE}/latest_checkpointed_iteration.txt"):
        newest = tracker.parent / f"global_step_{tracker.read_text().strip()}"
        if (tracker.parents[1] / "summary.json").exists() or not newest.is_dir():
            continue
        for path in (tracker, *newest.rglob("*")):
            inside = path.relative_to(folder)
            if path.is_file() and "peft" not in inside.parts:
                yield inside.as_posix()


def pack(folder: Path, parts: Path, what: str = "all", sizes: Sizes | None = None, block: int = BLOCK) -> dict[str, Any]:
    """Write parts and manifest; returns the manifest. Raises `PackError`."""
    sizes = sizes or Sizes()
    if sizes.files < 2 or sizes.part < 1 or sizes.slice < sizes.part:
        raise PackError("a slice holds at least two files, the manifest and a part, and as many bytes as a part")
    names = selected(folder, what)
    if not names:
        raise PackError(f"{folder} holds nothing of {what}")
    if parts.exists() and any(parts.iterdir()):
        raise PackError(f"{parts} is not empty")
    parts.mkdir(parents=True, exist_ok=True)
    files: list[dict[str, Any]] = []
    writer = _Parts(parts, sizes.part)
    for raw, payload in _compressed(_blocks(_contents(folder, names, files), min(block, sizes.part))):
        writer.write(payload, raw)
    writer.close()
    manifest = {"schema": SCHEMA, "what": what, "files": files, "blocks": writer.blocks, "parts": writer.parts}
    # The manifest goes with every slice; what it will say of slices and itself is estimated from above.
    length = len(json.dumps(manifest)) + 32 * len(writer.parts) + 256
    manifest["slices"] = _slices(writer.parts, sizes, length)
    manifest["id"] = _identity(manifest)
    (parts / MANIFEST).write_text(json.dumps(manifest) + "\n")
    return manifest


def _identity(manifest: dict[str, Any]) -> str:
    """Digest of all of a manifest but its `id`."""
    return hashlib.sha256(json.dumps({key: manifest[key] for key in sorted(manifest) if key != "id"}).encode()).hexdigest()[:16]


def _contents(folder: Path, names: Iterable[str], files: list[dict[str, Any]]) -> Iterator[bytes]:
    """Bytes of the files, one after the other; `files` gets what each was. A file that grows meanwhile is taken as far as it was read."""
    for name in names:
        digest, size = hashlib.sha256(), 0
        try:
            with (folder / name).open("rb") as file:
                mode = os.fstat(file.fileno()).st_mode & 0o777
                while piece := file.read(1 << 20):
                    digest.update(piece)
                    size += len(piece)
                    yield piece
        except OSError as error:
            raise PackError(f"{folder / name}: {error.strerror}; it changed while it was packed: pack again") from None
        files.append({"path": name, "bytes": size, "mode": mode, "sha256": digest.hexdigest()})


def _blocks(pieces: Iterable[bytes], size: int) -> Iterator[bytes]:
    held = bytearray()
    for piece in pieces:
        held += piece
        while len(held) >= size:
            yield bytes(held[:size])
            del held[:size]
    if held:
        yield bytes(held)


def _compressed(blocks: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """(bytes before, bytes as they are kept) of each block, in order; as many at once as there are cores (xz frees the interpreter)."""
    workers = len(os.sched_getaffinity(0))
    waiting: deque[tuple[int, Future]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        for block in blocks:
            waiting.append((len(block), pool.submit(_smaller, block)))
            if len(waiting) > 2 * workers:
                raw, future = waiting.popleft()
                yield raw, future.result()
        for raw, future in waiting:
            yield raw, future.result()


def _smaller(block: bytes) -> bytes:
    packed = lzma.compress(block, preset=PRESET)
    return packed if len(packed) <= WORTH * len(block) else block


class _Parts:
    """Numbered files of whole blocks, none larger than `limit`."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self.parts: list[dict[str, Any]] = []
        self.blocks: list[list[int]] = []
        """Number of the part, bytes in it, bytes unpacked; a block that is as long as before is not compressed."""
        self._file: BinaryIO | None = None

    def write(self, payload: bytes, raw: int) -> None:
        if self._file is None or self._size + len(payload) > self.limit:
            self.close()
            self._name = f"part_{len(self.parts):04d}"
            self._file, self._digest, self._size = (self.folder / self._name).open("wb"), hashlib.sha256(), 0
        self._file.write(payload)
        self._digest.update(payload)
        self._size += len(payload)
        self.blocks.append([len(self.parts), len(payload), raw])

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self.parts.append({"name": self._name, "bytes": self._size, "sha256": self._digest.hexdigest()})
            self._file = None


def _slices(parts: Sequence[dict[str, Any]], sizes: Sizes, manifest: int) -> list[list[str]]:
    """Names of the parts of each slice. Raises `PackError` where the manifest leaves no room."""
    if not parts:
        return [[]]
    room = sizes.slice - manifest
    if manifest > sizes.part or room < max(part["bytes"] for part in parts):
        raise PackError(f"the manifest of so many files has {manifest:,} bytes, which leaves no room in a slice of {sizes.slice:,}")
    found: list[list[str]] = [[]]
    left = room
    for part in parts:
        if len(found[-1]) == sizes.files - 1 or part["bytes"] > left:
            found.append([])
            left = room
        found[-1].append(part["name"])
        left -= part["bytes"]
    return found


def slice_to(parts: Path, number: int, to: Path) -> list[str]:
    """Put a slice and the manifest into `to`; returns the names of the parts. Raises `PackError`."""
    manifest = read_manifest(parts)
    slices = manifest["slices"]
    if not 0 <= number < len(slices):
        raise PackError(f"{parts} has slices 0 to {len(slices) - 1}, not {number}")
    to.mkdir(parents=True, exist_ok=True)
    for name in (MANIFEST, *slices[number]):
        shutil.copyfile(parts / name, to / name)
    return slices[number]


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest in a folder of parts. Raises `PackError`."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text())
        if manifest["schema"] != SCHEMA:
            raise PackError(f"{path} is of {manifest['schema']}, not {SCHEMA}")
        if _identity(manifest) != manifest["id"]:
            raise PackError(f"{path} is damaged")
        return manifest
    except OSError as error:
        raise PackError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise error if isinstance(error, PackError) else PackError(f"{path} is damaged ({type(error).__name__})") from None


def unpack(folder: Path, carried: Sequence[Path], replace: bool = False) -> dict[str, Any]:
    """Write the files of a packing into `folder`; returns its manifest. Raises `PackError`, with nothing written, where anything is wrong.

    A file that is there with other bytes is only overwritten with `replace`.
    """
    manifests = {path: read_manifest(path) for path in carried}
    manifest = next(iter(manifests.values()))
    other = next((path for path, one in manifests.items() if one["id"] != manifest["id"]), None)
    if other is not None:
        raise PackError(f"{other} is of another packing than {carried[0]}")
    places = _verified(manifest, carried)
    targets = [folder / _inside(file["path"]) for file in manifest["files"]]
    for target, file in zip(targets, manifest["files"], strict=True):
        if not replace and target.exists() and _digest(target) != file["sha256"]:
            raise PackError(f"{target} is there with other bytes; --replace overwrites it")
    pieces = _pieces(manifest, places)
    held = bytearray()
    for target, file in zip(targets, manifest["files"], strict=True):
        target.parent.mkdir(parents=True, exist_ok=True)
        staging, digest, left = target.with_name(f".{target.name}.unpacking"), hashlib.sha256(), file["bytes"]
        with staging.open("wb") as out:
            while left:
                if not held:
                    held += next(pieces)
                piece = bytes(held[:left])
                del held[:left]
                left -= len(piece)
                digest.update(piece)
                out.write(piece)
        if digest.hexdigest() != file["sha256"]:  # parts are as they were written: the fault was there before
            staging.unlink()
            raise PackError(f"{target} has other bytes than were packed")
        staging.chmod(file["mode"])
        os.replace(staging, target)
    return manifest


def _verified(manifest: dict[str, Any], carried: Sequence[Path]) -> list[Path]:
    """Where each part lies. Raises `PackError` with what is missing or damaged."""
    places: list[Path] = []
    missing: list[str] = []
    for part in manifest["parts"]:
        place = next((path / part["name"] for path in carried if (path / part["name"]).is_file()), None)
        if place is None:
            missing.append(part["name"])
        elif place.stat().st_size != part["bytes"] or _digest(place) != part["sha256"]:
            raise PackError(f"{place} is damaged")
        else:
            places.append(place)
    if missing:
        slices = [str(number) for number, names in enumerate(manifest["slices"]) if set(names) & set(missing)]
        raise PackError(f"missing are {len(missing)} of {len(manifest['parts'])} parts, of slices {', '.join(slices)}: {missing[0]} first")
    return places


def _pieces(manifest: dict[str, Any], places: Sequence[Path]) -> Iterator[bytes]:
    at = -1
    for number, length, raw in manifest["blocks"]:
        if number != at:
            at, data, offset = number, places[number].read_bytes(), 0
        block = data[offset : offset + length]
        offset += length
        yield block if length == raw else lzma.decompress(block)


def _inside(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise PackError(f"{name!r} is no path inside of the folder")
    return path


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main(argv: Sequence[str] | None = None) -> int:
    """See the module."""
    usual = Sizes()
    parser = argparse.ArgumentParser(prog="python -m tools.measure.pack", description="Carry a folder away in small files.")
    commands = parser.add_subparsers(dest="do", required=True)
    one = commands.add_parser("pack", help="write parts and a manifest")
    one.add_argument("folder", type=Path)
    one.add_argument("parts", type=Path)
    one.add_argument("--what", choices=("all", "results", "state"), default="all")
    one.add_argument("--part-bytes", type=int, default=usual.part, help="of a file at most")
    one.add_argument("--slice-bytes", type=int, default=usual.slice, help="of a slice at most")
    one.add_argument("--files", type=int, default=usual.files, help="of a slice at most, the manifest among them")
    one = commands.add_parser("slice", help="put a slice into a folder")
    one.add_argument("parts", type=Path)
    one.add_argument("number", type=int)
    one.add_argument("to", type=Path)
    one = commands.add_parser("unpack", help="put the folder together")
    one.add_argument("folder", type=Path)
    one.add_argument("parts", type=Path, nargs="+")
    one.add_argument("--replace", action="store_true", help="overwrite files that have other bytes")
    options = parser.parse_args(argv)
    try:
        if options.do == "pack":
            sizes = Sizes(options.part_bytes, options.slice_bytes, options.files)
            manifest = pack(options.folder, options.parts, options.what, sizes)
            raw, kept = (sum(one["bytes"] for one in manifest[of]) for of in ("files", "parts"))
            counts = f"{len(manifest['files'])} files of {raw:,} bytes in {len(manifest['parts'])} parts of {kept:,}"
            print(f"{counts}: {len(manifest['slices'])} slices, from 0 on")
        elif options.do == "slice":
            print(f"{len(slice_to(options.parts, options.number, options.to))} parts and the manifest are in {options.to}")
        else:
            manifest = unpack(options.folder, options.parts, options.replace)
            print(f"{len(manifest['files'])} files are in {options.folder}")
    except (PackError, OSError) as error:
        print(f"measure: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

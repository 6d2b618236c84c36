"""Reads the file that wandb writes offline, by its format: LevelDB's log (32 KiB blocks; CRC-32, length, type before each piece) after a
header of 7 bytes, each record one `wandb_internal_pb2.Record`. wandb itself no longer ships a reader for Python.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK, _HEAD = 32768, struct.Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def records(path: Path) -> Iterator[Any]:
    """All records of a `.wandb` file. Raises `ValueError` on another header or a wrong checksum."""
    from wandb.proto import wandb_internal_pb2

    data = path.read_bytes()
    if data[:4] != b":W&B":
        raise ValueError(f"{path} is no wandb file")
    at, whole = 7, b""
    while at + _HEAD.size <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEAD.size:
            at += left
            continue
        checksum, length, kind = _HEAD.unpack_from(data, at)
        piece = data[at + _HEAD.size : at + _HEAD.size + length]
        if kind not in (_FULL, _FIRST, _MIDDLE, _LAST) or zlib.crc32(piece, zlib.crc32(bytes([kind]))) != checksum:
            raise ValueError(f"{path}: wrong checksum at byte {at}")
        at += _HEAD.size + length
        whole = piece if kind in (_FULL, _FIRST) else whole + piece
        if kind in (_FULL, _LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record

"""An adapter on its way to the engines: one file of tensors, in shared memory where there is some, and one manifest."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from samebits.quant.adapter import Manifest, Taken

_SHARED_MEMORY = Path("/dev/shm")


@contextmanager
def adapter_file(
    tensors: Mapping[str, Tensor], version: int, profile: str, taken: Taken | None = None, world: int = 1
) -> Iterator[tuple[str, Manifest]]:
    """(path, manifest) of an adapter for the time of the block; the file is gone afterwards.

    Args:
        tensors: wire name to CPU tensor. version: optimizer steps in it. profile: hash of the trainer's numerics profile.
        taken: digests of the tensors where they came from; without them those of `tensors`. world: ranks of the replicas it goes to.
    """
    manifest = Manifest.of(tensors, version, profile, taken, world)
    handle, path = tempfile.mkstemp(prefix="samebits-", suffix=".safetensors", dir=_SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None)
    os.close(handle)
    try:
        save_file(dict(tensors), path)
        yield path, manifest
    finally:
        Path(path).unlink(missing_ok=True)

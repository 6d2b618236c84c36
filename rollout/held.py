"""What an engine rank holds, counted from the tensors themselves: weights, adapter slots and KV cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor


def held_bytes(model: Any, kv_caches: Iterable[Any]) -> dict[str, int]:
    """Bytes by part: `weights` (parameters and buffers), `adapter_slots` and `kv_cache`. Memory that tensors share counts once."""
    slots = [t for adapter in model.adapters() for t in _tensors(vars(adapter))]
    seen: set[int] = set()
    return {
        "adapter_slots": _new(slots, seen),
        "kv_cache": _new(_tensors(list(kv_caches)), seen),
        "weights": _new([*model.parameters(), *model.buffers()], seen),
    }


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _tensors(one)


def _new(tensors: Iterable[Tensor], seen: set[int]) -> int:
    """Bytes of the storages that are not in `seen` yet."""
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total

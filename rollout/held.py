"""What an engine rank holds, counted from the tensors themselves: weights, adapter slots and KV cache.

Weights that kernels multiply lie in tiles, which are no parameters of their modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from samebits.kernels.expert_tiles import NVFP4Tiles
from samebits.kernels.linear_tiles import MXFP8Tiles


def held_bytes(model: Any, kv_caches: Iterable[Any]) -> dict[str, int]:
    """Bytes by part: `weights` (parameters, buffers and tiles), `adapter_slots` and `kv_cache`. Memory that tensors share counts once."""
    slots = [t for adapter in model.adapters() for t in _tensors(vars(adapter))]
    seen: set[int] = set()
    return {
        "adapter_slots": _new(slots, seen),
        "kv_cache": _new(_tensors(list(kv_caches)), seen),
        "weights": _new([*model.parameters(), *model.buffers(), *_tiles(model)], seen),
    }


def card_bytes(device: torch.device | str) -> int | None:
    """Memory of a CUDA device as its driver tells it, of which vLLM takes its share; None elsewhere."""
    device = torch.device(device)
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else None


def _tiles(model: Any) -> Iterator[Tensor]:
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, NVFP4Tiles | MXFP8Tiles):
                yield from _tensors(value)


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

"""What sleep does to memory, on a CPU: vLLM's worker there ignores the call, this one takes what a GPU's would give away.

On CUDA, level 1 copies what was allocated while the model was loaded to the host and gives its memory back, and gives the cache back
without a copy. Waking maps memory at the same addresses: of weights with what they held, of the cache with anything. Here tensors stay
where they are too, and everything that sleeps is overwritten, so that a read of it shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from vllm.v1.worker.cpu_worker import CPUWorker


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Tensors in attributes, lists and dictionaries of `value`, modules and their adapters included."""
    if isinstance(value, Tensor):
        yield value
    elif id(value) not in seen and isinstance(value, nn.Module | dict | list | tuple):
        seen.add(id(value))
        for one in value if isinstance(value, list | tuple) else (vars(value) if isinstance(value, nn.Module) else value).values():
            yield from _tensors(one, seen)
    elif id(value) not in seen and type(value).__module__.startswith("samebits.") and hasattr(value, "__dict__"):
        seen.add(id(value))
        yield from _tensors(vars(value), seen)


class Sleeping:
    """`sleep` and `wake_up` of a worker, by tags. `pages` are those of the cache, all else that the model holds are weights."""

    def __init__(self, worker: Any) -> None:
        pages = {cache.untyped_storage().data_ptr(): cache for cache in _tensors(list(worker.model_runner.kv_caches), set())}
        held = {t.untyped_storage().data_ptr(): t for t in _tensors(worker.model_runner.get_model(), set()) if t.numel()}
        flat = {at: torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage()) for at, t in (held | pages).items()}
        self.parts = {
            "weights": [flat[at] for at in held.keys() - pages.keys()],
            "kv_cache": [flat[at] for at in pages],
        }
        self.backup: list[Tensor] | None = None
        self.asleep: set[str] = set()

    def sleep(self, level: int) -> None:
        assert level == 1, "the base comes from nowhere else"
        if "weights" not in self.asleep:
            self.backup = [t.clone() for t in self.parts["weights"]]
        for tag in self.parts.keys() - self.asleep:
            for t in self.parts[tag]:
                t.fill_(0xFF)  # NaN in every format
        self.asleep = {"weights", "kv_cache"}

    def wake_up(self, tags: list[str] | None) -> None:
        for tag in self.asleep & set(tags or self.asleep):
            if tag == "weights":
                for t, kept in zip(self.parts[tag], self.backup, strict=True):
                    t.copy_(kept)
                self.backup = None
            self.asleep.discard(tag)


def install() -> None:
    """Give all CPU workers of this process such a sleep."""

    def of(worker: Any) -> Sleeping:
        if not hasattr(worker, "sleeping"):
            worker.sleeping = Sleeping(worker)
        return worker.sleeping

    CPUWorker.sleep = lambda self, level=1: of(self).sleep(level)
    CPUWorker.wake_up = lambda self, tags=None: of(self).wake_up(tags)

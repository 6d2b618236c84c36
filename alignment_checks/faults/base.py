"""What a fault is, and how one is written."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from samebits.alignment_checks.pair import Pair
from samebits.alignment_checks.report import Place
from samebits.rollout.pages import PageCache


@dataclass(frozen=True, slots=True)
class Fault:
    """One named fault."""

    name: str
    summary: str
    """One line for people."""
    seam: str
    caught_by: tuple[str, ...]
    """Checks that must disagree, each of them."""
    inject: Callable[[Pair], AbstractContextManager[Place]]
    replicas: int = 1
    """Engine replicas that it takes."""


CATALOGUE: dict[str, Fault] = {}


def fault(seam: str, *caught_by: str, replicas: int = 1) -> Callable:
    """Put a generator function (Pair) -> yields Place into the catalogue; its name is the fault's, its docstring the summary."""

    def register(function: Callable[[Pair], Iterator[Place]]) -> Callable[[Pair], AbstractContextManager[Place]]:
        inject = contextmanager(function)
        name, summary = function.__name__, " ".join((function.__doc__ or "").split()).rstrip(".")
        if name in CATALOGUE or not summary:
            raise ValueError(f"fault {name} is there twice or has no summary")
        CATALOGUE[name] = Fault(name, summary, seam, caught_by, inject, replicas)
        return functools.wraps(function)(inject)

    return register


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[Any]:
    """`owner.name` is `value` inside the block; yields what it was. Raises `AttributeError` when there is no such name."""
    before = getattr(owner, name)
    own = name in vars(owner)
    setattr(owner, name, value)
    try:
        yield before
    finally:
        setattr(owner, name, before) if own else delattr(owner, name)


def layers(pair: Pair) -> tuple[int, int, int]:
    """(first dense layer, first and last layer with experts)."""
    shape = pair.trainer.dims.shape
    dense = next(i for i in range(shape.layers) if i not in shape.moe_layers)
    return dense, shape.moe_layers[0], shape.moe_layers[-1]


def expert(pair: Pair) -> int:
    """Some expert that is neither the first nor the last."""
    return pair.trainer.dims.shape.experts // 2 + 1


def engine_layer(pair: Pair, layer: int, replica: int = 0) -> Any:
    """Layer of a replica's serving model."""
    return pair.replicas[replica].model.model.layers[layer]


def on_pages(pair: Pair) -> bool:
    """Whether the engine attends by kernels over pages (`rollout.pages`), and not in torch over rows (`rollout.paged`)."""
    return isinstance(engine_layer(pair, 0).self_attn.attn, PageCache)

"""Taps: named points in the forward of engine and trainer at which a recorder can listen.

Both models call `tap` with the same names at the same places, so that a check can lay the two forwards beside each other and say at
which operation they part. Without a recorder a tap is one comparison with None. A recorder sees tensors of one process, in order of
the calls; rows are tokens (dim 0), and steps of one sequence follow each other.

Points of layer i, each below `model.layers.{i}.`, in order: input_layernorm; self_attn.{q, k, v, index_q, index_k} (normed, rotated and,
for k, v and index_k, as the cache holds them); self_attn.blocks; self_attn.attention; self_attn.o_proj; post_attention_layernorm; in dense
layers mlp.activation and mlp.down_proj; in others block_sparse_moe.{gate, ids, weights, experts, shared_experts.activation,
shared_experts.down_proj}. Before them model.embed_tokens, after them model.norm and lm_head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_recorder: Recorder | None = None


class Recorder:
    """Keeps copies, on the CPU, of the points that `wanted` accepts (None: all)."""

    def __init__(self, wanted: Callable[[str], bool] | None = None) -> None:
        self.wanted = wanted
        self.parts: dict[str, list[Tensor]] = {}

    def __call__(self, point: str, value: Tensor) -> None:
        """Keep a copy of `value` under `point`."""
        if self.wanted is None or self.wanted(point):
            self.parts.setdefault(point, []).append(value.detach().to("cpu", copy=True))

    def tensors(self) -> dict[str, Tensor]:
        """Point to all its rows, in the order in which points were first seen."""
        return {point: torch.cat(parts) for point, parts in self.parts.items()}


def tap(point: str, value: Tensor) -> None:
    """Offer `value` [T, ...] to the recorder, if there is one."""
    if _recorder is not None:
        _recorder(point, value)


def recording(point: str) -> bool:
    """Whether a recorder wants `point`: for values that are not computed otherwise."""
    return _recorder is not None and (_recorder.wanted is None or _recorder.wanted(point))


def start(recorder: Recorder) -> None:
    """Listen from now on. Raises `RuntimeError` when someone listens already."""
    global _recorder
    if _recorder is not None:
        raise RuntimeError("the taps are being recorded already")
    _recorder = recorder


def stop() -> Recorder:
    """Listen no more; returns the recorder. Raises `RuntimeError` when nobody listened."""
    global _recorder
    if _recorder is None:
        raise RuntimeError("the taps are not being recorded")
    recorder, _recorder = _recorder, None
    return recorder


@contextmanager
def record(wanted: Callable[[str], bool] | None = None) -> Iterator[Recorder]:
    """Record inside the block."""
    recorder = Recorder(wanted)
    start(recorder)
    try:
        yield recorder
    finally:
        stop()

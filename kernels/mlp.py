"""The dense MLP, and the shared expert beside the routed ones: what trainer and engine call for either.

    mlp               down(swiglu(gate x, up x)), gate and up stacked in one matrix, each of the three with its own adapter
    mlp_activation    the part of it before `down`, for engines that split it over ranks
    moe_with_shared   `moe` plus the `mlp` of the shared expert: bf16(routed) + bf16(shared)

On the Triton kernels (MXFP8 tiles, x in bf16 on CUDA) gate, up and SwiGLU are one launch, and a small batch's shared expert runs on a
second CUDA stream while the first sorts and multiplies for the routed ones; the work forks and joins inside the operation, forward and
backward, so that a CUDA graph holds it too. An output row's bits depend neither on what it is stacked with nor on what runs beside it.
Anywhere else `lora_linear` and `swiglu_oai_halves` do the same one after the other.

`point` is the prefix of the taps that these operations offer to a recorder (see `taps`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from samebits.quant.blocks import fast_path

from .activation import SwiGLU, swiglu_oai_halves
from .expert_tiles import NVFP4Tiles
from .linear import FrozenWeight, LoRA, lora_linear, split
from .linear_tiles import MXFP8Tiles, unpack_linear
from .moe import ExpertLoRA, moe
from .taps import tap


class MLPLoRA(NamedTuple):
    """Adapter slots of one MLP, a and b as [slots, r, K] and [slots, N, r]; None where not adapted."""

    gate: LoRA | None
    up: LoRA | None
    down: LoRA | None


class SharedExpert(NamedTuple):
    """An MLP with its adapters, as `moe_with_shared` takes it."""

    gate_up: FrozenWeight | MXFP8Tiles  # [2I, H], gate rows first
    down: FrozenWeight | MXFP8Tiles  # [H, I]
    lora: MLPLoRA | None = None


def _fused(x: Tensor, *weights: FrozenWeight | MXFP8Tiles) -> bool:
    return all(isinstance(w, MXFP8Tiles) for w in weights) and x.dtype is torch.bfloat16 and fast_path(x) and len(x) > 0


def mlp(
    x: Tensor,
    gate_up: FrozenWeight | MXFP8Tiles,
    down: FrozenWeight | MXFP8Tiles,
    activation: SwiGLU,
    lora: MLPLoRA | None = None,
    adapter_ids: Tensor | None = None,
    recompute: bool = False,
    point: str = "",
) -> Tensor:
    """A SwiGLU network: x [T, H] to [T, H] in x's dtype.

    Args:
        gate_up: [2I, H], gate rows first. down: [H, I].
        lora: adapter slots, or None. adapter_ids: int [T] slot of each token (-1: base), None: slot 0 for all.
        recompute: keep less for the backward and compute gate and up again there (Triton kernels only).
        point: prefix of the taps `activation` and `down_proj`.
    """
    if _fused(x, gate_up, down):
        from .mlp_fused import fused_mlp

        return fused_mlp(x, gate_up, down, activation, lora, adapter_ids, recompute, point)
    act = _activated(x, gate_up, activation, lora, adapter_ids)
    tap(f"{point}activation", act)
    y = lora_linear(act, down, None if lora is None else lora.down, adapter_ids)
    tap(f"{point}down_proj", y)
    return y


def mlp_activation(
    x: Tensor,
    gate_up: FrozenWeight | MXFP8Tiles,
    activation: SwiGLU,
    lora: MLPLoRA | None = None,
    adapter_ids: Tensor | None = None,
) -> Tensor:
    """What `mlp` multiplies by `down`: x [T, H] to [T, I] in x's dtype, with the bits that these rows have in an MLP with more of them.

    For inference with gate and up split over ranks; arguments are those of `mlp`.
    """
    if _fused(x, gate_up):
        from .mlp_fused import fused_activation

        return fused_activation(x, gate_up, activation, lora, adapter_ids)
    return _activated(x, gate_up, activation, lora, adapter_ids)


def _activated(
    x: Tensor, gate_up: FrozenWeight | MXFP8Tiles, activation: SwiGLU, lora: MLPLoRA | None, adapter_ids: Tensor | None
) -> Tensor:
    if isinstance(gate_up, MXFP8Tiles):
        gate_up = unpack_linear(gate_up)
    pairs = (None, None) if lora is None else (lora.gate, lora.up)
    halves = [lora_linear(x, w, pair, adapter_ids) for w, pair in zip(split(gate_up, 2), pairs, strict=True)]
    return swiglu_oai_halves(*halves, activation).to(x.dtype)


def moe_with_shared(
    x: Tensor,
    w13: FrozenWeight | NVFP4Tiles,
    w2: FrozenWeight | NVFP4Tiles,
    ids: Tensor,
    weights: Tensor,
    shared: SharedExpert,
    activation: SwiGLU,
    lora: ExpertLoRA | None = None,
    adapter_ids: Tensor | None = None,
    recompute: bool = False,
    point: str = "",
) -> Tensor:
    """Routed experts plus the shared one: [T, H] in x's dtype.

    Arguments are those of `moe`; `recompute` holds for the shared expert too, `adapter_ids` choose in the slots of both.
    `point`: prefix of the taps `experts` and `shared_experts.{activation, down_proj}`.
    """
    if isinstance(w13, NVFP4Tiles) and _fused(x, shared.gate_up, shared.down):
        from .mlp_fused import fused_moe_with_shared

        return fused_moe_with_shared(x, w13, w2, ids, weights, shared, activation, lora, adapter_ids, recompute, point)
    routed = moe(x, w13, w2, ids, weights, activation, lora, adapter_ids, recompute)
    tap(f"{point}experts", routed)
    beside = mlp(x, shared.gate_up, shared.down, activation, shared.lora, adapter_ids, recompute, f"{point}shared_experts.")
    return routed + beside

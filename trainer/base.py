"""Frozen weights of the training model: as a checkpoint stores them, or reordered for the Hopper kernels.

Either way the same bits, in parameters without gradient that FSDP2 shards along their first dimension and gathers as they are: codes and
scales of NVFP4 and MXFP8 as uint8, or as the int32 and int64 words of `kernels.expert_tiles` and `kernels.linear_tiles`. A stack of experts
may be spread over ranks instead (`expert_ranks`), and is then never gathered for a forward.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from samebits.kernels.expert_tiles import NVFP4Tiles, pack_experts_on, unpack_experts
from samebits.kernels.linear import FrozenWeight
from samebits.kernels.linear_tiles import MXFP8Tiles, pack_linear, unpack_linear
from samebits.quant.checkpoint import Checkpoint, CheckpointError
from samebits.quant.mxfp8 import MXFP8Tensor
from samebits.quant.nvfp4 import NVFP4Tensor

from .expert_ranks import ExpertRanks
from .lora import full


class PackedBase(nn.Module):
    """One frozen weight as it is stored, or after `pack` in the order of the Hopper kernels.

    Every tensor of it is a parameter without gradient, in its own dtype.
    """

    def __init__(self, weight: FrozenWeight) -> None:
        super().__init__()
        self._ranks: ExpertRanks | None = None
        self._hold(weight)

    def _hold(self, weight: FrozenWeight | NVFP4Tiles | MXFP8Tiles) -> None:
        self._kind = type(weight) if isinstance(weight, tuple) else None
        parts = weight._asdict() if isinstance(weight, tuple) else {"weight": weight}
        self._names = tuple(parts)
        for name, part in parts.items():
            if isinstance(part, Tensor):
                # FSDP2 shards along the first dimension, so a scalar global scale becomes a vector of one.
                self.register_parameter(name, nn.Parameter(part.reshape(part.shape or (1,)), requires_grad=False))
            else:
                setattr(self, name, part)

    def pack(self, name: str, device: torch.device) -> None:
        """Hold a stack in NVFP4 or a matrix in MXFP8 as tiles on `device`, a matrix at a time; leave any other weight as it is.

        Raises `ValueError` with `name` where the kernels cannot read it.
        """
        weight = self.value()
        if isinstance(weight, NVFP4Tensor):
            tiles = pack_experts_on(device, weight, name)
        elif isinstance(weight, MXFP8Tensor):
            tiles = pack_linear(MXFP8Tensor(*(part.to(device) for part in weight)), name)
        else:
            return
        for part in self._names:
            delattr(self, part)
        self._hold(tiles)

    def spread(self, ranks: ExpertRanks) -> None:
        """Take the stack for this rank's share of one that is spread over `ranks`. For FSDP2 to ignore; not to be packed any more."""
        self._ranks = ranks
        for name in self._names:
            part = getattr(self, name)
            if isinstance(part, Tensor):
                delattr(self, name)
                self.register_parameter(name, ranks.parameter(part.detach(), requires_grad=False))

    def value(self) -> FrozenWeight | NVFP4Tiles | MXFP8Tiles:
        """The weight as the ops of `kernels` take it; of a stack that is spread over ranks, this rank's matrices."""
        parts = (getattr(self, name) for name in self._names)
        if self._ranks is None:
            return self._join(list(parts))
        return self._join([self._ranks.local(part) if isinstance(part, Tensor) else part for part in parts])

    def held(self) -> FrozenWeight | NVFP4Tiles | MXFP8Tiles:
        """The whole weight outside of a forward, where it may be sharded or spread. Every rank must ask."""
        parts = (getattr(self, name) for name in self._names)
        return self._join([full(part) if isinstance(part, Tensor) else part for part in parts])

    def gathered(self) -> FrozenWeight:
        """`held` as it is stored, byte for byte. A stack is better taken expert by expert (see `MoE.base_weights`)."""
        weight = self.held()
        if isinstance(weight, NVFP4Tiles):
            return unpack_experts(weight)
        return unpack_linear(weight) if isinstance(weight, MXFP8Tiles) else weight

    def _join(self, parts: list[Tensor | int]) -> FrozenWeight | NVFP4Tiles | MXFP8Tiles:
        return self._kind(*parts) if self._kind else parts[0]


def gate_up_of(checkpoint: Checkpoint, expert: str) -> FrozenWeight:
    """Gate and up of one expert in one matrix, gate rows first. They share a global scale; anything else raises."""
    gate, up = checkpoint.weight(f"{expert}w1"), checkpoint.weight(f"{expert}w3")
    if not isinstance(gate, NVFP4Tensor):
        return rows([gate, up])
    if not torch.equal(gate.global_scale, up.global_scale):
        raise CheckpointError(f"{checkpoint.folder}: {expert}w1 and {expert}w3 have different global scales")
    return NVFP4Tensor(torch.cat((gate.codes, up.codes)), torch.cat((gate.block_scales, up.block_scales)), gate.global_scale)


def rows(weights: list[FrozenWeight]) -> FrozenWeight:
    """Matrices [N, K] under one another."""
    first = weights[0]
    return type(first)(*(torch.cat(p) for p in zip(*weights, strict=True))) if isinstance(first, tuple) else torch.cat(weights)


def stack(weights: list[FrozenWeight]) -> FrozenWeight:
    """Matrices [N, K] as one stack [E, N, K]."""
    first = weights[0]
    return type(first)(*(torch.stack(p) for p in zip(*weights, strict=True))) if isinstance(first, tuple) else torch.stack(weights)

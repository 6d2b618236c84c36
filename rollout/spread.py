"""Routed experts of a replica of several ranks: each rank has some experts, and all ranks have all tokens.

A rank takes its slice of the tokens through `kernels.expert_peers` on GPUs, which a captured graph holds, or `kernels.expert_parallel`
anywhere else, which waits for the host; the outputs of the slices are gathered. Both add a token's fp32 rows in ascending order of
expert on one rank, as `kernels.moe` does, so that a token's bits are those of a replica of one rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.kernels.activation import SwiGLU
from samebits.kernels.expert_pairs import takes_kernels
from samebits.kernels.expert_parallel import expert_parallel_moe
from samebits.kernels.expert_tiles import NVFP4Tiles
from samebits.kernels.linear import FrozenWeight
from samebits.kernels.moe import ExpertLoRA

from .group import Group
from .settings import EngineRefused

SMALLEST = 8
"""Tokens of a rank for which the smallest launches are made; each next size is twice as large."""


def sizes(room: int) -> list[int]:
    """Tokens of a rank for which launches are made, ascending; the last is `room`."""
    found, size = [], SMALLEST
    while size < room:
        found.append(size)
        size *= 2
    return [*found, room]


def slice_of(tokens: int, world: int, rank: int) -> tuple[int, slice]:
    """(tokens of a slice, those of `rank`): slices are of one size, the last ones may have fewer or none."""
    each = -(-tokens // world)
    return each, slice(min(rank * each, tokens), min((rank + 1) * each, tokens))


class SpreadExperts:
    """What the layers of a model share, one after the other. All ranks construct it, and call it alike."""

    def __init__(self, group: Group, top_k: int, hidden: int, tokens: int, on_peers: bool) -> None:
        """`tokens`: no step has more. `on_peers`: the kernels will multiply, through the memory of all ranks' GPUs.

        Raises `EngineRefused` where the GPUs cannot address each other.
        """
        self.group, self.peers = group, []
        if not on_peers:
            return
        from samebits.kernels.expert_peers import PeerExperts

        room = -(-tokens // group.world)
        try:
            largest = PeerExperts(group.ranks.experts, top_k, hidden, room, group.collectives)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise EngineRefused(f"tensor_parallel_size is {group.world}, but its GPUs cannot address each other: {reason}") from None
        # A step's launches are as large as its tokens, not as the largest step: a captured graph keeps those of its size.
        self.peers = [*(largest.smaller(size) for size in sizes(room)[:-1]), largest]

    def __call__(
        self,
        x: Tensor,
        w13: FrozenWeight | NVFP4Tiles,
        w2: FrozenWeight | NVFP4Tiles,
        ids: Tensor,
        weights: Tensor,
        activation: SwiGLU,
        lora: ExpertLoRA | None,
        adapter_ids: Tensor | None,
    ) -> Tensor:
        """`kernels.moe.moe` of all tokens [T, H], which every rank gives and gets; `w13`, `w2` and `lora` are this rank's experts."""
        each, mine = slice_of(len(x), self.group.world, self.group.rank)
        if not each:
            return torch.zeros_like(x)
        slots = None if adapter_ids is None else adapter_ids[mine]
        args = (x[mine], w13, w2, ids[mine], weights[mine], activation, lora, slots)
        if takes_kernels(x, w13, None):
            found = next(peers for peers in self.peers if peers.room >= each)(*args)
        else:
            found = expert_parallel_moe(*args, group=self.group.collectives, experts=self.group.ranks.experts, parts=1)
        out = x.new_zeros(each, x.shape[1])
        out[: len(found)] = found
        return self.group.gather(out, 0)[: len(x)]

"""Which tokens a rank of a replica takes through the experts, and by launches of which size."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from samebits.rollout import spread
from samebits.rollout.spread import SpreadExperts, sizes, slice_of


@pytest.mark.parametrize(("tokens", "world"), [(1, 2), (2, 2), (7, 4), (8, 4), (9, 4), (3, 8), (0, 2)])
def test_slices_of_all_ranks_are_all_tokens_in_order(tokens, world):
    rows = list(range(tokens))
    found = [rows[slice_of(tokens, world, rank)[1]] for rank in range(world)]
    assert [row for part in found for row in part] == rows and all(len(part) <= slice_of(tokens, world, 0)[0] for part in found)


def test_sizes_of_launches_double_up_to_the_largest_step():
    assert sizes(64) == [8, 16, 32, 64] and sizes(100) == [8, 16, 32, 64, 100] and sizes(8) == [8] and sizes(3) == [3]


@pytest.mark.parametrize(("tokens", "room"), [(1, 8), (17, 8), (32, 8), (33, 16), (64, 16), (65, 40), (160, 40)])
def test_each_rank_takes_its_slice_with_the_smallest_launch_that_holds_it(monkeypatch, tokens, room):
    """On GPUs, where the experts of peers multiply: stood in for by a function of a token, its routes and its slot."""
    monkeypatch.setattr(spread, "takes_kernels", lambda x, w13, w4a4: True)
    world, used, outs = 4, [], []
    x, ids = torch.arange(1.0, tokens * 2 + 1).view(tokens, 2), torch.arange(tokens * 2).view(tokens, 2)
    weights, slots = torch.rand(tokens, 2), torch.arange(tokens)

    class Peers:
        def __init__(self, room: int) -> None:
            self.room = room

        def __call__(self, x, w13, w2, ids, weights, activation, lora, slots):
            used.append(self.room)
            return x * ids.sum(1, keepdim=True) + weights + slots[:, None]

    for rank in range(world):
        made = object.__new__(SpreadExperts)
        made.group = SimpleNamespace(world=world, rank=rank, gather=lambda out, dim: outs.append(out) or torch.cat([out] * world))
        made.peers = [Peers(of) for of in (8, 16, 40)]
        assert made(x, None, None, ids, weights, None, None, slots).shape == x.shape
    assert used == [room] * world and len({out.shape for out in outs}) == 1, "a gather takes equal shapes"
    assert torch.equal(torch.cat(outs)[:tokens], x * ids.sum(1, keepdim=True) + weights + slots[:, None])

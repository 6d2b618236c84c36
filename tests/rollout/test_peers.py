"""The trainer's ranks on the GPUs of one replica, as processes of a gloo group. Apart from the sender, whose imports take seconds each."""

from __future__ import annotations

from samebits.rollout.ipc import Peers
from tests.support.ranks import on_ranks


def exchanges(rank: int, world: int) -> list:
    """In a process: replicas of two ranks, of which the second's exchange more often."""
    peers = Peers(2)
    return [peers.exchange((rank, turn)) for turn in range(1 + rank // 2)]


def test_ranks_of_a_replica_exchange_among_themselves(tmp_path):
    """Handles go by one replica and a file by another: those ranks say different numbers of things to each other."""
    first, second, third, fourth = on_ranks(4, exchanges, tmp_path)
    assert first == second == [[(0, 0), (1, 0)]]
    assert third == fourth == [[(2, 0), (3, 0)], [(2, 1), (3, 1)]]

"""Faults of a recipe on the way of an adapter to one replica, through the real sender and server: caught, and named."""

from __future__ import annotations

import json

import pytest

from samebits.alignment_checks.weights import WeightMismatch, verify_sync
from tests.rollout.test_ipc import Worker, pair, report, send, tensors
from tests.support.shared_memory import HostHandles


@pytest.fixture
def replicas(request):
    """Senders and servers of two replicas, on the host's shared memory or by file."""
    found = []
    for replica in (0, 1):
        handles = HostHandles() if request.param == "ipc" else HostHandles(None)
        sender, server = pair([Worker(handles)], handles)
        sender.replica_rank = server.replica_rank = replica
        found.append((sender, server))
    return found


def synced(replicas, version: int, sent=(None, None)) -> list[dict]:
    for (sender, _), own in zip(replicas, sent, strict=True):
        send(sender, own or tensors(), version)
    return [report(server) for _, server in replicas]


@pytest.mark.parametrize("replicas", ["ipc", "file"], indirect=True)
@pytest.mark.parametrize("kind", ["wrong_tensor", "skip_sync"])
def test_a_fault_befalls_one_replica_from_its_step_on(replicas, kind, monkeypatch):
    monkeypatch.setenv("SAMEBITS_FAULT", json.dumps({"kind": kind, "step": 2, "replica": 1}))
    verdict = verify_sync(synced(replicas, 1), 1, "p")
    assert (verdict.replicas, verdict.ranks) == (2, 2)
    last = sorted(tensors())[-1]
    says = f"replica 1 rank 0: {last} differs" if kind == "wrong_tensor" else "replica 1 rank 0: adapter was not updated: version 1 is held"
    with pytest.raises(WeightMismatch, match=says) as caught:
        verify_sync(synced(replicas, 2), 2, "p")
    assert "\n" not in str(caught.value) and "more)" not in str(caught.value), "one tensor, one line"


@pytest.mark.parametrize("replicas", ["file"], indirect=True)
def test_without_a_replica_all_are_befallen(replicas, monkeypatch):
    monkeypatch.setenv("SAMEBITS_FAULT", json.dumps({"kind": "wrong_tensor", "step": 1, "replica": None}))
    with pytest.raises(WeightMismatch, match="replica 0 rank 0: "):
        verify_sync(synced(replicas, 1), 1, "p")


@pytest.mark.parametrize("replicas", ["file"], indirect=True)
def test_ranks_that_gathered_different_bits_are_told_apart_though_each_replica_holds_what_it_was_sent(replicas):
    other = tensors()
    name = sorted(other)[2]
    other[name] = other[name].clone()
    other[name][0, 0] += 1
    found = synced(replicas, 1, (tensors(), other))
    with pytest.raises(WeightMismatch, match=f"replica 1: its trainer rank sent it another adapter than replica 0 was sent: {name}"):
        verify_sync(found, 1, "p")

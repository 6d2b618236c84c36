"""Registers the samebits rollout with verl. Named in `VERL_USE_EXTERNAL_MODULES`, so every verl process imports it."""

from __future__ import annotations

from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutReplicaRegistry

NAME = "samebits"


def _load_replica():
    from samebits.rollout.server import SamebitsReplica

    return SamebitsReplica


RolloutReplicaRegistry.register(NAME, _load_replica)
_ROLLOUT_REGISTRY[(NAME, "async")] = "samebits.rollout.sender.AdapterSender"

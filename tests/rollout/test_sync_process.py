"""A sync into another process, with host memory in the place of a GPU's: the scenario that `tests/gpu/rollout/test_sync.py` has there."""

from __future__ import annotations

import asyncio

import pytest

from samebits.alignment_checks.weights import WeightMismatch, verify_sync
from samebits.quant.adapter import Manifest
from tests.support.sync_engine import SIZE, SPEC, Engine, Sync


@pytest.fixture(scope="module")
def engine():
    made = Engine("cpu")
    yield made
    made.close()


@pytest.mark.slow
def test_every_version_is_in_the_slots_that_graphs_read_and_one_bit_is_missed(engine):
    sync = Sync(engine, "cpu")
    for version in range(4):
        engine.ask("sleep")
        sync.step(version)
        found = sync.send(sync.export(version, early=version % 2 == 1), version)
        assert (found["path"], found["reason"], found["bytes"]) == ("ipc", "", SIZE)
        assert verify_sync([found], version, "p").tensors == len(SPEC.shapes())
        want = sync.expected()
        assert Manifest.from_json(found["sent"]).digests == want and engine.ask("read_by_graph", version) == want
    for name in (min(SPEC.shapes()), max(SPEC.shapes()), next(n for n in SPEC.shapes() if "k_proj.lora_B" in n)):
        engine.ask("flip", 3, name)
        with pytest.raises(WeightMismatch, match=f"{name} differs"):
            verify_sync([asyncio.run(sync.server.sync_report())], 3, "p")
        engine.ask("flip", 3, name)
    engine.ask("clear")
    with pytest.raises(RuntimeError, match="AdapterError: adapter version 3 is not resident"):
        asyncio.run(sync.server.sync_report())

"""A sync on one GPU between two processes as a job makes it: masters that are still being changed, memory in expandable segments, an
engine whose slots are away until it wakes, graphs that were captured before. The real sender, server and worker; no model and no Ray.
"""

from __future__ import annotations

import asyncio

import pytest
import torch

pytest.importorskip("vllm")
pytest.importorskip("verl")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from verl.utils.device import set_expandable_segments

from samebits.alignment_checks.weights import WeightMismatch, verify_sync
from samebits.quant.adapter import Manifest
from samebits.rollout.ipc import CudaHandles
from samebits.trainer.early_export import _side_stream
from tests.support.sync_engine import SIZE, SPEC, Engine, Sync

GPU = torch.device("cuda", 0)
LONG = int(2e8)  # cycles, a tenth of a second: whoever does not wait for it reads what was there before


class Noting(CudaHandles):
    """What was shared: bytes from the beginning of the allocation."""

    def __init__(self) -> None:
        self.offsets: list[int] = []

    def share(self, flat):
        arguments = super().share(flat)
        self.offsets.append(arguments[9])
        return arguments


@pytest.fixture(scope="module")
def process():
    made = Engine("cuda")
    yield made
    made.close()


@pytest.fixture
def sync(process):
    process.ask("clear")
    yield Sync(process, "cuda")
    set_expandable_segments(False)
    torch.cuda.empty_cache()


def before_a_sync() -> torch.Tensor:
    """What verl does then; and something lies where the buffer would else begin its allocation."""
    set_expandable_segments(False)
    torch.cuda.empty_cache()
    return torch.full((3 << 20,), 7, dtype=torch.uint8, device=GPU)


def require_arrived(sync: Sync, found: dict, version: int) -> None:
    assert (found["path"], found["reason"], found["bytes"]) == ("ipc", "", SIZE)
    assert verify_sync([found], version, "p").tensors == len(SPEC.shapes())
    want = sync.expected()
    assert Manifest.from_json(found["sent"]).digests == want, "the trainer sent something else than its masters"
    assert sync.engine.ask("read_by_graph", version) == want, "a graph reads something else than what is held"


@pytest.mark.parametrize("early", [False, True])
def test_every_version_is_what_the_masters_are_and_what_graphs_read(sync, early):
    noting = sync.sender.handles = Noting()
    side = _side_stream(GPU)
    for version in range(4):
        sync.engine.ask("sleep")
        set_expandable_segments(True)
        torch.cuda._sleep(LONG)
        sync.step(version)
        with torch.cuda.stream(side):
            torch.cuda._sleep(LONG)
        exported = sync.export(version, early)
        neighbour = before_a_sync()
        found = sync.send(exported, version)
        require_arrived(sync, found, version)
        assert (neighbour == 7).all()
    assert len(noting.offsets) == 4 and any(noting.offsets), "no buffer lay inside of an allocation"
    assert {"export", "digest", "share", "wait", "load", "verify"} == set(found["parts"])


@pytest.mark.parametrize("early", [False, True])
def test_memory_of_a_sync_is_given_back_and_is_one_buffer_beside_the_export(sync, early):
    held, peaks = [], []
    for version in range(5):
        sync.engine.ask("sleep")
        sync.step(version)
        before = torch.cuda.memory_allocated()
        exported = sync.export(version, early)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        require_arrived(sync, sync.send(exported, version), version)
        del exported
        held.append(torch.cuda.memory_allocated() - before)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert held[1:] == [0] * 4, held  # the first leaves the digest's constants
    # The sender's meter starts peaks anew at each of its phases: the last one has the buffer, and the export is gone.
    assert max(peaks) < 1.5 * SIZE, peaks


def test_one_bit_that_changes_in_a_slot_is_named(sync):
    sync.step(0)
    require_arrived(sync, sync.send(sync.export(0, early=False), 0), 0)
    for name in (min(SPEC.shapes()), max(SPEC.shapes()), next(n for n in SPEC.shapes() if "k_proj.lora_B" in n)):
        sync.engine.ask("flip", 0, name)
        with pytest.raises(WeightMismatch, match=f"{name} differs"):
            verify_sync([asyncio.run(sync.server.sync_report())], 0, "p")
        sync.engine.ask("flip", 0, name)
    assert verify_sync([asyncio.run(sync.server.sync_report())], 0, "p").version == 0


def test_memory_that_cannot_be_shared_goes_by_a_file_and_the_next_one_is_shared(sync):
    set_expandable_segments(True)
    torch.cuda.empty_cache()
    sync.step(0)
    found = sync.send(sync.export(0, early=False), 0)
    assert (found["path"], found["reason"]) == ("file", "the trainer's memory lies in an expandable segment")
    assert verify_sync([found], 0, "p").tensors == len(SPEC.shapes()) and sync.engine.ask("read_by_graph", 0) == sync.expected()
    before_a_sync()
    sync.step(1)
    require_arrived(sync, sync.send(sync.export(1, early=True), 1), 1)

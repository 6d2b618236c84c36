"""Our connector of routes against vLLM's own, step by step: same rows, same cursors, same tails, same blocks in the store."""

from __future__ import annotations

from threading import Lock
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.distributed.aux_output_connector import worker
from vllm.distributed.aux_output_connector.connector import AuxOutputConnectorMetadata, PackedBlockHashes
from vllm.distributed.aux_output_connector.routed_experts import RoutedExpertsBuffer
from vllm.distributed.aux_output_connector.store import BackgroundBlockObjectStore, BlockObjectStore

from samebits.rollout.routes import Connector

SIZE, SHAPE, REQUESTS, AHEAD = 4, (2, 1), 5, 2
Upstream = Connector.__mro__[1]


def build(kind: type) -> worker.AuxOutputWorkerConnector:
    """A connector without an engine: blocks of `SIZE` tokens, two steps under way at once."""
    one = kind.__new__(kind)
    one._capturer = SimpleNamespace(rows=None, snapshot_routing_data=lambda n: torch.from_numpy(one._capturer.rows[:n].copy()))
    nbytes = SIZE * int(np.prod(SHAPE)) * 2
    one._store = BackgroundBlockObjectStore(BlockObjectStore(max_bytes=4096 * nbytes, object_nbytes=nbytes), max_pending_batches=64)
    one._buffer = RoutedExpertsBuffer(np.dtype("int16"), SHAPE, SIZE, REQUESTS, 64, AHEAD)
    one._requests, one._pending_outputs, one._generation, one._step_metadata = {}, [], 0, None
    one._lock, one._max_concurrent_batches = Lock(), AHEAD
    return one


def state(one: worker.AuxOutputWorkerConnector) -> dict:
    """Everything that later steps depend on."""
    one._store._queue.join()
    tails = {name: (t.slot, t.block_start, t.length) for name, t in one._buffer._requests.items()}
    return {
        "tails": tails,
        "begun": {name: one._buffer._rows[slot, :length].tolist() for name, (slot, _, length) in tails.items()},
        "free": list(one._buffer._free_slots),
        "stored": dict(one._store._store._lru),
        "references": dict(one._store._store._references),
        "requests": {
            name: vars(s) | {"aux_output_keys": list(s.aux_output_keys), "pending_blocks": [start for start, _ in s.pending_blocks]}
            for name, s in one._requests.items()
        },
    }


class Course:
    """A request of the script."""

    def __init__(self, name: str, prompt: int) -> None:
        self.name, self.prompt = name, prompt
        self.scheduled = self.settled = self.hashed = 0
        """Position up to which it was scheduled, was accepted, and (in blocks) was hashed."""


class Script:
    """What a scheduler tells the connectors; `draw` decides."""

    def __init__(self, draw) -> None:
        self.draw = draw
        self.made = 0
        self.running: list[Course] = []
        self.over: list[str] = []

    def step(self) -> tuple[AuxOutputConnectorMetadata, SimpleNamespace, np.ndarray, np.ndarray]:
        """Metadata, batch, and how many tokens each request samples and has rejected."""
        finished, self.over = tuple(self.over), []
        while len(self.running) + len(finished) < REQUESTS and (not self.running or self.draw(st.booleans())):
            self.running.append(Course(f"r{self.made}", self.draw(st.integers(1, 14))))
            self.made += 1
        batch = [course for course in self.running if not course.scheduled or self.draw(st.integers(0, 4))] or self.running[:1]
        hashes = {}
        for course in self.running:
            known = max(course.prompt, course.settled)
            told = course in batch or course.scheduled  # of one that never ran nothing is said
            if known // SIZE > course.hashed and told and (not course.hashed or self.draw(st.integers(0, 2))):
                new = [f"{course.name}/{i}".encode().ljust(16) for i in range(course.hashed, known // SIZE)]
                hashes[course.name], course.hashed = PackedBlockHashes(b"".join(new), 16), known // SIZE
        starts = np.array([course.scheduled for course in batch], dtype=np.int32)
        parts = [self._part(course) for course in batch]
        lengths, sampled, rejected = (np.array(column, dtype=np.int64) for column in zip(*parts, strict=True))
        names = [course.name for course in batch]
        metadata = AuxOutputConnectorMetadata(0, dict.fromkeys(names, 0), hashes, finished)
        bounds = np.concatenate(([0], np.cumsum(lengths)))
        return metadata, SimpleNamespace(req_ids=names, query_start_loc_np=bounds, num_computed_tokens_np=starts), sampled, rejected

    def _part(self, course: Course) -> tuple[int, int, int]:
        """Rows of a request in a step, whether it samples, and how many rows were for drafts that are rejected."""
        if course.scheduled < course.prompt:
            length, rejected = self.draw(st.integers(1, course.prompt - course.scheduled)), 0
            sampled = int(course.scheduled + length == course.prompt)
        else:
            length, sampled = 1 + self.draw(st.sampled_from([0, 0, 0, 0, 1, 6])), 1
            rejected = self.draw(st.integers(0, length - 1))
        course.scheduled += length
        course.settled += length - rejected
        return length, sampled, rejected

    def caught_up(self) -> None:
        """What was rejected is known now: later steps begin behind what was accepted."""
        for course in self.running:
            course.scheduled = course.settled

    def end(self, course: Course) -> None:
        """Tell with the next step that it ended."""
        self.running.remove(course)
        self.over.append(course.name)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_course_is_that_of_vllm(data):
    ours, theirs = pair = [build(Connector), build(Upstream)]
    script, under_way, rng = Script(data.draw), [], np.random.default_rng(data.draw(st.integers(0, 99)))

    def read() -> None:
        results = [pending.process_output() for pending in under_way.pop(0)]
        assert sorted(results[0]) == sorted(results[1])
        for name in results[1]:
            have, want = results[0][name], results[1][name]
            assert have.token_start == want.token_start and have.rows.dtype == want.rows.dtype
            assert np.array_equal(have.rows, want.rows), name

    try:
        for _ in range(data.draw(st.integers(1, 25))):
            metadata, batch, sampled, rejected = script.step()
            step = []
            rows = rng.integers(0, 99, (int(batch.query_start_loc_np[-1]), *SHAPE)).astype(np.int16)
            for one in pair:
                one.begin_step(metadata)
                one._capturer.rows = rows
                pending = one.prepare_output(batch)
                pending.enqueue_cpu_copy(sampled, rejected)
                step.append(pending)
            under_way.append(step)
            if len(under_way) == AHEAD or data.draw(st.booleans()):
                while under_way:
                    read()
                    assert state(ours) == state(theirs)
                script.caught_up()
            begun = [course for course in script.running if course.scheduled]
            if begun and not data.draw(st.integers(0, 5)):
                script.end(data.draw(st.sampled_from(begun)))
        while under_way:
            read()
        assert state(ours) == state(theirs)
    finally:
        for one in pair:
            one.close()


def test_a_step_whose_copy_is_missing_is_refused():
    one = build(Connector)
    one.begin_step(AuxOutputConnectorMetadata(0, {"a": 0}, {}, ()))
    one._capturer.rows = np.zeros((1, *SHAPE), np.int16)
    batch = SimpleNamespace(req_ids=["a"], query_start_loc_np=np.array([0, 1]), num_computed_tokens_np=np.array([0]))
    pending = one.prepare_output(batch)
    with pytest.raises(AssertionError, match="CPU copy was not enqueued"):
        pending.process_output()
    one.close()


def test_a_cursor_that_moved_ahead_is_refused():
    """Upstream's own check of the scheduler, which sees only what is not as it should be."""
    one = build(Connector)
    one.begin_step(AuxOutputConnectorMetadata(0, {"a": 0}, {}, ()))
    one.begin_step(AuxOutputConnectorMetadata(0, {"a": 0}, {}, ()))
    with pytest.raises(AssertionError, match="emit cursor moved ahead"):
        one.begin_step(AuxOutputConnectorMetadata(0, {"a": 1}, {}, ()))
    one.close()


@pytest.mark.parametrize("finished", [(), ("gone",)])
def test_a_step_makes_states_of_new_requests_only(monkeypatch, finished):
    """Also where others finished, as in most steps of a batch that runs out."""
    one = build(Connector)
    one.begin_step(AuxOutputConnectorMetadata(0, {"a": 0, "b": 0, "gone": 0}, {}, ()))
    made, kind = [], worker._WorkerRequestState
    monkeypatch.setattr(worker, "_WorkerRequestState", lambda **given: made.append(1) or kind(**given))
    one.begin_step(AuxOutputConnectorMetadata(0, {"a": 0, "b": 0, "new": 0}, {}, finished))
    assert len(made) == 1 and sorted(one._requests) == sorted({"a", "b", "new", "gone"} - set(finished))
    one.close()


def test_a_request_that_runs_and_finished_is_refused():
    one = build(Connector)
    one.begin_step(AuxOutputConnectorMetadata(0, {"a": 0}, {}, ()))
    with pytest.raises(AssertionError, match="cannot run and finish"):
        one.begin_step(AuxOutputConnectorMetadata(0, {"a": 0}, {}, ("a",)))
    one.close()

"""Phases: seconds go to the phase that ran, peaks start anew, and nothing is counted twice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from samebits.kernels import meter
from samebits.kernels.meter import Meter


def test_time_goes_to_the_phase_that_runs_and_adds_up_over_entries(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(meter.time, "perf_counter", lambda: now[0])
    m = Meter("cpu")
    for _ in range(2):
        m.enter("a")
        now[0] += 2.0
        m.enter("b")
        now[0] += 5.0
    m.stop()
    now[0] += 20.0  # of no phase
    found = m.take()
    assert {name: phase.seconds for name, phase in found.items()} == {"a": 4.0, "b": 10.0} and list(found) == ["a", "b"]
    assert m.take() == {}, "what was taken is taken again"


def test_a_running_phase_is_ended_by_taking():
    m = Meter("cpu")
    m.enter("a")
    assert list(m.take()) == ["a"] and m.take() == {}


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks of a phase need Linux")
def test_a_peak_belongs_to_its_phase():
    m = Meter("cpu")
    m.enter("small")
    m.enter("large")
    block = np.ones(192 << 20, np.uint8)  # written; more than what other tests of this process may give back meanwhile
    del block
    m.enter("after")
    found = {name: phase.memory["resident"] for name, phase in m.take().items()}
    assert found["large"] > found["small"] + (100 << 20)
    assert found["after"] < found["large"] - (100 << 20), "the peak did not start anew"


def test_a_system_that_does_not_tell_gives_no_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(meter, "_STATUS", tmp_path / "none")
    monkeypatch.setattr(meter, "_CLEAR", tmp_path / "none" / "none")
    m = Meter("cpu")
    m.enter("a")
    assert m.take()["a"].memory == {}

"""Taps record copies in order, and cost nothing when nobody listens."""

import pytest
import torch

from samebits.kernels import taps


def test_rows_of_several_steps_follow_each_other_and_are_copies():
    x = torch.arange(6.0).view(2, 3)
    with taps.record() as recorder:
        taps.tap("b", x)
        taps.tap("a", x + 10)
        x += 100
        taps.tap("b", x)
    found = recorder.tensors()
    assert list(found) == ["b", "a"]
    assert torch.equal(found["b"], torch.cat((torch.arange(6.0).view(2, 3), torch.arange(6.0).view(2, 3) + 100)))


def test_only_wanted_points_are_kept_and_asked_for():
    with taps.record(lambda name: name.endswith(".q")) as recorder:
        assert taps.recording("layer.q") and not taps.recording("layer.k")
        taps.tap("layer.q", torch.ones(1))
        taps.tap("layer.k", torch.ones(1))
    assert list(recorder.tensors()) == ["layer.q"]


def test_one_listener_at_a_time_and_none_afterwards():
    assert not taps.recording("x")
    taps.tap("x", torch.ones(1))
    with taps.record(), pytest.raises(RuntimeError, match="already"):
        taps.start(taps.Recorder())
    with pytest.raises(RuntimeError, match="not being recorded"):
        taps.stop()
    with pytest.raises(ValueError), taps.record():
        raise ValueError
    assert not taps.recording("x")

"""Work by threads: order, exceptions, and torch's threads afterwards."""

from __future__ import annotations

import threading

import pytest
import torch

from samebits.quant import threads
from samebits.quant.threads import side_by_side


@pytest.fixture(params=[1, 3])
def count(request, monkeypatch):
    monkeypatch.setattr(threads.torch, "get_num_threads", lambda: request.param)
    told = []
    monkeypatch.setattr(threads.torch, "set_num_threads", told.append)
    yield request.param
    assert told[-1:] == ([request.param] if request.param > 1 else []), "torch keeps the threads that it had"


def test_results_come_in_order_and_threads_work_at_the_same_time(count):
    together = threading.Barrier(count, timeout=20)

    def work(i):
        together.wait()
        return i, threading.get_ident()

    found = list(side_by_side(work, range(6)))
    assert [i for i, _ in found] == list(range(6)) and len({thread for _, thread in found}) == count


def test_the_first_exception_is_raised_and_the_rest_is_not_begun(count):
    begun = []

    def work(i):
        begun.append(i)
        if i == 2:
            raise ValueError("the third")
        return torch.ones(1)

    with pytest.raises(ValueError, match="the third"):
        list(side_by_side(work, range(10_000)))
    assert len(begun) < 10_000

"""Whole outputs behind what V2's runner gives, and what the log says where requests that ask for them are served slowly."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .test_whole import Fake, Wish, expected, require

pytestmark = pytest.mark.slow
SLOW = "outputs are right but slow"


@pytest.fixture(scope="module")
def v2(checkpoint):
    """An engine that runs ahead of V2's results."""
    import os

    os.environ.update(HF_HUB_OFFLINE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")
    from tests.support.fake_v2 import V2Executor

    fake = Fake(checkpoint, True, executor=V2Executor)
    fake.scheduler.use_v2_model_runner = True  # as on a GPU: requests that come back after preemption are new ones to the worker
    return fake


@pytest.fixture
def lines(caplog, monkeypatch):
    """Lines of the log about outputs that are served slowly, with a threshold that few tokens pass."""
    from samebits.rollout import whole

    monkeypatch.setattr(whole, "_MANY", 16)
    caplog.set_level(logging.WARNING, logger="samebits.rollout.whole")
    return lambda: [r.getMessage() for r in caplog.records if SLOW in r.getMessage()]


@pytest.fixture
def anew(v2):
    """The engine of `v2`, which has said nothing yet."""
    keeper = v2.scheduler.__dict__.get("_samebits_keeper")
    if keeper is not None:
        keeper._told.clear()
        keeper.booked = keeper.passed = 0
    return v2


def test_decoded_tokens_are_booked_at_once(anew, lines):
    """Prompts that come while others decode, so that V2's order is not the scheduler's; ends by length, by stop token, at a block."""
    free = expected(Wish(3, 60, 90)).ids
    wishes = [Wish(n, 20 + 37 * n % 200, 30 + 11 * n, stops=[free[40]] if n == 3 else []) for n in range(12)]
    for got, wish in zip(anew.run(wishes), wishes, strict=True):
        require(got, wish)
    assert anew.counts == [1] * len(wishes)
    keeper = anew.keeper()
    assert keeper.booked > 20 * keeper.passed and keeper.booked > 0.85 * sum(len(expected(w).ids) for w in wishes)
    assert not lines()
    anew.settle()


def test_preemption(anew, lines, monkeypatch):
    preempt, times = anew.scheduler._preempt_request, []

    def counted(request, *args, **options):
        times.append(request.request_id)
        return preempt(request, *args, **options)

    monkeypatch.setattr(anew.scheduler, "_preempt_request", counted)
    wishes = [Wish(n, 100, 200) for n in range(8)]  # 3 blocks each, of which there are 14
    for got, wish in zip(anew.run(wishes), wishes, strict=True):
        require(got, wish)
    assert times, "nothing was preempted"
    assert anew.counts == [1] * 8 and not lines()
    anew.settle()


wish = st.builds(
    Wish,
    start=st.integers(0, 3),
    length=st.integers(1, 300),
    tokens=st.integers(2, 150),
    logprobs=st.booleans(),
    stops=st.lists(st.integers(0, 88), max_size=1),
    abort=st.one_of(st.none(), st.none(), st.integers(1, 60)),
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(wishes=st.lists(wish, min_size=1, max_size=14))
def test_any_batch(v2, wishes):
    for got, one in zip(v2.run(wishes), wishes, strict=True):
        if got is not None:
            require(got, one)
    v2.settle()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("foreign", "the worker gave routes as dict"),
        ("order", "in another order"),
        ("apart", "not with those of the step"),
        ("several", "logprobs of several tokens a request"),
    ],
)
def test_results_that_take_the_long_way_are_told_once(anew, lines, monkeypatch, change, said):
    """Results that are right, and none of which can be booked at once."""
    from vllm.v1.outputs import LogprobsTensors

    from samebits.rollout.routes import Connector, StepRoutes

    commit, upstream = Connector._commit_output, Connector.__mro__[1]._commit_output

    def committed(self, pending):
        if change in ("foreign", "apart"):
            routes = upstream(self, pending)
            none = np.full(len(pending.request_ids), -1)
            return routes if change == "foreign" else StepRoutes(pending.request_ids, none, none, np.empty(0), routes)
        routes = commit(self, pending)
        if change == "order":
            routes.request_ids = [*routes.request_ids, "another"]
            routes.places = [*routes.places, -1]
        return routes

    if change == "order":
        monkeypatch.setattr(StepRoutes, "single", property(lambda self: [place >= 0 for place in self.places]))
    monkeypatch.setattr(Connector, "_commit_output", committed)
    if change == "several":
        tolists = LogprobsTensors.tolists
        monkeypatch.setattr(LogprobsTensors, "tolists", lambda self: tolists(self, list(range(len(self.logprobs) + 1))))
    wishes = [Wish(n, 20, 40) for n in range(4)]
    for _ in range(2):
        for got, one in zip(anew.run(wishes), wishes, strict=True):
            require(got, one)
    (line,) = lines()
    assert said in line
    anew.settle()


def test_an_engine_with_statistics_says_that_it_keeps_nothing(checkpoint, lines):
    fake = Fake(checkpoint, True, disable_log_stats=False)
    fake.run([Wish(1, 20, 12, "final")])
    assert not lines(), "nobody asked"
    fake.run([Wish(1, 20, 12), Wish(2, 20, 12)])
    (line,) = lines()
    assert "an engine with statistics" in line


def test_a_request_that_asks_for_both_is_told(anew, lines):
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from samebits.rollout.whole import WHOLE

    for i in range(2):
        last = RequestOutputKind.FINAL_ONLY
        params = SamplingParams(max_tokens=9, logprobs=2, detokenize=False, extra_args=dict(WHOLE), output_kind=last)
        anew.engine.add_request(f"both{i}", {"prompt_token_ids": [3, 4, 5]}, params)
    while anew.engine.has_unfinished_requests():
        anew.engine.step()
    (line,) = lines()
    assert "both0" in line and "reads or judges it" in line
    anew.settle()


@pytest.mark.long
def test_the_server_of_a_job_over_message_queues(checkpoint):
    """Front end, core and worker in processes of their own, results a step late by V2's `AsyncOutput`; sleep, also one that cuts short."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.rollout.async_v2", str(checkpoint)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "differs": [],
        "left": [{"requests": 0, "outputs": 0, "blocks": 0}],
        "cut": "aborted",
    }
    assert SLOW not in done.stdout + done.stderr

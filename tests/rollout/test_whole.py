"""Requests whose output is wanted whole get what they had got piece by piece, whatever happens to them and beside them."""

from __future__ import annotations

import pickle
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .conftest import KV_BYTES, prompt

pytestmark = pytest.mark.slow
MAX_LEN, BLOCK = 600, 128


@dataclass
class Wish:
    """One request of a batch."""

    start: int = 0
    """Which beginning of a prompt: requests with equal ones share blocks."""
    length: int = 20
    tokens: int = 30
    kind: str = "whole"
    """whole, final (one output, by vLLM's own way) or stream."""
    logprobs: bool = True
    stops: list[int] = field(default_factory=list)
    abort: int | None = None
    """Step after which it is aborted."""

    @property
    def prompt(self) -> list[int]:
        return [(self.start * 37 + i * (self.start + 3)) % 89 for i in range(self.length)]


class Fake:
    """vLLM's engine on the executor without a model."""

    def __init__(self, folder, ahead: bool, **options) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        from tests.support.fake_executor import configure

        sizes = dict(max_model_len=MAX_LEN, max_num_seqs=16, max_num_batched_tokens=256, num_gpu_blocks_override=14, block_size=BLOCK)
        arguments = EngineArgs(
            str(folder),
            dtype="float32",
            enforce_eager=True,
            skip_tokenizer_init=True,
            enable_return_routed_experts=options.get("routes", True),
            logprobs_mode="processed_logprobs",
            kv_cache_memory_bytes=KV_BYTES,
            additional_config={"samebits": {"profile": "w4a16-fp32", "rank": 8}},
            **sizes,
        )
        config = configure(arguments.create_engine_config(), ahead, options.get("executor"))
        self.engine = LLMEngine.from_vllm_config(config, disable_log_stats=options.get("disable_log_stats", True))
        core = self.engine.engine_core.engine_core
        self.scheduler, self.executor = core.scheduler, core.model_executor
        self.sent: Counter = Counter()
        """Outputs of the core by request."""
        update = self.scheduler.update_from_output

        def counted(*args):
            outputs = update(*args)
            self.sent.update(o.request_id for batch in outputs.values() for o in batch.outputs)
            return outputs

        self.scheduler.update_from_output = counted

    def keeper(self):
        return self.scheduler._samebits_keeper

    def run(self, wishes: list[Wish]) -> list[SimpleNamespace | None]:
        """What each request got; None where it was aborted."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        from samebits.rollout.whole import WHOLE

        self.sent.clear()
        pieces: dict[str, list] = {}
        names = {}
        for i, wish in enumerate(wishes):
            params = SamplingParams(
                max_tokens=wish.tokens,
                logprobs=0 if wish.logprobs else None,
                stop_token_ids=list(wish.stops),
                ignore_eos=True,
                detokenize=False,
                flat_logprobs=wish.kind != "stream",
                extra_args=dict(WHOLE) if wish.kind == "whole" else None,
                output_kind=RequestOutputKind.DELTA if wish.kind == "stream" else RequestOutputKind.FINAL_ONLY,
            )
            names[i] = self.engine.add_request(str(i), {"prompt_token_ids": wish.prompt}, params)
            pieces[str(i)] = []
        step = 0
        while self.engine.has_unfinished_requests():
            for out in self.engine.step():
                pieces[out.request_id].append(out)
            step += 1
            assert step < 3000, "the engine goes nowhere"
            gone = [str(i) for i, wish in enumerate(wishes) if wish.abort == step and not any(o.finished for o in pieces[str(i)])]
            self.engine.abort_request(gone)
            for name in gone:
                pieces[name] = []
        self.counts = [self.sent[names[i]] for i in range(len(wishes))]
        return [joined(pieces[str(i)]) if pieces[str(i)] else None for i in range(len(wishes))]

    def settle(self) -> None:
        """A last step, which tells workers who ended; then nothing may be left of anyone."""
        while self.scheduler.has_finished_requests():
            self.engine.engine_core.engine_core.step_fn()
        keeper = self.keeper()
        assert not self.scheduler.requests and not keeper.held
        assert sorted(keeper.pages.free) == list(range(keeper.pages.count)), "a page was lost"
        connector = self.executor.connector
        assert not connector._requests and not connector._buffer._requests and not connector._pending_outputs
        assert len(connector._buffer._free_slots) == len(connector._buffer._rows)
        assert self.scheduler.reset_prefix_cache()


def joined(outputs: list) -> SimpleNamespace:
    """All that a request got, of one output or many."""
    parts, last = [o.outputs[0] for o in outputs], outputs[-1]
    rows = [row for part in parts for row in (part.logprobs or [])]
    return SimpleNamespace(
        ids=[t for part in parts for t in part.token_ids],
        logprobs=[(token, one.logprob, one.rank, one.decoded_token) for row in rows for token, one in row.items()],
        scored=parts[-1].logprobs is not None,
        total=parts[-1].cumulative_logprob,
        routes=parts[-1].routed_experts,
        reason=parts[-1].finish_reason,
        stop=parts[-1].stop_reason,
        cached=last.num_cached_tokens,
        prompt=last.prompt_token_ids,
    )


def expected(wish: Wish, layers: int = 3, top_k: int = 2) -> SimpleNamespace:
    """What the executor without a model must give, worked out from its formulas alone."""
    ids, new = list(wish.prompt), []
    reason, stop = "length", None
    while len(new) < wish.tokens and len(ids) < MAX_LEN:
        token = (ids[-1] * 31 + (len(ids) - 1) * 17 + 7) % 509 % 89
        ids.append(token)
        new.append(token)
        if token in wish.stops:
            reason, stop = "stop", token
            break
    fed, place = np.array(ids[:-1]), np.arange(len(ids) - 1)
    rows = (fed[:, None, None] + place[:, None, None] * 3 + np.arange(layers)[:, None] + np.arange(top_k)) % 128
    scores = -np.log1p(np.array(new, dtype=np.float32))
    total = 0.0
    for score in scores.tolist():
        total += score
    return SimpleNamespace(
        ids=new,
        logprobs=[(t, s, t % 7 + 1, None) for t, s in zip(new, scores.tolist(), strict=True)] if wish.logprobs else [],
        scored=wish.logprobs,
        total=total if wish.logprobs else None,
        routes=rows.astype(np.int16),
        reason=reason,
        stop=stop,
        prompt=wish.prompt,
    )


def require(got: SimpleNamespace, wish: Wish) -> None:
    want = expected(wish)
    assert np.array_equal(got.routes, want.routes) and got.routes.dtype == want.routes.dtype, f"routes of {wish}"
    for name, value in vars(want).items():
        assert name == "routes" or getattr(got, name) == value, f"{name} of {wish}"


@pytest.fixture(scope="module")
def fakes(checkpoint):
    """Both kinds of scheduler, each on its engine."""
    import os

    os.environ.update(HF_HUB_OFFLINE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")
    return {ahead: Fake(checkpoint, ahead) for ahead in (False, True)}


@pytest.fixture(params=[False, True], ids=["sync", "ahead"])
def fake(request, fakes) -> Fake:
    return fakes[request.param]


def test_one_output_with_all_of_it(fake):
    wishes = [Wish(n, 10 * n + 1, 40 + n) for n in range(8)]
    for got, wish in zip(fake.run(wishes), wishes, strict=True):
        require(got, wish)
    assert fake.counts == [1] * 8, "outputs were sent before the end"
    fake.settle()


def test_others_beside_them_are_served_as_ever(fake):
    wishes = [Wish(n, 30 + n, 25, kind) for n, kind in enumerate(("stream", "whole", "final", "whole", "stream"))]
    for got, wish in zip(fake.run(wishes), wishes, strict=True):
        require(got, wish)
    assert fake.counts == [25, 1, 25, 1, 25]
    fake.settle()


@pytest.mark.parametrize("tokens", [1, 2, 3])
@pytest.mark.parametrize("length", [1, 126, 127, 128, 129, 255, 256])
def test_ends_and_blocks_one_token_apart(fake, length, tokens):
    (got,) = fake.run([wish := Wish(4, length, tokens)])
    require(got, wish)
    assert fake.counts == [1]
    fake.settle()


def test_the_last_token_of_a_prompt_alone(fake):
    """Its row is one, but those of the whole prompt are due with it. The first prompt takes what is missing of a step's 256 tokens."""
    wishes = [Wish(1, 100, 9), Wish(2, 157, 9)]
    for got, one in zip(fake.run(wishes), wishes, strict=True):
        require(got, one)
    assert fake.counts == [1, 1]
    fake.settle()


def test_the_context_ends(fake):
    (got,) = fake.run([wish := Wish(5, MAX_LEN - 150, 400)])
    require(got, wish)
    assert len(got.ids) == 150
    fake.settle()


def test_a_stop_token_ends_where_it_was_sampled(fake):
    free = expected(Wish(6, 20, 100)).ids
    for place in (0, 1, 50):
        wish = Wish(6, 20, 100, stops=[free[place]])
        (got,) = fake.run([wish])
        require(got, wish)
        assert got.reason == "stop" and len(got.ids) == free.index(free[place]) + 1
    fake.settle()


def test_prefix_cache_hit(fake):
    wish = Wish(7, 300, 20)
    (first,) = fake.run([wish])
    (second,) = fake.run([wish])
    assert first.cached == 0 and second.cached == 256
    require(second, wish)
    fake.settle()


def test_blocks_that_were_decoded_are_cached(fake):
    """Their hash covers what was decoded: a prompt that goes on there is found in the cache."""
    from vllm import SamplingParams

    (first,) = fake.run([wish := Wish(7, 100, 60)])
    fake.engine.add_request("on", {"prompt_token_ids": wish.prompt + first.ids}, SamplingParams(max_tokens=1, detokenize=False))
    outputs = []
    while fake.engine.has_unfinished_requests():
        outputs += fake.engine.step()
    assert outputs[-1].num_cached_tokens == 128
    fake.settle()


def test_preemption(fake):
    wishes = [Wish(n, 100, 200) for n in range(8)]  # 3 blocks each, of which there are 14
    times = []
    preempt = fake.scheduler._preempt_request

    def counted(request, *args, **options):
        times.append(request.request_id)
        return preempt(request, *args, **options)

    fake.scheduler._preempt_request = counted
    try:
        outputs = fake.run(wishes)
    finally:
        fake.scheduler._preempt_request = preempt
    assert times, "nothing was preempted"
    for got, wish in zip(outputs, wishes, strict=True):
        require(got, wish)
    assert fake.counts == [1] * 8
    fake.settle()


def test_an_aborted_request_leaves_nothing(fake):
    wishes = [Wish(n, 40, 60, abort=None if n % 2 else 5 + 9 * n) for n in range(6)]
    for got, wish in zip(fake.run(wishes), wishes, strict=True):
        if wish.abort:
            assert got is None
        else:
            require(got, wish)
    assert fake.counts == [0, 1] * 3
    fake.settle()


def test_a_core_that_aborts_all_forgets_them(fake):
    """As a pause does that ends requests."""
    from vllm.v1.request import RequestStatus

    from samebits.rollout.whole import WHOLE

    self = fake.engine
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    for i in range(3):
        params = SamplingParams(max_tokens=50, detokenize=False, extra_args=WHOLE, output_kind=RequestOutputKind.FINAL_ONLY)
        self.add_request(f"a{i}", {"prompt_token_ids": [3, 4, 5]}, params)
    for _ in range(9):
        assert not self.step()
    assert len(fake.keeper().held) == 3
    fake.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    assert not fake.keeper().held
    self.abort_request([f"a{i}" for i in range(3)])
    while self.engine_core.engine_core.scheduler.has_requests() or self.engine_core.engine_core.batch_queue:
        self.step()
    fake.settle()


def test_a_pause_between_steps(fake):
    """What was kept stays while nothing is scheduled."""
    from vllm.v1.core.sched.interface import PauseState

    wishes = [Wish(n, 40, 30) for n in range(3)]
    steps = []
    schedule = fake.scheduler.schedule

    def sometimes(*args, **options):
        steps.append(1)
        paused = len(steps) % 7 in (0, 1)
        fake.scheduler._pause_state = PauseState.PAUSED_ALL if paused else PauseState.UNPAUSED
        return schedule(*args, **options)

    fake.scheduler.schedule = sometimes
    fake.scheduler.get_num_unfinished_requests, kept = lambda: len(fake.scheduler.requests), fake.scheduler.get_num_unfinished_requests
    try:
        outputs = fake.run(wishes)
    finally:
        fake.scheduler.schedule, fake.scheduler.get_num_unfinished_requests = schedule, kept
        fake.scheduler._pause_state = PauseState.UNPAUSED
    for got, wish in zip(outputs, wishes, strict=True):
        require(got, wish)
    assert fake.counts == [1] * 3 and len(steps) > 30, "outputs were sent in a pause, or there was none"
    fake.settle()


def test_tokens_in_flight_that_are_dropped(checkpoint, fakes):
    """Requests are sent back while a step of theirs is under way, of which nothing may be taken. (With routes vLLM refuses that.)"""
    fake = Fake(checkpoint, True, routes=False)
    wishes, steps, step = [Wish(n, 40, 50) for n in range(3)], [], fake.engine.step

    def stepped():
        steps.append(1)
        if len(steps) % 10 == 0:
            assert any(r.num_in_flight_tokens for r in fake.scheduler.running)
            fake.scheduler.reset_prefix_cache(reset_running_requests=True)
        return step()

    fake.engine.step = stepped
    for got, one in zip(fake.run(wishes), wishes, strict=True):
        assert got.routes is None
        got.routes = expected(one).routes
        require(got, one)
    assert fake.counts == [1] * 3 and not fake.keeper().held


wish = st.builds(
    Wish,
    start=st.integers(0, 3),
    length=st.integers(1, 400),
    tokens=st.one_of(st.integers(1, 4), st.integers(1, 190)),
    kind=st.sampled_from(["whole", "whole", "whole", "final", "stream"]),
    logprobs=st.booleans(),
    stops=st.lists(st.integers(0, 88), max_size=2),
    abort=st.one_of(st.none(), st.none(), st.integers(1, 60)),
)


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "ahead"])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(wishes=st.lists(wish, min_size=1, max_size=14))
def test_any_batch(fakes, ahead, wishes):
    fake = fakes[ahead]
    for got, one in zip(fake.run(wishes), wishes, strict=True):
        if got is not None:
            require(got, one)
    for count, one in zip(fake.counts, wishes, strict=True):
        assert one.kind != "whole" or count <= 1
    fake.settle()


def test_tokens_that_are_decoded_take_the_short_ways(fake, monkeypatch):
    """As said here, not by the clock: what vLLM calls for each request and token is called for first and last ones only."""
    from vllm.distributed.aux_output_connector.routed_experts import RoutedExpertsBuffer
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.request import Request

    calls: Counter = Counter()
    for owner, name in (
        (Request, "append_output_token_ids"),
        (RoutedExpertsBuffer, "capture"),
        (KVCacheCoordinator, "remove_skipped_blocks"),
    ):
        original = getattr(owner, name)

        def counted(*args, name=name, original=original, **options):
            calls[name] += 1
            return original(*args, **options)

        monkeypatch.setattr(owner, name, counted)
    wishes = [Wish(n, 10, 100) for n in range(8)]
    for got, one in zip(fake.run(wishes), wishes, strict=True):
        require(got, one)
    assert len(calls) == 3 and max(calls.values()) <= 5 * 8, calls
    fake.settle()


def test_rows_of_another_place_are_refused(fake):
    from samebits.rollout.routes import Connector
    from samebits.rollout.whole import OutOfStep

    commit = Connector._commit_output

    def shifted(self, pending):
        routes = commit(self, pending)
        routes.token_starts = routes.token_starts + 1
        return routes

    Connector._commit_output = shifted
    try:
        with pytest.raises(OutOfStep, match="expected"):
            fake.keeper()._set_aside(halfway(fake))
    finally:
        Connector._commit_output = commit
        fake.engine.abort_request(["shifted"])
        while fake.engine.engine_core.engine_core.batch_queue or fake.scheduler.has_requests():
            fake.engine.step()
    fake.settle()


def halfway(fake: Fake):
    """What is held of a request that decodes."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from samebits.rollout.whole import WHOLE

    params = SamplingParams(max_tokens=50, detokenize=False, extra_args=WHOLE, output_kind=RequestOutputKind.FINAL_ONLY)
    fake.engine.add_request("shifted", {"prompt_token_ids": list(range(20))}, params)
    for _ in range(8):
        fake.engine.step()
    (held,) = fake.keeper().held.values()
    assert held.taken
    return held


def test_with_statistics_every_token_is_told(fakes, checkpoint):
    """vLLM measures times between the tokens that its front end sees."""
    fake = Fake(checkpoint, True, disable_log_stats=False)
    (got,) = fake.run([wish := Wish(1, 20, 12)])
    require(got, wish)
    assert fake.counts == [12] and fake.keeper().obstacles


@pytest.mark.parametrize(
    "change",
    [{"detokenize": True}, {"stop": ["x"]}, {"logprobs": 2}, {"output_kind": 0}, {"extra_args": {"other": 1}}, {"extra_args": None}],
)
def test_what_is_judged_or_read_elsewhere_is_not_kept(change):
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.request import Request

    from samebits.rollout.whole import WHOLE, wanted_whole

    usual = dict(detokenize=False, logprobs=0, extra_args=WHOLE, output_kind=RequestOutputKind.FINAL_ONLY, max_tokens=4)
    assert wanted_whole(Request("a", [1], SamplingParams(**usual), None))
    if "stop" in change:
        change = change | {"detokenize": True}
    if "output_kind" in change:
        change = {"output_kind": RequestOutputKind(change["output_kind"])}
    assert not wanted_whole(Request("a", [1], SamplingParams(**usual | change), None))


@given(
    steps=st.lists(
        st.lists(st.tuples(st.integers(0, 99), st.floats(-50, 0, width=32), st.integers(1, 99)), min_size=1), min_size=1, max_size=9
    )
)
@settings(deadline=None)
def test_flat_logprobs_added_at_once_are_those_added_one_by_one(steps):
    from vllm.logprobs import FlatLogprobs
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.outputs import LogprobsLists

    usual = dict(tokenizer=None, prompt_logprobs=None, cumulative_logprob=0.0, num_logprobs=0, num_prompt_logprobs=None)
    flat, listed = (LogprobsProcessor(logprobs=have, **usual) for have in (FlatLogprobs(), []))
    for step in steps:
        ids, scores, ranks = (np.array(column) for column in zip(*step, strict=True))
        scores = scores.astype(np.float32)
        for processor in (flat, listed):
            wide = np.stack((scores, scores - 1), axis=1), np.stack((ids, ids + 1), axis=1)
            processor._update_sample_logprobs(LogprobsLists(wide[1], wide[0], ranks))
    assert list(flat.logprobs) == listed.logprobs
    assert flat.cumulative_logprob.hex() == listed.cumulative_logprob.hex()
    assert flat.logprobs[1:] == FlatLogprobs(*(part for part in _flat(listed.logprobs[1:])))


def _flat(listed: list[dict]) -> tuple:
    count = range(len(listed))
    ones = [next(iter(one.items())) for one in listed]
    values = [[getattr(one, name) for _, one in ones] for name in ("logprob", "rank", "decoded_token")]
    return list(count), [n + 1 for n in count], [token for token, _ in ones], *values


def test_routes_of_a_step_cross_processes():
    from vllm.distributed.aux_output_connector.connector import AuxRequestOutput

    from samebits.rollout.routes import StepRoutes

    rows = np.arange(12, dtype=np.int16).reshape(2, 3, 2)
    other = AuxRequestOutput(5, np.zeros((4, 3, 2), np.int16))
    step = StepRoutes(["a", "b", "c", "d"], np.array([7, 5, 9, 3]), np.array([0, -1, 1, -1]), rows, {"b": other})
    for routes in (step, pickle.loads(pickle.dumps(step))):
        assert sorted(routes) == ["a", "b", "c"] and len(routes) == 3 and "d" not in routes and "b" in routes
        assert routes["c"].token_start == 9 and np.array_equal(routes["c"].rows, rows[1:])
        assert routes["b"].token_start == 5 and routes.single == [True, False, True, False]
        with pytest.raises(KeyError):
            routes["d"]


def test_the_real_engine_gives_the_same_bits(engine, monkeypatch):
    """vLLM's V1 runner and a model: whole, and as ever."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from samebits.rollout.whole import WHOLE, Keeper

    engine.clear()
    prompts = [prompt(n, n) for n in (3, 126, 200, 31)]
    booked, write = [], Keeper._write
    monkeypatch.setattr(Keeper, "_write", lambda self, rows, *rest: (booked.append(len(rows)), write(self, rows, *rest)))

    def run(extra: dict | None) -> list[SimpleNamespace]:
        engine.llm.reset_prefix_cache()
        shared = dict(max_tokens=40, logprobs=0, detokenize=False, extra_args=extra, output_kind=RequestOutputKind.FINAL_ONLY)
        params = [SamplingParams(seed=n, flat_logprobs=bool(extra), **shared) for n in range(len(prompts))]
        outputs = engine.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [joined([o]) for o in outputs]

    ever = run(None)
    assert not booked
    whole = run(WHOLE)
    assert sum(booked) > 100, "nothing was booked at once"
    for a, b in zip(ever, whole, strict=True):
        assert np.array_equal(a.routes, b.routes) and a.routes.dtype == b.routes.dtype
        del a.routes, b.routes
        assert a == b

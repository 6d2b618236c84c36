"""Requests whose output is wanted whole: the engine's core keeps tokens, logprobs and routes, and sends them once, when a request ends.

vLLM makes one output for each request and token, encodes it in the core, decodes it in the server and adds it to what was there, also
for requests of which nobody reads anything before the end. With a small model and hundreds of requests at once that is most of a step.
A request that says `WHOLE` in its sampling parameters gets one output instead, with the same tokens, logprobs, routes, cached tokens
and finish reason. An aborted one gets none of its tokens. All others are served as ever, beside it.

`Keeper` stands before and behind `Scheduler.update_from_output`. A running request that got one token, which neither ends it nor
completes a block, is booked here, whole steps at a time in arrays; everything else (first tokens, chunks of prompts, preemption, ends,
blocks for the prefix cache) goes through vLLM's own function, whose outputs are kept behind it. Nothing here looks at the model runner:
it is the same behind V1, V2, and workers in other processes.

vLLM's own function is right for every token and slow for hundreds: where requests that ask for better go there, the log says so, once.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request, RequestStatus

from .routes import StepRoutes

WHOLE = {"samebits_whole": True}
"""`SamplingParams.extra_args` of a request whose output is wanted whole."""
PAGE = 128
"""Tokens of a request that are gathered before they are set aside, at most."""
_RUNNING, _ABORTED = RequestStatus.RUNNING, RequestStatus.FINISHED_ABORTED
_MANY = 512
"""Tokens that could not be booked at once, from which on that is said, where they are more than half: one a block never can."""
log = logging.getLogger(__name__)


class OutOfStep(RuntimeError):
    """The worker's rows of routes are not those of the tokens that the scheduler booked."""


def asked_whole(request: Request) -> bool:
    """Whether a request asks for it."""
    params = request.sampling_params
    return params is not None and bool(params.extra_args) and params.extra_args.get("samebits_whole") is True


def wanted_whole(request: Request) -> bool:
    """Whether a request asks for it and can have it: nothing of it is read or judged outside of the core before it ends."""
    params = request.sampling_params
    return (
        asked_whole(request)
        and params.output_kind == RequestOutputKind.FINAL_ONLY
        and not params.detokenize
        and not params.stop
        and params.num_logprobs in (None, 0)
        and params.repetition_detection is None
        and not request.resumable
        and not request.use_structured_output
        and not request.has_encoder_inputs
    )


class Held:
    """What the core has of one request."""

    __slots__ = ("ends", "first", "left", "logprobs", "page", "request", "routes", "scored", "start", "taken")

    def __init__(self, request: Request, first: EngineCoreOutput, page: int) -> None:
        self.request, self.first, self.page = request, first, page
        params = request.sampling_params
        self.ends = frozenset((params.eos_token_id, *(params.stop_token_ids or ())))
        """Tokens that end the request, and None."""
        self.scored = params.num_logprobs is not None
        self.left = 0
        """Tokens that can be booked before one may end the request by its length, or complete a block."""
        self.taken = 0
        """Tokens in its page."""
        self.start = 0
        """Position of the row of routes that belongs to the page's first token."""
        self.logprobs: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.routes: list[np.ndarray] = []


class Pages:
    """`PAGE` places for each of many requests: token ids and logprobs of what was sampled, ranks, and rows of routes with positions."""

    def __init__(self) -> None:
        self.count = 0
        self.free: list[int] = []
        self.arrays: dict[str, np.ndarray] = {}

    def take(self) -> int:
        """An unused page."""
        if not self.free:
            self.free = list(range(2 * self.count + 7, self.count - 1, -1))
            self.count = 2 * self.count + 8
            self.arrays = {name: self._grown(array) for name, array in self.arrays.items()}
        return self.free.pop()

    def _grown(self, array: np.ndarray) -> np.ndarray:
        grown = np.empty((self.count, *array.shape[1:]), dtype=array.dtype)
        grown[: len(array)] = array
        return grown

    def write(self, name: str, pages: np.ndarray, places: np.ndarray, rows: np.ndarray) -> None:
        """Put `rows` [N, ...] at (page, place) each."""
        array = self.arrays.get(name)
        if array is None:
            array = self.arrays[name] = np.empty((self.count, PAGE, *rows.shape[1:]), dtype=rows.dtype)
        if array.dtype != rows.dtype or array.shape[2:] != rows.shape[1:]:
            raise OutOfStep(f"{name} of a step are {rows.dtype} {rows.shape[1:]}, those before {array.dtype} {array.shape[2:]}")
        array[pages, places] = rows


class Keeper:
    """Keeps outputs of one scheduler."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.held: dict[str, Held] = {}
        self.pages = Pages()
        self.ahead = hasattr(scheduler, "_spec_token_placeholders")
        """Whether tokens are scheduled before those in front of them are known (vLLM's AsyncScheduler)."""
        self.obstacles = _obstacles(scheduler)
        """What of the engine's configuration leaves no request whole."""
        self.booked = self.passed = 0
        """Decoded tokens of whole requests that were booked at once, and those that could not be for another reason than their own."""
        self._told: set[str] = set()

    def update(self, original: Callable, scheduled: Any, output: Any) -> dict[int, EngineCoreOutputs]:
        """As `original`, vLLM's `update_from_output`; outputs of whole requests come only with their end."""
        if self.obstacles:
            asked = (self.scheduler.requests.get(new.req_id) for new in scheduled.scheduled_new_reqs)
            if "engine" not in self._told and any(request is not None and asked_whole(request) for request in asked):
                self._tell("engine", f"no output is kept to its request's end by an engine with {', '.join(self.obstacles)}")
            return original(self.scheduler, scheduled, output)
        rest = self._book(scheduled, output)
        if rest is not scheduled.num_scheduled_tokens:
            scheduled = copy.copy(scheduled)
            scheduled.num_scheduled_tokens = rest
        return self._keep(original(self.scheduler, scheduled, output))

    def ended(self, requests: list[Request]) -> None:
        """Forget requests that were aborted."""
        for request in requests:
            if request.status == _ABORTED and (held := self.held.pop(request.request_id, None)) is not None:
                self.pages.free.append(held.page)

    def _book(self, scheduled: Any, output: Any) -> dict[str, int]:
        """Book the tokens of running whole requests to which nothing else happens; the scheduled tokens of all others."""
        counts = scheduled.num_scheduled_tokens
        if not self.held or not output.sampled_token_ids:
            return counts
        routes, logprobs = output.aux_output_connector_output, output.logprobs
        with_routes = self.scheduler.aux_output_connector is not None
        if obstacle := _obstacle(scheduled, output, with_routes):
            self._count(0, sum(counts.get(name) == 1 for name in self.held), obstacle)
            return counts
        sampled, index, ahead = output.sampled_token_ids, output.req_id_to_index, self.ahead
        single = routes.single if with_routes else None
        rest: dict[str, int] = {}
        rows, pages, places = [], [], []
        passed = 0
        known = self.held.get
        for name, count in counts.items():
            held = known(name)
            if held is not None and held.left > 0 and count == 1:
                request, row = held.request, index[name]
                ids = sampled[row]
                if len(ids) == 1 and ids[0] not in held.ends and request.status is _RUNNING and not request.num_stale_output_tokens:
                    if (single is None or single[row]) and (logprobs is not None or not held.scored):
                        token = ids[0]
                        request.num_in_flight_tokens -= 1
                        if ahead:
                            request.num_output_placeholders -= 1
                        request._output_token_ids.append(token)
                        request._all_token_ids.append(token)
                        rows.append(row)
                        pages.append(held.page)
                        places.append(held.taken)
                        held.taken += 1
                        held.left -= 1
                        continue
                    passed += 1
            rest[name] = count
        self._count(len(rows), passed, "the worker gave their rows of routes, or their logprobs, not with those of the step")
        if rows:
            self._write(np.array(rows), np.array(pages), np.array(places), logprobs, routes if with_routes else None)
        return rest

    def _count(self, booked: int, passed: int, why: str) -> None:
        self.booked += booked
        self.passed += passed
        if passed and self.passed > max(_MANY, self.booked):
            self._tell("tokens", f"{self.passed} of {self.booked + self.passed} decoded tokens took vLLM's way for one token: {why}")

    def _tell(self, subject: str, text: str) -> None:
        """One line of the log for each subject."""
        if subject not in self._told:
            self._told.add(subject)
            log.warning("samebits: outputs are right but slow: %s", text)

    def _write(self, rows: np.ndarray, pages: np.ndarray, places: np.ndarray, logprobs: LogprobsLists | None, routes: Any) -> None:
        if logprobs is not None:
            for name, array in (("ids", logprobs.logprob_token_ids), ("logprobs", logprobs.logprobs)):
                self.pages.write(name, pages, places, array[rows, 0])
            self.pages.write("ranks", pages, places, logprobs.sampled_token_ranks[rows])
        if routes is not None:
            self.pages.write("positions", pages, places, routes.token_starts[rows])
            self.pages.write("routes", pages, places, routes.rows[routes.places[rows]])

    def _keep(self, outputs: dict[int, EngineCoreOutputs]) -> dict[int, EngineCoreOutputs]:
        """Hold back what is of whole requests, or give it with all that was held of one that ended."""
        for client in list(outputs):
            batch = outputs[client]
            batch.outputs = [out for out in batch.outputs if self._due(out)]
            if not (batch.outputs or batch.finished_requests or batch.scheduler_stats):
                del outputs[client]
        return outputs

    def _due(self, out: EngineCoreOutput) -> bool:
        """Whether an output is to be sent now. One of a request that ended then holds everything."""
        held = self.held.get(out.request_id)
        if out.finish_reason is not None:
            if held is not None:
                self._complete(held, out)
            return True
        if held is None:
            request = self.scheduler.requests.get(out.request_id)
            if request is None or not wanted_whole(request):
                if request is not None and asked_whole(request):
                    reads = "something that reads or judges it before its end"
                    self._tell("request", f"{out.request_id} asks for its output whole, and for {reads}")
                return True
            held = self.held[out.request_id] = Held(request, out, self.pages.take())
        self._set_aside(held)
        self._add(held, out)
        self._look_ahead(held)
        return False

    def _add(self, held: Held, out: EngineCoreOutput) -> None:
        """What one output of vLLM's brings: its arrays are parts of those of a step, which need not outlive it."""
        if out.new_logprobs is not None:
            ids, logprobs, ranks, _ = out.new_logprobs
            held.logprobs.append((ids[:, 0].copy(), logprobs[:, 0].copy(), ranks.copy()))
        if out.routed_experts is not None:
            held.routes.append(out.routed_experts.copy())

    def _look_ahead(self, held: Held) -> None:
        """How many tokens can come before one may end the request or complete a block, for the hash or for the cache."""
        request, size = held.request, self.scheduler.hash_block_size
        tokens = request.num_tokens
        room = min(request.max_tokens - request.num_output_tokens, self.scheduler.max_model_len - tokens) - 1
        held.left = max(0, min(room, (size - tokens % size) % size - 1, PAGE))
        held.start = tokens - 1

    def _set_aside(self, held: Held) -> None:
        """Empty its page."""
        if not (taken := held.taken):
            return
        part = {name: array[held.page, :taken].copy() for name, array in self.pages.arrays.items()}
        if held.scored:
            held.logprobs.append((part["ids"], part["logprobs"], part["ranks"]))
        if "routes" in part:
            if not np.array_equal(part["positions"], np.arange(held.start, held.start + taken)):
                raise OutOfStep(f"request {held.request.request_id}: routes of {part['positions']}, expected {taken} from {held.start}")
            held.routes.append(part["routes"])
        held.taken = 0

    def _complete(self, held: Held, out: EngineCoreOutput) -> None:
        """Make the output of a request's end the output of all of it, and forget the request."""
        self._set_aside(held)
        self._add(held, out)
        del self.held[out.request_id]
        self.pages.free.append(held.page)
        out.new_token_ids = held.request._output_token_ids.copy()
        out.prefill_stats = held.first.prefill_stats
        out.new_prompt_logprobs_tensors = held.first.new_prompt_logprobs_tensors
        out.prompt_token_id_logprobs = held.first.prompt_token_id_logprobs
        if held.logprobs:
            ids, logprobs, ranks = (np.concatenate(parts) for parts in zip(*held.logprobs, strict=True))
            out.new_logprobs = LogprobsLists(ids[:, None], logprobs[:, None], ranks)
        if held.routes:
            out.routed_experts = np.concatenate(held.routes)


def _obstacles(scheduler: Any) -> list[str]:
    """Settings of an engine with which outputs are not kept, by the names of what they are for."""
    found = {
        "a KV connector": scheduler.connector is not None,
        "an encoder connector": scheduler.ec_connector is not None,
        "statistics (disable_log_stats=false)": scheduler.log_stats,
        "sampling masks": scheduler.return_sampling_mask,
        "blocks that are freed later": scheduler.defer_block_free,
        "speculative tokens": scheduler.num_spec_tokens,
        f"{scheduler.num_sampled_tokens_per_step} sampled tokens a step": scheduler.num_sampled_tokens_per_step != 1,
        "metrics of speculative decoding": scheduler.spec_decode_metrics_level != "none",
    }
    return [name for name, there in found.items() if there]


def _obstacle(scheduled: Any, output: Any, with_routes: bool) -> str | None:
    """What of a step's results keeps all of its tokens from being booked at once; None where nothing does."""
    routes, logprobs = output.aux_output_connector_output, output.logprobs
    if scheduled.scheduled_spec_decode_tokens:
        return "tokens were speculated on"
    if output.pooler_output or output.num_nans_in_logits:
        return "the worker gave pooled outputs, or counts of NaN"
    if any(value is not None for value in output.prompt_logprobs_dict.values()) or output.prompt_token_id_logprobs_dict:
        return "a request beside them asked for logprobs of its prompt"
    if logprobs is not None and logprobs.cu_num_generated_tokens is not None:
        return "the worker gave logprobs of several tokens a request"
    if with_routes and not isinstance(routes, StepRoutes):
        return f"the worker gave routes as {type(routes).__name__}, by a connector that is not ours"
    if with_routes and routes.request_ids != output.req_ids:
        return "the worker gave routes of other requests, or in another order, than tokens"
    return None

"""The engine tells which experts it chose: routes of every finished request, on both of vLLM's model runners.

vLLM 0.31 carries routes from the worker to `RequestOutput.outputs[0].routed_experts` by itself: the router of each layer writes its
ids into a capture buffer, the worker's auxiliary-output connector cuts the buffer into requests and keeps finished blocks of 128
tokens under the hash of their KV block, and the scheduler attaches the rows to the request's output. So routes survive chunked
prefill, preemption and prefix-cache hits (the rows of a cached block come back with it), and cross processes with the output. A row that
is missing fails an assertion there and the step with it. (That is also why vLLM asks for prefix caching when routes are on.)

Three things are ours. `Capturer` keeps ids as int16 with -1 in layers without experts, and a step in which a layer with experts did
not report every token is refused when it is read. `RouteCPUModelRunner` feeds the connector from the V1 runner, the only one that runs
on a CPU; upstream does it in the V2 runner only, which CUDA uses. `Connector` books the rows of all requests that decode at once: hundreds
of them in a step take upstream's code for one request longer than the step takes a small model.

Result: int16 [prompt + response - 1, num_hidden_layers, top_k], logical expert ids in ascending order, by absolute layer index.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed.aux_output_connector.connector import AuxRequestOutput
from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector, PendingAuxOutput, get_aux_output_connector
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import RoutedExpertsCapturer
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from .settings import ARCHITECTURE


class Capturer(RoutedExpertsCapturer):
    """vLLM's capture buffer with -1 for "no expert here". Other models keep vLLM's own behaviour.

    The buffer is emptied after each step, on the device and in order with it, so that a layer that said nothing in a step shows in what
    was read of that step, whether the layer ran or a captured graph of it was replayed.
    """

    def __init__(self, max_num_batched_tokens: int, vllm_config: VllmConfig) -> None:
        super().__init__(max_num_batched_tokens, vllm_config)
        self._ours = ARCHITECTURE in vllm_config.model_config.architectures
        if not self._ours:
            return
        freq = vllm_config.model_config.hf_text_config.moe_layer_freq
        self._moe_layers = [i for i, f in enumerate(freq) if f]
        self.output_dtype_name, self.output_dtype = "int16", torch.int16
        self.device_buffer.fill_(-1)

    def snapshot_routing_data(self, num_tokens: int) -> Tensor:
        """[T, layers, k] of this step."""
        step = super().snapshot_routing_data(num_tokens)
        if self._ours:
            self.device_buffer.fill_(-1)
        return step

    def require_complete(self, step: np.ndarray) -> None:
        """Raise `RuntimeError` when a layer with experts did not report all tokens of a step [T, layers, k]."""
        if not self._ours or not len(step):
            return
        lowest = step.min(axis=0).min(axis=1)
        if silent := [i for i in self._moe_layers if lowest[i] < 0]:
            raise RuntimeError(f"no routes of some of {len(step)} tokens from layers {silent}")


class StepRoutes(Mapping):
    """Routes of one step by request, as the scheduler reads them; those of requests with one row lie in one array.

    Args:
        request_ids: all requests of the step, in its order.
        token_starts: [R] position of each one's first row.
        places: [R] index of its row in `rows`, -1 for requests that are not there.
        rows: [S, layers, k].
        others: what upstream's code gave for the rest.
    """

    def __init__(
        self, request_ids: list[str], token_starts: np.ndarray, places: np.ndarray, rows: np.ndarray, others: dict[str, AuxRequestOutput]
    ) -> None:
        self.request_ids, self.token_starts, self.places, self.rows, self.others = request_ids, token_starts, places, rows, others

    def __getstate__(self) -> tuple[Any, ...]:
        return self.request_ids, self.token_starts, self.places, self.rows, self.others

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.request_ids, self.token_starts, self.places, self.rows, self.others = state

    @cached_property
    def single(self) -> list[bool]:
        """Of each request, whether its one row is in `rows`."""
        return (self.places >= 0).tolist()

    @cached_property
    def _order(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.request_ids) if self.single[i]}

    def __getitem__(self, request_id: str) -> AuxRequestOutput:
        if request_id in self.others:
            return self.others[request_id]
        i = self._order[request_id]
        return AuxRequestOutput(int(self.token_starts[i]), self.rows[self.places[i] : self.places[i] + 1])

    def __contains__(self, request_id: object) -> bool:
        return request_id in self.others or request_id in self._order

    def __iter__(self) -> Iterator[str]:
        yield from self._order
        yield from self.others

    def __len__(self) -> int:
        return len(self._order) + len(self.others)


class Connector(AuxOutputWorkerConnector):
    """vLLM's connector in the worker, quick with requests that decode.

    A request with one row, accepted, that follows its last one inside of a block that is begun and not completed by it needs its row
    copied and its cursors moved. All others go through upstream's code, in its order.
    """

    def begin_step(self, metadata: Any) -> None:
        """As upstream, which makes a new state for every request of every step and drops it where there is one."""
        news = metadata
        plain = metadata is not None and self._buffer is not None and metadata.generation == self._generation
        # A request that runs and finished is left to upstream, which refuses it.
        if plain and metadata.requests.keys().isdisjoint(metadata.finished_requests):
            known = self._requests.get
            with self._lock:
                requests = {
                    name: start
                    for name, start in metadata.requests.items()
                    if (state := known(name)) is None or (state.pending_outputs == 0 and start > state.emit_cursor)
                }
            news = replace(metadata, requests=requests)
        super().begin_step(news)
        self._step_metadata = metadata

    def process_output(self, pending: PendingAuxOutput) -> Mapping[str, AuxRequestOutput]:
        """As upstream; with layers of ours, a step in which one said nothing is refused."""
        if isinstance(self._capturer, Capturer):
            self._capturer.require_complete(pending.routed_experts)
        return super().process_output(pending)

    def _commit_output(self, pending: PendingAuxOutput) -> Mapping[str, AuxRequestOutput]:
        if pending.routed_experts is None or pending.num_sampled is None or pending.num_rejected is None:
            return super()._commit_output(pending)  # which says what is missing
        buffer = self._buffer
        size, tails, states = buffer.block_size, buffer._requests, self._requests
        names, bounds = pending.request_ids, pending.query_start_loc
        count = len(names)
        starts = np.asarray(pending.token_starts[:count]).astype(np.int64)
        local = starts % size
        inside = (local > 0) & (local < size - 1)
        one = (np.diff(bounds) == 1) & (pending.num_sampled[:count] == 1) & (pending.num_rejected[:count] == 0) & inside
        taken, slots, rest = [], [], []
        for i, (name, start, place, single) in enumerate(zip(names, starts.tolist(), local.tolist(), one.tolist(), strict=True)):
            state, tail = states[name], tails.get(name)
            if single and tail is not None and tail.length == place and state.capture_cursor == start and state.emit_cursor == start:
                tail.length = place + 1
                state.capture_cursor = state.scheduled_cursor = state.emit_cursor = start + 1
                taken.append(i)
                slots.append(tail.slot)
            else:
                rest.append(i)
        index = np.array(taken, dtype=np.int64)
        rows = pending.routed_experts[bounds[index]]
        buffer._rows[np.array(slots, dtype=np.int64), local[index]] = rows
        places = np.full(count, -1, dtype=np.int64)
        places[index] = np.arange(len(index))
        others = super()._commit_output(_part(pending, rest)) if rest else {}
        return StepRoutes(names, starts, places, rows, others)


def _part(pending: PendingAuxOutput, chosen: list[int]) -> PendingAuxOutput:
    """The same step with only some of its requests, in its order."""
    if len(chosen) == len(pending.request_ids):
        return pending
    bounds = pending.query_start_loc
    spans = [(int(bounds[i]), int(bounds[i + 1])) for i in chosen]
    return replace(
        pending,
        request_ids=[pending.request_ids[i] for i in chosen],
        token_starts=np.asarray(pending.token_starts)[chosen],
        query_start_loc=np.cumsum([0, *(end - start for start, end in spans)]),
        routed_experts=np.concatenate([pending.routed_experts[start:end] for start, end in spans]),
        num_sampled=np.asarray(pending.num_sampled)[chosen],
        num_rejected=np.asarray(pending.num_rejected)[chosen],
    )


class RouteCPUModelRunner(CPUModelRunner):
    """vLLM's V1 CPU runner, with routes where they are asked for."""

    _routes: AuxOutputWorkerConnector | None = None
    _pending: PendingAuxOutput | None = None

    def initialize_kv_cache(self, kv_cache_config, *args, **kwargs) -> None:
        """As upstream; the connector needs the cache's block sizes."""
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        if self.vllm_config.aux_output_config.enabled and self._routes is None:
            self._routes = get_aux_output_connector(model=self.get_model(), vllm_config=self.vllm_config, kv_cache_config=kv_cache_config)

    def execute_model(self, scheduler_output, intermediate_tensors=None):
        """As upstream; remembers which rows of the capture buffer belong to which request."""
        if self._routes is not None:
            self._routes.begin_step(scheduler_output.aux_output_connector_metadata)
        output = super().execute_model(scheduler_output, intermediate_tensors)
        if self._routes is not None and scheduler_output.total_num_scheduled_tokens:
            n = self.input_batch.num_reqs
            batch = SimpleNamespace(
                req_ids=list(self.input_batch.req_ids),
                query_start_loc_np=self.query_start_loc.np[: n + 1].copy(),
                num_computed_tokens_np=self.input_batch.num_computed_tokens_cpu[:n].copy(),
            )
            self._pending = self._routes.prepare_output(batch)
        return output

    def sample_tokens(self, grammar_output):
        """As upstream; a request gets its rows with the token that was sampled after them."""
        output = super().sample_tokens(grammar_output)
        if self._pending is not None:
            pending, self._pending = self._pending, None
            sampled = np.array([len(ids) for ids in output.sampled_token_ids], dtype=np.int64)
            pending.enqueue_cpu_copy(sampled, np.zeros_like(sampled))
            output.aux_output_connector_output = pending.process_output()
        return output

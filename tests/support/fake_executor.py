"""An executor of vLLM without a model: tokens, logprobs and routes are functions of the last token and its position.

What is around it is vLLM's own: scheduler, prefix cache, the worker's connector of routes, output processing. So the host's side of an
engine can be tried with as many requests as one likes, with the scheduler that a GPU uses too (`configure`): it runs a step ahead of
the results, as vLLM does there. A token says nothing about the request that it is of, only about what came before it, so requests with
equal beginnings share blocks of the prefix cache.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, LogprobsLists, ModelRunnerOutput

VOCABULARY = 89


def next_token(token: np.ndarray, position: np.ndarray) -> np.ndarray:
    """The token after `token` at `position`, int64."""
    return (token * 31 + position * 17 + 7) % 509 % VOCABULARY


def configure(config: Any, ahead: bool = True, executor: type[Executor] | None = None) -> Any:
    """Make a `VllmConfig` of the CPU use this executor, or one made of it, and with `ahead` the scheduler and the wiring that CUDA uses."""
    config.parallel_config.distributed_executor_backend = executor or FakeExecutor
    config.scheduler_config.async_scheduling = ahead
    config.additional_config = dict(config.additional_config or {}, fake_ahead=ahead)
    return config


class FakeExecutor(Executor):
    """One "worker" in this process."""

    supports_pp = False

    def _init_executor(self) -> None:
        self.ahead = bool(self.vllm_config.additional_config.get("fake_ahead"))
        self.tokens: dict[str, list[int]] = {}
        self.blocks: dict[str, int] = {}
        """Blocks of the KV cache that each request was given."""
        self.connector: Any = None
        self.seconds = 0.0
        """CPU time of this stand-in itself."""

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """Whatever `configure` says."""
        return True

    def check_health(self) -> None:
        """Always well."""

    def shutdown(self) -> None:
        """Stops the connector's thread."""
        if self.connector is not None:
            self.connector.close()

    def get_supported_tasks(self) -> tuple[str, ...]:
        """Text only."""
        return ("generate",)

    def determine_available_memory(self) -> list[int]:
        """Bytes; `kv_cache_memory_bytes` or `num_gpu_blocks_override` say how many are used."""
        return [1 << 30]

    def get_kv_cache_specs(self) -> list[dict[str, Any]]:
        """One layer: that is all that the scheduler wants to know."""
        size = self.vllm_config.cache_config.block_size
        return [{"layer": FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=8, dtype=torch.uint8)}]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        """vLLM's default."""
        return [["LBNHC"]]

    def set_kv_cache_layout(self, layout_name: str) -> None:
        """There is no cache to lay out."""

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        """Builds the connector of routes, vLLM's or what stands in its place."""
        from vllm.distributed.aux_output_connector import worker

        if not self.vllm_config.aux_output_config.enabled:
            return
        kept = worker.get_tp_group, worker.bind_routed_experts_capturer
        worker.get_tp_group, worker.bind_routed_experts_capturer = lambda: SimpleNamespace(is_first_rank=True), lambda model, capturer: None
        try:
            self.connector = worker.get_aux_output_connector(torch.nn.Module(), self.vllm_config, kv_cache_configs[0])
        finally:
            worker.get_tp_group, worker.bind_routed_experts_capturer = kept

    def compile_or_warm_up_model(self) -> None:
        """Nothing to warm up."""

    def collective_rpc(self, method: Any, timeout: Any = None, args: tuple = (), kwargs: Any = None, non_block: bool = False) -> Any:
        """Calls of workers are answered by this object where it has them, else by None."""
        answer = [getattr(self, method)(*args) if method in vars(FakeExecutor) else None]
        if not non_block:
            return answer
        future: Future = Future()
        future.set_result(answer)
        return future

    def fake_seconds(self) -> float:
        """CPU seconds that this stand-in took itself."""
        return self.seconds

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Remembers the step; `sample_tokens` gives what came of it."""
        if self.connector is not None:
            self.connector.begin_step(scheduler_output.aux_output_connector_metadata)
        started = time.thread_time()
        self._step(scheduler_output)
        self.seconds += time.thread_time() - started
        future: Future = Future()
        future.set_result(None if self.batch else EMPTY_MODEL_RUNNER_OUTPUT)
        return future if non_block else future.result()

    def order(self, counts: dict[str, int]) -> list[str]:
        """Requests of a step in the order of its batch, given how many tokens of each were scheduled."""
        return list(counts)

    def _step(self, scheduled: Any) -> None:
        for request in scheduled.finished_req_ids:
            self.tokens.pop(request, None)
            self.blocks.pop(request, None)
        for new in scheduled.scheduled_new_reqs:
            self.tokens[new.req_id] = list(new.prefill_token_ids or new.prompt_token_ids)
        computed = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        cached = scheduled.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        self.blocks.update((new.req_id, len(new.block_ids[0])) for new in scheduled.scheduled_new_reqs)
        for request, new in zip(cached.req_ids, cached.new_block_ids, strict=True):
            held = 0 if request in cached.resumed_req_ids else self.blocks[request]
            self.blocks[request] = held + len(new[0] if new else ())
        for request, ids in cached.all_token_ids.items():
            self.tokens[request] = list(ids)
        counts = scheduled.num_scheduled_tokens
        self.batch = self.order(counts)
        lengths = np.fromiter((counts[r] for r in self.batch), np.int64, len(counts))
        starts = np.fromiter((computed[r] for r in self.batch), np.int64, len(counts))
        known = np.fromiter((len(self.tokens[r]) for r in self.batch), np.int64, len(counts))
        inputs = [self.tokens[r][s : s + n] for r, s, n in zip(self.batch, starts.tolist(), lengths.tolist(), strict=True)]
        assert [len(i) for i in inputs] == lengths.tolist(), "a token was scheduled that nobody knows"
        room = np.fromiter((self.blocks[r] for r in self.batch), np.int64, len(counts)) * self.vllm_config.cache_config.block_size
        assert (starts + lengths <= room).all(), "a token was scheduled that has no place in the KV cache"
        flat = np.fromiter((t for i in inputs for t in i), np.int64, int(lengths.sum()))
        bounds = np.concatenate(([0], np.cumsum(lengths)))
        positions = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)]) if self.batch else flat
        self.samples = starts + lengths == known
        last = bounds[1:] - 1
        self.drawn = next_token(flat[last], positions[last]) if self.batch else flat
        for request, token, sampled in zip(self.batch, self.drawn.tolist(), self.samples.tolist(), strict=True):
            if sampled:
                self.tokens[request].append(token)
        if self.connector is not None and self.batch:
            layers, top_k = self.connector._capturer.shape_per_token
            rows = (flat[:, None, None] + positions[:, None, None] * 3 + np.arange(layers)[:, None] + np.arange(top_k)) % 128
            self.connector._capturer.device_buffer[: len(flat)] = torch.from_numpy(rows)
        self.input_batch = SimpleNamespace(req_ids=self.batch, query_start_loc_np=bounds, num_computed_tokens_np=starts)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """What the step gave, as a future where the engine runs ahead."""
        pending = None
        if self.connector is not None:
            pending = self.connector.prepare_output(self.input_batch)
            samples = self.samples.astype(np.int64)
            pending.enqueue_cpu_copy(samples, np.zeros_like(samples))
        started = time.thread_time()
        share = -np.log1p(self.drawn.astype(np.float32))[:, None]
        width = 2
        logprobs = LogprobsLists(
            self.drawn[:, None].astype(np.int32) + np.arange(width, dtype=np.int32),
            (share - np.arange(width, dtype=np.float32) / 3).astype(np.float32),
            (self.drawn % 7 + 1).astype(np.int64),
        )
        self.seconds += time.thread_time() - started
        future = _Result(self.batch, self.drawn, self.samples, logprobs, pending)
        return future if non_block else future.result()


class _Result(Future):
    def __init__(self, batch: list[str], drawn: np.ndarray, samples: np.ndarray, logprobs: LogprobsLists, pending: Any) -> None:
        super().__init__()
        self.parts = batch, drawn, samples, logprobs, pending

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        batch, drawn, samples, logprobs, pending = self.parts
        ids = drawn[:, None].tolist()
        for row, sampled in zip(ids, samples.tolist(), strict=True):
            if not sampled:
                row.clear()
        places = {name: i for i, name in enumerate(batch)}
        output = ModelRunnerOutput(req_ids=batch, req_id_to_index=places, sampled_token_ids=ids, logprobs=logprobs)
        if pending is not None:
            output.aux_output_connector_output = pending.process_output()
        return output

"""The places where vLLM 0.31.0 has no hook and samebits replaces something of it. Nothing is patched elsewhere.

Each patch says why, checks that what it replaces is what it was written for, and raises otherwise. `apply` may be called again; it
does its work once in a process.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
from collections.abc import Callable
from typing import Any

import vllm

VERSION = "0.31.0"
log = logging.getLogger(__name__)


class PatchTargetChanged(RuntimeError):
    """vLLM is not the version that a patch was written for."""


def _source(function: Callable) -> str:
    return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:12]


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise PatchTargetChanged(f"vLLM {vllm.__version__}: {what} is not as in {VERSION}, for which samebits patches it")


def _require_sources(digests: dict[Callable, str]) -> None:
    for function, digest in digests.items():
        _require(_source(function) == digest, function.__qualname__)


def _memory_adapters() -> None:
    """Model runners build vLLM's LoRA manager by name. A model that brings its own slots gets ours, all others vLLM's."""
    from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin as Mixin

    from . import slots

    original = Mixin.load_lora_model
    _require(_source(original) == "dbd70775ffc5", "LoRAModelRunnerMixin.load_lora_model")

    def load_lora_model(self: Any, model: Any, vllm_config: Any, device: Any) -> Any:
        if not hasattr(model, "attach_adapters"):
            return original(self, model, vllm_config, device)
        self.lora_manager = slots.attach(model, vllm_config, device, model.settings.adapter)
        return model

    Mixin.load_lora_model = load_lora_model


def _capturer() -> None:
    """The worker builds the connector of routes, and that the capture buffer, by name. Ours are quick with requests that decode, know
    layers without experts, and look at what was read of the buffer."""
    from vllm.distributed.aux_output_connector import routed_experts, worker

    from .routes import Capturer, Connector

    _require(worker.RoutedExpertsCapturer is Capturer.__mro__[1], "aux_output_connector.worker.RoutedExpertsCapturer")
    _require(worker.AuxOutputWorkerConnector is Connector.__mro__[1], "aux_output_connector.worker.AuxOutputWorkerConnector")
    _require_sources(
        {
            Connector.__mro__[1].process_output: "cf508389557c",
            Connector.__mro__[1].begin_step: "40efc8972480",
            Connector.__mro__[1]._commit_output: "10ffef6dbe50",
            routed_experts.RoutedExpertsBuffer.capture: "e069266a7abd",
        }
    )
    worker.RoutedExpertsCapturer = Capturer
    worker.AuxOutputWorkerConnector = Connector


def _routes_on_cpu() -> None:
    """vLLM refuses routes on its V1 runner and builds that runner by name; ours provides them."""
    from vllm.config import VllmConfig
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.worker import cpu_worker

    from .routes import RouteCPUModelRunner

    original = VllmConfig._verify_aux_output_compatibility
    _require(_source(original) == "df40783516c7", "VllmConfig._verify_aux_output_compatibility")
    _require(cpu_worker.CPUModelRunner is RouteCPUModelRunner.__mro__[1], "cpu_worker.CPUModelRunner")

    class Answer:
        """The configuration, except that it says to have the V2 runner, which is the only thing the check is wrong about here."""

        use_v2_model_runner = True

        def __init__(self, config: Any) -> None:
            self._config = config

        def __getattr__(self, name: str) -> Any:
            return getattr(self._config, name)

    def verify(self: Any) -> None:
        original(Answer(self))

    VllmConfig._verify_aux_output_compatibility = verify
    cpu_worker.CPUModelRunner = RouteCPUModelRunner


def _logprobs() -> None:
    """The V2 runner, which CUDA uses, takes log-probabilities by a kernel of its own; the trainer's have the bits of `kernels.logprobs`."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return
    from vllm.v1.worker.gpu.sample import logprob, prompt_logprob

    from samebits.kernels.logprobs import token_logprob_rows

    from . import settings

    original = logprob.compute_token_logprobs
    _require(_source(original) == "d229e8608673", "sample.logprob.compute_token_logprobs")
    _require(prompt_logprob.compute_token_logprobs is original, "sample.prompt_logprob.compute_token_logprobs")

    def compute_token_logprobs(logits: Any, token_ids: Any) -> Any:
        if not settings.serving:
            return original(logits, token_ids)
        return token_logprob_rows(logits.float(), token_ids.long())[0]

    logprob.compute_token_logprobs = prompt_logprob.compute_token_logprobs = compute_token_logprobs


class _Drained:
    """The answers of one rank to one call. When that rank failed, those of the ranks after it are taken out too: nobody else will."""

    def __init__(self, queue: Any, later: list[Any]) -> None:
        self.queue, self.later = queue, later

    def dequeue(self, timeout: float | None = None, **options: Any) -> Any:
        """The rank's (status, answer)."""
        from vllm.v1.executor.multiproc_executor import WorkerProc

        answer = self.queue.dequeue(timeout=timeout, **options)
        if answer[0] != WorkerProc.ResponseStatus.SUCCESS:
            for queue in self.later:
                queue.dequeue(timeout=timeout, **options)
        return answer


def _answers() -> None:
    """A call of all ranks stops reading at the first that failed, and the next call takes the answers left over for its own."""
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    original = MultiprocExecutor.collective_rpc
    _require(_source(original) == "936c16152d71", "MultiprocExecutor.collective_rpc")

    def collective_rpc(self: Any, method: Any, *args: Any, **options: Any) -> Any:
        queues = self.response_mqs
        if options.get("unique_reply_rank") is None:
            self.response_mqs = [_Drained(queue, list(queues[i + 1 :])) for i, queue in enumerate(queues)]
        try:
            return original(self, method, *args, **options)
        finally:
            self.response_mqs = queues

    MultiprocExecutor.collective_rpc = collective_rpc


def _reset_at_rest() -> None:
    """Before an engine sleeps, or is paused with its caches cleared, vLLM resets the prefix cache "and running requests", and refuses that
    where routes are asked for unless the pause keeps its requests. The pause has ended them all by then: nothing runs that could be reset.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    original = Scheduler.reset_prefix_cache
    _require(_source(original) == "36b4355be090", "Scheduler.reset_prefix_cache")

    def reset_prefix_cache(self: Any, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        return original(self, reset_running_requests and bool(self.running), reset_connector)

    Scheduler.reset_prefix_cache = reset_prefix_cache


def _whole_outputs() -> None:
    """The scheduler has no hook for what becomes of a step's results. Requests that want their output whole get it at their end."""
    from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
    from vllm.v1.core.sched import utils
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

    from .whole import Keeper

    original, finish = Scheduler.update_from_output, Scheduler.finish_requests
    _require_sources(
        {
            original: "85b29db96051",
            finish: "b7a4ef7b8aa5",
            Scheduler._update_request_with_output: "ff6e3f664c99",
            AsyncScheduler._update_request_with_output: "c4c4ccac872a",
            utils.check_stop: "5149b60c92d2",
            Request.append_output_token_ids: "8ff2924a5d87",
            AuxOutputSchedulerConnector.take_output: "d671dca8fbc6",
        }
    )

    def keeper(self: Any) -> Keeper:
        found = self.__dict__.get("_samebits_keeper")
        if found is None:
            found = self._samebits_keeper = Keeper(self)
        return found

    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        return keeper(self).update(original, scheduler_output, model_runner_output)

    def finish_requests(self: Any, request_ids: Any, finished_status: Any) -> Any:
        finished = finish(self, request_ids, finished_status)
        keeper(self).ended(finished)
        return finished

    Scheduler.update_from_output, Scheduler.finish_requests = update_from_output, finish_requests


def _slots_at_hand() -> None:
    """Most tokens that are decoded need no block of the KV cache and complete none, which vLLM finds out by a dozen calls each."""
    from vllm.v1.core import kv_cache_coordinator, kv_cache_manager
    from vllm.v1.core import single_type_kv_cache_manager as managers
    from vllm.v1.request import RequestStatus

    Manager, Base = kv_cache_manager.KVCacheManager, managers.SingleTypeKVCacheManager
    original, running, alone = Manager.allocate_slots, RequestStatus.RUNNING, {"num_lookahead_tokens": 0}
    _require_sources(
        {
            original: "ffa596d58dfb",
            kv_cache_coordinator.KVCacheCoordinator.cache_blocks: "20dfc93ddf23",
            managers.FullAttentionManager.cache_blocks: "981125e4caaf",
            Base.cache_blocks: "30537db8126e",
            Base.allocate_new_blocks: "b8edfbf2e166",
            Base.get_num_blocks_to_allocate: "f50d7c5b5451",
            Base.remove_skipped_blocks: "7bf0e2a87ec3",
        }
    )

    def only_group(self: Any) -> Any:
        """The manager of blocks where there is one, of full attention, whose blocks are what is hashed; else None."""
        found = self.coordinator.single_type_managers
        plain = len(found) == 1 and type(found[0]) is managers.FullAttentionManager and not self.coordinator.num_reprefillable_tokens
        return found[0] if plain and found[0].block_size == self.block_pool.hash_block_size else None

    def allocate_slots(self: Any, request: Any, num_new_tokens: int, *args: Any, **options: Any) -> Any:
        if num_new_tokens == 1 and options == alone and not args and request.status is running:
            if "_samebits_group" not in self.__dict__:
                self._samebits_group = only_group(self)
            group, name = self._samebits_group, request.request_id
            if group is not None and name not in group._partial_hit_reqs:
                tokens, size = request.num_computed_tokens + 1, group.block_size
                cached, room = group.num_cached_block.get(name, 0), len(group.req_to_blocks.get(name, ())) * size
                if tokens <= room and min(tokens, request.num_tokens) // size <= cached:
                    return self.empty_kv_cache_blocks
        return original(self, request, num_new_tokens, *args, **options)

    Manager.allocate_slots = allocate_slots


def _flat_logprobs() -> None:
    """vLLM adds the logprobs of an output to those of its request position by position. Where they are flat, without alternatives and
    without text, they are columns that can be added at once."""
    from vllm import logprobs
    from vllm.v1.engine.logprobs import LogprobsProcessor

    original, flat = LogprobsProcessor._update_sample_logprobs, logprobs.FlatLogprobs
    _require_sources(
        {original: "acd9081bb7c5", logprobs.append_logprobs_for_next_position: "6ed1dc5e4d30", flat.append_fast: "2b2c6d510090"},
    )

    def update_sample_logprobs(self: Any, logprobs_lists: Any) -> None:
        have = self.logprobs
        if self.tokenizer is not None or self.num_logprobs != 0 or not isinstance(have, flat):
            return original(self, logprobs_lists)
        ids, values, ranks, _ = logprobs_lists
        column = values[:, 0].tolist()
        for value in column:  # one after another, as ever: other orders and compensated sums have other bits
            self.cumulative_logprob += value
        begin = len(have.logprobs)
        have.start_indices.extend(range(begin, begin + len(column)))
        have.end_indices.extend(range(begin + 1, begin + len(column) + 1))
        have.token_ids.extend(ids[:, 0].tolist())
        have.logprobs.extend(column)
        have.ranks.extend(ranks.tolist())
        have.decoded_tokens.extend([None] * len(column))

    LogprobsProcessor._update_sample_logprobs = update_sample_logprobs


def _sleep_beside_others() -> None:
    """A worker that went to sleep asserts that the card has no less free memory than before. The driver counts all processes: where one of
    another job takes more meanwhile than the engine gave back, everything is asleep as it should be, and the assertion ends the engine.
    """
    from vllm.v1.worker.gpu_worker import Worker

    from . import settings

    original = Worker.sleep
    _require(_source(original) == "cd3cfcc4bb55", "gpu_worker.Worker.sleep")

    def sleep(self: Any, level: int = 1) -> None:
        try:
            original(self, level)
        except AssertionError as error:  # the last thing that it does but for a line of its log
            if not settings.serving or str(error) != "Memory usage increased after sleeping.":
                raise
            log.warning("samebits: another process took memory of the GPU while the engine went to sleep")

    Worker.sleep = sleep


_applied = _applied_in_worker = False


def apply_in_worker() -> None:
    """Apply the patch of what only a worker has loaded, which a model of ours calls when it is built there. As `apply`."""
    global _applied_in_worker
    if not _applied_in_worker:
        _sleep_beside_others()
        _applied_in_worker = True


def apply() -> None:
    """Apply all patches. Raises `PatchTargetChanged` in one line."""
    global _applied
    if _applied:
        return
    _require(vllm.__version__.split("+")[0] == VERSION, "the package")
    _memory_adapters()
    _capturer()
    _routes_on_cpu()
    _logprobs()
    _answers()
    _reset_at_rest()
    _whole_outputs()
    _slots_at_hand()
    _flat_logprobs()
    _applied = True

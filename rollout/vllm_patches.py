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
    """The worker's connector builds the capture buffer by name; ours knows layers without experts, and looks at what was read of it."""
    from vllm.distributed.aux_output_connector import worker

    from .routes import Capturer

    original = worker.AuxOutputWorkerConnector.process_output
    _require(worker.RoutedExpertsCapturer is Capturer.__mro__[1], "aux_output_connector.worker.RoutedExpertsCapturer")
    _require(_source(original) == "cf508389557c", "AuxOutputWorkerConnector.process_output")

    def process_output(self: Any, pending: Any) -> Any:
        if isinstance(self._capturer, Capturer):
            self._capturer.require_complete(pending.routed_experts)
        return original(self, pending)

    worker.RoutedExpertsCapturer = Capturer
    worker.AuxOutputWorkerConnector.process_output = process_output


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
    _applied = True

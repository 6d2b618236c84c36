"""A vLLM worker without a model that gives its results as V2's runner does: for engines whose core and workers are processes of their own.

So all that is between a model and a job's server is what a GPU has: the scheduler that runs ahead, message queues in shared memory, the
worker's thread of outputs, and vLLM's asynchronous front end.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from .fake_executor import FakeExecutor
from .fake_v2 import V2Executor


def configure(config: Any) -> Any:
    """Make a `VllmConfig` of the CPU use this worker, and the scheduler and the wiring that CUDA uses."""
    config.parallel_config.worker_cls = "tests.support.v2_worker.V2Worker"
    config.parallel_config.distributed_executor_backend = "mp"
    config.scheduler_config.async_scheduling = True
    config.additional_config = dict(config.additional_config or {}, fake_ahead=True)
    return config


class V2Worker(WorkerBase):
    """What an executor asks of a worker, answered by the executor without a model."""

    def init_device(self) -> None:
        """Nothing but the stand-in."""
        self.fake = V2Executor.__new__(V2Executor)
        self.fake.vllm_config = self.vllm_config
        FakeExecutor._init_executor(self.fake)

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """There is none."""

    def determine_available_memory(self) -> int:
        """Bytes."""
        return self.fake.determine_available_memory()[0]

    def get_kv_cache_spec(self) -> dict[str, Any]:
        """One layer."""
        return self.fake.get_kv_cache_specs()[0]

    def get_supported_kv_cache_layouts(self) -> list[str]:
        """vLLM's default."""
        return self.fake.get_supported_kv_cache_layouts()[0]

    def set_kv_cache_layout(self, kv_cache_layout: str) -> None:
        """There is no cache to lay out."""

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Builds the connector of routes."""
        self.fake.initialize_from_config([kv_cache_config])

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Nothing to warm up."""
        return CompilationTimes(0.0, 0.0)

    def get_supported_tasks(self) -> tuple[str, ...]:
        """Text only."""
        return self.fake.get_supported_tasks()

    def execute_model(self, scheduler_output: Any) -> Any:
        """None where there is something to sample."""
        return self.fake.execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """V2's output, which the worker's own thread reads."""
        return self.fake.output()

    def sleep(self, level: int = 1) -> None:
        """No memory is given away."""

    def wake_up(self, tags: list[str] | None = None) -> None:
        """None comes back."""

    def reset_encoder_cache(self) -> None:
        """There is none."""

    def list_loras(self) -> set[int]:
        """There are no adapters."""
        return set()

    def left(self) -> dict[str, int]:
        """How much the connector of routes still has of requests."""
        connector = self.fake.connector
        buffer = connector._buffer
        return {
            "requests": len(connector._requests),
            "outputs": len(connector._pending_outputs),
            "blocks": len(buffer._rows) - len(buffer._free_slots),
        }

"""The executor without a model as the GPU has it: what V2's runner makes of a step, behind a thread and in another process.

Of vLLM's own: V2's order of a batch, its `AsyncOutput` over tensors of V2's dtypes, and the protocol by which a worker's message queue
pickles results. Streams and events are stand-ins. Arrays of a result lie in memory that the worker writes to again, as in the queue.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors, ModelRunnerOutput
from vllm.v1.worker.gpu import async_utils
from vllm.v1.worker.gpu.model_runner import sort_batch_req_ids
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from .fake_executor import FakeExecutor

GARBAGE = 0x55


@contextlib.contextmanager
def _no_streams() -> Iterator[None]:
    nothing = mock.MagicMock()  # a context manager too
    with mock.patch.object(torch.cuda, "Event", nothing), mock.patch.object(async_utils, "stream", nothing):
        yield


class V2Executor(FakeExecutor):
    """One "worker" with V2's runner, whose outputs a thread gives to the engine's core."""

    padding = 3
    """Requests of a captured batch that are not there."""

    def _init_executor(self) -> None:
        super()._init_executor()
        self.thread = ThreadPoolExecutor(1)
        self.sent: list[list[bytearray]] = []

    def order(self, counts: dict[str, int]) -> list[str]:
        """Those that decode first."""
        return sort_batch_req_ids(counts, {}, 1)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """What crosses to the core."""
        future: Future = self.thread.submit(self._cross, self.output())
        return future if non_block else future.result()

    def output(self) -> async_utils.AsyncOutput:
        """What V2's runner returns."""
        bounds = self.input_batch.query_start_loc_np.astype(np.int32)
        batch = SimpleNamespace(
            req_ids=self.batch,
            query_start_loc_np=np.concatenate((bounds, np.repeat(bounds[-1:], self.padding))),
            num_computed_tokens_np=self.input_batch.num_computed_tokens_np.astype(np.int32),
        )
        pending = None if self.connector is None else self.connector.prepare_output(batch)
        drawn = torch.from_numpy(self.drawn)[:, None]
        scores = -torch.from_numpy(np.log1p(self.drawn.astype(np.float32)))[:, None]
        sampled = torch.from_numpy(self.samples.astype(np.int32))
        output = ModelRunnerOutput(
            req_ids=self.batch,
            req_id_to_index={name: i for i, name in enumerate(self.batch)},
            sampled_token_ids=None,
            prompt_logprobs_dict={},
            prompt_token_id_logprobs_dict={},
        )
        with _no_streams():
            return async_utils.AsyncOutput(
                model_runner_output=output,
                sampler_output=SamplerOutput(
                    drawn, LogprobsTensors(drawn, scores, drawn[:, 0] % 7 + 1), None, sampled, torch.zeros_like(sampled)
                ),
                num_sampled_tokens=sampled,
                main_stream=mock.MagicMock(),
                copy_stream=mock.MagicMock(),
                check_ep_fault=False,
                pending_aux_output=pending,
            )

    def _cross(self, result: async_utils.AsyncOutput) -> ModelRunnerOutput:
        """The output, in memory of its own, while that of the last but one is written to again: two steps are under way at most."""
        if len(self.sent) > 1:
            buffers = self.sent.pop(0)
            for buffer in buffers:
                buffer[:] = bytes([GARBAGE]) * len(buffer)
        raw: list[pickle.PickleBuffer] = []
        main = pickle.dumps(result.get_output(), protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=raw.append)
        self.sent.append([bytearray(buffer.raw()) for buffer in raw])
        return pickle.loads(main, buffers=self.sent[-1])

    def shutdown(self) -> None:
        """Ends the thread too."""
        self.thread.shutdown()
        super().shutdown()

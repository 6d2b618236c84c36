"""The engine tells which experts it chose: routes of every finished request, on both of vLLM's model runners.

vLLM 0.31 carries routes from the worker to `RequestOutput.outputs[0].routed_experts` by itself: the router of each layer writes its
ids into a capture buffer, the worker's auxiliary-output connector cuts the buffer into requests and keeps finished blocks of 128
tokens under the hash of their KV block, and the scheduler attaches the rows to the request's output. So routes survive chunked
prefill, preemption and prefix-cache hits (the rows of a cached block come back with it), and cross processes with the output. A row that
is missing fails an assertion there and the step with it. (That is also why vLLM asks for prefix caching when routes are on.)

Two things are ours. `Capturer` keeps ids as int16 with -1 in layers without experts, and a step in which a layer with experts did
not report every token is refused when it is read. `RouteCPUModelRunner` feeds the connector from the V1 runner, the only one that runs
on a CPU; upstream does it in the V2 runner only, which CUDA uses.

Result: int16 [prompt + response - 1, num_hidden_layers, top_k], logical expert ids in ascending order, by absolute layer index.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig
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
        if not self._ours:
            return
        silent = [i for i in self._moe_layers if (step[:, i] < 0).any()]
        if silent:
            raise RuntimeError(f"no routes of some of {len(step)} tokens from layers {silent}")


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

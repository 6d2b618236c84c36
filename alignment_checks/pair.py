"""The two sides of a recipe in one process: the trainer as verl builds it and engine replicas as vLLM runs them, without Ray.

This is what `samebits verify` checks. The trainer is the class that verl's worker asks its registry for, made from the same
configuration; a replica is vLLM's engine with our plugin, our worker extension and the rollout's own settings. Two settings differ
from the rollout's on purpose: the context is as long as the checks need (more blocks than the indexer chooses), and prefill may be
chunked, since that is one of the things compared. CUDA graphs are off, so that taps can be recorded.

Everything that crosses from one side to the other goes through `Pair.sync` and `Replica.run`, tokens in and tokens out. The trainer's side
is `trainer_side`.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_file
from torch import Tensor

from samebits.quant.adapter import AdapterError, Manifest
from samebits.quant.checkpoint import Checkpoint

from .limits import Limits
from .sample import PairError as PairError
from .sample import Sample as Sample
from .trainer_side import TrainerSide

PROBE_CONTEXT = 2560
"""Tokens of context that the checks need: more than the 16 blocks of 128 that MiniMax-M3 chooses, and some pages."""
_WORKER_SAID = re.compile(r"Worker failed with error '(.*)', please check", re.DOTALL)
CPU_KV_BYTES = 1 << 28
"""KV cache of a replica on a CPU: what is not touched is held all the same."""
PREFILL_BUDGET = 2304
"""Tokens of one engine step: the longest probe alone is one prefill, beside another it is cut."""


class Replica:
    """One engine replica, of as many ranks as the recipe's replicas have, which answer in order."""

    sampling: Mapping[str, Any] = {}
    """Seam for faults: sampling parameters beside those of a check."""

    def __init__(self, config: DictConfig, index: int, seed: int) -> None:
        self.index = index
        self.ranks = int(config.actor_rollout_ref.rollout.tensor_model_parallel_size)
        try:
            from vllm import LLM

            self.llm = LLM(**_engine_options(config, seed))
        except Exception as error:  # vLLM raises whatever failed inside; here it is one thing: no engine
            raise PairError(f"engine replica {index} did not start: {_last_line(error)}") from error
        self.version: int | None = None
        """Adapter version that requests use; None: the base."""

    @property
    def model(self) -> Any:
        """The serving model, where it lives in this process: the seam at which faults of the engine are injected.

        Raises `PairError` where the replica has several ranks, which are processes of their own.
        """
        if self.ranks > 1:
            raise PairError(f"tensor_model_parallel_size={self.ranks}: the engine's model is in other processes and cannot be changed")
        core = self.llm.llm_engine.engine_core.engine_core
        return core.model_executor.driver_worker.worker.model_runner.get_model()

    def rpc(self, method: str, *args: Any) -> list[Any]:
        """Answers of all ranks. Raises `AdapterError` where a rank does."""
        try:
            return list(self.llm.collective_rpc(method, args=args))
        except RuntimeError as error:
            # From another process vLLM brings the words alone.
            said = _WORKER_SAID.match(str(error))
            if said is None:
                raise
            raise AdapterError(said[1]) from None

    def resident(self) -> set[int]:
        """Versions that are loaded, on every rank."""
        held = self.rpc("list_loras")
        return {i - 1 for i in set.intersection(*map(set, held))}

    def drop_prefix_cache(self) -> None:
        """Forget all cached keys and values."""
        self.llm.reset_prefix_cache()

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: int = 1,
        version: int | str | None = "current",
        temperature: float = 1.0,
        prompt_logprobs: bool = True,
        seed: int | None = None,
    ) -> list[Sample]:
        """Generate `tokens` tokens for each prompt in one batch.

        `version` selects an adapter, None the base, "current" what the last sync left. `seed` makes sampling repeatable and goes with
        prompts that are prefilled whole.
        """
        from vllm import SamplingParams

        from samebits.rollout.adapter import lora_request

        chosen = self.version if version == "current" else version
        params = [
            SamplingParams(
                max_tokens=tokens,
                temperature=temperature,
                ignore_eos=True,
                logprobs=0,
                prompt_logprobs=0 if prompt_logprobs else None,
                detokenize=False,
                seed=None if seed is None else seed + i,
                **self.sampling,
            )
            for i in range(len(prompts))
        ]
        request = None if chosen is None else [lora_request(chosen)] * len(prompts)
        outputs = self.llm.generate([{"prompt_token_ids": list(p)} for p in prompts], params, use_tqdm=False, lora_request=request)
        return [_sample(o) for o in outputs]

    def record(self, prompt: Sequence[int], points: list[str] | None = None, version: int | str | None = "current") -> dict[str, Tensor]:
        """What the engine computed at its taps for one prompt, prefilled whole, cache empty: point to [T, ...]."""
        self.drop_prefix_cache()
        self.rpc("samebits_record", points)
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "taps.safetensors")
            try:
                self.run([prompt], version=version, prompt_logprobs=True)
            finally:
                order = self.rpc("samebits_recorded", path)[0]
            found = load_file(path)
        return {point: found[point] for point in order}


@dataclass
class Pair:
    """A trainer and its engine replicas."""

    trainer: TrainerSide
    replicas: list[Replica]
    checkpoint: Checkpoint
    limits: Limits
    vocabulary: int
    """Token ids below this have a token."""
    reports: list[dict[str, Any]] = field(default_factory=list)
    """What the last sync sent and what every replica answered, as `rollout.server.SyncReport` has it."""
    wire: Any = None
    """Seam for faults: a function (replica, tensors, origin) -> (tensors, origin) or None for "nothing is sent"."""

    def sync(self) -> list[dict[str, Any]]:
        """Export, send to every replica, ask what is held; a replica uses the version only when its answer equals the manifest."""
        started = time.time()
        self.reports = [self._send(replica, started) for replica in self.replicas]
        return self.reports

    def _send(self, replica: Replica, started: float) -> dict[str, Any]:
        from samebits.rollout.wire import adapter_file

        tensors, origin = self.trainer.export()
        if self.wire is not None:
            changed = self.wire(replica, tensors, dict(origin))
            if changed is None:
                return next((r for r in self.reports if r["replica"] == replica.index), None)
            tensors, origin = changed
        version = origin["version"]
        refused = None
        with adapter_file(tensors, version, origin["profile"], world=replica.ranks) as (path, manifest):
            if version in replica.resident():
                replica.rpc("samebits_remove_adapter", version)
            try:
                held = replica.rpc("samebits_load_adapter", path, manifest.to_json())
            except AdapterError as error:
                refused, held = str(error), []
        replica.drop_prefix_cache()
        if manifest.agrees([Manifest.from_json(answer) for answer in held]):
            replica.version = version
            for old in replica.resident() - {version}:
                replica.rpc("samebits_remove_adapter", old)
        return {
            "replica": replica.index,
            "version": version,
            "tensors": len(manifest.digests),
            "bytes": manifest.bytes,
            "seconds": time.time() - started,
            "sent": manifest.to_json(),
            "held": held,
            "refused": refused,
        }


def start(config: DictConfig, folder: Path, limits: Limits, vocabulary: int, seed: int = 0, replicas: int = 1) -> Pair:
    """Start both sides of a composed and validated verl configuration.

    Args:
        config: verl's complete configuration, as a job would get it. folder: the checkpoint.
        vocabulary: number of token ids that have a token. replicas: engine replicas to start.
    Raises `PairError` in one line.
    """
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if config.trainer.device == "cpu":
        environment |= {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "TORCHDYNAMO_DISABLE": "1",
            "VERL_PLATFORM": "cpu",
        }
    os.environ |= environment
    try:
        trainer = TrainerSide(config)
    except (AdapterError, ValueError, RuntimeError, OSError) as error:
        raise PairError(f"the trainer did not start: {_last_line(error)}") from error
    engines = [Replica(config, i, seed) for i in range(replicas)]
    for engine in engines:  # as verl does with the engines of a job; the trainer counts tokens alone too
        engine.rpc("monkey_patch_model", vocabulary)
    return Pair(trainer, engines, Checkpoint(folder), limits, vocabulary)


def _engine_options(config: DictConfig, seed: int) -> dict[str, Any]:
    """vLLM arguments of a replica, from verl's rollout section."""
    rollout = config.actor_rollout_ref.rollout
    model = config.actor_rollout_ref.model
    extra = OmegaConf.to_container(rollout.engine_kwargs.vllm, resolve=True)
    extra.pop("distributed_executor_backend", None)
    memory = {"kv_cache_memory_bytes": CPU_KV_BYTES} if config.trainer.device == "cpu" else {}
    return memory | {
        "model": model.path,
        "dtype": rollout.dtype,
        "max_model_len": max(PROBE_CONTEXT, rollout.max_model_len or 0),
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": PREFILL_BUDGET,
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "enforce_eager": True,
        "enable_prefix_caching": rollout.enable_prefix_caching,
        "enable_chunked_prefill": True,
        "tensor_parallel_size": rollout.tensor_model_parallel_size,
        "enable_lora": True,
        "max_lora_rank": model.lora_rank,
        "max_loras": 2,
        "enable_return_routed_experts": rollout.enable_rollout_routing_replay,
        "logprobs_mode": rollout.logprobs_mode,
        "worker_extension_cls": "samebits.rollout.worker.WorkerExtension",
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "seed": seed,
        **extra,
    }


def _sample(output: Any) -> Sample:
    out = output.outputs[0]
    ids = list(out.token_ids)
    prompt = None
    if output.prompt_logprobs is not None:
        wanted = output.prompt_token_ids[1:]
        prompt = torch.tensor([row[t].logprob for t, row in zip(wanted, output.prompt_logprobs[1:], strict=True)], dtype=torch.float32)
    logprobs = torch.tensor([row[t].logprob for t, row in zip(ids, out.logprobs, strict=True)], dtype=torch.float32)
    routes = None if out.routed_experts is None else np.asarray(out.routed_experts)
    return Sample(list(output.prompt_token_ids), ids, logprobs, prompt, routes, output.num_cached_tokens or 0)


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:400]

"""The two sides of a recipe in one process: the trainer as verl builds it and engine replicas as vLLM runs them, without Ray.

This is what `samebits verify` checks. The trainer is the class that verl's worker asks its registry for, made from the same
configuration; a replica is vLLM's engine with our plugin, our worker extension and the rollout's own settings. Two settings differ
from the rollout's on purpose: the context is as long as the checks need (more blocks than the indexer chooses), and prefill may be
chunked, since that is one of the things compared. CUDA graphs are off, so that taps can be recorded.

Everything that crosses from one side to the other goes through `Pair.sync` and `Replica.run`, tokens in and tokens out.
"""

from __future__ import annotations

import os
import re
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_file
from torch import Tensor

from samebits.kernels import taps
from samebits.kernels.linear import values
from samebits.quant.adapter import AdapterError, AdapterSpec, Manifest, parse_name
from samebits.quant.checkpoint import Checkpoint
from samebits.quant.digests import digests
from samebits.quant.profile import NumericsProfile

from .limits import Limits

PROBE_CONTEXT = 2560
"""Tokens of context that the checks need: more than the 16 blocks of 128 that MiniMax-M3 chooses, and some pages."""
_WORKER_SAID = re.compile(r"Worker failed with error '(.*)', please check", re.DOTALL)
PREFILL_BUDGET = 2304
"""Tokens of one engine step: the longest probe alone is one prefill, beside another it is cut."""


class PairError(RuntimeError):
    """One of the two sides could not be started or asked. The message is one line."""


@dataclass(slots=True)
class Sample:
    """What an engine said about one sequence."""

    prompt: list[int]
    ids: list[int]
    """Response tokens."""
    logprobs: Tensor
    """fp32 [response], of the generated tokens, at the temperature of the request."""
    prompt_logprobs: Tensor | None
    """fp32 [prompt - 1], of prompt tokens 1.., or None where they were not asked for."""
    routes: np.ndarray | None
    """int16 [prompt + response - 1, layers, k]."""
    cached: int
    """Prompt tokens that came out of the prefix cache."""

    @property
    def tokens(self) -> list[int]:
        """Prompt and response."""
        return self.prompt + self.ids


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


class TrainerSide:
    """verl's training engine of the recipe, in this process."""

    def __init__(self, config: DictConfig) -> None:
        import samebits.trainer.plugin  # noqa: F401  (makes verl know samebits)

        _start_group()
        from verl.utils.config import omega_conf_to_dataclass
        from verl.workers.engine import EngineRegistry

        actor = config.actor_rollout_ref.actor
        model = omega_conf_to_dataclass(config.actor_rollout_ref.model)
        optim = omega_conf_to_dataclass(actor.optim)
        settings = omega_conf_to_dataclass(actor.fsdp_config)
        settings.use_remove_padding = model.use_remove_padding
        self.actor = actor
        self.engine = EngineRegistry.new(
            model_type="language_model",
            backend="fsdp2",
            model_config=model,
            engine_config=settings,
            optimizer_config=optim,
            checkpoint_config=omega_conf_to_dataclass(actor.checkpoint),
        )
        self.engine.initialize()
        self.cap = float(config.algorithm.rollout_correction.rollout_is_threshold)

    @property
    def module(self) -> Any:
        """The training model: the seam at which faults of the trainer are injected."""
        return self.engine.module

    @property
    def spec(self) -> AdapterSpec:
        """What the adapter consists of."""
        return self.module.spec

    @property
    def dims(self) -> Any:
        """Shape of the model."""
        return self.module.dims

    @property
    def profile(self) -> NumericsProfile:
        """What the trainer computes with."""
        return self.module.profile

    def masters(self) -> dict[str, Tensor]:
        """fp32 master weights under wire names, read out of the optimizer's parameters without going through the export."""
        from samebits.quant.adapter import tensor_name
        from samebits.quant.roles import ModuleId

        out = {}
        for layer in self.module.layers:
            for pair in layer.lora.pairs.values() if layer.lora is not None else ():
                for side, parameter in (("A", pair.lora_A), ("B", pair.lora_B)):
                    whole = _whole(parameter)
                    for expert in range(pair.experts) if pair.experts else (-1,):
                        name = tensor_name(ModuleId(pair.role, pair.layer, expert), side)
                        out[name] = whole[expert] if pair.experts else whole
        return out

    def set_masters(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Replace the adapter: `tensors` as the wire has them, scale folded into B. Raises `AdapterError`."""
        self.spec.check(tensors)
        scale = self.module.settings.scale
        self.put_masters({n: t.float() / (scale if parse_name(n)[1] == "B" else 1.0) for n, t in tensors.items()}, version)

    def put_masters(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Replace the fp32 masters, as `masters` gives them."""
        self.engine.adapter_version = version
        from samebits.quant.adapter import tensor_name
        from samebits.quant.roles import ModuleId

        with torch.no_grad():
            for layer in self.module.layers:
                for pair in layer.lora.pairs.values() if layer.lora is not None else ():
                    for side, parameter in (("A", pair.lora_A), ("B", pair.lora_B)):
                        names = [tensor_name(ModuleId(pair.role, pair.layer, e), side) for e in range(pair.experts)]
                        names = names or [tensor_name(ModuleId(pair.role, pair.layer, -1), side)]
                        stack = [tensors[n] for n in names]
                        whole = torch.stack(stack) if pair.experts else stack[0]
                        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                        if local.shape != whole.shape:
                            raise PairError("the trainer is sharded over several ranks; checks run on one")
                        local.copy_(whole)

    def randomise(self, seed: int, scale: float, version: int) -> None:
        """fp32 masters that bf16 does not hold, every element of A and B non-zero and every tensor different."""
        g = torch.Generator().manual_seed(seed)
        tensors = {}
        for name, shape in self.spec.shapes().items():
            spread = shape[1] ** -0.5 if parse_name(name)[1] == "A" else scale / self.spec.rank**0.5
            tensors[name] = torch.randn(shape, generator=g) * spread
        self.put_masters(tensors, version)

    def export(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What verl would hand to the rollout: wire name to CPU tensor, and {version, profile}."""
        tensors, config = self.engine.get_per_tensor_param(base_sync_done=True)
        return {name: t.detach().to("cpu", copy=True) for name, t in tensors}, config["samebits"]

    def batch(
        self,
        samples: Sequence[Sample],
        temperature: float = 1.0,
        routes: Sequence[np.ndarray | None] | None = None,
        advantages: Sequence[Tensor] | None = None,
    ) -> Any:
        """The mini-batch that verl would train on. `routes` [tokens - 1, layers, k] of each sample, or None."""
        from verl.utils import tensordict_utils as tu

        ids = [torch.tensor(s.tokens) for s in samples]
        responses = [torch.tensor(s.ids) for s in samples]
        mask = _nested([torch.ones(len(r), dtype=torch.int64) for r in responses])
        logprobs = _nested([s.logprobs.float() for s in samples])
        fields = {
            "prompts": _nested([torch.tensor(s.prompt) for s in samples]),
            "responses": _nested(responses),
            "input_ids": _nested(ids),
            "position_ids": _nested([torch.arange(len(x)) for x in ids]),
            "response_mask": mask,
            "loss_mask": mask.clone(),
            "rollout_log_probs": logprobs,
            "old_log_probs": logprobs.clone(),
            "advantages": _nested(list(advantages) if advantages is not None else [torch.ones(len(r)) for r in responses]),
        }
        if routes is not None:
            fields["routed_experts"] = _nested([_padded_routes(r) for r in routes])
        scalars = {
            "temperature": temperature,
            "max_token_len_per_gpu": 10**7,
            "use_dynamic_bsz": True,
            "global_batch_size": len(ids),
            "calculate_entropy": False,
        }
        return tu.get_tensordict(fields, scalars)

    def logprobs(self, samples: Sequence[Sample], temperature: float = 1.0, routes: Sequence[np.ndarray] | None = None) -> list[Tensor]:
        """fp32 [tokens - 1] of each sample, through verl's own forward. Routes are replayed where given."""
        batch = self.batch(samples, temperature, routes)
        with self._replaying(routes is not None), self.engine.eval_mode():
            out = self.engine.infer_batch(batch, loss_function=None)
        rows = out["model_output"]["log_probs"]
        rows = rows.unbind() if isinstance(rows, Tensor) else [r for part in rows for r in part.unbind()]
        return [r[:-1].float().cpu() for r in rows]

    def loss_and_gradients(
        self, samples: Sequence[Sample], advantages: Sequence[Tensor], routes: Sequence[np.ndarray] | None = None, max_tokens: int = 10**7
    ) -> tuple[float, dict[str, float], dict[str, Tensor]]:
        """(loss, metrics, gradient of every master parameter) of one mini-batch through verl's loss; no step is taken."""
        from functools import partial

        from verl.utils.config import omega_conf_to_dataclass
        from verl.workers.utils.losses import ppo_loss

        actor = omega_conf_to_dataclass(self.actor)
        batch = self.batch(samples, 1.0, routes, advantages)
        from verl.utils import tensordict_utils as tu

        tu.assign_non_tensor(batch, max_token_len_per_gpu=max_tokens)
        with self._replaying(routes is not None), self.engine.train_mode():
            self.engine.optimizer_zero_grad()
            out = self.engine.forward_backward_batch(batch, partial(ppo_loss, config=actor), forward_only=False)
            gradients = {n: _whole(p.grad) for n, p in self.module.adapter_parameters() if p.grad is not None}
            self.engine.optimizer_zero_grad()
        loss = float(sum(out["loss"]) if isinstance(out["loss"], list) else out["loss"])
        return loss, _reduced(out["metrics"]), gradients

    def capture(self, tokens: Sequence[Sequence[int]], routes: Sequence[np.ndarray] | None = None) -> Any:
        """`M3Output` with the routes and block choices that the model takes for a packed batch."""
        device = next(self.module.parameters()).device
        ids = torch.tensor([t for row in tokens for t in row], device=device)
        given = None
        if routes is not None:
            given = torch.cat([_padded_routes(r) for r in routes]).to(device)
        with torch.no_grad(), self.engine.eval_mode():
            return self.module(ids, [len(t) for t in tokens], ids.roll(-1), torch.ones(len(ids), device=device), given, capture=True)

    def record(self, tokens: Sequence[int]) -> dict[str, Tensor]:
        """What the trainer computed at its taps for one sequence: point to [T, ...]."""
        with taps.record() as recorder:
            self.capture([tokens])
        return recorder.tensors()

    def base_digests(self) -> dict[str, str]:
        """Digest of the fp32 values of every frozen weight as the trainer holds it, by module path."""
        return digests((path, values(weight).float()) for path, weight in self.module.base_weights())

    @contextmanager
    def _replaying(self, on: bool) -> Iterator[None]:
        kept, self.engine.replay = self.engine.replay, on
        try:
            yield
        finally:
            self.engine.replay = kept


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
            "VLLM_CPU_KVCACHE_SPACE": "1",
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
    return {
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


def _start_group() -> None:
    """A process group of one, as verl's worker starts it."""
    import verl.utils.distributed as distributed

    if dist.is_initialized():
        return
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    distributed.initialize_global_process_group_ray()


def _whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).float().cpu().clone()


def _nested(rows: Sequence[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def _padded_routes(routes: np.ndarray) -> Tensor:
    """One row for each token: the engine has none for the last, which was never fed back."""
    rows = torch.from_numpy(np.asarray(routes, dtype=np.int16))
    return torch.cat((rows, torch.full_like(rows[:1], -1)))


def _reduced(metrics: Mapping[str, Any]) -> dict[str, float]:
    """verl's metrics of micro-batches as numbers."""
    out = {}
    for name, value in metrics.items():
        if hasattr(value, "aggregate"):
            out[name] = float(value.aggregate())
        elif isinstance(value, list) and value and hasattr(value[0], "aggregate"):
            merged = type(value[0])(value[0].aggregation, [x for v in value for x in (v.values if hasattr(v, "values") else [v])])
            out[name] = float(merged.aggregate())
    return out


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:400]

"""The trainer of a pair: verl's training engine of a recipe in this process, asked for logprobs, gradients, routes and what it holds."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import Tensor

from samebits.kernels import taps
from samebits.kernels.linear import values
from samebits.quant.adapter import AdapterSpec, parse_name
from samebits.quant.digests import digests
from samebits.quant.profile import NumericsProfile

from .sample import PairError, Sample


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

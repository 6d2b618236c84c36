"""verl's training engine for a packed MiniMax-M3: FSDP2 over the training model, AdamW on the adapter alone.

It is verl's own FSDP engine with another model inside. verl keeps the mini-batch loop, gradient accumulation, clipping, schedules and
off-loading; this file says how the model is built and sharded, what a forward step is, and what leaves for the rollout engine: always
the adapter, never the base. For a checkpoint that is not ours the registered class steps aside for verl's engine.

What a recipe sets, all through verl's own configuration:
    model.lora_rank, model.lora_alpha, model.target_modules (groups or roles of `quant.adapter.target_roles`, e.g. "all")
    model.override_config.samebits_profile, .samebits_kv_cache (default: the checkpoint's profile, its KV format)
    model.enable_gradient_checkpointing (keep only each layer's input), model.override_config.samebits_recompute_experts (keep gate and up
    of experts out of what forward keeps: for runs that keep layers whole; default false)
    model.override_config.samebits_expert_parallel (true: each rank holds its share of the routed experts and their adapters for good, and
    tokens travel, over the ranks that FSDP2 shards over; default false: they are sharded and gathered like everything else)
    model.override_config.samebits_parity (a folder: every logprob must have the engine's bits, and what differs is recorded there),
    .samebits_old_logprobs ("recomputed": the trainer's own, an ablation; default the rollout's)
    actor.fsdp_config.seed (adapter init), actor.fsdp_config.router_replay.mode (R3: replay the rollout's routes)
    actor.policy_loss.loss_mode = samebits_tis
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, TaskType
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name
from verl.utils.metric import AggregationType, Metric
from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead
from verl.workers.engine.utils import detach_tree

from samebits.kernels import taps, tracing
from samebits.kernels.expert_tiles import takes_tiles
from samebits.kernels.meter import Meter
from samebits.quant.adapter import target_roles
from samebits.quant.checkpoint import Checkpoint
from samebits.quant.profile import NumericsProfile, get_profile
from samebits.quant.roles import MODULE_PATHS
from samebits.quant.stacks import StackedTensors

from . import expert_ranks, hf_config, verl_patches
from .batch import PackedBatch, pack, require_equal_work, require_objective_fields, require_routes, without_row_objects
from .checkpointing import AdapterCheckpointManager
from .early_export import EarlyExport, worthwhile
from .held import held_bytes
from .lora import LoRASettings
from .model import M3ForTraining, M3Output, compute_dtype
from .objective import POLICY_LOSS, collect_metrics
from .parity import require_same_bits

_OVERRIDES = (
    "samebits_profile",
    "samebits_kv_cache",
    "samebits_recompute_experts",
    "samebits_expert_parallel",
    "samebits_parity",
    "samebits_old_logprobs",
)
KEEP_MEMORY = "SAMEBITS_KEEP_MEMORY"
"""Environment variable: 1 where the engine does not sleep, so that a rank's cached memory stays with it between steps."""
_AGGREGATION = {"sum": AggregationType.SUM, "max": AggregationType.MAX}


class SamebitsEngine(FSDPEngineWithLMHead):
    """FSDP2 engine of the packed model. `adapter_version` is the number of optimizer steps in the adapter."""

    def __new__(cls, model_config: Any, *args: Any, **kwargs: Any):
        """verl asks for an engine by strategy and device only, so this class is asked for every model and returns verl's for others."""
        if (model_config.architectures or [None])[0] != hf_config.ARCHITECTURE:
            return FSDPEngineWithLMHead(model_config, *args, **kwargs)
        return super().__new__(cls)

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> None:
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)
        self._require_supported()
        self.adapter_version = 0
        self.replay = engine_config.router_replay.mode == "R3"
        self._route_pairs = 0
        override = model_config.override_config
        self.parity = Path(override["samebits_parity"]) if override.get("samebits_parity") else None
        old = override.get("samebits_old_logprobs", "rollout")
        if old not in ("rollout", "recomputed"):
            raise ValueError(f"override_config samebits_old_logprobs must be rollout or recomputed, not {old!r}")
        self.recomputed = old == "recomputed"
        self._batch: TensorDict | None = None
        """What `forward_backward_batch` was given, for the name of a sample."""
        self.meter = Meter(get_device_name(), tracing.boundary())
        """Phases score, forward, backward and optimizer; `train_batch` reports them."""
        self._early: EarlyExport | None = None
        """The export of the step just taken. Whoever changes masters by other means than the optimizer calls `forget_export`."""

    def _require_supported(self) -> None:
        engine, model = self.engine_config, self.model_config
        refused = {
            f"strategy {engine.strategy} (use fsdp2)": engine.strategy != "fsdp2",
            "ulysses_sequence_parallel_size > 1": engine.ulysses_sequence_parallel_size > 1,
            "pad_to_length": engine.pad_to_length,
            "quantization-aware training": self._qat_enabled,
            f"router_replay.mode {engine.router_replay.mode}": engine.router_replay.mode == "R2",
            "use_fused_kernels": model.use_fused_kernels,
            "enable_activation_offload": model.enable_activation_offload,
            "lora.merge": bool(model.lora.get("merge", False)),
            "lora_adapter_path": model.lora_adapter_path is not None,
            "lora_rank 0": model.lora_rank <= 0 and not engine.forward_only,
            "samebits_expert_parallel with offload_policy": engine.offload_policy
            and bool(model.override_config.get("samebits_expert_parallel")),
        }
        for what, found in refused.items():
            if found:
                raise ValueError(f"the samebits training engine does not support {what}")

    def initialize(self) -> None:
        """Build the sharded model, optimizer, schedule and checkpoint manager."""
        if os.environ.get(KEEP_MEMORY) == "1":
            verl_patches.keep_cached_memory()
        self._build_model_optimizer()
        self.checkpoint_manager = AdapterCheckpointManager(self)
        offload = self._is_offload_param
        self.to(device="cpu", model=offload, optimizer=self._is_offload_optimizer, grad=offload)

    def _build_module(self) -> M3ForTraining:
        config, override = self.model_config, self.model_config.override_config
        unknown = sorted(key for key in override if key.startswith("samebits_") and key not in _OVERRIDES)
        if unknown:
            raise ValueError(f"unknown override_config {', '.join(unknown)}; known: {', '.join(_OVERRIDES)}")
        for key in ("samebits_recompute_experts", "samebits_expert_parallel"):
            if not isinstance(override.get(key, False), bool):
                raise ValueError(f"override_config {key} must be true or false, not {override[key]!r}")
        checkpoint = Checkpoint(config.local_path)
        profile = get_profile(override.get("samebits_profile", checkpoint.config["samebits"]["profile"]), override.get("samebits_kv_cache"))
        if self.parity is not None and pack_device(profile) is None:
            raise ValueError("numerics.parity=bitwise needs bf16 activations on a GPU that the kernels run on (Hopper or later)")
        settings = None
        if config.lora_rank > 0:
            roles = target_roles(config.target_modules)
            settings = LoRASettings(config.lora_rank, config.lora_alpha, roles, self.engine_config.seed)
        experts_over = self.device_mesh if override.get("samebits_expert_parallel", False) else None
        module = M3ForTraining(checkpoint, profile, settings, self._shard, pack_device(profile), experts_over)
        if config.tokenizer is not None:
            module.only_tokens(len(config.tokenizer))
        module.checkpoint_activations(config.enable_gradient_checkpointing)
        module.recompute_experts(override.get("samebits_recompute_experts", False))
        return module

    def _shard(self, module: nn.Module) -> None:
        """Shard one layer, or at last the model. No mixed precision: every parameter keeps its dtype, packed bytes and fp32 masters."""
        options: dict[str, Any] = {"mesh": self.device_mesh}
        if (self.engine_config.offload_policy or self.engine_config.forward_only) and get_device_name() != "cpu":
            self._is_offload_param = self._is_offload_optimizer = False
            self._uses_fsdp2_cpu_offload_policy = True
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=True)
        if not isinstance(module, M3ForTraining):
            options["reshard_after_forward"] = self.engine_config.reshard_after_forward
            # Experts that are spread over ranks are DTensors before FSDP2 makes any.
            options["ignored_params"] = {p for p in module.parameters() if isinstance(p, DTensor)}
        fully_shard(module, **options)

    def _build_lora_module(self, module: M3ForTraining) -> M3ForTraining:
        return module  # the adapter is part of the model

    def _build_fsdp_module(self, module: M3ForTraining) -> M3ForTraining:
        return module  # each layer was sharded as soon as it was built

    def _build_optimizer(self, module: M3ForTraining) -> torch.optim.Optimizer:
        from verl.workers.config.optimizer import build_optimizer

        optimizer = build_optimizer([p for _, p in module.adapter_parameters()], self.optimizer_config)
        if worthwhile(module.spec, torch.device(get_device_name())) and not self._uses_fsdp2_cpu_offload_policy:
            optimizer.register_step_post_hook(lambda *_: self._begin_export())
        return optimizer

    def _begin_export(self) -> None:
        # Behind the optimizer's kernels, before the host waits for them.
        masters = [parameter for _, parameter in self.module.adapter_parameters()]
        self._early = EarlyExport(self.adapter_version + 1, self.module.export_stacks(), masters, masters[0].device)

    def forget_export(self) -> None:
        """The masters are no longer those of the last step."""
        self._early = None

    def forward_backward_batch(self, data: TensorDict, loss_function: Callable | None, forward_only: bool = False) -> Any:
        """verl's mini-batch loop, after the batch was found complete. Raises `BatchError` in one line before the first forward."""
        if _policy_loss_of(loss_function) == POLICY_LOSS:
            require_objective_fields(data, self.recomputed)
        if self.replay:
            pairs = torch.tensor(require_routes(data, self.module.dims), device=get_device_id())
            torch.distributed.all_reduce(pairs, group=self.get_data_parallel_group())
            self._route_pairs = int(pairs)
        require_equal_work(data, self.get_data_parallel_group(), get_device_id())
        self._batch = data
        try:
            return super().forward_backward_batch(without_row_objects(data), loss_function, forward_only)
        finally:
            self._batch = None
            self.meter.stop()

    def train_batch(self, data: TensorDict, loss_function: Callable) -> Any:
        """verl's, with what its phases took (and scoring since the last step) among the metrics, of the rank that took most."""
        with tracing.recording("train", self.adapter_version + 1, lambda: held_bytes(self.module, self.optimizer)):
            out = super().train_batch(data, loss_function)
        for name, phase in self.meter.take().items():
            out["metrics"][f"phase/{name}/seconds"] = Metric(AggregationType.MAX, phase.seconds)
            out["metrics"] |= {f"phase/{name}/{kind}": Metric(AggregationType.MAX, size) for kind, size in phase.memory.items()}
        return out

    def forward_step(self, micro_batch: TensorDict, loss_function: Callable | None, forward_only: bool):
        """One micro-batch to (loss, {model_output, loss, metrics}). What follows until the next is its backward."""
        self.meter.enter("score" if forward_only else "forward")
        out = self._forward_step(micro_batch, loss_function)
        if not forward_only:
            self.meter.enter("backward")
        return out

    def _forward_step(self, micro_batch: TensorDict, loss_function: Callable | None) -> tuple[Tensor, dict[str, Any]]:
        lengths = micro_batch["input_ids"].offsets().diff().tolist()
        micro_batch = micro_batch.to(get_device_id())
        batch = pack(micro_batch, self.replay, lengths)
        entropy = tu.get_non_tensor_data(data=micro_batch, key="calculate_entropy", default=False)
        out: M3Output = self.module(*batch, entropy=entropy)
        if out.logprobs.requires_grad and (fault := injected_fault(self.adapter_version + 1)):
            out.logprobs.register_hook(fault)
        offsets = micro_batch["input_ids"].offsets()
        model_output = {"log_probs": torch.nested.nested_tensor_from_jagged(out.logprobs, offsets)}
        if entropy:
            model_output["entropy"] = torch.nested.nested_tensor_from_jagged(out.entropy, offsets)
        if loss_function is None:
            loss, metrics = torch.ones((), device=out.logprobs.device), {}
        else:
            if self.parity is not None and _policy_loss_of(loss_function) == POLICY_LOSS:
                self._require_same_bits(out.logprobs, micro_batch, batch)
            old_is_other = self.recomputed and "rollout_log_probs" in micro_batch
            with collect_metrics(micro_batch["rollout_log_probs"].to_padded_tensor(0.0) if old_is_other else None) as exact:
                loss, metrics = loss_function(model_output=model_output, data=micro_batch, dp_group=self.get_data_parallel_group())
            metrics |= {name: Metric(_AGGREGATION[part.how], part.value) for name, part in exact.items()}
        if self.replay:
            metrics |= self._replay_metrics(out, batch.routes)
        return loss, {"model_output": detach_tree(model_output), "loss": loss.detach().item(), "metrics": metrics}

    def _require_same_bits(self, logprobs: Tensor, micro_batch: TensorDict, packed: PackedBatch) -> None:
        starts = micro_batch["input_ids"].offsets().tolist()

        def record(row: int, count: int) -> dict[str, Tensor]:
            part = slice(starts[row], starts[row] + count)
            rows = [None if choices is None else choices[part] for choices in (packed.routes, packed.blocks)]
            with torch.no_grad(), taps.record() as recorder:
                self.module(packed.tokens[part], [count], packed.labels[part], packed.temperature[part], *rows)
            return recorder.tensors()

        group, step = self.get_data_parallel_group(), self.adapter_version + 1
        require_same_bits(logprobs, micro_batch, self._batch, step, self.parity, record, group)

    def _replay_metrics(self, out: M3Output, routes: Tensor) -> dict[str, Metric]:
        dims = self.module.dims
        expected = (routes[:, :, 0] >= 0).sum(0)
        moe_layers = list(dims.shape.moe_layers)
        if not torch.equal(out.replayed[moe_layers], expected[moe_layers]):
            raise RuntimeError(f"routes were replayed in {out.replayed.tolist()} rows a layer, not in {expected.tolist()}")
        ranks = self.get_data_parallel_size()
        layers = int((out.replayed > 0).sum())
        return {
            "replay/layers": Metric(AggregationType.MAX, layers),
            "replay/rows": Metric(AggregationType.SUM, int(out.replayed.max()) * ranks),
            "replay/agreement": Metric(AggregationType.SUM, int(out.agreed.sum()) * ranks / max(self._route_pairs, 1)),
        }

    def optimizer_step(self) -> float:
        """Clip, step and count. Raises `RuntimeError` when the gradient is not finite: no adapter version may go missing silently."""
        self.meter.enter("optimizer")
        for _, parameter in self.module.adapter_parameters():
            expert_ranks.reduce(parameter)
        grad_norm = super().optimizer_step()
        self.meter.stop()
        if not torch.isfinite(torch.tensor(grad_norm)):
            raise RuntimeError(f"gradient norm is {grad_norm} after adapter version {self.adapter_version}; no step was taken")
        self.adapter_version += 1
        return grad_norm

    def get_per_tensor_param(
        self, layered_summon: bool = False, base_sync_done: bool = True, **kwargs: Any
    ) -> tuple[StackedTensors, dict[str, Any]]:
        """The adapter for the rollout: (PEFT name, bf16 tensor) pairs, which may be had by stacks, and the PEFT config.

        Every rank must drain them: some modules are gathered at a time unless that is done already (`early_export`). The config
        also holds, under `samebits`, the adapter version, the hash of the numerics profile, and shapes and dtype of the tensors. Raises
        `RuntimeError` when the base is asked for: the rollout engine must load it from the checkpoint.
        """
        if not base_sync_done:
            raise RuntimeError("the base is frozen and never sent; set actor_rollout_ref.rollout.load_format=safetensors")
        if self.module.spec is None:
            raise RuntimeError("this engine has no adapter to send")
        rank = self.module.spec.rank
        targets = sorted({MODULE_PATHS[r].rsplit(".", 1)[-1] for r in self.module.spec.roles})
        config = LoraConfig(r=rank, lora_alpha=rank, target_modules=targets, task_type=TaskType.CAUSAL_LM, bias="none").to_dict()
        config["samebits"] = {
            "version": self.adapter_version,
            "profile": self.module.profile.hash,
            "shapes": self.module.spec.shapes(),
            "dtype": self.module.spec.dtype,
        }
        early, self._early = self._early, None
        if early is not None and early.version == self.adapter_version:
            return StackedTensors(early.drain()), config
        return StackedTensors(self.module.export_stacks()), config


def injected_fault(step: int) -> Callable[[Tensor], None] | None:
    """What a recipe's injected fault does in the backward of `step`, given a gradient; None where it does nothing there."""
    fault = json.loads(os.environ.get("SAMEBITS_FAULT", "{}"))
    return {"oom": _run_out_of_memory, "hang": _hang}.get(fault.get("kind")) if fault.get("step") == step else None


def _run_out_of_memory(gradient: Tensor) -> None:
    """On a GPU ask for more memory than it has; on a CPU raise what backward would meet there, in the words of torch's allocator."""
    if gradient.is_cuda:
        torch.empty(2 * torch.cuda.get_device_properties(gradient.device).total_memory, dtype=torch.uint8, device=gradient.device)
    wanted = "Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.81 GiB of which 1.12 GiB is free"
    raise torch.OutOfMemoryError(f"CUDA out of memory. {wanted} (injected fault oom).")


def _hang(gradient: Tensor) -> None:
    """Wait for good, as for a peer that is gone."""
    threading.Event().wait()


def pack_device(profile: NumericsProfile) -> torch.device | None:
    """Where to reorder the base for the Hopper kernels, or None where `profile` or verl's device has no use for them."""
    device = torch.device(get_device_name())
    return device if takes_tiles(device, compute_dtype(profile)) else None


def _policy_loss_of(loss_function: Callable | None) -> str | None:
    """Name of the policy loss inside verl's `partial(ppo_loss, config=...)`, or None for another function."""
    config = getattr(loss_function, "keywords", {}).get("config")
    policy_loss = getattr(config, "policy_loss", None)
    return policy_loss.loss_mode if policy_loss is not None else None


def register() -> None:
    """Register the engine for FSDP2 on CPU and on NVIDIA GPUs."""
    for device, vendor in (("cpu", "cpu"), ("cuda", "nvidia")):
        registered = EngineRegistry._engines.get("language_model", {}).get("fsdp2", {})
        if registered.get((device, vendor)) is not SamebitsEngine:
            EngineRegistry.register("language_model", "fsdp2", device, vendor)(SamebitsEngine)

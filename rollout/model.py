"""MiniMax-M3's text model for vLLM, out of samebits operations.

vLLM brings the scheduler, the paged cache, the sampler and the groups of processes; every product, norm, rotation, routing decision and
activation is an operation of `kernels`, the same that the trainer calls. Left out of upstream's model: fusions of norm and all-reduce, fp8
queries and caches, pipeline stages, the vision tower, multi-token prediction.

On a replica of several ranks every rank has all tokens and a part of each large weight (`quant.ranks`). Outputs are gathered as soon as
the next operation needs all of them, and no sum is split, so that every rank has the bits of a replica of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.models.interfaces import SupportsLoRA

from samebits.kernels.activation import SwiGLU, swiglu_oai
from samebits.kernels.expert_tiles import takes_tiles
from samebits.kernels.linear import LoRA, frozen_linear
from samebits.kernels.linear_tiles import MXFP8Tiles
from samebits.kernels.mlp import MLPLoRA, SharedExpert, mlp, mlp_activation, moe_with_shared
from samebits.kernels.moe import moe, route_topk
from samebits.kernels.norm import gemma_rms_norm, gemma_rms_norm_add
from samebits.kernels.rope import rope_table
from samebits.kernels.sums import summed_in
from samebits.kernels.taps import tap
from samebits.quant.roles import MODULE_PATHS, NOT_TEXT, module_id, strip_prefixes
from samebits.quant.stacks import Stacked, StackedTensors

from . import settings as engine_settings
from . import vllm_patches
from .attention import Attention, Rotation
from .group import Group
from .layers import Embedding, Head, Projection
from .quantization import MXFP8Linear, NVFP4Experts
from .slots import AdapterSlots, ExpertsAdapter, ProjectionAdapter
from .spread import SpreadExperts


class Norm(nn.Module):
    """Gemma RMS norm, with or without the residual added before it."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm of x + residual, their sum)."""
        if residual is None:
            return gemma_rms_norm(x, self.weight, self.eps), x
        return gemma_rms_norm_add(x, residual, self.weight, self.eps)


class MLPOnTiles(NamedTuple):
    """What `kernels.mlp` takes of an MLP."""

    gate_up: MXFP8Tiles
    down: MXFP8Tiles
    lora: MLPLoRA | None
    adapter_ids: Tensor | None


class MLP(nn.Module):
    """SwiGLU-OAI network: the dense layers' and the shared expert's."""

    def __init__(self, config: Any, intermediate: int, group: Group, prefix: str) -> None:
        super().__init__()
        h, halves = config.hidden_size, [(f"{prefix}.{name}", intermediate) for name in ("gate_proj", "up_proj")]
        self.gate_up_proj = Projection(h, halves, group, f"{prefix}.gate_up_proj")
        self.down_proj = Projection(intermediate, [(f"{prefix}.down_proj", h)], group, f"{prefix}.down_proj")
        self.activation = _activation(config)
        self.group, self.prefix = group, prefix

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] to [T, hidden]."""
        if self.gate_up_proj.tiles is None:
            activated = swiglu_oai(self.gate_up_proj(x), self.activation).to(x.dtype)
        else:
            weights = self.on_tiles(x.shape[0])
            if self.group.world == 1:
                return mlp(x, weights.gate_up, weights.down, self.activation, weights.lora, weights.adapter_ids, point=f"{self.prefix}.")
            activated = mlp_activation(x, weights.gate_up, self.activation, weights.lora, weights.adapter_ids)
        activated = self.group.gather(activated)
        tap(f"{self.prefix}.activation", activated)
        out = self.group.gather(self.down_proj(activated))
        tap(f"{self.prefix}.down_proj", out)
        return out

    def on_tiles(self, tokens: int) -> MLPOnTiles:
        """Weights and adapters as the kernels take them."""
        pairs: list[LoRA | None] = []
        adapter_ids = None
        for layer, count in ((self.gate_up_proj, 2), (self.down_proj, 1)):
            chosen, ids = ([None] * count, None) if layer.adapter is None else layer.adapter.select_pairs(tokens)
            pairs += chosen
            adapter_ids = ids if adapter_ids is None else adapter_ids
        lora = MLPLoRA(*pairs) if any(p is not None for p in pairs) else None
        return MLPOnTiles(self.gate_up_proj.tiles, self.down_proj.tiles, lora, adapter_ids)


def _activation(config: Any) -> SwiGLU:
    return SwiGLU(config.swiglu_alpha, config.swiglu_beta, config.swiglu_limit)


class Gate(nn.Module):
    """The router: fp32 weight, fp32 logits. It takes no adapter."""

    def __init__(self, hidden: int, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(experts, hidden, dtype=torch.float32), requires_grad=False)


class Experts(nn.Module):
    """The routed experts of a layer that are on this rank."""

    def __init__(self, config: Any, group: Group, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix
        self.hidden, self.intermediate = config.hidden_size, config.intermediate_size
        self.first, self.end = group.experts
        self.spread: SpreadExperts | None = None
        """Of a replica of several ranks."""
        self.activation = _activation(config)
        self.adapter: ExpertsAdapter | None = None
        self.quant_method = NVFP4Experts()
        self.quant_method.create_weights(self, self.count, self.hidden, self.intermediate, get_current_vllm_config().model_config.dtype)

    @property
    def count(self) -> int:
        """How many are here."""
        return self.end - self.first

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [T, hidden], ids and weights [T, k] to [T, hidden], of all experts."""
        lora, adapter_ids = (None, None) if self.adapter is None else self.adapter.select(x.shape[0])
        run = moe if self.spread is None else self.spread
        return run(x, self.w13, self.w2, ids, weights, self.activation, lora, adapter_ids)


class MoE(nn.Module):
    """Routed and shared experts.

    `layer_id` and `capture_fn` make it one of vLLM's `RoutedExpertsCaptureSource`: where routes are asked for, vLLM sets
    `capture_fn` and gets the chosen ids [T, k] of each step.
    """

    def __init__(self, config: Any, layer: int, group: Group, prefix: str) -> None:
        super().__init__()
        self.layer_id = layer
        self.capture_fn: Callable[[Tensor], None] | None = None
        self.top_k, self.scale = config.num_experts_per_tok, config.routed_scaling_factor
        self.gate = Gate(config.hidden_size, config.num_local_experts)
        self.e_score_correction_bias = nn.Parameter(torch.zeros(config.num_local_experts, dtype=torch.float32), requires_grad=False)
        self.experts = Experts(config, group, f"{prefix}.experts")
        shared = config.intermediate_size * config.n_shared_experts
        self.shared_experts = MLP(config, shared, group, f"{prefix}.shared_experts")
        self.prefix = prefix

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] to [T, hidden]."""
        logits = frozen_linear(x, self.gate.weight)
        ids, weights = route_topk(logits, self.e_score_correction_bias, self.top_k, self.scale)
        if self.capture_fn is not None:
            self.capture_fn(ids)
        for name, value in (("gate", logits), ("ids", ids), ("weights", weights)):
            tap(f"{self.prefix}.{name}", value)
        if self.shared_experts.gate_up_proj.tiles is not None and self.experts.spread is None:
            return self._on_tiles(x, ids, weights)
        routed = self.experts(x, ids, weights)
        tap(f"{self.prefix}.experts", routed)
        return routed + self.shared_experts(x)

    def _on_tiles(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        experts, shared = self.experts, self.shared_experts.on_tiles(x.shape[0])
        lora, adapter_ids = (None, None) if experts.adapter is None else experts.adapter.select(x.shape[0])
        return moe_with_shared(
            x,
            experts.w13,
            experts.w2,
            ids,
            weights,
            SharedExpert(shared.gate_up, shared.down, shared.lora),
            experts.activation,
            lora,
            shared.adapter_ids if adapter_ids is None else adapter_ids,
            point=f"{self.prefix}.",
        )


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, config: Any, settings: engine_settings.EngineSettings, group: Group, index: int, prefix: str) -> None:
        super().__init__()
        sparse = bool(config.sparse_attention_config["sparse_attention_freq"][index])
        self.self_attn = Attention(config, settings, group, sparse, f"{prefix}.self_attn")
        self.is_moe = bool(config.moe_layer_freq[index])
        if self.is_moe:
            self.block_sparse_moe = MoE(config, index, group, f"{prefix}.block_sparse_moe")
        else:
            self.mlp = MLP(config, config.dense_intermediate_size, group, f"{prefix}.mlp")
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.prefix = prefix

    def forward(self, x: Tensor, residual: Tensor | None, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """x [T, hidden], to be added to `residual` before the next norm."""
        x, residual = self.input_layernorm(x, residual)
        tap(f"{self.prefix}.input_layernorm", x)
        x = self.self_attn(x, rotation)
        x, residual = self.post_attention_layernorm(x, residual)
        tap(f"{self.prefix}.post_attention_layernorm", x)
        return (self.block_sparse_moe if self.is_moe else self.mlp)(x), residual


class Model(nn.Module):
    """Embedding, layers, final norm."""

    def __init__(self, vllm_config: VllmConfig, settings: engine_settings.EngineSettings, group: Group, prefix: str) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, group)
        self.layers = nn.ModuleList(Layer(config, settings, group, i, f"{prefix}.layers.{i}") for i in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        rotary = int(config.head_dim * config.partial_rotary_factor)
        cos, sin = rope_table(vllm_config.model_config.max_model_len, rotary, config.rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Embedded tokens [T, hidden] at `positions` [T] to the final norm's output [T, hidden]."""
        by_token = None if self.layers[0].self_attn.kernels else (self.cos[positions], self.sin[positions])
        rotation, residual = Rotation((self.cos, self.sin), by_token), None
        tap("model.embed_tokens", x)
        for layer in self.layers:
            x, residual = layer(x, residual, rotation)
        x = self.norm(x, residual)[0]
        tap("model.norm", x)
        return x


class MiniMaxM3ForCausalLM(nn.Module, SupportsLoRA):
    """The model that vLLM builds for `MiniMaxM3SparseForCausalLM`."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.settings = engine_settings.check(vllm_config)
        engine_settings.serving = True
        vllm_patches.apply_in_worker()
        config = vllm_config.model_config.hf_text_config
        self.config = config
        self.group = Group.of_engine(config.num_local_experts)
        self.model = Model(vllm_config, self.settings, self.group, f"{prefix}.model" if prefix else "model")
        self.lm_head = Head(config.vocab_size, config.hidden_size, self.group)
        if self.group.world > 1:
            self._spread_experts(vllm_config)
        self._forbidden: Tensor | None = None
        if self.settings.tokens is not None:
            self.forbid_tokens(self.settings.tokens, None)

    def _spread_experts(self, vllm_config: VllmConfig) -> None:
        dtype, device = vllm_config.model_config.dtype, self.lm_head.weight.device
        tokens, top_k = vllm_config.scheduler_config.max_num_batched_tokens, self.config.num_experts_per_tok
        spread = SpreadExperts(self.group, top_k, self.config.hidden_size, tokens, device.type == "cuda" and takes_tiles(device, dtype))
        for module in self.modules():
            if isinstance(module, Experts):
                module.spread = spread

    def _projections(self) -> Iterator[Projection]:
        return (m for m in self.modules() if isinstance(m, Projection))

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Rows of the embedding [T, hidden]."""
        return self.group.gather(self.model.embed_tokens(input_ids))

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Hidden states [T, hidden] of packed tokens."""
        with summed_in(self.settings.profile.accumulation):
            return self.model(self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds, positions)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """fp32 logits [T, vocabulary]; -inf for tokens that must not be sampled."""
        with summed_in(self.settings.profile.accumulation):
            logits = self.group.gather(self.lm_head(hidden_states))[:, : self.config.vocab_size]
        if self._forbidden is not None:
            logits = logits.index_fill(-1, self._forbidden, float("-inf"))
        return logits

    def forbid_tokens(self, vocab_size: int, banned: list[int] | None) -> None:
        """Never sample ids from `vocab_size` on (rows of the head without a token), nor those in `banned`."""
        ids = [*range(vocab_size, self.config.vocab_size), *(banned or [])]
        self._forbidden = torch.tensor(ids, dtype=torch.int64, device=self.lm_head.weight.device) if ids else None

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load a samebits checkpoint. Raises `ValueError` on a tensor that is unknown, missing or of another shape or dtype."""
        projections = {one.path: (m, i) for m in self._projections() for i, one in enumerate(m.slices)}
        expected, filled = self._expected(projections), set()
        for name, tensor in weights:
            if strip_prefixes(name).startswith(NOT_TEXT):
                continue
            path, _, leaf = strip_prefixes(name).rpartition(".")
            if f"{path}.{leaf}" not in expected:
                raise ValueError(f"checkpoint holds {name}, which the model does not have")
            self._load(path, leaf, tensor, projections)
            filled.add(f"{path}.{leaf}")
        missing = sorted(expected - filled)
        if missing:
            raise ValueError(f"checkpoint lacks {missing[0]}" + (f" and {len(missing) - 1} more" if len(missing) > 1 else ""))
        return {name for name, _ in self.named_parameters()}

    def _load(self, path: str, leaf: str, tensor: Tensor, projections: dict[str, tuple[Projection, int]]) -> None:
        """Copy this rank's part of a tensor, all of which must fit."""
        name, (experts, _, which) = f"{path}.{leaf}", path.rpartition(".experts.")
        if path in projections:
            layer, index = projections[path]
            one, target = layer.slices[index], layer.target(index, leaf)
            _require(name, tensor, target.dtype, torch.Size((one.whole, *target.shape[1:])))
            target.copy_(one.part.of(tensor))
        elif experts:
            layer, (expert, which) = self.get_submodule(f"{experts}.experts"), which.split(".")
            here = layer.first <= int(expert) < layer.end
            target = NVFP4Experts.target(layer, leaf, int(expert) - layer.first if here else 0, which)
            _require(name, tensor, target.dtype, target.shape)
            if here:
                target.copy_(tensor)
        elif path in ("lm_head", "model.embed_tokens"):
            layer = self.get_submodule(path)
            _require(name, tensor, None, torch.Size((self.config.vocab_size, self.config.hidden_size)))
            (layer.held if path == "lm_head" else layer.weight.data).copy_(layer.part.of(tensor))
        else:
            param = self.get_submodule(path).get_parameter(leaf)
            _require(name, tensor, None, param.shape)
            param.data.copy_(tensor)

    def _expected(self, projections: dict) -> set[str]:
        """Every tensor that a checkpoint must hold, whichever rank has it."""
        names = {f"{path}.{leaf}" for path in projections for leaf in ("weight", "weight_scale")}
        leaves = ("weight", "weight_scale", "weight_scale_2")
        for prefix, module in self.named_modules():
            if isinstance(module, Experts):
                experts = range(self.config.num_local_experts)
                names |= {f"{prefix}.{e}.{w}.{leaf}" for e in experts for w in ("w1", "w2", "w3") for leaf in leaves}
            elif not isinstance(module, Projection):
                names |= {f"{prefix}.{name}" for name, _ in module.named_parameters(recurse=False)}
        return names

    def attach_adapters(self, slots: AdapterSlots) -> None:
        """Create the LoRA buffers of every adapted layer."""
        roles = set(slots.spec.roles)
        for layer in self._projections():
            slices = [(one.path, one.rows, module_id(one.path).role in roles) for one in layer.slices]
            if any(adapted for _, _, adapted in slices):
                layer.adapter = ProjectionAdapter(slots, slices, layer.inputs, stacked=layer.tiles is not None and len(slices) > 2)
        adapted = {MODULE_PATHS[r][-2:] for r in roles if "experts.{e}" in MODULE_PATHS[r]}
        for path, module in self.named_modules():
            if isinstance(module, Experts) and adapted:
                module.adapter = ExpertsAdapter(slots, path, module.count, module.hidden, module.intermediate, adapted, module.first)

    def adapters(self) -> Iterator[ProjectionAdapter | ExpertsAdapter]:
        """The adapters of all layers, in the order of the model."""
        return (m.adapter for m in self.modules() if getattr(m, "adapter", None) is not None)

    def base_values(self) -> Iterator[tuple[str, Tensor]]:
        """Checkpoint path and value of every frozen weight, as it is multiplied, of which this rank holds a part: that part."""
        return iter(StackedTensors(self.base_stacks()))

    def base_stacks(self) -> Iterator[Stacked]:
        """`base_values` by stacks: of a layer's experts many at a time, each unpacked once."""
        for path, module in self.named_modules():
            if isinstance(module, Projection):
                parts = MXFP8Linear.value(module).split(module.sizes)
                yield from (((one.path,), part[None]) for one, part in zip(module.slices, parts, strict=True))
            elif isinstance(module, Experts):
                for first, w13, w2 in NVFP4Experts.values(module):
                    w1, w3 = w13.chunk(2, dim=1)
                    experts = [f"{path}.{module.first + first + e}" for e in range(len(w2))]
                    yield from ((tuple(f"{expert}.{w}" for expert in experts), stack) for w, stack in (("w1", w1), ("w2", w2), ("w3", w3)))
            elif isinstance(module, Head):
                if len(module.held):
                    yield (path,), module.held[None]
            else:
                for name, param in module.named_parameters(recurse=False):
                    yield (path if name == "weight" else f"{path}.{name}",), param[None]


def _require(name: str, tensor: Tensor, dtype: torch.dtype | None, shape: torch.Size | None = None) -> None:
    if (dtype is not None and tensor.dtype != dtype) or (shape is not None and tensor.shape != shape):
        want = f"{dtype or 'any dtype'} {tuple(shape) if shape is not None else ''}".strip()
        raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, the model wants {want}")

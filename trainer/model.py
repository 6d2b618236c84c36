"""The MiniMax-M3 text model for training, on packed sequences, over a base that stays packed.

It is built of the ops in `kernels`, which the engine's model calls too. Base weights are parameters without gradient in their
stored bytes (uint8 codes and scales, fp32 global scales), or in the same bits reordered for the Hopper kernels (`kernels.expert_tiles`,
`kernels.linear_tiles`), so FSDP2 shards and gathers them as they are, and no bf16 copy of the model exists. Only the adapter is trained.

A batch is packed: tokens [T] of all sequences one after the other, and the sequence lengths. Attention never crosses a sequence and
its blocks are anchored at each sequence's start. Nothing is padded, so there is no padding to mask out.

Replay: `routes` gives the expert ids of each token and layer by absolute layer index, -1 where the model shall choose by itself.
The weights of replayed experts come from the model's own logits, so the router's gradient to the activations stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh
from torch.utils.checkpoint import checkpoint as recompute_later

from samebits.kernels.linear import FrozenWeight, lora_linear
from samebits.kernels.msa_ops import Norms, rotate_heads
from samebits.kernels.norm import gemma_rms_norm, gemma_rms_norm_add
from samebits.kernels.rope import apply_rope
from samebits.kernels.sums import summed_in
from samebits.kernels.taps import recording, tap
from samebits.quant import kv
from samebits.quant.adapter import AdapterSpec
from samebits.quant.checkpoint import Checkpoint
from samebits.quant.profile import Format, NumericsProfile, require_same
from samebits.quant.roles import Role
from samebits.quant.stacks import Stacked, StackedTensors

from .base import PackedBase
from .expert_ranks import ExpertRanks
from .export import export_stacks
from .head import token_logprobs
from .lora import LayerLoRA, LoRASettings, values_of
from .m3_config import M3Dims
from .mlp import MLP
from .moe import MoE
from .packed import Sequences, attend, kernels_attend, sequences

_COMPUTE = {Format.FP32: torch.float32, Format.BF16: torch.bfloat16}


def compute_dtype(profile: NumericsProfile) -> torch.dtype:
    """Dtype of the activations. Raises `ValueError` for a profile that cannot be trained with."""
    if profile.activations not in _COMPUTE:
        raise ValueError(f"numerics profile {profile.name!r} trains with {profile.activations} activations, which is not supported")
    return _COMPUTE[Format(profile.activations)]


class LayerOutput(NamedTuple):
    """One layer's result. The choices are those that were used; ids and blocks are None where the layer makes no such choice."""

    x: Tensor
    residual: Tensor
    ids: Tensor | None = None  # int64 [T, k], ascending
    blocks: Tensor | None = None  # int32 [T, G, n]
    replayed: Tensor | None = None  # int64 [], rows of this layer that were replayed
    agreed: Tensor | None = None  # int64 [], those among them whose own top-k is the same set


class M3Output(NamedTuple):
    """What `M3ForTraining.forward` returns."""

    logprobs: Tensor  # fp32 [T], of `labels`
    entropy: Tensor | None  # fp32 [T]
    replayed: Tensor  # int64 [layers], rows replayed in each layer
    agreed: Tensor  # int64 [layers], those among them whose own top-k is the same set
    routes: Tensor | None = None  # int16 [T, layers, k], -1 in dense layers; only with capture
    blocks: Tensor | None = None  # int16 [T, layers, G, n], -1 where there is none; only with capture


class Attention(nn.Module):
    """Attention with per-head Gemma norms and partial RoPE, dense or block-sparse."""

    def __init__(self, checkpoint: Checkpoint, layer: int, dims: M3Dims, profile: NumericsProfile) -> None:
        super().__init__()
        self.dims, self.sparse = dims, layer in dims.sparse_layers
        self.quantized_kv, self.rounded_reads = profile.kv_cache == Format.NVFP4, profile.rounded_reads
        prefix = f"model.layers.{layer}.self_attn."
        names = ["q", "k", "v", "o"] + (["index_q", "index_k"] if self.sparse else [])
        self.proj = nn.ModuleDict({n: PackedBase(checkpoint.weight(f"{prefix}{n}_proj")) for n in names})
        norms = ["q", "k"] + (["index_q", "index_k"] if self.sparse else [])
        self.norm = nn.ModuleDict({n: PackedBase(checkpoint.tensor(f"{prefix}{n}_norm.weight")) for n in norms})
        self.prefix = prefix

    def forward(self, x: Tensor, seqs: Sequences, lora: LayerLoRA | None, blocks: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """x [T, H] to ([T, H], chosen blocks or None)."""
        q, k, v = (self._heads(n, x, lora, role) for n, role in (("q", Role.ATTN_Q), ("k", Role.ATTN_K), ("v", Role.ATTN_V)))
        index_q = index_k = None
        to_choose = seqs.longest > self.dims.sparse.block * self.dims.sparse.topk
        if self.sparse and (to_choose or recording(f"{self.prefix}index_q")):
            with torch.no_grad():  # The choice passes no gradient.
                index_q, index_k = self._heads("index_q", x), self._heads("index_k", x)
        q, k, v, index_q, index_k = self._rotated(q, k, v, index_q, index_k, seqs)
        for name, value in (("q", q), ("k", k), ("v", v), ("index_q", index_q), ("index_k", index_k)):
            if value is not None:
                tap(f"{self.prefix}{name}", value)
        index_k = index_k[:, 0] if index_k is not None else None
        scale, config = self.dims.shape.head_dim**-0.5, self.dims.sparse if self.sparse else None
        out, chosen = attend(q, k, v, seqs, scale, index_q, index_k, config, blocks, self.rounded_reads)
        if chosen is not None:
            tap(f"{self.prefix}blocks", chosen)
        tap(f"{self.prefix}attention", out.flatten(1))
        out = lora_linear(out.flatten(1), self.proj["o"].value(), values_of(lora, Role.ATTN_O))
        tap(f"{self.prefix}o_proj", out)
        return out, chosen

    def _heads(self, name: str, x: Tensor, lora: LayerLoRA | None = None, role: Role | None = None) -> Tensor:
        return lora_linear(x, self.proj[name].value(), values_of(lora, role)).unflatten(-1, (-1, self.dims.shape.head_dim))

    def _rotated(self, q: Tensor, k: Tensor, v: Tensor, index_q: Tensor | None, index_k: Tensor | None, seqs: Sequences):
        """Heads [T, heads, D] normed and rotated, K, V and the index key as the cache holds them."""
        if seqs.batch is not None:
            norms = Norms(*(self.norm[n].value() if n in self.norm else None for n in Norms._fields[:4]), self.dims.eps)
            one = index_k[:, 0] if index_k is not None else None
            form = "nvfp4" if self.quantized_kv else "bf16"
            q, k, v, index_q, one = rotate_heads(q, k, v, index_q, one, norms, seqs.table, seqs.position, form)
            return q, k, v, index_q, one[:, None] if one is not None else None

        def turned(name: str, x: Tensor) -> Tensor:
            return apply_rope(gemma_rms_norm(x, self.norm[name].value(), self.dims.eps), seqs.cos, seqs.sin)

        q, k, v = turned("q", q), self._cached(turned("k", k)), self._cached(v)
        if index_q is not None:
            with torch.no_grad():
                index_q, index_k = turned("index_q", index_q), self._cached(turned("index_k", index_k))
        return q, k, v, index_q, index_k

    def _cached(self, x: Tensor) -> Tensor:
        return kv.round_trip(x) if self.quantized_kv else x


class DecoderLayer(nn.Module):
    """One layer; the unit of sharding and of activation checkpointing."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        layer: int,
        dims: M3Dims,
        profile: NumericsProfile,
        spec: AdapterSpec | None,
        settings: LoRASettings | None,
        pack_on: torch.device | None = None,
        ranks: ExpertRanks | None = None,
    ) -> None:
        super().__init__()
        self.prefix = prefix = f"model.layers.{layer}."
        self.dims = dims
        self.checkpointing = False
        self.accumulation = profile.accumulation
        self.input_norm = PackedBase(checkpoint.tensor(f"{prefix}input_layernorm.weight"))
        self.post_norm = PackedBase(checkpoint.tensor(f"{prefix}post_attention_layernorm.weight"))
        self.attention = Attention(checkpoint, layer, dims, profile)
        self.is_moe = layer in dims.shape.moe_layers
        if self.is_moe:
            self.mlp = MoE(checkpoint, layer, dims, ranks)
        else:
            self.mlp = MLP(checkpoint, f"{prefix}mlp.", (Role.DENSE_GATE, Role.DENSE_UP, Role.DENSE_DOWN), dims)
        self.lora = LayerLoRA(spec, layer, settings, ranks) if settings is not None else None
        if pack_on is not None:
            for name, module in self.named_modules():
                if isinstance(module, PackedBase):
                    module.pack(f"{prefix}{name}", pack_on)
        if self.is_moe:
            self.mlp.spread()

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        seqs: Sequences,
        routes: Tensor | None,
        blocks: Tensor | None,
        adapter: bool,
    ) -> LayerOutput:
        """x, residual [T, H] (residual None before the first layer); routes int [T, k]; blocks int [T, G, n]."""
        if self.checkpointing and torch.is_grad_enabled():
            return recompute_later(self._run, x, residual, seqs, routes, blocks, adapter, use_reentrant=False)
        return self._run(x, residual, seqs, routes, blocks, adapter)

    def _run(self, *inputs) -> LayerOutput:
        # Here and not around the model: a checkpointed layer runs again in backward.
        with summed_in(self.accumulation):
            return self._layer(*inputs)

    def _layer(self, x, residual, seqs, routes, blocks, adapter) -> LayerOutput:
        lora = self.lora if adapter else None
        eps = self.dims.eps
        if residual is None:
            residual, h = x, gemma_rms_norm(x, self.input_norm.value(), eps)
        else:
            h, residual = gemma_rms_norm_add(x, residual, self.input_norm.value(), eps)
        tap(f"{self.prefix}input_layernorm", h)
        x, chosen = self.attention(h, seqs, lora, blocks)
        h, residual = gemma_rms_norm_add(x, residual, self.post_norm.value(), eps)
        tap(f"{self.prefix}post_attention_layernorm", h)
        if not self.is_moe:
            return LayerOutput(self.mlp(h, lora), residual, blocks=chosen)
        x, ids, replayed, agreed = self.mlp(h, lora, routes)
        return LayerOutput(x, residual, ids, chosen, replayed, agreed)


class M3ForTraining(nn.Module):
    """The text model with its adapter.

    Args:
        checkpoint: opened checkpoint; its weight formats must be those of `profile`.
        profile: numerics; `activations` float32 or bfloat16.
        lora: adapter settings, or None for the bare base.
        wrap: called with each layer right after it was built and with the model at the end, e.g. to shard it, so that no process
            ever holds more than one whole layer.
        pack_on: hold experts and MXFP8 projections in the order of the Hopper kernels, reordered layer by layer on this device. Where
            those kernels do not run they are unpacked again in each call: ask `kernels.expert_tiles.takes_tiles` first.
        experts_over: a mesh of ranks, over whose last dimension the routed experts and their adapters are spread (`expert_ranks`). These
            parameters are DTensors already when `wrap` sees their layer, and are not for it to shard. Each rank must then run as many
            forwards and backwards as the others.
    Raises `ProfileMismatch`, `CheckpointError` or `ValueError` in one line.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        profile: NumericsProfile,
        lora: LoRASettings | None = None,
        wrap: Callable[[nn.Module], object] | None = None,
        pack_on: torch.device | None = None,
        experts_over: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        require_same(f"checkpoint {checkpoint.folder}", checkpoint.weights_hash, "the trainer", profile.weights_hash)
        self.compute_dtype = compute_dtype(profile)
        self.dims = M3Dims.from_config(checkpoint.config)
        self.profile = profile
        self.settings = lora
        self.spec = AdapterSpec(self.dims.shape, lora.rank, lora.roles, str(profile.lora)) if lora is not None else None
        self._adapter_enabled = True
        self.embed = PackedBase(checkpoint.tensor("model.embed_tokens.weight"))
        self.layers = nn.ModuleList()
        ranks = ExpertRanks.of(experts_over, self.dims.shape.experts)
        for i in range(self.dims.shape.layers):
            layer = DecoderLayer(checkpoint, i, self.dims, profile, self.spec, lora, pack_on, ranks)
            if wrap is not None:
                wrap(layer)
            self.layers.append(layer)
        self.norm = PackedBase(checkpoint.tensor("model.norm.weight"))
        self.head = PackedBase(checkpoint.tensor("lm_head.weight"))
        self.tokens = self.dims.vocab
        if wrap is not None:
            wrap(self)

    def forward(
        self,
        tokens: Tensor,
        lengths: list[int],
        labels: Tensor,
        temperature: Tensor,
        routes: Tensor | None = None,
        blocks: Tensor | None = None,
        entropy: bool = False,
        capture: bool = False,
    ) -> M3Output:
        """Log-probabilities of `labels` after each token.

        Args:
            tokens: int64 [T]. lengths: lengths of the packed sequences, sum T. labels: int64 [T]. temperature: fp32 [T].
            routes: int [T, layers, k] expert ids to replay, -1 for the model's own choice, or None.
            blocks: int [T, layers, G, n] block choices to replay in the sparse layers, or None.
            entropy: also compute the entropy of each distribution. capture: also return the choices that were used.
        """
        dims = self.dims
        if sum(lengths) != len(tokens):
            raise ValueError(f"sequence lengths sum to {sum(lengths)}, but there are {len(tokens)} tokens")
        if routes is not None and routes.shape != (len(tokens), dims.shape.layers, dims.top_k):
            raise ValueError(f"routes have shape {tuple(routes.shape)}, not {(len(tokens), dims.shape.layers, dims.top_k)}")
        seqs = sequences(lengths, dims, kernels_attend(dims, self.compute_dtype, tokens.device), tokens.device)
        x, residual = F.embedding(tokens, self.embed.value()).to(self.compute_dtype), None
        tap("model.embed_tokens", x)
        choices: list[LayerOutput] = []
        for i, layer in enumerate(self.layers):
            layer_routes = routes[:, i] if routes is not None and i in dims.shape.moe_layers else None
            layer_blocks = blocks[:, i] if blocks is not None and i in dims.sparse_layers else None
            out = layer(x, residual, seqs, layer_routes, layer_blocks, self._adapter_enabled)
            x, residual = out.x, out.residual
            choices.append(out._replace(x=None, residual=None))
        with summed_in(self.profile.accumulation):
            h, _ = gemma_rms_norm_add(x, residual, self.norm.value(), dims.eps)
            tap("model.norm", h)
            logprobs, ent = token_logprobs(h, self.head.value()[: self.tokens], labels, temperature, entropy, head_rows=dims.vocab)
        none = torch.zeros((), dtype=torch.int64, device=tokens.device)
        return M3Output(
            logprobs,
            ent,
            torch.stack([none if c.replayed is None else c.replayed for c in choices]),
            torch.stack([none if c.agreed is None else c.agreed for c in choices]),
            self._layered([c.ids for c in choices], (len(tokens), dims.top_k)) if capture else None,
            self._layered([c.blocks for c in choices], (len(tokens), dims.shape.kv_heads, dims.sparse.topk)) if capture else None,
        )

    def only_tokens(self, count: int) -> None:
        """Take log-probabilities over the first `count` rows of the head: those that are tokens, as the engine never samples the others.

        Raises `ValueError` when the head has fewer rows.
        """
        if not 0 < count <= self.dims.vocab:
            raise ValueError(f"the tokenizer has {count} tokens, the head {self.dims.vocab} rows")
        self.tokens = count

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Compute with the bare base inside."""
        self._adapter_enabled = False
        try:
            yield
        finally:
            self._adapter_enabled = True

    def checkpoint_activations(self, enabled: bool = True) -> None:
        """Keep only the inputs of each layer in forward and compute the rest again in backward."""
        for layer in self.layers:
            layer.checkpointing = enabled

    def recompute_experts(self, enabled: bool = True) -> None:
        """Keep gate and up of experts and MLPs out of what forward keeps, and multiply them again in backward (on tiles only)."""
        for layer in self.layers:
            for module in layer.modules():
                if isinstance(module, MLP | MoE):
                    module.recompute = enabled

    def adapter_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Name and master of everything that is trained."""
        return ((n, p) for n, p in self.named_parameters() if p.requires_grad)

    def base_weights(self) -> Iterator[tuple[str, FrozenWeight]]:
        """Checkpoint path and frozen weight of everything that is multiplied, gathered; every rank must drain it."""
        yield "model.embed_tokens", self.embed.gathered()
        for i, layer in enumerate(self.layers):
            prefix = f"model.layers.{i}."
            yield f"{prefix}input_layernorm", layer.input_norm.gathered()
            yield f"{prefix}post_attention_layernorm", layer.post_norm.gathered()
            for name, weight in layer.attention.proj.items():
                yield f"{prefix}self_attn.{name}_proj", weight.gathered()
            for name, weight in layer.attention.norm.items():
                yield f"{prefix}self_attn.{name}_norm", weight.gathered()
            yield from layer.mlp.base_weights(f"{prefix}block_sparse_moe." if layer.is_moe else f"{prefix}mlp.")
        yield "model.norm", self.norm.gathered()
        yield "lm_head", self.head.gathered()

    def export_adapter(self) -> Iterator[tuple[str, Tensor]]:
        """PEFT name and bf16 tensor of the whole adapter, scale folded in. Gathers shards: every rank must drain it."""
        return iter(StackedTensors(self.export_stacks()))

    def export_stacks(self) -> Iterator[Stacked]:
        """`export_adapter` by stacks: the experts of a layer's projection as one tensor."""
        return export_stacks(pair for layer in self.layers if layer.lora is not None for pair in layer.lora.pairs.values())

    def _layered(self, choices: list[Tensor | None], shape: tuple[int, ...]) -> Tensor:
        device = next(c.device for c in choices if c is not None)
        empty = torch.full(shape, -1, dtype=torch.int16, device=device)
        return torch.stack([empty if c is None else c.to(torch.int16) for c in choices], dim=1)

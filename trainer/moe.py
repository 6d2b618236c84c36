"""Router, routed experts and shared expert of the training model, over a base that stays packed.

The routed experts are FSDP2's like everything else, gathered for each forward, or spread over ranks (`expert_ranks`): then each rank has
its own for good and computes them for the tokens of all ranks. A token's result has the same bits either way.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from samebits.kernels.expert_parallel import expert_parallel_moe
from samebits.kernels.expert_tiles import NVFP4Tiles, expert_of
from samebits.kernels.linear import FrozenWeight, frozen_linear, select, split
from samebits.kernels.mlp import mlp, moe_with_shared
from samebits.kernels.moe import ExpertLoRA, route_topk, route_weights
from samebits.kernels.taps import tap
from samebits.quant.checkpoint import Checkpoint
from samebits.quant.roles import Role

from .base import PackedBase, gate_up_of, stack
from .expert_ranks import ExpertRanks
from .lora import LayerLoRA, values_of
from .m3_config import M3Dims
from .mlp import MLP


class MoE(nn.Module):
    """Router, routed experts and shared expert."""

    def __init__(self, checkpoint: Checkpoint, layer: int, dims: M3Dims, ranks: ExpertRanks | None = None) -> None:
        """`ranks`: those over which the routed experts are spread. This rank then reads its own only; see `spread`."""
        super().__init__()
        self.dims, self.ranks = dims, ranks
        self.recompute = False
        self.prefix = prefix = f"model.layers.{layer}.block_sparse_moe."
        self.gate = PackedBase(checkpoint.tensor(f"{prefix}gate.weight"))
        self.bias = PackedBase(checkpoint.tensor(f"{prefix}e_score_correction_bias"))
        experts = [f"{prefix}experts.{e}." for e in (range(dims.shape.experts) if ranks is None else ranks.mine)]
        self.w13 = PackedBase(stack([gate_up_of(checkpoint, e) for e in experts]))
        self.w2 = PackedBase(stack([checkpoint.weight(f"{e}w2") for e in experts]))
        self.shared = MLP(checkpoint, f"{prefix}shared_experts.", (Role.SHARED_GATE, Role.SHARED_UP, Role.SHARED_DOWN), dims)

    def spread(self) -> None:
        """Hold the experts as this rank's of all. After packing, before FSDP2 looks at the layer."""
        if self.ranks is not None:
            self.w13.spread(self.ranks)
            self.w2.spread(self.ranks)

    def forward(self, x: Tensor, lora: LayerLoRA | None, routes: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x [T, H], routes int [T, k] or None to ([T, H], ids used [T, k], rows replayed [], rows that agree [])."""
        logits = frozen_linear(x, self.gate.value())
        ids, weights = route_topk(logits, self.bias.value(), self.dims.top_k, self.dims.routed_scale)
        replayed = agreed = torch.zeros((), dtype=torch.int64, device=x.device)
        if routes is not None:
            given = routes[:, :1] >= 0
            own = ids
            ids = torch.where(given, routes.to(ids.dtype).sort(dim=-1).values, own)
            weights = route_weights(logits, ids, self.dims.routed_scale)
            replayed, agreed = given.sum(), ((ids == own).all(-1) & given[:, 0]).sum()
        for name, value in (("gate", logits), ("ids", ids), ("weights", weights)):
            tap(f"{self.prefix}{name}", value)
        out = self._experts(x, ids, weights, lora) if self.ranks is None else self._experts_over_ranks(x, ids, weights, lora)
        return out, ids, replayed, agreed

    def _experts(self, x: Tensor, ids: Tensor, weights: Tensor, lora: LayerLoRA | None) -> Tensor:
        return moe_with_shared(
            x,
            self.w13.value(),
            self.w2.value(),
            ids,
            weights,
            self.shared.operands(lora),
            self.dims.activation,
            self._expert_lora(lora),
            recompute=self.recompute,
            point=self.prefix,
        )

    def _experts_over_ranks(self, x: Tensor, ids: Tensor, weights: Tensor, lora: LayerLoRA | None) -> Tensor:
        """What `_experts` gives. Every rank must call it, and run its backward, the same number of times."""
        x = x.view_as(x)  # both gradients meet here, before the router's joins them: the order of `moe_with_shared`
        routed = expert_parallel_moe(
            x,
            self.w13.value(),
            self.w2.value(),
            ids,
            weights,
            self.dims.activation,
            self._expert_lora(lora),
            group=self.ranks.group,
            experts=self.ranks.experts,
            recompute=self.recompute,
        )
        tap(f"{self.prefix}experts", routed)
        gate_up, down, adapters = self.shared.operands(lora)
        point = f"{self.prefix}shared_experts."
        return routed + mlp(x, gate_up, down, self.dims.activation, adapters, recompute=self.recompute, point=point)

    def base_weights(self, prefix: str) -> Iterator[tuple[str, FrozenWeight]]:
        """See `M3ForTraining.base_weights`."""
        yield f"{prefix}gate", self.gate.gathered()
        yield f"{prefix}e_score_correction_bias", self.bias.gathered()
        w13, w2 = self.w13.held(), self.w2.held()
        for e in range(self.dims.shape.experts):  # tiles are unpacked one expert at a time
            gate_up, down = (expert_of(w, e) if isinstance(w, NVFP4Tiles) else select(w, e) for w in (w13, w2))
            gate, up = split(gate_up, 2)
            yield from ((f"{prefix}experts.{e}.w1", gate), (f"{prefix}experts.{e}.w2", down), (f"{prefix}experts.{e}.w3", up))
        yield from self.shared.base_weights(f"{prefix}shared_experts.")

    def _expert_lora(self, lora: LayerLoRA | None) -> ExpertLoRA | None:
        pairs = [values_of(lora, role) for role in (Role.EXPERT_GATE, Role.EXPERT_UP, Role.EXPERT_DOWN)]
        return ExpertLoRA(*pairs) if any(p is not None for p in pairs) else None

"""The serving side of a model without its arithmetic: the adapters of all its layers on one rank of a replica, and nothing else."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from samebits.quant.adapter import AdapterSpec
from samebits.quant.ranks import Ranks
from samebits.quant.roles import ATTENTION_ROLES, EXPERT_ROLES, MODULE_PATHS, Role
from samebits.rollout.group import Group
from samebits.rollout.slots import AdapterSlots, ExpertsAdapter, ProjectionAdapter

FUSED = (
    (Role.ATTN_Q, Role.ATTN_K, Role.ATTN_V), (Role.ATTN_O,), (Role.SHARED_GATE, Role.SHARED_UP), (Role.SHARED_DOWN,),
    (Role.DENSE_GATE, Role.DENSE_UP), (Role.DENSE_DOWN,),
)  # fmt: skip


class SlotLayers:
    """Slots and layers as `rollout.model` makes them: q, k and v in one, `stacked` as the kernels take them."""

    def __init__(
        self,
        spec: AdapterSpec,
        rank: int = 0,
        world: int = 1,
        dtype: torch.dtype = torch.bfloat16,
        stacked: bool = True,
        device: torch.device | str = "cpu",
    ) -> None:
        self.settings = SimpleNamespace(profile=SimpleNamespace(hash="p"))
        self.group = Group(Ranks(world, spec.shape.experts), rank)
        self.slots = AdapterSlots(spec, dtype, torch.device(device), 8)
        self.layers: list[ProjectionAdapter | ExpertsAdapter] = []
        for layer in range(spec.shape.layers):
            self._add(layer, spec, stacked)

    def _add(self, layer: int, spec: AdapterSpec, stacked: bool) -> None:
        moe, shape = layer in spec.shape.moe_layers, spec.shape
        prefix = f"model.layers.{layer}."
        for roles in FUSED:
            if roles[0] not in ATTENTION_ROLES and ("SHARED" in roles[0].name) != moe:
                continue
            slices = [(prefix + _path(r), shape.matrix(r)[0] // self.group.world, r in spec.roles) for r in roles]
            if any(adapted for _, _, adapted in slices):
                self.layers.append(ProjectionAdapter(self.slots, slices, shape.matrix(roles[0])[1], stacked and len(roles) > 2))
        adapted = {MODULE_PATHS[r][-2:] for r in spec.roles if r in EXPERT_ROLES}
        if moe and adapted:
            first, end = self.group.experts
            path = f"{prefix}block_sparse_moe.experts"
            self.layers.append(ExpertsAdapter(self.slots, path, end - first, shape.hidden, shape.expert_intermediate, adapted, first))

    def adapters(self):
        """As the model's."""
        return iter(self.layers)


def _path(role: Role) -> str:
    return MODULE_PATHS[role]

"""LoRA master weights by role, and the bf16 values that forward and export share.

The optimizer owns fp32 masters A [r, K] and B [N, r] of each module (experts of a layer stacked: [E, r, K] and [E, N, r]).
What computes is bf16(A) and bf16(alpha / rank * B). Forward takes these values with a straight-through gradient, export sends
exactly the same bits, so the engine cannot hold another adapter than the one whose loss was differentiated.

A starts as PEFT starts it, kaiming-uniform with a = sqrt(5), which is uniform within 1 / sqrt(K); B starts at zero. Each module
draws from a generator of its own, seeded by (seed, layer, role), so neither the world size nor the set of targets changes it. Where experts
are spread over ranks (`expert_ranks`) a rank draws those of all and keeps its own.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from samebits.kernels.linear import LoRA
from samebits.quant.adapter import AdapterSpec, tensor_name
from samebits.quant.roles import EXPERT_ROLES, ModuleId, Role
from samebits.quant.stacks import StackedTensors

from .expert_ranks import ExpertRanks
from .export import Side, export_stacks, rounded


@dataclass(frozen=True, slots=True)
class LoRASettings:
    """What the adapter of a run looks like."""

    rank: int
    alpha: float
    roles: tuple[Role, ...]
    seed: int = 0

    @property
    def scale(self) -> float:
        """alpha / rank, folded into B."""
        return self.alpha / self.rank


class _StraightThrough(torch.autograd.Function):
    """bf16 value held in fp32, so that autograd hands back an unrounded fp32 gradient, times `share`."""

    @staticmethod
    def forward(ctx, master: Tensor, scale: float, share: float) -> Tensor:
        ctx.factor = scale * share
        return rounded(master, scale).float()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad * ctx.factor if ctx.factor != 1.0 else grad, None, None


class LoRAPair(nn.Module):
    """Masters of one module, or of one projection of all experts of a layer."""

    def __init__(self, module: ModuleId, n: int, k: int, experts: int, settings: LoRASettings, ranks: ExpertRanks | None = None) -> None:
        """`module.expert` is ignored; `experts` is 0 for a module that is no expert. `ranks`: those over which the experts are spread."""
        super().__init__()
        self.role, self.layer, self.experts, self.scale = module.role, module.layer, experts, settings.scale
        self._ranks = ranks
        mine = range(experts or 1) if ranks is None else ranks.mine
        generator = torch.Generator().manual_seed(_seed(settings.seed, module.layer, module.role))
        a = torch.empty(len(mine), settings.rank, k)
        for expert in range(experts or 1):
            one = a[expert - mine.start] if expert in mine else torch.empty(settings.rank, k)
            one.uniform_(-(k**-0.5), k**-0.5, generator=generator)
        b = torch.zeros(len(mine), n, settings.rank)
        if ranks is not None:
            self.lora_A, self.lora_B = ranks.parameter(a, requires_grad=True), ranks.parameter(b, requires_grad=True)
        else:
            self.lora_A, self.lora_B = (nn.Parameter(t if experts else t[0]) for t in (a, b))

    def values(self) -> LoRA:
        """The values that compute, as one adapter slot: a [1, (E,) r, K], b [1, (E,) N, r], fp32 tensors of bf16 numbers.

        Of experts that are spread over ranks, this rank's.
        """
        a, b, share = self.lora_A, self.lora_B, 1.0
        if self._ranks is not None:
            a, b, share = self._ranks.local(a), self._ranks.local(b), self._ranks.share
        return LoRA(_StraightThrough.apply(a, 1.0, share)[None], _StraightThrough.apply(b, self.scale, share)[None])

    def sides(self) -> tuple[Side, Side]:
        """A and B, as `export.export_stacks` takes them."""
        a, b = self._names
        return Side(a, self.lora_A, 1.0, self.experts > 0), Side(b, self.lora_B, self.scale, self.experts > 0)

    @functools.cached_property
    def _names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """PEFT names of A and B, of one module or of each expert."""
        modules = [ModuleId(self.role, self.layer, expert) for expert in (range(self.experts) if self.experts else (-1,))]
        return tuple(tensor_name(module, "A") for module in modules), tuple(tensor_name(module, "B") for module in modules)

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """PEFT name and bf16 tensor of each side, one pair an expert. Gathers shards: every rank must drain it."""
        return iter(StackedTensors(export_stacks([self])))


class LayerLoRA(nn.Module):
    """The pairs of one layer, by role. Roles that the run does not adapt are absent."""

    def __init__(self, spec: AdapterSpec, layer: int, settings: LoRASettings, ranks: ExpertRanks | None = None) -> None:
        """`ranks`: those over which the routed experts are spread, or None."""
        super().__init__()
        seen: dict[Role, LoRAPair] = {}
        for module in spec.shape.modules(spec.roles):
            if module.layer == layer and module.role not in seen:
                n, k = spec.shape.matrix(module.role)
                experts = spec.shape.experts if module.role in EXPERT_ROLES else 0
                seen[module.role] = LoRAPair(module, n, k, experts, settings, ranks if experts else None)
        self.pairs = nn.ModuleDict({role.name: pair for role, pair in seen.items()})

    def values(self, role: Role) -> LoRA | None:
        """Values of a role's pair, or None where the role is not adapted."""
        return self.pairs[role.name].values() if role.name in self.pairs else None

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors of the layer under their PEFT names."""
        return iter(StackedTensors(export_stacks(self.pairs.values())))


def values_of(lora: LayerLoRA | None, role: Role | None) -> LoRA | None:
    """Values of a role's pair, or None without an adapter."""
    return lora.values(role) if lora is not None and role is not None else None


def _seed(seed: int, layer: int, role: Role) -> int:
    digest = hashlib.sha256(f"{seed}/{layer}/{role}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def full(parameter: Tensor) -> Tensor:
    """The whole of a parameter that may be sharded, without gradient. Every rank must ask."""
    tensor = parameter.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

"""LoRA master weights by role, and the bf16 values that forward and export share.

The optimizer owns fp32 masters A [r, K] and B [N, r] of each module (experts of a layer stacked: [E, r, K] and [E, N, r]).
What computes is bf16(A) and bf16(alpha / rank * B). Forward takes these values with a straight-through gradient, export sends
exactly the same bits, so the engine cannot hold another adapter than the one whose loss was differentiated.

A starts as PEFT starts it, kaiming-uniform with a = sqrt(5), which is uniform within 1 / sqrt(K); B starts at zero. Each module
draws from a generator of its own, seeded by (seed, layer, role), so neither the world size nor the set of targets changes it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from samebits.kernels.linear import LoRA
from samebits.quant.adapter import AdapterSpec, tensor_name
from samebits.quant.roles import EXPERT_ROLES, ModuleId, Role


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


def rounded(master: Tensor, scale: float = 1.0) -> Tensor:
    """The bf16 value of an fp32 master: scaled in fp32, rounded once. The one place where a master becomes what computes."""
    return (master * scale if scale != 1.0 else master).to(torch.bfloat16)


class _StraightThrough(torch.autograd.Function):
    """bf16 value held in fp32, so that autograd hands back an unrounded fp32 gradient."""

    @staticmethod
    def forward(ctx, master: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return rounded(master, scale).float()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.scale if ctx.scale != 1.0 else grad, None


class LoRAPair(nn.Module):
    """Masters of one module, or of one projection of all experts of a layer."""

    def __init__(self, module: ModuleId, n: int, k: int, experts: int, settings: LoRASettings) -> None:
        """`module.expert` is ignored; `experts` is 0 for a module that is no expert."""
        super().__init__()
        self.role, self.layer, self.experts, self.scale = module.role, module.layer, experts, settings.scale
        stack = (experts,) if experts else ()
        generator = torch.Generator().manual_seed(_seed(settings.seed, module.layer, module.role))
        a = torch.empty(*stack, settings.rank, k).uniform_(-(k**-0.5), k**-0.5, generator=generator)
        self.lora_A = nn.Parameter(a)
        self.lora_B = nn.Parameter(torch.zeros(*stack, n, settings.rank))

    def values(self) -> LoRA:
        """The values that compute, as one adapter slot: a [1, (E,) r, K], b [1, (E,) N, r], fp32 tensors of bf16 numbers."""
        a, b = _StraightThrough.apply(self.lora_A, 1.0), _StraightThrough.apply(self.lora_B, self.scale)
        return LoRA(a[None], b[None])

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """PEFT name and bf16 tensor of each side, one pair an expert. Gathers shards: every rank must drain it.

        Shards are rounded before they travel: the same bits, in half the bytes.
        """
        a, b = full(rounded(self.lora_A.detach())), full(rounded(self.lora_B.detach(), self.scale))
        for expert in range(self.experts) if self.experts else (-1,):
            module = ModuleId(self.role, self.layer, expert)
            yield tensor_name(module, "A"), a[expert] if self.experts else a
            yield tensor_name(module, "B"), b[expert] if self.experts else b


class LayerLoRA(nn.Module):
    """The pairs of one layer, by role. Roles that the run does not adapt are absent."""

    def __init__(self, spec: AdapterSpec, layer: int, settings: LoRASettings) -> None:
        super().__init__()
        seen: dict[Role, LoRAPair] = {}
        for module in spec.shape.modules(spec.roles):
            if module.layer == layer and module.role not in seen:
                n, k = spec.shape.matrix(module.role)
                experts = spec.shape.experts if module.role in EXPERT_ROLES else 0
                seen[module.role] = LoRAPair(module, n, k, experts, settings)
        self.pairs = nn.ModuleDict({role.name: pair for role, pair in seen.items()})

    def values(self, role: Role) -> LoRA | None:
        """Values of a role's pair, or None where the role is not adapted."""
        return self.pairs[role.name].values() if role.name in self.pairs else None

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors of the layer under their PEFT names."""
        for pair in self.pairs.values():
            yield from pair.export()


def _seed(seed: int, layer: int, role: Role) -> int:
    digest = hashlib.sha256(f"{seed}/{layer}/{role}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def full(parameter: Tensor) -> Tensor:
    """The whole of a parameter that may be sharded, without gradient. Every rank must ask."""
    tensor = parameter.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

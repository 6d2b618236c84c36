"""The training model's MLP, of the dense layers and of the shared expert, over a base that stays packed."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from samebits.kernels.linear import FrozenWeight, split
from samebits.kernels.mlp import MLPLoRA, SharedExpert, mlp
from samebits.quant.checkpoint import Checkpoint
from samebits.quant.roles import Role

from .base import PackedBase, rows
from .lora import LayerLoRA
from .m3_config import M3Dims


class MLP(nn.Module):
    """Dense MLP of the first layers and shared expert of the others. Gate and up are one matrix, as in the engine."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, roles: tuple[Role, Role, Role], dims: M3Dims) -> None:
        super().__init__()
        self.dims, self.roles, self.prefix = dims, roles, prefix
        self.recompute = False
        self.gate_up = PackedBase(rows([checkpoint.weight(f"{prefix}{n}_proj") for n in ("gate", "up")]))
        self.down = PackedBase(checkpoint.weight(f"{prefix}down_proj"))

    def forward(self, x: Tensor, lora: LayerLoRA | None) -> Tensor:
        """x [T, H] to [T, H]."""
        gate_up, down, adapters = self.operands(lora)
        return mlp(x, gate_up, down, self.dims.activation, adapters, recompute=self.recompute, point=self.prefix)

    def operands(self, lora: LayerLoRA | None) -> SharedExpert:
        """Weights and adapters as `kernels.mlp` takes them."""
        pairs = [lora.values(role) if lora is not None else None for role in self.roles]
        return SharedExpert(self.gate_up.value(), self.down.value(), MLPLoRA(*pairs) if any(p is not None for p in pairs) else None)

    def base_weights(self, prefix: str) -> Iterator[tuple[str, FrozenWeight]]:
        """See `M3ForTraining.base_weights`."""
        gate, up = split(self.gate_up.gathered(), 2)
        yield from ((f"{prefix}gate_proj", gate), (f"{prefix}up_proj", up), (f"{prefix}down_proj", self.down.gathered()))

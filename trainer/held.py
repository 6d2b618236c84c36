"""What a trainer rank holds between steps, counted from the tensors themselves: shards of base and adapter, and the optimizer's state."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .model import M3ForTraining


def held_bytes(module: M3ForTraining, optimizer: torch.optim.Optimizer | None) -> dict[str, int]:
    """Bytes of this rank by part: `base` (packed), `adapter` (fp32 masters), `gradient`, `moments` (fp32, both) and `counters`."""
    found = dict.fromkeys(("base", "adapter", "gradient", "moments", "counters"), 0)
    for parameter in module.parameters():
        found["adapter" if parameter.requires_grad else "base"] += _local(parameter)
        if parameter.grad is not None:
            found["gradient"] += _local(parameter.grad)
    for state in optimizer.state.values() if optimizer is not None else ():
        for value in state.values():
            if isinstance(value, Tensor):  # a step counter has no dimension
                found["moments" if value.dim() else "counters"] += _local(value)
    return found


def _local(tensor: Tensor) -> int:
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part.numel() * part.element_size()

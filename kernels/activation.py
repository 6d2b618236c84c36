"""SwiGLU as MiniMax-M3 and gpt-oss use it, gate and up in separate halves (not interleaved)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class SwiGLU(NamedTuple):
    """Constants of the activation: `min(gate, limit) * sigmoid(alpha * gate) * (clamp(up, limit) + beta)`."""

    alpha: float = 1.702
    beta: float = 1.0
    limit: float = 7.0


def swiglu_oai(gate_up: Tensor, params: SwiGLU) -> Tensor:
    """`gate_up` [..., 2I], gate half first, to fp32 [..., I]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate = gate.clamp(max=params.limit)
    up = up.clamp(-params.limit, params.limit)
    return gate * torch.sigmoid(params.alpha * gate) * (up + params.beta)

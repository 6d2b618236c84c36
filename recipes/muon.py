"""Muon for the pre-training of the tiny model: momentum whose every matrix is replaced by its nearest orthogonal one.

Source: Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024), with the update scaled by 0.2 sqrt(max(N, K))
as in Liu et al., "Muon is scalable for LLM training" (2025), so that AdamW's rates carry over. PyTorch's own `torch.optim.Muon` takes
neither stacks of experts nor fp32 in its iteration, which on a CPU without bf16 instructions is ten times slower. On the tiny task
Muon needs about a third of AdamW's steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # quintic Newton-Schulz iteration, steepest at zero


def orthogonalise(g: Tensor, iterations: int = 5, dtype: torch.dtype | None = None) -> Tensor:
    """Approximate U V^T of the SVD of each matrix of `g` [..., N, K]: singular values end between about 0.7 and 1.2.

    `dtype`: of the iteration and the result; None: that of `g`. In bf16 a GPU is several times as fast. Given, the sums are made inside
    the products: fewer passes, other last bits.
    """
    a, b, c = _COEFFICIENTS
    tall = g.shape[-2] > g.shape[-1]
    x = g.mT if tall else g
    x = (x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)).to(dtype or g.dtype)
    if dtype is not None:
        x = x.view(-1, *x.shape[-2:])
        for _ in range(iterations):
            gram = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return (x.mT if tall else x).view(g.shape)
    for _ in range(iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum and decoupled weight decay, over matrices [N, K] or stacks of them [E, N, K]."""

    def __init__(
        self, params: Iterable[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.01, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "dtype": dtype})

    @torch.no_grad()
    def step(self) -> None:
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                velocity = self.state[p].setdefault("velocity", torch.zeros_like(p))
                velocity.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonalise(p.grad.lerp(velocity, group["momentum"]), dtype=group["dtype"])
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(p.shape[-2:])))

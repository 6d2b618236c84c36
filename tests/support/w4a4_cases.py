"""Layers and tokens for W4A4: routes that leave experts out, ranks of several slots, inputs of more than one exact part."""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.kernels.activation import SwiGLU
from samebits.kernels.linear import LoRA
from samebits.kernels.moe import W4A4, ExpertLoRA, moe
from samebits.quant import nvfp4
from samebits.quant.nvfp4 import NVFP4Tensor

HIDDEN, WIDTH, EXPERTS, TOP, RANK, SLOTS = 1200, 144, 6, 3, 5, 2
STATIC = W4A4(torch.tensor(4.0 / 2688), torch.tensor(9.0 / 2688))


class Layer:
    """Made on the CPU, and the same on every device that asks."""

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=g)

        def pair(n: int, k: int) -> LoRA:
            return LoRA((normal(SLOTS, EXPERTS, RANK, k) / k**0.5).bfloat16(), (normal(SLOTS, EXPERTS, n, RANK) * 0.3).bfloat16())

        def packed(n: int, k: int) -> NVFP4Tensor:
            w = normal(EXPERTS, n, k) * torch.arange(1.0, EXPERTS + 1)[:, None, None] / k**0.5
            return nvfp4.quantize(w, nvfp4.global_scale(w.abs().amax((1, 2))))

        self.w13, self.w2 = packed(2 * WIDTH, HIDDEN), packed(HIDDEN, WIDTH)
        self.lora = ExpertLoRA(pair(WIDTH, HIDDEN), pair(WIDTH, HIDDEN), pair(HIDDEN, WIDTH))

    def out(self, batch: tuple[Tensor, ...], scales: W4A4, device: str, adapters: bool = True) -> Tensor:
        """`moe` of x, ids, weights and slots on the device, and back on the CPU."""
        x, ids, weights, slots = (t.to(device) for t in batch)
        w13, w2 = (NVFP4Tensor(*(part.to(device) for part in w)) for w in (self.w13, self.w2))
        lora = ExpertLoRA(*(LoRA(*(t.to(device) for t in p)) for p in self.lora)) if adapters else None
        scales = W4A4(*(s if s is None else s.to(device) for s in scales))
        return moe(x, w13, w2, ids, weights, SwiGLU(), lora, slots if adapters else None, w4a4=scales).cpu()


def tokens(count: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> tuple[Tensor, ...]:
    """x, ids, weights and slots of `count` tokens, none of which chooses expert 2."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, HIDDEN, generator=g) * torch.logspace(-3, 1, HIDDEN)[torch.randperm(HIDDEN, generator=g)]
    logits = torch.randn(count, EXPERTS, generator=g)
    logits[:, 2] = -100
    ids = logits.topk(TOP, 1).indices
    return x.to(dtype), ids, torch.rand(count, TOP, generator=g), torch.randint(-1, SLOTS, (count,), generator=g)

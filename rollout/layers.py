"""Layers of the engine that hold a part of a weight and give a part of an output: projections, embedding, head.

Which part is said by `quant.ranks`; on a replica of one rank it is all. The caller gathers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.platforms import current_platform

from samebits.kernels.linear import frozen_linear
from samebits.quant.ranks import Part

from .group import Group
from .quantization import MXFP8Linear
from .slots import ProjectionAdapter


class Slice(NamedTuple):
    """One of the projections that lie below each other in a layer's weight."""

    path: str
    """In a checkpoint."""
    whole: int
    """Rows of the projection."""
    part: Part
    """Which of them are here."""

    @property
    def rows(self) -> int:
        """How many are here."""
        return self.part.stop - self.part.start


class Projection(nn.Module):
    """Projections of one input in MXFP8, stacked, with their adapters: x [T, K] to this rank's outputs [T, N]."""

    def __init__(self, inputs: int, slices: list[tuple[str, int]], group: Group, prefix: str) -> None:
        """`slices`: path and rows of each projection, all ranks' together."""
        super().__init__()
        self.prefix = prefix
        self.slices = [Slice(path, rows, group.part(path, (rows, inputs))) for path, rows in slices]
        self.sizes = [one.rows for one in self.slices]
        self.adapter: ProjectionAdapter | None = None
        self.quant_method = MXFP8Linear()
        dtype = get_current_vllm_config().model_config.dtype
        self.quant_method.create_weights(self, inputs, self.sizes, inputs, sum(rows for _, rows in slices), dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[T, K] to [T, N] in x's dtype."""
        return self.quant_method.apply(self, x)

    def target(self, index: int, leaf: str) -> Tensor:
        """Where the part of slice `index` goes in parameter `leaf`."""
        start = sum(self.sizes[:index])
        return getattr(self, leaf).data[start : start + self.sizes[index]]


class Embedding(nn.Module):
    """The embedding in the compute dtype; a rank has columns of it, so that rows are put together and never summed."""

    def __init__(self, tokens: int, hidden: int, group: Group) -> None:
        super().__init__()
        self.part = group.part("model.embed_tokens", (tokens, hidden))
        dtype = get_current_vllm_config().model_config.dtype
        self.weight = nn.Parameter(torch.zeros(self.part.shape((tokens, hidden)), dtype=dtype), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        """[T] to [T, columns]."""
        return F.embedding(ids, self.weight)


class Head(nn.Module):
    """The head in 16 bits, on a CPU in fp32, so that no call converts it. A rank has rows of it, all ranks equally many."""

    def __init__(self, tokens: int, hidden: int, group: Group) -> None:
        super().__init__()
        self.tokens = tokens
        self.part = group.part("lm_head", (tokens, hidden)) or Part(0, tokens, tokens)
        dtype = torch.float32 if current_platform.is_cpu() else get_current_vllm_config().model_config.dtype
        # Of equal height everywhere, as a gather needs them: what is beyond the vocabulary stays zero and is cut off.
        self.weight = nn.Parameter(torch.zeros(-(-tokens // group.world), hidden, dtype=dtype), requires_grad=False)

    @property
    def held(self) -> Tensor:
        """The rows that have a token."""
        return self.weight.data[: self.part.stop - self.part.start]

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] to fp32 logits [T, rows]."""
        return frozen_linear(x, self.weight, outputs=self.tokens)

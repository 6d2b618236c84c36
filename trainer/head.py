"""Log-probabilities of given tokens, in fp32 and in chunks of tokens.

The logits of a chunk exist only while the chunk is computed: with a vocabulary of 200 000 the logits of a whole packed batch would
be the largest tensor of the step. Backward computes them again. Temperature divides the logits, once, before the softmax, as the
engine's sampler does. On CUDA neither the product nor the sum of a row knows of its chunk: chunks change no bit.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from samebits.kernels.linear import frozen_linear
from samebits.kernels.logprobs import token_logprob_rows

CHUNK_ELEMENTS = 1 << 25
"""Logits held at a time on CPU: 128 MiB of fp32."""
CUDA_CHUNK_ELEMENTS = 1 << 27
"""The same on CUDA, where a chunk must be large for the product to be worth reading the whole head: 512 MiB."""
TILE = 128
"""Rows of a tile of that product: chunks hold whole ones, where they hold one."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: Tensor,
    entropy: bool = False,
    chunk_elements: int | None = None,
    head_rows: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """log softmax(hidden weight^T / temperature)[labels] and, where asked for, the entropy of that distribution.

    Args:
        hidden: [T, H]. weight: head [V, H]. labels: int64 [T]. temperature: fp32 [T], positive.
        head_rows: of the whole head, where `weight` is its first rows: the order of a sum is chosen by it.
    Returns:
        fp32 [T] log-probabilities and fp32 [T] entropies or None. Gradients go to `hidden`.
    """
    whole = head_rows or len(weight)
    rows = max(1, (chunk_elements or (CUDA_CHUNK_ELEMENTS if hidden.is_cuda else CHUNK_ELEMENTS)) // weight.shape[0])
    if hidden.is_cuda and rows > TILE:
        rows -= rows % TILE
    parts = zip(hidden.split(rows), labels.split(rows), temperature.split(rows), strict=True)
    if len(hidden) <= rows or not torch.is_grad_enabled():
        out = [_chunk(h, weight, whole, y, t, entropy) for h, y, t in parts]
    else:
        out = [checkpoint(_chunk, h, weight, whole, y, t, entropy, use_reentrant=False, preserve_rng_state=False) for h, y, t in parts]
    picked = torch.cat([p for p, _ in out])
    return picked, torch.cat([e for _, e in out]) if entropy else None


def _chunk(
    hidden: Tensor, weight: Tensor, head_rows: int, labels: Tensor, temperature: Tensor, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    picked, entropies = token_logprob_rows(frozen_linear(hidden, weight, head_rows), labels[:, None], temperature, entropy)
    return picked.squeeze(-1), entropies

"""MSA attention in the order of the Triton kernels' sums, said once more in torch, to compare other kernels with that claim those bits.

Labels and trees are those of the docstrings of `triton_msa_tiles` and `triton_msa_attend`. Inside an MMA, of whose sum nothing is claimed,
the sixteen products are added to the accumulator one after the other, in the order of the operands' k, each sum rounded to fp32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from samebits.kernels.msa_ops import Batch, Packed

DIMENSIONS = [
    32 * t + 8 * w + 4 * h + 2 * i1 + i0 for w in range(4) for i1 in range(2) for i0 in range(2) for t in range(4) for h in range(2)
]
"""Dimension of each k of the scores' eight steps."""
KEYS = [n // 16 * 16 + (n // 2 % 4) * 4 + (n // 8 % 2) * 2 + n % 2 for n in range(128)]
"""Key of each label: column of the scores, k of the weighted values' eight steps."""
GROUP = 4
NONE = float("-inf")


def _finite(x: Tensor) -> Tensor:
    return torch.where(x == NONE, 0.0, x)


def _tree(x: Tensor) -> Tensor:
    """Sum over the last dimension, a power of two, neighbours first."""
    while x.shape[-1] > 1:
        x = x[..., ::2] + x[..., 1::2]
    return x[..., 0]


def _products(a: Tensor, b: Tensor) -> Tensor:
    """[N, 16, K] by [N, K, M], one k after the other."""
    sums = torch.zeros(a.shape[0], a.shape[1], b.shape[2])
    for k in range(a.shape[2]):
        sums = sums + a[:, :, k, None] * b[:, None, k]
    return sums


def _join(a: tuple, b: tuple, exp2: Callable[[Tensor], Tensor]) -> tuple:
    top = torch.maximum(a[0], b[0])
    x, y = exp2(a[0] - _finite(top))[:, None], exp2(b[0] - _finite(top))[:, None]
    return top, a[1] * x + b[1] * y, a[2] * x + b[2] * y


def attend(
    q: Tensor,
    packed: Packed,
    chosen: Tensor,
    batch: Batch,
    factor: float,
    exp2: Callable[[Tensor], Tensor],
    log2: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """(bf16 [T, H, 128], fp32 [T, H] log2 of the softmax's sum), on CPU.

    Args:
        q: bf16. packed: bf16 keys and values; a block may end beyond them. factor: softmax scale * log2(e), a power of two, so that a score
            times it is exact. exp2, log2: of the kernel that is compared.
    """
    tokens, heads, _ = q.shape
    groups = chosen.shape[1]
    each = heads // groups
    keys, values = (torch.cat((t.float(), torch.zeros(128, *t.shape[1:]))) for t in (packed.keys, packed.values))
    items = [(t, g, b) for t in range(tokens) for g in range(groups) for b in chosen[t, g].tolist() if b >= 0]
    rows = torch.zeros(len(items), 16, 128)
    k, v = torch.empty(len(items), 128, 128), torch.empty(len(items), 128, 128)
    limit = torch.empty(len(items), 1, 1)
    for i, (t, g, b) in enumerate(items):
        first = int(packed.start[batch.request[t]]) + 128 * b
        rows[i, :each] = q[t, g * each : (g + 1) * each].float()
        k[i], v[i] = keys[first : first + 128, g], values[first : first + 128, g]
        limit[i] = int(batch.position[t]) + 1 - 128 * b
    label = torch.tensor(KEYS)
    unseen = label >= limit  # [N, 1, 128]
    scores = _products(rows[:, :, DIMENSIONS], k[:, label][:, :, DIMENSIONS].mT).masked_fill(unseen, NONE)
    top = scores.amax(-1) * factor
    weights = exp2(scores * factor - _finite(top)[:, :, None])
    sums = _tree((weights[..., ::2] + weights[..., 1::2]).view(-1, 16, 8, 8).mT)  # lane sums: over the eight steps
    summed = _products(weights.bfloat16().float(), v[:, label].masked_fill(unseen.mT, 0.0))
    out, lse = torch.empty(tokens, heads, 128, dtype=torch.bfloat16), torch.empty(tokens, heads)
    found = {(t, g): [] for t in range(tokens) for g in range(groups)}
    for i, (t, g, _) in enumerate(items):
        found[t, g].append((top[i], sums[i], summed[i]))
    empty = (torch.full((16,), NONE), torch.zeros(16, 8), torch.zeros(16, 128))
    for (t, g), parts in found.items():
        everything = empty
        for first in range(0, len(parts), GROUP):
            group = empty
            for part in parts[first : first + GROUP]:
                group = _join(group, part, exp2)
            everything = _join(everything, group, exp2)
        total = _tree(everything[1])
        some = torch.where(total > 0, total, 1.0)
        mine = slice(g * each, (g + 1) * each)
        out[t, mine] = (everything[2] * (1.0 / some)[:, None] + 0.0).bfloat16()[:each]
        lse[t, mine] = torch.where(total > 0, everything[0] + log2(some), NONE)[:each]
    return out, lse

"""Jagged columns on the host, made and cut whole: torch takes a jagged tensor apart into one tensor a row for what these do at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def jagged(values: Tensor, lengths: Tensor) -> Tensor:
    """Rows of `lengths` int64 [B] that follow each other in `values` [T, ...], as a jagged tensor [B, *, ...]; nothing is copied."""
    longest = {"min_seqlen": int(lengths.min()), "max_seqlen": int(lengths.max())}
    return torch.nested.nested_tensor_from_jagged(values, torch.nn.functional.pad(lengths.cumsum(0), (1, 0)), **longest)


def is_plain(column: object) -> bool:
    """Whether `column` is a jagged tensor on the host whose rows follow each other without holes, first dimension ragged, no gradient."""
    nested = isinstance(column, Tensor) and column.is_nested and column.layout is torch.jagged
    return nested and column.device.type == "cpu" and column._ragged_idx == 1 and column.lengths() is None and not column.requires_grad


def jagged_rows(column: Tensor, rows: Tensor) -> Tensor:
    """Rows `rows` int [N] of a jagged tensor [B, *, ...] on the host, as a jagged tensor [N, *, ...] of its own."""
    offsets = column.offsets()
    lengths = offsets.diff()[rows]
    ends = lengths.cumsum(0)
    total = int(ends[-1])
    ahead = (offsets[:-1][rows] - (ends - lengths)).repeat_interleave(lengths, output_size=total)
    return jagged(column.values()[torch.arange(total) + ahead], lengths)


def jagged_join(columns: Sequence[Tensor]) -> Tensor:
    """The rows of jagged tensors [B_i, *, ...] one after the other; rows of all of them must have the same dtype and inner shape."""
    if len(columns) == 1:
        return columns[0]
    return jagged(torch.cat([c.values() for c in columns]), torch.cat([c.offsets().diff() for c in columns]))


def padded_responses(values: Tensor, prompts: Tensor, responses: Tensor) -> Tensor:
    """What a packed output says of responses, padded with zeros: [B, R], R the longest response.

    Args:
        values: [T], of the packed sequences; the value at a token is about the token after it.
        prompts, responses: jagged [B, *], which together are the sequences. No prompt is empty.
    Raises `ValueError` where they are not the sequences of `values`, or a prompt is empty.
    """
    total = len(responses.values())
    if len(prompts) != len(responses) or len(prompts.values()) + total != len(values):
        raise ValueError(f"{len(values)} values are not those of {len(prompts.values())} prompt and {total} response tokens")
    # Jagged tensors that `jagged` made know their shortest and longest row: nobody waits for a GPU.
    if not prompts._get_min_seqlen():
        raise ValueError("a sequence has no prompt: nothing says how likely its first token was")
    return take_responses(values, prompts.offsets(), responses.offsets(), total, responses._get_max_seqlen())


def take_responses(values: Tensor, prompts: Tensor, responses: Tensor, total: int, longest: int) -> Tensor:
    """The same by the offsets int64 [B + 1] of prompts and responses, without a word from the device.

    `total`, `longest`: response tokens of all sequences, and of the longest response.
    """
    count = len(responses) - 1
    row = torch.arange(count, device=values.device).repeat_interleave(responses.diff(), output_size=total)
    token = torch.arange(total, device=values.device)
    # Response token i of the batch lies behind the prompts of its own sequence and of those before it.
    picked = values.index_select(0, token + prompts[1:][row] - 1)
    at = row * longest + token - responses[:-1][row]
    return picked.new_zeros(count * longest).index_put((at,), picked).view(count, longest)

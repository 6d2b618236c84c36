"""The promise of `numerics.parity: bitwise`: every logprob of the trainer has the bits of the engine's, before anything is learned from it.

Kernels whose rows depend on themselves alone make the promise possible; this holds the trainer to it. Each micro-batch is compared before
its backward. At the first response token that differs every rank stops, with one message that names step, sample and token, and what the
trainer computed at its taps on the way to that token is left behind, so that the job can lay the engine's beside it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from tensordict import TensorDict
from torch import Tensor

from .shipment import text_row

RECORD = "difference.json"
TAPS = "trainer_taps.safetensors"


class ParityLost(RuntimeError):
    """A logprob of the trainer has other bits than the engine's. The message is one line."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first response token of a micro-batch whose logprobs differ."""

    row: int
    """Of the micro-batch."""
    token: int
    """Index in the sequence, prompt included."""
    prompt: int
    """Tokens of the prompt."""
    trainer: float
    engine: float


def first_difference(logprobs: Tensor, batch: TensorDict) -> Difference | None:
    """Where the bits of `logprobs` and of the rollout's differ first.

    Args:
        logprobs: fp32 [T], packed; row t scores token t + 1 of its sequence. batch: the micro-batch, jagged, with `input_ids`, `responses`,
            `rollout_log_probs` and `response_mask`.
    """
    ends = batch["input_ids"].offsets()[1:]
    lengths = batch["responses"].offsets().diff()
    # Response token j of a sequence that ends before e is scored by row e - 1 - length + j.
    starts = torch.repeat_interleave(ends - 1 - lengths, lengths)
    within = torch.arange(len(starts), device=starts.device) - torch.repeat_interleave(batch["responses"].offsets()[:-1], lengths)
    ours, theirs = logprobs.detach().float()[starts + within], batch["rollout_log_probs"].values().float()
    counted = batch["response_mask"].values().bool()
    differs = (ours.view(torch.int32) != theirs.view(torch.int32)) & counted
    if not differs.any():
        return None
    at = int(differs.nonzero()[0])
    row = int(torch.searchsorted(batch["responses"].offsets()[1:], at, right=True))
    prompt = int(batch["input_ids"].offsets().diff()[row] - lengths[row])
    return Difference(row, prompt + int(within[at]), prompt, float(ours[at]), float(theirs[at]))


def require_same_bits(
    logprobs: Tensor,
    micro: TensorDict,
    whole: TensorDict,
    step: int,
    folder: Path,
    record: Callable[[int, int], dict[str, Tensor]],
    group: Any,
) -> None:
    """Raise `ParityLost` on every rank of `group` when any of them finds a difference; collective.

    Args:
        logprobs, micro: as `first_difference` takes them. whole: the rank's batch in the job's order;
            its `uid`, a `text_column`, names the sample.
        step: the step that is being learned. folder: where the record and the taps go.
        record: (row, tokens) to the taps of that many first tokens of a sequence; every rank calls it or none.
    """
    found = first_difference(logprobs, micro)
    lost = torch.tensor(found is not None, dtype=torch.int32, device=logprobs.device)
    dist.all_reduce(lost, dist.ReduceOp.MAX, group=group)
    if not lost:
        return
    said: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, None if found is None else _message(found, micro, whole, step), group=group)
    first = next(rank for rank, text in enumerate(said) if text is not None)
    row, token = (0, 1) if found is None else (found.row, found.token)
    taps = record(row, token)
    if dist.get_rank(group) == first:
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: value.contiguous() for name, value in taps.items()}, folder / TAPS)
        tokens = micro["input_ids"].unbind()[row].tolist()[:token]
        (folder / RECORD).write_text(json.dumps({"step": step, "message": said[first], "tokens": tokens, **asdict(found)}) + "\n")
    raise ParityLost(said[first])


def _message(found: Difference, micro: TensorDict, whole: TensorDict, step: int) -> str:
    ids = micro["input_ids"].unbind()[found.row]
    rows = (i for i, other in enumerate(whole["input_ids"].unbind()) if torch.equal(other.to(ids.device), ids))
    at = next(rows, found.row)
    name = f"sample {at}" + (f" (prompt {text_row(whole['uid'], at)})" if "uid" in whole else "")
    return (
        f"step {step}: {name}: token {found.token} (prompt of {found.prompt} tokens): trainer logprob {found.trainer!r}, "
        f"engine {found.engine!r}: numerics.parity=bitwise allows no difference"
    )

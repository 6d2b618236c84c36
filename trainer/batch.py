"""What the training engine takes out of a verl batch, and what it refuses.

A verl mini-batch is a TensorDict of jagged tensors: `input_ids` over prompt and response, and over the response alone `responses`,
`response_mask`, `advantages`, `old_log_probs` and `rollout_log_probs`. Routes come as `routed_experts` over prompt and response.
Everything here raises `BatchError` in one line before the first forward: a batch that is missing something would train silently
on something else.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import torch
import torch.distributed as dist
from tensordict import NonTensorStack, TensorDict
from torch import Tensor

from .m3_config import M3Dims

ROUTES = "routed_experts"
BLOCKS = "block_choices"
_RESPONSE_FIELDS = ("response_mask", "advantages", "old_log_probs", "rollout_log_probs")


class BatchError(ValueError):
    """A batch lacks what the configured objective or replay needs."""


class PackedBatch(NamedTuple):
    """The inputs of `M3ForTraining.forward`, packed."""

    tokens: Tensor  # int64 [T]
    lengths: list[int]
    labels: Tensor  # int64 [T], the following token; meaningless after the last token of a sequence
    temperature: Tensor  # fp32 [T]
    routes: Tensor | None  # int16 [T, layers, k], -1 native
    blocks: Tensor | None  # int16 [T, layers, G, n], -1 native


def without_row_objects(batch: TensorDict) -> TensorDict:
    """The batch without its columns of one Python object a row (ids, dicts): training reads none, and they are slow to cut and move."""
    return batch.exclude(*(key for key, value in batch.items() if isinstance(value, NonTensorStack)))


def pack(batch: TensorDict, replay: bool, lengths: list[int] | None = None) -> PackedBatch:
    """Packed model inputs of a micro-batch. Raises `BatchError` on a temperature that is not positive.

    `lengths`: those of the sequences, where the host knows them; it waits for the device otherwise.
    """
    ids = batch["input_ids"]
    tokens, of_rows = ids.values(), ids.offsets().diff()
    temperature = batch["temperature"]
    if not isinstance(temperature, Tensor):
        temperature = torch.full((len(of_rows),), float(temperature))
    if not (temperature > 0).all():
        raise BatchError(f"temperature must be positive in training, not {temperature.min().item()}")
    return PackedBatch(
        tokens,
        of_rows.tolist() if lengths is None else lengths,
        tokens.roll(-1),
        temperature.to(tokens.device, torch.float32).repeat_interleave(of_rows, output_size=len(tokens)),
        _rows(batch, ROUTES) if replay else None,
        _rows(batch, BLOCKS) if replay and BLOCKS in batch else None,
    )


def _rows(batch: TensorDict, key: str) -> Tensor:
    """Choices [T, ...] of all tokens; the last token of a sequence has none, whatever the batch was padded with there."""
    rows = batch[key].values().clone()
    rows[batch["input_ids"].offsets()[1:] - 1] = -1
    return rows


def require_objective_fields(batch: TensorDict, recomputed: bool = False) -> None:
    """Raise unless the batch holds the rollout's log-probabilities, as many as response tokens, as the old log-probabilities.

    `recomputed`: the old ones are the trainer's own, and only have to be numbers.
    """
    for key in ("responses", *_RESPONSE_FIELDS):
        if key not in batch:
            hint = {
                "rollout_log_probs": "; the rollout must return them (actor_rollout_ref.rollout.calculate_log_probs=True)",
                "old_log_probs": "; they are the rollout's own (algorithm.rollout_correction.bypass_mode=True)",
            }.get(key, "")
            raise BatchError(f"the batch has no {key}{hint}")
        if not batch[key].is_nested:
            raise BatchError(f"{key} is padded; the training engine takes jagged batches")
    lengths = batch["responses"].offsets().diff()
    for key in _RESPONSE_FIELDS:
        found = batch[key].offsets().diff()
        if not torch.equal(found, lengths):
            i = int((found != lengths).nonzero()[0])
            raise BatchError(f"{key} of sequence {i} has {found[i]} entries for {lengths[i]} response tokens")
    mask = batch["response_mask"].values().bool()
    rollout, old = batch["rollout_log_probs"].values()[mask], batch["old_log_probs"].values()[mask]
    if not torch.isfinite(rollout).all():
        raise BatchError("rollout_log_probs hold NaN or infinity at a response token")
    if recomputed:
        if not torch.isfinite(old).all():
            raise BatchError("old_log_probs, which the trainer recomputed, hold NaN or infinity at a response token")
    elif not torch.equal(rollout, old):
        raise BatchError("old_log_probs are not the rollout's log-probabilities; set algorithm.rollout_correction.bypass_mode=True")


def require_equal_work(batch: TensorDict, group: dist.ProcessGroup, device: torch.device | str | int) -> None:
    """Raise on every rank of `group` alike unless all of them will run equally many micro-batches; collective.

    Where verl packs by tokens it agrees on their number, among ranks that have a sequence; micro-batches of a fixed number of sequences
    are as many as a rank has sequences for. A rank with fewer would leave the others waiting for it, in a layer's gathering or exchange.
    """
    rows = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=device)
    dist.all_gather(list(rows.unbind()), torch.tensor(len(batch), device=device), group=group)
    rows = rows.tolist()
    if not all(rows):
        raise BatchError(f"rank {rows.index(0)} has no sequence of this batch, others have up to {max(rows)}")
    fixed = "use_dynamic_bsz" in batch and not batch["use_dynamic_bsz"]
    if fixed and len(set(rows)) > 1:
        raise BatchError(f"ranks have {rows} sequences of this batch: with use_dynamic_bsz=false they must have equally many")


def require_routes(batch: TensorDict, dims: M3Dims) -> int:
    """Raise unless the batch holds plausible routes for every token; returns the number of (token, MoE layer) pairs with a route."""
    if ROUTES not in batch:
        raise BatchError(f"routing replay is configured, but the batch has no {ROUTES}; the rollout must return them")
    ids, routes = batch["input_ids"], batch[ROUTES]
    if not routes.is_nested or not torch.equal(routes.offsets(), ids.offsets()):
        raise BatchError(f"{ROUTES} do not have one row for each token of the batch")
    shape = tuple(routes.values().shape[1:])
    if shape != (dims.shape.layers, dims.top_k):
        raise BatchError(f"{ROUTES} have {shape} entries a token, not {(dims.shape.layers, dims.top_k)} (layers, experts per token)")
    rows = _rows(batch, ROUTES)[:, list(dims.shape.moe_layers)]
    given = rows[..., :1] >= 0
    if ((rows >= 0) != given).any() or (rows < -1).any() or (rows >= dims.shape.experts).any():
        raise BatchError(f"{ROUTES} hold an expert id outside 0..{dims.shape.experts - 1}, or a row that is -1 only in part")
    # Every choice against those after it: a sort of so few takes ten times as long.
    choices = rows.unbind(-1)
    pairs = (one == other for one, other in itertools.combinations(choices, 2))
    repeated = functools.reduce(torch.logical_or, pairs, torch.zeros_like(choices[0], dtype=torch.bool)) & given[..., 0]
    if repeated.any():
        token, slot = (int(i) for i in repeated.nonzero()[0])
        raise BatchError(f"{ROUTES} of token {token}, layer {dims.shape.moe_layers[slot]} name one expert twice: it was not captured")
    return int(given.sum())

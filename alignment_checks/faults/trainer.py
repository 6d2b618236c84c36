"""Faults in the trainer: replay that does nothing, temperature, objective, and operations of the training model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import samebits.trainer.engine as trainer_engine
import samebits.trainer.model as trainer_model
import samebits.trainer.moe as trainer_moe
import samebits.trainer.objective as trainer_objective
import samebits.trainer.packed as trainer_packed
from samebits.alignment_checks.pair import Pair
from samebits.alignment_checks.report import Place
from samebits.kernels.rope import rope_table

from .base import fault, layers, replaced
from .engine import OPERATIONS


@contextmanager
def _packed(change: Callable[[Any], Any]) -> Iterator[None]:
    """`change` works on every packed micro-batch of the trainer."""
    original = trainer_engine.pack
    with replaced(trainer_engine, "pack", lambda *args: change(original(*args))):
        yield


@fault("trainer", "routing.replay")
def replay_without_effect(pair: Pair) -> Iterator[Place]:
    """Routes arrive, are counted, and every layer chooses by itself."""

    def forget(batch: Any) -> Any:
        return batch if batch.routes is None else batch._replace(routes=torch.full_like(batch.routes, -1))

    with _packed(forget), replaced(trainer_engine.SamebitsEngine, "_replay_metrics", lambda self, out, routes: {}):
        yield Place(layer=layers(pair)[1])


@fault("trainer", "routing.replay")
def replay_in_one_layer(pair: Pair) -> Iterator[Place]:
    """Routes are replayed in the first layer with experts only."""
    _, first, last = layers(pair)

    def forget(batch: Any) -> Any:
        if batch.routes is None:
            return batch
        routes = batch.routes.clone()
        routes[:, first + 1 :] = -1
        return batch._replace(routes=routes)

    with _packed(forget):
        yield Place(layer=last)


@fault("trainer", "routing.replay")
def replayed_weights_masked(pair: Pair) -> Iterator[Place]:
    """Replayed weights are gathered from scores that are zero outside the live top-k."""

    def masked(logits: Tensor, ids: Tensor, scale: float) -> Tensor:
        scores = torch.sigmoid(logits.float())
        k = ids.shape[-1]
        live = torch.zeros_like(scores).scatter(-1, scores.topk(k, -1).indices, 1.0)
        chosen = (scores * live).gather(-1, ids)
        return chosen / chosen.sum(-1, keepdim=True).clamp_min(1e-9) * scale

    with replaced(trainer_moe, "route_weights", masked):
        layer = layers(pair)[1]
        yield Place(layer=layer, tensor=f"model.layers.{layer}.block_sparse_moe.gate")


@fault("trainer", "routing.replay")
def replayed_weights_detached(pair: Pair) -> Iterator[Place]:
    """Replayed weights pass no gradient to the router's input."""
    original = trainer_moe.route_weights
    with replaced(trainer_moe, "route_weights", lambda logits, ids, scale: original(logits.detach(), ids, scale)):
        layer = layers(pair)[1]
        yield Place(layer=layer, tensor=f"model.layers.{layer}.block_sparse_moe.gate")


@fault("trainer", "logprobs.temperature")
def trainer_without_temperature(pair: Pair) -> Iterator[Place]:
    """The trainer does not divide its logits by the temperature."""
    with _packed(lambda batch: batch._replace(temperature=torch.ones_like(batch.temperature))):
        yield Place()


@fault("trainer", "logprobs.temperature")
def trainer_temperature_twice(pair: Pair) -> Iterator[Place]:
    """The trainer divides its logits by the temperature twice."""
    with _packed(lambda batch: batch._replace(temperature=batch.temperature**2)):
        yield Place()


@fault("trainer", "logprobs.generated")
def labels_not_shifted(pair: Pair) -> Iterator[Place]:
    """The trainer scores each token with the logits that follow it."""
    with _packed(lambda batch: batch._replace(labels=batch.tokens)):
        yield Place()


@contextmanager
def _objective(change: Callable[..., Any]) -> Iterator[None]:
    original = trainer_objective.tis_loss

    def loss(
        logprobs: Tensor, rollout: Tensor, advantages: Tensor, mask: Tensor, total: float, ranks: int = 1, cap: float = 2.0, **more
    ) -> Any:
        return change(functools.partial(original, **more), logprobs, rollout, advantages, mask, total, ranks, cap)

    with replaced(trainer_objective, "tis_loss", loss):
        yield


@fault("trainer", "objective.ratio")
def ratio_swapped(pair: Pair) -> Iterator[Place]:
    """The importance ratio is rollout over trainer."""

    def swapped(original, lp, rollout, advantages, mask, total, ranks, cap):
        mirrored = lp.detach() * 2 - rollout
        return original(lp, mirrored, advantages, mask, total, ranks, cap)

    with _objective(swapped):
        yield Place()


@fault("trainer", "objective.ratio")
def ratio_not_capped(pair: Pair) -> Iterator[Place]:
    """Importance weights are not truncated."""
    with _objective(lambda original, *args: original(*args[:-1], 1e9)):
        yield Place()


@fault("trainer", "objective.ratio")
def ratio_missing(pair: Pair) -> Iterator[Place]:
    """Importance sampling is configured and never applied."""
    with _objective(lambda original, lp, rollout, *rest: original(lp, lp.detach(), *rest)):
        yield Place()


@fault("trainer", "objective.ratio")
def metrics_after_cap(pair: Pair) -> Iterator[Place]:
    """The largest ratio is reported after the cap, so that it never exceeds it."""

    def capped(original, *args):
        loss, metrics = original(*args)
        return loss, metrics | {"tis/max_raw": metrics["tis/max_raw"]._replace(value=min(metrics["tis/max_raw"].value, args[-1]))}

    with _objective(capped):
        yield Place()


@fault("trainer", "objective.mask")
def mask_in_denominator(pair: Pair) -> Iterator[Place]:
    """The loss is divided by all slots of the batch, masked ones included."""

    def padded(original, lp, rollout, advantages, mask, total, ranks, cap):
        return original(lp, rollout, advantages, mask, mask.numel(), ranks, cap)

    with _objective(padded):
        yield Place(token=1)


@fault("trainer", "objective.mask")
def masked_nan_multiplied(pair: Pair) -> Iterator[Place]:
    """Masked slots are multiplied by zero instead of left out: NaN stays NaN."""

    def multiplied(original, lp, rollout, advantages, mask, total, ranks, cap):
        loss, metrics = original(lp, rollout, advantages, mask, total, ranks, cap)
        return loss + (lp * advantages * (1 - mask.float())).sum() * 0.0, metrics

    with _objective(multiplied):
        yield Place(token=1)


@fault("trainer", "objective.mask", "objective.split")
def mean_of_micro_batches(pair: Pair) -> Iterator[Place]:
    """Each micro-batch is averaged by itself, so that short ones weigh more."""

    def local(original, lp, rollout, advantages, mask, total, ranks, cap):
        return original(lp, rollout, advantages, mask, float(mask.sum()), ranks, cap)

    with _objective(local):
        yield Place()


@fault("trainer", *OPERATIONS)
def trainer_quantizes_keys(pair: Pair) -> Iterator[Place]:
    """The trainer rounds keys and values to NVFP4 where the engine keeps them."""
    layer = layers(pair)[1]
    attention = pair.trainer.module.layers[layer].attention
    with replaced(attention, "quantized_kv", not attention.quantized_kv):
        yield Place(layer=layer, tensor=f"model.layers.{layer}.self_attn.k")


@fault("trainer", *OPERATIONS)
def trainer_rope_base(pair: Pair) -> Iterator[Place]:
    """The trainer rotates with another base frequency."""

    def table(length: int, rotary: int, theta: float, device: Any = None) -> tuple[Tensor, Tensor]:
        return rope_table(length, rotary, theta * 3, device)

    with replaced(trainer_packed, "rope_table", table):
        yield Place(layer=0, tensor="model.layers.0.self_attn.q")


@fault("trainer", *OPERATIONS)
def trainer_adapter_off(pair: Pair) -> Iterator[Place]:
    """The trainer's forward runs on the bare base."""
    with pair.trainer.module.disable_adapter():
        yield Place(layer=0, tensor="model.layers.0.self_attn.q")


@fault("trainer", "logprobs.generated", "routing.batching")
def attention_across_sequences(pair: Pair) -> Iterator[Place]:
    """Attention of a packed batch crosses the borders of its sequences."""
    original = trainer_model.sequences

    def joined(lengths: list[int], *rest: Any) -> Any:
        whole = original([sum(lengths)], *rest)
        own = original(lengths, *rest)
        return own._replace(longest=whole.longest, batch=whole.batch, every_block=whole.every_block, buckets=whole.buckets)

    with replaced(trainer_model, "sequences", joined):
        yield Place()

"""Faults on the way from the engine's output to the trainer: routes and logprobs that are shifted, dropped, reordered or of other ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

import samebits.alignment_checks.pair as pair_module
from samebits.alignment_checks.pair import Pair, Sample
from samebits.alignment_checks.report import Place

from .base import fault, layers, replaced

ROUTES = ("routing.rows", "routing.agreement")
VALUES = ("logprobs.generated", "logprobs.prompt", "logprobs.temperature")


@contextmanager
def _answers(change: Callable[[Sample], Sample]) -> Iterator[None]:
    original = pair_module._sample

    def sample(output: Any) -> Sample:
        found = original(output)
        change(found)
        return found

    with replaced(pair_module, "_sample", sample):
        yield


@contextmanager
def _routes(change: Callable[[np.ndarray], np.ndarray | None]) -> Iterator[None]:
    def apply(sample: Sample) -> None:
        if sample.routes is not None:
            sample.routes = change(sample.routes)

    with _answers(apply):
        yield


@fault("transport", "routing.rows")
def routes_dropped(pair: Pair) -> Iterator[Place]:
    """A list of allowed fields leaves the routes out."""
    with _routes(lambda r: None):
        yield Place(sequence=0)


@fault("transport", *ROUTES)
def routes_shifted_by_dense_layers(pair: Pair) -> Iterator[Place]:
    """Routes are stored by index among the layers with experts, and read by absolute index."""
    first = layers(pair)[1]
    with _routes(lambda r: np.concatenate((r[:, first:], r[:, :first]), axis=1)):
        yield Place(layer=0)


@fault("transport", "routing.agreement")
def routes_of_neighbouring_layer(pair: Pair) -> Iterator[Place]:
    """Two layers with experts get each other's routes."""
    _, first, last = layers(pair)

    def change(r: np.ndarray) -> np.ndarray:
        out = r.copy()
        out[:, [first, last]] = r[:, [last, first]]
        return out

    with _routes(change):
        yield Place(layer=first)


@fault("transport", *ROUTES)
def routes_layer_first(pair: Pair) -> Iterator[Place]:
    """A buffer laid out [layer, token, k] is read as [token, layer, k]."""
    with _routes(lambda r: np.ascontiguousarray(r.transpose(1, 0, 2)).reshape(r.shape)):
        yield Place(layer=0)


@fault("transport", "routing.agreement")
def routes_physical_ids(pair: Pair) -> Iterator[Place]:
    """Expert load balancing returns ids of physical slots instead of logical experts."""
    count = pair.trainer.dims.shape.experts

    def change(r: np.ndarray) -> np.ndarray:
        return np.where(r >= 0, np.sort((r + count // 2) % count, axis=-1), r).astype(r.dtype)

    with _routes(change):
        yield Place(layer=layers(pair)[1])


@fault("transport", *ROUTES)
def routes_redundant_ids(pair: Pair) -> Iterator[Place]:
    """Redundant experts have ids beyond the model's."""
    count, last = pair.trainer.dims.shape.experts, layers(pair)[2]

    def change(r: np.ndarray) -> np.ndarray:
        out = r.copy()
        out[:, last, -1] = np.where(out[:, last, -1] == count - 1, count + 1, out[:, last, -1])
        return out

    with _routes(change):
        yield Place(layer=last)


@fault("transport", "routing.rows")
def routes_padded_with_zero(pair: Pair) -> Iterator[Place]:
    """Layers without experts are padded with expert 0 instead of -1."""
    with _routes(lambda r: np.maximum(r, 0)):
        yield Place(layer=layers(pair)[0])


@fault("transport", "routing.rows")
def routes_without_last_row(pair: Pair) -> Iterator[Place]:
    """The last row is cut off: prompt + response - 2 rows."""
    with _routes(lambda r: r[:-1]):
        yield Place(sequence=0)


@fault("transport", "routing.rows")
def routes_of_response_only(pair: Pair) -> Iterator[Place]:
    """Routes of the prompt are missing, as after a split of prefill and decode."""

    def apply(sample: Sample) -> None:
        sample.routes = sample.routes[len(sample.prompt) - 1 :]

    with _answers(apply):
        yield Place(sequence=1)


@fault("transport", *ROUTES)
def routes_prompt_zero(pair: Pair) -> Iterator[Place]:
    """Rows of the prompt were never captured and are zero."""

    def apply(sample: Sample) -> None:
        sample.routes = sample.routes.copy()
        sample.routes[: len(sample.prompt) - 1] = 0

    with _answers(apply):
        yield Place(sequence=1, token=0)


@fault("transport", *ROUTES)
def routes_repeated(pair: Pair) -> Iterator[Place]:
    """The capture buffer is not advanced: each row is the first one."""
    with _routes(lambda r: np.repeat(r[:1], len(r), axis=0)):
        yield Place(layer=layers(pair)[1])


@fault("transport", "routing.agreement")
def routes_one_token_late(pair: Pair) -> Iterator[Place]:
    """Routes are shifted by one token."""
    with _routes(lambda r: np.roll(r, 1, axis=0)):
        yield Place(layer=layers(pair)[1])


@fault("transport", "routing.agreement")
def routes_of_other_sequence(pair: Pair) -> Iterator[Place]:
    """Rows of a sequence are in reverse order, as when a batch is put together from the wrong side."""
    with _routes(lambda r: r[::-1].copy()):
        yield Place(layer=layers(pair)[1])


@fault("transport", *ROUTES)
def routes_unordered(pair: Pair) -> Iterator[Place]:
    """Ids of a row come in order of score, so that equal sets are unequal rows."""
    with _routes(lambda r: r[..., ::-1].copy()):
        yield Place(layer=layers(pair)[1])


@contextmanager
def _logprobs(change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    def apply(sample: Sample) -> None:
        sample.logprobs = change(sample.logprobs)

    with _answers(apply):
        yield


@fault("transport", *VALUES)
def logprobs_off_by_one(pair: Pair) -> Iterator[Place]:
    """Logprobs of the response are shifted by one token."""
    with _logprobs(lambda x: x.roll(1)):
        yield Place()


@fault("transport", *VALUES)
def logprobs_one_missing(pair: Pair) -> Iterator[Place]:
    """There is one logprob less than response tokens."""
    with _logprobs(lambda x: x[:-1]):
        yield Place(sequence=0)


@fault("transport", *VALUES)
def logprobs_positive(pair: Pair) -> Iterator[Place]:
    """Logprobs were rounded to positive values."""
    with _logprobs(lambda x: torch.where(torch.arange(len(x)) == 1, x.abs() + 1e-3, x)):
        yield Place(sequence=0, token=1)


@fault("transport", *VALUES)
def logprobs_nan(pair: Pair) -> Iterator[Place]:
    """One logprob is NaN."""
    with _logprobs(lambda x: torch.where(torch.arange(len(x)) == len(x) - 1, torch.nan, x)):
        yield Place(sequence=0)


@fault("transport", *VALUES)
def logprobs_in_bf16(pair: Pair) -> Iterator[Place]:
    """Logprobs are rounded to bf16 on their way."""
    with _logprobs(lambda x: x.bfloat16().float()):
        yield Place()


@fault("transport", "logprobs.prompt", "logprobs.generated")
def prompt_logprobs_of_base(pair: Pair) -> Iterator[Place]:
    """Prompt logprobs come from a second path that forgets the adapter."""
    replica = pair.replicas[0]
    original = type(replica).run

    def run(self, prompts, tokens=1, version="current", *rest, **options):
        found = original(self, prompts, tokens, version, *rest, **options)
        if version == "current" and options.get("prompt_logprobs", True):
            plain = original(self, prompts, 1, None)
            for sample, other in zip(found, plain, strict=True):
                sample.prompt_logprobs = other.prompt_logprobs
        return found

    with replaced(type(replica), "run", run):
        yield Place()


@fault("transport", "logprobs.generated")
def tokens_reencoded(pair: Pair) -> Iterator[Place]:
    """The response was decoded and encoded again, and a token became another."""

    def apply(sample: Sample) -> None:
        if len(sample.ids) > 2:
            sample.ids = [*sample.ids[:-2], sample.ids[-2] + (1 if sample.ids[-2] + 1 < pair.vocabulary else -1), sample.ids[-1]]

    with _answers(apply):
        yield Place()

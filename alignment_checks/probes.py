"""What the checks ask: token sequences of every length at which something can go wrong, and what both sides said about them.

Lengths: one token, a few, one below, at and above a block of 128, several blocks, and more blocks than the indexer chooses (at least 16
of 128 tokens, and more than the model's top-k). Answers are made once and shared by the checks of a report; every engine answer is
scored by the trainer in one packed forward, so that variants that sample different tokens are still compared.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from .pair import PREFILL_BUDGET, Pair, Sample

SHORT = (1, 2, 17, 127, 128, 129, 300)
RESPONSE = 12
LONG_RESPONSE = 3
TEMPERATURES = (0.7, 1.3)
FIRST_ID = 3
"""Ids below are special tokens."""


class Probes:
    """Probe sequences of one seed for one pair, and the answers of both sides, each made when it is first asked for."""

    def __init__(self, pair: Pair, seed: int = 0, short: Sequence[int] = SHORT, response: int = RESPONSE, long: bool = True) -> None:
        """`short`: prompt lengths, at least six, the last of them above a block. `long`: also ask for the long prompt in `samples`."""
        self.pair, self.seed, self.response, self.with_long = pair, seed, response, long
        sparse = pair.trainer.dims.sparse
        self.long_length = max(16, sparse.topk) * sparse.block + sparse.block + 1
        g = torch.Generator().manual_seed(seed)

        def draw(n: int) -> list[int]:
            return torch.randint(FIRST_ID, pair.vocabulary, (n,), generator=g).tolist()

        self.prompts = [draw(n) for n in short]
        self.long = draw(self.long_length)
        # Submitted before the long prompt, it leaves that no room for a whole prefill.
        self.filler = draw(PREFILL_BUDGET - self.long_length + 700)

    @functools.cached_property
    def samples(self) -> list[list[Sample]]:
        """Of each replica: the short prompts in one batch and the long one alone, at temperature 1, prompt logprobs included."""
        return [self._ask(replica) for replica in self.pair.replicas]

    def _ask(self, replica) -> list[Sample]:
        replica.drop_prefix_cache()
        samples = replica.run(self.prompts, self.response)
        return samples + (replica.run([self.long], LONG_RESPONSE) if self.with_long else [])

    @functools.cached_property
    def trained(self) -> list[list[Tensor]]:
        """The trainer's logprobs [tokens - 1] of `samples`, routes replayed as in a job."""
        return [self.score(samples) for samples in self.samples]

    def score(self, samples: Sequence[Sample], temperature: float = 1.0) -> list[Tensor]:
        """The trainer's logprobs [tokens - 1] of any samples, with their routes replayed where they have any."""
        routes = None if any(s.routes is None for s in samples) else [s.routes for s in samples]
        return self.pair.trainer.logprobs(samples, temperature, routes)

    @functools.cached_property
    def natural(self) -> list:
        """int16 [tokens - 1, layers, k] for each sample of replica 0: the routes that the trainer takes by itself."""
        samples = self.samples[0]
        routes = self.pair.trainer.capture([s.tokens for s in samples]).routes.cpu()
        return [part[:-1].numpy() for part in routes.split([len(s.tokens) for s in samples])]

    @functools.cached_property
    def long_taps(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(trainer, engine) indexer taps and block choices of the long prompt."""
        points = ["self_attn.index_q", "self_attn.index_k", "self_attn.blocks"]
        ours = self.pair.trainer.record(self.long)
        return {k: v for k, v in ours.items() if k.endswith(tuple(points))}, self.pair.replicas[0].record(self.long, points)

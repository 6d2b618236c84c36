"""What a stock server is asked, and how the answers are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .stock_client import Answer
from .stock_measure import said


class NotCheckedError(RuntimeError):
    """A check could not be made because of an earlier one."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes of the probe and what may be done to the server."""

    prompts: int = 6
    tokens: int = 48
    """Tokens of a scored prompt."""
    cached_tokens: int = 288
    """Tokens of a prompt that goes through the prefix cache: more than two blocks of 128."""
    generated: int = 8
    load: bool = True
    """Whether adapters may be loaded into the server and unloaded again."""
    scratch: Path | None = None
    """Folder that the server can read too, for the adapters that are loaded; default a new temporary folder."""
    seed: int = 0


def random_prompts(vocab: int, shape: tuple[int, int], seed: int) -> list[list[int]]:
    """Random token ids [prompts, tokens]: any id goes, and no tokenizer is asked."""
    return torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(seed)).tolist()


def plots(answers: Sequence[Answer], exact: Tensor) -> dict[str, object]:
    """Data for the report's drawings: the oracle stands where the trainer does. `exact` [P] are the oracle's logprobs."""
    shown = said(answers)
    positions = torch.tensor([p for answer in answers for p, _, _ in answer.logprobs])
    gap = (shown - exact).abs()
    rows = [(int(p), gap[positions == p]) for p in positions.unique()]
    return {
        "scatter": {"trainer": exact.tolist()[:4000], "engine": shown.tolist()[:4000]},
        "by_position": {
            "position": [p for p, _ in rows],
            "mean": [float(g.mean()) for _, g in rows],
            "q95": [float(g.quantile(0.95)) for _, g in rows],
            "max": [float(g.max()) for _, g in rows],
        },
    }

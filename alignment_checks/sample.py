"""What both sides of a pair have in common: a sampled sequence, and the one way in which a side fails."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor


class PairError(RuntimeError):
    """One of the two sides could not be started or asked. The message is one line."""


@dataclass(slots=True)
class Sample:
    """What an engine said about one sequence."""

    prompt: list[int]
    ids: list[int]
    """Response tokens."""
    logprobs: Tensor
    """fp32 [response], of the generated tokens, at the temperature of the request."""
    prompt_logprobs: Tensor | None
    """fp32 [prompt - 1], of prompt tokens 1.., or None where they were not asked for."""
    routes: np.ndarray | None
    """int16 [prompt + response - 1, layers, k]."""
    cached: int
    """Prompt tokens that came out of the prefix cache."""

    @property
    def tokens(self) -> list[int]:
        """Prompt and response."""
        return self.prompt + self.ids

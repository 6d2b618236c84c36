"""Faults that people really hit, each injected into the real trainer or engine, to see that the checks catch it.

A fault is a context manager over a pair: inside, the pair has the fault; afterwards it is as before. It acts at a seam that a job has too,
never in a check:

    wire        what travels between export and engine (`Pair.wire`)
    weights     the buffers that an engine or the trainer multiplies with
    engine      a function or module of the serving model, or vLLM's sampler
    transport   what the engine answered, on its way to the trainer
    trainer     a function or module of the training model or of its loss

`CATALOGUE` maps names to faults. A fault yields the place that a message must name (empty where it has none).
"""

from __future__ import annotations

import samebits.trainer.plugin  # noqa: F401  verl must know it before its engines are imported

from . import attention, engine, trainer, transport, weights, wire
from .base import CATALOGUE, Fault

__all__ = ["CATALOGUE", "Fault", "attention", "engine", "trainer", "transport", "weights", "wire"]

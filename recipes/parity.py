"""Where a broken promise of equal bits began: the engine computes the trainer's sequence again, and the first tap that differs is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ray
from safetensors.torch import load_file

from samebits.alignment_checks.bisect import first_difference
from samebits.trainer.parity import RECORD, TAPS

from .config import PARITY

ENGINE_TAPS = "engine_taps.safetensors"


def parting_operation(server: Any, folder: Path) -> str:
    """One clause: the first operation at which trainer and engine differ on the way to the recorded token, or why it is not known.

    Args:
        server: Ray handle of a `SamebitsServer` that holds the adapter of the step. folder: the run directory, on this node.
    """
    record, theirs = folder / PARITY / RECORD, folder / PARITY / ENGINE_TAPS
    try:
        tokens = json.loads(record.read_text())["tokens"]
        ray.get(server.wake_up.remote())  # between sampling and the next sync it may be asleep
        ray.get(server.clear_kv_cache.remote())  # a prefix from the cache would be computed by nobody
        ray.get(server.collective_rpc.remote("samebits_record"))
        try:
            ray.get(server.generate_batch.remote([tokens], [{"temperature": 1.0, "max_tokens": 1}], ["parity"]))
        finally:
            order = ray.get(server.collective_rpc.remote("samebits_recorded", args=(str(theirs),)))[0]
        trainer, engine = load_file(record.parent / TAPS), load_file(theirs)
    except Exception as error:  # the disagreement is the news, not what went wrong while it was looked into
        lines = str(error).strip().splitlines()
        return f"the operation was not found ({type(error).__name__}: {lines[-1] if lines else 'no message'})"
    if not order:
        return "the operation was not found: the engine runs in CUDA graphs, where its taps are silent (enforce_eager shows it)"
    step = first_difference({name: trainer[name] for name in _in_order(trainer, order)}, engine)
    if step is None:
        return f"prefilled whole, the engine computes the same bits at all {len(order)} taps: the difference lies in decoding"
    return f"the first operation that differs is {step.point}, at token {step.token}"


def _in_order(trainer: dict[str, Any], order: list[str]) -> list[str]:
    """Taps of the trainer in the order of the forward, which a file does not keep; what the engine never reported comes last."""
    return [name for name in order if name in trainer] + [name for name in trainer if name not in order]

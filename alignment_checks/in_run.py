"""Checks inside a job: before the first step, at every sync, and in full every N steps; their history lies in the run directory.

What a job already has at hand is enough for most of what `samebits verify` looks at: a batch carries the engine's logprobs and routes, one
forward of the trainer over it gives the other side, and the replicas answer digests. Results are awaited where they are asked for, and
each goes into `checks/history.jsonl` before anything that it would have stopped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from .adapters import compare_digests
from .limits import Limits
from .logprobs import check_agreement, check_values
from .report import AGREE, CheckResult, recorded
from .routing import check_rows
from .weights import BaseDigests, answered

HISTORY = Path("checks") / "history.jsonl"


class AgreementLost(RuntimeError):
    """Trainer and engine disagree. The message is one line that names what."""


class History:
    """`checks/history.jsonl` of a run directory: one line for each occasion, with every result in full."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / HISTORY

    def truncate_after(self, step: int) -> None:
        """Drop occasions after `step`, which a resumed run makes again; with step 0 drop all."""
        kept = [line for line in read_history(self.path) if step > 0 and line["step"] <= step]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        staging = self.path.with_suffix(".tmp")
        staging.write_text("".join(json.dumps(line) + "\n" for line in kept))
        os.replace(staging, self.path)

    def write(self, step: int, occasion: str, results: Sequence[CheckResult]) -> None:
        """Append an occasion (preflight, sync or full) and force it to disk."""
        line = {"step": step, "occasion": occasion, "results": [r.to_json() for r in results]}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as f:
            f.write(json.dumps(line) + "\n")
            f.flush()
            os.fsync(f.fileno())


def read_history(path: Path) -> list[dict[str, Any]]:
    """All complete lines of a history; a last line cut off by a kill is left out."""
    lines = []
    for text in path.read_text(errors="replace").splitlines() if path.is_file() else ():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines


def require_agreement(step: int, results: Sequence[CheckResult]) -> None:
    """Raise `AgreementLost` with the first thing that differs or could not be checked; no results are no agreement."""
    if not results:
        raise AgreementLost(f"step {step}: nothing was checked")
    for result in results:
        if result.findings:
            more = f" (and {len(result.findings) - 1} more)" if len(result.findings) > 1 else ""
            raise AgreementLost(f"step {step}: {result.name}: {result.findings[0].message}{more}")
    for result in results:
        if result.status != AGREE:
            raise AgreementLost(f"step {step}: {result.name} could not be checked: {result.error or 'there was nothing to compare'}")


def check_batch(
    trainer: Sequence[Tensor],
    engine: Sequence[Tensor | None],
    routes: Sequence[np.ndarray | None] | None,
    prompts: Sequence[int],
    responses: Sequence[int],
    dims: Any,
    limits: Limits,
) -> list[CheckResult]:
    """Logprobs and routes of one batch of a job.

    Args:
        trainer, engine: fp32 [response] logprobs of each sequence. routes: [prompt + response - 1, layers, k] of each, or None where
            replay is off. prompts, responses: token counts. dims: the trainer's `M3Dims`.
    """
    results = []
    with recorded("logprobs.generated") as result:
        results.append(result)
        if check_values(result, engine, responses):
            fits = all(len(t) == n for t, n in zip(trainer, responses, strict=True))
            if result.require(fits, "the trainer scored another number of tokens than were sampled"):
                check_agreement(result, trainer, engine, limits, first_token=prompts)
                result.metrics["kl_warn_exceeded"] = float(result.metrics.get("k3", 0.0) > limits.kl_warn)
    if routes is not None:
        with recorded("routing.rows") as result:
            results.append(result)
            check_rows(result, routes, [p + r for p, r in zip(prompts, responses, strict=True)], dims)
    return results


def check_bases(expected: BaseDigests, replicas: Sequence[Sequence[Mapping[str, str]]]) -> CheckResult:
    """Base digests that every rank of every replica answered, against those of the checkpoint's parts."""
    with recorded("weights.base") as result:
        result.require(bool(replicas), "there is no engine replica to check")
        for i, ranks in enumerate(replicas):
            result.require(len(ranks) == len(expected.ranks), f"replica {i}: {answered(len(ranks), len(expected.ranks))}")
            for rank, (want, found) in enumerate(zip(expected.ranks, ranks, strict=False)):
                compare_digests(result, want, found, f"base of replica {i} rank {rank}", replica=i, rank=rank)
    return result

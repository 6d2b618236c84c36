"""Where do the two forwards part? The same tokens through both sides, compared operation by operation.

Both models report their values at the same taps (`kernels.taps`). The first tap whose difference is more than its formats explain names
the operation: everything before it agreed. Differences grow slowly through layers, so a tap is held against the limit of its format and
against what had already accumulated before it, whichever is more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .limits import Limits

GROWTH = 8.0
"""How much one operation may enlarge a difference that was there already."""
DISCRETE = ("ids", "blocks")


@dataclass(frozen=True, slots=True)
class Step:
    """One tap on both sides."""

    point: str
    difference: float
    """Largest difference relative to the trainer's root mean square; share of rows that differ for discrete choices."""
    limit: float
    token: int | None
    """Token with the largest difference."""

    @property
    def parts(self) -> bool:
        """Is this more than the formats explain?"""
        return not self.difference <= self.limit

    @property
    def layer(self) -> int | None:
        """Absolute layer index, where the point lies in a layer."""
        pieces = self.point.split(".")
        return int(pieces[2]) if self.point.startswith("model.layers.") else None


def compare(trainer: dict[str, Tensor], engine: dict[str, Tensor], limits: Limits) -> list[Step]:
    """Steps in the trainer's order. A point that one side did not report, or in another shape, parts by definition."""
    steps: list[Step] = []
    carried = 0.0
    for point, ours in trainer.items():
        theirs = engine.get(point)
        if theirs is None or theirs.shape != ours.shape:
            steps.append(Step(point, float("inf"), 0.0, None))
            continue
        if point.rsplit(".", 1)[-1] in DISCRETE:
            rows = (ours != theirs).flatten(1).any(1)
            limit = 1 - limits.agreement
            steps.append(Step(point, rows.float().mean().item(), limit, int(rows.int().argmax()) if rows.any() else None))
            continue
        gap = (ours.double() - theirs.double()).abs().flatten(1).amax(1)
        rms = ours.double().pow(2).mean().sqrt().clamp_min(1e-12)
        worst = (gap / rms).max().item() if len(gap) else 0.0
        worst = worst if gap.isfinite().all() else float("inf")
        steps.append(Step(point, worst, max(limits.relative, GROWTH * carried), int(gap.nan_to_num(torch.inf).argmax())))
        if not steps[-1].parts:
            carried = max(carried, worst)
    return steps


def first_parting(steps: list[Step]) -> Step | None:
    """The first step that parts, or None."""
    return next((s for s in steps if s.parts), None)


def first_difference(trainer: dict[str, Tensor], engine: dict[str, Tensor]) -> Step | None:
    """The first point at which any bit differs, for runs in which none may, or None. `token` is the first row that does."""
    for point, ours in trainer.items():
        theirs = engine.get(point)
        if theirs is None or theirs.shape != ours.shape or theirs.dtype != ours.dtype:
            return Step(point, float("inf"), 0.0, None)
        a, b = (t.reshape(len(t), -1).contiguous().view(torch.uint8) for t in (ours, theirs))
        rows = (a != b).any(1)
        if rows.any():
            gap = (ours.double() - theirs.double()).abs().max().item()
            return Step(point, gap, 0.0, int(rows.int().argmax()))
    return None

"""What a step was made of, in the names of `metrics.jsonl`: seconds by phase, peak memory by role and phase, and the parts of a sync.

verl's own timers are the frame: a step, and in it generation, old logprobs, advantages, the actor's update and the sync. What lies
between them is measured where it happens: forward, backward and optimizer in the training engine, loading and verifying in the engine
worker, the rest of a sync in its sender. Of several ranks the slowest and the largest count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

TRAINER, ENGINE = "memory/trainer/", "memory/engine/"
_TIMERS = {"gen": "time/collect", "adv": "time/advantage"}


def step_phases(metrics: Mapping[str, Any], timing_raw: Mapping[str, float]) -> dict[str, float]:
    """Times and memory of the trainer's phases, from what its engine reported with the actor's update, and verl's timers as they are."""
    found = {ours: float(timing_raw[theirs]) for theirs, ours in _TIMERS.items() if theirs in timing_raw}
    for key, value in metrics.items():
        parts = key.split("/")
        if parts[:2] == ["actor", "phase"]:
            _, _, phase, kind = parts
            name = f"time/{phase}" if kind == "seconds" else f"{TRAINER}{phase}/{kind}"
            found[name] = float(value)
    return found


def sync_metrics(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Path and parts of one sync over all replicas: of the slowest replica, memory of the largest."""
    slowest = max(reports, key=lambda report: report["seconds"])
    paths = sorted({_path(report) for report in reports})
    found: dict[str, Any] = {"sync/path": ", ".join(paths)}
    found |= {f"sync/{name}_seconds": float(seconds) for name, seconds in slowest["parts"].items()}
    for name in ("wake", "sleep"):
        if any(name in report["waiting"] for report in reports):
            found[f"time/{name}"] = max(float(report["waiting"].get(name, 0.0)) for report in reports)
    for report in reports:
        for role, prefix in (("trainer", TRAINER), ("engine", ENGINE)):
            for phase, kinds in report["memory"].get(role, {}).items():
                for kind, size in kinds.items():
                    key = f"{prefix}{phase}/{kind}"
                    found[key] = max(float(size), found.get(key, 0.0))
    return found


def _path(report: Mapping[str, Any]) -> str:
    return f"{report['path']} ({report['reason']})" if report["reason"] else report["path"]

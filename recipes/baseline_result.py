"""What verl measured of its own steps, in the form in which `samebits bench step` writes what it measured, and the two side by side.

verl's timers are of the driver, so a phase includes the waiting for it. Generation is the timer `gen`: verl hands the prompts over before
and waits there until the last response is graded. It looks every two seconds (`WAITING`), which counts where steps are short.
Phases that only one side has are shown with the other side empty.
"""

from __future__ import annotations

import importlib.metadata
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

SCHEMA = "samebits.bench.step/1"
"""As `samebits bench step`'s."""
Line = Mapping[str, float]
PHASES = {
    "rollout": "timing_s/gen",
    "reward": "timing_s/reward",
    "old logprobs": "timing_s/old_log_prob",
    "advantage": "timing_s/adv",
    "train": "timing_s/update_actor",
    "sync": "timing_s/update_weights",
}
"""verl's timers by the names of `samebits bench step`."""
WAITING = "verl looks for finished samples every 2 s: so much of a rollout may be waiting"
"""A property of stock (`poll_interval` of its replay buffer, which no key sets) that shows in its times."""
_STEP = "timing_s/step"
_NEEDED = (_STEP, "timing_s/gen", "timing_s/update_actor", "timing_s/update_weights", "prompt_length/mean", "response_length/mean")
_PEAKS = {"allocated": "actor/perf/max_memory_allocated_gb", "reserved": "actor/perf/max_memory_reserved_gb"}
_TOGETHER = {
    "rollout": ("rollout", "collect"),
    "reward": ("reward",),
    "old logprobs": ("old logprobs",),
    "advantage": ("advantage",),
    "train": ("train",),
    "sync": ("sync", "check of the sync"),
    "rest": ("full check", "rest"),
}
"""Phases that are compared, and what each is made of on either side."""
_TRAINING = ("train", "forward", "backward", "optimizer")
"""Phases of the trainer whose largest peak is that of training."""


class NotMeasured(ValueError):
    """Metrics or a result cannot be used. The message is one line."""


def read(path: Path) -> list[Line]:
    """Metrics of each step from the file of verl's own logger `file`, without a last line that has no end. Raises `NotMeasured`."""
    try:
        text = path.read_text()
        lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        return [line["data"] for line in lines if line["step"] > 0]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NotMeasured(f"{path.name} is not what verl's file logger writes ({type(error).__name__}: {error})") from None


def measured(
    model: str, device: str, lines: Sequence[Line], warm_up: int, rows: int, settings: Mapping[str, Any], deviations: Sequence[str]
) -> dict[str, Any]:
    """The result of verl's metrics of steps of `rows` samples, without the first `warm_up`. Raises `NotMeasured`."""
    from .baseline_model import parameters

    steps = lines[warm_up:]
    if not steps:
        raise NotMeasured(f"{len(lines)} steps, of which the first {warm_up} are left out: there is none to measure")
    missing = next((key for key in _NEEDED for line in steps if key not in line), None)
    if missing:
        raise NotMeasured(f"verl's metrics have no {missing}")

    def mean(key: str) -> float:
        return statistics.fmean(line[key] for line in steps)

    step = mean(_STEP)
    phases = {name: {"seconds": mean(key), "parts": {}} for name, key in PHASES.items() if all(key in line for line in steps)}
    phases["rest"] = {"seconds": step - sum(phase["seconds"] for phase in phases.values()), "parts": {}}
    prompt, response = rows * mean("prompt_length/mean"), rows * mean("response_length/mean")
    times = [line[_STEP] for line in steps]
    peaks = {kind: round(max(line.get(key, 0.0) for line in steps) * 2**30) for kind, key in _PEAKS.items()}
    peaks = {kind: size for kind, size in peaks.items() if size}
    return {
        "schema": SCHEMA,
        "subject": f"stock verl, {model}",
        "device": device,
        "profile": "bf16" if device == "cuda" else "bf16, trained in fp32",
        "kv_cache": "bf16",
        "ablation": {},
        "steps": len(steps),
        "warm_up": warm_up,
        "seconds": {"step": step, "fastest": min(times), "slowest": max(times), "phases": phases},
        "share": {name: phase["seconds"] / step for name, phase in phases.items()},
        "full_check_seconds": None,
        "tokens": {
            "prompt": prompt,
            "response": response,
            "generated_per_second": response / phases["rollout"]["seconds"],
            "trained_per_second": (prompt + response) / phases["train"]["seconds"],
            "per_second": (prompt + response) / step,
        },
        "memory": {"trainer": {"train": peaks} if peaks else {}, "engine": {}},
        "sync": {"seconds": phases["sync"]["seconds"]},
        "versions": {name: _version(name) for name in ("torch", "vllm", "verl", "transformers", "peft", "ray")},
        "baseline": {
            "model": model,
            "parameters": parameters(model),
            "shortest_response": min(line.get("response_length/min", line["response_length/mean"]) for line in steps),
            "longest_response": max(line.get("response_length/max", line["response_length/mean"]) for line in steps),
            "waiting": WAITING,
            "deviations": list(deviations),
            "settings": dict(settings),
        },
    }


def _version(name: str) -> str:
    for distribution in (name, f"{name}-cpu"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "not installed"


def load(path: Path) -> dict[str, Any]:
    """A result of `samebits bench step` or of the baseline. Raises `NotMeasured`."""
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise NotMeasured(f"{path}: {error.strerror}") from None
    except ValueError:
        raise NotMeasured(f"{path} is no JSON") from None
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise NotMeasured(f"{path} is no result of `samebits bench step` ({SCHEMA})")
    return found


def comparison(ours: Mapping[str, Any], stock: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds by phase, memory of training and tokens of both sides.

    `ratio` of seconds is stock / ours: how many times faster ours is. `ratio` of memory is ours / stock. None where a side has nothing.
    Raises `NotMeasured` when the two did not train on the same number of tokens on the same kind of device.
    """
    if ours["device"] != stock["device"]:
        raise NotMeasured(f"ours ran on {ours['device']}, stock on {stock['device']}: there is nothing to compare")
    for kind in ("prompt", "response"):
        mine, theirs = ours["tokens"][kind], stock["tokens"][kind]
        if mine is None:
            raise NotMeasured("ours does not say how many tokens it trained on")
        # Prompts of the steps that are measured differ when their number does; responses are all of the longest length.
        if abs(mine - theirs) > (0.02 if kind == "prompt" else 1e-6) * theirs:
            hint = "; both need actor_rollout_ref.rollout.ignore_eos=true, the same batch and the same steps"
            raise NotMeasured(f"ours has {mine:,.1f} {kind} tokens a step, stock {theirs:,.1f}: the tokens are not equal{hint}")
    rows = {}
    for name, parts in _TOGETHER.items():
        pair = [_sum(side["seconds"]["phases"], parts) for side in (ours, stock)]
        if any(value is not None for value in pair):
            rows[name] = _ratio(*pair, inverse=True)
    memory = {kind: _ratio(_peak(ours, kind), _peak(stock, kind)) for kind in ("allocated", "reserved")}
    return {
        "step": _ratio(ours["seconds"]["step"], stock["seconds"]["step"], inverse=True),
        "phases": rows,
        "training_memory": {kind: row for kind, row in memory.items() if row["ours"] is not None or row["stock"] is not None},
        "tokens": {kind: stock["tokens"][kind] for kind in ("prompt", "response")},
    }


def _sum(phases: Mapping[str, Any], names: Sequence[str]) -> float | None:
    found = [phases[name]["seconds"] for name in names if name in phases]
    return sum(found) if found else None


def _peak(result: Mapping[str, Any], kind: str) -> int | None:
    phases = result["memory"]["trainer"]
    return max((phases[name][kind] for name in _TRAINING if kind in phases.get(name, {})), default=None)


def _ratio(ours: float | None, stock: float | None, inverse: bool = False) -> dict[str, float | None]:
    above, below = (stock, ours) if inverse else (ours, stock)
    return {"ours": ours, "stock": stock, "ratio": None if above is None or not below else above / below}


def show(result: Mapping[str, Any], console: Console) -> None:
    """The tables."""
    seconds, tokens, baseline = result["seconds"], result["tokens"], result["baseline"]
    span = f"{seconds['fastest']:.3f} to {seconds['slowest']:.3f}"
    table = Table(title=f"{result['subject']}: a step of {seconds['step']:.3f} s ({span} in {result['steps']} steps) on {result['device']}")
    table.add_column("phase")
    for name in ("seconds", "share"):
        table.add_column(name, justify="right")
    for name, phase in seconds["phases"].items():
        table.add_row(name, f"{phase['seconds']:.4f}", f"{result['share'][name]:.1%}")
    console.print(table)
    lines = [
        f"{baseline['parameters'] / 1e6:,.1f} M parameters",
        f"{tokens['prompt']:,.0f} prompt and {tokens['response']:,.0f} response tokens a step: {tokens['generated_per_second']:,.0f} "
        f"generated, {tokens['trained_per_second']:,.0f} trained and {tokens['per_second']:,.0f} overall a second",
    ]
    peaks = result["memory"]["trainer"].get("train", {})
    if peaks:
        lines.append("peak memory of training: " + ", ".join(f"{size / 2**20:,.1f} MiB {kind}" for kind, size in peaks.items()))
    if baseline["shortest_response"] != baseline["longest_response"]:
        lines.append(
            f"responses have {baseline['shortest_response']:.0f} to {baseline['longest_response']:.0f} tokens: not all the longest"
        )
    if "ended" in result:
        lines.append(f"ended {result['ended']}")
    lines.append(WAITING)
    lines += [f"not stock: {text}" for text in baseline["deviations"]]
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def show_comparison(found: Mapping[str, Any], console: Console) -> None:
    """The table of ours against stock."""
    table = Table(title=f"ours against stock at {sum(found['tokens'].values()):,.0f} tokens a step")
    table.add_column("")
    for name in ("ours", "stock", "ratio"):
        table.add_column(name, justify="right")

    def number(value: float | None, form: str) -> str:
        return "" if value is None else form.format(value)

    for name, row in {**found["phases"], "step": found["step"]}.items():
        values = (number(row["ours"], "{:.4f} s"), number(row["stock"], "{:.4f} s"), number(row["ratio"], "{:.2f} times faster"))
        table.add_row(name, *values, end_section=name == "step")
    for kind, row in found["training_memory"].items():
        sizes = (number(row[side] and row[side] / 2**20, "{:,.1f} MiB") for side in ("ours", "stock"))
        table.add_row(f"training memory, {kind}", *sizes, number(row["ratio"], "{:.2f} of stock"))
    console.print(table)

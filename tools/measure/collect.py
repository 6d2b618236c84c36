"""Make the files of docs/results from what a queue has left, and say loudly what is missing.

    python -m tools.measure.collect PLAN OUT DEST

Every line of the plan has a product (`RUNS`, `MEASURED`, `CHECKED`). Runs become one JSON each, and one report for each set of runs: seeds
pooled with intervals, ablations and parity side by side. Measurements are taken over with their command, machine, versions and date. Tests
and random comparisons become one file. Names begin with what they were measured on: `h200_`, or `cpu_` without a GPU.

Exit status: 0 everything of the plan is there, 1 something is missing or did not come out as it should, 2 bad input.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from rich.console import Console

from samebits.recipes import run_report
from tools.run_result import result_of

from . import state
from .plan import Line, PlanError, parse
from .state import StateError, Status

RUNS = {
    "mini_m3_grpo": ("seed0", "seed1", "seed2"),
    "mini_m3_ablations": ("whole", "no_replay", "no_tis", "bf16_kv", "recompute"),
    "mini_m3_parity": ("no_parity", "parity"),
    "mini_m3_two_gpus": ("two_parity", "two_experts", "two_tensor"),
    "tiny_m3_grpo": ("tiny_seed1", "tiny_seed2", "tiny_seed3"),
}
"""Lines that are runs, by the report that they are in. A run lies in `OUT/runs/NAME`."""
POOLED = ("mini_m3_grpo", "tiny_m3_grpo")
"""Reports whose runs differ in nothing but their seed, so that they must be one group."""
BITWISE = ("parity", "two_parity", "two_experts", "two_tensor")
"""Runs whose trainer and engine must never differ in a bit."""
MEASURED = {
    "mini": "mini/pretrain.json",
    "step": "results/mini_m3_step.json",
    "step_longest": "results/mini_m3_step_longest.json",
    "step_recompute": "results/mini_m3_step_recompute.json",
    "step_two_total": "results/mini_m3_step_two_total.json",
    "step_two_each": "results/mini_m3_step_two_each.json",
    "sync": "results/mini_m3_sync.json",
    "baseline": "results/mini_m3_baseline.json",
    "bench_parallel": "results/parallel_kernels.json",
    "bench_msa": "results/msa_kernels.json",
    "bench_dense": "results/dense_kernels.json",
    "bench_moe": "results/moe_kernels.json",
    "verify_mini": "results/verify_mini_m3.json",
    "verify_tiny": "results/verify_tiny_m3.json",
    "kv_formats": "results/kv_formats.json",
}
"""Lines that leave a JSON file, and where in OUT."""
CHECKED = {
    "prefill_table": None,
    "random_attention": None,
    "random_experts": None,
    "tests_w4a4": "results/tests_w4a4.xml",
    "tests_quant": "results/tests_quant.xml",
    "tests_kernels": "results/tests_kernels.xml",
    "tests_trainer": "results/tests_trainer.xml",
    "tests_sleep": "results/tests_sleep.xml",
    "tests_rollout": "results/tests_rollout.xml",
    "tests_faults": "results/tests_faults.xml",
    "tests_recipes": "results/tests_recipes.xml",
    "tests_two_gpus": "results/tests_two_gpus.xml",
}
"""Lines that are right or wrong: pytest's file, or the log alone. All of them go into one file, `CHECKS`."""
CHECKS = "gpu_checks.json"
PRETRAIN = "mini_m3_pretrain.json"
TAIL = 60
"""Lines of a log that are kept of a comparison."""


def target_of(line: str) -> str | None:
    """The file in docs/results into which a line goes, without the machine's prefix; None: nothing is made of it."""
    if line in CHECKED:
        return CHECKS
    if line in MEASURED:
        return PRETRAIN if line == "mini" else Path(MEASURED[line]).name
    return next((f"{report}_{line.removeprefix('tiny_')}.json" for report, runs in RUNS.items() if line in runs), None)


@dataclass
class Collection:
    """What is being collected from `out` into `to`."""

    lines: Sequence[Line]
    out: Path
    to: Path
    status: Status
    missing: list[str] = field(default_factory=list)
    """One line for each thing that is not there or not as it should be."""
    written: list[Path] = field(default_factory=list)

    def done(self, name: str) -> bool:
        """Whether a line of the plan is done; says so where it is not."""
        how = self.status.states(self.lines)[name]
        if how == "done":
            return True
        said = state.last_line(state.log_of(self.out, name))
        self.missing.append(f"{name}: {how}" + (f" ({said[:160]})" if said else ""))
        return False

    def record(self, name: str) -> Mapping[str, Any]:
        """What the queue noted of a line."""
        return self.status.lines[name]

    def machine(self, name: str) -> Mapping[str, Any]:
        """What the line ran on."""
        return self.status.data["machines"][self.record(name)["machine"]]

    def about(self, name: str) -> dict[str, Any]:
        """Command, machine, versions and date of a line."""
        record, machine = self.record(name), self.machine(name)
        found = {"command": record["command"], "machine": told(machine), "versions": machine["versions"], "date": record["started"][:10]}
        note = "; ".join(self._notes(name))
        return found | ({"note": note} if note else {})

    def _notes(self, name: str) -> Iterator[str]:
        record = self.record(name)
        beside = [other for other in self.status.lines if other != name and self._overlap(record, self.status.lines[other])]
        if beside:
            yield f"beside it ran {', '.join(sorted(beside))}"
        if record["attempts"] > 1:
            yield f"started {record['attempts']} times, the seconds of the queue are those of the last"

    def _overlap(self, one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
        """Whether two lines used the same GPU of a machine at the same time."""
        if other.get("seconds") is None or other["machine"] != one["machine"] or other["command"].split()[0] == "wait":
            return False
        lanes = {one["lane"].rstrip("+"), other["lane"].rstrip("+")}
        begun = max(one["begun"], other["begun"])
        ended = min(one["begun"] + one["seconds"], other["begun"] + other["seconds"])
        return (len(lanes) == 1 or "all" in lanes) and begun < ended

    def write(self, target: str, data: Any) -> None:
        """One JSON file, with OUT in place of the machine's path to it."""
        text = json.dumps(data, indent=1).replace(str(self.status.data.get("out", self.out)), "$OUT").replace(str(self.out), "$OUT")
        path = self.to / f"{self.prefix}_{target}"
        path.write_text(text + "\n")
        self.written.append(path)

    @property
    def prefix(self) -> str:
        """Of all names: what the first of the machines has."""
        return short(self.status.data["machines"][0])


def short(machine: Mapping[str, Any]) -> str:
    """`h200` of an NVIDIA H200; `cpu` without a GPU."""
    return machine["gpus"][0].split()[1].lower() if machine["gpus"] else "cpu"


def told(machine: Mapping[str, Any]) -> str:
    """A machine in words."""
    gpus = [f"{machine['gpus'].count(name)} x {name}" for name in dict.fromkeys(machine["gpus"])]
    driver = [f"driver {machine['driver']}"] if machine["driver"] else []
    return ", ".join([*gpus, *driver, f"{machine['cores']} cores ({machine['cpu']})"])


def runs(of: Collection, console: Console) -> None:
    """JSON of each run, and the reports."""
    wanted = {line.name for line in of.lines}
    for report, names in RUNS.items():
        found = []
        for name in (name for name in names if name in wanted):
            if not of.done(name):
                continue
            about = of.about(name)
            try:
                result = result_of(of.out / "runs" / name, about["command"], about["machine"], about.get("note"))
            except (ValueError, OSError) as error:
                of.missing.append(f"{name}: {error}")
                continue
            if name in BITWISE and result["mismatch_max_abs_max"] != 0:
                of.missing.append(f"{name}: logprobs differ by up to {result['mismatch_max_abs_max']:g}, not by 0")
            of.write(target_of(name), result | {"date": about["date"]})  # files that were carried have the time of their unpacking
            found.append(of.written[-1])
        if found:
            _report(of, report, found, len(names), console)


def _report(of: Collection, report: str, files: Sequence[Path], wanted: int, console: Console) -> None:
    """Page, picture and figures of runs, from their JSON files."""
    loaded = [run_report.load(path) for path in files]
    paths = [of.to / f"{of.prefix}_{report}.{suffix}" for suffix in ("html", "png")]
    run_report.write(loaded, *paths)
    of.written += paths
    of.write(f"{report}.json", run_report.to_dict(loaded))
    grouping, figures = run_report.group(loaded)
    console.print(run_report.groups_table(figures, grouping.notes))
    if len(files) < wanted:
        of.missing.append(f"{report}: the report is of {len(files)} runs, not of {wanted}")
    if report in POOLED and len(figures) > 1:
        keys = sorted({key for one in figures for key in one.differs})
        why = ", ".join(keys) or "; ".join(grouping.notes) or "nothing that was recorded"
        of.missing.append(f"{report}: the seeds are not one group; they differ in {why}")


def measurements(of: Collection) -> None:
    """JSON files, with what they were made by."""
    for line in of.lines:
        if line.name not in MEASURED or not of.done(line.name):
            continue
        path = of.out / MEASURED[line.name]
        try:
            data = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            of.missing.append(f"{line.name}: {path} cannot be read ({type(error).__name__})")
            continue
        about = of.about(line.name)
        of.write(target_of(line.name), about | (data if isinstance(data, dict) else {"results": data}))


def checks(of: Collection) -> None:
    """One file of what was right and wrong."""
    found = {}
    for line in of.lines:
        if line.name not in CHECKED:
            continue
        source = CHECKED[line.name]
        there = of.done(line.name)
        # A comparison that failed is a result, too: it is in the file, and among what is missing.
        if of.status.lines.get(line.name, {}).get("exit") is None:
            continue
        found[line.name] = of.about(line.name) | {"right": there, "seconds": of.record(line.name)["seconds"]}
        if source is None:
            found[line.name]["said"] = _tail(state.log_of(of.out, line.name))
        elif (of.out / source).is_file():
            tests = junit(of.out / source)
            found[line.name] |= tests
            if there and tests["passed"] == 0:
                of.missing.append(f"{line.name}: no test ran, all {len(tests['skipped'])} were skipped")
        else:
            of.missing.append(f"{line.name}: {source} is not there")
    if found:
        of.write(CHECKS, found)


def junit(path: Path) -> dict[str, Any]:
    """How many tests of pytest's file passed, and which did not."""
    cases = list(ElementTree.parse(path).getroot().iter("testcase"))
    failed, skipped = [], {}
    for case in cases:
        name = f"{case.get('classname', '')}.{case.get('name', '')}".strip(".")
        for child in case:
            if child.tag in ("failure", "error"):
                failed.append({"test": name, "said": (child.get("message") or "")[:300]})
            elif child.tag == "skipped":
                skipped[name] = (child.get("message") or "")[:200]
    return {"tests": len(cases), "passed": len(cases) - len(failed) - len(skipped), "failed": failed, "skipped": skipped}


def _tail(log: Path) -> list[str]:
    """The last lines of the last attempt."""
    lines = [line.rstrip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    begins = max((at for at, line in enumerate(lines) if line.startswith("== ")), default=-1)
    return lines[begins + 1 :][-TAIL:]


def main(argv: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tools.measure.collect", description="Make the files of docs/results.")
    parser.add_argument("plan", type=Path)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of the queue")
    parser.add_argument("dest", type=Path, metavar="DEST", help="docs/results, or another folder")
    options = parser.parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 160)
    try:
        lines, status = parse(options.plan.read_text()), Status(options.out.absolute())
        if not status.data["machines"]:
            raise StateError(f"{options.out} holds no status of a queue")
        options.dest.mkdir(parents=True, exist_ok=True)
        of = Collection(lines, options.out.absolute(), options.dest, status)
        runs(of, console)
        measurements(of)
        checks(of)
    except (PlanError, StateError, OSError) as error:
        print(f"measure: {error}", file=sys.stderr)
        return 2
    of.missing += [f"{line.name}: nothing is collected of it" for line in lines if line.awaited is None and target_of(line.name) is None]
    for path in of.written:
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)
    for one in of.missing:
        console.print(f"MISSING {one}", style="bold red", markup=False, highlight=False, soft_wrap=True)
    console.print(f"{len(of.written)} files, {len(of.missing)} missing", highlight=False)
    return 1 if of.missing else 0


if __name__ == "__main__":
    sys.exit(main())

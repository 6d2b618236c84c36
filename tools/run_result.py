"""Turn a run directory into one JSON file for docs/results.

python tools/run_result.py RUN OUT.json --command "samebits train ..." --machine "..." [--note "..."]
"""

from __future__ import annotations

import argparse
import datetime
import json
from pathlib import Path
from typing import Any

from samebits.recipes.run_dir import read_metrics
from samebits.recipes.run_report import load


def result_of(run: Path, command: str, machine: str, note: str | None = None) -> dict[str, Any]:
    """What is published of a finished run. Raises `ValueError` in one line where its summary is missing or is of other steps."""
    if not (run / "summary.json").is_file():
        raise ValueError(f"{run} has no summary.json: it is not finished")
    summary = json.loads((run / "summary.json").read_text())
    lines = read_metrics(run / "metrics.jsonl")
    steps = [line for line in lines if line["step"] > 0]
    if len(steps) != summary["steps"]:
        raise ValueError(f"{run}: summary.json counts {summary['steps']} steps, metrics.jsonl holds {len(steps)}")
    loaded = load(run)
    ended = datetime.datetime.fromtimestamp((run / "metrics.jsonl").stat().st_mtime, datetime.UTC)
    agreement = [line["replay/agreement"] for line in steps if "replay/agreement" in line]
    return {
        "command": command,
        "machine": machine,
        "versions": summary.pop("versions"),
        "date": ended.date().isoformat(),
        **({"note": note} if note else {}),
        **summary,
        **({"replay_agreement_min": min(agreement)} if agreement else {}),  # without routing replay there is none
        "sync_tensors_min": min(line["sync/tensors"] for line in steps),
        # What `samebits report` pools runs by; no paths of this machine are among them.
        "settings": loaded.settings,
        "inputs": loaded.inputs,
        "metrics": lines,
    }


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="folder with summary.json and metrics.jsonl")
    parser.add_argument("out", type=Path)
    parser.add_argument("--command", required=True)
    parser.add_argument("--machine", required=True)
    parser.add_argument("--note")
    options = parser.parse_args()
    try:
        result = result_of(options.run, options.command, options.machine, options.note)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

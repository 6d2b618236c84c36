"""Turn a run directory into one JSON file for docs/results.

python tools/run_result.py RUN OUT.json --command "samebits train ..." --machine "..." [--note "..."]
"""

import argparse
import datetime
import json
from pathlib import Path

from samebits.recipes.run_report import load

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("run", type=Path, help="folder with summary.json and metrics.jsonl")
parser.add_argument("out", type=Path)
parser.add_argument("--command", required=True)
parser.add_argument("--machine", required=True)
parser.add_argument("--note")
options = parser.parse_args()

summary = json.loads((options.run / "summary.json").read_text())
lines = [json.loads(line) for line in (options.run / "metrics.jsonl").read_text().splitlines()]
steps = [line for line in lines if line["step"] > 0]
if len(steps) != summary["steps"]:
    raise SystemExit(f"{options.run}: summary.json counts {summary['steps']} steps, metrics.jsonl holds {len(steps)}")
run = load(options.run)
ended = datetime.datetime.fromtimestamp((options.run / "metrics.jsonl").stat().st_mtime, datetime.UTC)
result = {
    "command": options.command,
    "machine": options.machine,
    "versions": summary.pop("versions"),
    "date": ended.date().isoformat(),
    **({"note": options.note} if options.note else {}),
    **summary,
    "replay_agreement_min": min(line["replay/agreement"] for line in steps),
    "sync_tensors_min": min(line["sync/tensors"] for line in steps),
    # What `samebits report` pools runs by; no paths of this machine are among them.
    "settings": run.settings,
    "inputs": run.inputs,
    "metrics": lines,
}
options.out.write_text(json.dumps(result, indent=1) + "\n")

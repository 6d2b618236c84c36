"""The battery of graded responses, and a table of how two graders do on it: `python -m tests.recipes.battery`.

Each line of `data/grading_battery.jsonl` holds a response to a problem of our own, its gold answer and whether the response is right
(`cls` names the fault it guards against). math_dapo is verl's grader for DAPO-Math; it is shown for comparison and may be wrong.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from samebits.recipes.grading import grade
from samebits.recipes.grading_workers import SymbolicPool

FILE = Path(__file__).parent / "data" / "grading_battery.jsonl"
Case = dict[str, object]


def cases() -> list[Case]:
    return [json.loads(line) for line in FILE.read_text().splitlines()]


def ours(case: Case, pool: SymbolicPool) -> bool:
    cut = bool(case.get("truncated", False))
    return grade(case["text"], case["gold"], truncated=cut, policy=case.get("policy", "wrong"), pool=pool).correct


def math_dapo(case: Case) -> bool:
    from verl.utils.reward_score.math_dapo import compute_score

    return bool(compute_score(case["text"], case["gold"])["acc"])


def tally(grader: Callable[[Case], bool], rows: list[Case]) -> dict[str, dict[str, int]]:
    """By class: cases, false accepts, false rejects, errors raised."""
    table: dict[str, dict[str, int]] = defaultdict(lambda: {"cases": 0, "false accept": 0, "false reject": 0, "error": 0})
    for case in rows:
        row = table[case["cls"]]
        row["cases"] += 1
        try:
            verdict = grader(case)
        except Exception:
            row["error"] += 1
            continue
        if verdict != case["correct"]:
            row["false accept" if verdict else "false reject"] += 1
    return dict(table)


def show(title: str, table: dict[str, dict[str, int]], console: Console) -> None:
    out = Table(title=title, title_justify="left")
    columns = ("cases", "false accept", "false reject", "error")
    for name in ("class", *columns):
        out.add_column(name, justify="left" if name == "class" else "right")
    for name, row in [*table.items(), ("all", totals(table))]:
        out.add_row(name, *(str(row[c]) for c in columns))
    console.print(out)


def totals(table: dict[str, dict[str, int]]) -> dict[str, int]:
    return {c: sum(row[c] for row in table.values()) for c in next(iter(table.values()))}


def main() -> None:
    console = Console()
    pool = SymbolicPool(limit_s=5.0)
    show("samebits", tally(lambda case: ours(case, pool), cases()), console)
    pool.close()
    show("verl math_dapo", tally(math_dapo, cases()), console)


if __name__ == "__main__":
    main()

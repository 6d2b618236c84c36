"""`samebits plan weights`: what a checkpoint weighs, told from its config alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from .terminal import fail, write_json

if TYPE_CHECKING:
    from samebits.quant.sizes import WeightPlan


def weights(
    config: Annotated[Path, typer.Argument(help="config.json of a MiniMax-M3 model, or its folder")],
    profile: Annotated[str, typer.Option(help="numerics profile")] = "w4a16",
    json_file: Annotated[Path | None, typer.Option("--json", help="also write the figures to this file")] = None,
) -> None:
    """Bytes of a checkpoint by role and format, beside the same model with its experts in MXFP8."""
    from samebits.quant.profile import get_profile
    from samebits.quant.sizes import all_mxfp8, plan_weights

    try:
        described = _read(config)
        numerics = get_profile(profile)
        plan, other = plan_weights(described, numerics), plan_weights(described, all_mxfp8(numerics))
    except (ValueError, TypeError) as error:
        raise fail(str(error)) from None
    except OSError as error:
        raise fail(f"{error.filename}: {error.strerror}") from None
    write_json(json_file, {"plan": plan.to_dict(), "mxfp8": other.to_dict()})
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(_table(plan, other))
    for line in _explanation(plan, other):
        console.print(line, highlight=False, soft_wrap=True)


def _read(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        found = json.loads(file.read_text())
    except ValueError:
        raise ValueError(f"{file} is no JSON") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file} is no config.json")
    return found


def _gb(count: int) -> str:
    from samebits.quant.sizes import GB

    return f"{count / GB:.3f}" if abs(count) >= GB / 1000 or not count else f"{count / GB:.6f}"


def _table(plan: WeightPlan, other: WeightPlan) -> Table:
    table = Table(title=f"weights in GB (10^9 bytes), profile {plan.profile} and all-{other.profile}", title_justify="left")
    for name in ("role", "tensors", "elements", "format", "GB", "format ", "GB ", "difference"):
        table.add_column(name, justify="left" if name.startswith(("role", "format")) else "right", no_wrap=True)
    for a, b in zip(plan.rows, other.rows, strict=True):
        _add(table, a, b)
    table.add_section()
    elements = f"{sum(r.elements for r in plan.rows):,}"
    table.add_row("total", "", elements, "", _gb(plan.total), "", _gb(other.total), _gb(other.total - plan.total), style="bold")
    if plan.mtp and other.mtp:
        _add(table, plan.mtp, other.mtp)
        both = plan.total + plan.mtp.bytes, other.total + other.mtp.bytes
        table.add_row("total with mtp", "", "", "", _gb(both[0]), "", _gb(both[1]), _gb(both[1] - both[0]))
    return table


def _add(table: Table, a: Any, b: Any) -> None:
    difference = _gb(b.bytes - a.bytes) if b.bytes != a.bytes else "-"
    tensors = str(a.tensors) if a.tensors else ""
    table.add_row(a.role, tensors, f"{a.elements:,}", str(a.format), _gb(a.bytes), str(b.format), _gb(b.bytes), difference)


def _explanation(plan: WeightPlan, other: WeightPlan) -> list[str]:
    from samebits.quant.sizes import GB, VISION

    counted = "codes and scales, embedding, head, router, norms" + (", vision tower and projector" if plan.rows[-1].role == VISION else "")
    left = "file headers, tokenizer" + (" and the MTP module, which samebits quantize leaves out" if plan.mtp else "")
    text = [f"{plan.profile}: {plan.total / GB:.1f} GB. Counted: {counted}. Not counted: {left}."]
    roles = [a.role for a, b in zip(plan.rows, other.rows, strict=True) if a.bytes != b.bytes]
    if not roles:
        return text
    more = (other.total - plan.total) / GB
    text.append(
        f"all-{other.profile}: {other.total / GB:.1f} GB, {more:.1f} GB more in {', '.join(roles)}: 8.25 bits a weight instead of 4.5."
    )
    if other.mtp:
        mtp = other.mtp.bytes / GB
        text.append(
            f"With its MTP module an all-{other.profile} checkpoint has {other.total / GB + mtp:.1f} GB: "
            f"{more:.1f} GB of experts and {mtp:.1f} GB of MTP more than {plan.total / GB:.1f} GB."
        )
    return text

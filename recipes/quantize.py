"""`samebits quantize`: the conversion of `quant.convert` with a progress bar."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from samebits.quant.convert import Report, convert
from samebits.quant.profile import NumericsProfile


def quantize(source: Path, target: Path, profile: NumericsProfile, workers: int | None, console: Console) -> Report:
    """Convert `source` to `target`, showing bytes of the source, speed and time left. Raises what `convert` raises."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console)
    task = bar.add_task("quantizing", total=None)

    def start(total: int) -> None:
        bar.update(task, total=total)
        bar.start()

    try:
        return convert(source, target, profile, workers, on_start=start, on_bytes=lambda count: bar.update(task, advance=count))
    finally:
        bar.stop()


def summary(report: Report, target: Path) -> list[str]:
    """What was done, in a few lines."""
    lines = [f"{target}: {report.files} files, {report.tensors} tensors, {report.source_bytes / 1e9:.3f} GB to {report.bytes / 1e9:.3f} GB"]
    if report.taken_over:
        lines.append(f"{report.taken_over} weights were quantized already and keep their codes")
    if report.resumed:
        lines.append(f"{report.resumed} files were finished before")
    return lines + [f"left out: {count} {what}" for what, count in report.left_out.items()]

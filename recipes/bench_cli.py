"""`samebits bench`: measurements of the parts, on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .terminal import fail, write_json

bench_app = typer.Typer(no_args_is_help=True, help="Measure kernels on this machine.")
KERNELS = ("moe",)


@bench_app.callback()
def bench() -> None:
    """Measure on this machine."""


@bench_app.command()
def kernels(
    what: Annotated[str, typer.Option(help=f"what to measure: {', '.join(KERNELS)}")] = "moe",
    json_file: Annotated[Path | None, typer.Option("--json", help="write the results here")] = None,
) -> None:
    """Kernels against their peers and against what the machine can do, in one run. Needs a CUDA GPU."""
    if what not in KERNELS:
        raise fail(f"no benchmark {what!r}: one of {', '.join(KERNELS)}")
    import torch

    if not torch.cuda.is_available():
        raise fail("bench kernels needs a CUDA GPU")
    from samebits.kernels import bench_moe

    result = bench_moe.run(save=lambda partial: write_json(json_file, partial))
    bench_moe.show(result)
    if not result["right"]:
        raise fail("results are wrong", 1)

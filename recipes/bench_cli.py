"""`samebits bench`: speed of what the project adds, beside what it must beat. Benchmarks live with their code; this starts them."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from .terminal import fail, require_writable, write_json

bench_app = typer.Typer(name="bench", help="Measure kernels on this machine's GPU.", no_args_is_help=True)
KERNELS = {name: f"samebits.kernels.bench_{name}" for name in ("moe", "msa", "dense")}
"""Modules of which each has `run(save)`, which gives `right` beside the figures, and `show`."""


@bench_app.callback()
def _group() -> None:
    """Keeps `bench` a group while it has one command."""


@bench_app.command("kernels")
def kernels(
    what: Annotated[str, typer.Option(help=f"which kernels: {', '.join(KERNELS)}")],
    json_file: Annotated[Path | None, typer.Option("--json", help="also write the results to this file")] = None,
) -> None:
    """Time kernels against the bandwidth of a copy in the same run, and against peers that are installed."""
    import torch

    if what not in KERNELS:
        raise fail(f"no kernels called {what!r}; there are: {', '.join(KERNELS)}")
    if not torch.cuda.is_available() or find_spec("triton") is None:
        raise fail("the kernel benchmarks need a CUDA GPU and Triton")
    require_writable(json_file)
    module = import_module(KERNELS[what])
    result = module.run(save=lambda partial: write_json(json_file, partial))
    module.show(result)
    if not result["right"]:
        raise fail("kernels and reference disagree", 1)

"""`samebits bench`: what a step is made of, what a sync costs, and how fast kernels are beside what they must beat.

Benchmarks live with their code; this starts them.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from .terminal import fail, quiet_job, require_writable, write_json

bench_app = typer.Typer(name="bench", help="Measure kernels on this machine's GPU.", no_args_is_help=True)
KERNELS = {name: f"samebits.kernels.bench_{name}" for name in ("moe", "msa", "dense", "rows", "parallel")}
"""Modules of which each has `PARTS`, `run(save, parts)`, which gives `right` beside the figures, and `show`.

One may say what a machine lacks for it (`missing()`), and leave under `failed` why it ended early.
"""


@bench_app.command("kernels")
def kernels(
    what: Annotated[str, typer.Option(help=f"which kernels: {', '.join(KERNELS)}")],
    json_file: Annotated[Path | None, typer.Option("--json", help="also write the results to this file, line by line")] = None,
    part: Annotated[list[str] | None, typer.Option(help="run only this part; may be given again")] = None,
) -> None:
    """Time kernels against the bandwidth of a copy in the same run, and against peers that are installed."""
    import torch

    if what not in KERNELS:
        raise fail(f"no kernels called {what!r}; there are: {', '.join(KERNELS)}")
    if not torch.cuda.is_available() or find_spec("triton") is None:
        raise fail("the kernel benchmarks need a CUDA GPU and Triton")
    require_writable(json_file)
    module = import_module(KERNELS[what])
    lacking = getattr(module, "missing", lambda: None)()
    if lacking:
        raise fail(lacking)
    if unknown := sorted(set(part or ()) - set(module.PARTS)):
        raise fail(f"no part called {unknown[0]!r} of {what}; there are: {', '.join(module.PARTS)}")
    result = module.run(save=lambda partial: write_json(json_file, partial), parts=part or None)
    module.show(result)
    if result.get("failed"):
        raise fail(f"stopped: {result['failed']}", 1)
    if not result["right"]:
        raise fail("kernels and reference disagree", 1)


console = Console()
Overrides = Annotated[list[str] | None, typer.Argument(help="key=value, of the recipe or of verl")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="also write the results to this file")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="show what verl, Ray and vLLM print")]


@bench_app.command("step")
def step(
    subject: Annotated[str, typer.Argument(help="recipe file, or the name of a shipped one; or the directory of a run")],
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="steps to measure; of a run all are")] = 8,
    warm_up: Annotated[int, typer.Option(min=0, help="steps before them, which are left out")] = 2,
    traced: Annotated[int, typer.Option(min=0, help="steps after them whose communication is recorded, which are slower")] = 1,
    gpus: Annotated[str | None, typer.Option(help="measure on 1 and on so many GPUs of this host: N or N,M,... (powers of two)")] = None,
    total: Annotated[bool, typer.Option("--total", help="with --gpus: the same batch in all, not for each GPU")] = False,
    json_file: JsonFile = None,
    verbose: Verbose = False,
) -> None:
    """Time by phase, tokens a second, memory, communication and bytes on the wire of real training steps."""
    require_writable(json_file)
    from . import bench_scale, bench_step

    folder = Path(subject)
    if total and gpus is None:
        raise fail("--total goes with --gpus")
    if (folder / "metrics.jsonl").is_file():
        changed = [*(overrides or []), *([f"--gpus {gpus}"] if gpus else [])]
        if changed:
            raise fail(f"{subject} is a finished run: {changed[0]} would change nothing")
        result = _measured(lambda: bench_step.of_run(folder, warm_up))
    else:
        quiet_job(verbose)
        measure = {"steps": steps, "warm_up": warm_up, "traced": traced, "verbose": verbose}
        if gpus is not None:
            result = _measured(lambda: bench_scale.run(subject, overrides or [], bench_scale.parse(gpus), total, measure, console))
            bench_scale.show(result, console)
            write_json(json_file, result)
            return
        result = _measured(lambda: bench_step.run(subject, overrides or [], console=console, **measure))
    bench_step.show(result, console)
    write_json(json_file, result)


@bench_app.command("sync")
def sync(
    recipe: Annotated[str, typer.Argument(help="recipe file, or the name of a shipped one")],
    overrides: Overrides = None,
    repeat: Annotated[int, typer.Option(min=1, help="syncs to measure, after a first one")] = 10,
    json_file: JsonFile = None,
    verbose: Verbose = False,
) -> None:
    """Seconds of an adapter's sync part by part, beside a plain copy of its bytes on the device."""
    require_writable(json_file)
    quiet_job(verbose)
    from . import bench_sync

    result = _measured(lambda: bench_sync.run(recipe, overrides or [], repeat, console, verbose))
    bench_sync.show(result, console)
    write_json(json_file, result)


def _measured(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result of `measure`; whatever keeps it from being measured is one line."""
    from .bench_step import NotMeasured
    from .config import RecipeError
    from .job import JobFailed

    try:
        return measure()
    except (RecipeError, NotMeasured) as error:
        raise fail(str(error), 2) from None
    except KeyboardInterrupt:
        raise fail("interrupted", 130) from None
    except JobFailed as error:
        raise fail(f"stopped: {error}", 1) from None

"""The command line of samebits: train, eval, serve, verify, report, quantize, plan, bench, tiny-m3, mini-m3.

Exit status: 0 agrees or succeeds, 1 disagrees or stopped, 2 bad usage or input. Errors are one line on standard error.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .baseline_cli import baseline
from .bench_cli import bench_app
from .evaluate_cli import evaluate
from .plan_cli import plan_app
from .serve_cli import serve
from .terminal import fail, quiet_job, write_json
from .verify_cli import verify_app

app = typer.Typer(
    name="samebits",
    help="RL post-training in which trainer and serving engine compute with the same bits.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(plan_app, name="plan")
app.add_typer(verify_app, name="verify")
app.command("eval")(evaluate)
app.command("serve")(serve)
bench_app.command("baseline")(baseline)
app.add_typer(
    bench_app, name="bench", help="Measure a training step, an adapter sync, kernels on this machine's GPU, or stock verl beside them."
)
console = Console()


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="recipe file, or the name of a shipped one")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, of the recipe or of verl")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="show what verl, Ray and vLLM print")] = False,
    check: Annotated[bool, typer.Option("--check", help="check and plan only: needs no GPU, no weights and no network")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="with --check: also write what was found to this file")] = None,
) -> None:
    """Run a recipe; the same command resumes a run that was interrupted."""
    if check:
        raise typer.Exit(_check(recipe, overrides or [], json_file))
    if json_file is not None:
        raise fail("--json goes with --check; a run writes summary.json", 2)
    quiet_job(verbose)
    from .config import RecipeError, load_recipe
    from .job import JobFailed, print_summary
    from .job import train as run

    try:
        # Whether the machine has the device comes last: that a recipe cannot run anywhere yet is said first.
        own, verl = load_recipe(recipe, overrides or [], planned=True)
        summary = run(own, verl, console, verbose)
    except RecipeError as error:
        raise fail(str(error), 2) from None
    except KeyboardInterrupt:
        raise fail("interrupted; the same command goes on from the last checkpoint", 130) from None
    except JobFailed as error:
        raise fail(f"stopped: {error}", 1) from None
    print_summary(summary, console)
    console.print(f"everything is in {own.folder}")


def _check(recipe: str, overrides: list[str], json_file: Path | None) -> int:
    """Check a recipe without running it; returns the exit status."""
    from .check import DoesNotFit, check, show
    from .config import RecipeError

    try:
        report = check(recipe, overrides)
    except RecipeError as error:
        raise fail(str(error), 2) from None
    except DoesNotFit as error:
        raise fail(str(error), 1) from None
    show(report, console)
    write_json(json_file, report.to_dict())
    return 0


@app.command()
def quantize(
    source: Annotated[Path, typer.Argument(help="folder of a MiniMax-M3 checkpoint: 16 or 32 bits, or quantized by another tool")],
    target: Annotated[Path, typer.Argument(help="folder to write; the same command goes on after an interruption")],
    profile: Annotated[str, typer.Option(help="numerics profile")] = "w4a16",
    workers: Annotated[int | None, typer.Option(min=1, help="files at a time; default one for each core, at most 8")] = None,
) -> None:
    """Write a checkpoint in the formats of a numerics profile, streaming; nothing quantized is quantized again."""
    from samebits.quant.profile import get_profile

    from .quantize import quantize as run
    from .quantize import summary

    try:
        report = run(source, target, get_profile(profile), workers, console)
    except ValueError as error:
        raise fail(str(error), 2) from None
    except KeyboardInterrupt:
        raise fail("stopped; the same command goes on from here", 1) from None
    for line in summary(report, target):
        console.print(line, highlight=False, soft_wrap=True)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="run directories, or JSON results with metrics; several are drawn together")],
    html: Annotated[Path | None, typer.Option("--html", help="page to write; default report.html in the run directory")] = None,
    png: Annotated[Path | None, typer.Option("--png", help="picture to write; default curves.png in the run directory")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="also write figures and curves to this file")] = None,
) -> None:
    """Draw the curves of runs: one page that needs no network, and a PNG. Runs that differ in their seed only are pooled."""
    from . import run_report

    try:
        loaded = [run_report.load(path) for path in runs]
        page, picture = run_report.paths_of(runs, html, png, json_file is not None or png is not None)
        run_report.write(loaded, page, picture)
    except ValueError as error:
        raise fail(str(error), 2) from None
    if json_file is not None:
        write_json(json_file, run_report.to_dict(loaded))
    if len(loaded) > 1:
        found, reached = run_report.group(loaded)
        console.print(run_report.groups_table(reached, found.notes))
    for path in filter(None, (page, picture, json_file)):
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)


@app.command("tiny-m3")
def tiny_m3(
    out: Annotated[Path, typer.Argument(help="folder to write")],
    seed: Annotated[int, typer.Option(help="seed of weights and data")] = 0,
) -> None:
    """Pre-train the tiny MiniMax-M3 on generated arithmetic and quantize it."""
    from .tiny_m3 import build

    if out.exists() and any(out.iterdir()):
        raise fail(f"{out} is not empty", 2)
    report = build(out, seed=seed)
    console.print_json(data=report)


@app.command("mini-m3")
def mini_m3(
    out: Annotated[Path, typer.Argument(help="folder to write")],
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="seed of weights and data")] = 0,
    minutes: Annotated[float, typer.Option(help="time for training; quantizing and measuring come after it")] = 3.5,
    steps: Annotated[int | None, typer.Option(min=1, help="number of steps instead of a time")] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu")] = "cuda",
) -> None:
    """Pre-train the mini MiniMax-M3 on generated math on one GPU, quantize it, and measure it; goes on after an interruption."""
    begun = time.perf_counter()
    import torch

    from .mini_keep import Interrupted, what_is_kept
    from .mini_m3 import build, show
    from .mini_train import Training

    if device not in ("cuda", "cpu"):
        raise fail(f"--device must be cuda or cpu, not {device!r}", 2)
    if device == "cuda" and not torch.cuda.is_available():
        raise fail("--device cuda: no CUDA GPU is available", 2)
    if not 0 < minutes < float("inf"):
        raise fail(f"--minutes must be positive, not {minutes:g}", 2)
    try:
        imports = time.perf_counter() - begun
        report = build(out, seed, Training(minutes=minutes, steps=steps), device, console=console, imports=imports)
    except (FileExistsError, ValueError) as error:
        raise fail(str(error), 2) from None
    except OSError as error:
        kept = what_is_kept(out)
        raise fail(f"{error}" if kept is None else f"{error}; {kept}", 2) from None
    except FloatingPointError as error:
        raise fail(f"training diverged: {error}; nothing was kept", 1) from None
    except Interrupted as stopped:
        kept = what_is_kept(out)
        says = "nothing was kept" if kept is None else f"{kept}: the same command goes on from there"
        raise fail(f"interrupted; {says}", 128 + stopped.number) from None
    show(report, console)
    console.print(f"wrote {out}; pretrain.json in it has the figures", highlight=False, soft_wrap=True)


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()

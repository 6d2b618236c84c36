"""The command line: `samebits train`, `samebits quantize`, `samebits plan`, `samebits bench`, `samebits tiny-m3`.

Exit status: 0 agrees or succeeds, 1 disagrees or stopped, 2 bad usage or input. Errors are one line on standard error.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .bench_cli import bench_app
from .plan_cli import plan_app
from .terminal import fail

app = typer.Typer(
    name="samebits",
    help="RL post-training in which trainer and serving engine compute with the same bits.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(plan_app, name="plan")
app.add_typer(bench_app, name="bench")
console = Console()


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="recipe file, or the name of a shipped one")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, of the recipe or of verl")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="show what verl, Ray and vLLM print")] = False,
) -> None:
    """Run a recipe; the same command resumes a run that was interrupted."""
    if not verbose:
        warnings.simplefilter("ignore")  # verl warns about each optional engine that is not installed
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VERL_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VERL_USE_EXTERNAL_MODULES", "samebits.trainer.plugin,samebits.rollout.verl_plugin")
    from .config import RecipeError, load_recipe
    from .job import JobFailed, print_summary
    from .job import train as run

    try:
        own, verl = load_recipe(recipe, overrides or [])
        summary = run(own, verl, console, verbose)
    except RecipeError as error:
        raise fail(str(error), 2) from None
    except KeyboardInterrupt:
        raise fail("interrupted; the same command goes on from the last checkpoint", 130) from None
    except JobFailed as error:
        raise fail(f"stopped: {error}", 1) from None
    print_summary(summary, console)
    console.print(f"everything is in {own.folder}")


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


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()

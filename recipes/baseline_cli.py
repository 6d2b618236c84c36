"""`samebits bench baseline`: stock verl with stock vLLM at the work of a recipe, by itself or held against what samebits measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .terminal import fail, require_writable, write_json

console = Console()


def baseline(
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, of verl, or seed")] = None,
    model: Annotated[str, typer.Option(help="qwen3-moe-mini, or qwen3-tiny to try it on a CPU")] = "qwen3-moe-mini",
    recipe: Annotated[str, typer.Option(help="samebits recipe whose work is done: prompts, batch, lengths")] = "mini_m3_h200.yaml",
    steps: Annotated[int, typer.Option(min=1, help="steps to measure")] = 8,
    warm_up: Annotated[int, typer.Option(min=0, help="steps before them, which are left out")] = 2,
    device: Annotated[str, typer.Option(help="cuda or cpu")] = "cuda",
    compare: Annotated[Path | None, typer.Option(help="result of `samebits bench step` to hold against it")] = None,
    stock: Annotated[Path | None, typer.Option(help="with --compare: an earlier result of this command, instead of a run")] = None,
    folder: Annotated[Path | None, typer.Option(help="keep checkpoint, data, verl's metrics and output here; default: nowhere")] = None,
    limit: Annotated[float, typer.Option(min=1, help="seconds after which stock verl is ended; the steps that it has done count")] = 1800.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="also write the results to this file")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="show what verl, Ray and vLLM print")] = False,
) -> None:
    """Measure the training step of stock verl and stock vLLM in bf16, at the tokens of a samebits recipe."""
    from . import baseline_result
    from .baseline_result import NotMeasured

    require_writable(json_file)
    if stock is not None and compare is None:
        raise fail("--stock goes with --compare")
    if stock is not None and overrides:
        raise fail(f"--stock {stock} is measured already: {overrides[0]} would change nothing")
    try:
        ours = None if compare is None else baseline_result.load(compare)
        if stock is not None:
            result = baseline_result.load(stock)
            if "baseline" not in result:
                raise NotMeasured(f"{stock} is no result of `samebits bench baseline`")
        else:
            result = _measure(model, recipe, device, steps, warm_up, limit, overrides or [], folder, verbose)
        write_json(json_file, result)  # before the comparison: what was measured stays, whatever it is held against
        baseline_result.show(result, console)
        if ours is not None:
            result["comparison"] = baseline_result.comparison(ours, result)
            baseline_result.show_comparison(result["comparison"], console)
            write_json(json_file, result)
    except NotMeasured as error:
        raise fail(str(error)) from None


def _measure(
    model: str, recipe: str, device: str, steps: int, warm_up: int, limit: float, overrides: list[str], folder: Path | None, verbose: bool
) -> dict:
    from .baseline import Job, run
    from .baseline_process import BaselineFailed
    from .config import RecipeError

    try:
        return run(Job(model, recipe, device, steps, warm_up, limit, tuple(overrides)), folder, console, verbose)
    except RecipeError as error:
        raise fail(str(error)) from None
    except KeyboardInterrupt:
        raise fail("interrupted", 130) from None
    except BaselineFailed as error:
        raise fail(str(error), 1) from None

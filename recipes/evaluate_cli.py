"""`samebits eval`: sample n responses to every problem of a task, keep each as it comes, grade them all, print and write the figures.

Exit status: 0 done, 1 the engine or server failed on the way (what was generated is kept, and the same command goes on), 2 bad input,
130 interrupted.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .data import GENERATED
from .terminal import fail, require_writable, write_json

if TYPE_CHECKING:
    from .config import Recipe


def evaluate(
    recipe: Annotated[str, typer.Argument(help="recipe file, or the name of a shipped one")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, of the recipe or of verl")] = None,
    adapter: Annotated[Path | None, typer.Option(help="adapter folder of a run, runs/NAME/adapters/step_N")] = None,
    task: Annotated[str | None, typer.Option(help="arithmetic, mini-math, aime24, aime25, a hub name or a file; default: recipe's")] = None,
    n: Annotated[int, typer.Option("-n", min=1, help="responses to each problem")] = 32,
    out: Annotated[Path | None, typer.Option(help="folder of the responses; default: evaluations/ of the run directory")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="only the first so many problems")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="of sampling; 0 takes the likeliest token")] = 1.0,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="longest response; default: the recipe's")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="of sampling")] = 0,
    url: Annotated[str | None, typer.Option(help="an OpenAI-compatible server, in place of an engine in this process")] = None,
    served_name: Annotated[str | None, typer.Option(help="the model's name at the server")] = None,
    api_key_env: Annotated[str | None, typer.Option(metavar="VAR", help="environment variable that holds the server's key")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="requests to the server at a time")] = 64,
    timeout: Annotated[float, typer.Option(min=1.0, help="seconds for one response of the server")] = 1800.0,
    retries: Annotated[int, typer.Option(min=0, help="further tries after 429, 5xx, a lost connection or a timeout")] = 8,
    json_path: Annotated[Path | None, typer.Option("--json", help="write the result with every grade")] = None,
    html_path: Annotated[Path | None, typer.Option("--html", help="write a page with every response")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="show what vLLM prints")] = False,
) -> None:
    """Measure mean@n and pass@k of a recipe's model on a task; the same command resumes an interrupted evaluation."""
    if not verbose:
        warnings.simplefilter("ignore")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    from samebits.alignment_checks.page import PageError

    from .config import RecipeError, load_recipe
    from .eval_engine import EngineGenerator, GenerationFailed
    from .eval_log import EvalLog, samples, write_atomically
    from .eval_page import write_html
    from .eval_result import evaluate as grade
    from .eval_result import print_evaluation
    from .eval_server import ServerGenerator
    from .eval_tasks import load_task
    from .grading_workers import GradingError
    from .math_data import DataError

    if url is None and (served_name or api_key_env):
        raise fail("--served-name and --api-key-env go with --url")
    if url is not None and adapter is not None:
        raise fail("--adapter goes with an engine in this process; a server names its adapters by --served-name")
    require_writable(json_path, html_path)
    if not math.isfinite(temperature):
        raise fail(f"--temperature must be a number, not {temperature}")
    key = _key(api_key_env)
    try:
        own, verl = load_recipe(recipe, overrides or [])
        length = max_tokens or verl.data.max_response_length
        asked = load_task(task or default_task(own), own.seed, limit, own.data_source.prompt_template)
        if url is not None:
            source: Any = ServerGenerator(
                url, served_name, key, temperature, length, concurrency=concurrency, retries=retries, timeout_s=timeout
            )
        else:
            source = EngineGenerator(own, verl, adapter, [p.prompt for p in asked.problems], temperature, length)
    except (RecipeError, DataError) as error:
        raise fail(str(error), 2) from None
    except OSError as error:
        raise fail(f"{error.filename}: {error.strerror}", 2) from None
    settings = {
        "task": asked.name,
        "problems": asked.fingerprint,
        "limit": limit,
        "n": n,
        "temperature": temperature,
        "max_tokens": length,
        "seed": seed,
    } | source.settings
    folder = out or own.folder / "evaluations" / default_folder(asked.name, source.label)
    console = Console()
    try:
        with EvalLog(folder, settings) as log:
            wanted = samples(asked.problems, n, seed)
            missing = log.missing(wanted)
            if len(missing) < len(wanted):
                console.print(f"{len(wanted) - len(missing)} of {len(wanted)} responses are there already", highlight=False)
            if missing:
                _generate(source, missing, len(wanted), log, folder, verbose)
            result = grade(asked, log.responses, n, source.title, settings)
            write_atomically(folder / "result.json", result.as_dict())
    except RecipeError as error:
        raise fail(str(error), 2) from None
    except (GenerationFailed, GradingError) as error:
        raise fail(f"{error}; {_kept(folder)}", 1) from None
    except OSError as error:
        raise fail(f"{error.filename or folder}: {error.strerror or error}; {_kept(folder)}", 1) from None
    except KeyboardInterrupt:
        raise fail("interrupted; the same command goes on from here", 130) from None
    print_evaluation(result, console)
    write_json(json_path, result.as_dict())
    if html_path is not None:
        try:
            write_html(html_path, result)
        except PageError as error:
            raise fail(str(error), 2) from None
    console.print(f"everything is in {folder}", highlight=False, soft_wrap=True)


def default_task(recipe: Recipe) -> str:
    """The task of an evaluation that names none: the held-out set of the recipe's own task."""
    return recipe.task if recipe.task in GENERATED else recipe.data_source.test or "aime24"


def default_folder(task: str, label: str) -> str:
    """Name of the folder of an evaluation: what was asked, of which model."""
    return f"{Path(task).stem if Path(task).is_file() else task.replace('/', '_').replace(':', '_')}-{label}"


def _kept(folder: Path) -> str:
    return f"what was generated is in {folder}, and the same command goes on from there"


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise fail(f"--api-key-env: the environment has no {variable}")
    return key


def _generate(source: Any, missing: list, total: int, log: Any, folder: Path, verbose: bool) -> None:
    """Generate what is missing under a progress bar; what libraries print goes into `engine.log` unless it is asked for."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"))
    with _quiet(None if verbose else folder / "engine.log") as terminal, Progress(*columns, TimeRemainingColumn(), console=terminal) as bar:
        shown = bar.add_task("starting", total=total, completed=total - len(missing))
        for response in source.generate(missing):
            log.append(response)
            bar.update(shown, advance=1, description="generating")


@contextlib.contextmanager
def _quiet(log: Path | None) -> Iterator[Console]:
    """Send what this process writes to its standard output and error into a file; gives a console that still writes to the terminal."""
    if log is None:
        yield Console()
        return
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    with os.fdopen(os.dup(1), "w") as terminal:
        try:
            for descriptor in (1, 2):
                os.dup2(target, descriptor)
            yield Console(file=terminal)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for descriptor, old in zip((1, 2), kept, strict=True):
                os.dup2(old, descriptor)
                os.close(old)
            os.close(target)

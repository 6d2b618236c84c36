"""`samebits verify`: do trainer and engine of a recipe, or of a run, compute the same?

Both sides are started in this process, exchange an adapter, and are compared; see `samebits.alignment_checks`. What the libraries print
goes into a log file, whose name is given when something fails. A watchdog ends a check that hangs: no verdict is never a pass.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console
from rich.table import Table

from .terminal import fail, quiet_job, require_writable, write_json
from .verify_stock import verify_server

verify_app = typer.Typer(help="Prove that trainer and engine agree, or name what does not.", no_args_is_help=True)

verify_app.command("server")(verify_server)

Subject = Annotated[str, typer.Argument(help="recipe, or the directory of a run: then with its newest adapter")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key=value, of the recipe or of verl")]
Inject = Annotated[str | None, typer.Option(help="inject a fault of the catalogue, to see it caught")]
Seed = Annotated[int, typer.Option(min=0, help="seed of the probes")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="write the report here")]
HtmlFile = Annotated[Path | None, typer.Option("--html", help="write the report as one page here")]
Timeout = Annotated[int, typer.Option(min=10, help="seconds after which it ends without a verdict")]
Bisect = Annotated[bool, typer.Option("--bisect", help="show both forwards operation by operation")]
Only = Annotated[list[str] | None, typer.Option("--check", help="make only this check (repeatable)")]
Repeat = Annotated[int, typer.Option(min=1, help="make the checks this often, each time with other seeds, prompts, lengths and adapters")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="show what verl and vLLM print")]


@verify_app.callback(invoke_without_command=True)
def faults(
    list_faults: Annotated[bool, typer.Option("--list-faults", help="one name and one line for each fault that --inject takes")] = False,
) -> None:
    """Prove that trainer and engine agree, or name what does not. Exit status: 0 agree, 1 disagree, 2 could not be checked."""
    if list_faults:
        quiet_job(verbose=False)
        from samebits.alignment_checks.faults import CATALOGUE

        width = max(map(len, CATALOGUE))
        for fault in CATALOGUE.values():
            print(f"{fault.name:{width}}  {fault.summary}")
        raise typer.Exit


_CLASSES = {
    "all": "All checks: weights, routing, logprobs and the objective.",
    "weights": "Does every engine hold exactly the weights that were sent, and use them?",
    "routing": "Do both sides route each token to the same experts and blocks, and does the replay replay?",
    "logprobs": "Do both sides give the same tokens the same probability, on every path?",
    "objective": "Does the trainer's loss weigh, mask and average as it should?",
}


def _command(which: str) -> Callable[..., None]:
    def command(
        subject: Subject,
        overrides: Overrides = None,
        inject: Inject = None,
        check: Only = None,
        seed: Seed = 0,
        json: JsonFile = None,
        html: HtmlFile = None,
        timeout: Timeout = 1800,
        bisect: Bisect = False,
        repeat: Repeat = 1,
        verbose: Verbose = False,
    ) -> None:
        _verify(which, subject, overrides, inject, check, seed, json, html, timeout, bisect, verbose, repeat)

    return command


for _name, _help in _CLASSES.items():
    verify_app.command(_name, help=_help)(_command(_name))


def _verify(
    which: str,
    subject: str,
    overrides: list[str] | None,
    inject: str | None,
    only: list[str] | None,
    seed: int,
    json: Path | None,
    html: Path | None,
    timeout: int,
    bisect: bool,
    verbose: bool,
    repeat: int,
) -> None:
    require_writable(json, html)
    if Path(subject).is_dir() and not (Path(subject) / "config.yaml").is_file():
        raise fail(f"{subject} is no run directory: it has no config.yaml")
    quiet_job(verbose)
    with _log(verbose) as (console, errors, log):
        watchdog = _watchdog(timeout, errors, log)
        _end_on_sigterm(errors)
        try:
            report, steps = _report(which, subject, overrides or [], inject, only, seed, repeat, console)
        except KeyboardInterrupt:
            raise _end(errors, "interrupted", 130) from None
        except _Refused as error:
            raise _end(errors, str(error), 2) from None
        except Exception as error:  # whatever broke while both sides were asked: there is no verdict, and the log has the traceback
            traceback.print_exc()
            raise _end(errors, f"could not be checked: {type(error).__name__}: {_first_line(error)} (log: {log})", 2) from None
        finally:
            watchdog.cancel()
        _show(report, console)
        if bisect:
            _show_steps(steps, console)
        write_json(json, report.to_json())
        if html is not None:
            from samebits.alignment_checks.html import write_html

            try:
                write_html(html, report)
            except ValueError as error:
                raise _end(errors, str(error), 2) from None
        if report.verdict == "error":
            console.print(f"what the libraries printed is in {log}", highlight=False, soft_wrap=True)
        else:
            log.unlink(missing_ok=True)
        raise typer.Exit(report.exit_status)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")[:400]


OUTSIDE = ("trainer", "wire", "transport")
"""Seams of faults that lie outside of the engine's processes."""


class _Refused(Exception):
    """Nothing could be checked. The message is one line."""


def _report(
    which: str, subject: str, overrides: list[str], inject: str | None, only: list[str] | None, seed: int, repeat: int, console: Console
):
    from .config import RecipeError, load_recipe
    from .run_dir import adapter_of, load_run

    try:
        is_run = (Path(subject) / "config.yaml").is_file()
        recipe, verl = load_run(Path(subject), overrides) if is_run else load_recipe(subject, overrides)
        from .validate import validate

        spec = validate(recipe, verl)
        adapter = adapter_of(Path(subject), spec) if is_run else None
    except (RecipeError, ValueError, OSError) as error:
        raise _Refused(str(error)) from None
    from samebits.alignment_checks import pair as pairs
    from samebits.alignment_checks import suite
    from samebits.alignment_checks.faults import CATALOGUE
    from samebits.alignment_checks.limits import Limits
    from samebits.alignment_checks.report import Report

    fault = CATALOGUE.get(inject) if inject else None
    if inject and fault is None:
        raise _Refused(f"there is no fault {inject!r}; --list-faults lists them")
    ranks = verl.actor_rollout_ref.rollout.tensor_model_parallel_size
    if fault is not None and ranks > 1 and fault.seam not in OUTSIDE:
        raise _Refused(
            f"fault {fault.name} changes the engine in its own process, which tensor_model_parallel_size={ranks} makes several of: "
            "inject it with tensor_model_parallel_size=1"
        )
    names = suite.names_of(which)
    if only:
        unknown = [n for n in only if n not in names]
        if unknown:
            raise _Refused(f"there is no check {unknown[0]!r}; checks: {', '.join(names)}")
        names = [n for n in names if n in only]
    from .job import versions

    limits = Limits.of(recipe.profile, recipe.checks.kl_warn, recipe.checks.max_kl)
    replicas = max(fault.replicas if fault else 1, _replicas(verl))
    with console.status("starting trainer and engine"):
        try:
            pair = pairs.start(verl, recipe.model_path, limits, _vocabulary(recipe.model_path), seed, replicas)
        except pairs.PairError as error:
            raise _Refused(str(error)) from None
    settings: dict[str, Any] = {
        "profile": recipe.profile.name,
        "profile_hash": recipe.profile.hash,
        "fault": f"{fault.name}: {fault.summary}" if fault else None,
        "seed": seed,
        "runs": repeat,
        "replicas": replicas,
        "limits": {name: getattr(limits, name) for name in limits.__slots__},
    }
    report = Report(subject, names, settings=settings, versions=versions())
    with console.status("exchanging adapters") as status:
        for run in range(seed, seed + repeat):

            def on_result(result: Any, run: int = run) -> None:
                status.update(f"run {run - seed + 1} of {repeat}: {result.name}: {result.status}")

            suite.prepare(pair, run)
            with _injected(fault, pair):
                if adapter is None:
                    suite.advance(pair, run + 1)
                else:
                    version, tensors = adapter
                    pair.trainer.set_masters(tensors, version)
                    report.settings["adapter_version"] = version
                pair.sync()
                checks = suite.Suite(pair, run, **({"short": suite.probe_lengths(run)} if repeat > 1 else {}))
                checks.run(names, report, on_result)
    return report, checks.steps


@contextmanager
def _injected(fault: Any, pair: Any) -> Iterator[None]:
    """The fault, if any, inside the block. Raises `_Refused` where this engine cannot have it."""
    from samebits.alignment_checks.pair import PairError

    with ExitStack() as stack:
        if fault:
            try:
                stack.enter_context(fault.inject(pair))
            except PairError as error:
                raise _Refused(str(error)) from None
        yield


def _replicas(verl: Any) -> int:
    rollout = verl.actor_rollout_ref.rollout
    return max(1, verl.trainer.nnodes * verl.trainer.n_gpus_per_node // rollout.tensor_model_parallel_size)


def _vocabulary(folder: Path) -> int:
    from transformers import AutoTokenizer

    return len(AutoTokenizer.from_pretrained(folder))


_MARKS = {"agree": "[green]agrees[/]", "disagree": "[red]disagrees[/]", "error": "[yellow]not checked[/]"}
_SHOWN = 12


def _show(report: Any, console: Console) -> None:
    table = Table(title=f"{report.subject}: trainer against engine")
    for name, justify in (("check", "left"), ("verdict", "left"), ("compared", "right"), ("seconds", "right"), ("measured", "left")):
        table.add_column(name, justify=justify)
    for result in report.results:
        measured = ", ".join(f"{k} {v:.3g}" for k, v in _telling(result.metrics))
        table.add_row(result.name, _MARKS[result.status], str(result.compared), f"{result.seconds:.1f}", measured)
    console.print(table)
    findings = list(report.findings())
    for name, finding in findings[:_SHOWN]:
        console.print(f"{name}: {finding.message}", style="red", highlight=False, markup=False, soft_wrap=True)
    if len(findings) > _SHOWN:
        console.print(f"and {len(findings) - _SHOWN} more; --json has all of them")
    for result in report.results:
        if result.status == "error":
            why = result.error or "there was nothing to compare"
            console.print(f"{result.name} could not be checked: {why}", style="yellow", highlight=False, markup=False, soft_wrap=True)
    for name in report.missing:
        console.print(f"{name} was not made", style="yellow")
    if report.settings["fault"]:
        console.print(f"injected fault: {report.settings['fault']}", highlight=False, soft_wrap=True)
    words = {"agree": "trainer and engine agree", "disagree": "trainer and engine DISAGREE", "error": "could not be checked"}
    console.print(words[report.verdict], style={"agree": "bold green", "disagree": "bold red", "error": "bold yellow"}[report.verdict])


def _telling(metrics: dict[str, float]) -> list[tuple[str, float]]:
    """The few metrics that a row has room for."""
    wanted = ("k3", "max_abs", "agreement", "largest")
    return [(k, v) for k, v in metrics.items() if any(w in k for w in wanted)][:3]


def _show_steps(steps: list[Any], console: Console) -> None:
    table = Table(title="both forwards, operation by operation")
    for name, justify in (("operation", "left"), ("largest difference / rms", "right"), ("explained by formats", "right"), ("", "left")):
        table.add_column(name, justify=justify)
    for step in steps:
        table.add_row(step.point, f"{step.difference:.3g}", f"{step.limit:.3g}", "[red]parts here[/]" if step.parts else "")
    console.print(table)


@contextmanager
def _log(verbose: bool) -> Iterator[tuple[Console, TextIO, Path]]:
    """(console on the real standard output, real standard error, log); what libraries print goes into the log, or is shown when verbose."""
    handle, name = tempfile.mkstemp(prefix="samebits-verify-", suffix=".log")
    if verbose:
        os.close(handle)
        yield Console(), sys.stderr, Path(name)
        return
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    try:
        with open(kept[0], "w", closefd=False) as screen, open(kept[1], "w", closefd=False) as errors:
            # Into a file or a pipe, rows must not be cut to the width of a terminal that is not there.
            yield Console(file=screen, width=None if screen.isatty() else 160), errors, Path(name)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in enumerate(kept, start=1):
            os.dup2(copy, number)
            os.close(copy)


def _end(errors: TextIO, message: str, status: int) -> typer.Exit:
    """One line on the real standard error, and what to raise."""
    print(f"samebits: {message}", file=errors, flush=True)
    return typer.Exit(status)


def _end_on_sigterm(errors: TextIO) -> None:
    """SIGTERM ends the process with one line and the shell's status for it: there is no verdict."""

    def end(number: int, frame: object) -> None:
        print("samebits: terminated, there is no verdict", file=errors, flush=True)
        os._exit(128 + number)

    signal.signal(signal.SIGTERM, end)


def _watchdog(seconds: int, errors: TextIO, log: Path) -> threading.Timer:
    """Ends the process with status 2 after `seconds`: a hanging engine cannot be interrupted from Python."""

    def end() -> None:
        print(f"samebits: no verdict after {seconds} s (log: {log})", file=errors, flush=True)
        os._exit(2)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    return timer

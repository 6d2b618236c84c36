"""`samebits verify server`: a PEFT adapter on a stock vLLM server, checked through its public API alone.

Exit status: 0 the server uses the adapter as its file says, 1 it does not, 2 that could not be told, or bad input. One line says why.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from samebits.alignment_checks.report import AGREE, DISAGREE, CheckResult, Report

from .terminal import fail, write_json

FIGURES = ("distance", "limit", "effect", "applied", "enlarged")
COLOURS = {AGREE: "green", DISAGREE: "red"}


def verify_server(
    url: Annotated[str, typer.Option(help="address of the server, with or without /v1")],
    base: Annotated[Path, typer.Option(help="folder of the base checkpoint: Qwen3 or Qwen3-MoE in safetensors, not quantized")],
    adapter: Annotated[Path, typer.Option(help="folder of the adapter in PEFT's format")],
    name: Annotated[str | None, typer.Option(help="name of the adapter on the server; default: found by its folder, or loaded")] = None,
    api_key_env: Annotated[str | None, typer.Option(help="environment variable that holds the server's API key")] = None,
    load: Annotated[bool, typer.Option(help="load adapters into the server and unload them, to check each role alone")] = True,
    scratch: Annotated[Path | None, typer.Option(help="existing folder that the server reads too, for the adapters loaded")] = None,
    prompts: Annotated[int, typer.Option(min=2, help="number of prompts; more decide over smaller adapters")] = 6,
    tokens: Annotated[int, typer.Option(min=8, help="tokens of a prompt")] = 48,
    timeout: Annotated[float, typer.Option(min=0.1, help="seconds that a request may take")] = 60.0,
    device: Annotated[str, typer.Option(help="where the reference is computed, in fp32: cpu or cuda")] = "cpu",
    json_file: Annotated[Path | None, typer.Option("--json", help="write the report as JSON")] = None,
    html: Annotated[Path | None, typer.Option(help="write the report as an HTML page")] = None,
) -> None:
    """Check that a vLLM server uses a LoRA adapter, wholly and at its scale, against W + scale B A computed from the files."""
    report = check(url, base, adapter, name, api_key_env, load, scratch, prompts, tokens, timeout, device)
    write_json(json_file, report.to_json())
    if html is not None:
        from samebits.alignment_checks.html import write_html

        try:
            write_html(html, report)
        except OSError as error:
            raise fail(f"{html}: {error.strerror}") from None
    console = Console()
    console.print(table(report))
    for check_name, finding in report.findings():
        place = f" (largest at {finding.place})" if str(finding.place) else ""
        console.print(f"{check_name}: {finding.message}{place}", highlight=False, markup=False, soft_wrap=True)
    if report.exit_status == 2:
        raise fail(f"could not be checked: {first_error(report)}", 2)
    if report.exit_status == 1:
        raise fail(f"the server does not serve this adapter as its file says: {next(f.message for _, f in report.findings())}", 1)
    console.print(f"agrees: {report.settings['name']} is served as W + scale B A", highlight=False, markup=False, soft_wrap=True)


def check(
    url: str,
    base: Path,
    adapter: Path,
    name: str | None,
    api_key_env: str | None,
    load: bool,
    scratch: Path | None,
    prompts: int,
    tokens: int,
    timeout: float,
    device: str,
) -> Report:
    """The report. Raises `typer.Exit(2)` with one line on bad input."""
    key = None
    if api_key_env is not None:
        key = os.environ.get(api_key_env)
        if not key:
            raise fail(f"--api-key-env {api_key_env}: the variable is not set")
    if scratch is not None and not scratch.is_dir():
        raise fail(f"--scratch {scratch}: no such folder")
    with _quiet():
        import torch

        from samebits.alignment_checks.oracle import BaseError, Oracle, read_config
        from samebits.alignment_checks.peft_adapter import AdapterFileError, PeftAdapter
        from samebits.alignment_checks.stock import Settings, StockCheck
        from samebits.alignment_checks.stock_client import Client, ServerError

        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            raise fail(f"--device {device}: {str(error).splitlines()[0]}") from None
        try:
            changes = PeftAdapter(adapter, read_config(base))
            client = Client(url, key, timeout)
            client.models()  # before the checkpoint is read, which can take minutes
            oracle = Oracle(base, device)
            changes.require_base_copies(oracle.weight)
        except (BaseError, AdapterFileError, ServerError) as error:
            raise fail(str(error)) from None
        settings = Settings(prompts=prompts, tokens=tokens, load=load, scratch=scratch)
        with contextlib.closing(client):
            return StockCheck(client, oracle, changes, name, settings).run()


def table(report: Report) -> Table:
    """One row a check."""
    found = Table("check", "result", "compared", *FIGURES, box=None)
    for result in report.results:
        figures = [_figure(result, key) for key in FIGURES]
        colour = COLOURS.get(result.status, "yellow")
        found.add_row(result.name, f"[{colour}]{result.status}[/]", str(result.compared), *figures)
    for name in report.missing:
        found.add_row(name, "[yellow]not made[/]", "0", *[""] * len(FIGURES))
    return found


def first_error(report: Report) -> str:
    """The error of the first check that could not be made, without its type."""
    for result in report.results:
        if result.error is not None:
            return result.error.split(": ", 1)[-1]
    return f"{len(report.missing)} checks were not made"


def _figure(result: CheckResult, key: str) -> str:
    """The largest of a check's figures of one kind: of `limit` and `distance` there can be several."""
    values = [value for name, value in result.metrics.items() if name.split(".")[-1] == key]
    return f"{max(values):.3g}" if values else ""


@contextlib.contextmanager
def _quiet():
    """Progress bars of libraries off: what is said is said here."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    sys.stdout.flush()
    yield

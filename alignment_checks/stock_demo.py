"""The check of stock adapters at work: a small model, adapters from PEFT, a real `vllm serve`, and servers that hold the wrong bytes.

    python -m samebits.alignment_checks.stock_demo --model qwen3-moe --json FILE

Builds a random Qwen3 or Qwen3-MoE and adapters, starts vLLM with no plugin, and checks each adapter. Then the negative controls: under the
adapter's name the server holds a file in which one projection is zero, or the expert weights are those of another adapter, while the
check reads the true one. Last an adapter with `alpha_pattern`, which vLLM 0.31 reads over. Exit status 0 when every case came out as it
must, 1 when not, 2 when the server did not come up.

On CPU vLLM 0.31 serves Qwen3 with adapters. Qwen3-MoE with `--enable-lora` starts there and its engine dies at the first request, because
experts with adapters are a Triton kernel; the demo then ends with 2 and that line.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from safetensors.torch import load_file, save_file

from .oracle import Oracle
from .peft_adapter import PeftAdapter
from .stock import StockCheck
from .stock_client import Client, ServerError
from .stock_models import (
    ALL_DENSE,
    ATTENTION,
    ServerStartError,
    StockServer,
    build_adapter,
    build_base,
    build_expert_adapter,
)

RANK, ALPHA = 8, 16
WIDE = dict(hidden_size=256, intermediate_size=512, head_dim=64, vocab_size=512, initializer_range=0.06)
WIDE_MOE = WIDE | dict(moe_intermediate_size=128, num_experts=8, num_experts_per_tok=4)
KERNELS = '{"enable_flashinfer_autotune": false, "enable_cutedsl_warmup": false, "enable_jit_warmup": false}'
"""Tuning that takes minutes at start and changes nothing here."""
FUSED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@dataclass(frozen=True, slots=True)
class Case:
    """One adapter on one server."""

    name: str
    adapter: Path
    """The true adapter, which the oracle reads."""
    served: Path | None
    """What the server is given under its name at start; None to load the true one at run time."""
    expected: str | None
    """Verdict that must come out; None where it depends on the server's version."""


def run(
    model: Annotated[Literal["qwen3", "qwen3-moe"], typer.Option(help="which model")] = "qwen3-moe",
    json_file: Annotated[Path | None, typer.Option("--json", help="write all reports as JSON")] = None,
    dtype: Annotated[Literal["bfloat16", "float32"], typer.Option(help="of checkpoint and server")] = "bfloat16",
    graphs: Annotated[bool, typer.Option(help="let vLLM capture graphs and compile")] = False,
    keep: Annotated[Path | None, typer.Option(help="folder for models, adapters and the server's log; default a temporary one")] = None,
    seconds: Annotated[float, typer.Option(help="how long the server may take to start")] = 400,
) -> None:
    """Serve, check, and print one row a case."""
    found: dict[str, Any] = {"model": model, "dtype": dtype, "graphs": graphs, "device": _device(), "cases": {}}
    wrong: list[str] = []
    error: str | None = None
    with _folder(keep) as folder:
        base = build_base(folder / "base", model, dtype=getattr(torch, dtype), **(WIDE if model == "qwen3" else WIDE_MOE))
        try:
            for more, cases in _servers(folder, base, model):
                _check_on_server(folder, base, [*_arguments(dtype, graphs), *more], cases, found, wrong, seconds)
        except (ServerStartError, ServerError) as failure:
            error = str(failure)
    found["error"] = error
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=1) + "\n")
    if error is not None:
        print(f"stock_demo: {error}", file=sys.stderr)
        raise typer.Exit(2)
    if wrong:
        print(f"stock_demo: {'; '.join(wrong)}", file=sys.stderr)
        raise typer.Exit(1)


def _servers(folder: Path, base: Path, model: str) -> Iterator[tuple[list[str], list[Case]]]:
    """(arguments, cases) of each server to start."""
    lora: dict[str, Any] = dict(r=RANK, lora_alpha=ALPHA)
    if model == "qwen3":
        true = build_adapter(folder / "true", base, target_modules=list(ALL_DENSE), size=0.05, **lora)
        other = build_adapter(folder / "source", base, seed=9, target_modules=list(ALL_DENSE), size=0.05, **lora)
        spoil = "mlp.up_proj"
    else:
        true = build_expert_adapter(folder / "true", base, rank=RANK, alpha=ALPHA, size=0.05)
        other = build_expert_adapter(folder / "source", base, seed=9, rank=RANK, alpha=ALPHA, size=0.05)
        spoil = "up_proj"
    zeroed = _changed(true, folder / "zeroed", lambda name, tensor: torch.zeros_like(tensor) if f"{spoil}.lora_B" in name else tensor)
    others = load_file(other / "adapter_model.safetensors")
    swapped = _changed(true, folder / "swapped", lambda name, tensor: others[name] if "mlp" in name and "lora_B" in name else tensor)
    pattern = build_adapter(
        folder / "pattern", base, target_modules=list(ATTENTION), alpha_pattern={"o_proj": 3 * ALPHA}, size=0.05, **lora
    )
    cases = [
        Case("given at start", true, true, "agree"),
        Case("loaded at run time", true, None, "agree"),
        Case("one projection zero on the server", true, zeroed, "disagree"),
        Case("another adapter's MLP on the server", true, swapped, "disagree"),
        Case("alpha_pattern", pattern, None, None),
    ]
    yield [], cases
    if model == "qwen3-moe":
        fused = build_adapter(folder / "fused", base, target_modules=list(ATTENTION), target_parameters=FUSED, size=0.05, **lora)
        formats = [Case("single experts, mixed formats", true, None, "agree"), Case("fused experts, mixed formats", fused, None, "agree")]
        yield ["--enable-mixed-moe-lora-format"], formats


def _check_on_server(
    folder: Path,
    base: Path,
    arguments: Sequence[str],
    cases: Sequence[Case],
    found: dict[str, Any],
    wrong: list[str],
    seconds: float,
) -> None:
    names = {case.name: f"case-{i}" for i, case in enumerate(cases) if case.served is not None}
    modules = [f"{names[case.name]}={case.served}" for case in cases if case.served is not None]
    given = ["--lora-modules", *modules] if modules else []
    oracle = Oracle(base)
    start = time.monotonic()
    with StockServer(base, folder / "server.log", [*arguments, *given], seconds=seconds) as server:
        print(f"vllm serve is up after {time.monotonic() - start:.0f} s: {' '.join([*arguments, *given])}", flush=True)
        for case in cases:
            adapter = PeftAdapter(case.adapter, oracle.config)
            with contextlib.closing(Client(server.url)) as client:
                report = StockCheck(client, oracle, adapter, names.get(case.name)).run()
            found["cases"][case.name] = report.to_json() | {"expected": case.expected}
            _print_row(case, report)
            if case.expected is not None and report.verdict != case.expected:
                wrong.append(f"{case.name}: {report.verdict}, expected {case.expected}")
            dead = [r.error for r in report.results if r.error and "ServerError" in r.error]
            if report.verdict == "error" and dead:
                raise ServerError(f"{case.name}: the server failed: {server.last_error()}")


def _print_row(case: Case, report: Any) -> None:
    check = next((r for r in report.results if r.name == "adapter.logprobs"), None)
    figures = (
        " ".join(f"{k} {check.metrics[k]:.3g}" for k in ("distance", "limit", "effect", "applied") if k in check.metrics) if check else ""
    )
    seconds = sum(r.seconds for r in report.results)
    print(f"{case.name:38s} {report.verdict:9s} {figures}  ({len(report.results)} checks, {seconds:.0f} s)")
    for name, finding in report.findings():
        print(f"    {name}: {finding.message}")
    for result in report.results:
        if result.error and not result.error.startswith("NotCheckedError"):
            print(f"    {result.name}: {result.error}")
    sys.stdout.flush()


def _changed(source: Path, target: Path, change: Any) -> Path:
    """A copy of an adapter with other bytes."""
    shutil.copytree(source, target)
    tensors = load_file(source / "adapter_model.safetensors")
    save_file(
        {name: change(name, tensor) for name, tensor in tensors.items()}, target / "adapter_model.safetensors", metadata={"format": "pt"}
    )
    return target


def _arguments(dtype: str, graphs: bool) -> list[str]:
    common = ["--enable-lora", "--max-lora-rank", str(RANK), "--max-loras", "2", "--max-model-len", "512", "--dtype", dtype]
    eager = [] if graphs else ["--enforce-eager"]
    cuda = ["--gpu-memory-utilization", "0.3", "--kernel-config", KERNELS] if torch.cuda.is_available() else []
    return common + eager + cuda


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix="samebits-stock-") as folder:
        yield Path(folder)


def _device() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    typer.run(run)

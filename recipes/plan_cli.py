"""`samebits plan`: what fits and what it costs, from data sheets and arithmetic."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from .plan_tables import PlanError, get_gpu, get_model
from .plan_weights import weights
from .planning import USABLE_SHARE, MemoryPlan, plan_memory, plan_step
from .terminal import fail, write_json

plan_app = typer.Typer(name="plan", help="What fits and what it costs, before there is a machine.", no_args_is_help=True)
plan_app.command("weights")(weights)

ModelOption = Annotated[str, typer.Option(help="model of models.yaml")]
GpuOption = Annotated[str, typer.Option(help="accelerator of hardware.yaml")]
GpusOption = Annotated[int, typer.Option(help="number of GPUs")]
LayoutOption = Annotated[str, typer.Option(help="dep<N> (attention data-parallel, experts over N) or tp<N>")]
ShareOption = Annotated[float, typer.Option(help="share of a GPU's memory for weights and caches")]
JsonOption = Annotated[Path | None, typer.Option("--json", help="also write the plan to this file")]


def _gb(size: float) -> str:
    return f"{size / 1e9:,.1f} GB" if abs(size) >= 1e9 else f"{size / 1e6:,.1f} MB"


@plan_app.command("memory")
def memory(
    model: ModelOption = "m31-flash",
    gpu: GpuOption = "b300",
    gpus: GpusOption = 4,
    layout: LayoutOption = "dep4",
    context: Annotated[int, typer.Option(help="tokens of each sequence")] = 262144,
    kv: Annotated[list[str] | None, typer.Option(help="KV formats to compare: nvfp4, fp8, bf16 [default: nvfp4 and fp8]")] = None,
    index: Annotated[str | None, typer.Option(help="format of the index keys [default: that of the KV cache]")] = None,
    weights: Annotated[
        str | None, typer.Option(help="format of the routed experts [default: the checkpoint that goes with the KV]")
    ] = None,
    usable_share: ShareOption = USABLE_SHARE,
    json_file: JsonOption = None,
) -> None:
    """Bytes a token and concurrent sequences of a serving layout, and what limits them."""
    try:
        machine, shape = get_gpu(gpu), get_model(model)
        plans = [
            plan_memory(shape, machine, gpus, layout, context, kv=one, index=index, weights=weights, usable_share=usable_share)
            for one in kv or ["nvfp4", "fp8"]
        ]
    except PlanError as error:
        raise fail(str(error)) from None
    console = Console()
    title = f"{shape.title} on {gpus} x {machine.title}, {layout}, {context:,} tokens a sequence"
    console.print(_memory_table(title, plans))
    if len(plans) > 1:
        console.print(_comparison(plans[0], plans[1]))
    for plan in plans:
        console.print(f"\nAssumptions for KV in {plan.kv.upper()}:", highlight=False)
        for line in plan.assumptions:
            console.print(f"  - {line}", highlight=False, soft_wrap=True)
    _sources(console, shape.sources, machine.sources)
    write_json(json_file, {"gpu": machine.title, "gpus": gpus, "layout": layout, "context": context, "plans": [asdict(p) for p in plans]})


def _memory_table(title: str, plans: list[MemoryPlan]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for plan in plans:
        table.add_column(f"KV {plan.kv.upper()}", justify="right")
    rows = [
        ("K and V, bytes a token", [f"{p.kv_bytes_per_token:,.0f}" for p in plans]),
        ("index keys, bytes a token", [f"{p.index_bytes_per_token:,.0f}" for p in plans]),
        ("indexer reads, bytes a token and layer", [f"{p.index_read:,.0f}" for p in plans]),
        ("dense K/V would read, bytes a token and layer", [f"{p.dense_read:,.0f}" for p in plans]),
        ("weights a GPU", [f"{_gb(p.weights_per_gpu)} ({p.weights})" for p in plans]),
        ("usable memory a GPU", [_gb(p.usable_per_gpu) for p in plans]),
        ("left for caches a GPU", [_gb(p.room_per_gpu) for p in plans]),
        ("caches of one sequence", [_gb(p.cache_per_sequence) for p in plans]),
        ("sequences at a time", [f"{p.sequences:,}" for p in plans]),
        ("limited by", [p.limit for p in plans]),
    ]
    for name, values in rows:
        table.add_row(name, *values)
    return table


def _comparison(first: MemoryPlan, second: MemoryPlan) -> str:
    saved = 1 - first.kv_bytes_per_token / second.kv_bytes_per_token
    more = f", {first.sequences / second.sequences:.2f}x the sequences" if second.sequences else ""
    return f"{first.kv.upper()} saves {saved:.2%} of the K and V bytes of {second.kv.upper()}{more}"


@plan_app.command("step")
def step(
    model: ModelOption = "m31-flash",
    gpu: GpuOption = "gb300",
    gpus: GpusOption = 16,
    layout: LayoutOption = "dep4",
    samples: Annotated[int, typer.Option(help="responses of a step: prompts times responses to each")] = 512,
    prompt_tokens: Annotated[int, typer.Option(help="mean tokens of a prompt")] = 256,
    response_tokens: Annotated[int, typer.Option(help="mean tokens of a response")] = 8192,
    rank: Annotated[int, typer.Option(help="rank of the adapter")] = 32,
    weights: Annotated[str, typer.Option(help="format of the routed experts")] = "nvfp4",
    kv: Annotated[str, typer.Option(help="format of the KV cache")] = "nvfp4",
    micro_batch_tokens: Annotated[int, typer.Option(help="tokens of a micro-batch on a GPU")] = 32768,
    utilisation: Annotated[float, typer.Option(help="share of the dense BF16 rate that training reaches")] = 0.3,
    usable_share: ShareOption = USABLE_SHARE,
    json_file: JsonOption = None,
) -> None:
    """Bytes and operations of one training step, and lower bounds of its time."""
    try:
        machine, shape = get_gpu(gpu), get_model(model)
        plan = plan_step(
            shape, machine, gpus, layout=layout, samples=samples, prompt_tokens=prompt_tokens, response_tokens=response_tokens,
            rank=rank, weights=weights, kv=kv, micro_batch_tokens=micro_batch_tokens, utilisation=utilisation, usable_share=usable_share,
        )  # fmt: skip
    except PlanError as error:
        raise fail(str(error)) from None
    console = Console()
    table = Table(title=f"One step of {shape.title} on {gpus} x {machine.title}, engine {layout}", title_justify="left")
    table.add_column("")
    table.add_column("", justify="right")
    rows = [
        ("tokens", f"{plan.tokens:,}"),
        *((f"adapter parameters, {name}", f"{count:,}") for name, count in plan.adapter_parameters.items() if count),
        ("adapter parameters", f"{plan.parameters:,}"),
        ("adapter sent to each engine replica", _gb(plan.sync_bytes)),
        ("trainer a GPU: packed base", _gb(plan.base_per_gpu)),
        ("trainer a GPU: one layer gathered", _gb(plan.layer_gathered)),
        ("trainer a GPU: adapter, gradient, moments", _gb(plan.adapter_state_per_gpu)),
        ("trainer a GPU: activations kept", _gb(plan.activations_per_gpu)),
        ("trainer a GPU: together", f"{_gb(plan.trainer_per_gpu)} of {machine.memory_gb:.1f} GB"),
        ("base received by each GPU", _gb(plan.gathered_per_gpu)),
        ("operations of training", f"{plan.train_flops:.3g}"),
        ("training, compute", f"{plan.train_seconds:,.1f} s"),
        ("training, gathers", f"{plan.gather_seconds:,.1f} s"),
        ("one decode step, at least", f"{plan.decode_seconds * 1e3:,.2f} ms"),
        ("generation, at least", f"{plan.generate_seconds:,.1f} s"),
    ]
    for name, value in rows:
        table.add_row(name, value)
    console.print(table)
    console.print("\nAssumptions:")
    for line in plan.assumptions:
        console.print(f"  - {line}", highlight=False, soft_wrap=True)
    _sources(console, shape.sources, machine.sources)
    write_json(json_file, {"gpu": machine.title, "gpus": gpus, "layout": layout, **asdict(plan), "parameters": plan.parameters})


def _sources(console: Console, *groups: tuple[str, ...]) -> None:
    console.print("\nSources:")
    for line in (line for group in groups for line in group):
        console.print(f"  - {line}", highlight=False, soft_wrap=True)

"""Speed of the routed experts and of MXFP8 linear layers at MiniMax-M3's shape: `python -m samebits.kernels.bench_moe --json FILE`.

One run, on one CUDA device, holds everything it compares: samebits with and without rank-32 adapters on all experts; bf16 experts through
`torch.nn.functional.grouped_mm`, also with adapters; one dense bf16 product of the same size; where vLLM is installed its NVFP4 Marlin
experts with and without its LoRA kernels and its bf16 Triton experts, and their absence where it is not. All sides of a number of tokens
get the same batches, with routes of their own (uniform, drawn at random). Every forward is timed as replays of a CUDA graph over these
batches, median of replays; the training step with events. Floors: the bytes of the experts that were hit over the speed of a device copy,
and the operations over the speed of an 8192^3 bf16 product, both measured in the run. A side that fails leaves its error in its line.

Needs torch and Triton alone. Exit code 1 when a result of ours is wrong or missing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from samebits.quant import mxfp8, nvfp4

from .activation import SwiGLU, swiglu_oai_halves
from .bench_record import Record, Save, chosen_parts, nowhere, write
from .expert_tiles import NVFP4Tiles, pack_experts
from .linear import LoRA, lora_linear
from .linear_tiles import pack_linear
from .moe import ExpertLoRA, moe

HIDDEN, WIDTH, EXPERTS, TOP, RANK = 6144, 3072, 128, 4, 32
TOKENS = (1, 16, 64, 256, 1024, 4096)
TRAINED = 8192
LINEAR_TOKENS = (1, 64, 1024, 4096)
LINEARS = {"qkv": (9216, 6144), "o": (6144, 8192), "shared gate and up": (6144, 6144), "shared down": (6144, 3072)}
ROTATED = 256 * 2**20  # elements of the copies of a linear layer: more than any cache holds
ACT = SwiGLU()
PARTS = ("experts", "peers", "training", "linear")


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="write the results here, line by line")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--part", action="append", choices=PARTS, help="run only this part; may be given again")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("samebits: the benchmark of experts needs a CUDA GPU", file=sys.stderr)
        return 2
    result = run(tuple(args.tokens), lambda partial: write(args.json, partial), args.part)
    show(result)
    return 0 if result["right"] else 1


def graph_us(calls: list[Callable[[], Any]], budget_ms: float = 80) -> float:
    """Median microseconds of one of `calls`, replayed one after the other in a CUDA graph."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return _median_us(graph.replay, budget_ms) / len(calls)


def _median_us(call: Callable[[], Any], budget_ms: float) -> float:
    def once() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)

    once()
    repeat = max(5, min(60, int(budget_ms / once())))
    return statistics.median(once() for _ in range(repeat)) * 1e3


def ceilings() -> dict[str, float]:
    """Copy bandwidth in GB/s (bytes read and written) and TFLOP/s of a dense bf16 product."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    copy = 2 * source.numel() / _median_us(lambda: target.copy_(source), 60) / 1e3
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return {"copy_gb_s": copy, "dense_tflop_s": 2 * 8192**3 / _median_us(lambda: a @ b, 60) / 1e6}


def random_tiles(n: int, k: int) -> NVFP4Tiles:
    """EXPERTS matrices [n, k] of random codes, values about 1 / sqrt(k)."""
    codes = torch.randint(-(2**31), 2**31, (EXPERTS, k // 128, n, 16), dtype=torch.int32, device="cuda")
    # As `expert_tiles` has them: bytes 120 to 135, four turned left by 4 bits, so that their halves are neighbours' lower and upper ones.
    scales = torch.randint(120, 136, (EXPERTS, k // 128, n, 2, 4), dtype=torch.uint8, device="cuda").view(torch.int32).long() & 0xFFFFFFFF
    scales = ((scales << 4 | scales >> 28) & 0xFFFFFFFF).to(torch.int32).view(EXPERTS, k // 128, n, 2).view(torch.int64)[..., 0]
    return NVFP4Tiles(codes, scales.contiguous(), torch.full((EXPERTS,), 1 / (120 * k**0.5), device="cuda"), k)


def random_adapters(b_size: float = 0.1) -> ExpertLoRA:
    """One slot for all experts."""

    def pair(n: int, k: int) -> LoRA:
        a = torch.randn(1, EXPERTS, RANK, k, device="cuda", dtype=torch.bfloat16) * k**-0.5
        return LoRA(a, torch.randn(1, EXPERTS, n, RANK, device="cuda", dtype=torch.bfloat16) * b_size)

    return ExpertLoRA(pair(WIDTH, HIDDEN), pair(WIDTH, HIDDEN), pair(HIDDEN, WIDTH))


Batch = tuple[Tensor, Tensor, Tensor]  # x, ids and weights


def batches(tokens: int, count: int, seed: int = 0) -> list[Batch]:
    """Uniformly routed tokens: the same for every side that asks for as many with the same seed."""
    g = torch.Generator("cuda").manual_seed(tokens + (seed << 32))
    made = []
    for _ in range(count):
        weights, ids = torch.randn(tokens, EXPERTS, device="cuda", generator=g).topk(TOP, dim=1)
        made.append((torch.randn(tokens, HIDDEN, device="cuda", generator=g).bfloat16(), ids, weights.softmax(1)))
    return made


def grouped_experts(x: Tensor, w13: Tensor, w2: Tensor, ids: Tensor, weights: Tensor, lora: ExpertLoRA | None = None) -> Tensor:
    """bf16 experts [E, N, K] through torch's grouped product, adapters as products of their own: how a trainer does it today."""
    grouped = getattr(F, "grouped_mm", None) or torch._grouped_mm
    flat = ids.reshape(-1)
    order = flat.argsort(stable=True)
    ends = torch.zeros(EXPERTS, dtype=torch.int32, device=x.device).index_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    ends = ends.cumsum(0).to(torch.int32)

    def project(rows: Tensor, weight: Tensor) -> Tensor:
        return grouped(rows, weight.transpose(-2, -1), offs=ends)

    def adapt(rows: Tensor, pair: LoRA) -> Tensor:
        return project(project(rows, pair.a[0]), pair.b[0])

    rows = x[order // TOP]
    gate, up = project(rows, w13).chunk(2, dim=1)
    if lora:
        gate, up = gate + adapt(rows, lora.gate), up + adapt(rows, lora.up)
    act = swiglu_oai_halves(gate, up, ACT).to(x.dtype)
    y = project(act, w2)
    if lora:
        y = y + adapt(act, lora.down)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    return (y[place].unflatten(0, ids.shape) * weights[..., None]).sum(1).to(x.dtype)


EXPERT_FLOP = 2 * 3 * HIDDEN * WIDTH  # a pair's
EXPERT_BYTES = 3 * HIDDEN * WIDTH * 9 // 16  # an expert's: half a byte a value, a byte of scale for sixteen
DENSE_BYTES = 3 * HIDDEN * WIDTH * 2
ADAPTER_BYTES = 3 * RANK * (HIDDEN + WIDTH) * 2


def expert_line(
    name: str, made: list[Batch], call: Callable[..., Tensor], ceiling: dict[str, float], error: Callable[[], float] | None = None
) -> dict[str, Any]:
    """Time of one side over these batches beside its floors, and what `error` finds its relative error to be; or why there is none."""
    count, hit = len(made[0][0]), statistics.mean(len(ids.unique()) for _, ids, _ in made)

    def measure() -> dict[str, Any]:
        with torch.no_grad():
            us = graph_us([lambda batch=batch: call(*batch) for batch in made])
            found = {} if error is None else {"relative_error": error()}
        found |= {"us": us, "tflop_s": count * TOP * EXPERT_FLOP / us / 1e6}
        found["floor_flop_us"] = count * TOP * EXPERT_FLOP / ceiling["dense_tflop_s"] / 1e6
        if "one dense" not in name:
            moved = hit * ((DENSE_BYTES if "bf16" in name else EXPERT_BYTES) + (ADAPTER_BYTES if "LoRA" in name else 0))
            found |= {"of_copy": moved / us / 1e3 / ceiling["copy_gb_s"], "floor_bytes_us": moved / ceiling["copy_gb_s"] / 1e3}
        return found

    return found_or_error({"tokens": count, "experts_hit": hit, "name": name}, measure)


def found_or_error(line: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """`line` with what was measured. One side's failure, out of memory say, is a result: the other sides are still compared."""
    try:
        return line | measure()
    except Exception as failure:
        return line | {"error": f"{type(failure).__name__}: {str(failure).split(chr(10))[0]}"}


def expert_lines(
    made: dict[int, list[Batch]], lora: ExpertLoRA, ceiling: dict[str, float], dense: tuple[Tensor, Tensor] | None
) -> Iterator[dict[str, Any]]:
    """Forward times. `dense`: bf16 experts for the peers in torch."""
    w13, w2 = random_tiles(2 * WIDTH, HIDDEN), random_tiles(HIDDEN, WIDTH)
    for count, some in made.items():
        calls: dict[str, Callable[..., Tensor]] = {
            "samebits": lambda x, ids, w: moe(x, w13, w2, ids, w, ACT),
            "samebits, LoRA": lambda x, ids, w: moe(x, w13, w2, ids, w, ACT, lora),
        }
        if dense is not None:
            calls["torch grouped_mm bf16"] = lambda x, ids, w: grouped_experts(x, *dense, ids, w)
            calls["torch grouped_mm bf16, LoRA"] = lambda x, ids, w: grouped_experts(x, *dense, ids, w, lora)
            pairs = torch.randn(count * TOP, HIDDEN, device="cuda", dtype=torch.bfloat16)
            calls["one dense bf16 expert for all pairs"] = lambda x, ids, w, pairs=pairs: F.linear(
                F.linear(pairs, dense[0][0])[:, :WIDTH], dense[1][0]
            )
        for name, call in calls.items():
            yield expert_line(name, some, call, ceiling)


def compared(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By number of tokens: what the adapter costs us, and how many times as long as we each other side takes, like with like."""
    rows = []
    for count in dict.fromkeys(line["tokens"] for line in lines):
        times = {line["name"]: line["us"] for line in lines if line["tokens"] == count and "us" in line}
        if not {"samebits", "samebits, LoRA"} <= times.keys():
            continue
        row = {"tokens": count, "adapter_costs": times["samebits, LoRA"] / times["samebits"] - 1, "times_as_long": {}}
        for name, us in times.items():
            if not name.startswith("samebits") and "one dense" not in name:
                row["times_as_long"][name] = us / times["samebits, LoRA" if "LoRA" in name else "samebits"]
        rows.append(row)
    return rows


def training_lines(dense: tuple[Tensor, Tensor]) -> Iterator[dict[str, Any]]:
    """Forward and backward of one layer (x, router weights, adapters), with what it holds."""
    lora = ExpertLoRA(*(LoRA(*(t.requires_grad_() for t in pair)) for pair in random_adapters()))
    w13, w2 = random_tiles(2 * WIDTH, HIDDEN), random_tiles(HIDDEN, WIDTH)
    x, ids, weights = batches(TRAINED, 1)[0]
    x.requires_grad_()
    weights.requires_grad_()
    grad = torch.randn_like(x)
    leaves = [x, weights, *(t for pair in lora for t in pair)]
    calls = {
        "samebits": lambda: moe(x, w13, w2, ids, weights, ACT, lora),
        "samebits, recompute": lambda: moe(x, w13, w2, ids, weights, ACT, lora, recompute=True),
        "torch grouped_mm bf16": lambda: grouped_experts(x, *dense, ids, weights, lora),
    }

    def measure(name: str, call: Callable[[], Tensor]) -> dict[str, Any]:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        forward = _median_us(call, 200)
        us = _median_us(lambda: torch.autograd.grad(call(), leaves, grad), 400)
        return {
            "us": us,
            "forward_us": forward,
            "tflop_s": 2 * TRAINED * TOP * EXPERT_FLOP / us / 1e6,
            "weight_gib": sum(t.nbytes for t in ((*w13[:3], *w2[:3]) if "samebits" in name else dense)) / 2**30,
            "peak_gib_above_weights": (torch.cuda.max_memory_allocated() - held) / 2**30,
        }

    for name, call in calls.items():
        line = {"tokens": TRAINED, "name": f"forward and backward, {name}"}
        yield found_or_error(line, lambda name=name, call=call: measure(name, call))


def linear_lines(ceiling: dict[str, float]) -> Iterator[dict[str, Any]]:
    """MXFP8 linear layers, rotated over copies larger than the cache, against bf16."""
    for name, (n, k) in LINEARS.items():
        copies = max(2, ROTATED // (n * k))
        dense = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * k**-0.5 for _ in range(copies)]
        packed = [pack_linear(mxfp8.quantize(w)) for w in dense]
        lora = [LoRA(torch.randn(1, RANK, k, device="cuda").bfloat16(), torch.randn(1, n, RANK, device="cuda").bfloat16()) for _ in dense]
        for count in LINEAR_TOKENS:
            x = torch.randn(count, k, device="cuda", dtype=torch.bfloat16)
            calls = {
                "samebits": [lambda w=w, x=x: lora_linear(x, w) for w in packed],
                "samebits, LoRA": [lambda w=w, a=a, x=x: lora_linear(x, w, a) for w, a in zip(packed, lora, strict=True)],
                "torch bf16": [lambda w=w, x=x: F.linear(x, w) for w in dense],
            }

            def measure(side: str, count=count, n=n, k=k, calls=calls) -> dict[str, Any]:
                with torch.no_grad():
                    us = graph_us(calls[side])
                moved = n * k * (2 if "bf16" in side else 33 / 32) + 2 * count * (n + k)
                return {"us": us, "tflop_s": 2 * count * n * k / us / 1e6, "of_copy": moved / us / 1e3 / ceiling["copy_gb_s"]}

            for side in calls:
                line = {"tokens": count, "name": f"{name} {n} x {k}, {side}"}
                yield found_or_error(line, lambda side=side, measure=measure: measure(side))


def check() -> bool:
    """A few tokens at full width against fp64 from the dequantised weights."""
    g = torch.Generator("cuda").manual_seed(0)
    w13 = nvfp4.quantize(torch.randn(4, 2 * WIDTH, HIDDEN, device="cuda", generator=g) / HIDDEN**0.5)
    w2 = nvfp4.quantize(torch.randn(4, HIDDEN, WIDTH, device="cuda", generator=g) / WIDTH**0.5)
    x = torch.randn(9, HIDDEN, device="cuda", generator=g).bfloat16()
    ids, weights = torch.arange(4, device="cuda").repeat(9, 1), torch.rand(9, 4, device="cuda", generator=g)
    want = torch.zeros(9, HIDDEN, dtype=torch.float64, device="cuda")
    for e in range(4):
        gate, up = (x.double() @ nvfp4.dequantize(w13)[e].double().mT).chunk(2, dim=1)
        act = gate.clamp(max=7) * torch.sigmoid(1.702 * gate.clamp(max=7)) * (up.clamp(-7, 7) + 1)
        want += (act @ nvfp4.dequantize(w2)[e].double().mT) * weights[:, e, None]
    have = moe(x, pack_experts(w13), pack_experts(w2), ids, weights, ACT).double()
    return bool((have - want).norm() < 5e-3 * want.norm())


def run(tokens: tuple[int, ...] = TOKENS, save: Save = nowhere, parts: Iterable[str] | None = None) -> dict[str, Any]:
    """All figures. `save` gets what there is after each line. `parts`: some of `PARTS`; peers are those of the part "experts"."""
    parts = chosen_parts(parts, PARTS)
    torch.manual_seed(0)
    record = Record(save)
    result, ceiling = record.result, ceilings()
    record.update(
        shape={"hidden": HIDDEN, "width": WIDTH, "experts": EXPERTS, "top": TOP, "rank": RANK},
        right=check(), ceilings=ceiling, experts=[], training=[], linear=[], absent=[], compared=[],
    )  # fmt: skip
    dense = None
    if parts & {"peers", "training"}:
        dense = tuple(torch.empty(EXPERTS, n, k, device="cuda", dtype=torch.bfloat16) for n, k in ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH)))
        for w in dense:
            for e in range(EXPERTS):
                w[e].normal_(0, w.shape[-1] ** -0.5)
    if parts & {"experts", "peers"}:
        made = {count: batches(count, 8 if count <= 256 else 3) for count in tokens}
        lora = random_adapters()
        record.add(expert_lines(made, lora, ceiling, dense if "peers" in parts else None), "experts")
        if "peers" in parts:
            from .bench_vllm import vllm_lines

            def line(name: str, some: list[Batch], call: Callable[..., Tensor], error: Callable[[], float]) -> dict[str, Any]:
                found = expert_line(name, some, call, ceiling, error)
                record.add([found], "experts")
                return found

            _, why_not = vllm_lines(made, (HIDDEN, WIDTH, EXPERTS, TOP), lora, dense, line)
            result["absent"] += [why_not] if why_not else []
        record.update(compared=compared(result["experts"]))
        del made, lora
    if "training" in parts:
        record.add(training_lines(dense), "training")
    del dense
    if "linear" in parts:
        record.add(linear_lines(ceiling), "linear")
    ours = [line for part in ("experts", "training", "linear") for line in result[part] if "samebits" in line["name"]]
    record.update(right=result["right"] and not any("error" in line for line in ours))
    return result


def show(result: dict[str, Any]) -> None:
    """Print what was found."""
    print(" · ".join(str(v) for v in result["machine"].values()), "·", ", ".join(f"{k} {v}" for k, v in result["versions"].items()))
    ceiling = "copy {copy_gb_s:.0f} GB/s, dense bf16 {dense_tflop_s:.0f} TFLOP/s".format(**result["ceilings"])
    print(f"{ceiling}, {result['seconds']:.0f} s in all")
    for part in ("experts", "training", "linear"):
        for line in result[part]:
            text = f"{line['tokens']:5d} {line['name']:52s}"
            if "error" in line:
                print(text, line["error"])
                continue
            text += f" {line['us']:9.1f} us {line['tflop_s']:6.0f} TFLOP/s"
            if "of_copy" in line:
                text += f" {100 * line['of_copy']:4.0f} % of copy"
            if "relative_error" in line:
                text += f", off by {line['relative_error']:.1e}"
            if "weight_gib" in line:
                text += f"  forward {line['forward_us']:.0f} us, weights {line['weight_gib']:.2f} GiB"
                text += f", {line['peak_gib_above_weights']:.2f} GiB more at most"
            print(text)
    for row in result["compared"]:
        others = "".join(f"; {name}: {times:.2f} times as long" for name, times in row["times_as_long"].items())
        print(f"{row['tokens']:5d} adapter costs {100 * row['adapter_costs']:.1f} %{others}")
    for text in result["absent"]:
        print(f"absent: {text}")
    print("results are right" if result["right"] else "results are WRONG")


if __name__ == "__main__":
    sys.exit(main())

"""Speed of the row kernels, the router and the head: `python -m samebits.kernels.bench_rows --json FILE`.

MiniMax-M3's shapes: hidden states of 6144, 64 heads of 128, 128 experts, a vocabulary of 200064. Every line is the median replay of a CUDA
graph in which a call is repeated until it runs for some time, and beside it the same of torch in the same process: the torch code that
stands in for the kernel, or for the head cuBLAS with bf16 in and out, which writes half the bytes. A floor is the bytes that must be moved,
over the bandwidth of a copy that runs first, counted read and written.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samebits.quant import bench as formats

from . import activation, logprobs, moe, norm, rope
from .activation import SwiGLU
from .linear import frozen_linear

HIDDEN, HEADS, DIM, INNER, EXPERTS, TOP, VOCABULARY = 6144, 64, 128, 12288, 128, 4, 200064
TOKENS = (1, 64, 4096)
CHUNK = 640
"""Rows whose logits the trainer holds at a time."""

Calls = tuple[Callable[[], Any], Callable[[], Any]]


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="write the results here")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("samebits: the benchmark of row kernels needs a CUDA GPU", file=sys.stderr)
        return 2
    with torch.cuda.stream(
        torch.cuda.Stream()
    ):  # autograd goes back on the stream of the forward, and graphs are not captured on the first
        result = run()
    show(result)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def run() -> dict[str, Any]:
    """All operations at all numbers of tokens."""
    result: dict[str, Any] = {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), **formats.machine("cuda")}
    w = torch.randn(1 << 29, device="cuda", dtype=torch.bfloat16)
    copy = 2 * w.nbytes / formats.time_copy(w, 10)
    del w
    result |= {"copy_gb_s": copy / 1e9, "results": []}
    for tokens in TOKENS:
        for name, (ours, torchs), moved, flops in (*rows(tokens), *head(tokens)):
            us, torch_us = replay(ours), replay(torchs)
            line = {"tokens": tokens, "name": name, "us": us, "torch_us": torch_us, "ratio": torch_us / us, "floor_us": moved / copy * 1e6}
            result["results"].append(line | {"tflop_s": flops / us / 1e6} if flops else line)
            torch.cuda.empty_cache()
    return result


class Normal:
    """Random tensors on the device."""

    def __init__(self) -> None:
        self.g = torch.Generator("cuda").manual_seed(0)

    def __call__(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Normal values."""
        return torch.empty(shape, device="cuda", dtype=dtype).normal_(generator=self.g)


@contextmanager
def torch_alone() -> Iterator[None]:
    """Without the kernels inside."""
    modules = (activation, logprobs, moe, norm, rope)
    kept = [m.fast_path for m in modules]
    for m in modules:
        m.fast_path = lambda x: False
    try:
        yield
    finally:
        for m, fast in zip(modules, kept, strict=True):
            m.fast_path = fast


def both(call: Callable[[], Any]) -> Calls:
    """A call with the kernels, and the same with torch."""
    return call, torch_alone()(call)


def backward(call: Callable[..., Any], inputs: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> Calls:
    """The backward alone, after one forward, with the kernels and with torch."""

    def prepared() -> Callable[[], Any]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        outs = call(*leaves)
        outs = outs if isinstance(outs, tuple) else (outs,)
        return lambda: torch.autograd.grad(outs, leaves, grads, retain_graph=True)

    ours = prepared()
    with torch_alone():
        reference = prepared()
    return ours, torch_alone()(reference)


def rows(tokens: int) -> Iterator[tuple[str, Calls, float, float]]:
    """Name, calls, bytes that must be moved, and floating-point operations where those count."""
    normal, params = Normal(), SwiGLU()
    x, residual, weight = normal(tokens, HIDDEN), normal(tokens, HIDDEN), normal(HIDDEN)
    heads, head_weight = normal(tokens, HEADS, DIM), normal(DIM)
    cos, sin = (t[torch.arange(tokens, device="cuda")] for t in rope.rope_table(4096, DIM // 2, 5e6, "cuda"))
    gate_up = normal(tokens, 2 * INNER)
    grad, grad_heads = normal(tokens, HIDDEN), normal(tokens, HEADS, DIM)
    size, many = x.nbytes, heads.nbytes
    yield "norm and sum", both(lambda: norm.gemma_rms_norm_add(x, residual, weight, 1e-6)), 4 * size, 0
    yield "norm of heads", both(lambda: norm.gemma_rms_norm(heads, head_weight, 1e-6)), 2 * many, 0
    yield "rotation", both(lambda: rope.apply_rope(heads, cos, sin)), 2 * many, 0
    yield "SwiGLU", both(lambda: activation.swiglu_oai(gate_up, params, torch.bfloat16)), 1.5 * gate_up.nbytes, 0
    router = normal(EXPERTS, HIDDEN, dtype=torch.float32) / 80
    bias, logits = normal(EXPERTS, dtype=torch.float32) * 0.1, normal(tokens, EXPERTS, dtype=torch.float32)
    products = lambda: frozen_linear(x, router), lambda: x.float() @ router.t()
    yield "router", products, size + router.nbytes + logits.nbytes, 2 * tokens * EXPERTS * HIDDEN
    yield "choice of experts", both(lambda: moe.route_topk(logits, bias, TOP, 2.5)), logits.nbytes + tokens * TOP * 12, 0
    if tokens == TOKENS[-1]:
        yield (
            "gradient of norm and sum",
            backward(lambda x, r: norm.gemma_rms_norm_add(x, r, weight, 1e-6), (x, residual), (grad, grad)),
            5 * size,
            0,
        )
        yield (
            "gradient of norm of heads",
            backward(lambda h: norm.gemma_rms_norm(h, head_weight, 1e-6), (heads,), (grad_heads,)),
            3 * many,
            0,
        )
        yield "gradient of rotation", backward(lambda h: rope.apply_rope(h, cos, sin), (heads,), (grad_heads,)), 2 * many, 0
        halves, grad_act = gate_up.chunk(2, -1), normal(tokens, INNER)
        yield (
            "gradient of SwiGLU",
            backward(lambda g, u: activation.swiglu_oai_halves(g, u, params, torch.bfloat16), halves, (grad_act,)),
            5 * grad_act.nbytes,
            0,
        )


def head(tokens: int) -> Iterator[tuple[str, Calls, float, float]]:
    """The head's product, and, of a chunk, log-probabilities and gradients."""
    normal = Normal()
    x, weight = normal(tokens, HIDDEN), normal(VOCABULARY, HIDDEN)
    flops = 2.0 * tokens * VOCABULARY * HIDDEN
    yield "head", (lambda: frozen_linear(x, weight), lambda: x @ weight.t()), weight.nbytes + x.nbytes + 4 * tokens * VOCABULARY, flops
    rows = min(tokens, CHUNK)
    logits, ids = normal(rows, VOCABULARY, dtype=torch.float32), torch.arange(rows, device="cuda")[:, None]
    temperature = torch.full((rows,), 0.7, device="cuda")
    yield f"log-probabilities of {rows}", both(lambda: logprobs.token_logprob_rows(logits, ids, temperature)), logits.nbytes, 0
    if tokens == TOKENS[-1]:
        grad = normal(rows, 1, dtype=torch.float32)
        yield (
            f"gradient of log-probabilities of {rows}",
            backward(lambda z: logprobs.token_logprob_rows(z, ids, temperature)[0], (logits,), (grad,)),
            2 * logits.nbytes,
            0,
        )
        short = x[:rows].clone()
        ours, _ = backward(lambda x: frozen_linear(x, weight), (short,), (logits,))
        grad16 = logits.bfloat16()
        moved = weight.nbytes + logits.nbytes + short.nbytes
        yield f"gradient of the head of {rows}", (ours, lambda: grad16 @ weight), moved, 4.0 * rows * VOCABULARY * HIDDEN


def replay(call: Callable[[], Any], wanted_us: float = 300.0) -> float:
    """Median microseconds of a call in graph replay."""
    for _ in range(3):
        call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    times = max(1, min(20, int(wanted_us / max(1.0, start.elapsed_time(end) * 1e3))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for _ in range(times):
            call()
    return formats.time_cuda(graph.replay, 10) * 1e6 / times


def show(result: dict[str, Any]) -> None:
    """A table."""
    print(f"{result['machine']['gpu']}, copy {result['copy_gb_s']:.0f} GB/s")
    for line in result["results"]:
        rate = f"  {line['tflop_s']:.0f} TFLOP/s" if "tflop_s" in line else ""
        print(
            f"{line['tokens']:5d} {line['name']:40s} {line['us']:9.1f} us  torch {line['torch_us']:9.1f} us  x{line['ratio']:.1f}"
            f"  floor {line['floor_us']:7.1f} us{rate}"
        )


if __name__ == "__main__":
    sys.exit(main())

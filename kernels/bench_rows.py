"""Speed of the row kernels, the router and the head: `python -m samebits.kernels.bench_rows --json FILE`.

MiniMax-M3's shapes: hidden states of 6144, 64 heads of 128, 128 experts, a vocabulary of 200064. Every line is the median replay of a CUDA
graph in which a call is repeated until it runs for some time, and beside it the same of torch in the same process: the torch code that
stands in for the kernel, or for the head cuBLAS with bf16 in and out, which writes half the bytes. A floor is the bytes that must be moved,
over the bandwidth of a copy that runs first, counted read and written. Results of the two are compared, values in relative norm.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from samebits.quant import bench as formats

from . import activation, logprobs, moe, norm, rope
from .activation import SwiGLU
from .bench_record import Record, Save, chosen_parts, command, nowhere
from .linear import frozen_linear

HIDDEN, HEADS, DIM, INNER, EXPERTS, TOP, VOCABULARY = 6144, 64, 128, 12288, 128, 4, 200064
TOKENS = (1, 64, 4096)
CHUNK = 640
"""Rows whose logits the trainer holds at a time."""
PARTS = ("rows", "head")
NEAR = 3e-2  # of values that were rounded to bf16 on one of the two sides, in another order of sums

Calls = tuple[Callable[[], Any], Callable[[], Any]]


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    return command(__doc__, "row kernels", sys.modules[__name__], argv)


def run(save: Save = nowhere, parts: Iterable[str] | None = None) -> dict[str, Any]:
    """All operations at all numbers of tokens. `save` gets what there is after each line. `parts`: some of `PARTS`."""
    parts = chosen_parts(parts, PARTS)
    record = Record(save)
    copy = copy_bandwidth()
    record.update(copy_gb_s=copy / 1e9, results=[])
    # Autograd goes back on the stream of the forward, and graphs are not captured on the first.
    with torch.cuda.stream(torch.cuda.Stream()):
        for tokens in TOKENS:
            for part, operations in (("rows", rows), ("head", head)):
                if part in parts:
                    record.add(timed(tokens, operations(tokens), copy))
    record.update(right=all(line["distance"] < NEAR for line in record.result["results"]))
    return record.result


def copy_bandwidth() -> float:
    """Bytes a second of a device copy of 1 GiB, read and written."""
    w = torch.randn(1 << 29, device="cuda", dtype=torch.bfloat16)
    return 2 * w.nbytes / formats.time_copy(w, 10)


def timed(tokens: int, operations: Iterator[tuple[str, Calls, float, float]], copy: float) -> Iterator[dict[str, Any]]:
    """Lines of `rows` or `head`."""
    for name, (ours, torchs), moved, flops in operations:
        far = distance(ours(), torchs())
        us, torch_us = replay(ours), replay(torchs)
        line = {"tokens": tokens, "name": name, "us": us, "torch_us": torch_us, "ratio": torch_us / us, "floor_us": moved / copy * 1e6}
        yield line | {"distance": far} | ({"tflop_s": flops / us / 1e6} if flops else {})
        torch.cuda.empty_cache()


def distance(have: Any, want: Any) -> float:
    """Largest relative distance in norm of the floating-point results of two calls; NaN counts as infinitely far."""
    pairs = zip(*(x if isinstance(x, (tuple, list)) else (x,) for x in (have, want)), strict=True)
    values = [(a.float(), b.float()) for a, b in pairs if a is not None and a.is_floating_point()]
    far = [((a - b).norm() / b.norm().clamp_min(1e-30)).item() for a, b in values]
    return max(x if x == x else float("inf") for x in far)


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
    print(f"{result['machine']['gpu']}, copy {result['copy_gb_s']:.0f} GB/s, {result['seconds']:.0f} s in all")
    for line in result["results"]:
        rate = f"  {line['tflop_s']:.0f} TFLOP/s" if "tflop_s" in line else ""
        print(
            f"{line['tokens']:5d} {line['name']:40s} {line['us']:9.1f} us  torch {line['torch_us']:9.1f} us  x{line['ratio']:.1f}"
            f"  floor {line['floor_us']:7.1f} us{rate}  apart {line['distance']:.1e}"
        )


if __name__ == "__main__":
    sys.exit(main())

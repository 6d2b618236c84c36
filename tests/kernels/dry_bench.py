"""The benchmarks of kernels from their first line to their last on a CPU: `TRITON_INTERPRET=1 python -m tests.kernels.dry_bench`.

Tensors meant for a GPU are made on the CPU, kernels run in the interpreter at the smallest sizes, and nothing is timed: a call is made once
and takes a microsecond. What is shown is that every line comes out and that a result is saved after each; figures mean nothing.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from samebits.kernels import (
    bench_dense,
    bench_heads,
    bench_moe,
    bench_msa,
    bench_record,
    bench_rows,
    bench_vllm,
    cuda_module,
    triton_msa,
    triton_msa_dense_ops,
    triton_msa_tiles,
)
from samebits.kernels.bench_msa_peers import Call, Peer
from samebits.quant import bench as formats

HEADS, GROUPS, TOKENS = 2, 1, 256


class OnCPU(TorchFunctionMode):
    """Tensors for "cuda" are made on the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """See `TorchFunctionMode`."""
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*("cpu" if isinstance(a, str) and a == "cuda" else a for a in args), **kwargs)


def once(calls: list[Callable[[], Any]] | Callable[[], Any], repeat: int = 1) -> float:
    """In the place of a measurement."""
    (calls[0] if isinstance(calls, list) else calls)()
    return 1.0


def stock() -> Peer:
    """A peer that takes what vLLM takes, and says no to E4M3 pages."""

    def decode(case: Any) -> dict[str, Call]:
        if case.form == "fp8":
            raise ValueError("no E4M3")
        calls = [lambda: None for _ in case.queries]
        return {f"vllm {name}": Call(calls, lambda: 0.0) for name in ("attention", "chain")} if case.form == "bf16" else {}

    return Peer("vllm", decode, lambda work, form: {"vllm prefill": Call([lambda: None], lambda: 0.0)} if form == "bf16" else {})


def prepare() -> None:
    """Places and clocks."""
    generator = torch.Generator
    torch.Generator = lambda device="cpu": generator("cpu")
    for name in ("empty_cache", "reset_peak_memory_stats", "Stream"):
        setattr(torch.cuda, name, lambda: None)
    torch.cuda.memory_allocated = torch.cuda.max_memory_allocated = lambda: 0
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    bench_record.machine = lambda device: {"machine": {"gpu": "none"}, "versions": {}}
    formats.time_cuda = once
    bench_msa.copy_bandwidth = bench_dense.copy_bandwidth = lambda repeat: 1e12
    bench_rows.copy_bandwidth = lambda: 1e12
    for module in (bench_msa, bench_heads, bench_dense, bench_rows):
        module.replay = once
    bench_moe.graph_us, bench_moe._median_us = once, once
    bench_moe.ceilings = lambda: {"copy_gb_s": 1000.0, "dense_tflop_s": 1.0}
    bench_msa.load_peers = lambda found: found.update(vllm="stand-in") or [stock()]
    bench_heads._vllm_insert = lambda found: lambda y, place: None
    bench_vllm.peers = lambda *args: (_ for _ in ()).throw(ModuleNotFoundError("No module named 'vllm'"))


def shrink() -> None:
    """Sizes."""
    for module in (bench_msa, bench_heads, bench_dense):
        module.HEADS, module.GROUPS = HEADS, GROUPS
    bench_msa.SHAPES = bench_dense.SHAPES = ((1, 256),)
    bench_msa.LONG, bench_msa.TOPK, bench_msa.CONFIG = TOKENS, 2, bench_msa.SparseConfig(topk=2)
    bench_heads.SPLIT, bench_heads.HIDDEN, bench_heads.RANK = (HEADS, GROUPS, GROUPS, GROUPS, 1), 64, 4
    bench_heads.KEY_ROWS = 2 * GROUPS + 1
    bench_dense.TRAINING, bench_dense.PREFILL = 128, TOKENS
    counts = bench_heads.projection, bench_heads.insertion, bench_heads.training_heads
    bench_heads.projection = lambda _, *rest: counts[0]((512, 1), *rest)
    bench_heads.insertion = lambda _, *rest: counts[1]((1, 4), *rest)
    bench_heads.training_heads = lambda _, *rest: counts[2](4, *rest)
    bench_moe.HIDDEN, bench_moe.WIDTH, bench_moe.EXPERTS, bench_moe.TOP, bench_moe.RANK = 256, 128, 4, 2, 8
    bench_moe.TOKENS, bench_moe.TRAINED, bench_moe.LINEAR_TOKENS, bench_moe.LINEARS = (1, 3), 4, (1, 3), {"o": (64, 128)}
    bench_moe.ROTATED = 0
    for name, size in dict(HIDDEN=64, HEADS=2, INNER=32, EXPERTS=8, VOCABULARY=50, TOKENS=(1, 9), CHUNK=5).items():
        setattr(bench_rows, name, size)


def fewer_programs() -> None:
    """The interpreter has a program a query: the first few queries, and nothing of a backward. Its products are of fp32 tiles."""
    from samebits.kernels import triton_msa_backward, triton_msa_dense_backward

    def few(call: Callable[..., Any]) -> Callable[..., Any]:
        def attended(q, *rest, lse=False, **options):
            if len(q) < 3:
                return call(q.float(), *rest, lse=lse, **options)
            return torch.zeros_like(q), torch.zeros(q.shape[:2]) if lse else None

        return attended

    triton_msa.attend, triton_msa_dense_ops.attend = few(triton_msa.attend), few(triton_msa_dense_ops.attend)
    triton_msa.attend_in_triton, cuda_module.absence = few(triton_msa.attend_in_triton), lambda device: None
    triton_msa_backward.gradients = triton_msa_dense_backward.gradients = lambda grad, *rest: None


def main() -> None:
    """All results, by name."""
    if not triton_msa_tiles.INTERPRETED.value:
        raise SystemExit("set TRITON_INTERPRET=1")
    torch.manual_seed(0)
    prepare()
    shrink()
    fewer_programs()
    found = {}
    with OnCPU():
        for name, module in (("msa", bench_msa), ("dense", bench_dense), ("moe", bench_moe), ("rows", bench_rows)):
            counts: list[int] = []

            def save(result: dict[str, Any], counts: list[int] = counts) -> None:
                json.dumps(result)
                counts.append(sum(len(result.get(part, ())) for part in ("results", "experts", "training", "linear")))

            sizes = {"shapes": module.SHAPES} if hasattr(module, "SHAPES") else {}
            result = module.run(save=save, **sizes) if name != "moe" else module.run(module.TOKENS, save)
            if missing := set(range(counts[-1] + 1)) - set(counts):
                raise SystemExit(f"{name}: not saved after lines {sorted(missing)}")
            with contextlib.redirect_stdout(None):
                module.show(result)
            found[name] = result
    print(json.dumps(found))


if __name__ == "__main__":
    main()

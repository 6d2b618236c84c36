"""What digests cost: `python -m samebits.quant.digest_bench --json FILE`.

On CPU: an adapter of the tiny recipe's shapes (138 bf16 tensors, 1.35 MB) and 256 MiB, against hashlib's BLAKE2b-128 over the same bytes,
in turn, as CPU seconds of the process, since other work may share the cores; numpy's sums are compared with torch's first.
On CUDA: 1 GiB of bf16 as 200 tensors of mixed sizes and as one, in wall seconds from the call to the hex digests on the host, against
what the same bytes take from pinned host memory to the device, and from the device to itself, in the same run; digests are compared with
the CPU's first. Medians.

Exit code 1 when digests differ or pass their limit: as fast as BLAKE2b at 256 MiB on CPU, 10 % of the transfer on CUDA.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .adapter import AdapterSpec, ModelShape, target_roles
from .bench import machine
from .digests import ALGORITHM, combine, digests, host_lanes, torch_sums

TRANSFER_SHARE = 0.10
"""Largest part of the transfer time of the same bytes that digests may take on CUDA."""
TINY = ModelShape(
    layers=3,
    hidden=128,
    heads=4,
    kv_heads=2,
    head_dim=128,
    expert_intermediate=128,
    shared_intermediate=128,
    dense_intermediate=256,
    experts=8,
    moe_layers=(1, 2),
)
"""Sizes of the shipped tiny MiniMax-M3."""


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--mib", type=int, help="size of the large set of tensors: 256 on CPU, 1024 on CUDA")
    parser.add_argument("--repeat", type=int, default=15, help="timed repetitions")
    parser.add_argument("--threads", type=int, help="threads on CPU")
    args = parser.parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    result = {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "algorithm": ALGORITHM, **machine(args.device)}
    size = (args.mib or (1024 if args.device == "cuda" else 256)) << 20
    result |= cuda_results(size, args.repeat) if args.device == "cuda" else cpu_results(size, args.repeat)
    show(result)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if result["equal"] and result["within_limit"] else 1


def cut(total: int, count: int, device: str = "cpu") -> dict[str, Tensor]:
    """`total` bytes of bf16 noise as `count` tensors [n, 32] with sizes up to some 30 times apart."""
    g = torch.Generator(device).manual_seed(1)
    weights = [1 + 31 * (i * 0.6180339887 % 1) ** 2 for i in range(count)]
    rows = [int(total // 64 * w / sum(weights)) for w in weights]
    rows[-1] += total // 64 - sum(rows)
    return {f"tensor {i}": torch.randn(n, 32, device=device, generator=g).bfloat16() for i, n in enumerate(rows)}


def tiny_adapter() -> dict[str, Tensor]:
    """Noise in the shape of the tiny recipe's adapter."""
    g = torch.Generator().manual_seed(2)
    shapes = AdapterSpec(TINY, 32, target_roles("all")).shapes()
    return {name: torch.randn(shape, generator=g).bfloat16() for name, shape in shapes.items()}


def blake2b(tensors: dict[str, Tensor]) -> list[str]:
    """BLAKE2b-128 of the bytes of each CPU tensor."""
    return [hashlib.blake2b(t.view(torch.uint8).numpy(), digest_size=16).hexdigest() for t in tensors.values()]


def medians(operations: dict[str, Callable[[], Any]], repeat: int, clock: Callable[[], float]) -> dict[str, float]:
    """Median seconds of each, in turn, after two rounds that do not count."""
    times: dict[str, list[float]] = {name: [] for name in operations}
    for i in range(repeat + 2):
        for name, operation in operations.items():
            start = clock()
            operation()
            if i > 1:
                times[name].append(clock() - start)
    return {name: statistics.median(t) for name, t in times.items()}


def cpu_results(size: int, repeat: int) -> dict[str, Any]:
    """CPU seconds of digests and of BLAKE2b, tiny adapter and `size` bytes as 100 tensors."""
    table, equal = [], True
    for name, tensors in (("tiny adapter", tiny_adapter()), (f"{size >> 20} MiB", cut(size, 100))):
        sums = [torch_sums(t) for t in tensors.values()]
        other = combine(torch.cat(sums).numpy().view(np.uint64), [len(s) for s in sums])
        equal &= bool((host_lanes([t[None] for t in tensors.values()]) == other).all())
        count = sum(t.nbytes for t in tensors.values())
        found = medians(
            {"digests": lambda tensors=tensors: digests(tensors), "blake2b": lambda tensors=tensors: blake2b(tensors)},
            repeat,
            time.process_time,
        )
        line = {"name": name, "tensors": len(tensors), "bytes": count, "ms": found["digests"] * 1e3, "gb_s": count / found["digests"] / 1e9}
        table.append(line | {"blake2b_ms": found["blake2b"] * 1e3, "times_as_fast": found["blake2b"] / found["digests"]})
    return {"device": "cpu", "equal": equal, "within_limit": table[-1]["times_as_fast"] >= 1, "results": table}


def cuda_results(size: int, repeat: int) -> dict[str, Any]:
    """Wall seconds of digests and of copies."""
    table, equal = [], True
    for name, count in (("200 tensors", 200), ("one tensor", 1)):
        tensors = cut(size, count, "cuda")
        equal &= digests(tensors) == digests({n: t.cpu() for n, t in tensors.items()})
        host = {n: torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t) for n, t in tensors.items()}
        into = {n: torch.empty_like(t) for n, t in tensors.items()}

        def copy(source: dict[str, Tensor], into: dict[str, Tensor] = into) -> None:
            for n, t in source.items():
                into[n].copy_(t, non_blocking=True)
            torch.cuda.synchronize()

        torch.cuda.synchronize()
        operations = {
            "digests": lambda tensors=tensors: digests(tensors),
            "host": lambda copy=copy, host=host: copy(host),
            "device": lambda copy=copy, tensors=tensors: copy(tensors),
        }
        found = medians(operations, repeat, time.perf_counter)
        line = {"name": name, "tensors": count, "bytes": sum(t.nbytes for t in tensors.values()), "ms": found["digests"] * 1e3}
        line |= {"gb_s": line["bytes"] / found["digests"] / 1e9, "kernel_ms": kernel_ms(tensors, repeat)}
        line |= {"host_to_device_ms": found["host"] * 1e3, "of_host_to_device": found["digests"] / found["host"]}
        line |= {"device_to_device_ms": found["device"] * 1e3, "of_device_to_device": found["digests"] / found["device"]}
        table.append(line)
        del tensors, host, into, operations, copy
        torch.cuda.empty_cache()
    within = all(line["of_host_to_device"] <= TRANSFER_SHARE for line in table)
    return {"device": "cuda", "equal": equal, "within_limit": within, "results": table}


def kernel_ms(tensors: dict[str, Tensor], repeat: int) -> float:
    """Median milliseconds of the one launch over all tensors, between CUDA events; the host's part is not in it."""
    from .bench import time_cuda
    from .triton_digest import device_lanes

    return time_cuda(lambda: device_lanes([t[None] for t in tensors.values()]), repeat) * 1e3


def show(result: dict[str, Any]) -> None:
    """Print what was found."""
    print(" · ".join(str(v) for v in result["machine"].values()), "·", ", ".join(f"{k} {v}" for k, v in result["versions"].items()))
    for line in result["results"]:
        text = f"{line['name']:13s} {line['bytes'] / 1e6:8.2f} MB {line['ms']:8.3f} ms {line['gb_s']:8.2f} GB/s"
        if "blake2b_ms" in line:
            text += f"   BLAKE2b {line['blake2b_ms']:8.3f} ms, {line['times_as_fast']:.2f} times as fast"
        else:
            text += f"   {100 * line['of_host_to_device']:.1f} % of host to device ({line['host_to_device_ms']:.2f} ms)"
            text += f", {100 * line['of_device_to_device']:.0f} % of device to device ({line['device_to_device_ms']:.3f} ms)"
            text += f", kernel {line['kernel_ms']:.3f} ms"
        print(text)
    print("both implementations give the same" if result["equal"] else "the implementations DIFFER")
    print("within the limit" if result["within_limit"] else "over the limit")


if __name__ == "__main__":
    sys.exit(main())

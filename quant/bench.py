"""Speed and bytes of the formats: `python -m samebits.quant.bench --json FILE`.

On CUDA: the Triton kernels are first compared byte by byte with torch on the CPU, and on a large tensor with torch on the device; then
quantize and dequantize of a bf16 weight of 1 GiB are timed against a device copy of it in the same run (CUDA events, median). What a
line counts is what the operation must move: input (twice where NVFP4 finds its own global scale), codes and scales, or the reverse.
On CPU: 4096 x 4096 bf16 against nvidia-modelopt where that is installed, alternating, after a check that the bytes are equal.

Needs torch alone (and Triton on CUDA). Exit code 1 when bytes differ.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import mxfp8, nvfp4
from .mxfp8 import MXFP8Tensor
from .nvfp4 import NVFP4Tensor


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--gib", type=float, default=1.0, help="size of the bf16 weight on CUDA")
    parser.add_argument("--size", type=int, default=4096, help="rows and columns of the weight on CPU")
    parser.add_argument("--repeat", type=int, default=30, help="timed repetitions on CUDA; a fifth of them on CPU")
    parser.add_argument("--threads", type=int, help="threads on CPU")
    args = parser.parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    result = {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), **machine(args.device)}
    result |= cuda_results(args.gib, args.repeat) if args.device == "cuda" else cpu_results(args.size, max(3, args.repeat // 5))
    show(result)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if all(result["equal"].values()) else 1


def machine(device: str) -> dict[str, Any]:
    """Names and versions that a figure depends on."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", "modelopt"):
        if name in sys.modules or name == "triton":
            try:
                versions[name] = __import__(name).__version__
            except ImportError:
                continue
    if device == "cuda":
        p = torch.cuda.get_device_properties(0)
        where = {"gpu": p.name, "capability": f"{p.major}.{p.minor}", "memory_gib": round(p.total_memory / 2**30, 1)}
        versions["cuda"] = torch.version.cuda
    else:
        model = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        where = {"cpu": model[0].split(":")[1].strip() if model else platform.processor(), "threads": torch.get_num_threads()}
    return {"machine": where, "versions": versions}


def samples(device: str) -> dict[str, Tensor]:
    """Inputs for the comparison of bytes, up to 8 million elements each."""
    g = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, device=device)

    spread = torch.exp2(normal(2048, 2048) * 5)
    return {
        "normal bf16": normal(2048, 4096).bfloat16(),
        "normal fp32": normal(1024, 4096),
        "normal fp16": normal(1024, 4096).half(),
        "uniform": (torch.rand(1024, 4096, generator=g, device=device) - 0.5).bfloat16(),
        "sparse": (normal(1024, 4096) * (torch.rand(1024, 4096, generator=g, device=device) > 0.97)).bfloat16(),
        "heavy tails bf16": (normal(2048, 2048) * spread).bfloat16(),
        "heavy tails fp32": normal(2048, 2048) * spread,
        "subnormal": normal(256, 4096) * 1e-39,
        "large": normal(256, 4096) * 3e37,
        "stack of 64": (normal(64, 128, 512) * torch.exp2(normal(64, 1, 1) * 4)).bfloat16(),
    }


def same(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    """Whether two results have the same bytes."""
    return all(torch.equal(x.reshape(-1).view(torch.uint8).cpu(), y.reshape(-1).view(torch.uint8).cpu()) for x, y in zip(a, b, strict=True))


def reference_on_device(operation: Callable[..., Any], *args: Any) -> Any:
    """`operation` without the Triton kernels."""
    kept = nvfp4.fast_path
    nvfp4.fast_path = mxfp8.fast_path = lambda x: False
    try:
        return operation(*args)
    finally:
        nvfp4.fast_path = mxfp8.fast_path = kept


def compare_bytes(large: Tensor) -> dict[str, bool]:
    """Kernels against torch on the CPU on every sample, and against torch on the device on the large weight."""
    equal: dict[str, bool] = {}
    one = torch.ones((), device="cuda")
    for name, x in samples("cuda").items():
        on_cpu = x.cpu()
        nv, mx = nvfp4.quantize(x), mxfp8.quantize(x)
        equal[f"nvfp4 quantize, {name}"] = same(nv, nvfp4.quantize(on_cpu))
        equal[f"nvfp4 quantize, global scale 1, {name}"] = same(nvfp4.quantize(x, one), nvfp4.quantize(on_cpu, one.cpu()))
        equal[f"mxfp8 quantize, {name}"] = same(mx, mxfp8.quantize(on_cpu))
        for dtype in (torch.bfloat16, torch.float32):
            key = f"dequantize to {str(dtype).removeprefix('torch.')}, {name}"
            equal[f"nvfp4 {key}"] = same((nvfp4.dequantize(nv, dtype),), (nvfp4.dequantize(NVFP4Tensor(*(t.cpu() for t in nv)), dtype),))
            equal[f"mxfp8 {key}"] = same((mxfp8.dequantize(mx, dtype),), (mxfp8.dequantize(MXFP8Tensor(*(t.cpu() for t in mx)), dtype),))
    for name, module in (("nvfp4", nvfp4), ("mxfp8", mxfp8)):
        packed = module.quantize(large)
        equal[f"{name} quantize, large"] = same(packed, reference_on_device(module.quantize, large))
        values = module.dequantize(packed, torch.bfloat16)
        equal[f"{name} dequantize, large"] = same((values,), (reference_on_device(module.dequantize, packed, torch.bfloat16),))
    return equal


def time_cuda(operation: Callable[[], Any], repeat: int) -> float:
    """Median seconds of `operation` between CUDA events, host sync included where it has one."""
    for _ in range(5):
        operation()
    times = []
    for _ in range(repeat):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        operation()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def time_copy(w: Tensor, repeat: int) -> float:
    """Median seconds of a device copy of `w`."""
    into = torch.empty_like(w)
    return time_cuda(lambda: into.copy_(w), repeat)


def cuda_results(gib: float, repeat: int) -> dict[str, Any]:
    """Bytes, then bandwidths."""
    columns = 8192
    rows = int(gib * 2**30 / 2 / columns)
    w = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16, generator=torch.Generator("cuda").manual_seed(1))
    equal = compare_bytes(w)
    torch.cuda.empty_cache()
    size = {"w": w.nbytes}
    nv, mx = nvfp4.quantize(w), mxfp8.quantize(w)
    size["nvfp4"] = nv.codes.nbytes + nv.block_scales.nbytes
    size["mxfp8"] = mx.codes.nbytes + mx.exponents.nbytes
    copy_s = time_copy(w, repeat)
    copy_rate = 2 * size["w"] / copy_s
    g = nv.global_scale
    lines = {
        "nvfp4 quantize": (2 * size["w"] + size["nvfp4"], lambda: nvfp4.quantize(w)),
        "nvfp4 quantize, scale given": (size["w"] + size["nvfp4"], lambda: nvfp4.quantize(w, g)),
        "nvfp4 dequantize to bf16": (size["w"] + size["nvfp4"], lambda: nvfp4.dequantize(nv, torch.bfloat16)),
        "mxfp8 quantize": (size["w"] + size["mxfp8"], lambda: mxfp8.quantize(w)),
        "mxfp8 dequantize to bf16": (size["w"] + size["mxfp8"], lambda: mxfp8.dequantize(mx, torch.bfloat16)),
    }
    table = []
    for name, (moved, operation) in lines.items():
        seconds = time_cuda(operation, repeat)
        table.append({"name": name, "ms": seconds * 1e3, "gb_s": moved / seconds / 1e9, "of_copy": moved / seconds / copy_rate})
    copy = {"gib": size["w"] / 2**30, "ms": copy_s * 1e3, "gb_s": copy_rate / 1e9}
    return {"device": "cuda", "equal": equal, "copy": copy, "results": table}


def cpu_results(size: int, repeat: int) -> dict[str, Any]:
    """Milliseconds of ours and, where installed, modelopt's, in turn."""
    w = torch.randn(size, size, generator=torch.Generator().manual_seed(1)).bfloat16()
    operations: dict[str, tuple[Callable[[], Any], Callable[[], Any] | None]] = {
        "nvfp4 quantize": (lambda: nvfp4.quantize(w), None),
        "mxfp8 quantize": (lambda: mxfp8.quantize(w), None),
    }
    equal: dict[str, bool] = {}
    try:
        from modelopt.torch.quantization.qtensor.mxfp8_tensor import MXFP8QTensor
        from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor
    except ImportError:
        pass
    else:
        peer = {"nvfp4 quantize": lambda: NVFP4QTensor.quantize(w, 16), "mxfp8 quantize": lambda: MXFP8QTensor.quantize(w)}
        operations = {name: (ours, peer[name]) for name, (ours, _) in operations.items()}
        packed, scales, scale = peer["nvfp4 quantize"]()
        equal["nvfp4 quantize"] = same(nvfp4.quantize(w), (packed._quantized_data, scales.view(torch.uint8), scale))
        packed, exponents = peer["mxfp8 quantize"]()
        equal["mxfp8 quantize"] = same(mxfp8.quantize(w), (packed._quantized_data.view(torch.uint8), exponents))
    nv, mx = nvfp4.quantize(w), mxfp8.quantize(w)
    operations["nvfp4 dequantize to bf16"] = (lambda: nvfp4.dequantize(nv, torch.bfloat16), None)
    operations["mxfp8 dequantize to bf16"] = (lambda: mxfp8.dequantize(mx, torch.bfloat16), None)
    table = []
    for name, sides in operations.items():
        times: list[list[float]] = [[], []]
        for i in range(repeat + 1):  # the first round warms up
            for side, operation in enumerate(sides):
                if operation:
                    start = time.perf_counter()
                    operation()
                    if i:
                        times[side].append(time.perf_counter() - start)
        ours = statistics.median(times[0])
        line = {"name": name, "ms": ours * 1e3}
        if times[1]:
            line |= {"modelopt_ms": statistics.median(times[1]) * 1e3, "times_as_fast": statistics.median(times[1]) / ours}
        table.append(line)
    return {"device": "cpu", "shape": [size, size], "equal": equal, "results": table}


def show(result: dict[str, Any]) -> None:
    """Print what was found."""
    print(" · ".join(str(v) for v in result["machine"].values()), "·", ", ".join(f"{k} {v}" for k, v in result["versions"].items()))
    if "copy" in result:
        print("copy of {gib:.2f} GiB: {ms:.3f} ms, {gb_s:.0f} GB/s".format(**result["copy"]))
    for line in result["results"]:
        text = f"{line['name']:30s} {line['ms']:9.3f} ms"
        if "gb_s" in line:
            text += f" {line['gb_s']:7.0f} GB/s {100 * line['of_copy']:6.1f} % of copy"
        if "modelopt_ms" in line:
            text += f"   modelopt {line['modelopt_ms']:9.3f} ms, {line['times_as_fast']:.2f} times as fast"
        print(text)
    wrong = [name for name, ok in result["equal"].items() if not ok]
    print(f"bytes: {len(result['equal']) - len(wrong)} of {len(result['equal'])} comparisons equal")
    for name in wrong:
        print(f"  differs: {name}")


if __name__ == "__main__":
    sys.exit(main())

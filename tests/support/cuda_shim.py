"""CUDA C++ kernels of the package on a CPU: compiled by g++ with `cuda_shim.h` in the place of inline PTX, and called through ctypes."""

from __future__ import annotations

import ctypes
import functools
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from samebits.kernels import cuda_module, cuda_prefill
from samebits.kernels.cuda_prefill import Plan

AVAILABLE = shutil.which("g++") is not None and platform.machine() == "x86_64"
_MAIN = """
extern "C" void run(const TensorMap* maps, const u16* query, const int* table, const int* request, const int* position,
                    const int* chosen, u16* out, float* lse, int table_stride, int tokens, int words, float factor, int grid,
                    int threads, int shared, int seed, u64* counts) {
    auto& m = shim::machine;
    m.threads = threads;
    m.grid = grid;
    m.bytes = shared;
    m.random.seed(seed);
    m.conflicts = m.accesses = m.mmas = m.boxes = 0;
    m.body = [=] {
        samebits::prefill_kernel(maps[0], maps[1], query, table, request, position, chosen, out, lse, table_stride, tokens, words,
                                 factor);
    };
    for (int index = 0; index < grid; index++) shim::run_block(index);
    counts[0] = m.conflicts;
    counts[1] = m.accesses;
    counts[2] = m.mmas;
    counts[3] = m.boxes;
}
extern "C" void functions(const float* x, float* exp2, float* log2, int count) {
    for (int i = 0; i < count; i++) {
        exp2[i] = exp2_approx(x[i]);
        log2[i] = samebits::log2_of(x[i]);
    }
}
"""


class Ran(NamedTuple):
    """What a kernel gave, and what it did."""

    out: Tensor
    lse: Tensor | None
    conflicts: int  # wavefronts of shared memory beyond those that its bytes need
    accesses: int  # of a warp to 512 bytes of it
    mmas: int
    boxes: int  # asked of TMA


@functools.cache
def folder() -> Path:
    """Where libraries are; to the end of the process."""
    folder._held = tempfile.TemporaryDirectory()
    return Path(folder._held.name)


@functools.cache
def library(defines: cuda_module.Defines) -> ctypes.CDLL:
    """The prefill kernel with these defines. Raises `RuntimeError` with what g++ said."""
    name = "-".join(str(v) for _, v in defines)
    source, result = folder() / f"{name}.cpp", folder() / f"{name}.so"
    kernel = cuda_module.FOLDER.resolve() / cuda_prefill.SOURCE
    source.write_text(f'#define SAMEBITS_HOST 1\n#include "{kernel}"\n{_MAIN}')
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-w", "-shared", "-fPIC", f"-I{Path(__file__).parent}"]
    command = ["g++", *flags, *(f"-D{k}={v}" for k, v in defines), "-o", str(result), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"g++ failed:\n{done.stderr[-4000:]}")
    return ctypes.CDLL(str(result))


def run(plan: Plan, seed: int = 0) -> Ran:
    """Carry out a plan over CPU tensors."""
    maps = (ctypes.c_uint64 * 64)()
    start = (64 - ctypes.addressof(maps) % 64) // 8 % 8
    for i, (address, sizes, strides, box) in enumerate(plan.maps):
        for at, word in enumerate((address, *sizes, *strides, *box)):
            maps[start + 16 * i + at] = word
    counts = (ctypes.c_uint64 * 4)()
    how = plan.launch
    arguments = cuda_module.as_ctypes(plan.arguments)
    rest = (ctypes.c_int(v) for v in (how.grid, how.threads, how.shared, seed))
    library(plan.defines).run(ctypes.c_void_p(ctypes.addressof(maps) + 8 * start), *arguments, *rest, counts)
    return Ran(plan.out, plan.lse, *counts)


def functions(plan: Plan, x: Tensor) -> tuple[Tensor, Tensor]:
    """exp2 and log2 of fp32 numbers as the kernel has them here."""
    x = x.contiguous()
    results = torch.empty_like(x), torch.empty_like(x)
    library(plan.defines).functions(*(ctypes.c_void_p(t.data_ptr()) for t in (x, *results)), x.numel())
    return results

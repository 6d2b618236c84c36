"""`kernels.cuda_attend` on the CPU: the same source, compiled by g++ with `cuda_on_cpu.h`, launched with the same arguments."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from samebits.kernels import cuda_attend, cuda_module

HERE = Path(__file__).parent
COMPILER = shutil.which("g++")


@contextlib.contextmanager
def on_cpu(seed: int = 0) -> Iterator[None]:
    """Inside, launches of `cuda_attend` run here. `seed`: of the order in which warps come."""

    def launch(constants: cuda_attend.Constants, blocks: int, arguments: Sequence[tuple[Any, Any]], device: torch.device) -> None:
        held = cuda_module.as_ctypes(arguments)
        addresses = (ctypes.c_void_p * len(held))(*(ctypes.addressof(x) for x in held))
        shared = library(constants).launch(blocks, seed, addresses)
        if shared != constants.shared:
            raise AssertionError(f"the kernel wants {shared} bytes of shared memory and is launched with {constants.shared}")

    real, cuda_attend.launch = cuda_attend.launch, launch
    try:
        yield
    finally:
        cuda_attend.launch = real


@functools.cache
def library(constants: cuda_attend.Constants) -> ctypes.CDLL:
    """The kernel, compiled for the CPU."""
    command = [COMPILER, "-O1", "-std=c++17", "-w", "-shared", "-fPIC", "-ffp-contract=off", f"-I{cuda_module.FOLDER}", f"-I{HERE}"]
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "attend.so"
        subprocess.run(
            [*command, *(f"-D{name}={value}" for name, value in constants.defines), str(HERE / "cuda_on_cpu.cpp"), "-o", str(made)],
            check=True,
        )
        found = ctypes.CDLL(str(made))
    found.log2_alone.restype, found.log2_alone.argtypes = ctypes.c_float, [ctypes.c_float]
    return found

"""`kernels.cuda_attend` on the CPU: the same source, compiled by g++ with `cuda_on_cpu.h`, launched with the same arguments."""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from samebits.kernels import cuda_attend

HERE = Path(__file__).parent
COMPILER = shutil.which("g++")


@contextlib.contextmanager
def on_cpu(seed: int = 0, source: str | None = None) -> Iterator[None]:
    """Inside, launches of `cuda_attend` run here. `seed`: of the order in which warps come. `source`: text in place of the kernel's."""
    with tempfile.TemporaryDirectory() as folder:
        libraries: dict[cuda_attend.Constants, ctypes.CDLL] = {}
        (Path(folder) / "cuda_attend.cu").write_text(cuda_attend.SOURCE.read_text() if source is None else source)

        def launch(constants: cuda_attend.Constants, blocks: int, arguments: list[Any], device: torch.device) -> None:
            if constants not in libraries:
                libraries[constants] = _built(Path(folder), constants, len(libraries))
            addresses = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(x) for x in arguments))
            shared = libraries[constants].launch(blocks, seed, addresses)
            if shared != constants.shared:
                raise AssertionError(f"the kernel wants {shared} bytes of shared memory and is launched with {constants.shared}")

        real, cuda_attend.launch = cuda_attend.launch, launch
        try:
            yield
        finally:
            cuda_attend.launch = real


def _built(folder: Path, constants: cuda_attend.Constants, number: int) -> ctypes.CDLL:
    library = folder / f"attend{number}.so"
    command = [COMPILER, "-O1", "-std=c++17", "-w", "-shared", "-fPIC", "-ffp-contract=off", f"-I{folder}", f"-I{HERE}"]
    subprocess.run([*command, *constants.definitions(), str(HERE / "cuda_on_cpu.cpp"), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))

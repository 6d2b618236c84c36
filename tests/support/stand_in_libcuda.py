"""A libcuda that only writes down what it was given, in the place of the one that `kernels.cuda_module` launches with."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from samebits.kernels import cuda_module

# Parameters by their C declarations, so that those of the module are held against something.
STAND_IN = r"""
#include <stdint.h>
#include <stdio.h>
#include <string.h>
char heard[4096];
char kinds[64];  // of the parameters: map, pointer, long, int, float
int failing = 0;
#define SAY(...) snprintf(heard + strlen(heard), sizeof heard - strlen(heard), __VA_ARGS__)
int cuModuleLoadData(void** module, const char* code) { SAY("load %s;", code); *module = (void*)0x1000000001; return 0; }
int cuModuleGetFunction(void** function, void* module, const char* name) {
    SAY("get %s of %lx;", name, (long)module);
    *function = (void*)0x2000000002;
    return 0;
}
int cuFuncSetAttribute(void* function, int attribute, int value) { SAY("set %d %d;", attribute, value); return 0; }
int cuGetErrorName(int status, const char** text) { *text = "CUDA_ERROR_SOMETHING"; return 0; }
int cuTensorMapEncodeTiled(void* map, int type, unsigned rank, void* address, const uint64_t* sizes, const uint64_t* strides,
                           const uint32_t* box, const uint32_t* steps, int interleave, int swizzle, int promotion, int fill) {
    SAY("map %d at %lx, aligned %d:", type, (long)address, (int)((uintptr_t)map % 64 == 0));
    for (unsigned i = 0; i < rank; i++) SAY(" %lu %u %u", (long)sizes[i], box[i], steps[i]);
    for (unsigned i = 0; i + 1 < rank; i++) SAY(" %lu", (long)strides[i]);
    SAY(" %d %d %d %d;", interleave, swizzle, promotion, fill);
    memset(map, 0x5A, 128);
    return failing;
}
int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   void* stream, void** p, void** extra) {
    SAY("launch %lx %u,%u,%u %u,%u,%u %u %lx:", (long)function, gx, gy, gz, bx, by, bz, shared, (long)stream);
    SAY(" |");
    for (int i = 0; kinds[i]; i++) {
        if (kinds[i] == 'm') SAY(" %x", ((unsigned*)p[i])[31]);
        if (kinds[i] == 'p') SAY(" %lx", *(long*)p[i]);
        if (kinds[i] == 'l') SAY(" %ld", *(long*)p[i]);
        if (kinds[i] == 'i') SAY(" %d", *(int*)p[i]);
        if (kinds[i] == 'f') SAY(" %.9g", *(float*)p[i]);
    }
    SAY(";");
    return failing;
}
"""


class StandIn:
    """The library."""

    def __init__(self, folder: Path) -> None:
        (folder / "cuda.c").write_text(STAND_IN)
        subprocess.run(["gcc", "-shared", "-fPIC", "-w", "-o", folder / "cuda.so", folder / "cuda.c"], check=True)
        self.library = ctypes.CDLL(str(folder / "cuda.so"))

    def expect(self, kinds: str) -> None:
        """Kernels that are launched have these parameters: a letter each, `m` map, `p` pointer, `l` long, `i` int, `f` float."""
        (ctypes.c_char * 64).in_dll(self.library, "kinds").value = kinds.encode()

    def fail(self, status: int) -> None:
        """Launches and tensor maps give this status."""
        ctypes.c_int.in_dll(self.library, "failing").value = status

    def heard(self) -> list[str]:
        """A line for each call so far."""
        return (ctypes.c_char * 4096).in_dll(self.library, "heard").value.decode().split(";")[:-1]


def installed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """The stand-in, which launches now go to; nothing is compiled, and any device is current. `folder`: for its files."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    found = StandIn(folder)
    monkeypatch.setattr(cuda_module, "_driver", lambda: found.library)
    monkeypatch.setattr(cuda_module, "compiled", lambda source, defines, arch: f"{source} {arch} {dict(defines)}".encode())
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0x7700000077))
    return found

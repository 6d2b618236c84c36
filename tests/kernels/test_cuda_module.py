"""How CUDA C++ is launched, against a libcuda that only writes down what it was given; and that NVRTC takes the sources, where it is."""

import ctypes
import shutil
import subprocess
from types import SimpleNamespace

import pytest
import torch

from samebits.kernels import cuda_module, cuda_prefill
from samebits.kernels.cuda_module import Launch

# Structures by their C declarations, so that those of the module are held against something.
STAND_IN = r"""
#include <stdint.h>
#include <stdio.h>
#include <string.h>
typedef struct { int id; char pad[4]; union { char pad[64]; struct { unsigned x, y, z; } cluster; int flag; } value; } Attribute;
typedef struct { unsigned gx, gy, gz, bx, by, bz, shared; void* stream; Attribute* attributes; unsigned count; } Config;
char heard[4096];
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
int cuLaunchKernelEx(const Config* c, void* function, void** p, void** extra) {
    SAY("launch %lx %u,%u,%u %u,%u,%u %u %lx:", (long)function, c->gx, c->gy, c->gz, c->bx, c->by, c->bz, c->shared, (long)c->stream);
    for (unsigned i = 0; i < c->count; i++) {
        Attribute a = c->attributes[i];
        if (a.id == 4) SAY(" cluster %u,%u,%u", a.value.cluster.x, a.value.cluster.y, a.value.cluster.z);
        else SAY(" %d=%d", a.id, a.value.flag);
    }
    SAY(" | %x %lx %ld %d %g;", ((unsigned*)p[0])[31], *(long*)p[1], *(long*)p[2], *(int*)p[3], *(float*)p[4]);
    return failing;
}
"""


@pytest.fixture
def driver(tmp_path, monkeypatch):
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    (tmp_path / "cuda.c").write_text(STAND_IN)
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", "-o", tmp_path / "cuda.so", tmp_path / "cuda.c"], check=True)
    library = ctypes.CDLL(str(tmp_path / "cuda.so"))
    monkeypatch.setattr(cuda_module, "_driver", lambda: library)
    monkeypatch.setattr(cuda_module, "compiled", lambda source, defines, arch: f"{source} {arch} {dict(defines)}".encode())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0x7700000077))
    cuda_module._loaded.cache_clear()
    yield library
    cuda_module._loaded.cache_clear()


def heard(library) -> list[str]:
    return (ctypes.c_char * 4096).in_dll(library, "heard").value.decode().split(";")[:-1]


def test_what_is_launched(driver):
    x = torch.zeros(3)
    one = cuda_module.tensor_map(0x10000000010, (128, 5), (256,), (64, 8))
    arguments = ((one, None), (x, ctypes.c_void_p), (None, ctypes.c_void_p), (-7, ctypes.c_int), (0.5, ctypes.c_float))
    cuda_module.launch("a.cu", "kernel", (("N", 1),), Launch(6, 384, 200000, cluster=2, early=True), arguments)
    cuda_module.launch("a.cu", "kernel", (("N", 1),), Launch(4, 32, 200000), arguments)
    given = f"| 5a5a5a5a {x.data_ptr():x} 0 -7 0.5"
    assert heard(driver) == [
        "map 9 at 10000000010, aligned 1: 128 64 1 5 8 1 256 0 3 3 0",
        "load a.cu sm_90a {'N': 1}",
        "get kernel of 1000000001",
        "set 8 200000",
        f"launch 2000000002 6,1,1 384,1,1 200000 7700000077: cluster 2,1,1 6=1 {given}",
        f"launch 2000000002 4,1,1 32,1,1 200000 7700000077: {given}",
    ]


def test_an_error_of_the_driver_has_its_name(driver):
    ctypes.c_int.in_dll(driver, "failing").value = 719
    with pytest.raises(RuntimeError, match=r"cuLaunchKernelEx: CUDA_ERROR_SOMETHING \(719\)"):
        cuda_module.launch("a.cu", "kernel", (), Launch(1, 32, 0), [(0, ctypes.c_uint64)] * 5)


def test_sources_are_in_the_package():
    import tomllib

    patterns = tomllib.loads((cuda_module.FOLDER.resolve().parent / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    named = {path for pattern in patterns["samebits.kernels"] for path in cuda_module.FOLDER.glob(pattern)}
    assert (
        named == {*cuda_module.FOLDER.glob("*.cu"), *cuda_module.FOLDER.glob("*.cuh")} and cuda_module.FOLDER / cuda_prefill.SOURCE in named
    )


def test_nvrtc_takes_the_source_and_tells_what_it_does_not_take():
    pytest.importorskip("cuda.bindings.nvrtc")
    names = ("FORMAT", "PAGED", "ROUNDED", "LSE", "G", "HEADS", "TOPK", "GROUP", "PER_WARP", "CLUSTER", "STAGES", "MORE", "FEWER")
    try:
        code = cuda_module.compiled(cuda_prefill.SOURCE, tuple(zip(names, (0, 1, 0, 1, 4, 16, 16, 4, 2, 1, 4, 240, 24), strict=True)))
    except RuntimeError as error:
        if "not found" in str(error) or "No such file" in str(error):
            pytest.skip("NVRTC itself is not installed")
        raise
    assert code[1:4] == b"ELF"
    with pytest.raises(RuntimeError, match="does not compile for sm_90a"):
        cuda_module.compiled(cuda_prefill.SOURCE, (("FORMAT", 0),))

"""How CUDA C++ is launched, against a libcuda that only writes down what it was given; and that NVRTC takes the sources, where it is."""

import ctypes
import sys
import types
from types import SimpleNamespace

import pytest
import torch

from samebits.kernels import cuda_module, cuda_prefill
from samebits.kernels.cuda_module import Launch
from tests.support.stand_in_libcuda import installed


@pytest.fixture
def driver(tmp_path, monkeypatch):
    cuda_module._loaded.cache_clear()
    yield installed(tmp_path, monkeypatch)
    cuda_module._loaded.cache_clear()


def test_what_is_launched(driver):
    driver.expect("mplif")
    x = torch.zeros(3)
    one = cuda_module.tensor_map(0x10000000010, (128, 5), (256,), (64, 8))
    arguments = ((one, None), (x, ctypes.c_void_p), (None, ctypes.c_void_p), (-7, ctypes.c_int), (0.5, ctypes.c_float))
    cuda_module.launch("a.cu", "kernel", (("N", 1),), Launch(6, 384, 200000), arguments)
    cuda_module.launch("a.cu", "kernel", (("N", 1),), Launch(4, 32, 200000), arguments)
    given = f"| 5a5a5a5a {x.data_ptr():x} 0 -7 0.5"
    assert driver.heard() == [
        "map 9 at 10000000010, aligned 1: 128 64 1 5 8 1 256 0 3 3 0",
        "load a.cu sm_90a {'N': 1}",
        "get kernel of 1000000001",
        "set 8 200000",
        f"launch 2000000002 6,1,1 384,1,1 200000 7700000077: {given}",
        f"launch 2000000002 4,1,1 32,1,1 200000 7700000077: {given}",
    ]


def test_an_error_of_the_driver_has_its_name(driver):
    driver.fail(719)
    with pytest.raises(RuntimeError, match=r"cuLaunchKernel: CUDA_ERROR_SOMETHING \(719\)"):
        cuda_module.launch("a.cu", "kernel", (), Launch(1, 32, 0), [(0, ctypes.c_uint64)] * 5)


def test_sources_are_in_the_package():
    import tomllib

    patterns = tomllib.loads((cuda_module.FOLDER.resolve().parent / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    named = {path for pattern in patterns["samebits.kernels"] for path in cuda_module.FOLDER.glob(pattern)}
    assert (
        named == {*cuda_module.FOLDER.glob("*.cu"), *cuda_module.FOLDER.glob("*.cuh")} and cuda_module.FOLDER / cuda_prefill.SOURCE in named
    )


@pytest.mark.parametrize("paged", [0, 1])
def test_nvrtc_takes_the_source_and_tells_what_it_does_not_take(paged):
    pytest.importorskip("cuda.bindings.nvrtc")
    if reason := cuda_module._compiler_absence():
        pytest.skip(reason)
    defines = {"PAGED": paged, "LSE": 1, "G": 4, "HEADS": 16, "TOPK": 16, "GROUP": 4, "STAGES": cuda_prefill.STAGES}
    assert cuda_module.compiled(cuda_prefill.SOURCE, tuple(defines.items()))[1:4] == b"ELF"
    with pytest.raises(RuntimeError, match="does not compile for sm_90a"):
        cuda_module.compiled(cuda_prefill.SOURCE, (("PAGED", paged),))


@pytest.fixture
def bindings(monkeypatch):
    """What stands in the place of `cuda.bindings.nvrtc`."""
    cuda_module._compiler_absence.cache_clear()

    def put(nvrtc):
        package = types.ModuleType("cuda.bindings")
        package.nvrtc = nvrtc
        monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
        monkeypatch.setitem(sys.modules, "cuda.bindings", package if nvrtc else None)

    yield put
    cuda_module._compiler_absence.cache_clear()


def test_what_is_missing_is_named(bindings, monkeypatch):
    def not_found():
        raise RuntimeError('Failure finding "libnvrtc.so.13"\nand where it was looked for')

    device, capability = torch.device("cuda"), [(9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[0])
    for nvrtc, text in (
        (None, "needs cuda.bindings: "),
        (SimpleNamespace(nvrtcVersion=not_found), 'needs NVRTC: Failure finding "libnvrtc.so.13"'),
        (SimpleNamespace(nvrtcVersion=lambda: (7, 0, 0)), "needs NVRTC: int 7"),
        (SimpleNamespace(nvrtcVersion=lambda: (0, 13, 0)), None),
    ):
        bindings(nvrtc)
        cuda_module._compiler_absence.cache_clear()
        found = cuda_module.absence(device)
        assert found is None if text is None else found.startswith(text) and "\n" not in found
    for capability[0] in ((8, 0), (10, 0)):
        assert cuda_module.absence(device) == "needs a Hopper GPU"
    assert cuda_module.absence(torch.device("cpu")) == "needs a Hopper GPU"
    capability[0] = (9, 0)
    monkeypatch.setattr(torch.version, "hip", "7.0")  # where gfx90a has this number
    assert cuda_module.absence(device) == "needs a Hopper GPU"

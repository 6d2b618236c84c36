"""CUDA C++ of the package: compiled by NVRTC when it is first wanted, and launched through the driver on torch's current stream.

A source is one `.cu` file beside this module, which includes nothing but `.cuh` files from there. What is compiled is told by its file, the
GPU and the defines, and is compiled once a process. `cuda.bindings`, which CUDA builds of torch depend on, is imported when something is
compiled.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

Defines = tuple[tuple[str, int], ...]
FOLDER = Path(__file__).parent


class Launch(NamedTuple):
    """How a kernel is launched."""

    grid: int
    threads: int  # of a block
    shared: int  # bytes of dynamic shared memory
    cluster: int = 1  # blocks; more than one where the kernel has no `__cluster_dims__` of its own
    early: bool = False  # while the kernel before it ends (programmatic dependent launch); the kernel must wait by itself


@functools.cache
def compiled(source: str, defines: Defines, arch: str = "sm_90a") -> bytes:
    """Machine code of a `.cu` file. No product of it is contracted with a sum.

    Raises `RuntimeError` with the compiler's words where it does not compile, `ImportError` where there is no `cuda.bindings`.
    """
    from cuda.bindings import nvrtc

    text = (FOLDER / source).read_bytes()
    headers = sorted(FOLDER.glob("*.cuh"))
    options = [f"--gpu-architecture={arch}".encode(), b"--fmad=false", b"--std=c++17", *(f"-D{k}={v}".encode() for k, v in defines)]
    contents, names = [h.read_bytes() for h in headers], [h.name.encode() for h in headers]
    program = _checked(nvrtc, nvrtc.nvrtcCreateProgram(text, source.encode(), len(headers), contents, names))
    try:
        status = nvrtc.nvrtcCompileProgram(program, len(options), options)[0]
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = b" " * _checked(nvrtc, nvrtc.nvrtcGetProgramLogSize(program))
            _checked(nvrtc, nvrtc.nvrtcGetProgramLog(program, log))
            words = log.decode(errors="replace").strip("\0 \n")
            raise RuntimeError(f"{source} with {dict(defines)} does not compile for {arch}:\n{words}")
        code = b" " * _checked(nvrtc, nvrtc.nvrtcGetCUBINSize(program))
        _checked(nvrtc, nvrtc.nvrtcGetCUBIN(program, code))
        return code
    finally:
        nvrtc.nvrtcDestroyProgram(program)


@functools.cache
def _loaded(source: str, name: str, defines: Defines, arch: str, device: int, shared: int) -> Any:
    """The function on a device, allowed `shared` bytes. The device must be current and have a context. Modules stay loaded."""
    from cuda.bindings import driver

    module = _checked(driver, driver.cuModuleLoadData(compiled(source, defines, arch)))
    function = _checked(driver, driver.cuModuleGetFunction(module, name.encode()))
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _checked(driver, driver.cuFuncSetAttribute(function, attribute, shared))
    return function


def launch(source: str, name: str, defines: Defines, how: Launch, arguments: Sequence[tuple[Any, Any]], arch: str = "sm_90a") -> None:
    """Launch kernel `name` on the current device and torch's current stream.

    Args:
        arguments: (value, ctypes type) of each parameter: tensors are passed as their address and None as 0, with `ctypes.c_void_p`;
            structures of `cuda.bindings` (a `CUtensorMap`) with None.
    Raises `RuntimeError` with the name of the driver's error.
    """
    from cuda.bindings import driver

    function = _loaded(source, name, defines, arch, torch.cuda.current_device(), how.shared)
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = how.grid, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = how.threads, 1, 1
    config.sharedMemBytes = how.shared
    config.hStream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
    attributes = []
    if how.cluster > 1:
        one = driver.CUlaunchAttribute()
        one.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        one.value.clusterDim.x, one.value.clusterDim.y, one.value.clusterDim.z = how.cluster, 1, 1
        attributes.append(one)
    if how.early:
        one = driver.CUlaunchAttribute()
        one.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        one.value.programmaticStreamSerializationAllowed = 1
        attributes.append(one)
    config.attrs, config.numAttrs = attributes, len(attributes)
    values = tuple(_address(value) if kind is ctypes.c_void_p else value for value, kind in arguments)
    _checked(driver, driver.cuLaunchKernelEx(config, function, (values, tuple(kind for _, kind in arguments)), 0))


def tensor_map(address: int, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> Any:
    """Map of a bf16 tensor for TMA, with boxes in rows of 128 bytes, swizzled; outside of the tensor are zeros.

    Args:
        address: a multiple of 16. sizes, box: elements, the contiguous dimension first. strides: bytes of all dimensions but that one,
            multiples of 16.
    """
    from cuda.bindings import driver

    def words(kind: type, x: Sequence[int]) -> list[Any]:
        return [kind(v) for v in x]

    return _checked(
        driver,
        driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            len(sizes),
            address,
            words(driver.cuuint64_t, sizes),
            words(driver.cuuint64_t, strides),
            words(driver.cuuint32_t, box),
            words(driver.cuuint32_t, [1] * len(sizes)),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ),
    )


def _address(value: Tensor | int | None) -> int:
    return 0 if value is None else value.data_ptr() if isinstance(value, Tensor) else value


def _checked(api: Any, answer: tuple) -> Any:
    """What a call of `cuda.bindings` gives, without its status."""
    status, *rest = answer
    if int(status):
        raise RuntimeError(f"{type(status).__name__} {getattr(status, 'name', status)}")
    return rest[0] if len(rest) == 1 else tuple(rest) if rest else None

"""CUDA C++ of the package: compiled by NVRTC when it is first wanted, and launched through the driver on torch's current stream.

A source is one `.cu` file beside this module, which includes nothing but `.cuh` files from there. What is compiled is told by its file, the
GPU and the defines, and is compiled once a process. `cuda.bindings`, which CUDA builds of torch depend on, is imported when something is
compiled.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

Defines = tuple[tuple[str, int], ...]
FOLDER = Path(__file__).parent
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class Launch(NamedTuple):
    """How a kernel is launched."""

    grid: int
    threads: int  # of a block
    shared: int  # bytes of dynamic shared memory


def absence(device: torch.device) -> str | None:
    """Why kernels for Hopper cannot run on a device, in one line; None where they can."""
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device) != (9, 0):
        return "needs a Hopper GPU"
    return _compiler_absence()


@functools.cache
def _compiler_absence() -> str | None:
    """Why there is no NVRTC, in one line."""
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        return f"needs cuda.bindings: {_line(error)}"
    try:
        _checked(nvrtc.nvrtcVersion())
    except (RuntimeError, OSError) as error:  # of loading the library: nothing is compiled here
        return f"needs NVRTC: {_line(error)}"
    return None


def _line(error: Exception) -> str:
    return str(error).split("\n")[0]


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
    program = _checked(nvrtc.nvrtcCreateProgram(text, source.encode(), len(headers), contents, names))
    try:
        status = nvrtc.nvrtcCompileProgram(program, len(options), options)[0]
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            words = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).decode(errors="replace").strip("\0 \n")
            raise RuntimeError(f"{source} with {dict(defines)} does not compile for {arch}:\n{words}")
        return _text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


@functools.cache
def _driver() -> ctypes.CDLL:
    """libcuda by ctypes: `cuda.bindings` makes tensor maps at addresses that are not aligned as the driver wants them."""
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: Any) -> None:
    """A function of the driver. Raises `RuntimeError` with the name of its error."""
    if status := getattr(_driver(), name)(*arguments):
        text = ctypes.c_char_p()
        _driver().cuGetErrorName(status, ctypes.byref(text))
        raise RuntimeError(f"{name}: {(text.value or b'error').decode()} ({status})")


@functools.cache
def _loaded(source: str, name: str, defines: Defines, arch: str, device: int, shared: int) -> ctypes.c_void_p:
    """The function on a device, allowed `shared` bytes. The device must be current and have a context. Modules stay loaded."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _call("cuModuleLoadData", ctypes.byref(module), compiled(source, defines, arch))
    _call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
    _call("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED, ctypes.c_int(shared))
    return function


def launch(source: str, name: str, defines: Defines, how: Launch, arguments: Sequence[tuple[Any, Any]], arch: str = "sm_90a") -> None:
    """Launch kernel `name` on the current device and torch's current stream.

    Args:
        arguments: (value, ctypes type) of each parameter: tensors are passed as their address and None as 0, with `ctypes.c_void_p`;
            instances of ctypes themselves (`tensor_map`) with None.
    Raises `RuntimeError` with the name of the driver's error.
    """
    function = _loaded(source, name, defines, arch, torch.cuda.current_device(), how.shared)
    held = as_ctypes(arguments)
    parameters = (ctypes.c_void_p * len(held))(*(ctypes.addressof(one) for one in held))
    sizes = (ctypes.c_uint(n) for n in (how.grid, 1, 1, how.threads, 1, 1, how.shared))
    _call("cuLaunchKernel", function, *sizes, ctypes.c_void_p(torch.cuda.current_stream().cuda_stream), parameters, None)


def as_ctypes(arguments: Sequence[tuple[Any, Any]]) -> list[Any]:
    """The arguments of `launch` as instances of ctypes."""
    return [value if kind is None else kind(_address(value) if kind is ctypes.c_void_p else value) for value, kind in arguments]


class TensorMap(ctypes.Structure):
    """CUtensorMap."""

    _fields_ = (("opaque", ctypes.c_uint64 * 16),)


def tensor_map(address: int, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> TensorMap:
    """Map of a bf16 tensor for TMA, with boxes in rows of 128 bytes, swizzled; outside of the tensor are zeros.

    Args:
        address: a multiple of 16. sizes, box: elements, the contiguous dimension first. strides: bytes of all dimensions but that one,
            multiples of 16.
    """
    room = (ctypes.c_char * 192)()
    result = TensorMap.from_buffer(room, -ctypes.addressof(room) % 64)  # which keeps `room`
    _call(
        "cuTensorMapEncodeTiled",
        ctypes.byref(result),
        9,  # CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
        ctypes.c_uint(len(sizes)),
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * len(sizes))(*sizes),
        (ctypes.c_uint64 * len(strides))(*strides),
        (ctypes.c_uint32 * len(box))(*box),
        (ctypes.c_uint32 * len(box))(*[1] * len(box)),
        0,  # CU_TENSOR_MAP_INTERLEAVE_NONE
        3,  # CU_TENSOR_MAP_SWIZZLE_128B
        3,  # CU_TENSOR_MAP_L2_PROMOTION_L2_256B
        0,  # CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE
    )
    return result


def _address(value: Tensor | int | None) -> int:
    return 0 if value is None else value.data_ptr() if isinstance(value, Tensor) else value


def _text(size: Callable[[Any], tuple], read: Callable[[Any, bytes], tuple], program: Any) -> bytes:
    """What NVRTC writes into a buffer of the size that it asks for."""
    buffer = bytes(bytearray(_checked(size(program))))  # never an interned object: it is written to
    _checked(read(program, buffer))
    return buffer


def _checked(answer: tuple) -> Any:
    """What a call of `cuda.bindings` gives, without its status."""
    status, *rest = answer
    if int(status):
        raise RuntimeError(f"{type(status).__name__} {getattr(status, 'name', status)}")
    return rest[0] if rest else None

"""CUDA tensors on a machine without a GPU: shapes, dtypes and devices without memory, and every kernel launch noted instead of made.

For a process of its own, in which this is imported before torch: what is patched stays so.

torch's fake tensors of device cuda say what would be computed where. An operation whose operands lie on two devices raises, and so does
whatever needs a value on the host (`.item()`, `nonzero`, a mask as an index). Copies between host and device are noted with their line.
A launch of a Triton kernel is specialised as Triton would do it and noted with its grid; the compiled variants of a kernel are then the
different keys. Launches of CUDA C++ are noted with their defines. Addresses are made up, and as aligned as the place of a tensor in its
storage is.

torch's CPU build has neither device guard nor hooks for CUDA, which its Python bindings and autograd ask for: both are compiled from
torch's own headers (needs g++).
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_SOURCE = """
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/FakeGuardImpl.h>
namespace c10::impl { C10_REGISTER_GUARD_IMPL(CUDA, FakeGuardImpl<c10::DeviceType::CUDA>) }
namespace {
struct CUDAHooks : at::CUDAHooksInterface {
  CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)
}
"""


def _load() -> None:
    if "torch" in sys.modules:
        raise RuntimeError("tests.support.fake_cuda must be imported before torch")
    root = Path(importlib.util.find_spec("torch").submodule_search_locations[0])
    libraries = root / "lib"
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "cuda.cpp", Path(folder) / "cuda.so"
        source.write_text(_SOURCE)
        command = ["g++", "-std=c++20", "-shared", "-fPIC", str(source), "-o", str(library), f"-I{root / 'include'}", f"-L{libraries}"]
        subprocess.run([*command, "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{libraries}"], check=True)
        ctypes.CDLL(str(library))


_load()

import torch  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from tests.kernels.compile_for import NoDevice  # noqa: E402

MULTIPROCESSORS = 132  # of an H200
_LIMITS = (2**31 - 1, 65535, 65535)  # programs along each axis of a grid


@dataclass(frozen=True)
class Launch:
    """One kernel launch."""

    kernel: str
    key: str
    """What Triton compiles it for: types and specialisations of the arguments, constants, options."""
    grid: tuple[int, ...]


@dataclass
class Seen:
    """What happened."""

    launches: list[Launch] = field(default_factory=list)
    copies: list[str] = field(default_factory=list)
    """Host to device and back, each with the line that asked for it."""
    pinned: int = 0
    """Tensors that were put into pinned memory, from which copies need not be waited for."""
    waits: list[tuple[str, str]] = field(default_factory=list)
    """(stream, the stream that it waited for); the current one is called main, others side."""

    def clear(self) -> None:
        """Forget everything."""
        self.launches, self.copies, self.pinned, self.waits = [], [], 0, []


class _Stream:
    def __init__(self, seen: Seen, name: str) -> None:
        self.seen, self.name, self.device = seen, name, torch.device("cuda", 0)

    def wait_stream(self, other: _Stream) -> None:
        self.seen.waits.append((self.name, other.name))

    def synchronize(self) -> None:
        self.seen.copies.append(f"synchronize at {_here()}")


def _here() -> str:
    frame = next(f for f in reversed(traceback.extract_stack()) if "site-packages" not in f.filename and f.filename != __file__)
    return f"{Path(frame.filename).name}:{frame.lineno}: {frame.line}"


class _Copies(TorchDispatchMode):
    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        for given in tree_leaves((args, kwargs)):
            if isinstance(given, FakeTensor):
                given.constant = None  # or it would be computed with, on a device that is not there
        out = function(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)]
        kinds = {t.device.type for t in tensors if t.dim() or t.device.type != "cpu"}
        if len(kinds) > 1:
            ahead = " and goes on" if _asynchronous(function, args, kwargs or {}) else ""
            self.seen.copies.append(f"{function}{ahead} at {_here()}")
        return out


def _asynchronous(function: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a copy is not waited for, where the host's memory is pinned."""
    return bool(kwargs.get("non_blocking", function is torch.ops.aten.copy_.default and len(args) > 2 and args[2]))


def _address(tensor: FakeTensor) -> int:
    return 4096 + tensor.storage_offset() * tensor.element_size()


def _note_cuda(seen: Seen) -> None:
    """Launches of CUDA C++, by the name of the source; what is compiled are the defines."""
    from samebits.kernels import cuda_module

    def launch(source: str, name: str, defines: cuda_module.Defines, how: cuda_module.Launch, arguments: Any) -> None:
        for value, _ in arguments:
            assert not isinstance(value, torch.Tensor) or value.device.type == "cuda", f"{source}: a tensor lies on {value.device}"
        assert 0 < how.grid <= _LIMITS[0], f"{source}: grid {how.grid}"
        seen.launches.append(Launch(source, f"{name} {defines} {how.shared}", (how.grid,)))

    cuda_module.launch, cuda_module.tensor_map = launch, lambda *shape: cuda_module.TensorMap()
    cuda_module._compiler_absence = lambda: None


@contextlib.contextmanager
def fake_cuda() -> Iterator[Seen]:
    """Tensors made inside are fake; those of device cuda are taken for an H200's."""
    seen = Seen()
    driver.set_active(NoDevice(GPUTarget("cuda", 90, 32)))
    FakeTensor.data_ptr = _address

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kwargs["debug"] = False
        *_, binder = self.device_caches[0]
        bound, specialization, options = binder(*args, **kwargs)
        name = self.fn.__name__
        for parameter, value in bound.items():
            if isinstance(value, torch.Tensor):
                assert value.device.type == "cuda", f"{name}: {parameter} lies on {value.device}"
        sizes = tuple(grid(bound) if callable(grid) else grid)
        for size, limit in zip(sizes, _LIMITS, strict=False):
            assert 0 < size <= limit, f"{name}: grid {sizes}"
        seen.launches.append(Launch(name, f"{specialization} {options}", sizes))

    JITFunction.run = run
    _note_cuda(seen)
    original = torch.tensor

    def tensor(data: Any, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> torch.Tensor:
        where = torch.device(torch.empty(0).device if device is None else device)
        with torch.device("cpu"):
            made = original(data, dtype=dtype, **options)
        if where.type != "cuda":
            return made
        seen.copies.append(f"torch.tensor at {_here()}")
        return torch.empty(made.shape, dtype=made.dtype, device=where)  # `.to` would keep the values of a constant

    torch.tensor = tensor

    def pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
        assert self.device.type == "cpu", f"memory of {self.device} cannot be pinned"
        seen.pinned += 1
        return self

    torch.Tensor.pin_memory = pin_memory
    main = _Stream(seen, "main")
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(multi_processor_count=MULTIPROCESSORS)
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: 0
    torch.cuda.device = lambda device: contextlib.nullcontext()
    torch.cuda.current_stream = lambda device=None: main
    torch.cuda.Stream = lambda device=None: _Stream(seen, "side")
    torch.cuda.stream = lambda other: contextlib.nullcontext()
    with FakeTensorMode(), _Copies(seen):
        yield seen

"""A verl platform for machines without an accelerator: torch on the CPU, gloo, and logical Ray "GPU" slots for workers.

verl asks its platform for a device module with `torch.cuda`'s calls. On a CPU most of them have nothing to do, so the module here
answers with zeros and no-ops; random state goes to torch's CPU generator. Ray has no notion of a training slot on a CPU machine:
the job starts Ray with `num_gpus=N` and each worker takes one of these.
"""

from __future__ import annotations

from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase


class _CPUDeviceModule(ModuleType):
    """`torch.cpu` with the calls of `torch.cuda` that verl makes without asking."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def is_available(self) -> bool:
        return False

    def empty_cache(self) -> None:
        """Nothing is cached."""

    def synchronize(self, device: Any = None) -> None:
        """CPU work is synchronous."""

    def set_device(self, device: Any) -> None:
        """There is one device."""

    def memory_allocated(self, device: Any = None) -> int:
        return 0

    memory_reserved = max_memory_allocated = max_memory_reserved = memory_allocated

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """No peak is kept."""

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return (0, 0)

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def get_device_name(self, device: Any = None) -> str:
        return "cpu"

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed


class CPUPlatform(PlatformBase):
    """verl's view of a machine with CPUs only."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _CPUDeviceModule("samebits_cpu_device")

    def is_available(self) -> bool:
        """Always: torch runs here."""
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Always. verl asks its own platforms first, since they are registered before this one."""
        return True

    def current_device(self) -> torch.device:
        """What verl passes to `.to()`."""
        return torch.device("cpu")

    def device_count(self) -> int:
        """One device a process."""
        return 1

    def set_device(self, device_index: int) -> None:
        """There is one device."""

    def synchronize(self, device_index: int | None = None) -> None:
        """CPU work is synchronous."""

    def manual_seed(self, seed: int) -> None:
        """Seed torch's CPU generator."""
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None:
        """The CPU allocator takes none."""

    def empty_cache(self) -> None:
        """Nothing is cached."""

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        """None: a CPU has no compute capability."""
        return None, None

    def communication_backend_name(self) -> str:
        """Gloo."""
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """The variable that Ray sets for a logical GPU slot."""
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str):
        """No marker."""
        yield

    def profiler_start(self) -> None:
        """No device profiler."""

    def profiler_stop(self) -> None:
        """No device profiler."""

    def ray_resource_name(self) -> str:
        """Logical GPUs stand for worker slots."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        """None: nothing here reads the visible devices."""
        return []

    def is_ipc_supported(self) -> bool:
        """No CUDA IPC."""
        return False

    def cudart(self) -> None:
        """No CUDA runtime."""

"""An adapter from one process to another on the same GPU, without a copy on the host: CUDA's inter-process handles.

The sender lays all tensors into one buffer on its device, as `quant.stacks.FlatLayout` says, and sends a handle of a few hundred bytes. The
receiver opens it, copies each stack into the slot of the next version and lets go; the sender keeps the buffer until it has the answer.
Nothing about the proof changes: digests are taken of what the trainer exported and of what the slots hold afterwards.

Both must be on one device, told by its UUID since each process numbers its devices by itself. To a replica of several ranks, each of
the trainer's ranks on its GPUs gives a buffer with the whole adapter, and an engine rank opens the one on its own GPU.

torch shares memory that cudaMalloc gave. For memory in an expandable segment it has another way, which its own tests skip for open
faults (its issues 179220, 189879 and 190860), so that is refused here. verl switches expandable segments off before each sync and on
again after it. Whoever is refused sends a file.
"""

from __future__ import annotations

import base64
import pickle
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing import reductions

from samebits.quant.adapter import AdapterError

_CUDA_MALLOC = b"c"  # second byte of torch's handle: how the memory was allocated
_DEVICE, _HANDLE = 6, 7  # places among the arguments of torch's `rebuild_cuda_tensor`


class NotShareable(AdapterError):
    """Memory cannot be handed to another process. The message is one line that says why."""


class Handles(Protocol):
    """How memory of a device is named to another process."""

    def uuid(self, device: torch.device) -> str | None:
        """Which device this is, the same in every process; None where its memory is not shared."""

    def share(self, flat: Tensor) -> Any:
        """What another process opens `flat` with; it can be pickled. Raises `NotShareable`."""

    def open(self, handle: Any, device: torch.device) -> Tensor:
        """The shared buffer. It is closed when the last tensor over it is gone."""

    def collect(self) -> None:
        """Give back what others have closed since."""


class CudaHandles:
    """torch's own reductions of CUDA tensors, as `torch.multiprocessing` uses them."""

    def uuid(self, device: torch.device) -> str | None:
        """The device's UUID."""
        return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None

    def share(self, flat: Tensor) -> Any:
        """Arguments of `rebuild_cuda_tensor`, once everything queued on `flat` is done."""
        torch.cuda.current_stream(flat.device).synchronize()
        try:
            _, arguments = reductions.reduce_tensor(flat)
        except RuntimeError as error:
            raise NotShareable(f"CUDA gave no handle ({str(error).splitlines()[0]})") from None
        kind = bytes(arguments[_HANDLE][1:2])
        if kind != _CUDA_MALLOC:
            raise NotShareable("the trainer's memory lies in an expandable segment")
        return arguments

    def open(self, handle: Any, device: torch.device) -> Tensor:
        """The buffer, under this process's number of the device."""
        arguments = list(handle)
        arguments[_DEVICE] = device.index if device.index is not None else torch.cuda.current_device()
        try:
            return reductions.rebuild_cuda_tensor(*arguments)
        except RuntimeError as error:
            raise NotShareable(f"the engine cannot open the trainer's handle ({str(error).splitlines()[0]})") from None

    def collect(self) -> None:
        """Free blocks whose receivers have let go."""
        torch.cuda.ipc_collect()


CUDA = CudaHandles()


class Peers:
    """The trainer's ranks on the GPUs of one engine replica: neighbours in the trainer's group, with a group of their own.

    What the ranks of one replica exchange, and how often, is no matter to those of another.
    """

    def __init__(self, ranks: int) -> None:
        """All ranks of the trainer construct it. `ranks`: of a replica."""
        self.ranks = ranks
        self.group, _ = dist.new_subgroups(ranks, backend="gloo")

    def exchange(self, mine: Any) -> list[Any]:
        """What each rank of this replica gives, in order."""
        found: list[Any] = [None] * self.ranks
        dist.all_gather_object(found, mine, group=self.group)
        return found


def shared_text(flat: Tensor, handles: Handles = CUDA) -> str:
    """`flat` as a text that another process on its device opens with `open_text`. Raises `NotShareable`."""
    uuid = handles.uuid(flat.device)
    if uuid is None:
        raise NotShareable(f"the memory of device {flat.device.type} is not shared")
    return base64.b64encode(pickle.dumps((uuid, handles.share(flat)))).decode()


SEPARATOR = "\n"
"""Between the texts of several buffers, one on each GPU of a replica."""


def open_own(texts: str, device: torch.device, handles: Handles = CUDA) -> Tensor:
    """The buffer on `device` among those that `texts` name. Raises `NotShareable`, where there is none as `open_text` of the first."""
    here, several = handles.uuid(device), texts.split(SEPARATOR)
    return open_text(next((text for text in several if _read(text)[0] == here), several[0]), device, handles)


def _read(text: str) -> tuple[str | None, Any]:
    try:
        uuid, handle = pickle.loads(base64.b64decode(text, validate=True))
    except Exception as error:  # whatever a broken text makes pickle raise
        raise NotShareable(f"the handle cannot be read ({type(error).__name__})") from None
    return uuid, handle


def open_text(text: str, device: torch.device, handles: Handles = CUDA) -> Tensor:
    """The buffer that `shared_text` named. Raises `NotShareable`: another device, or a handle that cannot be opened."""
    uuid, handle = _read(text)
    here = handles.uuid(device)
    if uuid != here:
        raise NotShareable(f"the trainer's memory is on device {uuid}, the engine's on {here}")
    return handles.open(handle, device)

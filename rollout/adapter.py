"""An adapter's way into the engine, and the proof that it arrived.

A training job sends tensors (`load_path`, `load_shared`); a server takes the PEFT folder of a run (`load_folder`), by vLLM's own
`--lora-modules`. `load` copies the received tensors into a slot of the engine's own buffers; `held` reads the same slot back, by walking
the layers that multiply with it, to the names, shapes and dtype of the wire. The digests of what was read back are the answer to the
trainer, which compares them with the digests of what it sent. Whole tensors come to every rank of a replica, and each keeps and
answers for its part of them (`quant.ranks`).

The engine's buffers are in the compute dtype (fp32 on a CPU, where a bf16 buffer would be converted in every call). Every bf16 value
is exact there; `held` refuses to answer when a cast back is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from vllm.lora.request import LoRARequest

from samebits.quant.adapter import AdapterError, Manifest, load_peft, peft_metadata
from samebits.quant.digests import Digester
from samebits.quant.profile import NumericsProfile, require_same
from samebits.quant.stacks import copy_all

from .ipc import CUDA, Handles, open_own
from .slot_plan import SlotPlan, parts_of, slots_of
from .slots import IN_MEMORY


def lora_request(version: int) -> LoRARequest:
    """The request that selects adapter `version`. The version is in vLLM's prefix-cache key through the name."""
    return LoRARequest(lora_name=f"samebits-{version}", lora_int_id=adapter_id(version), lora_path=IN_MEMORY)


def adapter_id(version: int) -> int:
    """vLLM's id of an adapter version (ids start at 1). Raises `AdapterError` on a negative version."""
    if version < 0:
        raise AdapterError(f"adapter version {version} is negative")
    return version + 1


def load(model: Any, tensors: Mapping[str, Tensor], version: int) -> None:
    """Copy an adapter, of which whole tensors are given, into a slot under `version`; nothing received is changed.

    Raises `AdapterError`: a tensor is missing, unknown or of another shape or dtype; the version is resident already; a layer of the
    engine would be left without its pair. The engine's slots are unchanged then.
    """
    slots = slots_of(model)
    slots.spec.check(tensors)
    parts = parts_of(model)
    SlotPlan.of(model, 0)  # which says what does not fit before a slot is taken
    held = SlotPlan.of(model, slots.occupy(adapter_id(version))).tensors()
    copy_all(list(held.values()), [parts[name].of(tensors[name]) for name in held])


def load_path(model: Any, path: str, version: int) -> None:
    """`load` from a safetensors file, normally in shared memory."""
    if not Path(path).is_file():
        raise AdapterError(f"no adapter file at {path}")
    load(model, load_file(path), version)


def load_shared(model: Any, texts: str, sent: Manifest, handles: Handles = CUDA) -> None:
    """`load` from that buffer of `texts`, of other processes, which is on this rank's device (see `ipc`); it is closed afterwards.

    Raises `NotShareable` when it cannot be opened, `AdapterError` when the manifest names other tensors than the engine's adapter has, or
    the buffer is of another size.
    """
    slots = slots_of(model)
    plan = SlotPlan.of(model, 0)
    slots.spec.check_names(sent.digests)
    flat = open_own(texts, slots.device, handles)
    plan.layout.require(flat)
    SlotPlan.of(model, slots.occupy(adapter_id(sent.version))).fill(flat)
    if slots.device.type == "cuda":
        torch.cuda.current_stream(slots.device).synchronize()  # the sender may free the buffer when it has our answer


def load_folder(model: Any, folder: Path, version: int) -> None:
    """`load` from a PEFT folder as a run leaves it, and read it back: raises `AdapterError` unless the engine holds its very bits.

    Refused before a slot is touched: a folder that cannot be read, another shape or rank, an adapter that was trained with another
    numerics profile, and a third adapter where both slots are taken (requests for the one that would leave are still being accepted).
    """
    slots = slots_of(model)
    tensors = load_peft(folder, slots.spec)
    profile = folder_profile(folder, model.settings.profile)
    if None not in slots.occupants:
        raise AdapterError(f"{folder}: all {len(slots.occupants)} adapter slots are taken")
    load(model, tensors, version)
    Manifest.of(tensors, version, profile, world=model.group.world).require(held(model, version), str(folder))


def folder_profile(folder: Path, profile: NumericsProfile) -> str:
    """Hash of the numerics profile that a PEFT folder was trained with. Raises `AdapterError` when it is not that of `profile`."""
    trained = peft_metadata(folder).get("profile")
    if trained is None:
        raise AdapterError(f"{folder} does not say which numerics profile it was trained with")
    try:
        require_same(f"adapter {folder}", trained, f"the engine ({profile.name})", profile.hash)
    except ValueError as error:
        raise AdapterError(str(error)) from None
    return trained


def held(model: Any, version: int) -> Manifest:
    """Manifest of what the engine holds for `version`, read from its own buffers. Raises `AdapterError` when it holds none."""
    digester, size = Digester(), 0
    for names, stack in _plan(model, version).read():
        digester.add_stack(names, stack)
        size += stack.nbytes
    group = model.group
    return Manifest(version, model.settings.profile.hash, digester.finish(), size, rank=group.rank, world=group.world)


def _plan(model: Any, version: int) -> SlotPlan:
    return SlotPlan.of(model, slots_of(model).slot(adapter_id(version)))

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
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from vllm.lora.request import LoRARequest

from samebits.quant.adapter import PREFIX, AdapterError, Manifest, load_peft, peft_metadata
from samebits.quant.profile import NumericsProfile, require_same
from samebits.quant.ranks import Part

from .ipc import CUDA, FlatLayout, Handles, open_own
from .slots import IN_MEMORY, AdapterSlots


def lora_request(version: int) -> LoRARequest:
    """The request that selects adapter `version`. The version is in vLLM's prefix-cache key through the name."""
    return LoRARequest(lora_name=f"samebits-{version}", lora_int_id=adapter_id(version), lora_path=IN_MEMORY)


def adapter_id(version: int) -> int:
    """vLLM's id of an adapter version (ids start at 1). Raises `AdapterError` on a negative version."""
    if version < 0:
        raise AdapterError(f"adapter version {version} is negative")
    return version + 1


def _slots(model: Any) -> AdapterSlots:
    for adapter in model.adapters():
        return adapter.slots
    raise AdapterError("the engine takes no adapters: it was started without enable_lora")


def _views(model: Any, slot: int) -> dict[str, Tensor]:
    """Tensor name to the part of the engine's buffers that holds it."""
    return {
        f"{PREFIX}{path}.lora_{side}.weight": view
        for adapter in model.adapters()
        for path, pair in adapter.views(slot).items()
        for side, view in zip("AB", pair, strict=True)
    }


def _parts(model: Any) -> dict[str, Part]:
    """Tensor name to the part of it that this rank holds."""
    return model.group.ranks.adapter(model.group.rank, _slots(model).spec.shapes())


def load(model: Any, tensors: Mapping[str, Tensor], version: int) -> None:
    """Copy an adapter, of which whole tensors are given, into a slot under `version`; nothing received is changed.

    Raises `AdapterError`: a tensor is missing, unknown or of another shape or dtype; the version is resident already; a layer of the
    engine would be left without its pair. The engine's slots are unchanged then.
    """
    slots = _slots(model)
    slots.spec.check(tensors)
    parts, views = _parts(model), _views(model, 0)
    odd = sorted(views.keys() ^ parts.keys()) or [n for n, v in views.items() if tuple(v.shape) != parts[n].shape(tensors[n].shape)]
    if odd:
        raise AdapterError(f"engine and adapter disagree on {len(odd)} tensors, the first is {odd[0]}")
    for name, view in _views(model, slots.occupy(adapter_id(version))).items():
        view.copy_(parts[name].of(tensors[name]))


def load_path(model: Any, path: str, version: int) -> None:
    """`load` from a safetensors file, normally in shared memory."""
    if not Path(path).is_file():
        raise AdapterError(f"no adapter file at {path}")
    load(model, load_file(path), version)


def load_shared(model: Any, texts: str, sent: Manifest, handles: Handles = CUDA) -> None:
    """`load` from that buffer of `texts`, of other processes, which is on this rank's device (see `ipc`); it is closed afterwards.

    Raises `NotShareable` when it cannot be opened, `AdapterError` when it is not laid out as the manifest says.
    """
    slots = _slots(model)
    layout = FlatLayout.of(sent.digests, slots.spec.shapes(), getattr(torch, slots.spec.dtype))
    load(model, layout.views(open_own(texts, slots.device, handles)), sent.version)
    if slots.device.type == "cuda":
        torch.cuda.current_stream(slots.device).synchronize()  # the sender may free the buffer when it has our answer


def load_folder(model: Any, folder: Path, version: int) -> None:
    """`load` from a PEFT folder as a run leaves it, and read it back: raises `AdapterError` unless the engine holds its very bits.

    Refused before a slot is touched: a folder that cannot be read, another shape or rank, an adapter that was trained with another
    numerics profile, and a third adapter where both slots are taken (requests for the one that would leave are still being accepted).
    """
    slots = _slots(model)
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


def held_tensors(model: Any, version: int) -> dict[str, Tensor]:
    """What the engine multiplies with for `version`, under wire names, bf16, on the engine's device. Raises `AdapterError`."""
    slots = _slots(model)
    dtype = getattr(torch, slots.spec.dtype)
    out, inexact = {}, {}
    for name, view in _views(model, slots.slot(adapter_id(version))).items():
        out[name] = view.to(dtype).contiguous()
        if view.dtype != dtype:
            inexact[name] = (out[name].to(view.dtype) != view).any()
    # Looked at together: on a GPU each look is a wait.
    for name, found in zip(inexact, torch.stack(list(inexact.values())).tolist() if inexact else (), strict=True):
        if found:
            raise AdapterError(f"{name}: the engine holds values that {slots.spec.dtype} does not have")
    return out


def held(model: Any, version: int) -> Manifest:
    """Manifest of what the engine holds for `version`, read from its own buffers. Raises `AdapterError` when it holds none."""
    read = Manifest.of(held_tensors(model, version), version, model.settings.profile.hash)
    return replace(read, rank=model.group.rank, world=model.group.world)

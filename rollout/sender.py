"""The sender of adapters: lives in each trainer worker and brings the adapter to the server of the worker's replica after every step.

Where trainer and engine share a GPU the adapter stays there: it is laid into one buffer that the engine opens (`ipc`). Anywhere else, and
where either side cannot share its memory, it goes through a file in shared memory (`wire`). Which way it took, and why not the shorter
one, is part of the report. Digests are taken of the very tensors that the trainer exported, before they are laid out or copied anywhere:
whatever goes wrong on the way shows in the engine's answer.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from verl.utils.device import get_device_name
from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

from samebits.kernels import tracing
from samebits.kernels.meter import Meter
from samebits.quant.adapter import AdapterError, Manifest
from samebits.quant.digests import Digester
from samebits.rollout.ipc import CUDA, FlatLayout, Handles, NotShareable, shared_text
from samebits.rollout.wire import adapter_file


class AdapterSender(ServerAdapter):
    """verl's adapter to the server of a replica, for adapters only."""

    handles: Handles = CUDA
    _engine_uuids: list[str | None] | None = None
    _refusal: str | None = None
    """Why the engine could not open shared memory when it was tried: then it is not tried again."""

    async def update_weights(
        self,
        weights: Iterable[tuple[str, Tensor]],
        global_steps: int | None = None,
        peft_config: dict[str, Any] | None = None,
        base_sync_done: bool = True,
        wire_format: str = "named_tensors",
        **kwargs,
    ) -> None:
        """Send an adapter: `weights` yields (name, tensor) and must be drained on every rank, since gathering is collective.

        `peft_config["samebits"]` carries the adapter's `version`, the trainer's `profile` hash, and `shapes` and `dtype` of its tensors.
        Raises `AdapterError` when base weights come instead, or tensors that were not announced.
        """
        if peft_config is None or not base_sync_done or wire_format != "named_tensors":
            raise AdapterError("only adapters are synced; the base is frozen and loaded by the engine itself")
        started = time.time()
        origin = peft_config["samebits"]
        if not self._ensure_server_handle():
            with tracing.recording("sync", origin["version"]):
                Meter(get_device_name(), tracing.boundary()).enter("export")
                for _ in weights:
                    pass
            return
        device = torch.device(get_device_name())
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        reason = await self._why_not_shared(device)
        meter = Meter(device, tracing.boundary())
        with tracing.recording("sync", origin["version"]):
            meter.enter("export")
            tensors, flat, digester = _laid_out(weights, origin, device) if reason is None else _on_host(weights)
        meter.enter("digest")
        manifest = Manifest.of(tensors, origin["version"], origin["profile"], digester.finish())
        fault = injected_fault(origin["version"], self.replica_rank)
        if fault == "skip_sync":
            return
        if fault == "wrong_tensor":
            _change_one_bit(tensors)
        if flat is not None:
            meter.enter("share")
            reason = await self._send_shared(flat, manifest, started, meter)
            if reason is not None:
                tensors = {name: t.to("cpu", copy=True) for name, t in tensors.items()}
        if reason is not None:
            meter.enter("write")
            with adapter_file(tensors, manifest.version, manifest.profile, manifest.digests) as (path, _):
                await self._send("file", reason, path, manifest, started, meter)
        if flat is not None:  # kept until the answer was there
            del tensors, flat
            self.handles.collect()
        await self.server_handle.set_global_steps.remote(global_steps)

    async def _why_not_shared(self, device: torch.device) -> str | None:
        """None where every rank of the engine is on `device` and can open its memory, otherwise why not, in a few words."""
        uuid = self.handles.uuid(device)
        if uuid is None:
            return f"the trainer is on {device.type}"
        if self._refusal is None:
            if self._engine_uuids is None:
                self._engine_uuids = list(await self.server_handle.device_uuids.remote())
            if any(found != uuid for found in self._engine_uuids):
                self._refusal = "the engine is on another device"
        return self._refusal

    async def _send_shared(self, flat: Tensor, manifest: Manifest, started: float, meter: Meter) -> str | None:
        """Send the buffer by its handle; returns why that was refused, or None when it was answered."""
        try:
            handle = shared_text(flat, self.handles)
        except NotShareable as error:
            return str(error)  # of this buffer: the next may be shareable
        report = await self._send("ipc", "", handle, manifest, started, meter)
        self._refusal = report["refused"]
        return self._refusal

    async def _send(self, path: str, reason: str, source: str, manifest: Manifest, started: float, meter: Meter) -> dict[str, Any]:
        phases = meter.take()
        sender = {
            "path": path,
            "reason": reason,
            "seconds": {name: phase.seconds for name, phase in phases.items()},
            "memory": {name: phase.memory for name, phase in phases.items()},
        }
        return await self.server_handle.sync_adapter.remote(source, manifest.to_json(), started, sender)


def injected_fault(version: int, replica: int) -> str | None:
    """The fault of a recipe that befalls the sync of `version` to `replica`; None without one."""
    fault = json.loads(os.environ.get("SAMEBITS_FAULT", "{}"))
    if fault.get("kind") is None or version < fault["step"] or fault.get("replica") not in (None, replica):
        return None
    return fault["kind"]


def _change_one_bit(tensors: Mapping[str, Tensor]) -> None:
    """The lowest bit of the last element of the last tensor, after its digest was taken: what a bad copy or a late write leaves."""
    name = sorted(tensors)[-1]
    tensors[name].view(-1)[-1:].view(torch.int16).bitwise_xor_(1)


def _laid_out(weights: Iterable[tuple[str, Tensor]], origin: dict[str, Any], device: torch.device) -> tuple[dict, Tensor, Digester]:
    """(views by name in the manifest's order, the buffer below them, digester of what came). Raises `AdapterError`."""
    layout = FlatLayout.of(sorted(origin["shapes"]), origin["shapes"], getattr(torch, origin["dtype"]))
    flat = layout.buffer(device)
    views, digester = layout.views(flat), Digester()
    came = set()
    for name, t in weights:
        view = views.get(name)
        if view is None or view.shape != t.shape or view.dtype != t.dtype:
            raise AdapterError(f"the trainer announced no {name} of shape {tuple(t.shape)} in {str(t.dtype).removeprefix('torch.')}")
        digester.add(name, t)
        view.copy_(t)
        came.add(name)
    missing = sorted(views.keys() - came)
    if missing:
        raise AdapterError(f"the trainer announced {missing[0]} and did not export it ({len(missing)} such tensors)")
    return views, flat, digester


def _on_host(weights: Iterable[tuple[str, Tensor]]) -> tuple[dict[str, Tensor], None, Digester]:
    """(copies of the tensors on the host, no buffer, digester of what came)."""
    tensors, digester = {}, Digester()
    for name, t in weights:
        digester.add(name, t)
        tensors[name] = t.detach().to("cpu", copy=True)
    return tensors, None, digester

"""The sender of adapters: lives in each trainer worker and brings the adapter to the server of the worker's replica after every step.

Where trainer and engine share a GPU the adapter stays there: it is laid into one buffer that the engine opens (`ipc`). Anywhere else, and
where either side cannot share its memory, it goes through a file in shared memory (`wire`). Which way it took, and why not the shorter
one, is part of the report. Digests are taken of the very tensors that the trainer exported, before they are laid out or copied anywhere:
whatever goes wrong on the way shows in the engine's answer.

A replica of several ranks has as many of the trainer's ranks on its GPUs. The first of them sends, the file or the handles of all: each
lays the adapter, which the export brings to all of them, into a buffer on its own GPU for the engine rank there. The manifest holds the
digests of every engine rank's parts.

verl's own adapter to a vLLM server imports vLLM, seconds of a start in every trainer worker; nothing here needs it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from typing import Any

import ray
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from verl.utils.device import get_device_name
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.base import BaseRollout

from samebits.kernels import tracing
from samebits.kernels.meter import Meter
from samebits.quant.adapter import AdapterError, Manifest, Taken, Taking
from samebits.rollout.ipc import CUDA, SEPARATOR, FlatLayout, Handles, NotShareable, Peers, shared_text
from samebits.rollout.wire import adapter_file

ACTORS = "samebits_"
"""Beginning of the Ray names of the servers: `samebits_server_{replica}_{node of the replica}`."""


class AdapterSender(BaseRollout):
    """A trainer rank's side of the replica on its GPU. The first of the replica's ranks wakes its server and sends it adapters."""

    handles: Handles = CUDA
    server_handle: Any = None
    _peers: Peers | None = None
    _engine_uuids: list[str | None] | None = None
    _refusal: str | None = None
    """Why the engine could not open shared memory when it was tried: then it is not tried again."""

    def __init__(self, config: RolloutConfig, model_config: HFModelConfig, device_mesh: DeviceMesh, replica_rank: int = -1) -> None:
        """As verl constructs it in each trainer rank. `replica_rank`: -1 where trainer ranks are the replicas' in order."""
        super().__init__(config, model_config, device_mesh)
        ranks = self.engine_ranks * self.config.data_parallel_size * self.config.pipeline_model_parallel_size
        rank = int(os.environ["RANK"])
        self.replica_rank = rank // ranks if replica_rank == -1 else replica_rank
        self._first = rank % ranks == 0

    def _ensure_server_handle(self) -> bool:
        """Does this rank speak to the server? It looks it up then: servers start after the trainer."""
        if self._first and self.server_handle is None:
            self.server_handle = ray.get_actor(f"{ACTORS}server_{self.replica_rank}_0")
        return self._first

    async def resume(self, tags: list[str]) -> None:
        """Wake what the engine gave back: `weights`, `kv_cache`. Nothing where the recipe has no sleep."""
        if self.config.free_cache_engine and self._ensure_server_handle():
            await self.server_handle.wake_up.remote(tags)

    async def release(self) -> None:
        """Put the engine to sleep, where the recipe has that."""
        if self.config.free_cache_engine and self._ensure_server_handle():
            await self.server_handle.sleep.remote()

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
        sends = self._ensure_server_handle()
        origin = peft_config["samebits"]
        device = torch.device(get_device_name())
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        together = self.engine_ranks > 1 and self.handles.uuid(device) is not None
        if not (sends or together):
            with tracing.recording("sync", origin["version"]):
                Meter(get_device_name(), tracing.boundary()).enter("export")
                _drain(weights)
            return
        reason = await self._why_not_shared(device, sends, together)
        if not sends:
            with tracing.recording("sync", origin["version"]):
                Meter(get_device_name(), tracing.boundary()).enter("export")
                self._lend(weights, origin, device, reason)
            return
        meter = Meter(device, tracing.boundary())
        taking = Taking(origin["shapes"], self.engine_ranks)
        with tracing.recording("sync", origin["version"]):
            meter.enter("export")
            tensors, flat = _laid_out(weights, origin, device, taking) if reason is None else (_on_host(weights, taking), None)
        meter.enter("digest")
        manifest = Manifest.of(tensors, origin["version"], origin["profile"], taking.finish())
        fault = injected_fault(origin["version"], self.replica_rank)
        skipped = fault == "skip_sync"
        if fault == "wrong_tensor":
            _change_one_bit(tensors)
        try:
            if flat is not None:
                meter.enter("share")
                handles = self._handles_of_all(flat, together)
                reason = None if skipped else await self._send_shared(handles, manifest, started, meter)
            if skipped:
                return
            if reason is not None:
                meter.enter("write")
                on_host = {name: t if flat is None else t.to("cpu", copy=True) for name, t in tensors.items()}
                with adapter_file(on_host, manifest.version, manifest.profile, Taken(manifest.digests, manifest.parts)) as (path, _):
                    await self._send("file", reason, path, manifest, started, meter)
        finally:
            if flat is not None:  # kept until the answer was there, here and where it was lent
                del tensors, flat
                if together:
                    self._exchange(None)
                self.handles.collect()
        await self.server_handle.set_global_steps.remote(global_steps)

    @property
    def engine_ranks(self) -> int:
        """Ranks of one engine replica."""
        return self.config.tensor_model_parallel_size

    def _exchange(self, mine: Any) -> list[Any]:
        """What each of the trainer's ranks on this replica's GPUs gives, in order."""
        if self._peers is None:
            self._peers = Peers(self.engine_ranks)
        return self._peers.exchange(mine)

    def _lend(self, weights: Iterable[tuple[str, Tensor]], origin: dict[str, Any], device: torch.device, reason: str | None) -> None:
        """Of a rank that does not send: lay the adapter out for the engine rank on this GPU, until that has it."""
        if reason is not None:
            _drain(weights)
            return
        _, flat = _laid_out(weights, origin, device)
        self._handles_of_all(flat, together=True)
        self._exchange(None)
        del flat
        self.handles.collect()

    def _handles_of_all(self, flat: Tensor, together: bool) -> str | NotShareable:
        """Texts of the buffers on all of the replica's GPUs, or why one of them cannot be shared."""
        try:
            mine: str | NotShareable = shared_text(flat, self.handles)
        except NotShareable as error:
            mine = error
        every = self._exchange(mine) if together else [mine]
        return next((one for one in every if isinstance(one, NotShareable)), None) or SEPARATOR.join(every)

    async def _why_not_shared(self, device: torch.device, sends: bool, together: bool) -> str | None:
        """None where every rank of the engine is on a GPU of these trainer ranks and can open its memory, otherwise why not, briefly."""
        uuid = self.handles.uuid(device)
        if uuid is None:
            return f"the trainer is on {device.type}"
        trainer_uuids = self._exchange(uuid) if together else [uuid]
        if sends and self._refusal is None:
            if self._engine_uuids is None:
                self._engine_uuids = list(await self.server_handle.device_uuids.remote())
            if sorted(map(str, self._engine_uuids)) != sorted(map(str, trainer_uuids * (1 if together else len(self._engine_uuids)))):
                self._refusal = "the engine is on another device"
        # Who sends has asked the engine; the others do as it found.
        return self._exchange(self._refusal)[0] if together else self._refusal

    async def _send_shared(self, handles: str | NotShareable, manifest: Manifest, started: float, meter: Meter) -> str | None:
        """Send the buffers by their handles; returns why that was refused, or None when it was answered."""
        if isinstance(handles, NotShareable):
            return str(handles)  # of these buffers: the next may be shareable
        report = await self._send("ipc", "", handles, manifest, started, meter)
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


def _drain(weights: Iterable[tuple[str, Tensor]]) -> None:
    """Of a rank that keeps nothing: gathering is collective."""
    for _ in weights:
        pass


def _laid_out(
    weights: Iterable[tuple[str, Tensor]], origin: dict[str, Any], device: torch.device, taking: Taking | None = None
) -> tuple[dict[str, Tensor], Tensor]:
    """(views by name in the manifest's order, the buffer below them). `taking`: takes digests of what comes. Raises `AdapterError`."""
    layout = FlatLayout.of(sorted(origin["shapes"]), origin["shapes"], getattr(torch, origin["dtype"]))
    flat = layout.buffer(device)
    views = layout.views(flat)
    came = set()
    for name, t in weights:
        view = views.get(name)
        if view is None or view.shape != t.shape or view.dtype != t.dtype:
            raise AdapterError(f"the trainer announced no {name} of shape {tuple(t.shape)} in {str(t.dtype).removeprefix('torch.')}")
        if taking is not None:
            taking.add(name, t)
        view.copy_(t)
        came.add(name)
    missing = sorted(views.keys() - came)
    if missing:
        raise AdapterError(f"the trainer announced {missing[0]} and did not export it ({len(missing)} such tensors)")
    return views, flat


def _on_host(weights: Iterable[tuple[str, Tensor]], taking: Taking) -> dict[str, Tensor]:
    """Copies of the tensors on the host; `taking` takes digests of what comes."""
    tensors = {}
    for name, t in weights:
        taking.add(name, t)
        tensors[name] = t.detach().to("cpu", copy=True)
    return tensors

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

import functools
import json
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
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
from samebits.quant.adapter import AdapterError, Manifest, Taking
from samebits.quant.stacks import FlatLayout, copy_all, in_stacks
from samebits.rollout.ipc import CUDA, SEPARATOR, Handles, NotShareable, Peers, shared_text
from samebits.rollout.wire import adapter_file

_BATCH_BYTES = 256 << 20
"""Of exported tensors that are copied together; few more are held beside the buffer."""
ACTORS = "samebits_"
"""Beginning of the Ray names of the servers: `samebits_server_{replica}_{node of the replica}`."""


class AdapterSender(BaseRollout):
    """A trainer rank's side of the replica on its GPU. The first of the replica's ranks wakes its server and sends it adapters."""

    handles: Handles = CUDA
    server_handle: Any = None
    _waking: Awaitable[None] | None = None
    _layout: tuple[dict[str, tuple[int, ...]], FlatLayout] | None = None
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
        """Wake what the engine gave back: `weights`, `kv_cache`. Nothing where the recipe has no sleep.

        Weights are waited for when something is sent, not here: nothing of what the trainer does until then, its export, needs them or
        frees memory that they could need.
        """
        if not (self.config.free_cache_engine and self._ensure_server_handle()):
            return
        await self._awake()
        self._waking = self.server_handle.wake_up.remote(tags)
        if tags != ["weights"]:
            await self._awake()

    async def release(self) -> None:
        """Put the engine to sleep, where the recipe has that."""
        if self.config.free_cache_engine and self._ensure_server_handle():
            await self._awake()
            await self.server_handle.sleep.remote()

    async def _awake(self) -> None:
        """Once what `resume` began is done. Raises what it raised, once."""
        waking, self._waking = self._waking, None
        if waking is not None:
            await waking

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
        try:
            await self._update(weights, global_steps, peft_config["samebits"])
        finally:
            await self._awake()

    async def _update(self, weights: Iterable[tuple[str, Tensor]], global_steps: int | None, origin: dict[str, Any]) -> None:
        started = time.time()
        sends = self._ensure_server_handle()
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
        layout, shared = self._layout_of(origin), reason is None
        taking = Taking(origin["shapes"], self.engine_ranks)
        with tracing.recording("sync", origin["version"]):
            meter.enter("export")
            flat = _laid_out(weights, layout, device if shared else torch.device("cpu"), taking)
        meter.enter("digest")
        taken = taking.finish()
        manifest = Manifest(origin["version"], origin["profile"], taken.whole, layout.bytes, parts=taken.parts)
        fault = injected_fault(origin["version"], self.replica_rank)
        skipped = fault == "skip_sync"
        if fault == "wrong_tensor":
            _change_one_bit(layout.views(flat))
        send = functools.partial(self._send, manifest=manifest, started=started, meter=meter, global_steps=global_steps)
        try:
            if shared:
                meter.enter("share")
                handles = self._handles_of_all(flat, together)
                reason = None if skipped else await self._send_shared(handles, send)
            if skipped:
                return
            if reason is not None:
                meter.enter("write")
                with adapter_file(layout.views(flat.cpu()), manifest.version, manifest.profile, taken) as (path, _):
                    await send("file", reason, path)
        finally:
            if shared:  # kept until the answer was there, here and where it was lent
                del flat
                if together:
                    self._exchange(None)
                self.handles.collect()

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
        flat = _laid_out(weights, self._layout_of(origin), device)
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

    async def _send_shared(self, handles: str | NotShareable, send: Callable[[str, str, str], Awaitable[dict[str, Any]]]) -> str | None:
        """Send the buffers by their handles; returns why that was refused, or None when it was answered."""
        if isinstance(handles, NotShareable):
            return str(handles)  # of these buffers: the next may be shareable
        report = await send("ipc", "", handles)
        self._refusal = report["refused"]
        return self._refusal

    async def _send(
        self, path: str, reason: str, source: str, *, manifest: Manifest, started: float, meter: Meter, global_steps: int | None
    ) -> dict[str, Any]:
        phases = meter.take()
        seconds = {name: phase.seconds for name, phase in phases.items()}
        if self._waking is not None:
            began = time.perf_counter()
            await self._awake()
            seconds["wait"] = time.perf_counter() - began
        sender = {
            "path": path,
            "reason": reason,
            "seconds": seconds,
            "memory": {name: phase.memory for name, phase in phases.items()},
        }
        return await self.server_handle.sync_adapter.remote(source, manifest.to_json(), started, sender, global_steps)

    def _layout_of(self, origin: dict[str, Any]) -> FlatLayout:
        """Made once: the shapes of a run do not change."""
        if self._layout is None or self._layout[0] != origin["shapes"]:
            self._layout = (origin["shapes"], FlatLayout.of(origin["shapes"], getattr(torch, origin["dtype"])))
        return self._layout[1]


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
    for _ in in_stacks(weights):
        pass


def _laid_out(weights: Iterable[tuple[str, Tensor]], layout: FlatLayout, device: torch.device, taking: Taking | None = None) -> Tensor:
    """The buffer of a layout with what comes. `taking`: takes digests of that, not of the buffer. Raises `AdapterError`."""
    flat = layout.buffer(device)
    views = layout.stack_views(flat)
    came: set[str] = set()
    targets: list[Tensor] = []
    sources: list[Tensor] = []
    waiting = 0
    for names, stack in in_stacks(weights):
        target = _place(layout, views, names)
        if target is None or target.shape != stack.shape or target.dtype != stack.dtype:
            what = f"{names[0]} of shape {tuple(stack.shape[1:])} in {str(stack.dtype).removeprefix('torch.')}"
            raise AdapterError(f"the trainer announced no {what}")
        if taking is not None:
            taking.add_stack(names, stack)
        targets.append(target)
        sources.append(stack)
        came.update(names)
        waiting += stack.nbytes
        if waiting >= _BATCH_BYTES:
            copy_all(targets, sources)
            targets, sources, waiting = [], [], 0
    copy_all(targets, sources)
    if len(came) != len(layout.places):
        missing = sorted(layout.places.keys() - came)
        raise AdapterError(f"the trainer announced {missing[0]} and did not export it ({len(missing)} such tensors)")
    return flat


def _place(layout: FlatLayout, views: Sequence[Tensor], names: tuple[str, ...]) -> Tensor | None:
    """Where tensors of these names belong, or None where the layout has no such stack."""
    index, row = layout.places.get(names[0], (-1, 0))
    if index < 0:
        return None
    if layout.stacks[index].names[row : row + len(names)] != names:
        return None
    return views[index] if len(names) == len(views[index]) else views[index][row : row + len(names)]

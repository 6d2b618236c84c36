"""The GPU's side of a sync on fake CUDA tensors: `python -m tests.rollout.sync_on_fake_cuda`, a process of its own.

Masters of the mini model are exported beside the current stream, laid out and digested as the sender does it, copied into slots and read
back as an engine rank does it. An operation on two devices raises; what is launched, copied between host and device and waited for is
counted. Values are not there: bits are the matter of other tests.
"""

from __future__ import annotations

from tests.support.fake_cuda import Seen, fake_cuda  # before torch

# ruff: noqa: I001
import collections
import json
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

import samebits.trainer.plugin  # noqa: F401
from samebits.quant import triton_digest
from samebits.quant.adapter import AdapterSpec, ModelShape, Taking
from samebits.quant.digests import Digester
from samebits.quant.roles import LORA_ROLES
from samebits.quant.stacks import FlatLayout, StackedTensors
from samebits.recipes.mini_model import MINI
from samebits.recipes.tiny_m3 import config
from samebits.rollout.sender import _laid_out
from samebits.rollout.slot_plan import SlotPlan
from samebits.trainer.early_export import EarlyExport
from samebits.trainer.export import Side, export_stacks
from tests.support.slot_layers import SlotLayers

SPEC = AdapterSpec(ModelShape.from_config(config(MINI)), 32, LORA_ROLES)
COMPUTES = {"aten::cat", "aten::mul", "aten::_to_copy", "aten::copy_", "aten::_foreach_copy_", "aten::clone", "aten::contiguous"}


class Operations(TorchDispatchMode):
    """Counts what is no view."""

    def __init__(self) -> None:
        super().__init__()
        self.names: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function._schema.name in COMPUTES:
            self.names[function._schema.name.removeprefix("aten::")] += 1
        return function(*args, **(kwargs or {}))


class Pair:
    """A and B on the GPU, of one module or of all experts of a projection."""

    def __init__(self, device: torch.device, scale: float) -> None:
        self.device, self.scale, self.made = device, scale, {}

    def add(self, names: tuple[str, ...], shape: tuple[int, ...]) -> None:
        """One of them."""
        side, experts = "A" if ".lora_A." in names[0] else "B", len(names) > 1
        master = torch.empty((len(names), *shape) if experts else shape, device=self.device)
        self.made[side] = Side(names, master, self.scale if side == "B" else 1.0, experts)

    def sides(self) -> tuple[Side, Side]:
        """Both."""
        return self.made["A"], self.made["B"]


def pairs_of(layout: FlatLayout, device: torch.device, scale: float) -> list[Pair]:
    """Masters of all stacks of a layout."""
    found: dict[str, Pair] = {}
    for stack in layout.stacks:
        key = stack.names[0].replace(".lora_A.", ".lora_B.")
        found.setdefault(key, Pair(device, scale)).add(stack.names, stack.shape)
    return list(found.values())


def lay_apart() -> None:
    """Give each storage addresses of its own, by which a plan finds what lies side by side."""
    kept: list[torch.UntypedStorage] = []
    starts: dict[int, int] = {}

    def start(storage: torch.UntypedStorage) -> int:
        if storage._cdata not in starts:
            kept.append(storage)
            starts[storage._cdata] = len(kept) << 40
        return starts[storage._cdata]

    torch.UntypedStorage.data_ptr = start
    FakeTensor.data_ptr = lambda t: start(t.untyped_storage()) + t.storage_offset() * t.element_size()


def main() -> dict[str, Any]:
    """What each part did: operations, kernels, copies between host and device, waits between streams."""
    parts: dict[str, Any] = {}

    def noted(name: str, seen: Seen, work: Callable[[], Any]) -> Any:
        seen.clear()
        with Operations() as operations:
            made = work()
        copies = ["goes on" if " and goes on at " in copy else copy for copy in seen.copies]
        kernels = [launch.kernel for launch in seen.launches]
        on_device = {"operations": dict(operations.names), "kernels": kernels}
        parts[name] = on_device | {"copies": copies, "pinned": seen.pinned, "waits": seen.waits}
        return made

    with fake_cuda() as seen:
        torch.Tensor.record_stream = lambda tensor, stream: None
        lay_apart()
        device, layout = torch.device("cuda", 0), FlatLayout.of(SPEC.shapes(), torch.bfloat16)
        triton_digest._keys(device)  # once in a process
        model = SlotLayers(SPEC, device=device)
        for scale in (1.0, 2.0):
            pairs = pairs_of(layout, device, scale)
            masters = [side.master for pair in pairs for side in pair.sides()]
            name = "export" if scale == 1.0 else "scaled"
            export = noted(name, seen, lambda p=pairs, m=masters: EarlyExport(1, export_stacks(p), m, device))
        taking = Taking(SPEC.shapes())
        flat = noted("lay out", seen, lambda: _laid_out(StackedTensors(export.drain()), layout, device, taking))
        noted("digest", seen, taking._digester._flush)
        plan = noted("plan", seen, lambda: SlotPlan.of(model, 1))
        noted("again", seen, lambda: SlotPlan.of(model, 1))
        noted("fill", seen, lambda: plan.fill(flat))

        def read() -> None:
            digester = Digester()
            for names, stack in plan.read():
                digester.add_stack(names, stack)
            digester._flush()

        noted("read", seen, read)
        strided = sum(not run.held[0].is_contiguous() for run in plan.runs)
    return {"parts": parts, "runs": len(plan.runs), "stacks": len(layout.stacks), "strided": strided}


if __name__ == "__main__":
    print(json.dumps(main()))

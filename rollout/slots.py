"""Adapters inside the engine: the slots they lie in, which slot each token of a step uses, and vLLM's view of both.

vLLM's scheduler decides which requests run together and tells the worker each token's adapter. Everything below that is ours: the
layers keep their LoRA pairs in `ProjectionAdapter` and `ExpertsAdapter`, one entry a slot, and add the delta through
`kernels.linear.add_lora` and `kernels.moe.moe`, inside the fp32 sum. vLLM's own LoRA layers are not used: they round the base output
before they add the delta, their CPU kernels gather B once for every token, and they have no layer for the fused q, k, v, index_q,
index_k projection.

An adapter enters through `adapter.load` only, as tensors that a job sent or from a PEFT folder that a server was given. A request that
names a version that is not resident raises in the worker; it is never served by the base.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from samebits.kernels.linear import LoRA, add_lora
from samebits.kernels.moe import ExpertLoRA
from samebits.quant.adapter import AdapterError, AdapterSpec

from .settings import RESIDENT

IN_MEMORY = "samebits:memory"
"""`lora_path` of an adapter that was sent and lies nowhere on disk."""


class AdapterSlots:
    """Slot bookkeeping shared by all layers of a model."""

    def __init__(self, spec: AdapterSpec, dtype: torch.dtype, device: torch.device, max_tokens: int) -> None:
        self.spec = spec
        self.dtype = dtype
        self.device = device
        # On a GPU the slots are told by token in every step with an adapter: a captured graph reads where they lie, and cannot know
        # which slot will be in use. A token's result is the same either way.
        self.by_token = device.type != "cpu"
        self.occupants: list[int | None] = [None] * RESIDENT  # vLLM's id of the adapter in each slot
        self.plans: dict[int, Any] = {}
        """By slot, what `slot_plan` found out about the layers."""
        self._uniform: int | None = -1  # the slot of every token of this step, or None when they differ
        self._token_slots = torch.full((max_tokens,), -1, dtype=torch.int64, device=device)

    def slot(self, adapter_id: int) -> int:
        """Slot of a resident adapter. Raises `AdapterError`."""
        if adapter_id not in self.occupants:
            held = ", ".join(str(i - 1) for i in self.occupants if i is not None) or "none"
            raise AdapterError(f"adapter version {adapter_id - 1} is not resident (resident: {held})")
        return self.occupants.index(adapter_id)

    def occupy(self, adapter_id: int) -> int:
        """A slot for a new adapter; when both are taken, the lower version leaves."""
        if adapter_id in self.occupants:
            raise AdapterError(f"adapter version {adapter_id - 1} is already resident; remove it before it is sent again")
        if None not in self.occupants:
            self.occupants[self.occupants.index(min(self.occupants))] = None
        slot = self.occupants.index(None)
        self.occupants[slot] = adapter_id
        return slot

    def release(self, adapter_id: int) -> bool:
        """Empty the adapter's slot; False when it was not resident."""
        if adapter_id not in self.occupants:
            return False
        self.occupants[self.occupants.index(adapter_id)] = None
        return True

    def set_tokens(self, adapter_ids: Iterable[int]) -> None:
        """Adapter id of each token of the coming step, 0 for none. Raises `AdapterError` when one is not resident."""
        ids = np.asarray(adapter_ids, dtype=np.int64)
        present = np.unique(ids).tolist()
        slots = {i: -1 if i <= 0 else self.slot(i) for i in present}
        if len(present) <= 1:
            self._uniform = slots[present[0]] if present else -1
            if self._uniform < 0 or not self.by_token:
                return
            # The rule where a job trains: filled, since a copy from the host would wait for the step before.
            self._token_slots.fill_(-1)
            self._token_slots[: len(ids)].fill_(self._uniform)
            return
        self._uniform = None
        table = np.full(max(present) + 1, -1, dtype=np.int64)
        for i, slot in slots.items():
            if i > 0:
                table[i] = slot
        told = torch.from_numpy(table[np.maximum(ids, 0)])
        if self.device.type == "cuda":  # from memory that is not pinned the host would wait for the step before
            told = told.pin_memory()
        self._token_slots.fill_(-1)
        self._token_slots[: len(ids)].copy_(told, non_blocking=True)

    def select(self, lora: LoRA, tokens: int) -> tuple[LoRA | None, Tensor | None]:
        """What the ops take: the LoRA slots and each token's slot. (None, None) when no token has an adapter; where slots are not told
        by token and all share one, (that slot, None)."""
        if self._uniform is not None and self._uniform < 0:
            return None, None
        if self._uniform is None or self.by_token:
            return lora, self._token_slots[:tokens]
        s = slice(self._uniform, self._uniform + 1)
        return LoRA(lora.a[s], lora.b[s]), None

    def select_all(self, pairs: Iterable[LoRA | None], tokens: int) -> tuple[list[LoRA | None], Tensor | None]:
        """`select` of several; what is None stays None."""
        chosen = [None if pair is None else self.select(pair, tokens) for pair in pairs]
        ids = next((ids for _, ids in filter(None, chosen)), None)
        return [None if one is None else one[0] for one in chosen], ids

    def empty(self, *shape: int) -> Tensor:
        """A zeroed buffer [slots, *shape]."""
        return torch.zeros((RESIDENT, *shape), dtype=self.dtype, device=self.device)


class ProjectionAdapter:
    """Adapter of a linear layer whose output rows are slices of one or more projections.

    Where they are `stacked`, the pairs of the slices lie in one: A of all of them below each other, B of each in its own rows and columns
    and zeros elsewhere. A kernel adds them in one step; zeros leave a sum as it is, so the bits are those of separate pairs.
    """

    def __init__(self, slots: AdapterSlots, slices: list[tuple[str, int, bool]], k: int, stacked: bool = False) -> None:
        """`slices`: (checkpoint path, rows N, adapted?) in the order of the output. k: input width."""
        self.slots = slots
        r, count = slots.spec.rank, sum(adapted for _, _, adapted in slices)
        self.stacked = LoRA(slots.empty(count * r, k), slots.empty(sum(n for _, n, _ in slices), count * r)) if stacked else None
        self.parts: list[tuple[str, int, int, LoRA]] = []
        self.pairs: list[LoRA | None] = []
        """The pair of each slice, None where it is not adapted."""
        at = 0
        for path, n, adapted in slices:
            pair = None
            if adapted:
                ranks = slice(len(self.parts) * r, (len(self.parts) + 1) * r)
                if stacked:
                    pair = LoRA(self.stacked.a[:, ranks], self.stacked.b[:, at : at + n, ranks])
                else:
                    pair = LoRA(slots.empty(r, k), slots.empty(n, r))
                self.parts.append((path, at, n, pair))
            self.pairs.append(pair)
            at += n

    def select(self, tokens: int) -> tuple[LoRA | None, Tensor | None]:
        """All slices in one pair, as `kernels.linear.lora_linear` takes it."""
        return self.slots.select(self.stacked or self.parts[0][3], tokens)

    def select_pairs(self, tokens: int) -> tuple[list[LoRA | None], Tensor | None]:
        """The pair of each slice, and each token's slot."""
        return self.slots.select_all(self.pairs, tokens)

    def add(self, out: Tensor, x: Tensor) -> Tensor:
        """`out` fp32 [T, N] plus the deltas of its slices, one after the other; it may be changed in place."""
        for _, at, n, lora in self.parts:
            chosen, ids = self.slots.select(lora, x.shape[0])
            if chosen is not None:
                out[:, at : at + n] = add_lora(out[:, at : at + n], x, chosen, ids)
        return out

    def views(self, slot: int) -> dict[str, tuple[Tensor, Tensor]]:
        """(A [r, K], B [N, r]) of each adapted projection in a slot, by checkpoint path."""
        return {path: (lora.a[slot], lora.b[slot]) for path, _, _, lora in self.parts}

    def places(self) -> list[tuple[int, ...]]:
        """Where the buffers lie whose parts `views` gives: it gives others when one of these changes."""
        return [_place(t) for _, _, _, lora in self.parts for t in lora]


class ExpertsAdapter:
    """Adapters of the experts of a layer that are here."""

    def __init__(
        self, slots: AdapterSlots, path: str, experts: int, hidden: int, intermediate: int, adapted: set[str], first: int = 0
    ) -> None:
        """`path`: checkpoint path of the experts. `experts`: how many are here, from `first` on.

        `adapted`: which of w1, w2, w3; the others keep zeros and are not reported.
        """
        self.slots, self.path, self.adapted, self.first = slots, path, adapted, first
        r = slots.spec.rank

        def pair(n: int, k: int) -> LoRA:
            return LoRA(slots.empty(experts, r, k), slots.empty(experts, n, r))

        self.lora = ExpertLoRA(pair(intermediate, hidden), pair(intermediate, hidden), pair(hidden, intermediate))

    def select(self, tokens: int) -> tuple[ExpertLoRA | None, Tensor | None]:
        """What `kernels.moe.moe` takes."""
        chosen = [self.slots.select(lora, tokens) for lora in self.lora]
        if chosen[0][0] is None:
            return None, None
        return ExpertLoRA(*(lora for lora, _ in chosen)), chosen[0][1]

    def views(self, slot: int) -> dict[str, tuple[Tensor, Tensor]]:
        """(A, B) of each adapted expert projection in a slot, by checkpoint path."""
        stacks = {"w1": self.lora.gate, "w2": self.lora.down, "w3": self.lora.up}
        return {
            f"{self.path}.{self.first + e}.{which}": (lora.a[slot, e], lora.b[slot, e])
            for which, lora in stacks.items()
            if which in self.adapted
            for e in range(lora.a.shape[1])
        }

    def places(self) -> list[tuple[int, ...]]:
        """Where the buffers lie whose parts `views` gives: it gives others when one of these changes."""
        return [_place(t) for lora in self.lora for t in lora]


def _place(buffer: Tensor) -> tuple[int, ...]:
    return (buffer.data_ptr(), *buffer.shape, *buffer.stride())


class MemoryAdapterManager:
    """The worker-side LoRA manager that vLLM's model runners talk to.

    `load_folder(folder, version)` fills a slot from a PEFT folder (`adapter.load_folder` of the model).
    """

    def __init__(self, slots: AdapterSlots, load_folder: Callable[[Path, int], None]) -> None:
        self.slots = slots
        self.load_folder = load_folder

    def set_active_adapters(self, requests: set, mapping) -> None:
        """Called before each step. Raises `AdapterError` when a request names an adapter that is not resident."""
        for request in requests:
            self.slots.slot(request.lora_int_id)
        if mapping is not None:
            self.slots.set_tokens(mapping.index_mapping)

    def add_adapter(self, request) -> bool:
        """vLLM's own load path, which serves `--lora-modules`: a folder is loaded, what a training job sent only confirmed.

        Raises `AdapterError`; vLLM turns it into the answer to whoever asked, and the engine goes on.
        """
        if request.lora_path == IN_MEMORY:
            self.slots.slot(request.lora_int_id)
        elif request.lora_int_id not in self.slots.occupants:
            self.load_folder(Path(request.lora_path), request.lora_int_id - 1)
        elif request.load_inplace:
            raise AdapterError(f"adapter {request.lora_name} is in use: load the other weights under another name")
        return True

    def remove_adapter(self, adapter_id: int) -> bool:
        """Empty the adapter's slot; False when it was not resident."""
        return self.slots.release(adapter_id)

    def remove_all_adapters(self) -> None:
        """Empty all slots."""
        self.slots.occupants = [None] * RESIDENT

    def list_adapters(self) -> set[int]:
        """vLLM ids of the resident adapters."""
        return {i for i in self.slots.occupants if i is not None}

    def pin_adapter(self, adapter_id: int) -> bool:
        """Confirm that the adapter is resident; nothing is evicted but by a load."""
        self.slots.slot(adapter_id)
        return True

    def get_dummy_lora_warmup_rank(self, default_rank: int) -> int:
        """Warm-up runs use the buffers as they are."""
        return default_rank

    @contextmanager
    def dummy_lora_cache(self):
        """Warm-up adapters are empty slots: nothing to cache."""
        yield

    def add_dummy_lora(self, request, rank: int) -> bool:
        """Warm-up: zeros in a slot under the request's id."""
        if request.lora_int_id not in self.slots.occupants:
            self.slots.occupy(request.lora_int_id)
        return True

    def supports_tower_connector_lora(self) -> bool:
        """There is no tower."""
        return False


def attach(model: nn.Module, vllm_config, device: torch.device, spec: AdapterSpec) -> MemoryAdapterManager:
    """Give every adapted layer of `model` its slots."""
    dtype = vllm_config.model_config.dtype
    slots = AdapterSlots(spec, dtype, device, vllm_config.scheduler_config.max_num_batched_tokens)
    model.attach_adapters(slots)
    from .adapter import load_folder  # which builds on this module

    return MemoryAdapterManager(slots, functools.partial(load_folder, model))

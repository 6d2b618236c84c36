"""Faults between the trainer's export and the engine: nothing sent, some of it, under other names, or other values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from samebits.alignment_checks.adapters import place_of
from samebits.alignment_checks.pair import Pair
from samebits.alignment_checks.report import Place
from samebits.quant.adapter import PREFIX, parse_name, tensor_name
from samebits.quant.roles import ModuleId, Role

from .base import expert, fault, layers, replaced

Tensors = dict[str, Tensor]
SENT = ("weights.coverage", "weights.held")


@contextmanager
def _wire(pair: Pair, change: Callable[[Tensors], Tensors | None], origin: Callable[[dict], dict] = lambda o: o) -> Iterator[None]:
    def wire(replica: Any, tensors: Tensors, said: dict) -> tuple[Tensors, dict] | None:
        changed = change(tensors)
        return None if changed is None else (changed, origin(said))

    with replaced(pair, "wire", wire):
        yield


def _name(pair: Pair, role: Role, layer: int, side: str, number: int | None = None) -> str:
    return tensor_name(ModuleId(role, layer, -1 if number is None else number), side)


@fault("wire", *SENT)
def no_op_sync(pair: Pair) -> Iterator[Place]:
    """The sync sends nothing; every sample comes from the adapter before."""
    with _wire(pair, lambda tensors: None):
        yield Place()


@fault("wire", "weights.held", replicas=2)
def stale_replica(pair: Pair) -> Iterator[Place]:
    """One replica of several does not get the new adapter and keeps the version before."""

    def wire(replica: Any, tensors: Tensors, said: dict) -> tuple[Tensors, dict] | None:
        return None if replica.index == 1 else (tensors, said)

    with replaced(pair, "wire", wire):
        yield Place(replica=1)


@fault("wire", *SENT)
def expert_missing(pair: Pair) -> Iterator[Place]:
    """The tensors of one expert are not sent."""
    layer, number = layers(pair)[2], expert(pair)
    with _wire(pair, lambda ts: {n: t for n, t in ts.items() if f"layers.{layer}.block_sparse_moe.experts.{number}." not in n}):
        yield Place(layer=layer, expert=number)


@fault("wire", *SENT)
def all_experts_missing(pair: Pair) -> Iterator[Place]:
    """Target names match the shared expert but no routed one."""
    layer = layers(pair)[1]
    with _wire(pair, lambda ts: {n: t for n, t in ts.items() if ".experts." not in n}):
        yield Place(layer=layer, expert=0)


@fault("wire", *SENT)
def wrong_prefix(pair: Pair) -> Iterator[Place]:
    """Names lack the PEFT prefix, so that nothing matches."""
    with _wire(pair, lambda ts: {n.removeprefix(PREFIX): t for n, t in ts.items()}):
        yield Place(layer=0)


@fault("wire", *SENT)
def extra_module(pair: Pair) -> Iterator[Place]:
    """A tensor is sent for the router, which no recipe adapts."""
    layer = layers(pair)[1]
    name = f"{PREFIX}model.layers.{layer}.block_sparse_moe.gate.lora_A.weight"
    with _wire(pair, lambda ts: ts | {name: torch.ones(4, 4, dtype=torch.bfloat16)}):
        yield Place(layer=layer)


@fault("wire", *SENT)
def experts_offset(pair: Pair) -> Iterator[Place]:
    """Experts are sent under the ids of the next expert-parallel rank."""
    count = pair.trainer.dims.shape.experts

    def change(ts: Tensors) -> Tensors:
        out = {}
        for name, t in ts.items():
            module, side = parse_name(name)
            moved = module if module.expert < 0 else ModuleId(module.role, module.layer, (module.expert + count // 2) % count)
            out[tensor_name(moved, side)] = t
        return out

    with _wire(pair, change):
        yield Place(layer=layers(pair)[1], expert=0)


@fault("wire", *SENT)
def gate_up_swapped(pair: Pair) -> Iterator[Place]:
    """w1 and w3 of the experts are exchanged."""
    other = {Role.EXPERT_GATE: Role.EXPERT_UP, Role.EXPERT_UP: Role.EXPERT_GATE}

    def change(ts: Tensors) -> Tensors:
        out = {}
        for name, t in ts.items():
            module, side = parse_name(name)
            out[tensor_name(ModuleId(other.get(module.role, module.role), module.layer, module.expert), side)] = t
        return out

    with _wire(pair, change):
        yield Place(layer=layers(pair)[1], expert=0)


@fault("wire", *SENT)
def gate_sent_twice(pair: Pair) -> Iterator[Place]:
    """One expert's up projection carries the gate projection's tensors."""
    layer, number = layers(pair)[1], expert(pair)

    def change(ts: Tensors) -> Tensors:
        both = {_name(pair, Role.EXPERT_UP, layer, s, number): ts[_name(pair, Role.EXPERT_GATE, layer, s, number)].clone() for s in "AB"}
        return ts | both

    with _wire(pair, change):
        yield place_of(_name(pair, Role.EXPERT_UP, layer, "A", number))


@fault("wire", *SENT)
def lora_transposed(pair: Pair) -> Iterator[Place]:
    """A of one projection is sent as [K, r]."""
    name = _name(pair, Role.ATTN_O, layers(pair)[1], "A")
    with _wire(pair, lambda ts: ts | {name: ts[name].T.contiguous()}):
        yield place_of(name)


@fault("wire", *SENT)
def a_and_b_exchanged(pair: Pair) -> Iterator[Place]:
    """A and B of one projection are sent under each other's name."""
    a, b = (_name(pair, Role.SHARED_DOWN, layers(pair)[2], side) for side in "AB")
    with _wire(pair, lambda ts: ts | {a: ts[b], b: ts[a]}):
        yield place_of(a)


@fault("wire", *SENT)
def alpha_twice(pair: Pair) -> Iterator[Place]:
    """alpha / rank is applied to every B once more, here as a factor of 2."""
    with _wire(pair, lambda ts: {n: t * 2 if parse_name(n)[1] == "B" else t for n, t in ts.items()}):
        yield Place()


@fault("wire", *SENT)
def masters_truncated(pair: Pair) -> Iterator[Place]:
    """Masters are cut to bf16 instead of rounded."""

    def cut(pair: Pair) -> Tensors:
        scale = pair.trainer.module.settings.scale
        scaled = {n: t * (scale if parse_name(n)[1] == "B" else 1.0) for n, t in pair.trainer.masters().items()}
        return {n: (t.view(torch.int32) & -65536).view(torch.float32).bfloat16() for n, t in scaled.items()}

    with _wire(pair, lambda ts: cut(pair)):
        yield Place(layer=0)


@fault("wire", *SENT)
def export_one_step_late(pair: Pair) -> Iterator[Place]:
    """The export holds the weights of the step before under the new version."""
    before, _ = pair.trainer.export()
    with _wire(pair, lambda ts: before):
        yield Place(layer=0)


@fault("wire", *SENT)
def empty_adapter(pair: Pair) -> Iterator[Place]:
    """All B are zero: the adapter arrives and does nothing."""
    with _wire(pair, lambda ts: {n: torch.zeros_like(t) if parse_name(n)[1] == "B" else t for n, t in ts.items()}):
        yield Place(layer=0)


@fault("wire", *SENT)
def one_row_gathered(pair: Pair) -> Iterator[Place]:
    """Of one B only the rows of the first shard are gathered; the others are zero."""
    name = _name(pair, Role.ATTN_Q, layers(pair)[1], "B")

    def change(ts: Tensors) -> Tensors:
        t = ts[name].clone()
        t[len(t) // 8 :] = 0
        return ts | {name: t}

    with _wire(pair, change):
        yield place_of(name)


@fault("wire", *SENT)
def flipped_byte(pair: Pair) -> Iterator[Place]:
    """One bit of one tensor changes before the manifest is made."""
    name = _name(pair, Role.EXPERT_DOWN, layers(pair)[2], "B", expert(pair))

    def change(ts: Tensors) -> Tensors:
        t = ts[name].clone()
        t.view(torch.int16)[1, 3] ^= 1
        return ts | {name: t}

    with _wire(pair, change):
        yield place_of(name)


@fault("wire", *SENT)
def old_version_number(pair: Pair) -> Iterator[Place]:
    """New weights travel under the version number before."""
    with _wire(pair, lambda ts: ts, lambda said: said | {"version": said["version"] - 1}):
        yield Place()


@fault("wire", *SENT)
def other_numerics(pair: Pair) -> Iterator[Place]:
    """The trainer computes with another numerics profile than the engine."""
    with _wire(pair, lambda ts: ts, lambda said: said | {"profile": "0" * len(said["profile"])}):
        yield Place()

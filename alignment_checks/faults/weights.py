"""Faults in buffers: base weights of engine or trainer that are not the checkpoint's, and adapters that changed after they arrived."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

import samebits.rollout.adapter as engine_adapter
from samebits.alignment_checks.adapters import place_of
from samebits.alignment_checks.pair import Pair, PairError
from samebits.alignment_checks.report import Place
from samebits.kernels.expert_tiles import expert_of, pack_experts
from samebits.kernels.linear_tiles import pack_linear
from samebits.quant import layouts, mxfp8, nvfp4
from samebits.quant.adapter import tensor_name
from samebits.quant.mxfp8 import MXFP8Tensor
from samebits.quant.nvfp4 import NVFP4Tensor
from samebits.quant.roles import ModuleId, Role
from samebits.rollout.slot_plan import slots_of, views_of

from .base import engine_layer, expert, fault, layers, replaced


@contextmanager
def _changed(buffer: Tensor, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """`buffer` holds `change` of itself inside the block."""
    with torch.no_grad():
        before = buffer.detach().clone()
        buffer.data.copy_(change(before.clone()))
    try:
        yield
    finally:
        with torch.no_grad():
            buffer.data.copy_(before)


def _experts(pair: Pair, layer: int):
    return engine_layer(pair, layer).block_sparse_moe.experts


def _expert_name(layer: int, number: int, which: str) -> str:
    return f"model.layers.{layer}.block_sparse_moe.experts.{number}.{which}"


@contextmanager
def _expert_holds(pair: Pair, layer: int, number: int, which: str, change: Callable[[NVFP4Tensor], NVFP4Tensor]) -> Iterator[Place]:
    """The engine holds `change` of the checkpoint's matrix, as values or as tiles, whichever it multiplies."""
    name, experts = _expert_name(layer, number, which), _experts(pair, layer)
    stored = pair.checkpoint.weight(name)
    wrong = change(stored)
    held = experts.w2 if which == "w2" else experts.w13
    half = slice(None) if which == "w2" else slice(0, len(stored.codes)) if which == "w1" else slice(len(stored.codes), None)
    if isinstance(held, Tensor):
        with _changed(held.data[number][half], lambda w: nvfp4.dequantize(wrong)):
            yield place_of(name)
        return
    if not torch.equal(wrong.global_scale, stored.global_scale) and which != "w2":
        raise PairError("this engine keeps one global scale for w1 and w3 of an expert: it cannot hold two")
    whole = expert_of(held, number)
    parts = [part.clone() for part in whole]
    for part, other in zip(parts[:2], wrong[:2], strict=True):
        part[half] = other.to(part.device)
    parts[2] = wrong.global_scale.reshape(whole.global_scale.shape).to(parts[2].device)
    tiles = pack_experts(NVFP4Tensor(*(part[None] for part in parts)))
    with ExitStack() as stack:
        for part, other in zip(held[:3], tiles[:3], strict=True):
            stack.enter_context(_changed(part[number], lambda w, other=other: other[0]))
        yield place_of(name)


@contextmanager
def _expert_values(pair: Pair, layer: int, number: int, which: str, change: Callable[[Tensor], Tensor]) -> Iterator[Place]:
    """`change` of the values: only where the engine keeps values."""
    held = _experts(pair, layer).w2 if which == "w2" else _experts(pair, layer).w13
    if not isinstance(held, Tensor):
        raise PairError("this engine keeps its experts packed: the fault takes one that keeps values")
    rows = held.data[number] if which == "w2" else held.data[number].chunk(2)[0 if which == "w1" else 1]
    with _changed(rows, change):
        yield place_of(_expert_name(layer, number, which))


@fault("weights", "weights.base")
def base_changed(pair: Pair) -> Iterator[Place]:
    """One element of one expert's base weight changes in the engine."""

    def change(t: NVFP4Tensor) -> NVFP4Tensor:
        codes = t.codes.clone()
        codes[3, 5] ^= 0x20
        return t._replace(codes=codes)

    with _expert_holds(pair, layers(pair)[1], expert(pair), "w2", change) as place:
        yield place


@fault("weights", "weights.base")
def base_requantized(pair: Pair) -> Iterator[Place]:
    """An expert is quantized again from 16-bit values of its quantized weights."""

    def change(t: NVFP4Tensor) -> NVFP4Tensor:
        return nvfp4.quantize((nvfp4.dequantize(t) * 0.97).bfloat16(), t.global_scale)

    with _expert_holds(pair, layers(pair)[2], expert(pair), "w3", change) as place:
        yield place


@fault("weights", "weights.base")
def base_in_bf16(pair: Pair) -> Iterator[Place]:
    """The engine keeps dequantized experts in bf16, which has not enough bits for code times scales."""
    with _expert_values(pair, layers(pair)[1], expert(pair), "w2", lambda w: w.bfloat16().float()) as place:
        yield place


@fault("weights", "weights.base")
def global_scale_of_one_half(pair: Pair) -> Iterator[Place]:
    """w1 and w3 had different global scales and the engine takes w1's for both without rescaling."""
    with _expert_values(pair, layers(pair)[1], expert(pair), "w3", lambda w: w * (4.83 / 3.85)) as place:
        yield place


@fault("weights", "weights.base")
def block_scales_swizzled(pair: Pair) -> Iterator[Place]:
    """Block scales are stored swizzled and read as if they were linear."""

    def change(t: NVFP4Tensor) -> NVFP4Tensor:
        n, blocks = t.block_scales.shape
        return t._replace(block_scales=layouts.swizzle(t.block_scales).reshape(-1)[: n * blocks].reshape(n, blocks))

    with _expert_holds(pair, layers(pair)[2], expert(pair), "w2", change) as place:
        yield place


@fault("weights", "weights.base")
def nibbles_exchanged(pair: Pair) -> Iterator[Place]:
    """The two codes of a byte are read in the other order."""

    def change(t: NVFP4Tensor) -> NVFP4Tensor:
        return t._replace(codes=(t.codes >> 4) | (t.codes << 4))

    with _expert_holds(pair, layers(pair)[1], expert(pair), "w2", change) as place:
        yield place


@fault("weights", "weights.base")
def tie_rounded_away(pair: Pair) -> Iterator[Place]:
    """The packer rounds ties away from zero: a code that was a tie is one higher."""

    def change(t: NVFP4Tensor) -> NVFP4Tensor:
        codes = t.codes.clone()
        row, column = (codes & 7 == 2).nonzero()[0].tolist()
        codes[row, column] += 1
        return t._replace(codes=codes)

    with _expert_holds(pair, layers(pair)[1], expert(pair), "w2", change) as place:
        yield place


@contextmanager
def _projection_holds(pair: Pair, layer: int, change: Callable[[MXFP8Tensor], MXFP8Tensor]) -> Iterator[Place]:
    """The engine's o_proj of a layer is `change` of the checkpoint's."""
    name, held = f"model.layers.{layer}.self_attn.o_proj", engine_layer(pair, layer).self_attn.o_proj
    wrong = change(pair.checkpoint.weight(name))
    with ExitStack() as stack:
        if held.tiles is None:
            stack.enter_context(_changed(held.weight, lambda w: mxfp8.dequantize(wrong)))
        else:
            for part, other in zip(held.tiles[:2], pack_linear(wrong)[:2], strict=True):
                stack.enter_context(_changed(part, lambda w, other=other: other))
        yield place_of(name)


@fault("weights", "weights.base")
def mxfp8_exponent_floored(pair: Pair) -> Iterator[Place]:
    """MXFP8 exponents are rounded down, so that the largest elements saturate."""

    def change(t: MXFP8Tensor) -> MXFP8Tensor:
        values = mxfp8.dequantize(t)
        blocks = values.reshape(-1, mxfp8.BLOCK)
        exponent = torch.floor(torch.log2(blocks.abs().amax(1, keepdim=True).clamp_min(1e-30))) - 8
        codes = (blocks / torch.exp2(exponent)).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        exponents = (exponent + 127).clamp(0, 254).to(torch.uint8)
        return MXFP8Tensor(codes.reshape(t.codes.shape), exponents.reshape(t.exponents.shape))

    with _projection_holds(pair, layers(pair)[1], change) as place:
        yield place


@fault("weights", "weights.base")
def mxfp8_exponent_off_by_one(pair: Pair) -> Iterator[Place]:
    """An exponent bias of 128 instead of 127: every value is doubled."""
    with _projection_holds(pair, layers(pair)[0], lambda t: t._replace(exponents=t.exponents + 1)) as place:
        yield place


@fault("weights", "weights.base")
def base_experts_offset(pair: Pair) -> Iterator[Place]:
    """The engine loads the experts of the next expert-parallel rank."""
    layer = layers(pair)[2]
    held = _experts(pair, layer).w2
    with ExitStack() as stack:
        for part in (held,) if isinstance(held, Tensor) else held[:3]:
            stack.enter_context(_changed(part, lambda w: w.roll(-1, 0)))
        yield Place(layer=layer, expert=0)


@fault("weights", "weights.base")
def router_bias_dropped(pair: Pair) -> Iterator[Place]:
    """The bias of the router's choice is not loaded."""
    layer = layers(pair)[1]
    with _changed(engine_layer(pair, layer).block_sparse_moe.e_score_correction_bias, lambda b: torch.zeros_like(b) - (b == 0).float()):
        yield Place(layer=layer)


@fault("weights", "weights.base")
def stale_head(pair: Pair) -> Iterator[Place]:
    """A cached copy of the output head is older than the model."""
    with _changed(pair.replicas[0].model.lm_head.weight, lambda w: w * 1.01):
        yield Place(tensor="lm_head")


@fault("weights", "weights.base")
def uninitialized_weight(pair: Pair) -> Iterator[Place]:
    """A weight was never loaded and holds what memory held."""
    layer = layers(pair)[0]
    with _changed(engine_layer(pair, layer).post_attention_layernorm.weight, lambda w: torch.full_like(w, float("nan"))):
        yield Place(layer=layer, tensor=f"model.layers.{layer}.post_attention_layernorm")


@fault("weights", "weights.base")
def trainer_base_changed(pair: Pair) -> Iterator[Place]:
    """One byte, or word of tiles, of the trainer's packed base changes."""
    layer, number = layers(pair)[2], expert(pair)
    codes = pair.trainer.module.layers[layer].mlp.w2.codes
    local = codes.to_local() if hasattr(codes, "to_local") else codes

    def change(w: Tensor) -> Tensor:
        w[number].view(-1)[7] ^= 0x11
        return w

    with _changed(local, change):
        yield place_of(_expert_name(layer, number, "w2"))


@contextmanager
def _after_load(pair: Pair, change: Callable[[dict[str, Tensor]], None]) -> Iterator[None]:
    """`change` works on the engine's own views of an adapter right after it was loaded."""
    original = engine_adapter.load

    def load(model, tensors, version):
        original(model, tensors, version)
        change(views_of(model, slots_of(model).slot(engine_adapter.adapter_id(version))))

    with replaced(engine_adapter, "load", load):
        yield


@fault("weights", "weights.held")
def adapter_changed_in_memory(pair: Pair) -> Iterator[Place]:
    """One element of the adapter changes in the engine after the transfer."""
    layer, number = layers(pair)[1], expert(pair)
    name = tensor_name(ModuleId(Role.EXPERT_UP, layer, number), "A")

    def change(views: dict[str, Tensor]) -> None:
        views[name][1, 2] *= -1

    with _after_load(pair, change):
        yield place_of(name)


@fault("weights", "weights.held")
def expert_not_loaded(pair: Pair) -> Iterator[Place]:
    """The engine accepts an adapter and loads one expert less."""
    layer, number = layers(pair)[2], expert(pair)
    names = [tensor_name(ModuleId(role, layer, number), s) for role in (Role.EXPERT_GATE, Role.EXPERT_UP, Role.EXPERT_DOWN) for s in "AB"]

    def change(views: dict[str, Tensor]) -> None:
        for name in names:
            views[name].zero_()

    with _after_load(pair, change):
        yield Place(layer=layer, expert=number)


@fault("weights", "weights.held")
def adapter_scaled_in_engine(pair: Pair) -> Iterator[Place]:
    """The engine applies alpha / rank to B although it is folded in already."""

    def change(views: dict[str, Tensor]) -> None:
        for name, view in views.items():
            if ".lora_B." in name:
                view *= 0.5

    with _after_load(pair, change):
        yield Place(layer=0)

"""Faults in buffers: base weights of engine or trainer that are not the checkpoint's, and adapters that changed after they arrived."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

import samebits.rollout.adapter as engine_adapter
from samebits.alignment_checks.adapters import place_of
from samebits.alignment_checks.pair import Pair
from samebits.alignment_checks.report import Place
from samebits.quant import layouts, mxfp8, nvfp4
from samebits.quant.adapter import tensor_name
from samebits.quant.mxfp8 import MXFP8Tensor
from samebits.quant.roles import ModuleId, Role

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


def _up(pair: Pair, layer: int, number: int) -> Tensor:
    return _experts(pair, layer).w13.data[number].chunk(2)[1]


@fault("weights", "weights.base")
def base_changed(pair: Pair) -> Iterator[Place]:
    """One element of one expert's base weight changes in the engine."""
    layer, number = layers(pair)[1], expert(pair)

    def change(w: Tensor) -> Tensor:
        w[3, 5] = w[3, 5] + 1.0
        return w

    with _changed(_experts(pair, layer).w2.data[number], change):
        yield place_of(_expert_name(layer, number, "w2"))


@fault("weights", "weights.base")
def base_requantized(pair: Pair) -> Iterator[Place]:
    """An expert is quantized again from 16-bit values of its quantized weights, with a scale of its own."""
    layer, number = layers(pair)[2], expert(pair)
    with _changed(_up(pair, layer, number), lambda w: nvfp4.dequantize(nvfp4.quantize((w * 0.97).bfloat16()))):
        yield place_of(_expert_name(layer, number, "w3"))


@fault("weights", "weights.base")
def base_in_bf16(pair: Pair) -> Iterator[Place]:
    """The engine keeps dequantized experts in bf16, which has not enough bits for code times scales."""
    layer, number = layers(pair)[1], expert(pair)
    with _changed(_experts(pair, layer).w2.data[number], lambda w: w.bfloat16().float()):
        yield place_of(_expert_name(layer, number, "w2"))


@fault("weights", "weights.base")
def global_scale_of_one_half(pair: Pair) -> Iterator[Place]:
    """w1 and w3 had different global scales and the engine takes w1's for both without rescaling."""
    layer, number = layers(pair)[1], expert(pair)
    with _changed(_up(pair, layer, number), lambda w: w * (4.83 / 3.85)):
        yield place_of(_expert_name(layer, number, "w3"))


@fault("weights", "weights.base")
def block_scales_swizzled(pair: Pair) -> Iterator[Place]:
    """Block scales are stored swizzled and read as if they were linear."""
    layer, number = layers(pair)[2], expert(pair)
    name = _expert_name(layer, number, "w2")
    stored = pair.checkpoint.weight(name)
    n, blocks = stored.block_scales.shape
    wrong = layouts.swizzle(stored.block_scales).reshape(-1)[: n * blocks].reshape(n, blocks)
    with _changed(_experts(pair, layer).w2.data[number], lambda w: nvfp4.dequantize(stored._replace(block_scales=wrong))):
        yield place_of(name)


@fault("weights", "weights.base")
def nibbles_exchanged(pair: Pair) -> Iterator[Place]:
    """The two codes of a byte are read in the other order."""
    layer, number = layers(pair)[1], expert(pair)
    name = _expert_name(layer, number, "w2")
    stored = pair.checkpoint.weight(name)
    wrong = stored._replace(codes=(stored.codes >> 4) | (stored.codes << 4))
    with _changed(_experts(pair, layer).w2.data[number], lambda w: nvfp4.dequantize(wrong)):
        yield place_of(name)


@fault("weights", "weights.base")
def tie_rounded_away(pair: Pair) -> Iterator[Place]:
    """The packer rounds ties away from zero: a code that was a tie is one higher."""
    layer, number = layers(pair)[1], expert(pair)
    name = _expert_name(layer, number, "w2")
    stored = pair.checkpoint.weight(name)
    codes = stored.codes.clone()
    row, column = (codes & 7 == 2).nonzero()[0].tolist()
    codes[row, column] += 1
    with _changed(_experts(pair, layer).w2.data[number], lambda w: nvfp4.dequantize(stored._replace(codes=codes))):
        yield place_of(name)


def _mxfp8_layer(pair: Pair, layer: int) -> tuple[str, Tensor]:
    """Name and engine buffer of the o_proj of a layer."""
    return f"model.layers.{layer}.self_attn.o_proj", engine_layer(pair, layer).self_attn.o_proj.weight


@fault("weights", "weights.base")
def mxfp8_exponent_floored(pair: Pair) -> Iterator[Place]:
    """MXFP8 exponents are rounded down, so that the largest elements saturate."""
    name, buffer = _mxfp8_layer(pair, layers(pair)[1])

    def change(w: Tensor) -> Tensor:
        blocks = w.reshape(-1, mxfp8.BLOCK)
        exponent = torch.floor(torch.log2(blocks.abs().amax(1, keepdim=True).clamp_min(1e-30))) - 8
        scale = torch.exp2(exponent)
        return ((blocks / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale).reshape(w.shape)

    with _changed(buffer, change):
        yield place_of(name)


@fault("weights", "weights.base")
def mxfp8_exponent_off_by_one(pair: Pair) -> Iterator[Place]:
    """An exponent bias of 128 instead of 127: every value is doubled."""
    name, buffer = _mxfp8_layer(pair, layers(pair)[0])
    stored: MXFP8Tensor = pair.checkpoint.weight(name)
    with _changed(buffer, lambda w: mxfp8.dequantize(stored._replace(exponents=stored.exponents + 1))):
        yield place_of(name)


@fault("weights", "weights.base")
def base_experts_offset(pair: Pair) -> Iterator[Place]:
    """The engine loads the experts of the next expert-parallel rank."""
    layer = layers(pair)[2]
    with _changed(_experts(pair, layer).w2, lambda w: w.roll(-1, 0)):
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
    with _changed(pair.replicas[0].model.lm_head.weight, lambda w: w * 1.001):
        yield Place(tensor="lm_head")


@fault("weights", "weights.base")
def uninitialized_weight(pair: Pair) -> Iterator[Place]:
    """A weight was never loaded and holds what memory held."""
    layer = layers(pair)[0]
    with _changed(engine_layer(pair, layer).post_attention_layernorm.weight, lambda w: torch.full_like(w, float("nan"))):
        yield Place(layer=layer, tensor=f"model.layers.{layer}.post_attention_layernorm")


@fault("weights", "weights.base")
def trainer_base_changed(pair: Pair) -> Iterator[Place]:
    """One byte of the trainer's packed base changes."""
    layer, number = layers(pair)[2], expert(pair)
    codes = pair.trainer.module.layers[layer].mlp.w2.codes
    local = codes.to_local() if hasattr(codes, "to_local") else codes

    def change(w: Tensor) -> Tensor:
        w[number].view(-1)[5] ^= 0x11  # a byte of codes, or a word of them in the order of the Hopper kernels
        return w

    with _changed(local, change):
        yield place_of(_expert_name(layer, number, "w2"))


@contextmanager
def _after_load(pair: Pair, change: Callable[[dict[str, Tensor]], None]) -> Iterator[None]:
    """`change` works on the engine's own views of an adapter right after it was loaded."""
    original = engine_adapter.load

    def load(model, tensors, version):
        original(model, tensors, version)
        slot = engine_adapter._slots(model).slot(engine_adapter.adapter_id(version))
        change(engine_adapter._views(model, slot))

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

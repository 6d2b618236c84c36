"""Faults in the serving model, in how requests reach an adapter, and in vLLM's sampler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

import samebits.rollout.model as engine_model
from samebits.alignment_checks.pair import Pair
from samebits.alignment_checks.report import Place
from samebits.kernels.linear import LoRA
from samebits.kernels.linear_tiles import pack_linear, unpack_linear
from samebits.kernels.moe import route_topk
from samebits.kernels.rope import apply_rope, rope_table
from samebits.rollout import pages
from samebits.rollout.slots import AdapterSlots, ExpertsAdapter, ProjectionAdapter

from .base import engine_layer, fault, layers, on_pages, replaced

OPERATIONS = ("logprobs.operations", "logprobs.generated", "logprobs.reference")


def _adapter_slots(pair: Pair) -> AdapterSlots:
    return next(iter(pair.replicas[0].model.adapters())).slots


@fault("engine", "weights.effect", "weights.isolation")
def adapter_not_selected(pair: Pair) -> Iterator[Place]:
    """Requests name the adapter, but the step runs on the base."""
    with replaced(AdapterSlots, "select", lambda self, lora, tokens: (None, None)):
        yield Place()


@fault("engine", "weights.effect")
def expert_adapter_ignored(pair: Pair) -> Iterator[Place]:
    """The adapter of the experts is accepted and never multiplied."""
    with replaced(ExpertsAdapter, "select", lambda self, tokens: (None, None)):
        yield Place(tensor="expert.gate")


@fault("engine", "weights.effect", "logprobs.operations")
def projection_adapter_ignored(pair: Pair) -> Iterator[Place]:
    """The adapter of one projection of one layer is accepted and never added."""
    layer = layers(pair)[1]
    with replaced(engine_layer(pair, layer).self_attn.o_proj, "adapter", _Inert(engine_layer(pair, layer).self_attn.o_proj.adapter)):
        yield Place(layer=layer, tensor=f"model.layers.{layer}.self_attn.o_proj")


class _Inert:
    """An adapter that is held and not added."""

    def __init__(self, adapter: ProjectionAdapter) -> None:
        self.adapter, self.slots = adapter, adapter.slots

    def add(self, out: Tensor, x: Tensor) -> Tensor:
        """`out` as it is."""
        return out

    def select(self, tokens: int) -> tuple[None, None]:
        """Nothing for the kernels to add."""
        return None, None

    def views(self, slot: int) -> Any:
        """What is held."""
        return self.adapter.views(slot)

    def places(self) -> Any:
        """Where."""
        return self.adapter.places()


@fault("engine", "weights.effect", *OPERATIONS)
def delta_added_twice(pair: Pair) -> Iterator[Place]:
    """The adapter's delta is summed over ranks that all hold the whole of it."""
    add, select, select_pairs = ProjectionAdapter.add, ProjectionAdapter.select, ProjectionAdapter.select_pairs

    def doubled(pair: LoRA | None) -> LoRA | None:
        return None if pair is None else LoRA(pair.a, pair.b * 2)

    def selected(self: ProjectionAdapter, tokens: int) -> tuple[LoRA | None, Tensor | None]:
        chosen, ids = select(self, tokens)
        return doubled(chosen), ids

    def selected_pairs(self: ProjectionAdapter, tokens: int) -> tuple[list[LoRA | None], Tensor | None]:
        chosen, ids = select_pairs(self, tokens)
        return [doubled(one) for one in chosen], ids

    with ExitStack() as stack:
        # Sums in torch add a delta; kernels are given what to add.
        stack.enter_context(replaced(ProjectionAdapter, "add", lambda self, out, x: add(self, add(self, out, x), x)))
        stack.enter_context(replaced(ProjectionAdapter, "select", selected))
        stack.enter_context(replaced(ProjectionAdapter, "select_pairs", selected_pairs))
        yield Place(layer=0)


@fault("engine", "weights.isolation")
def base_requests_adapted(pair: Pair) -> Iterator[Place]:
    """Requests for the base get the adapter that is loaded."""
    original = AdapterSlots.set_tokens

    def set_tokens(self, adapter_ids) -> None:
        resident = [i for i in self.occupants if i is not None]
        original(self, [i if i > 0 or not resident else resident[-1] for i in adapter_ids])

    with replaced(AdapterSlots, "set_tokens", set_tokens):
        yield Place(replica=0)


@fault("engine", "weights.held")
def adapters_leak(pair: Pair) -> Iterator[Place]:
    """Old adapter versions are never removed."""
    with replaced(AdapterSlots, "release", lambda self, adapter_id: False):
        yield Place(replica=0)


@fault("engine", "weights.prefix_cache")
def stale_prefix_cache(pair: Pair) -> Iterator[Place]:
    """The prefix cache keeps keys and values of the adapter before."""
    with replaced(type(pair.replicas[0]), "drop_prefix_cache", lambda self: None):
        yield Place(replica=0)


@fault("engine", *OPERATIONS)
def router_in_bf16(pair: Pair) -> Iterator[Place]:
    """Router logits are computed in bf16."""
    original = engine_model.frozen_linear

    def low(x: Tensor, weight: Tensor) -> Tensor:
        return original(x.bfloat16().float(), weight.bfloat16().float()).bfloat16().float()

    with replaced(engine_model, "frozen_linear", low):
        layer = layers(pair)[1]
        yield Place(layer=layer, tensor=f"model.layers.{layer}.block_sparse_moe.gate")


@contextmanager
def _routing(change: Callable[[Tensor, Tensor, int, float], tuple[Tensor, Tensor]]) -> Iterator[None]:
    with replaced(engine_model, "route_topk", change):
        yield


@fault("engine", *OPERATIONS)
def router_weights_biased(pair: Pair) -> Iterator[Place]:
    """Experts are weighted by the scores with the bias that is meant for the choice alone."""

    def biased(logits: Tensor, bias: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor]:
        ids, _ = route_topk(logits, bias, k, scale)
        scores = (torch.sigmoid(logits.float()) + bias + 0.1).gather(-1, ids)
        return ids, scores / scores.sum(-1, keepdim=True) * scale

    with _routing(biased):
        layer = layers(pair)[1]
        yield Place(layer=layer, tensor=f"model.layers.{layer}.block_sparse_moe.weights")


@fault("engine", *OPERATIONS)
def router_not_normalised(pair: Pair) -> Iterator[Place]:
    """Weights of the chosen experts are not normalised."""

    def plain(logits: Tensor, bias: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor]:
        ids, _ = route_topk(logits, bias, k, scale)
        return ids, torch.sigmoid(logits.float()).gather(-1, ids) * scale

    with _routing(plain):
        layer = layers(pair)[1]
        yield Place(layer=layer, tensor=f"model.layers.{layer}.block_sparse_moe.weights")


@fault("engine", *OPERATIONS)
def router_softmax(pair: Pair) -> Iterator[Place]:
    """The router scores with a softmax instead of a sigmoid."""

    def softmax(logits: Tensor, bias: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor]:
        scores = logits.float().softmax(-1)
        ids = (scores + bias).topk(k, -1).indices.sort(-1).values
        chosen = scores.gather(-1, ids)
        return ids, chosen / chosen.sum(-1, keepdim=True) * scale

    with _routing(softmax):
        yield Place(layer=layers(pair)[1])


@fault("engine", *OPERATIONS)
def routed_scale_missing(pair: Pair) -> Iterator[Place]:
    """The routed scaling factor is not applied in one layer."""
    layer = layers(pair)[2]
    with replaced(engine_layer(pair, layer).block_sparse_moe, "scale", 1.0):
        yield Place(layer=layer, tensor=f"model.layers.{layer}.block_sparse_moe.weights")


@fault("engine", *OPERATIONS)
def shared_expert_missing(pair: Pair) -> Iterator[Place]:
    """The shared expert of one layer adds nothing."""
    layer = layers(pair)[1]
    shared = engine_layer(pair, layer).block_sparse_moe.shared_experts
    place = Place(layer=layer, tensor=f"model.layers.{layer}.block_sparse_moe.shared_experts.activation")
    if shared.gate_up_proj.tiles is None:
        with replaced(shared, "forward", lambda x: torch.zeros_like(x)):
            yield place
        return
    # One operation with the routed experts: gate and up of zeros give nothing.
    packed = unpack_linear(shared.gate_up_proj.tiles)
    nothing = pack_linear(packed._replace(codes=torch.zeros_like(packed.codes)))
    on_tiles = shared.on_tiles
    with replaced(shared, "on_tiles", lambda tokens: on_tiles(tokens)._replace(gate_up=nothing, lora=None)):
        yield place


@contextmanager
def _activation(module: Any, **change: float) -> Iterator[None]:
    with replaced(module, "activation", module.activation._replace(**change)):
        yield


@fault("engine", *OPERATIONS)
def swiglu_beta_missing(pair: Pair) -> Iterator[Place]:
    """SwiGLU-OAI without the 1 that is added to the up half."""
    layer = layers(pair)[0]
    with _activation(engine_layer(pair, layer).mlp, beta=0.0):
        yield Place(layer=layer, tensor=f"model.layers.{layer}.mlp.activation")


@fault("engine", *OPERATIONS)
def swiglu_alpha_one(pair: Pair) -> Iterator[Place]:
    """The experts' activation is a plain SiLU."""
    layer = layers(pair)[1]
    with _activation(engine_layer(pair, layer).block_sparse_moe.experts, alpha=1.0):
        yield Place(layer=layer, tensor=f"model.layers.{layer}.block_sparse_moe.experts")


@fault("engine", *OPERATIONS)
def norm_without_one(pair: Pair) -> Iterator[Place]:
    """A Gemma norm multiplies with w instead of 1 + w."""
    layer = layers(pair)[0]
    norm = engine_layer(pair, layer).input_layernorm
    forward = norm.forward

    def plain(x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        out, total = forward(x, residual)
        return out / (1 + norm.weight) * norm.weight, total

    with replaced(norm, "forward", plain):
        yield Place(layer=layer, tensor=f"model.layers.{layer}.input_layernorm")


@fault("engine", *OPERATIONS)
def query_norm_missing(pair: Pair) -> Iterator[Place]:
    """Queries of one layer are not normed by head."""
    layer = layers(pair)[1]
    attention, place = engine_layer(pair, layer).self_attn, Place(layer=layer, tensor=f"model.layers.{layer}.self_attn.q")
    if not on_pages(pair):
        with replaced(attention.q_norm, "forward", lambda x: x):
            yield place
        return
    by_kernels = pages.kv_insert

    def insert(q, k, v, index_q, index_k, norms, table, position, slots, main, index):  # type: ignore[no-untyped-def]
        out, index_out = by_kernels(q, k, v, index_q, index_k, norms, table, position, slots, main, index)
        if main is attention.attn.main:
            cos, sin = (rows[position.clamp_min(0).long()] for rows in table)
            out = apply_rope(q, cos, sin).to(out.dtype)
        return out, index_out

    with replaced(pages, "kv_insert", insert):
        yield place


@contextmanager
def _tables(pair: Pair, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Iterator[None]:
    model = pair.replicas[0].model.model
    before = model.cos.clone(), model.sin.clone()
    for buffer, value in zip((model.cos, model.sin), change(*before), strict=True):
        buffer.copy_(value)
    try:
        yield
    finally:
        for buffer, value in zip((model.cos, model.sin), before, strict=True):
            buffer.copy_(value)


@fault("engine", *OPERATIONS)
def rope_base_default(pair: Pair) -> Iterator[Place]:
    """Rotary embedding with another base frequency than the model's."""
    dims = pair.trainer.dims
    with _tables(pair, lambda cos, sin: rope_table(len(cos), dims.rotary_dim, dims.rope_theta * 3, cos.device)):
        yield Place(layer=0, tensor="model.layers.0.self_attn.q")


@fault("engine", *OPERATIONS)
def positions_from_one(pair: Pair) -> Iterator[Place]:
    """Positions start at 1, which only a wrong mixture of tables shows: cosines are shifted, sines are not."""
    with _tables(pair, lambda cos, sin: (cos.roll(-1, 0), sin)):
        yield Place(layer=0, tensor="model.layers.0.self_attn.q")


@fault("engine", "logprobs.variants")
def rounding_by_batch(pair: Pair) -> Iterator[Place]:
    """A large batch is computed in another precision than a small one."""
    layer = layers(pair)[0]
    mlp = engine_layer(pair, layer).mlp
    original = mlp.forward
    with replaced(mlp, "forward", lambda x: original(x.to(torch.float8_e4m3fn).to(x.dtype) if len(x) > 1500 else x)):
        yield Place()


def _sampler(pair: Pair) -> Any:
    core = pair.replicas[0].llm.llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.worker.model_runner.sampler


@fault("engine", "logprobs.temperature")
def raw_logprobs(pair: Pair) -> Iterator[Place]:
    """The engine returns logprobs of the logits before the temperature."""
    sampler = _sampler(pair)
    with ExitStack() as stack:
        stack.enter_context(replaced(sampler, "logprobs_mode", "raw_logprobs"))
        if (inner := getattr(sampler, "topk_topp_sampler", None)) is not None:  # vLLM's V1 runner; the V2 runner of GPUs has none
            stack.enter_context(replaced(inner, "logprobs_mode", "raw_logprobs"))
        yield Place()


@fault("engine", "logprobs.temperature")
def temperature_twice(pair: Pair) -> Iterator[Place]:
    """The engine divides the logits by the temperature twice."""
    sampler = _sampler(pair)
    owner = getattr(sampler, "sampling_states", sampler)  # where the V2 runner of GPUs has it, dividing in place
    original = owner.apply_temperature

    def twice(logits: Tensor, *rest: Any) -> Tensor | None:
        once = original(logits, *rest)
        return original(logits if once is None else once, *rest)

    with replaced(owner, "apply_temperature", twice):
        yield Place()


@fault("engine", "logprobs.generated")
def top_p_below_one(pair: Pair) -> Iterator[Place]:
    """The engine samples with top-p 0.9: its logprobs are renormalised over the tokens that were kept."""
    with replaced(type(pair.replicas[0]), "sampling", {"top_p": 0.9}):
        yield Place()


@fault("engine", "logprobs.generated")
def token_banned(pair: Pair) -> Iterator[Place]:
    """The engine never samples some tokens and renormalises over the rest."""
    model = pair.replicas[0].model
    with replaced(model, "_forbidden", torch.arange(3, pair.vocabulary, 2, device=model.lm_head.weight.device)):
        yield Place()

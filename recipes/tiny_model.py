"""A MiniMax-M3-shaped model small enough to train from nothing on a laptop: the dense, differentiable twin of what trainer and engine run.

Same semantics as `kernels` (its norm, rotary embedding, activation and router are called, not rewritten), but every weight is dense
and trainable, and attention is PyTorch's. Sequences stay below one block of 128 keys, where MSA attends to the whole prefix; so the
indexer plays no part here. Weights are a flat dictionary; the experts of a layer are stacked as `experts.w1`, `.w2` and `.w3`
[E, N, K], every other name is the checkpoint's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from samebits.kernels.activation import SwiGLU, swiglu_oai
from samebits.kernels.moe import route_topk
from samebits.kernels.norm import gemma_rms_norm
from samebits.kernels.rope import apply_rope, rope_table

ACTIVATION = SwiGLU()
EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the tiny model."""

    vocab: int = 64
    hidden: int = 128
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 128
    rotary_dim: int = 64
    experts: int = 8
    top_k: int = 2
    intermediate: int = 128
    dense: int = 256
    topk_blocks: int = 4
    routed_scaling: float = 2.0
    rope_theta: float = 10000.0
    max_position: int = 4096

    @property
    def moe_layer_freq(self) -> list[int]:
        """1 for each layer with routed experts and sparse attention; the first is dense."""
        return [0] + [1] * (self.layers - 1)


Weights = dict[str, Tensor]


def initialise(sizes: Sizes, seed: int, device: torch.device | str = "cpu") -> Weights:
    """Random fp32 weights, by seed on one kind of device. Norms and router bias are zero; projections into the residual stream are
    scaled down by depth.
    """
    g = torch.Generator(device).manual_seed(seed)
    s = sizes

    def w(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=g, device=device) * (scale / math.sqrt(shape[-1]))

    def zeros(size: int) -> Tensor:
        return torch.zeros(size, device=device)

    out = 1 / math.sqrt(2 * s.layers)
    weights = {
        "model.embed_tokens.weight": torch.randn(s.vocab, s.hidden, generator=g, device=device) * 0.5,
        "lm_head.weight": w(s.vocab, s.hidden, scale=0.5),
        "model.norm.weight": zeros(s.hidden),
    }
    for layer, moe in enumerate(s.moe_layer_freq):
        p = f"model.layers.{layer}."
        a = p + "self_attn."
        weights |= {p + f"{n}.weight": zeros(s.hidden) for n in ("input_layernorm", "post_attention_layernorm")}
        weights |= {a + f"{n}.weight": zeros(s.head_dim) for n in ("q_norm", "k_norm")}
        weights |= {
            a + "q_proj.weight": w(s.heads * s.head_dim, s.hidden),
            a + "k_proj.weight": w(s.kv_heads * s.head_dim, s.hidden),
            a + "v_proj.weight": w(s.kv_heads * s.head_dim, s.hidden),
            a + "o_proj.weight": w(s.hidden, s.heads * s.head_dim, scale=out),
        }
        m = p + ("block_sparse_moe." if moe else "mlp.")
        mlp, width = (m + "shared_experts.", s.intermediate) if moe else (m, s.dense)
        weights |= {
            mlp + "gate_proj.weight": w(width, s.hidden),
            mlp + "up_proj.weight": w(width, s.hidden),
            mlp + "down_proj.weight": w(s.hidden, width, scale=out),
        }
        if moe:
            weights |= {
                m + "gate.weight": w(s.experts, s.hidden),
                m + "e_score_correction_bias": zeros(s.experts),
                m + "experts.w1": w(s.experts, s.intermediate, s.hidden),
                m + "experts.w2": w(s.experts, s.hidden, s.intermediate, scale=out),
                m + "experts.w3": w(s.experts, s.intermediate, s.hidden),
            }
    return weights


class Cache:
    """Keys and values of all layers for `rows` sequences of one length."""

    def __init__(self, sizes: Sizes, rows: int, length: int) -> None:
        shape = (sizes.layers, rows, sizes.kv_heads, length, sizes.head_dim)
        self.keys, self.values = torch.empty(shape), torch.empty(shape)
        self.length = 0


class TinyModel:
    """The forward pass over a dictionary of weights. `counts` holds the tokens of each expert [E] of the last `forward`, by layer."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.counts: dict[int, Tensor] = {}
        self._cos, self._sin = rope_table(128, sizes.rotary_dim, sizes.rope_theta)

    def forward(self, weights: Weights, ids: Tensor, cache: Cache | None = None) -> Tensor:
        """Logits fp32 [B, T, V] of `ids` int64 [B, T]; right padding is harmless. A cache that holds something takes one token more."""
        past = cache.length if cache else 0
        rows, length = ids.shape
        cos, sin = (t[past : past + length].repeat(rows, 1) for t in (self._cos, self._sin))
        x = weights["model.embed_tokens.weight"][ids].flatten(0, 1)
        for layer, moe in enumerate(self.sizes.moe_layer_freq):
            p = f"model.layers.{layer}."
            h = _norm(x, weights[p + "input_layernorm.weight"])
            x = x + self._attention(weights, p + "self_attn.", layer, h, rows, cos, sin, cache)
            h = _norm(x, weights[p + "post_attention_layernorm.weight"])
            x = x + (self._moe(weights, p + "block_sparse_moe.", layer, h) if moe else _mlp(weights, p + "mlp.", h))
        if cache:
            cache.length += length
        x = _norm(x, weights["model.norm.weight"])
        return F.linear(x, weights["lm_head.weight"]).unflatten(0, (rows, length))

    def _attention(
        self, weights: Weights, a: str, layer: int, h: Tensor, rows: int, cos: Tensor, sin: Tensor, cache: Cache | None
    ) -> Tensor:
        s = self.sizes
        q, k, v = (F.linear(h, weights[f"{a}{n}_proj.weight"]).unflatten(-1, (-1, s.head_dim)) for n in "qkv")
        q = apply_rope(_norm(q, weights[a + "q_norm.weight"]), cos, sin)
        k = apply_rope(_norm(k, weights[a + "k_norm.weight"]), cos, sin)
        q, k, v = (t.unflatten(0, (rows, -1)).transpose(1, 2) for t in (q, k, v))  # [B, heads, T, D]
        past = cache.length if cache else 0
        if cache:
            now = past + k.shape[2]
            cache.keys[layer, :, :, past:now], cache.values[layer, :, :, past:now] = k, v
        if past:  # one token, which sees everything: the query heads of a group stand where a sequence's queries would
            k, v = cache.keys[layer, :, :, :now], cache.values[layer, :, :, :now]
            out = F.scaled_dot_product_attention(q.reshape(rows, s.kv_heads, -1, s.head_dim), k, v).reshape(q.shape)
        else:
            k, v = (t.repeat_interleave(s.heads // s.kv_heads, 1) for t in (k, v))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.linear(out.transpose(1, 2).flatten(2).flatten(0, 1), weights[a + "o_proj.weight"])

    def _moe(self, weights: Weights, m: str, layer: int, h: Tensor) -> Tensor:
        s = self.sizes
        logits = F.linear(h, weights[m + "gate.weight"])
        ids, mix = route_topk(logits, weights[m + "e_score_correction_bias"], s.top_k, s.routed_scaling)
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        self.counts[layer] = torch.bincount(flat, minlength=s.experts)
        token = order // s.top_k
        stacks = (weights[f"{m}experts.{n}"].unbind() for n in ("w1", "w3", "w2"))
        outs = [_swiglu_mlp(x, *w) for x, *w in zip(h[token].split(self.counts[layer].tolist()), *stacks, strict=True)]
        routed = torch.cat(outs) * mix.flatten()[order][:, None]
        return _mlp(weights, m + "shared_experts.", h).index_add(0, token, routed)

    @torch.no_grad()
    def sample(
        self, weights: Weights, prompts: Tensor, max_new: int, eos: int, pad: int, temperature: float, g: torch.Generator | None = None
    ) -> Tensor:
        """Continue `prompts` int64 [B, P] (no padding) to int64 [B, <= max_new], `pad` after `eos`; temperature 0 is greedy."""
        cache = Cache(self.sizes, len(prompts), prompts.shape[1] + max_new)
        now, done, out = prompts, torch.zeros(len(prompts), dtype=torch.bool), []
        while len(out) < max_new and not done.all():
            logits = self.forward(weights, now, cache)[:, -1]
            token = _draw(logits, temperature, g)
            token = token.masked_fill(done, pad)
            done |= token == eos
            out.append(token)
            now = token[:, None]
        return torch.stack(out, 1)


def _mlp(weights: Weights, m: str, h: Tensor) -> Tensor:
    gate, up, down = (weights[f"{m}{n}_proj.weight"] for n in ("gate", "up", "down"))
    return _swiglu_mlp(h, gate, up, down)


def _swiglu_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(swiglu_oai(F.linear(x, torch.cat((gate, up))), ACTIVATION), down)


def _draw(logits: Tensor, temperature: float, g: torch.Generator | None) -> Tensor:
    if temperature == 0:
        return logits.argmax(-1)
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=g)[:, 0]


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return gemma_rms_norm(x, weight, EPS)

"""The mini MiniMax-M3: the dense, differentiable twin of what trainer and engine run, fast enough to pre-train on one GPU in minutes.

The semantics are those of `kernels`, whose norm, rotary embedding, activation and router are called; weights are a flat dictionary as in
`tiny_model`. What is new is speed: documents are packed without padding and attended to by flash attention (causal and dense, which is
what MSA computes while a document has no more than its 16 chosen blocks of 128 keys), the experts of a layer are one grouped product,
rows go to experts and back by permutations whose gradients are permutations too, and what lies between those is compiled on a GPU.
Keys and values can be rounded to NVFP4 on their way, with a straight-through gradient, as the served cache rounds them.

On a CPU the same code runs in fp32 with a loop over the experts and the padded attention of `kernels.msa`, for tests.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from samebits.kernels.activation import swiglu_oai_halves
from samebits.kernels.moe import route_topk
from samebits.kernels.msa import packed_attention, pad_packed
from samebits.kernels.norm import gemma_rms_norm, gemma_rms_norm_add
from samebits.kernels.rope import apply_rope, rope_table
from samebits.quant import kv

from .tiny_model import ACTIVATION, EPS, Sizes, Weights

MINI = Sizes(
    vocab=512,
    hidden=1024,
    layers=8,
    heads=32,
    kv_heads=2,
    experts=32,
    top_k=4,
    intermediate=512,
    dense=4096,
    topk_blocks=16,
)
"""M3's own sizes where kernels see them: heads of 128, 16 of them to a KV head, top-4, 16 blocks; the rest is small."""
FP32 = ("norm.weight", "layernorm.weight", "block_sparse_moe.gate.weight", "e_score_correction_bias")
"""Ends of the names of weights that are not computed with in bf16."""


class Packed(NamedTuple):
    """Documents one after the other."""

    ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T], each in its document
    ends: Tensor  # int32 [documents + 1], from 0 to T
    longest: int

    def to(self, device: torch.device) -> Packed:
        """On another device."""
        return Packed(*(t.to(device, non_blocking=True) for t in self[:3]), self.longest)


class Cache:
    """Keys and values [layers, rows, kv_heads, length, head_dim] of `rows` sequences of their own lengths."""

    def __init__(self, sizes: Sizes, rows: int, length: int, device: torch.device, dtype: torch.dtype) -> None:
        shape = (sizes.layers, rows, sizes.kv_heads, length, sizes.head_dim)
        self.keys, self.values = (torch.zeros(shape, device=device, dtype=dtype) for _ in range(2))


Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Attention of a layer: index, q [T, heads, D], k and v [T, kv_heads, D] to [T, heads, D]."""


class MiniModel:
    """The forward pass. `counts` holds the (token, choice) pairs of each expert [E] of the last pass, by layer.

    Args:
        dtype: of activations and matrices; the weights given may be masters in fp32, which are rounded on the way.
        quantized_kv: keys and values pass through NVFP4.
        compiled: let `torch.compile` fuse what lies between attention and the grouped products.
    """

    def __init__(self, sizes: Sizes, device: torch.device, dtype: torch.dtype, quantized_kv: bool = True, compiled: bool = False) -> None:
        self.sizes, self.device, self.dtype, self.quantized_kv = sizes, device, dtype, quantized_kv
        self.counts: dict[int, Tensor] = {}
        self._table = rope_table(sizes.max_position, sizes.rotary_dim, sizes.rope_theta, device)
        fuse = torch.compile if compiled else (lambda f: f)
        self._before, self._dense, self._experts, self._head = map(fuse, (_before, _dense, _experts, _head))

    def rounded(self, weights: Weights) -> Weights:
        """`weights` as they are computed with: matrices in `dtype`, norms and router in fp32. Keeps the gradient."""
        return {n: w if n.endswith(FP32) else w.to(self.dtype) for n, w in weights.items()}

    def forward(self, weights: Weights, batch: Packed) -> Tensor:
        """Logits fp32 [T, V] of packed documents; `weights` from `rounded`."""
        return self._run(weights, batch.ids, batch.positions, _packed_attention(batch, self.sizes))

    def _run(self, w: Weights, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        s = self.sizes
        cos, sin = (t.index_select(0, positions) for t in self._table)
        residual, x = F.embedding(ids, w["model.embed_tokens.weight"]).to(self.dtype), None
        for layer, moe in enumerate(s.moe_layer_freq):
            p = f"model.layers.{layer}."
            a, m = p + "self_attn.", p + ("block_sparse_moe." if moe else "mlp.")
            q, k, v, residual = self._before(
                x, residual, w[p + "input_layernorm.weight"], *(w[f"{a}{n}_proj.weight"] for n in "qkv"),
                *(w[f"{a}{n}_norm.weight"] for n in "qk"), cos, sin, s.head_dim,
            )  # fmt: skip
            if self.quantized_kv:
                k, v = kv.round_trip(k), kv.round_trip(v)
            out = attend(layer, q, k, v).flatten(1)
            post, o_proj = w[p + "post_attention_layernorm.weight"], w[a + "o_proj.weight"]
            mlp = m + "shared_experts." if moe else m
            halves = tuple(w[f"{mlp}{n}_proj.weight"] for n in ("gate", "up", "down"))
            if moe:
                stacks = tuple(w[f"{m}experts.{n}"] for n in ("w1", "w3", "w2"))
                gate, bias = w[m + "gate.weight"], w[m + "e_score_correction_bias"]
                x, residual, self.counts[layer] = self._experts(
                    out, residual, post, o_proj, halves, gate, bias, stacks, s.top_k, s.routed_scaling
                )
            else:
                x, residual = self._dense(out, residual, post, o_proj, halves)
        return self._head(x, residual, w["model.norm.weight"], w["lm_head.weight"])

    @torch.no_grad()
    def sample(
        self,
        weights: Weights,
        prompts: list[list[int]],
        max_new: int,
        eos: int,
        pad: int,
        temperature: float,
        g: torch.Generator | None = None,
    ) -> Tensor:
        """Continue `prompts`, of any lengths, to int64 [rows, <= max_new], `pad` after `eos`; temperature 0 is greedy."""
        lengths = torch.tensor([len(p) for p in prompts], device=self.device)
        width = int(lengths.max())
        ids = torch.tensor([p + [pad] * (width - len(p)) for p in prompts], device=self.device)
        cache = Cache(self.sizes, len(prompts), width + max_new, self.device, self.dtype)
        logits = self._extend(weights, ids, torch.zeros_like(lengths), cache)
        logits = logits.gather(1, (lengths - 1)[:, None, None].expand(-1, 1, logits.shape[-1]))[:, 0]
        done, out = torch.zeros(len(prompts), dtype=torch.bool, device=self.device), []
        for step in range(max_new):
            token = logits.argmax(-1) if temperature == 0 else torch.multinomial((logits / temperature).softmax(-1), 1, generator=g)[:, 0]
            token = token.masked_fill(done, pad)
            done |= token == eos
            out.append(token)
            if step % 16 == 15 and bool(done.all()):
                break
            logits = self._extend(weights, token[:, None], lengths + step, cache)[:, 0]
        return torch.stack(out, 1)

    def _extend(self, weights: Weights, ids: Tensor, start: Tensor, cache: Cache) -> Tensor:
        """Logits [rows, Q, V] of `ids` [rows, Q] at positions `start` [rows] and on, whose keys and values enter the cache."""
        rows, width = ids.shape
        positions = start[:, None] + torch.arange(width, device=self.device)
        keys = torch.arange(cache.keys.shape[3], device=self.device)
        heads, groups = self.sizes.heads, self.sizes.kv_heads
        # The query heads of a group stand where more queries of their KV head would: [rows, 1, heads / groups * Q, keys].
        seen = (keys <= positions[..., None])[:, None].repeat(1, 1, heads // groups, 1)
        row = torch.arange(rows, device=self.device)[:, None]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            for held, new in ((cache.keys, k), (cache.values, v)):
                held[layer].transpose(1, 2)[row, positions] = new.unflatten(0, (rows, width))
            q = q.unflatten(0, (rows, width)).transpose(1, 2).reshape(rows, groups, -1, q.shape[-1])
            out = F.scaled_dot_product_attention(q, cache.keys[layer], cache.values[layer], attn_mask=seen)
            return out.reshape(rows, heads, width, -1).transpose(1, 2).flatten(0, 1)

        return self._run(weights, ids.flatten(), positions.flatten(), attend).unflatten(0, (rows, width))


def _packed_attention(batch: Packed, sizes: Sizes) -> Attend:
    group = sizes.heads // sizes.kv_heads
    if batch.ids.is_cuda:
        from torch.nn.attention.varlen import varlen_attn

        flash = functools.partial(varlen_attn, cu_seq_q=batch.ends, cu_seq_k=batch.ends, max_q=batch.longest, max_k=batch.longest)
        return lambda layer, q, k, v: flash(q, *(t.repeat_interleave(group, 1) for t in (k, v)), window_size=(-1, 0))
    buckets = pad_packed(batch.ends.diff().tolist())
    return lambda layer, q, k, v: packed_attention(q, k, v, buckets, sizes.head_dim**-0.5)[0]


def _before(x, residual, norm, q_proj, k_proj, v_proj, q_norm, k_norm, cos, sin, head_dim: int):
    """Up to attention: q, k, v [T, heads, D], normed and rotated, and the residual."""
    if x is None:
        h = gemma_rms_norm(residual, norm, EPS)
    else:
        h, residual = gemma_rms_norm_add(x, residual, norm, EPS)
    q, k, v = (F.linear(h, w).unflatten(-1, (-1, head_dim)) for w in (q_proj, k_proj, v_proj))
    return apply_rope(gemma_rms_norm(q, q_norm, EPS), cos, sin), apply_rope(gemma_rms_norm(k, k_norm, EPS), cos, sin), v, residual


def _mlp(h: Tensor, halves: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    gate, up, down = halves
    return F.linear(swiglu_oai_halves(F.linear(h, gate), F.linear(h, up), ACTIVATION).to(h.dtype), down)


def _dense(attention, residual, norm, o_proj, halves):
    """After attention in a dense layer: output and residual."""
    h, residual = gemma_rms_norm_add(F.linear(attention, o_proj), residual, norm, EPS)
    return _mlp(h, halves), residual


def _experts(attention, residual, norm, o_proj, halves, gate, bias, stacks, top_k: int, scale: float):
    """After attention in a layer with experts: output, residual, and the pairs of each expert."""
    h, residual = gemma_rms_norm_add(F.linear(attention, o_proj), residual, norm, EPS)
    ids, mix = route_topk(F.linear(h.float(), gate), bias, top_k, scale)
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    count = (ids[..., None] == torch.arange(len(bias), device=ids.device)).sum((0, 1))
    ends = count.cumsum(0).to(torch.int32)
    w1, w3, w2 = stacks
    rows = _Dispatch.apply(h, order, place, top_k)
    act = swiglu_oai_halves(_grouped(rows, w1, ends), _grouped(rows, w3, ends), ACTIVATION).to(h.dtype)
    back = _Permute.apply(_grouped(act, w2, ends), place, order)
    routed = (back.unflatten(0, ids.shape).float() * mix[..., None]).sum(1).to(h.dtype)
    return routed + _mlp(h, halves), residual, count


def _head(x, residual, norm, head):
    """fp32 logits."""
    h, _ = gemma_rms_norm_add(x, residual, norm, EPS)
    return F.linear(h.float(), head.float())


@torch.compiler.disable  # compiled, its gradient gets operands in a layout that needs groups of multiples of 8 rows
def _grouped(x: Tensor, stack: Tensor, ends: Tensor) -> Tensor:
    """Rows of `x` [P, K] up to `ends[e]` times `stack[e]` [N, K]^T, for each expert."""
    if x.is_cuda:
        return F.grouped_mm(x, stack.transpose(-2, -1), offs=ends)
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return torch.cat([F.linear(part, w) for part, w in zip(x.split(sizes), stack.unbind(), strict=True)])


class _Dispatch(torch.autograd.Function):
    """Token rows [T, K] in order of expert [T * top_k, K]. The gradient is a selection and a sum of `top_k`, not a scattered addition."""

    @staticmethod
    def forward(ctx, x: Tensor, order: Tensor, place: Tensor, top_k: int) -> Tensor:
        ctx.top_k = top_k
        ctx.save_for_backward(place)
        return x.index_select(0, order // top_k)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (place,) = ctx.saved_tensors
        return grad.index_select(0, place).unflatten(0, (-1, ctx.top_k)).sum(1), None, None, None


class _Permute(torch.autograd.Function):
    """Rows [P, K] in another order, and back in the gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, place: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return x.index_select(0, place)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (order,) = ctx.saved_tensors
        return grad.index_select(0, order), None, None

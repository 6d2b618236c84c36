"""The mini MiniMax-M3: the dense, differentiable twin of what trainer and engine run, fast enough to pre-train on one GPU in minutes.

The semantics are those of `kernels`, whose norm, rotary embedding, activation and router are called; weights are a flat dictionary as in
`tiny_model`. What is new is speed: documents are packed without padding and attended to by flash attention (causal and dense, which is
what MSA computes while a document has no more than its 16 chosen blocks of 128 keys), the experts of a layer are one grouped product,
rows go to experts and back by permutations whose gradients are permutations too, and what lies between those is compiled on a GPU
where it is used many times a step. Keys and values can be rounded to NVFP4 on their way, with a straight-through gradient, as the served
cache rounds them. Samples come from a cache of keys and values; a GPU replays one CUDA graph for each token of all rows.

On a CPU the same code runs in fp32 with a loop over the experts and the padded attention of `kernels.msa`, for tests.
"""

from __future__ import annotations

import functools
import warnings
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
LOOK_EVERY = 16
"""Tokens between two looks at whether all samples have ended; each waits for the device."""


class MiniModel:
    """The forward pass. `counts` holds the (token, choice) pairs of each expert [E] of the last pass, by layer.

    Args:
        dtype: of activations and matrices; the weights given may be masters in fp32, which are rounded on the way.
        quantized_kv: keys and values pass through NVFP4.
        compiled: let `torch.compile` fuse what lies between attention and the grouped products. What a step does once (the dense layer,
            the head) is left as it is: compiling it takes longer than it saves.
    """

    def __init__(self, sizes: Sizes, device: torch.device, dtype: torch.dtype, quantized_kv: bool = True, compiled: bool = False) -> None:
        self.sizes, self.device, self.dtype, self.quantized_kv = sizes, device, dtype, quantized_kv
        self.counts: dict[int, Tensor] = {}
        self._table = rope_table(sizes.max_position, sizes.rotary_dim, sizes.rope_theta, device)
        fuse = torch.compile if compiled else (lambda f: f)
        self._before, self._experts = map(fuse, (_before, _experts))

    def rounded(self, weights: Weights) -> Weights:
        """`weights` as they are computed with: matrices in `dtype`, norms and router in fp32. Keeps the gradient."""
        return {n: w if n.endswith(FP32) else w.to(self.dtype) for n, w in weights.items()}

    def forward(self, weights: Weights, batch: Packed) -> Tensor:
        """Logits fp32 [T, V] of packed documents; `weights` from `rounded`."""
        return self._run(weights, batch.ids, batch.positions, _packed_attention(batch, self.sizes))

    def _run(self, w: Weights, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        s = self.sizes
        cos, sin = (t.index_select(0, positions) for t in self._table)
        residual = F.embedding(ids, w["model.embed_tokens.weight"]).to(self.dtype)
        x = torch.zeros_like(residual, requires_grad=torch.is_grad_enabled())  # so that all layers begin alike, and compile once
        for layer, moe in enumerate(s.moe_layer_freq):
            p = f"model.layers.{layer}."
            a, m = p + "self_attn.", p + ("block_sparse_moe." if moe else "mlp.")
            q, k, v, residual = self._before(
                x, residual, w[p + "input_layernorm.weight"], *(w[f"{a}{n}_proj.weight"] for n in "qkv"),
                *(w[f"{a}{n}_norm.weight"] for n in "qk"), cos, sin, s.head_dim,
            )  # fmt: skip
            if self.quantized_kv:
                # Without a look for NaN, which waits for the device: where these are not finite, neither is the loss.
                k, v = (kv.round_trip(t, name=None) for t in (k, v))
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
                x, residual = _dense(out, residual, post, o_proj, halves)
        return _head(x, residual, w["model.norm.weight"], w["lm_head.weight"])

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
        looked: Callable[[int], None] = lambda tokens: None,
    ) -> Tensor:
        """Continue `prompts`, of any lengths, to int64 [rows, <= max_new], `pad` after `eos`; temperature 0 is greedy.

        `looked` is called with the tokens that each row has, at every look at whether all have ended.
        """
        lengths = torch.tensor([len(p) for p in prompts], device=self.device)
        room = -(-(max(map(len, prompts)) + max_new) // 64) * 64  # the attention of a GPU wants masks of aligned rows
        cache = Cache(self.sizes, len(prompts), room, self.device, self.dtype)
        logits = self._read(weights, prompts, cache)
        step = _Step(self, weights, cache)
        done, out = torch.zeros(len(prompts), dtype=torch.bool, device=self.device), []
        for at in range(max_new):
            token = logits.argmax(-1) if temperature == 0 else torch.multinomial((logits / temperature).softmax(-1), 1, generator=g)[:, 0]
            token = token.masked_fill(done, pad)
            done |= token == eos
            out.append(token)
            if at % LOOK_EVERY == LOOK_EVERY - 1:
                looked(at + 1)
                if bool(done.all()):
                    break
            if at + 1 < max_new:
                logits = step(token, lengths + at)
        return torch.stack(out, 1)

    def _read(self, weights: Weights, prompts: list[list[int]], cache: Cache) -> Tensor:
        """Logits [rows, V] after each prompt, whose keys and values enter the cache."""
        batch = pack_ids(prompts).to(self.device)
        row = torch.arange(len(prompts), device=self.device).repeat_interleave(batch.ends.diff())
        attention = _packed_attention(batch, self.sizes)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache.keys[layer][row, :, batch.positions], cache.values[layer][row, :, batch.positions] = k, v
            return attention(layer, q, k, v)

        return self._run(weights, batch.ids, batch.positions, attend)[batch.ends[1:].long() - 1]

    def next(self, weights: Weights, cache: Cache, ids: Tensor, positions: Tensor) -> Tensor:
        """Logits [rows, V] after one token more, `ids` [rows] at `positions` [rows], which enters the cache. Waits for no device."""
        row = torch.arange(len(ids), device=self.device)
        # The query heads of a group stand where more queries of their KV head would: [rows, groups, heads / groups, keys].
        seen = (torch.arange(cache.keys.shape[3], device=self.device) <= positions[:, None])[:, None, None]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache.keys[layer][row, :, positions], cache.values[layer][row, :, positions] = k, v
            q = q.unflatten(1, (self.sizes.kv_heads, -1))
            return F.scaled_dot_product_attention(q, cache.keys[layer], cache.values[layer], attn_mask=seen).flatten(1, 2)

        return self._run(weights, ids, positions, attend)


class _Step:
    """`MiniModel.next` for the tokens of one batch; on a GPU captured as a CUDA graph at the first and replayed: the host would take
    several times as long to launch a token's kernels as the device to run them.
    """

    def __init__(self, model: MiniModel, weights: Weights, cache: Cache) -> None:
        self._next = functools.partial(model.next, weights, cache)
        self._capture = model.device.type == "cuda"
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Logits [rows, V], valid until the next call."""
        if self._capture:
            self._capture = False
            self._captured(ids, positions)
        if self._graph is None:
            return self._next(ids, positions)
        self._ids.copy_(ids)
        self._positions.copy_(positions)
        self._graph.replay()
        return self._logits

    def _captured(self, ids: Tensor, positions: Tensor) -> None:
        self._ids, self._positions = ids.clone(), positions.clone()
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):  # kernels are compiled and libraries opened before the capture
            for _ in range(2):
                self._next(self._ids, self._positions)
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        try:
            # Of a capture that fails, torch leaves its stream the current one: the outer block takes that back.
            with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._logits = self._next(self._ids, self._positions)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            warnings.warn(f"no CUDA graph of a sampled token, so its kernels are launched one by one: {reason}", stacklevel=2)
            return
        self._graph = graph


def pack_ids(documents: list[list[int]]) -> Packed:
    """Documents one after the other."""
    lengths = torch.tensor([len(d) for d in documents])
    ends = F.pad(lengths.cumsum(0), (1, 0))
    ids = torch.tensor([t for d in documents for t in d])
    return Packed(ids, torch.arange(len(ids)) - ends[:-1].repeat_interleave(lengths), ends.to(torch.int32), int(lengths.max()))


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

"""Lines of `bench_msa` about rows of heads: `kv_insert`, its training counterpart, and the projection before them, in one launch or not.

Floors are the bytes that must be moved over the copy's bandwidth: a projection's are its MXFP8 weights, x, the queries and the pages, so
that many tokens, whose products take longer than their bytes, lie far above it. What the fused projection is compared with is the best
case for a peer: cuBLAS on weights that were dequantised to bf16 beforehand, then `kv_insert`, or, on bf16 pages, vLLM's fused operation
where vLLM is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from samebits.quant import kv, mxfp8
from samebits.quant.mxfp8 import MXFP8Tensor

from . import msa_ops
from .bench_msa import BYTES, GROUPS, HEADS, replay
from .bench_record import absence
from .linear import LoRA, lora_linear
from .linear_tiles import pack_linear
from .msa_ops import BLOCK, DIM, HeadLoRA, Norms
from .rope import rope_table

SPLIT = (HEADS, GROUPS, GROUPS, GROUPS, 1)  # queries, K, V, index queries, index key
HIDDEN, RANK = 6144, 32
KEY_ROWS = 2 * GROUPS + 1

Lines = Iterator[dict[str, Any]]
Place = tuple[Norms, tuple[Tensor, Tensor], Tensor, Tensor, Tensor, Tensor]


def head_lines(copy: float, peers: dict[str, str]) -> Lines:
    """All lines; `peers` says version or absence of vLLM's operation. `copy`: bytes a second."""
    vllm = _vllm_insert(peers)
    yield from projection((512, 2048, 4096, 1, 16, 64), copy, vllm)
    yield from insertion((1, 64, 512, 4096), copy, vllm)
    yield from training_heads(8192, copy)


def places(tokens: int, form: str) -> Place:
    """What `kv_insert` takes besides heads: shuffled places in pages of one buffer, as an engine has them."""
    g = torch.Generator("cuda").manual_seed(tokens)
    pages = -(-tokens // BLOCK)
    norms = Norms(*(torch.randn(DIM, generator=g, device="cuda").bfloat16() * 0.1 for _ in range(4)), 1e-6)
    slots = torch.randperm(pages * BLOCK, generator=g, device="cuda")[:tokens]
    position = torch.arange(tokens, dtype=torch.int32, device="cuda") % 8192
    shapes = (kv.page_shape(pages, GROUPS, DIM), kv.index_page_shape(pages, DIM))
    dtype = torch.uint8
    if form == "bf16":
        shapes, dtype = ((pages, GROUPS, BLOCK, 2 * DIM), (pages, BLOCK, DIM)), torch.bfloat16
    main, index = (torch.Size(s[1:]).numel() for s in shapes)
    buffer = torch.zeros(pages, main + index, dtype=dtype, device="cuda")
    return norms, rope_table(8192, 64, 5e6, "cuda"), position, slots, buffer[:, :main].view(shapes[0]), buffer[:, main:].view(shapes[1])


def split_heads(y: Tensor) -> tuple[Tensor, ...]:
    """A projection's output [T, 77 * 128] as `kv_insert` takes it."""
    *heads, index_k = y.view(len(y), -1, DIM).split(SPLIT, dim=1)
    return *heads, index_k[:, 0]


def rows(tokens: int, copies: int = 8) -> list[Tensor]:
    """Outputs of projections."""
    g = torch.Generator("cuda").manual_seed(0)
    return [torch.randn(tokens, sum(SPLIT) * DIM, generator=g, device="cuda").bfloat16() for _ in range(copies)]


def insertion(counts: tuple[int, ...], copy: float, vllm: Callable[[Tensor, Place], Any] | None, repeat: int = 20) -> Lines:
    """`kv_insert`; the floor is its input, its queries and the rows of its pages."""
    for tokens in counts:
        made = rows(tokens)
        for form in ("nvfp4", "bf16"):
            place = places(tokens, form)
            moved = tokens * (sum(SPLIT) * DIM * 2 + (HEADS + GROUPS) * DIM * 2 + KEY_ROWS * BYTES[form])
            calls = {"insert": [lambda y=y, place=place: msa_ops.kv_insert(*split_heads(y), *place) for y in made]}
            if vllm and form == "bf16":
                calls["vllm insert"] = [lambda y=y, place=place: vllm(y, place) for y in made]
            for name, each in calls.items():
                yield _line(tokens, form, name, replay(each, repeat), moved / copy * 1e6)


def training_heads(tokens: int, copy: float, repeat: int = 10) -> Lines:
    """`rotate_heads` and its gradient; floors are the heads read and written, in backward queries and keys and their gradients."""
    norms, table, position, *_ = places(tokens, "nvfp4")
    made = [[x.contiguous().requires_grad_() for x in split_heads(y)[:3]] for y in rows(tokens, 3)]
    grads = [torch.ones_like(x) for x in made[0]]

    def forward(x: list[Tensor]) -> tuple[Tensor, ...]:
        return msa_ops.rotate_heads(*x, None, None, norms, table, position, "nvfp4")[:3]

    def both(x: list[Tensor]) -> None:
        torch.autograd.grad(forward(x), x, grads)

    moved = tokens * (HEADS + 2 * GROUPS) * DIM * 2 * 2
    back = tokens * (HEADS + GROUPS) * DIM * 2 * 3
    us = replay([lambda x=x: forward(x) for x in made], repeat)
    yield _line(tokens, "nvfp4", "training heads", us, moved / copy * 1e6)
    us_both = replay([lambda x=x: both(x) for x in made], repeat)
    yield _line(tokens, "nvfp4", "training heads and gradient", us_both, (moved + back) / copy * 1e6)


def projection(counts: tuple[int, ...], copy: float, vllm: Callable[[Tensor, Place], Any] | None, repeat: int = 10) -> Lines:
    """All heads of a layer from x [T, 6144] to their pages, in NVFP4 and in bf16."""
    g = torch.Generator("cuda").manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=g, device="cuda") * 0.02).bfloat16()

    # Three copies lie in no cache.
    packed: list[MXFP8Tensor] = [mxfp8.quantize(normal(sum(SPLIT) * DIM, HIDDEN)) for _ in range(3)]
    tiles = [pack_linear(w) for w in packed]
    dense = [mxfp8.dequantize(w, torch.bfloat16) for w in packed]
    weight_bytes = sum(t.nbytes for t in packed[0])
    lora = HeadLoRA(*(LoRA(normal(1, RANK, HIDDEN), normal(1, n * DIM, RANK)) for n in SPLIT[:3]))
    del packed
    for tokens in counts:
        x = normal(tokens, HIDDEN)
        for form in ("nvfp4", "bf16"):
            place = places(tokens, form)
            moved = weight_bytes + tokens * (HIDDEN * 2 + (HEADS + GROUPS) * DIM * 2 + KEY_ROWS * BYTES[form])

            def fused(w: Any, adapter: HeadLoRA | None = None, x: Tensor = x, place: Place = place) -> None:
                msa_ops.project_insert(x, w, adapter, None, *place)

            def apart(w: Any, product: Callable[[Tensor, Any], Tensor], x: Tensor = x, place: Place = place) -> None:
                msa_ops.kv_insert(*split_heads(product(x, w)), *place)

            calls: dict[str, list[Callable[[], Any]]] = {
                "project and insert, one launch": [lambda w=w: fused(w) for w in tiles],
                "project and insert, LoRA": [lambda w=w: fused(w, lora) for w in tiles],
                "project, then insert": [lambda w=w: apart(w, lora_linear) for w in tiles],
                "cuBLAS bf16, then insert": [lambda w=w: apart(w, F.linear) for w in dense],
                "cuBLAS bf16 alone": [lambda w=w, x=x: F.linear(x, w) for w in dense],
            }
            if form == "bf16":
                calls = {name: each for name, each in calls.items() if name.startswith("project and insert")}
                if vllm:
                    calls["cuBLAS bf16, then vllm insert"] = [lambda w=w, x=x, place=place: vllm(F.linear(x, w), place) for w in dense]
            for name, each in calls.items():
                yield _line(tokens, form, name, replay(each, repeat), moved / copy * 1e6)


def _line(tokens: int, form: str, name: str, us: float, floor: float) -> dict[str, Any]:
    return {"tokens": tokens, "format": form, "name": name, "us": us, "floor_us": floor, "of_floor": floor / us}


def _vllm_insert(found: dict[str, str]) -> Callable[[Tensor, Place], Any] | None:
    """vLLM's operation on a projection's output [T, 77 * 128] and bf16 pages, or None; `found` says why, or that its K is near ours."""
    name = "vllm insert"
    try:
        import vllm
        from vllm import _custom_ops as ops
    except Exception as error:  # a build for other hardware raises what it likes
        found[name] = absence(error)
        return None

    def call(qkv: Tensor, place: Place) -> tuple[Tensor, Tensor]:
        norms, table, position, slots, cache, index = place
        q = qkv.new_empty(len(qkv), HEADS * DIM)
        index_q = qkv.new_empty(len(qkv), GROUPS * DIM)
        ops.fused_minimax_m3_qknorm_rope_kv_insert(
            qkv, norms.q, norms.k, both(table), wide(position), HEADS, GROUPS, 64, norms.eps, norms.index_q, norms.index_k, GROUPS, slots,
            slots, cache, index, BLOCK, q, index_q, "auto",
        )  # fmt: skip
        return q, index_q

    # What its rotary layer and its engine hold, made once and not in the timed graph.
    memo: dict[int, tuple[Tensor, Tensor]] = {}

    def both(table: tuple[Tensor, Tensor]) -> Tensor:
        if id(table[0]) not in memo:
            memo[id(table[0])] = table[0], torch.cat(table, -1).bfloat16()
        return memo[id(table[0])][1]

    def wide(position: Tensor) -> Tensor:
        if id(position) not in memo:
            memo[id(position)] = position, position.long()
        return memo[id(position)][1]

    place, other = places(40, "bf16"), places(40, "bf16")
    (qkv,) = rows(40, 1)
    msa_ops.kv_insert(*split_heads(qkv.clone()), *place)
    try:
        call(qkv, other)
        error = (other[4].float() - place[4].float()).norm() / place[4].float().norm()
    except (AttributeError, RuntimeError, TypeError) as problem:
        found[name] = absence(problem)
        return None
    if not error < 2e-2:
        found[name] = f"cannot be used: {vllm.__version__} lays pages out otherwise (relative distance {error:.2g})"
        return None
    found[name] = vllm.__version__
    return call

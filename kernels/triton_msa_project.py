"""The QKV and indexer projection with everything up to the pages behind it, in one launch: K and V are never in memory in 16 bits.

    y = x W^T + u B^T    as `triton_linear`: MXFP8 weights decoded in registers, sums in fp32 in the order of `triton_moe`, y in bf16
    then what `triton_heads` does to rows: norm, RoPE, queries to memory, K, V and the index key into their pages

A tile is one head, so that a row of the epilogue is a column of the tile. Bits are those of `lora_linear` and `kv_insert` one after the
other. The shrink, u = x A^T, is done by the first programs, as in `triton_moe`. Tiles of the same head follow one another, for up to
TOGETHER tiles of tokens: weights come from device memory once for all of these, whose x stay in the L2 cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .linear import LoRA
from .linear_tiles import CHUNK, MXFP8Tiles
from .msa_ops import DIM, HeadLoRA, Norms, Pages
from .triton_adapters import shrink
from .triton_group import batch_jit, columns, linear_plan
from .triton_heads import angles, norm_weights, normed_rotated, store_page_rows, store_quarters
from .triton_moe import SHRINK_PART, multiprocessors, whole_programs
from .triton_msa import FORMATS, _layout, _plain
from .triton_msa_tiles import PAGE
from .triton_rows import inverse_root, tree_sum
from .triton_tiles import MXFP8_UNIT, bf16, dot, on, settled, weight_tile

TOGETHER = 8


class Cut(NamedTuple):
    """How the product is cut. Speed alone depends on it."""

    tokens: int
    warps: int
    stages: int


def cut_of(tokens: int) -> Cut:
    """By the number of tokens."""
    if tokens <= 16:
        return Cut(16, 4, 4)
    if tokens <= 32:
        return Cut(32, 4, 4)
    if tokens <= 64:
        return Cut(64, 8, 3)
    return Cut(128, 8, 3)


@triton.jit
def _product(
    x_ptr, x_desc, words_ptr, scales_ptr, start, head, pairs, K, HEADS: tl.constexpr, EVEN: tl.constexpr, COPIED: tl.constexpr,
    BT: tl.constexpr,
):  # fmt: skip
    """fp32 [128, BT]: one head of BT tokens from `start`. COPIED: x comes by the copy engine, as large tiles do best."""
    row, k, token = head * 128 + tl.arange(0, 128), tl.arange(0, 128), start + tl.arange(0, BT)
    inside = token < pairs
    words_at = words_ptr + row.to(tl.int64)[:, None] * 16 + tl.arange(0, 16)[None, :]
    scales_at = scales_ptr + row
    x_at = x_ptr + token.to(tl.int64)[None, :] * K + k[:, None]
    acc = tl.zeros([128, BT], tl.float32)
    for chunk in range(tl.cdiv(K, 128)):
        if COPIED:
            x = x_desc.load([start, chunk * 128]).T  # zeros beyond the last token and the last input
        elif EVEN:
            x = tl.load(x_at, mask=inside[None, :], other=0.0)
        else:
            x = tl.load(x_at, mask=inside[None, :] & (chunk * 128 + k < K)[:, None], other=0.0)
        words = tl.load(words_at)
        scales = tl.load(scales_at)
        acc = settled(dot(weight_tile(words, scales, 128, True), x, acc))
        words_at += HEADS * 128 * 16
        scales_at += HEADS * 128
        x_at += 128
    return acc * MXFP8_UNIT


@triton.jit
def _one_of(kind, a, b, c):
    """A scalar, by the kind of projection: q, k or v."""
    return tl.where(kind == 0, a, tl.where(kind == 1, b, c))


@triton.jit
def _add_lora(
    acc, u_ptr, flag_ptr, slots_ptr, b_ptr, start, head, pairs, slots, N, SLOTTED: tl.constexpr, R: tl.constexpr, RP: tl.constexpr,
    BT: tl.constexpr,
):  # fmt: skip
    """acc [128, BT] plus B u of one projection, whose B is [slots, N, R]; u and the tile's flag are its own too."""
    place, inside, _pair, _token, slot = columns(slots_ptr, slots_ptr, start, pairs, 1, True, SLOTTED, BT)
    row, r = tl.arange(0, 128), tl.arange(0, RP)
    offset = ((head * 128 + row) * R)[:, None] + r[None, :]
    real = (row >= 0)[:, None] & (r < R)[None, :]
    u_at = u_ptr + place.to(tl.int64)[None, :] * RP + r[:, None]
    if SLOTTED:
        while tl.atomic_add(flag_ptr, 0, sem="acquire") < slots:
            pass
        for wanted in tl.range(0, slots, num_stages=1):
            hit = inside & (slot == wanted)
            present = real & (row * 0 + tl.max(hit.to(tl.int32), axis=0) == 1)[:, None]
            b = tl.load(b_ptr + (wanted + head * 0).to(tl.int64) * N * R + offset, mask=present, other=0.0)
            u = tl.load(u_at, mask=hit[None, :], other=0.0, cache_modifier=".cg")
            # A column of zeros does not protect the tokens of other adapters from one that holds NaN or infinity.
            acc = tl.where(hit[None, :], settled(dot(b, u, acc)), acc)
    else:
        b = tl.load(b_ptr + offset, mask=real, other=0.0)
        while tl.atomic_add(flag_ptr, 0, sem="acquire") < 1:
            pass
        acc = dot(b, tl.load(u_at, mask=inside[None, :], other=0.0, cache_modifier=".cg"), acc)
    return acc


@triton.jit
def _head_quarters(y, BT: tl.constexpr):
    """bf16 [128, BT], a head of BT tokens, to quarters of rows [BT, 32] in fp32."""
    low, high = tl.split(tl.permute(tl.reshape(y, [2, 64, BT]), (2, 1, 0)))
    a, b = tl.split(tl.permute(tl.reshape(low, [BT, 2, 32]), (0, 2, 1)))
    c, d = tl.split(tl.permute(tl.reshape(high, [BT, 2, 32]), (0, 2, 1)))
    return a.to(tl.float32), b.to(tl.float32), c.to(tl.float32), d.to(tl.float32)


@triton.jit
def _put_away(
    y, start, kind, head, pairs, eps, rotation, norms, queries, pages, H: tl.constexpr, G: tl.constexpr, ROTARY: tl.constexpr,
    FORMAT: tl.constexpr, INDEX_FORMAT: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """A head of bf16 [128, BT] normed, rotated, and to where its kind belongs (q, k, v, index q, index k: 0 to 4)."""
    cos_ptr, sin_ptr, position_ptr = rotation
    q_norm_ptr, k_norm_ptr, index_q_norm_ptr, index_k_norm_ptr = norms
    token = start + tl.arange(0, BT)
    inside = token < pairs
    a, b, c, d = _head_quarters(y, BT)
    if kind != 2:
        turn = angles(cos_ptr, sin_ptr, tl.maximum(tl.load(position_ptr + token, mask=inside, other=0), 0), ROTARY)
        norm_ptr = tl.where(kind == 4, index_k_norm_ptr, _one_of(kind, q_norm_ptr, k_norm_ptr, index_q_norm_ptr))
        weight = norm_weights(norm_ptr + token * 0)
        # The sum is made where the product left its terms, in the order of `inverse_rms`.
        rows = tl.trans(y.to(tl.float32))
        inverse = inverse_root(tree_sum(rows * rows) * 0.0078125, eps)
        a, b, c, d = normed_rotated(a, b, c, d, inverse, weight, turn, ROTARY)
    if (kind == 0) | (kind == 3):
        q_out_ptr, index_q_out_ptr = queries
        at = token.to(tl.int64) * tl.where(kind == 0, H, G) + head
        store_quarters(tl.where(kind == 0, q_out_ptr, index_q_out_ptr) + at * 128, inside, a, b, c, d)
    else:
        slot_ptr, keys_ptr, values_ptr, index_ptr, page_stride, token_stride, head_stride, index_page_stride, index_token_stride = pages
        slot = tl.load(slot_ptr + token, mask=inside, other=-1)
        page, place = slot // PAGE, (slot % PAGE).to(tl.int32)
        written = inside & (slot >= 0)
        base = tl.where(kind == 1, keys_ptr, values_ptr) + (page * page_stride + head * head_stride)
        index_base = index_ptr + page * index_page_stride
        if INDEX_FORMAT == FORMAT:
            base = tl.where(kind == 4, index_base, base)
            stride = tl.where(kind == 4, index_token_stride, token_stride)
            store_page_rows(a, b, c, d, base, written, place, stride, kind == 2, BT, FORMAT)
        elif kind == 4:
            store_page_rows(a, b, c, d, index_base, written, place, index_token_stride, False, BT, INDEX_FORMAT)
        else:
            store_page_rows(a, b, c, d, base, written, place, token_stride, kind == 2, BT, FORMAT)


@triton.jit
def _tile(
    x_ptr, x_desc, words_ptr, scales_ptr, adapters, start, tile, head, K, eps, pairs, most, slots, rotation, norms, queries, pages,
    H: tl.constexpr, G: tl.constexpr, HEADS: tl.constexpr, ROTARY: tl.constexpr, FORMAT: tl.constexpr, INDEX_FORMAT: tl.constexpr,
    LORA: tl.constexpr, HAS_Q: tl.constexpr, HAS_K: tl.constexpr, HAS_V: tl.constexpr, SLOTTED: tl.constexpr, R: tl.constexpr,
    RP: tl.constexpr, EVEN: tl.constexpr, COPIED: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """One head of BT tokens from `start`, which lie in `tile` of the shrink."""
    acc = _product(x_ptr, x_desc, words_ptr, scales_ptr, start, head, pairs, K, HEADS, EVEN, COPIED, BT)
    kind = (head >= H).to(tl.int32) + (head >= H + G) + (head >= H + 2 * G) + (head >= H + 3 * G)
    head -= tl.where(kind == 0, 0, H + (kind - 1) * G)
    if LORA:  # noqa: SIM102
        if _one_of(kind, HAS_Q, HAS_K, HAS_V) & (kind < 3):
            bq_ptr, bk_ptr, bv_ptr, u_ptr, flags_ptr, slots_ptr = adapters
            b_ptr, height = _one_of(kind, bq_ptr, bk_ptr, bv_ptr), tl.where(kind == 0, H * 128, G * 128)
            u_ptr += kind.to(tl.int64) * pairs * RP
            flag_ptr = flags_ptr + kind * most + tile
            acc = _add_lora(acc, u_ptr, flag_ptr, slots_ptr, b_ptr, start, head, pairs, slots, height, SLOTTED, R, RP, BT)
    _put_away(bf16(acc), start, kind, head, pairs, eps, rotation, norms, queries, pages, H, G, ROTARY, FORMAT, INDEX_FORMAT, BT)


@triton.jit
def _place(item, most, HEADS: tl.constexpr, TOGETHER: tl.constexpr):
    """(head, tile of tokens) of a program."""
    group = item // (TOGETHER * HEADS)
    size = tl.minimum(most - group * TOGETHER, TOGETHER)
    item -= group * (TOGETHER * HEADS)
    return item // size, group * TOGETHER + item % size


@batch_jit
def project_kernel(
    x_ptr,  # bf16 [T, K]
    x_desc,  # the same in tiles of BT and of BT / 4 tokens
    narrow_desc,
    words_ptr,  # MXFP8 weights [heads * 128, K]: queries, K, V, index queries, index key
    scales_ptr,
    aq_ptr, ak_ptr, av_ptr, bq_ptr, bk_ptr, bv_ptr,  # adapters [slots, R, K] and [slots, heads * 128, R]
    u_ptr,  # bf16 [3, T, RP]
    partial_ptr,  # fp32 [3, PARTS, T, RP]
    counts_ptr,  # int32 [3, slots, most], zeros
    flags_ptr,  # int32 [3, most], zeros
    slots_ptr,  # int [T]: adapter of each token
    q_out_ptr, index_q_out_ptr, q_norm_ptr, k_norm_ptr, index_q_norm_ptr, index_k_norm_ptr, cos_ptr, sin_ptr, position_ptr, slot_ptr,
    keys_ptr, values_ptr, index_ptr,  # as in `insert_kernel`
    page_stride, token_stride, head_stride, index_page_stride, index_token_stride, K, eps, wide, pairs, most, slots,
    H: tl.constexpr, G: tl.constexpr, HEADS: tl.constexpr, ROTARY: tl.constexpr, FORMAT: tl.constexpr, INDEX_FORMAT: tl.constexpr,
    LORA: tl.constexpr, HAS_Q: tl.constexpr, HAS_K: tl.constexpr, HAS_V: tl.constexpr, SLOTTED: tl.constexpr, R: tl.constexpr,
    RP: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, EVEN: tl.constexpr, COPIED: tl.constexpr,
    TOGETHER: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """`pairs` tokens in `most` tiles. The first programs shrink, `wide` take a head of a tile, the rest a head of a quarter of one."""
    item = tl.program_id(0)
    shrinks = most * slots * PARTS * 3 if LORA else 0
    rotation = (cos_ptr, sin_ptr, position_ptr)
    norms = (q_norm_ptr, k_norm_ptr, index_q_norm_ptr, index_k_norm_ptr)
    queries = (q_out_ptr, index_q_out_ptr)
    strides = (page_stride, token_stride, head_stride, index_page_stride, index_token_stride)
    pages = (slot_ptr, keys_ptr, values_ptr, index_ptr) + strides  # noqa: RUF005
    adapters = (bq_ptr, bk_ptr, bv_ptr, u_ptr, flags_ptr, slots_ptr)
    if item < shrinks:
        if LORA:
            kind = item // (most * slots * PARTS)
            if _one_of(kind, HAS_Q, HAS_K, HAS_V):
                a_ptr = _one_of(kind, aq_ptr, ak_ptr, av_ptr)
                rows = kind.to(tl.int64) * pairs * RP
                shrink(
                    x_ptr, a_ptr, a_ptr, u_ptr + rows, partial_ptr + rows * PARTS, counts_ptr + kind * slots * most,
                    flags_ptr + kind * most, slots_ptr, slots_ptr, slots_ptr, item % (most * slots * PARTS), K, pairs, 1, most, 1, slots,
                    True, False, SLOTTED, True, False, R, RP, PARTS, PART, EVEN, BT,
                )  # fmt: skip
    elif item - shrinks < wide:
        head, tile = _place(item - shrinks, most, HEADS, TOGETHER)
        _tile(
            x_ptr, x_desc, words_ptr, scales_ptr, adapters, tile * BT, tile, head, K, eps, pairs, most, slots, rotation, norms, queries,
            pages, H, G, HEADS, ROTARY, FORMAT, INDEX_FORMAT, LORA, HAS_Q, HAS_K, HAS_V, SLOTTED, R, RP, EVEN, COPIED, BT,
        )  # fmt: skip
    elif COPIED:
        rest = item - shrinks - wide
        head, tile = _place(wide + rest // 4, most, HEADS, TOGETHER)
        start = tile * BT + rest % 4 * (BT // 4)
        if start < pairs:
            _tile(
                x_ptr, narrow_desc, words_ptr, scales_ptr, adapters, start, tile, head, K, eps, pairs, most, slots, rotation, norms,
                queries, pages, H, G, HEADS, ROTARY, FORMAT, INDEX_FORMAT, LORA, HAS_Q, HAS_K, HAS_V, SLOTTED, R, RP, EVEN, COPIED, BT // 4,
            )  # fmt: skip


def project_insert(
    x: Tensor,
    weight: MXFP8Tiles,
    loras: HeadLoRA | None,
    adapter_ids: Tensor | None,
    norms: Norms,
    table: tuple[Tensor, Tensor],
    position: Tensor,
    slots: Tensor,
    cache: Tensor,
    index_cache: Tensor | None,
    shape: tuple[int, int],
    cut: Cut | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`msa_ops.project_insert` on CUDA; `shape`: query heads, groups."""
    heads, groups = shape
    tokens, k = x.shape
    indexed = index_cache is not None
    q_out = torch.empty(tokens, heads, DIM, dtype=x.dtype, device=x.device)
    index_q_out = torch.empty(tokens, groups, DIM, dtype=x.dtype, device=x.device) if indexed else None
    if not tokens:
        return q_out, index_q_out
    x = x.contiguous()
    x = x if x.data_ptr() % 16 == 0 else x.clone()
    cut = cut or cut_of(tokens)
    copied = cut.tokens >= 128
    tiles = [TensorDescriptor.from_tensor(x, [n, CHUNK]) if copied else None for n in (cut.tokens, cut.tokens // 4)]
    keys, values, strides, _, form = _layout(Pages(cache, slots))
    index = index_cache if indexed else cache
    index_form = FORMATS[index.dtype]
    lora = _Adapters.of(loras, x, adapter_ids is not None)
    most, parts = triton.cdiv(tokens, cut.tokens), triton.cdiv(k, SHRINK_PART)
    if lora.any:
        counters = linear_plan(x, cut.tokens, 3 * (1 + lora.slots)).counters
        u = torch.empty(3, tokens, lora.padded, dtype=x.dtype, device=x.device)
        partial = torch.empty(3, parts, tokens, lora.padded, dtype=torch.float32, device=x.device) if parts > 1 else u
    else:
        counters = u = partial = x
    weights = norms[:4] if indexed else (norms.q, norms.k, norms.k, norms.k)
    all_heads = weight.codes.shape[1] // DIM
    programs = most * all_heads
    # There is one program to a multiprocessor, and their last wave may hold few: in quarters it ends sooner, with more of them at work.
    wide = whole_programs(programs, multiprocessors(x.device)) if copied else programs
    grid = wide + 4 * (programs - wide) + (3 * most * lora.slots * parts if lora.any else 0)
    with on(x):
        project_kernel[(grid,)](
            x, *tiles, weight.codes, weight.scales, *lora.a, *lora.b, u, partial, counters[3:] if lora.any else counters, counters,
            counters if adapter_ids is None else adapter_ids.contiguous(), q_out, q_out if index_q_out is None else index_q_out, *weights,
            *(t.contiguous() for t in table), position, slots, keys, values, _plain(index), *strides, index.stride(0),
            index.stride(1) if index_form != 2 else 0, k, norms.eps, wide, tokens, most, lora.slots,
            H=heads, G=groups, HEADS=all_heads, ROTARY=table[0].shape[1], FORMAT=form, INDEX_FORMAT=index_form, LORA=lora.any,
            HAS_Q=lora.has[0], HAS_K=lora.has[1], HAS_V=lora.has[2], SLOTTED=adapter_ids is not None, R=lora.rank, RP=lora.padded,
            PARTS=parts, PART=SHRINK_PART, EVEN=k % CHUNK == 0, COPIED=copied, TOGETHER=TOGETHER, BT=cut.tokens, num_warps=cut.warps,
            num_stages=cut.stages, enable_fp_fusion=False,
        )  # fmt: skip
    return q_out, index_q_out


class _Adapters(NamedTuple):
    """Adapters of q, k and v as the kernel takes them; for a missing one stands any tensor, which is not read."""

    a: list[Tensor]
    b: list[Tensor]
    slots: int
    rank: int
    padded: int  # rank, padded for a matrix instruction
    has: list[bool]
    any: bool

    @classmethod
    def of(cls, loras: HeadLoRA | None, x: Tensor, slotted: bool) -> _Adapters:
        """Raises `ValueError` where ranks or slots differ. Without adapter ids only slot 0 is there."""
        given: list[LoRA | None] = list(loras or (None, None, None))
        some = [lora for lora in given if lora is not None]
        if not some:
            return cls([x] * 3, [x] * 3, 1, 16, 16, [False] * 3, False)
        if len({lora.a.shape[:2] for lora in some}) > 1:
            raise ValueError("adapters of q, k and v must have the same rank and slots")
        count, rank = some[0].a.shape[:2]
        a, b = ([x if lora is None else lora[i].to(x.dtype).contiguous() for lora in given] for i in (0, 1))
        return cls(a, b, count if slotted else 1, rank, max(16, triton.next_power_of_2(rank)), [lora is not None for lora in given], True)

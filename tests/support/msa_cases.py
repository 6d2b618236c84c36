"""Caches and queries for tests of MSA: shuffled page tables, unused pages and tails full of NaN, contexts of any length."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from samebits.kernels import msa_ops
from samebits.kernels.msa_ops import BLOCK, DIM, Batch, Norms, Packed, Pages, batch_of
from samebits.kernels.rope import rope_table
from samebits.quant import kv

FORMATS = ("bf16", "fp8", "nvfp4")


class Case(NamedTuple):
    batch: Batch
    q: Tensor  # bf16 [T, H, 128]
    index_q: Tensor  # bf16 [T, G, 128]
    cache: Pages
    index: Pages
    packed: Packed  # K and V of all requests one after the other, in bf16, with the values the pages hold
    packed_index: Packed


def make(
    new: list[int],
    total: list[int],
    form: str,
    groups: int = 4,
    heads: int = 64,
    seed: int = 0,
    integers: bool = False,
    device: str = "cpu",
) -> Case:
    """Requests of `total` tokens, the last `new` of them queries. `integers`: index queries and keys with exact products, many tied."""
    g = torch.Generator(device).manual_seed(seed)
    length = sum(total)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, device=device)

    def draw(*shape: int) -> Tensor:
        """-1, 0 or 1 mostly 0, so that scores are small integers; one element of 6 a group keeps NVFP4's scale at 1."""
        x = torch.randint(-12, 13, shape, generator=g, device=device)
        return torch.where(x.abs() > 11, x.sign(), 0).float()

    k, v = normal(length, groups, DIM), normal(length, groups, DIM) * 2
    index_k = draw(length, DIM) if integers else normal(length, DIM)
    if integers:
        index_k.view(length, -1, 16)[:, :, 0] = 6.0
    k, v, index_k = (round_trip(x, form) for x in (k, v, index_k))
    index_q = (draw(sum(new), groups, DIM) if integers else normal(sum(new), groups, DIM)).bfloat16()
    q = normal(sum(new), heads, DIM).bfloat16()

    each = [-(-n // BLOCK) for n in total]
    spare = 3
    order = torch.randperm(sum(each) + spare, generator=g, device=device)
    width = max(each) + 1
    table = torch.full((len(total), width), 2**30, dtype=torch.int32, device=device)  # unused entries would fault if read
    slots, first = [], 0
    for r, (n, count) in enumerate(zip(total, each, strict=True)):
        pages = order[first : first + count]
        table[r, :count] = pages.int()
        at = torch.arange(n, device=device)
        slots.append(pages[at // BLOCK] * BLOCK + at % BLOCK)
        first += count
    where = torch.cat(slots)
    start = torch.tensor([sum(total[:r]) for r in range(len(total))], dtype=torch.int32, device=device)
    count = len(order)
    if form == "nvfp4":
        data = torch.full(kv.page_shape(count, groups, DIM), 0xFF, dtype=torch.uint8, device=device)
        kv.write_pages(data, where, k, v)
        index_data = torch.full(kv.index_page_shape(count, DIM), 0xFF, dtype=torch.uint8, device=device)
        kv.write_index_pages(index_data, where, index_k)
    else:
        dtype = torch.bfloat16 if form == "bf16" else torch.float8_e4m3fn
        data = torch.full((count, groups, BLOCK, 2 * DIM), float("nan"), device=device).to(dtype)
        _bits(data)[where // BLOCK, :, where % BLOCK] = _bits(torch.cat((k, v), -1).to(dtype))
        index_data = torch.full((count, BLOCK, DIM), float("nan"), device=device).to(dtype)
        _bits(index_data)[where // BLOCK, where % BLOCK] = _bits(index_k.to(dtype))
    return Case(
        batch_of(new, total, device),
        q,
        index_q,
        Pages(data, table),
        Pages(index_data, table),
        Packed(k.bfloat16(), v.bfloat16(), start, max(each)),
        Packed(index_k.bfloat16(), None, start, max(each)),
    )


def with_weights_that_vanish(case: Case, total: list[int]) -> tuple[Case, dict[bool, Packed]]:
    """An NVFP4 case of `total` tokens whose outputs are often far below 1; and what its pages hold, by whether it is read as E4M3.

    Queries are integers, so that scores are exact and lie hundreds apart; few values are not zero, so that an element of the output
    may have nothing but weights near the least number that fp32 has.
    """
    g = torch.Generator(case.q.device).manual_seed(0)
    slots = torch.cat([msa_ops._slots(case.cache, r, n) for r, n in enumerate(total)])
    values = case.packed.values * (torch.rand(case.packed.values.shape, generator=g, device=case.q.device) < 0.004)
    kv.write_pages(case.cache.data, slots, case.packed.keys, values)
    held = {rounded: kv.read_pages(case.cache.data, slots, DIM, torch.bfloat16, rounded) for rounded in (False, True)}
    q = torch.randint(-8, 9, case.q.shape, generator=g, device=case.q.device).bfloat16()
    return case._replace(q=q), {rounded: case.packed._replace(keys=k, values=v) for rounded, (k, v) in held.items()}


def vanishing(out: Tensor) -> int:
    """Outputs that are not zero and smaller than what 2^7 times the least normal number of fp32 is."""
    return int(((out != 0) & (out.abs() < 2.0**-119)).sum())


def without_indexer(args: tuple) -> tuple:
    """Arguments of `kv_insert` for a layer that has none."""
    q, k, v, _, _, norms, *rest = args
    return q, k, v, None, None, norms._replace(index_q=None, index_k=None), *rest


def one_buffer(cache: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(buffer, main pages, index pages): views of one buffer, a page's main KV and then its index keys, as the engine has it."""
    pages, main = cache.shape[0], cache[0].numel()
    buffer = torch.cat((cache.view(pages, -1).view(torch.uint8), index.view(pages, -1).view(torch.uint8)), dim=1).view(cache.dtype)
    return buffer, buffer[:, :main].view(cache.shape), buffer[:, main:].view(index.shape)


def _bits(x: Tensor) -> Tensor:
    """E4M3 as bytes, which can be indexed on every device."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def round_trip(x: Tensor, form: str) -> Tensor:
    """What a cache of the format gives back, fp32."""
    if form == "nvfp4":
        return kv.round_trip(x)
    return x.to(torch.bfloat16 if form == "bf16" else torch.float8_e4m3fn).float()


def insert_case(form: str, tokens: int, heads: int = 64, groups: int = 4, device: str = "cpu", seed: int = 0, exact: bool = True):
    """Arguments of `kv_insert` but the caches, and caches full of 0xFF. `exact`: small integers, whose squares sum exactly."""
    g = torch.Generator(device).manual_seed(seed)
    columns = heads + 3 * groups + 1
    x = torch.randn(tokens, columns, DIM, generator=g, device=device) * 3
    x = (x.round() if exact else x).bfloat16()
    q, k, v, index_q, index_k = x.split((heads, groups, groups, groups, 1), dim=1)  # views of one projection's output
    norms = Norms(*((torch.randn(DIM, generator=g, device=device) * 0.2).bfloat16() for _ in range(4)), 1e-6)
    position = torch.randint(0, 4096, (tokens,), generator=g, device=device).int()
    pages = -(-tokens // BLOCK) + 2
    slots = torch.randperm(pages * BLOCK, generator=g, device=device)[:tokens]
    slots[tokens // 2] = -1
    if form == "nvfp4":
        shapes, dtype = (kv.page_shape(pages, groups, DIM), kv.index_page_shape(pages, DIM)), torch.uint8
    else:
        shapes, dtype = ((pages, groups, BLOCK, 2 * DIM), (pages, BLOCK, DIM)), torch.bfloat16 if form == "bf16" else torch.float8_e4m3fn
    caches = []
    for shape in shapes:
        blank = torch.full((*shape[:-1], shape[-1] * dtype.itemsize), 0xFF, dtype=torch.uint8, device=device)
        caches.append(blank.view(dtype))
    table = rope_table(4096, 64, 5e6, device)
    return (q, k, v, index_q, index_k[:, 0], norms, table, position, slots), caches

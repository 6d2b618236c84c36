"""Kernels of experts over peer memory: tokens and routes are read from the other GPUs, result rows are stored to them.

Rows are numbered by (rank, place in that rank's batch): row = rank * room + token, pair = row * k + choice, the same on all ranks.
Copies move 8 bytes an element, by few programs of many bytes each, so that most of the GPU goes on computing meanwhile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_group import Plan
from .triton_tiles import on

PROGRAMS, WARPS = 24, 16  # of a copy


@triton.jit
def _peer(addresses_ptr, rank, at):
    """Addresses of words of 8 bytes in a rank's memory; rows begin at multiples of 16 bytes, which Triton cannot see."""
    return tl.multiple_of(tl.load(addresses_ptr + rank).to(tl.pointer_type(tl.int64)) + at, 16)


@triton.jit(do_not_specialize=["tokens"])
def _publish_kernel(
    x_ptr, ids_ptr, slots_ptr, rows_ptr, routes_ptr, tokens, H, K: tl.constexpr, SLOTTED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One token: its row [H] and its line of routes [K + 1], ids and slot; ids are -1 beyond the last token."""
    token = tl.program_id(0).to(tl.int64)
    inside = token < tokens
    for choice in tl.static_range(K):
        chosen = tl.load(ids_ptr + token * K + choice, mask=inside, other=-1).to(tl.int32)
        tl.store(routes_ptr + token * (K + 1) + choice, chosen)
    if SLOTTED:
        tl.store(routes_ptr + token * (K + 1) + K, tl.load(slots_ptr + token, mask=inside, other=-1).to(tl.int32))
    if inside:
        at = tl.arange(0, BLOCK)
        tl.store(rows_ptr + token * H + at, tl.load(x_ptr + token * H + at, mask=at < H), mask=at < H)


@triton.jit
def _routes_kernel(
    addresses_ptr, ids_ptr, slots_ptr, room, first, end, K: tl.constexpr, SLOTTED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Some rows of one rank: ids counted within `first` to `end` - 1, all others as the one after, and slots."""
    source = tl.program_id(1)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < room
    lines = tl.load(addresses_ptr + source).to(tl.pointer_type(tl.int32)) + token * (K + 1)
    row = source * room + token
    for choice in tl.static_range(K):
        e = tl.load(lines + choice, mask=inside, other=-1)
        tl.store(ids_ptr + row * K + choice, tl.where((e >= first) & (e < end), e, end) - first, mask=inside)
    if SLOTTED:
        tl.store(slots_ptr + row, tl.load(lines + K, mask=inside, other=-1), mask=inside)


@triton.jit
def _first_place(tiles_ptr, bounds_ptr, tile, most, experts):
    """First place of a tile; the number of places for one that is not needed."""
    e = tl.load(tiles_ptr + tile, mask=tile < most, other=-1)
    start = tl.load(tiles_ptr + most + tile, mask=tile < most, other=0)
    return tl.where(e >= 0, start, tl.load(bounds_ptr + experts))


@triton.jit(do_not_specialize=["most", "count", "places", "experts"])
def _parts_kernel(
    order_ptr, tiles_ptr, bounds_ptr, slots_ptr, part_order_ptr, part_tiles_ptr, part_slots_ptr, sizes_ptr, most, count, places, experts,
    K: tl.constexpr, SLOTTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Tiles and places of one part, counted from its own start: a plan as `triton_group.group` makes it, of `count` tiles."""
    part = tl.program_id(1)
    begin = _first_place(tiles_ptr, bounds_ptr, part * count, most, experts)
    stop = _first_place(tiles_ptr, bounds_ptr, (part + 1) * count, most, experts)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = i < stop - begin
    pair = tl.load(order_ptr + begin + i, mask=real, other=0)
    tl.store(part_order_ptr + part * places + i, pair, mask=i < places)
    if SLOTTED:
        slot = tl.load(slots_ptr + pair // K, mask=real, other=-1)
        tl.store(part_slots_ptr + part * places + i, slot, mask=i < places)
    if tl.program_id(0) == 0:
        tl.store(sizes_ptr + part, stop - begin)
    tile = part * count + i
    known = (i < count) & (tile < most)
    expert = tl.load(tiles_ptr + tile, mask=known, other=-1)
    needed = expert >= 0
    out = part_tiles_ptr + part * 3 * count + i
    tl.store(out, expert, mask=i < count)
    tl.store(out + count, tl.load(tiles_ptr + most + tile, mask=needed, other=0) - begin, mask=i < count)
    tl.store(out + 2 * count, tl.load(tiles_ptr + 2 * most + tile, mask=needed, other=0) - begin, mask=i < count)


@triton.jit(do_not_specialize=["room", "rank", "experts"], do_not_specialize_on_alignment=["size_ptr"])
def _pull_kernel(
    addresses_ptr, rows_ptr, ids_ptr, order_ptr, size_ptr, room, rank, experts, WORDS, K: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Rows of other ranks that a part is the first to need, from there to the same place here."""
    word = tl.arange(0, BLOCK)
    for place in range(tl.program_id(0), tl.load(size_ptr), tl.num_programs(0)):
        pair = tl.load(order_ptr + place)
        row, source = pair // K, pair // K // room
        # A row is there already where another of its choices comes before in the order by expert.
        mine = tl.load(ids_ptr + pair) * K + pair % K
        earlier = mine * 0
        for choice in tl.static_range(K):
            e = tl.load(ids_ptr + row * K + choice)
            earlier += ((e < experts) & (e * K + choice < mine)).to(tl.int32)
        if (source != rank) & (earlier == 0):
            at = row.to(tl.int64) * WORDS + word
            tl.store(rows_ptr + at, tl.load(_peer(addresses_ptr, source, at), mask=word < WORDS), mask=word < WORDS)


@triton.jit(do_not_specialize=["room"], do_not_specialize_on_alignment=["size_ptr"])
def _push_kernel(addresses_ptr, y_ptr, order_ptr, size_ptr, room, WORDS, K: tl.constexpr, BLOCK: tl.constexpr):
    """Row `place` of a part's results to its pair's row on the token's own rank."""
    word = tl.arange(0, BLOCK)
    for place in range(tl.program_id(0), tl.load(size_ptr), tl.num_programs(0)):
        pair = tl.load(order_ptr + place)
        source = pair // K // room
        at = (pair - source * room * K).to(tl.int64) * WORDS + word
        y = tl.load(y_ptr + tl.cast(place, tl.int64) * WORDS + word, mask=word < WORDS)
        tl.store(_peer(addresses_ptr, source, at), y, mask=word < WORDS)


def publish(x: Tensor, ids: Tensor, slots: Tensor | None, rows: Tensor, routes: Tensor) -> None:
    """x [T, H], ids [T, k] and slots [T] to this rank's rows [room, H] and routes int32 [room, k + 1]."""
    room, k = len(rows), ids.shape[1]
    with on(rows):
        _publish_kernel[(room,)](
            x, ids, ids if slots is None else slots, rows, routes, len(x), x.shape[1], K=k, SLOTTED=slots is not None,
            BLOCK=triton.next_power_of_2(x.shape[1]), num_warps=8,
        )  # fmt: skip


def gather_routes(addresses: Tensor, world: int, room: int, k: int, first: int, end: int, slotted: bool) -> tuple[Tensor, Tensor | None]:
    """(ids int32 [world * room, k] within the range, `end - first` for all others; slots int32 [world * room])."""
    ids = torch.empty(world * room, k, dtype=torch.int32, device=addresses.device)
    slots = torch.empty(world * room, dtype=torch.int32, device=addresses.device) if slotted else None
    with on(ids):
        _routes_kernel[(triton.cdiv(room, 128), world)](
            addresses, ids, ids if slots is None else slots, room, first, end, K=k, SLOTTED=slotted, BLOCK=128
        )
    return ids, slots


def cut_plan(plan: Plan, slots: Tensor | None, parts: int, tile: int, counters: int) -> tuple[list[Plan], list[Tensor | None], Tensor]:
    """(a plan for each of `parts` runs of neighbouring tiles, the slots of its places, int32 [parts] places in use)."""
    count = triton.cdiv(plan.most, parts)
    places = count * tile

    def ints(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=plan.order.device)

    order, tiles, sizes = ints(parts, places), ints(parts, 3, count), ints(parts)
    place_slots = ints(parts, places) if slots is not None else None
    with on(order):
        _parts_kernel[(triton.cdiv(places, 1024), parts)](
            plan.order, plan.tiles, plan.bounds, order if slots is None else slots, order, tiles,
            order if place_slots is None else place_slots, sizes, plan.most, count, places, plan.experts,
            K=plan.top_k, SLOTTED=slots is not None, BLOCK=1024,
        )  # fmt: skip
    zeros = torch.zeros(parts, counters, count, dtype=torch.int32, device=order.device)
    plans = [
        plan._replace(order=order[p], tiles=tiles[p], counters=zeros[p], pairs=places, most=count) for p in range(parts)
    ]  # fmt: skip
    return plans, [None if place_slots is None else place_slots[p] for p in range(parts)], sizes


def pull(addresses: Tensor, rows: Tensor, ids: Tensor, plan: Plan, size: Tensor, rank: int, room: int) -> None:
    """What a part needs of other ranks' rows into `rows` bf16 [world * room, H]."""
    words = rows.shape[1] * rows.element_size() // 8
    with on(rows):
        _pull_kernel[(min(PROGRAMS, plan.pairs),)](
            addresses, rows.view(torch.int64), ids, plan.order, size, room, rank, plan.experts, words,
            K=plan.top_k, BLOCK=triton.next_power_of_2(words), num_warps=WARPS,
        )  # fmt: skip


def push(addresses: Tensor, y: Tensor, plan: Plan, size: Tensor, room: int) -> None:
    """A part's results fp32 [places, H] home."""
    words = y.shape[1] // 2
    with on(y):
        _push_kernel[(min(PROGRAMS, plan.pairs),)](
            addresses, y.view(torch.int64), plan.order, size, room, words,
            K=plan.top_k, BLOCK=triton.next_power_of_2(words), num_warps=WARPS,
        )  # fmt: skip

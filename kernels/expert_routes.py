"""Which row goes where when the experts of a layer are spread over ranks: a pure function of everybody's routes.

Every rank knows the routes of all tokens (they are small: 2 k + 1 words a token), so that each works out for itself what it sends and
what it gets, and no counts travel. Rank r owns the experts `owned(experts, world, r)`, a contiguous range, which is cut again into
contiguous parts that are computed one after the other.

    rows     A token is sent to a rank once, with the first part that needs it. What a rank computes on are its own tokens, then the
             rows that came, ordered by (part, source rank, token).
    pairs    (token, choice) of one part, listed in the order of (source rank, token, choice): the order of one rank that has all the
             tokens, so that sums over an expert's tokens are its sums too.
    results  A row for each pair, ordered by (part, home rank, token, choice), the own ones after the others' in each part.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from samebits.quant.ranks import owned as owned


class Pairs(NamedTuple):
    """The pairs of one part on one rank; all int32 [P] but the last."""

    expert: Tensor  # within the part
    row: Tensor  # row of the token among those of the rank
    target: Tensor  # row of the result
    slot: Tensor  # adapter slot, by target
    weight: Tensor  # fp32 router weight, by target


class Routes(NamedTuple):
    """What one rank of `world` sends, computes and gets. Lists are on the host; [g][r] is of part g and rank r, 0 for the rank itself."""

    tokens: int  # own tokens
    send: list[list[int]]  # rows sent
    recv: list[list[int]]  # rows got
    give: list[list[int]]  # results sent
    take: list[list[int]]  # results got
    own: list[int]  # results that stay, by part
    sent: Tensor  # int64 [rows sent], which own token, ordered by (part, rank, token)
    slots: Tensor  # int32 [rows], adapter slot of each row
    pairs: list[Pairs]
    place: Tensor  # int64 [tokens, k], row of each pair's result among those that come back: by part, others' by rank, then own
    rows: int


def part_edges(experts: int, world: int, parts: int) -> list[int]:
    """First expert of every part of every rank, then `experts`: world * parts + 1 numbers."""
    edges = [0]
    for rank in range(world):
        first, end = owned(experts, world, rank)
        edges += [first + (part + 1) * (end - first) // parts for part in range(parts)]
    return edges


def make_routes(ids: Tensor, slots: Tensor, weights: Tensor, tokens: list[int], experts: int, parts: int, rank: int) -> Routes:
    """Routes of `rank`.

    Args:
        ids: int64 [W, C, k], ascending in each row; rows of rank r beyond its `tokens[r]` are -1. slots: int32 [W, C].
        weights: fp32 [W, C, k].
    Raises `ValueError` for an id that is no expert. Waits once for the device.
    """
    world, room, k = ids.shape
    edges = torch.tensor(part_edges(experts, world, parts), device=ids.device)
    at = torch.searchsorted(edges, ids.view(-1, k), right=True) - 1  # (rank, part) of each pair, -1 of none
    owner, part = torch.div(at, parts, rounding_mode="floor"), at % parts
    ranks, each = torch.arange(world, device=ids.device), torch.arange(parts, device=ids.device)
    # The first part of each rank that needs a token; `parts` where none does.
    first = torch.where(owner[:, :, None] == ranks, part[:, :, None], parts).amin(1).view(world, room, world)
    row_counts = (first[..., None] == each).sum(1)  # [source, owner, part]
    last = world * parts  # of what is no expert
    bins = torch.zeros(world, last + 1, dtype=torch.int64, device=ids.device)
    known = torch.where((at >= 0) & (at < last), at, last).view(world, -1)
    bins.scatter_add_(1, known, torch.ones_like(known))
    counts = torch.cat((row_counts.flatten(), bins.flatten())).tolist()
    rows, pairs = counts[: world * last], counts[world * last :]
    for source in range(world):
        if pairs[source * (last + 1) + last] != (room - tokens[source]) * k:
            raise ValueError(f"rank {source} chose an expert that is not one of 0 to {experts - 1}")

    def row_count(source: int, target: int, g: int) -> int:
        return 0 if source == target else rows[(source * world + target) * parts + g]

    def pair_count(source: int, target: int, g: int) -> int:
        return pairs[source * (last + 1) + target * parts + g]

    every, groups = range(world), range(parts)
    send = [[row_count(rank, r, g) for r in every] for g in groups]
    recv = [[row_count(r, rank, g) for r in every] for g in groups]
    give = [[0 if r == rank else pair_count(r, rank, g) for r in every] for g in groups]
    take = [[0 if r == rank else pair_count(rank, r, g) for r in every] for g in groups]
    own = [pair_count(rank, rank, g) for g in groups]
    mine = tokens[rank]
    total = mine + sum(map(sum, recv))

    def ordered(key: Tensor, count: int) -> Tensor:
        """The first `count` of a stable sort."""
        return key.argsort(stable=True)[:count]

    here = first[:, :, rank].flatten()
    source = torch.arange(world * room, device=ids.device) // room
    came = ordered(torch.where((here < parts) & (source != rank), here * world + source, parts * world), total - mine)
    row_of = torch.zeros(world * room, dtype=torch.int64, device=ids.device)
    row_of[came] = torch.arange(mine, total, device=ids.device)
    row_of[rank * room : rank * room + mine] = torch.arange(mine, device=ids.device)
    away = first[rank].t()  # [rank, token]
    key = torch.where((away < parts) & (ranks != rank)[:, None], away * world + ranks[:, None], parts * world)
    sent = ordered(key.flatten(), sum(map(sum, send))) % max(1, room)
    home = at.view(world, room, k)[rank, :mine].flatten()
    back = (home % parts * (world + 1) + torch.where(home // parts == rank, world, home // parts)).argsort(stable=True)
    place = torch.empty_like(back).scatter_(0, back, torch.arange(len(back), device=ids.device)).view(mine, k)

    listed = ordered(torch.where(owner == rank, part, parts).flatten(), sum(own) + sum(map(sum, give)))
    token = listed // k
    is_own = (source[token] == rank).long()
    expert = ids.reshape(-1)[listed]
    made, begin = [], 0
    for g in groups:
        others = sum(give[g])
        here = slice(begin, begin + others + own[g])
        begin = here.stop
        mark = is_own[here]
        # Others' results in their order, then the own ones.
        ahead = mark.cumsum(0)
        target = torch.where(mark == 1, others + ahead - 1, torch.arange(len(mark), device=ids.device) - ahead)
        by_target = torch.empty_like(target).scatter_(0, target, listed[here])
        made.append(
            Pairs(
                (expert[here] - edges[rank * parts + g]).int(),
                row_of[token[here]].int(),
                target.int(),
                slots.reshape(-1)[by_target // k].int(),
                weights.reshape(-1)[by_target],
            )
        )
    row_slots = torch.cat((slots[rank, :mine], slots.reshape(-1)[came])).int()
    return Routes(mine, send, recv, give, take, own, sent, row_slots, made, place, total)

"""The indexer over the GPUs of one host, measured: one GPU with all pages against each with its share. Lines of `bench_parallel`.

MiniMax-M3's shapes, NVFP4 index keys, one query token a request, graph replay over queries and over so many layers' pages that they are
not in the L2 cache when they are read again. Beside the whole call: scores and choice of one GPU, scores of a share, and candidates with
their exchange and merge alone, which is what a share costs beyond its bytes. A floor is the keys' bytes over the bandwidth of a copy in the
same run. Every choice is compared with one GPU's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from samebits.quant import kv

from . import msa_ops
from .bench_msa import CONFIG, GROUPS, random_pages
from .bench_ranks import all_agree, graph_us
from .index_parallel import Inbox, exchange, share_of, split_index_topk, table_of
from .msa_ops import BLOCK, DIM, Batch, Pages

QUERIES, ROOM = 8, 32
BEYOND_CACHE = 1 << 28  # bytes of keys among which calls go round
WORTH = 1.6  # times one GPU's speed
WAYS = ("peer memory", "NCCL")


def inboxes() -> dict[str, Inbox]:
    """One of each way, for all lines."""
    return {way: Inbox(ROOM * GROUPS, CONFIG.topk, peers=way == "peer memory") for way in WAYS}


def index_line(requests: int, context: int, inboxes: dict[str, Inbox], copy_gb_s: float) -> dict[str, Any]:
    """Pages of one shape, whole on every GPU, and this rank's share of them packed together."""
    world, rank = dist.get_world_size(), dist.get_rank()
    g = torch.Generator("cuda").manual_seed(requests * context)
    blocks = context // BLOCK
    size = requests * context * kv.row_bytes(DIM)
    row = torch.arange(requests + 1, dtype=torch.int32, device="cuda")
    batch = Batch(row, row[:-1], torch.full_like(row[:-1], context - 1), 1)
    share = share_of(batch, world, rank)
    queries = [torch.randn(requests, GROUPS, DIM, generator=g, device="cuda").bfloat16() for _ in range(QUERIES)]
    layers = [_layer(requests, blocks, world, rank, g) for _ in range(max(1, min(QUERIES, BEYOND_CACHE // size)))]
    cases = [(q, *layers[i % len(layers)]) for i, q in enumerate(queries)]
    wants = [msa_ops.index_topk(q, whole, batch, CONFIG) for q, whole, _ in cases]
    line: dict[str, Any] = {"requests": requests, "context": context, "equal": True, "floor_us": size / copy_gb_s / 1e3}
    line["one_gpu_us"] = graph_us([lambda q=q, whole=whole: msa_ops.index_topk(q, whole, batch, CONFIG) for q, whole, _ in cases])
    line |= _parts(cases, batch, share, inboxes["peer memory"])
    for way, inbox in inboxes.items():
        calls: list[Callable[[], Tensor]] = [
            lambda q=q, own=own, inbox=inbox: split_index_topk(q, own, share, CONFIG, inbox) for q, _, own in cases
        ]
        line["equal"] &= all_agree(all(torch.equal(call(), want) for call, want in zip(calls, wants, strict=True)))
        us = graph_us(calls)
        line |= {f"{way} us": us, f"{way} times": line["one_gpu_us"] / us}
    return line | {"reason": reason(line, world)}


def _layer(requests: int, blocks: int, world: int, rank: int, g: torch.Generator) -> tuple[Pages, Pages]:
    """One layer's pages, and those of this rank."""
    table = torch.randperm(requests * blocks, generator=g, device="cuda").int().view(requests, blocks)
    whole = Pages(random_pages(kv.index_page_shape(requests * blocks, DIM), g), table)
    ours = table_of(table, world, rank)
    places = torch.arange(ours.numel(), dtype=torch.int32, device="cuda").view(ours.shape)
    return whole, Pages(whole.data[ours.flatten().long()], places)


def _parts(cases: list[tuple[Tensor, Pages, Pages]], batch: Batch, share: Any, inbox: Inbox) -> dict[str, float]:
    """Microseconds of the parts: of one GPU's call, and of a rank's."""
    from . import triton_msa

    out = torch.empty(len(batch.position), GROUPS, CONFIG.topk, dtype=torch.int32, device="cuda")
    all_scores = triton_msa.index_scores(cases[0][0], cases[0][1], batch)
    own_scores = triton_msa.index_scores(cases[0][0], cases[0][2], share.local)
    return {
        "one_gpu_scores_us": graph_us([lambda q=q, whole=whole: triton_msa.index_scores(q, whole, batch) for q, whole, _ in cases]),
        "one_gpu_choice_us": graph_us([lambda: triton_msa.choose(all_scores, batch.position, CONFIG, out)] * QUERIES),
        "share_scores_us": graph_us([lambda q=q, own=own: triton_msa.index_scores(q, own, share.local) for q, _, own in cases]),
        "exchange_us": graph_us([lambda: exchange(own_scores, share, CONFIG, inbox, out, send=True, merge=True)] * QUERIES),
    }


def reason(line: dict[str, Any], world: int) -> str | None:
    """What keeps a share from being `WORTH` times as fast, in figures of the line; None where it is."""
    if line["peer memory times"] >= WORTH:
        return None
    one, whole, scores, exchanged = (line[name] for name in ("one_gpu_us", "one_gpu_scores_us", "share_scores_us", "exchange_us"))
    floor = line["floor_us"] / world
    return (
        f"to be {WORTH} times as fast a share has {one / WORTH:.1f} us: its scores take {scores:.1f} ({whole / scores:.2f} times less than "
        f"all of them; its bytes alone {floor:.1f}), candidates, exchange and merge {exchanged:.1f} (the choice alone on one GPU "
        f"{line['one_gpu_choice_us']:.1f})"
    )

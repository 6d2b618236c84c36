"""Ranks of a replica that share the indexer's work choose what one rank chooses, over rows in torch and over pages.

Four processes of a gloo group, and two pairs of them; each drives vLLM's builders and our caches by itself, as an engine's layers do.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from samebits.kernels import index_parallel
from samebits.kernels.msa import SparseConfig
from samebits.kernels.msa_ops import Norms
from samebits.quant import kv
from samebits.rollout import index_split, paged, pages
from samebits.rollout.paged import PAGE, PagedCache, PlanBuilder
from samebits.rollout.pages import PageCache, StepBuilder
from tests.support import random_m3
from tests.support.ranks import on_ranks

HEADS, GROUPS, DIM, LONGEST = 4, 2, 128, 4096
SPARSE = SparseConfig(PAGE, 16, 0, 1)
COUNT = 48  # pages of a cache
# (new tokens, all tokens) of each request of a step: chunks of prefill and decode past the 16 blocks, a number of pages that no number of
# ranks divides, requests of fewer pages than ranks.
STEPS = {"chunks": ([17, 9, 5, 3], [2900, 2177, 130, 3]), "decode": ([1, 1, 1, 1], [2901, 2178, 131, 4])}


def config(**changes):
    sparse = {"sparse_block_size": PAGE, "sparse_topk_blocks": SPARSE.topk, "sparse_local_block": 1, "sparse_num_index_heads": GROUPS}
    text = SimpleNamespace(num_attention_heads=HEADS, sparse_attention_config=sparse)
    hf = SimpleNamespace(to_dict=random_m3.config)
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=text, hf_config=hf, max_model_len=changes.pop("longest", LONGEST)),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=128, max_num_seqs=8),
        additional_config={"samebits": {"profile": "w4a16", "rank": 8} | changes},
    )


def group_of(world: int, rank: int, group=None):
    return SimpleNamespace(world_size=world, rank_in_group=rank, device_group=group, cpu_group=group, device_communicator=None)


def common(new: list[int], total: list[int], longest: int | None = None):
    """vLLM's metadata of a step; the pages of a request lie anywhere, other entries of the table would fault."""
    order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(7)).int()
    table, first, slots = torch.full((len(new), LONGEST // PAGE), 2**30, dtype=torch.int32), 0, []
    for r, (n, end) in enumerate(zip(new, total, strict=True)):
        used = -(-end // PAGE)
        table[r, :used] = order[first : first + used]
        first += used
        at = torch.arange(end - n, end)
        slots.append(table[r].long()[at // PAGE] * PAGE + at % PAGE)
    start = torch.tensor([sum(new[:i]) for i in range(len(new) + 1)], dtype=torch.int32)
    lengths = torch.tensor(total, dtype=torch.int32)
    return SimpleNamespace(
        num_actual_tokens=sum(new),
        num_reqs=len(new),
        query_start_loc=start,
        query_start_loc_cpu=start,
        seq_lens=lengths,
        seq_lens_cpu_upper_bound=lengths,
        slot_mapping=torch.cat(slots),
        block_table_tensor=table,
        max_query_len=max(new),
        max_seq_len=longest or max(total),
    )


def few(count: int, heads: int, g: torch.Generator) -> torch.Tensor:
    """Index vectors of which there are three: many scores are equal."""
    return torch.randn(3, 1, DIM, generator=g)[torch.randint(0, 3, (count,), generator=g)].expand(-1, heads, -1).contiguous()


def cache_of(kind: type, packed: bool, rounded: bool, ties: bool):
    """A layer's cache, every row of it written."""
    cache = object.__new__(kind)
    torch.nn.Module.__init__(cache)
    cache.num_heads, cache.kv_heads, cache.dim, cache.packed, cache.rounded = HEADS, GROUPS, DIM, packed, rounded
    cache.dtype, cache.scale, cache.prefix, cache.sparse = torch.float32, 0.1, "layer", SPARSE
    width = (2 * GROUPS + 1) * cache.head_width
    cache.bind_kv_cache(torch.zeros(COUNT, 1, PAGE, width, dtype=torch.uint8 if packed else torch.float32))
    g = torch.Generator().manual_seed(int(ties))
    rows = COUNT * PAGE
    k, v = (torch.randn(rows, GROUPS, DIM, generator=g) for _ in range(2))
    index_k = few(rows, 1, g) if ties else torch.randn(rows, 1, DIM, generator=g)
    slots = torch.arange(rows)
    if kind is PagedCache:
        cache._write(slots, k, v, index_k)
    elif packed:
        kv.write_pages(cache.main, slots, k, v)
        kv.write_index_pages(cache.index, slots, index_k[:, 0])
    else:
        cache.main.copy_(torch.cat((k, v), -1).view(COUNT, PAGE, GROUPS, 2 * DIM).transpose(1, 2))
        cache.index.copy_(index_k.view(COUNT, PAGE, DIM))
    return cache


def attended(cache, step, ties: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Output of the layer for a step, and what was chosen."""
    n = len(step.slots)
    g = torch.Generator().manual_seed(n)
    q, k, v = (torch.randn(n, heads, DIM, generator=g) for heads in (HEADS, GROUPS, GROUPS))
    index = [few(n, heads, g) if ties else torch.randn(n, heads, DIM, generator=g) for heads in (GROUPS, 1)]
    context = SimpleNamespace(attn_metadata={"layer": step})
    chosen, choose = [], type(cache)._choose

    def noted(*args):
        chosen.append(choose(cache, *args))
        return chosen[-1]

    cache._choose = noted
    for module in (paged, pages):
        module.get_forward_context = lambda: context
    if isinstance(cache, PageCache):
        # Nothing is turned and every norm has the weight one, so that equal index keys stay equal.
        table = torch.ones(LONGEST, DIM // 2), torch.zeros(LONGEST, DIM // 2)
        return cache.run([q, k, v, *index], Norms(*(torch.zeros(DIM) for _ in range(4)), 1e-6), table), chosen
    return cache(q, k, v, *index), chosen


CASES = [(kind, *case) for kind in (PagedCache, PageCache) for case in ((False, False, True), (True, True, False))]


def worker(rank: int, world: int) -> dict[str, bool]:
    """Which choices and outputs are those of one rank, by name."""
    pairs = [dist.new_group([first, first + 1]) for first in range(0, world, 2)]
    caches, same = {case: cache_of(*case) for case in CASES}, {}
    for size, group in ((world, None), (2, pairs[rank // 2])):
        ours = group_of(size, rank % size, group)
        split, alone = (
            {kind: kind(None, [], config(), torch.device("cpu"), group=g) for kind in (PlanBuilder, StepBuilder)}
            for g in (ours, group_of(1, 0))
        )
        for case, cache in caches.items():
            builder = StepBuilder if isinstance(cache, PageCache) else PlanBuilder
            for name, (new, total) in STEPS.items():
                want, have = (attended(cache, made[builder].build(0, common(new, total)), case[-1]) for made in (alone, split))
                equal = [torch.equal(a, b) for a, b in zip((have[0], *have[1]), (want[0], *want[1]), strict=True)]
                some = any(bool((c[..., -1] >= 0).any()) for c in want[1])
                same[f"{size} ranks {case[0].__name__} {case[1:]} {name}"] = all(equal) and some
        found = replayed(caches[PageCache, False, False, True], split[StepBuilder], alone[StepBuilder])
        same |= {f"{size} ranks {name}": equal for name, equal in found.items()}
    return same


def replayed(cache: PageCache, split: StepBuilder, alone: StepBuilder) -> dict[str, bool]:
    """A captured step has shapes and addresses of its own step and reads what the newest one wrote there."""
    captured = split.build(0, common([1] * 4, [1, 1, 1, 1], longest=LONGEST))
    index_q = torch.randn(4, GROUPS, DIM, generator=torch.Generator().manual_seed(3))
    same = {}
    for name, total in (("long", [2901, 2178, 131, 4]), ("short", [900, 1, 2048, 140])):
        step = common([1] * 4, total)
        newest = split.build(0, step)
        for a, b in ((captured.split.table, newest.split.table), (captured.split.share.local.position, newest.split.share.local.position)):
            same[f"address, {name}"] = a.data_ptr() == b.data_ptr()
        have = cache._choose(index_q, captured)
        same[f"replay, {name}"] = torch.equal(have, cache._choose(index_q, alone.build(0, step)))
    return same


def test_ranks_that_share_the_work_choose_and_attend_as_one(tmp_path):
    found = on_ranks(4, worker, tmp_path)
    assert len(found[0]) == 2 * (len(CASES) * len(STEPS) + 4)
    assert [[name for name, same in rank.items() if not same] for rank in found] == [[]] * 4


def test_who_shares_the_work():
    assert index_split.ranks_of(config(), SPARSE, group_of(2, 1)) == index_parallel.Ranks(2, 1)
    assert index_split.ranks_of(config(), SPARSE, group_of(1, 0)) is None
    assert index_split.ranks_of(config(), SPARSE) is None  # no vLLM group in this process
    assert index_split.ranks_of(config(split_indexer=False), SPARSE, group_of(2, 1)) is None
    assert index_split.ranks_of(config(longest=2048), SPARSE, group_of(2, 1)) is None  # every block is chosen
    nccl = SimpleNamespace(disabled=False, all_gather=lambda out, mine: None)
    group = group_of(2, 1)
    group.device_communicator = SimpleNamespace(pynccl_comm=nccl)
    assert index_split.ranks_of(config(), SPARSE, group).gather is nccl.all_gather
    nccl.disabled = True
    assert index_split.ranks_of(config(), SPARSE, group).gather is None


@pytest.mark.parametrize("tokens", [64, 100_000])
def test_an_inbox_has_room_for_some_tokens_of_a_step(tokens, monkeypatch):
    made = []
    monkeypatch.setattr(index_split, "open_inbox", lambda *args: made.append(args))
    ranks = index_parallel.Ranks(3, 0)
    split = index_split.IndexSplit(ranks, SPARSE, 4, tokens=tokens, requests=5, blocks=16, device=torch.device("cpu"))
    assert made == [(min(tokens, index_split.TOKENS) * 4, 16, ranks)]
    assert split.table.shape == (5, 6) and split.position.shape == (tokens,) and split.position.dtype == torch.int32

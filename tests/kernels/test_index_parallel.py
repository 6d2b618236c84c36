"""The indexer over ranks against one with all keys: the same blocks, ties and forced blocks included."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits.kernels import index_parallel, msa_ops, peer_memory
from samebits.kernels.index_parallel import Ranks, candidates, merge, open_inbox, share_of, split_index_topk, table_of
from samebits.kernels.msa import SparseConfig
from samebits.kernels.msa_ops import Batch, batch_of
from tests.support.msa_cases import make
from tests.support.ranks import on_ranks
from tests.support.spread_pages import spread

CONFIGS = [SparseConfig(topk=4), SparseConfig(topk=4, init_blocks=1), SparseConfig(topk=2, init_blocks=2, local_blocks=3)]


def choose(case, world, config):
    found = [candidates(case.index_q, keys, share, config) for keys, share in spread(case.index, case.batch, world)]
    assert all((words.diff(dim=-1) <= 0).all() for words in found)
    return merge(torch.stack(found), config.topk)


@settings(deadline=None, max_examples=25)
@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 1400)), min_size=1, max_size=3),
    st.sampled_from(CONFIGS),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_the_choice_of_one_rank(world, requests, config, ties, seed):
    new = [n for n, _ in requests]
    total = [n + before for n, before in requests]
    case = make(new, total, "bf16", groups=2, heads=2, seed=seed, integers=ties)
    want = msa_ops.index_topk(case.index_q, case.index, case.batch, config)
    assert torch.equal(choose(case, world, config), want)


def test_all_scores_equal_take_the_lowest_blocks_and_the_local_one():
    case = make([1], [2000], "bf16", groups=2, heads=2)
    case = case._replace(index_q=torch.zeros_like(case.index_q))
    for world in (1, 2, 3):
        assert choose(case, world, SparseConfig(topk=4)).tolist() == [[[0, 1, 2, 15]] * 2]


@settings(deadline=None)
@given(st.integers(1, 9), st.lists(st.integers(-1, 5000), min_size=1, max_size=6))
def test_every_key_is_one_ranks_and_seen_as_far_as_in_the_whole(world, positions):
    position = torch.tensor(positions, dtype=torch.int32)
    start = torch.arange(len(positions) + 1, dtype=torch.int32)
    batch = Batch(start, start[:-1], position, 1)
    seen = [[] for _ in positions]
    for rank in range(world):
        local = share_of(batch, world, rank).local
        assert local.position.dtype == torch.int32
        for i, last in enumerate(local.position.tolist()):
            seen[i] += [(key // 128 * world + rank) * 128 + key % 128 for key in range(last + 1)]
    assert [sorted(s) for s in seen] == [list(range(p + 1)) for p in positions]


def test_a_table_is_dealt_out_page_by_page():
    table = torch.arange(14).view(2, 7)
    dealt = [table_of(table, 3, r) for r in range(3)]
    assert all(t.shape == (2, 3) and t.is_contiguous() for t in dealt)  # as wide on all ranks
    assert [t.tolist() for t in dealt] == [[[0, 3, 6], [7, 10, 13]], [[1, 4, 0], [8, 11, 0]], [[2, 5, 0], [9, 12, 0]]]
    held = torch.full((4, 6), -7)
    assert table_of(table, 3, 1, out=held).data_ptr() == held.data_ptr()
    assert held.tolist() == [[1, 4, -7, -7, -7, -7], [8, 11, -7, -7, -7, -7], [-7] * 6, [-7] * 6]


def ragged():
    return make([1, 2, 1], [700, 129, 3], "nvfp4", groups=2, heads=2, integers=True), SparseConfig(topk=4)


def worker(rank: int, world: int) -> torch.Tensor:
    case, config = ragged()
    keys, share = spread(case.index, case.batch, world)[rank]
    inboxes(rank, world)
    return split_index_topk(case.index_q, keys, share, config)


def inboxes(rank: int, world: int) -> None:
    """What ranks agree on, with GPUs that are made up: each sees one for each rank, and is itself on the one of its own number."""
    access = {(a, b) for a in range(world) for b in range(world)}
    cuda, uuids = torch.cuda, [f"gpu-{i}" for i in range(world)]
    cuda.device_count, cuda.current_device = lambda: world, lambda: rank
    cuda.get_device_properties = lambda i: SimpleNamespace(uuid=uuids[i])
    cuda.can_device_access_peer = lambda a, b: (a, b) in access
    assert peer_memory.addressable()
    access.remove((1, 0))
    assert not peer_memory.addressable()  # on all ranks, though only one cannot
    access.add((1, 0))
    uuids[1 - rank] = "another"  # a GPU that this process does not see
    assert not peer_memory.addressable()
    uuids[1 - rank] = f"gpu-{1 - rank}"

    refusing = set()

    def memory(shape, dtype, group):
        if rank in refusing:
            raise RuntimeError("no mapping\nand more")
        return SimpleNamespace(local=torch.zeros(shape, dtype=dtype), addresses=torch.zeros(world, dtype=torch.int64))

    index_parallel.PeerMemory, index_parallel._device = memory, lambda group: torch.device("cpu")
    index_parallel._on_gpus = lambda group: True
    for peers in (True, False):
        inbox = open_inbox(8, 4, Ranks(world, rank, gather=print))
        assert (inbox.shared is not None) == peers and inbox.words.shape == (2, world, 8, 4)
        assert inbox.ranks.gather == (None if peers else print)
        refusing.add(1)
    access.clear()
    assert open_inbox(8, 4, Ranks(world, rank)).shared is None


@pytest.mark.parametrize("world", [2])
def test_over_gloo(world, tmp_path):
    case, config = ragged()
    want = msa_ops.index_topk(case.index_q, case.index, case.batch, config)
    for have in on_ranks(world, worker, tmp_path):
        assert torch.equal(have, want)


def test_padding_chooses_nothing():
    case = make([1, 1], [300, 300], "bf16", groups=1, heads=2)
    batch = batch_of([1, 1], [300, 300])
    case = case._replace(batch=batch._replace(position=torch.tensor([299, -1], dtype=torch.int32)))
    for world in (1, 2):
        assert choose(case, world, SparseConfig(topk=4)).tolist() == [[[0, 1, 2, -1]], [[-1] * 4]]

"""The indexer over two GPUs against one with all keys: the same blocks, over NCCL and over peer memory, alone and in graph replay."""

import pytest
import torch

from samebits.kernels import msa_ops
from samebits.kernels.msa import SparseConfig
from samebits.kernels.msa_ops import batch_of
from tests.support.msa_cases import FORMATS, make
from tests.support.ranks import on_ranks
from tests.support.spread_pages import spread

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")]
SHAPES = {
    "ragged": ([1, 8, 2, 5, 1, 3, 1, 1, 4], [1, 2048, 127, 128, 129, 2049, 2177, 5003, 3968]),
    "one short request": ([1], [5]),
    "long": ([1, 1], [131072, 70001]),
}
CONFIGS = (SparseConfig(), SparseConfig(init_blocks=1, local_blocks=3))


def worker(rank: int, world: int) -> dict[str, bool]:
    """Which choices are equal to one rank's, by name."""
    from samebits.kernels.index_parallel import Inbox, split_index_topk

    inboxes = {way: Inbox(128, 16, peers=way == "peer memory") for way in ("peer memory", "NCCL")}
    equal = {}
    for shape, (new, total) in SHAPES.items():
        for form in FORMATS:
            for ties in (True, False):
                case = make(new, total, form, integers=ties, device="cuda")
                keys, share = spread(case.index, case.batch, world)[rank]
                for config in CONFIGS:
                    want = msa_ops.index_topk(case.index_q, case.index, case.batch, config)
                    for way, inbox in inboxes.items():
                        have = split_index_topk(case.index_q, keys, share, config, inbox)
                        equal[f"{shape} {form} {ties} {config} {way}"] = torch.equal(have, want)
    case = make([1] * 4, [9000, 300, 4000, 20000], "nvfp4", device="cuda")
    keys, share = spread(case.index, batch_of([1] * 4, [9000, 300, 4000, 20000], "cuda"), world)[rank]
    index_q = case.index_q.clone()
    for way, inbox in inboxes.items():
        split_index_topk(index_q, keys, share, SparseConfig(), inbox)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = [split_index_topk(index_q, keys, share, SparseConfig(), inbox) for _ in range(3)]
        for seed in range(400):  # the count of calls begins again after 1000
            g = torch.Generator("cuda").manual_seed(seed)
            index_q.copy_(torch.randn(index_q.shape, generator=g, device="cuda"))
            graph.replay()
            if seed % 40 == 0 or seed > 330:
                want = msa_ops.index_topk(index_q, case.index, case.batch, SparseConfig())
                equal[f"replay {way} {seed}"] = all(torch.equal(o, want) for o in out)
    return equal


def test_every_rank_chooses_the_blocks_of_one(tmp_path):
    pytest.importorskip("triton")
    found = on_ranks(2, worker, tmp_path, "nccl")
    assert len(found[0]) > 150
    assert [[name for name, same in equal.items() if not same] for equal in found] == [[], []]

"""The engine's steps of a shared indexer on two GPUs: captured once, replayed for other steps, against one GPU with all pages."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("vllm")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")]

from samebits.kernels import index_parallel, msa_ops  # noqa: E402
from samebits.kernels.msa import SparseConfig  # noqa: E402
from samebits.kernels.msa_ops import Pages  # noqa: E402
from tests.support.msa_cases import make  # noqa: E402
from tests.support.ranks import on_ranks  # noqa: E402

SPARSE, GROUPS, LONGEST = SparseConfig(), 4, 20480
STEPS = ([9000, 300, 4000, 20000], [2049, 2048, 1, 20479], [128, 5003, 129, 2177], [3, 1, 2, 400])


def config():
    from tests.support import random_m3

    sparse = {"sparse_block_size": 128, "sparse_topk_blocks": 16, "sparse_local_block": 1, "sparse_num_index_heads": GROUPS}
    text = SimpleNamespace(num_attention_heads=64, sparse_attention_config=sparse)
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=text, hf_config=SimpleNamespace(to_dict=random_m3.config), max_model_len=LONGEST),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=512, max_num_seqs=8),
        additional_config={"samebits": {"profile": "w4a16", "kv_cache": "nvfp4", "rank": 8}},
    )


def common(case, total: list[int], longest: int):
    """vLLM's metadata of a decode step over the pages of a case, whose requests are at least as long."""
    n = len(total)
    return SimpleNamespace(
        num_actual_tokens=n,
        num_reqs=n,
        query_start_loc=torch.arange(n + 1, dtype=torch.int32, device="cuda"),
        seq_lens=torch.tensor(total, dtype=torch.int32, device="cuda"),
        slot_mapping=torch.arange(n, device="cuda"),
        block_table_tensor=case.index.table,
        max_query_len=1,
        max_seq_len=longest,
    )


def worker(rank: int, world: int) -> dict[str, bool]:
    """Which choices are equal to one GPU's, by name."""
    from samebits.rollout.pages import StepBuilder

    host, equal = dist.new_group(backend="gloo"), {}
    case = make([1] * 4, [LONGEST] * 4, "nvfp4", device="cuda", integers=True)
    index_q = case.index_q.clone()
    for way in ("peer memory", "NCCL"):
        if way == "NCCL":
            index_parallel.addressable = lambda group: False
        group = SimpleNamespace(world_size=world, rank_in_group=rank, device_group=None, cpu_group=host, device_communicator=None)
        builder = StepBuilder(None, [], config(), torch.device("cuda", rank), group=group)
        equal[f"{way} is the way"] = (builder.split.inbox.shared is not None) == (way == "peer memory")
        captured = builder.build(0, common(case, [1] * 4, LONGEST)).split

        def choice(captured=captured):
            share, table, inbox = captured
            return index_parallel.split_index_topk(index_q, Pages(case.index.data, table), share, SPARSE, inbox)

        choice()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = choice()
        for step, total in enumerate(STEPS):
            g = torch.Generator("cuda").manual_seed(step)
            index_q.copy_(torch.randint(-1, 2, index_q.shape, generator=g, device="cuda"))
            batch = builder.build(0, common(case, total, max(total))).batch
            graph.replay()
            equal[f"{way}, step {step}"] = torch.equal(out, msa_ops.index_topk(index_q, case.index, batch, SPARSE))
    return equal


def test_a_captured_choice_is_that_of_the_step_it_is_replayed_for(tmp_path):
    found = on_ranks(2, worker, tmp_path, "nccl")
    assert len(found[0]) == 2 * (1 + len(STEPS))
    assert [[name for name, same in equal.items() if not same] for equal in found] == [[], []]

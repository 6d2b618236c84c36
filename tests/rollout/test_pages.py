"""The GPU engine's wiring on a CPU: packed tiles, MSA pages, slots by token, with the torch references of the kernels.

What differs from a GPU is who computes the ops. Against the engine of CPUs, which shares none of this wiring, in the same dtype.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from samebits.kernels.expert_tiles import NVFP4Tiles
from samebits.kernels.linear_tiles import MXFP8Tiles
from samebits.quant.profile import get_profile
from samebits.rollout import paged, pages
from samebits.rollout.pages import PageCache
from tests.support.gpu_wiring import as_on_a_gpu

from .conftest import adapter, prompt

pytestmark = pytest.mark.slow
LENGTHS = (1, 127, 128, 129, 700, 2600)


@pytest.fixture(scope="module", params=["bfloat16", "nvfp4"])
def engine(request, start):
    with as_on_a_gpu():
        made = start(
            dtype="bfloat16",
            max_model_len=4096,
            max_num_batched_tokens=4096,
            additional_config={"samebits": {"profile": "w4a16", "kv_cache": request.param, "rank": 8}},
        )
    made.kv_cache, made.profile = request.param, get_profile("w4a16", request.param).hash
    return made


@pytest.fixture(scope="module")
def plain(engine, start):
    made = start(
        dtype="bfloat16",
        max_model_len=4096,
        max_num_batched_tokens=4096,
        additional_config={"samebits": {"profile": "w4a16", "kv_cache": engine.kv_cache, "rank": 8}},
    )
    made.profile = engine.profile
    return made


def test_what_is_held(engine, plain):
    experts = engine.model.get_submodule("model.layers.1.block_sparse_moe.experts")
    assert isinstance(experts.w13, NVFP4Tiles) and isinstance(experts.w2, NVFP4Tiles)
    assert isinstance(engine.model.get_submodule("model.layers.0.mlp.down_proj").tiles, MXFP8Tiles)
    cache = engine.model.get_submodule("model.layers.2.self_attn.attn")
    assert isinstance(cache, PageCache)
    each = cache.kv_cache.numel() * cache.kv_cache.element_size() / (len(cache.kv_cache) * 128)
    assert each == (72 if engine.kv_cache == "nvfp4" else 256) * 5  # K and V of two heads, and the index key
    assert engine.rpc("samebits_base_digests") == plain.rpc("samebits_base_digests")


def test_logprobs_are_those_of_the_other_engine(engine, plain, tmp_path):
    for one in (engine, plain):
        one.clear()
        for version in (3, 4):
            one.load(adapter(version, 0.1), version, tmp_path)
    prompts = [prompt(n, n) for n in LENGTHS]
    versions = [3, None, 4, 3, 3, None]
    ours, theirs = (one.run(prompts, versions=versions, tokens=4, temperature=0) for one in (engine, plain))
    for a, b in zip(ours, theirs, strict=True):
        if len(a.prompt_logprobs):
            difference = (a.prompt_logprobs - b.prompt_logprobs).abs()
            # bf16 rounds at other places; a route or block choice near a tie moves a token by more.
            assert difference.median() < 0.02 and (difference > 0.2).float().mean() < 0.05
    together = torch.cat([o.prompt_logprobs for o in ours])
    alone = torch.cat([o.prompt_logprobs for o in engine.run(prompts, versions=[4, 3, None, None, None, 3])])
    assert (together - alone).abs().mean() > 0.01  # other adapters, other logprobs


def test_decode_is_prefill(engine, tmp_path):
    engine.clear()
    engine.load(adapter(5, 0.1), 5, tmp_path)
    prompts = [prompt(n, n + 1) for n in (3, 126, 640)]
    outs = engine.run(prompts, versions=5, tokens=6, temperature=0, prompt_logprobs=None)
    engine.llm.reset_prefix_cache()
    again = engine.run([p + o.ids[:-1] for p, o in zip(prompts, outs, strict=True)], versions=5)
    for p, o, whole in zip(prompts, outs, again, strict=True):
        assert (whole.prompt_logprobs[len(p) - 1 :] - o.logprobs[:-1]).abs().max() < 0.1


def test_padding_of_a_step_has_no_position_and_no_request_reads_it():
    """As a decode graph for four requests sees a step of two: the other two start where the tokens end."""
    builder = object.__new__(pages.StepBuilder)
    builder.token = torch.arange(8, dtype=torch.int32)
    builder.request, builder.position = torch.full((8,), 99, dtype=torch.int32), torch.full((8,), 99, dtype=torch.int32)
    common = SimpleNamespace(
        num_actual_tokens=4,
        num_reqs=4,
        query_start_loc=torch.tensor([0, 1, 2, 2, 2], dtype=torch.int32),
        seq_lens=torch.tensor([130, 7, 0, 0], dtype=torch.int32),
        slot_mapping=torch.tensor([5, 300, -1, -1]),
        block_table_tensor=torch.arange(16, dtype=torch.int32).view(4, 4),
        max_query_len=1,
        max_seq_len=200,
    )
    step = builder.build(0, common)
    assert step.batch.position.tolist() == [129, 6, -1, -1] and step.batch.request.tolist() == [0, 1, 3, 3]
    assert step.table.shape == (4, 2) and step.slots.tolist() == [5, 300, -1, -1]
    assert step.batch.position.data_ptr() == builder.position.data_ptr()
    # Chunks of several tokens: the last positions of their requests.
    common.query_start_loc = torch.tensor([0, 3, 3, 4, 4], dtype=torch.int32)
    common.seq_lens = torch.tensor([130, 9, 41, 0], dtype=torch.int32)
    step = builder.build(0, common)
    assert step.batch.position.tolist() == [127, 128, 129, 40] and step.batch.request.tolist() == [0, 0, 0, 2]


def test_pages_lie_in_vllms_memory_where_the_ops_read_them():
    for packed, dtype in ((True, torch.uint8), (False, torch.bfloat16)):
        cache = object.__new__(PageCache)
        torch.nn.Module.__init__(cache)
        cache.kv_heads, cache.dim, cache.packed, cache.dtype = 2, 128, packed, torch.bfloat16
        width = 72 if packed else 128
        memory = (torch.arange(3 * paged.PAGE * 5 * width) % 251).to(dtype).view(3, 1, paged.PAGE, 5 * width)
        cache.bind_kv_cache(memory)
        assert cache.main.shape == ((3, 4, 128, 72) if packed else (3, 2, 128, 256)) and cache.index.shape == (3, 128, width)
        for part, first in ((cache.main, 0), (cache.index, 4 * paged.PAGE * width)):
            assert part.stride(0) == 5 * paged.PAGE * width and part.data_ptr() == memory.data_ptr() + first * memory.element_size()
            assert torch.equal(part[1].flatten(), memory[1].flatten()[first : first + part[1].numel()])

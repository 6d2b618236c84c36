"""A replica of two ranks, as vLLM starts them on a CPU, against a replica of one: same tokens, same bits, and every rank proves its parts.

The model's sizes are multiples of 64 on each rank: BLAS on a CPU may sum the last few rows of a product in another order, as it may for
another number of tokens, which the kernels of a GPU do not (see tests/kernels).
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from vllm import envs

from samebits.alignment_checks.in_run import check_bases
from samebits.alignment_checks.weights import WeightMismatch, base_digests, verify_sync
from samebits.quant.adapter import AdapterSpec, Manifest, ModelShape
from samebits.quant.checkpoint import Checkpoint
from samebits.quant.profile import get_profile
from samebits.quant.roles import LORA_ROLES
from tests.support import random_m3
from tests.support.gpu_wiring import as_on_a_gpu

from .conftest import KV_BYTES, Engine, same_bits

pytestmark = pytest.mark.slow
SIZES = dict(hidden=128, intermediate=128, dense=256, vocab=128)
SPEC = AdapterSpec(ModelShape.from_config(random_m3.config(**SIZES)), 8, LORA_ROLES)
LENGTHS = (1, 5, 127, 700)
"""The longest has more blocks than the four that are chosen."""
_KEPT: list[Spread] = []


class Spread(Engine):
    """An engine of two ranks, which are processes of their own."""

    def __init__(self, llm, profile: str) -> None:
        self.llm, self.profile = llm, profile

    def stop(self) -> None:
        """End the ranks' processes. The rest stays to the session's end: vLLM's own shutdown takes this process's group with it."""
        self.llm.llm_engine.engine_core.engine_core.model_executor.shutdown()
        _KEPT.append(self)

    def every(self, method, *args) -> list:
        """Answers of all ranks."""
        return list(self.llm.collective_rpc(method, args=args))


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """In this process and in those of the ranks: how many threads share a product may decide where its sums are cut."""
    threads, patch = torch.get_num_threads(), pytest.MonkeyPatch()
    torch._C.set_num_threads(1)  # vLLM's CPU worker replaces torch's own name of it
    for name, value in (("OMP_NUM_THREADS", "1"), ("VLLM_CPU_OMP_THREADS_BIND", "nobind"), ("TORCHDYNAMO_DISABLE", "1")):
        patch.setenv(name, value)
    envs.disable_envs_cache()  # vLLM remembers what an engine before this one was told
    yield
    patch.undo()
    envs.disable_envs_cache()
    torch._C.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return random_m3.build(tmp_path_factory.mktemp("spread_m3"), **SIZES)


def options(kv_cache: str, profile: str) -> dict:
    return dict(
        dtype="float32" if profile == "w4a16-fp32" else "bfloat16",
        max_num_batched_tokens=1024,
        kv_cache_memory_bytes=KV_BYTES,
        seed=0,
        additional_config={"samebits": {"profile": profile, "kv_cache": kv_cache, "rank": 8}},
    )


@pytest.fixture(scope="module")
def alone(start, folder):
    made = start(folder=folder, **options("nvfp4", "w4a16-fp32"))
    made.profile = get_profile("w4a16-fp32", "nvfp4").hash
    return made


def spread_engine(folder, kv_cache: str, profile: str, extension: str = "samebits.rollout.worker.WorkerExtension") -> Spread:
    from vllm import LLM

    llm = LLM(
        str(folder),
        max_model_len=1024,
        max_num_seqs=16,
        enforce_eager=True,
        enable_lora=True,
        max_lora_rank=8,
        max_loras=2,
        enable_return_routed_experts=True,
        logprobs_mode="processed_logprobs",
        worker_extension_cls=extension,
        tensor_parallel_size=2,
        enable_expert_parallel=True,
        **options(kv_cache, profile),
    )
    return Spread(llm, get_profile(profile, kv_cache).hash)


@pytest.fixture(scope="module")
def spread(alone, folder):
    made = spread_engine(folder, "nvfp4", "w4a16-fp32")
    yield made
    made.stop()


def adapter(seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {name: (torch.randn(*shape, generator=g) * 0.1).to(torch.bfloat16) for name, shape in SPEC.shapes().items()}


def send(engine: Engine, tensors: dict[str, torch.Tensor], version: int, folder) -> tuple[Manifest, list[str]]:
    path = folder / f"{version}.safetensors"
    save_file(tensors, path)
    ranks = 2 if isinstance(engine, Spread) else 1
    sent = Manifest.of(tensors, version, engine.profile, world=ranks)
    return sent, list(engine.llm.collective_rpc("samebits_load_adapter", args=(str(path), sent.to_json())))


def as_report(sent: Manifest, held: list[str]) -> dict:
    return {"tensors": len(sent.digests), "bytes": sent.bytes, "seconds": 1.0, "sent": sent.to_json(), "held": held}


def prompts(lengths=LENGTHS) -> list[list[int]]:
    return [torch.randint(3, 128, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in lengths]


def rows_keep_their_bits() -> bool:
    """Whether this machine's BLAS sums a row of a product alike in a matrix of half the rows, for the shapes of these tests."""
    g = torch.Generator().manual_seed(0)
    for outputs, inputs in ((256, 128), (512, 128), (128, 256), (128, 512), (128, 8), (256, 8)):
        for tokens in (1, 2, 3, 4, 127, 700):
            x, w = torch.randn(tokens, inputs, generator=g), torch.randn(outputs, inputs, generator=g)
            if not torch.equal(F.linear(x, w), torch.cat([F.linear(x, part) for part in w.chunk(2)], 1)):
                return False
    return True


def require_equal(have, want) -> None:
    exact = rows_keep_their_bits()
    for a, b in zip(have, want, strict=True):
        assert a.ids == b.ids and np.array_equal(a.routes, b.routes) and a.routes.shape[0] == b.routes.shape[0] > 0
        for mine, other in ((a.prompt_logprobs, b.prompt_logprobs), (a.logprobs, b.logprobs)):
            assert same_bits(mine, other) if exact else torch.allclose(mine, other, atol=1e-4)


def test_two_ranks_give_the_bits_of_one(alone, spread, tmp_path):
    for engine in (alone, spread):
        sent, held = send(engine, adapter(3), 3, tmp_path)
        assert sent.agrees([Manifest.from_json(answer) for answer in held])
    for version in (3, None):
        # Sampled on both ranks, which must agree: a rank that fed another token back would soon differ in its logprobs.
        want, have = (one.run(prompts(), versions=version, tokens=5, temperature=0) for one in (alone, spread))
        require_equal(have, want)
    assert len({tuple(o.ids) for o in have}) == len(have)
    mixed = [3, None, None, 3]
    require_equal(*(one.run(prompts(), versions=mixed, tokens=3, seed=7) for one in (spread, alone)))


def test_taps_of_two_ranks_are_whole_and_those_of_one(alone, spread, tmp_path):
    found = []
    for i, engine in enumerate((alone, spread)):
        engine.llm.reset_prefix_cache()
        engine.llm.collective_rpc("samebits_record", args=(None,))
        engine.run(prompts((700,)), versions=None)
        order = engine.llm.collective_rpc("samebits_recorded", args=(str(tmp_path / f"{i}.safetensors"),))
        found.append((order[0], load_file(tmp_path / f"{i}.safetensors")))
    (points, want), (same_points, have) = found
    assert points == same_points and {"model.layers.1.self_attn.q", "model.layers.1.self_attn.blocks"} <= set(points)
    exact = rows_keep_their_bits()
    for point in points:
        assert have[point].shape == want[point].shape, point
        assert torch.equal(have[point], want[point]) if exact else torch.allclose(have[point].float(), want[point].float(), atol=1e-3), (
            point
        )


def test_every_rank_answers_for_its_own_parts_and_a_false_one_is_named(spread, tmp_path):
    sent, held = send(spread, adapter(5), 5, tmp_path)
    assert verify_sync([as_report(sent, held)], 5, spread.profile).ranks == 2
    sizes = [len(Manifest.from_json(answer).digests) for answer in held]
    assert sizes == [len(part) for part in sent.parts] and all(size < len(sent.digests) for size in sizes)
    name = "base_model.model.model.layers.2.block_sparse_moe.experts.6.w2.lora_B.weight"
    spread.every(_falsify, 1, "adapter")
    wrong = spread.every("samebits_held_adapter", 5)
    with pytest.raises(WeightMismatch, match=f"replica 0 rank 1: {name} differs"):
        verify_sync([as_report(sent, wrong)], 5, spread.profile)
    assert json.loads(wrong[0]) == json.loads(held[0]), "another rank's answer moved"
    with pytest.raises(WeightMismatch, match="replica 0 rank 0: rank 1 of 2 answered in its place"):
        verify_sync([as_report(sent, held[::-1])], 5, spread.profile)
    with pytest.raises(WeightMismatch, match="replica 0: 1 of 2 ranks answered what they hold"):
        verify_sync([as_report(sent, held[:1])], 5, spread.profile)


def test_the_base_of_every_rank_is_the_checkpoint_s_part(spread, folder):
    expected = base_digests(Checkpoint(folder), 2)
    answers = spread.every("samebits_base_digests")
    assert check_bases(expected, [answers]).status == "agree" and answers == expected.ranks
    spread.every(_falsify, 0, "base")
    wrong = spread.every("samebits_base_digests")
    found = check_bases(expected, [wrong])
    assert [f.message for f in found.findings] == ["base of replica 0 rank 0: model.layers.0.self_attn.o_proj differs"]
    spread.every(_falsify, 0, "base")
    assert check_bases(expected, [spread.every("samebits_base_digests")]).status == "agree"


def _falsify(worker, rank: int, what: str) -> None:
    """In the worker: change a number of one rank's adapter, or turn the sign of one of its base."""
    if worker.rank != rank:
        return
    model = worker.model_runner.get_model()
    if what == "base":
        model.get_submodule("model.layers.0.self_attn.o_proj").weight.data[3, 5] *= -1
        return
    experts = model.get_submodule("model.layers.2.block_sparse_moe.experts").adapter
    experts.views(experts.slots.slot(6))["model.layers.2.block_sparse_moe.experts.6.w2"][1][7, 1] *= -2


def test_after_a_call_that_failed_the_next_one_gets_its_own_answers(spread):
    """vLLM stops reading at the first rank that failed: the others' answers would be taken for those of the next call."""
    for _ in range(2):
        with pytest.raises(RuntimeError, match="adapter was trained with 0000000000000000"):
            spread.every("samebits_load_adapter", "/nowhere", Manifest.of({}, 1, "0" * 16).to_json())
    assert spread.every("samebits_profile") == [spread.profile] * 2
    assert [len(answer) for answer in spread.every("samebits_base_digests")] == [72, 72]


@pytest.mark.long
@pytest.mark.parametrize("kv_cache", ["bfloat16", "nvfp4"])
def test_two_ranks_wired_as_on_a_gpu_give_the_bits_of_one(start, folder, kv_cache, tmp_path):
    """Packed tiles, MSA pages, slots by token, with the torch references of the kernels."""
    with as_on_a_gpu():
        alone = start(folder=folder, **options(kv_cache, "w4a16"))
    alone.profile = get_profile("w4a16", kv_cache).hash
    spread = spread_engine(folder, kv_cache, "w4a16", "tests.support.gpu_wiring_worker.WiredWorker")
    try:
        for engine in (alone, spread):
            for version in (3, 4):
                sent, held = send(engine, adapter(version), version, tmp_path)
                assert sent.agrees([Manifest.from_json(answer) for answer in held])
        assert spread.every(_tiles) == [True, True]
        require_equal(*(one.run(prompts(), versions=[3, None, 4, 4], tokens=4, temperature=0) for one in (spread, alone)))
    finally:
        spread.stop()


def _tiles(worker) -> bool:
    from samebits.rollout.pages import PageCache

    layer = worker.model_runner.get_model().model.layers[1]
    return layer.self_attn.qkv_proj.tiles is not None and isinstance(layer.self_attn.attn, PageCache)

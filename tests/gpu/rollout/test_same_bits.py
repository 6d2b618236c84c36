"""The engine on its kernels, with CUDA graphs, against itself and against the training model, bit for bit.

A mid-size MiniMax-M3 with the real head, block and top-k sizes, an adapter on every role, contexts below and beyond 16 x 128 tokens. Of
that model and of the shipped tiny one it is reported how far an NVFP4 cache moves logprobs against bf16 pages.
"""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("vllm")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from samebits.quant.adapter import AdapterSpec, ModelShape
from samebits.quant.checkpoint import Checkpoint
from samebits.quant.profile import get_profile
from samebits.quant.roles import LORA_ROLES
from tests.rollout.conftest import LARGE, UNTUNED, Engine, same_bits, usual_options
from tests.support import kv_formats, random_m3
from tests.support.kv_formats import CACHES, RANK
from tests.support.kv_formats import LONG as LENGTHS
from tests.support.kv_formats import MID as SIZES

TOKENS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return random_m3.build(tmp_path_factory.mktemp("m3"), **SIZES)


@pytest.fixture(scope="module", params=CACHES)
def engine(request, folder):
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")
    from vllm import LLM

    made = Engine(
        LLM(
            str(folder),
            max_model_len=4096,
            gpu_memory_utilization=0.1,
            enable_prefix_caching=True,
            # As recipes may say it, too: by vLLM's own key.
            kv_cache_dtype="nvfp4" if request.param == "nvfp4" else "auto",
            kernel_config=UNTUNED,
            **LARGE,
            **usual_options("w4a16", RANK),
        ),
        request.param,
        "w4a16",
    )
    assert made.rpc("samebits_profile") == made.profile, "another cache than the one that was asked for"
    yield made
    made.close()


def adapter(seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = AdapterSpec(ModelShape.from_config(random_m3.config(**SIZES)), RANK, LORA_ROLES).shapes()
    return {name: (torch.randn(*shape, generator=g) * 0.05).to(torch.bfloat16) for name, shape in shapes.items()}


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, SIZES["vocab"], (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def sampled(engine, tmp_path_factory):
    """(prompt, what was generated after it by decode graphs in one batch), with adapter 7; adapter 8 is resident beside it."""
    for version in (7, 8):
        engine.load(adapter(version), version, tmp_path_factory.mktemp("adapter"))
    prompts = [prompt(n, n) for n in LENGTHS] + [prompt(40 + i, i) for i in range(40)]
    manager = engine.runner.cudagraph_manager
    assert manager.graphs, "no CUDA graph was captured"
    assert manager.cudagraph_mode.name == "FULL_DECODE_ONLY", "other steps than those of decode are captured"
    return list(zip(prompts, engine.run(prompts, versions=7, tokens=TOKENS, prompt_logprobs=None), strict=True))


def test_decode_graphs_and_prefill_give_the_same_bits(engine, sampled):
    engine.llm.reset_prefix_cache()
    again = engine.run([p + out.ids[:-1] for p, out in sampled], versions=7, tokens=1)
    for (p, out), whole in zip(sampled, again, strict=True):
        assert same_bits(whole.prompt_logprobs[len(p) - 1 :], out.logprobs[:-1]), len(p)
        assert (whole.routes == out.routes).all()


def test_alone_and_beside_another_adapter_the_bits_are_the_same(engine, sampled):
    few = sampled[: len(LENGTHS)]
    together = engine.run([p + out.ids[:-1] for p, out in few] * 2, versions=[7] * len(few) + [8] * len(few))
    for i, (p, out) in enumerate(few):
        engine.llm.reset_prefix_cache()
        (alone,) = engine.run([p + out.ids[:-1]], versions=7)
        assert same_bits(alone.prompt_logprobs, together[i].prompt_logprobs)
        assert not same_bits(alone.prompt_logprobs[2:], together[len(few) + i].prompt_logprobs[2:])


def test_base_and_adapter_differ_and_the_base_is_the_base(engine, sampled):
    ids = sampled[4][0]
    with_adapter, base = engine.run([ids] * 2, versions=[7, None])
    (alone,) = engine.run([ids])
    assert same_bits(base.prompt_logprobs, alone.prompt_logprobs)
    assert (with_adapter.prompt_logprobs - base.prompt_logprobs).abs().mean() > 1e-3


def test_bytes_of_a_token(engine):
    cache = engine.model.get_submodule("model.layers.1.self_attn.attn").kv_cache
    each = cache.numel() * cache.element_size() / (cache.shape[0] * 128)
    assert each == (576 + 72 if cache.dtype == torch.uint8 else 2048 + 256)
    print(f"\n{cache.dtype}: {each:.0f} bytes a token and layer, as allocated")


def test_the_training_model_gives_the_same_bits(engine, sampled, folder):
    from samebits.trainer.lora import LoRASettings
    from samebits.trainer.model import M3ForTraining

    packed = engine.rpc("samebits_profile") == get_profile("w4a16", "nvfp4").hash
    profile = get_profile("w4a16", "nvfp4" if packed else None)
    model = M3ForTraining(Checkpoint(folder), profile, LoRASettings(RANK, RANK, LORA_ROLES), pack_on=torch.device("cuda")).cuda()
    tensors = adapter(7)
    names = [name for name, _ in model.export_adapter()]
    assert sorted(names) == sorted(tensors)
    _fill(model, tensors)
    for name, value in model.export_adapter():
        assert torch.equal(value.cpu(), tensors[name])
    few = sampled[: len(LENGTHS) + 8]
    sequences = [p + out.ids for p, out in few]
    tokens = torch.tensor([t for s in sequences for t in s], device="cuda")
    lengths = [len(s) for s in sequences]
    with torch.no_grad():
        got = model(tokens, lengths, tokens.roll(-1), torch.ones(len(tokens), device="cuda"), capture=True)
    worst, at = 0.0, 0
    for (p, out), n in zip(few, lengths, strict=True):
        mine = got.logprobs[at + len(p) - 1 : at + n - 1].cpu()
        worst = max(worst, (mine - out.logprobs).abs().max().item())
        assert (got.routes[at : at + n - 1].cpu().numpy() == out.routes).all()
        at += n
    print(f"\n{engine.rpc('samebits_profile')}: largest difference of a logprob between trainer and engine {worst:.3g}")
    assert worst == 0.0


def _fill(model, tensors: dict[str, torch.Tensor]) -> None:
    """Set the masters to the values of an exported adapter."""
    from samebits.quant.adapter import tensor_name
    from samebits.quant.roles import ModuleId

    for layer in model.layers:
        for pair in layer.lora.pairs.values():
            for side, master in (("A", pair.lora_A), ("B", pair.lora_B)):
                experts = range(pair.experts) if pair.experts else (-1,)
                values = [tensors[tensor_name(ModuleId(pair.role, pair.layer, e), side)] for e in experts]
                master.data.copy_(torch.stack(values) if pair.experts else values[0])


@pytest.mark.parametrize("model", ["tiny", "mid"])
def test_how_far_an_nvfp4_cache_moves_logprobs_is_told(model, tmp_path):
    """Reported, not judged, beyond that the caches differ; both engines are processes of this test."""
    found = kv_formats.compare(model, "cuda", TOKENS, tmp_path)
    print(f"\n{kv_formats.line(found)}")
    assert found["tokens"] == TOKENS * found["sequences"] and 0 < found["mean_abs"] <= found["max_abs"] < float("inf")

"""The serving model against an independent forward, and its adapters, in a running engine."""

from __future__ import annotations

import pytest
import torch

from samebits.alignment_checks.reference_m3 import ReferenceM3
from samebits.quant.adapter import AdapterError, Manifest, digest, parse_name
from samebits.quant.checkpoint import Checkpoint
from samebits.quant.roles import LORA_ROLES, Role

from .conftest import adapter, prompt, same_bits, spec

pytestmark = pytest.mark.slow
GREEDY = {"temperature": 0}


@pytest.fixture(autouse=True)
def no_adapters(request):
    if "engine" in request.fixturenames:
        request.getfixturevalue("engine").clear()
        request.getfixturevalue("engine").llm.reset_prefix_cache()


def reference_logprobs(model: ReferenceM3, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    logits, _ = model(ids)
    return (logits / temperature).log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]]


def test_logprobs_are_the_reference_beyond_topk_blocks(engine, checkpoint):
    ids = prompt(700)  # the fixture chooses 4 blocks of 128
    (out,) = engine.run([ids], tokens=20)
    full = ids + out.ids
    want = reference_logprobs(ReferenceM3(checkpoint), full)
    have = torch.cat((out.prompt_logprobs, out.logprobs))
    assert have.shape == want.shape
    assert (have - want).abs().max() < 1e-4


def test_a_worker_is_patched_where_the_model_is_built(engine):
    """What the plugin itself does not import (see `test_plugin`)."""
    from vllm.v1.worker.gpu_worker import Worker

    assert Worker.sleep.__module__ == "samebits.rollout.vllm_patches"


def test_the_reference_is_sensitive_to_the_block_choice(checkpoint):
    """The bound above is tight enough to see another choice of blocks."""
    ids = prompt(700)
    model = ReferenceM3(checkpoint)
    want = reference_logprobs(model, ids)
    model.c["sparse_attention_config"]["sparse_topk_blocks"] = 5
    assert (reference_logprobs(model, ids) - want).abs().max() > 1e-2


def test_generated_logprobs_are_prompt_logprobs_of_the_same_tokens(engine):
    prompts = [prompt(n, n) for n in (1, 9, 130, 520)]
    outs = engine.run(prompts, tokens=12)
    again = engine.run([p + o.ids for p, o in zip(prompts, outs, strict=True)])
    for p, o, a in zip(prompts, outs, again, strict=True):
        assert torch.allclose(o.logprobs, a.prompt_logprobs[len(p) - 1 :], atol=1e-5, rtol=0)


def test_logprobs_are_processed_with_the_temperature(engine, checkpoint):
    ids = prompt(30)
    (out,) = engine.run([ids], tokens=8, temperature=0.7, prompt_logprobs=None)
    want = reference_logprobs(ReferenceM3(checkpoint), ids + out.ids, 0.7)[-8:]
    assert (out.logprobs - want).abs().max() < 1e-4


def test_adapter_on_every_role_is_the_reference(engine, checkpoint, tmp_path):
    tensors = adapter(1, 0.2)
    engine.load(tensors, 3, tmp_path)
    ids = prompt(60)
    (out,) = engine.run([ids], 3, tokens=8)
    want = reference_logprobs(ReferenceM3(checkpoint, tensors), ids + out.ids)
    assert (torch.cat((out.prompt_logprobs, out.logprobs)) - want).abs().max() < 2e-4
    (base,) = engine.run([ids])
    assert (base.prompt_logprobs - out.prompt_logprobs).abs().max() > 0.1


@pytest.mark.parametrize("role", LORA_ROLES, ids=str)
def test_each_role_alone_changes_the_output_as_it_must(engine, checkpoint, tmp_path, role: Role):
    tensors = adapter(2, 0.3, (role,))
    engine.load(tensors, 0, tmp_path)
    ids = prompt(24)
    (out,) = engine.run([ids], 0)
    (base,) = engine.run([ids])
    want = reference_logprobs(ReferenceM3(checkpoint, tensors), ids)
    assert (out.prompt_logprobs - base.prompt_logprobs).abs().max() > 1e-3
    assert (out.prompt_logprobs - want).abs().max() < 2e-4


def test_zero_adapter_has_the_bits_of_no_adapter(engine, tmp_path):
    tensors = {n: torch.zeros_like(t) if ".lora_B." in n else t for n, t in adapter(3, 1.0).items()}
    engine.load(tensors, 0, tmp_path)
    prompts = [prompt(n, n) for n in (3, 40, 600)]
    for a, b in zip(engine.run(prompts, 0, tokens=6, **GREEDY), engine.run(prompts, tokens=6, **GREEDY), strict=True):
        assert a.ids == b.ids
        assert same_bits(a.prompt_logprobs, b.prompt_logprobs)
        assert same_bits(a.logprobs, b.logprobs)


def test_base_keeps_its_bits_before_with_and_after_an_adapter(engine, tmp_path):
    prompts = [prompt(n, n) for n in (5, 33)]
    before = engine.run(prompts, tokens=6, **GREEDY)
    engine.load(adapter(4, 5.0), 1, tmp_path)
    engine.run(prompts, 1)
    loaded = engine.run(prompts, tokens=6, **GREEDY)
    engine.clear()
    after = engine.run(prompts, tokens=6, **GREEDY)
    for b, m, a in zip(before, loaded, after, strict=True):
        assert b.ids == m.ids == a.ids
        assert same_bits(b.prompt_logprobs, m.prompt_logprobs) and same_bits(b.prompt_logprobs, a.prompt_logprobs)
        assert same_bits(b.logprobs, m.logprobs) and same_bits(b.logprobs, a.logprobs)


def test_two_versions_and_the_base_in_one_batch(engine, checkpoint, tmp_path):
    versions = {4: adapter(5, 0.2), 5: adapter(6, 0.2)}
    for version, tensors in versions.items():
        engine.load(tensors, version, tmp_path)
    prompts = [prompt(n, n) for n in (20, 21, 22, 23)]
    outs = engine.run(prompts, [5, None, 4, 5], tokens=4)
    for ids, version, out in zip(prompts, [5, None, 4, 5], outs, strict=True):
        want = reference_logprobs(ReferenceM3(checkpoint, versions.get(version)), ids + out.ids)
        assert (torch.cat((out.prompt_logprobs, out.logprobs)) - want).abs().max() < 2e-4


def test_at_most_two_versions_are_resident_over_many_syncs(engine, tmp_path):
    tensors = adapter(7, 0.1)
    for version in range(12):
        engine.load(tensors, version, tmp_path)
        assert len(engine.rpc("list_loras")) <= 2
    assert engine.rpc("list_loras") == {11, 12}  # versions 10 and 11


def test_constants_of_each_projection_land_in_their_place(engine, tmp_path):
    """One distinct constant a tensor: read back from the buffers it multiplies with, not from what was received."""
    tensors = {n: torch.full(s, float(i % 251 + 1), dtype=torch.bfloat16) for i, (n, s) in enumerate(spec().shapes().items())}
    before = {n: t.clone() for n, t in tensors.items()}
    held = engine.load(tensors, 2, tmp_path)
    assert held.digests == {n: digest(t) for n, t in before.items()}
    assert all(torch.equal(tensors[n], before[n]) for n in tensors)

    def value(path: str, side: str) -> float:
        return tensors[f"base_model.model.{path}.lora_{side}.weight"][0, 0].item()

    for layer in (1, 2):
        p = f"model.layers.{layer}."
        qkv = engine.model.get_submodule(p + "self_attn.qkv_proj").adapter
        assert [at for _, at, _, _ in qkv.parts] == [0, 512, 768]  # q, k, v; the index rows follow and take none
        slot = qkv.slots.slot(3)
        for name, (_, _, _, lora) in zip(("q_proj", "k_proj", "v_proj"), qkv.parts, strict=True):
            assert (lora.a[slot] == value(p + f"self_attn.{name}", "A")).all()
            assert (lora.b[slot] == value(p + f"self_attn.{name}", "B")).all()
        experts = engine.model.get_submodule(p + "block_sparse_moe.experts").adapter.lora
        for e in range(8):
            for which, lora in (("w1", experts.gate), ("w3", experts.up), ("w2", experts.down)):
                assert (lora.a[slot, e] == value(p + f"block_sparse_moe.experts.{e}.{which}", "A")).all()
                assert (lora.b[slot, e] == value(p + f"block_sparse_moe.experts.{e}.{which}", "B")).all()


def test_one_changed_element_in_a_buffer_shows_in_the_manifest(engine, tmp_path):
    sent = engine.load(adapter(8, 0.1), 6, tmp_path)
    name = "base_model.model.model.layers.2.block_sparse_moe.experts.5.w3.lora_B.weight"
    layer = engine.model.get_submodule("model.layers.2.block_sparse_moe.experts").adapter
    layer.lora.up.b[layer.slots.slot(7), 5, 17, 3] *= -1.0
    held = Manifest.from_json(engine.rpc("samebits_held_adapter", 6))
    assert [n for n in sent.digests if sent.digests[n] != held.digests[n]] == [name]
    with pytest.raises(AdapterError, match=r"experts\.5\.w3"):
        sent.require(held, "engine")


def test_a_value_that_the_wire_does_not_have_is_refused(engine, tmp_path):
    engine.load(adapter(8, 0.1), 6, tmp_path)
    layer = engine.model.get_submodule("model.layers.0.self_attn.o_proj").adapter
    layer.parts[0][3].a[layer.slots.slot(7), 0, 0] = 1.0 + 2.0**-12
    with pytest.raises(AdapterError, match=r"o_proj\.lora_A\.weight: the engine holds values that bfloat16 does not have"):
        engine.rpc("samebits_held_adapter", 6)


@pytest.mark.parametrize("change", ["missing", "unknown", "shape", "dtype"])
def test_other_key_sets_are_refused_and_leave_the_slots(engine, tmp_path, change):
    good = adapter(9, 0.1)
    engine.load(good, 1, tmp_path)
    before = engine.rpc("samebits_held_adapter", 1)
    bad = dict(adapter(10, 0.1))
    name = next(n for n in bad if "experts.3.w2.lora_A" in n)
    t = bad.pop(name)
    if change == "unknown":
        bad |= {name: t, "base_model.model.model.layers.1.self_attn.index_q_proj.lora_A.weight": t.clone()}
    elif change == "shape":
        bad[name] = t.T.contiguous()
    elif change == "dtype":
        bad[name] = t.float()
    with pytest.raises(AdapterError):
        engine.load(bad, 2, tmp_path)
    assert engine.rpc("list_loras") == {2}
    assert engine.rpc("samebits_held_adapter", 1) == before


def test_a_layer_without_its_buffers_refuses_the_adapter(engine, tmp_path, monkeypatch):
    good = adapter(9, 0.1)
    engine.load(good, 1, tmp_path)
    engine.load(good, 2, tmp_path)
    monkeypatch.setattr(engine.model.get_submodule("model.layers.0.self_attn.o_proj"), "adapter", None)
    with pytest.raises(AdapterError, match=r"disagree on 2 tensors, the first is .*layers\.0\.self_attn\.o_proj\.lora_A"):
        engine.load(good, 3, tmp_path)
    assert engine.rpc("list_loras") == {2, 3}


def test_a_version_is_not_replaced_silently(engine, tmp_path):
    engine.load(adapter(9, 0.1), 1, tmp_path)
    with pytest.raises(AdapterError, match="already resident"):
        engine.load(adapter(10, 0.1), 1, tmp_path)


def test_an_adapter_of_another_profile_is_refused(engine, tmp_path):
    manifest = Manifest.of({}, 1, "0" * 16)
    with pytest.raises(AdapterError, match="numerics profile"):
        engine.rpc("samebits_load_adapter", str(tmp_path / "none"), manifest.to_json())


def test_version_that_is_not_resident_raises_and_never_runs_the_base(engine, tmp_path):
    engine.load(adapter(9, 0.1), 1, tmp_path)
    with pytest.raises(AdapterError, match=r"adapter version 9 is not resident \(resident: 1\)"):
        engine.run([prompt(5)], 9)
    engine.scheduler.finish_requests(None, _aborted())
    engine.llm.llm_engine.output_processor.request_states.clear()
    assert len(engine.run([prompt(5)], 1)) == 1


def _aborted():
    from vllm.v1.request import RequestStatus

    return RequestStatus.FINISHED_ABORTED


def test_base_digests_are_those_of_the_checkpoint(engine, checkpoint):
    stored = Checkpoint(checkpoint)
    want = {}
    from samebits.kernels.linear import values

    for module in stored.modules:
        want[module] = digest(values(stored.weight(module)))
    for layer in (1, 2):
        bias = f"model.layers.{layer}.block_sparse_moe.e_score_correction_bias"
        want[bias] = digest(stored.tensor(bias).float())
    assert engine.rpc("samebits_base_digests") == want


@pytest.mark.parametrize(
    ("module", "path", "index"),
    [
        ("model.layers.1.self_attn.qkv_proj", "model.layers.1.self_attn.index_k_proj", (-1, 0)),
        ("model.layers.2.block_sparse_moe.experts", "model.layers.2.block_sparse_moe.experts.7.w3", (7, -1, 3)),
        ("lm_head", "lm_head", (95, 1)),
    ],
)
def test_a_flipped_base_element_shows_in_its_digest(engine, module, path, index):
    before = engine.rpc("samebits_base_digests")
    layer = engine.model.get_submodule(module)
    weight = layer.w13 if hasattr(layer, "w13") else layer.weight
    old = weight[index].item()
    weight.data[index] = old + 1.0
    after = engine.rpc("samebits_base_digests")
    weight.data[index] = old
    assert [p for p in before if before[p] != after[p]] == [path]


def test_profile_is_the_full_hash(engine, packed_engine):
    assert engine.rpc("samebits_profile") == engine.profile
    assert packed_engine.rpc("samebits_profile") == packed_engine.profile != engine.profile


def test_forbidden_tokens_are_never_sampled(engine):
    engine.rpc("monkey_patch_model", 20, [4, 5])
    (out,) = engine.run([prompt(5)], tokens=64, prompt_logprobs=None)
    engine.rpc("monkey_patch_model", 96, None)
    assert max(out.ids) < 20 and not {4, 5} & set(out.ids)


def test_a_tensor_name_is_parsed_to_the_role_that_the_layer_adapts(engine):
    slots = next(engine.model.adapters()).slots
    paths = [p for a in engine.model.adapters() for p in a.views(0)]
    assert sorted(f"base_model.model.{p}.lora_{s}.weight" for p in paths for s in "AB") == sorted(slots.spec.shapes())
    assert all(parse_name(f"{p}.lora_A.weight")[0].role in LORA_ROLES for p in paths)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.layers.0.self_attn.q_proj.bias", torch.zeros(4), "holds model.layers.0.self_attn.q_proj.bias, which the model does not"),
        ("model.layers.0.self_attn.index_k_proj.weight", torch.zeros(4), "which the model does not have"),
        ("model.layers.1.block_sparse_moe.experts.8.w1.weight", torch.zeros(4), "which the model does not have"),
        ("model.norm.weight", torch.zeros(63), r"model\.norm\.weight is torch\.float32 \(63,\), the model wants any dtype \(64,\)"),
        ("model.layers.1.self_attn.q_proj.weight", torch.zeros(512, 64, dtype=torch.bfloat16), "q_proj.weight is torch.bfloat16"),
    ],
)
def test_checkpoint_tensors_that_do_not_fit_are_refused(engine, name, tensor, message):
    with pytest.raises(ValueError, match=message):
        engine.model.load_weights([(name, tensor)])


def test_missing_checkpoint_tensors_are_named(engine):
    held = [("lm_head.weight", engine.model.lm_head.weight.data[:96].clone()), ("vision_tower.x.weight", torch.zeros(1))]
    with pytest.raises(ValueError, match=r"checkpoint lacks model\.embed_tokens\.weight and \d+ more"):
        engine.model.load_weights(held)

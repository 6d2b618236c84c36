"""The tiny model's semantics against `kernels`, its tokenizer and chat template, its build, and the checkpoint that is shipped."""

import hashlib
import json

import pytest
import torch
import torch.nn.functional as F

from samebits.kernels.activation import SwiGLU, swiglu_oai
from samebits.kernels.linear import lora_linear, values
from samebits.kernels.moe import moe, route_topk
from samebits.kernels.msa import SparseConfig, packed_attention, pad_packed
from samebits.kernels.norm import gemma_rms_norm
from samebits.kernels.rope import apply_rope, rope_table
from samebits.quant.adapter import ModelShape
from samebits.quant.checkpoint import Checkpoint
from samebits.quant.mxfp8 import MXFP8Tensor
from samebits.quant.nvfp4 import NVFP4Tensor
from samebits.quant.profile import get_profile
from samebits.recipes import tiny_m3
from samebits.recipes.arithmetic import draw, grade
from samebits.recipes.muon import Muon, orthogonalise
from samebits.recipes.tiny_m3 import BASE, EOS, PAD, VOCABULARY, Training, character_tokenizer, chat, dense_weights
from samebits.recipes.tiny_model import Cache, Sizes, TinyModel
from tests.support import random_m3

SIZES = Sizes(vocab=len(VOCABULARY))


@pytest.fixture(scope="module")
def weights():
    return dense_weights(BASE)


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(BASE), local_files_only=True)


# ------------------------------------------------------------------------------------------------------- the shipped checkpoint


def test_shipped_files_are_the_ones_the_provenance_names():
    provenance = json.loads((BASE / "PROVENANCE.json").read_text())
    data = (BASE / "model.safetensors").read_bytes()
    assert provenance["model.safetensors"] == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert sum(p.stat().st_size for p in BASE.iterdir()) <= 3 * 2**20
    assert 0.32 <= provenance["accuracy"]["sampled"] <= 0.40
    assert provenance["held_out_prompts"] >= 512
    assert provenance["command"] == f"samebits tiny-m3 OUT --seed {provenance['seed']}"


def test_shipped_model_starts_between_32_and_40_percent(weights):
    assert 0.30 <= tiny_m3.accuracy(weights, SIZES, temperature=1.0, seed=7, count=512) <= 0.42
    assert tiny_m3.accuracy(weights, SIZES, temperature=0.0, count=256) >= 0.80  # the mode is right: GRPO sharpens


def test_shipped_checkpoint_has_the_formats_of_w4a16():
    checkpoint = Checkpoint(BASE)
    assert checkpoint.weights_hash == get_profile("w4a16").weights_hash == get_profile("w4a16-fp32").weights_hash
    kinds = {m: type(checkpoint.weight(m)) for m in checkpoint.modules}
    assert {m for m, k in kinds.items() if k is NVFP4Tensor} == {m for m in kinds if ".experts." in m}
    assert {m for m, k in kinds.items() if k is MXFP8Tensor} == {m for m in kinds if m.endswith("_proj")}
    assert sum(k is NVFP4Tensor for k in kinds.values()) == 2 * 8 * 3
    # The same names and dtypes as the random fixture of the same sizes, hence as MiniMax-M3.
    assert set(checkpoint.modules) == {n.removesuffix(".weight") for n in random_m3.tensors() if n.endswith(".weight")}
    shape = ModelShape.from_config(checkpoint.config)
    assert (shape.hidden, shape.experts, shape.moe_layers, shape.head_dim) == (128, 8, (1, 2), 128)


def test_shipped_config_has_every_key_of_the_fixture_s():
    config, want = json.loads((BASE / "config.json").read_text()), random_m3.config()
    assert want.keys() <= config.keys() and want["text_config"].keys() <= config["text_config"].keys()
    sparse = config["text_config"]["sparse_attention_config"]
    assert sparse.keys() == want["text_config"]["sparse_attention_config"].keys()
    assert sparse["sparse_topk_blocks"] == 4 and config["text_config"]["max_position_embeddings"] == 4096


def test_indexer_is_the_mean_of_the_heads_it_stands_for():
    checkpoint = Checkpoint(BASE)
    a = "model.layers.2.self_attn."
    q, index_q, k, index_k = (values(checkpoint.weight(a + n)) for n in ("q_proj", "index_q_proj", "k_proj", "index_k_proj"))
    torch.testing.assert_close(index_q[128:], (q[256:384] + q[384:]) / 2, rtol=0, atol=0.05 * q.abs().max().item())
    torch.testing.assert_close(index_k, (k[:128] + k[128:]) / 2, rtol=0, atol=0.05 * k.abs().max().item())


# ---------------------------------------------------------------------------------------------------------------- tokenizer


def test_vocabulary_is_small_and_every_token_is_itself():
    assert len(VOCABULARY) == len(set(VOCABULARY)) == 64
    tok = character_tokenizer()
    assert [tok.token_to_id(t) for t in VOCABULARY] == list(range(64)) and tok.get_vocab_size() == 64
    assert [tok.encode(t).ids for t in VOCABULARY] == [[i] for i in range(64)]


def test_text_round_trips(tokenizer):
    text = "<user>34*7+58=<assistant>34*7=238;238+58=296;answer:296"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len("34*7+58=") + 2 + len("34*7=238;238+58=296;") + 1 + 3
    assert tokenizer.decode(ids, skip_special_tokens=True) == text  # role markers are not special: a stray one must show
    everything = "".join(VOCABULARY[6:])
    assert tokenizer.decode(tokenizer.encode(everything, add_special_tokens=False)) == everything
    assert tokenizer.decode([*ids, EOS, PAD], skip_special_tokens=True) == text
    assert tokenizer.encode("é", add_special_tokens=False) == [VOCABULARY.index("<unk>")]


def test_chat_template_gives_what_the_model_was_trained_on(tokenizer):
    p = draw("test", 1)[0]
    trained = character_tokenizer().encode(chat(p, p.steps)).ids
    user, assistant = {"role": "user", "content": p.prompt}, {"role": "assistant", "content": p.steps}
    prompt = tokenizer.apply_chat_template([user], add_generation_prompt=True, tokenize=True, return_dict=False)
    assert trained[: len(prompt)] == prompt and len(prompt) == 10
    assert tokenizer.apply_chat_template([user, assistant], tokenize=True, return_dict=False) == trained
    assert trained[-1] == tokenizer.eos_token_id == EOS and tokenizer.pad_token_id == PAD
    with pytest.raises(Exception, match="user and assistant only"):
        tokenizer.apply_chat_template([{"role": "system", "content": "x"}])


# -------------------------------------------------------------------------------------------------------- semantics of the model


def kernels_forward(checkpoint: Checkpoint, ids: torch.Tensor) -> torch.Tensor:
    """Logits of one sequence [T] through `kernels` alone, over the packed weights."""
    w = checkpoint.weight

    def dense(name: str) -> torch.Tensor:
        return values(w(name))

    cos, sin = rope_table(len(ids), 64, 10000.0)
    x = dense("model.embed_tokens")[ids]
    buckets = pad_packed([len(ids)])
    for layer in range(3):
        p = f"model.layers.{layer}."
        a = p + "self_attn."
        h = gemma_rms_norm(x, dense(p + "input_layernorm"), 1e-6)

        def head(name: str, h=h, a=a) -> torch.Tensor:
            return lora_linear(h, w(a + name + "_proj")).unflatten(-1, (-1, 128))

        def rotated(name: str, a=a, head=head) -> torch.Tensor:
            return apply_rope(gemma_rms_norm(head(name), dense(a + name + "_norm"), 1e-6), cos, sin)

        sparse = {}
        if layer:
            sparse = {"index_q": rotated("index_q"), "index_k": rotated("index_k")[:, 0], "config": SparseConfig(topk=4)}
        out, _ = packed_attention(rotated("q"), rotated("k"), head("v"), buckets, 128**-0.5, **sparse)
        x = x + lora_linear(out.flatten(1), w(a + "o_proj"))
        h = gemma_rms_norm(x, dense(p + "post_attention_layernorm"), 1e-6)
        m = p + ("block_sparse_moe.shared_experts." if layer else "mlp.")
        gate_up = torch.cat((lora_linear(h, w(m + "gate_proj")), lora_linear(h, w(m + "up_proj"))), -1)
        y = lora_linear(swiglu_oai(gate_up, SwiGLU()), w(m + "down_proj"))
        if layer:
            b = p + "block_sparse_moe."
            chosen, mix = route_topk(F.linear(h, dense(b + "gate")), checkpoint.tensor(b + "e_score_correction_bias"), 2, 2.0)
            stack = {n: [dense(f"{b}experts.{e}.{n}") for e in range(8)] for n in ("w1", "w2", "w3")}
            w13 = torch.stack([torch.cat(pair) for pair in zip(stack["w1"], stack["w3"], strict=True)])
            y = y + moe(h, w13, torch.stack(stack["w2"]), chosen, mix, SwiGLU())
        x = x + y
    return F.linear(gemma_rms_norm(x, dense("model.norm"), 1e-6), dense("lm_head"))


def test_forward_equals_kernels(weights):
    p = draw("test", 1)[0]
    ids = torch.tensor(character_tokenizer().encode(chat(p, p.steps)).ids)
    out = TinyModel(SIZES).forward(weights, ids[None])[0]
    torch.testing.assert_close(out, kernels_forward(Checkpoint(BASE), ids), rtol=1e-4, atol=1e-3)


def test_decoding_with_a_cache_equals_one_forward(weights):
    ids = torch.randint(6, 64, (3, 20), generator=torch.Generator().manual_seed(0))
    model, cache = TinyModel(SIZES), Cache(SIZES, 3, 20)
    whole = model.forward(weights, ids)
    parts = [model.forward(weights, ids[:, :5], cache)] + [model.forward(weights, ids[:, [t]], cache) for t in range(5, 20)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-3)


def test_right_padding_is_harmless(weights):
    ids = torch.randint(6, 64, (2, 12), generator=torch.Generator().manual_seed(0))
    model = TinyModel(SIZES)
    padded = model.forward(weights, F.pad(ids, (0, 9), value=PAD))[:, :12]
    torch.testing.assert_close(padded, model.forward(weights, ids), rtol=1e-4, atol=1e-3)


def test_greedy_sample_ends_with_eos_and_pads(weights):
    chosen = draw("test", 16)
    tok = character_tokenizer()
    prompts = torch.tensor([tok.encode(f"<user>{p.prompt}<assistant>").ids for p in chosen])
    out = TinyModel(SIZES).sample(weights, prompts, 26, EOS, PAD, 0.0)
    for row, p in zip(out.tolist(), chosen, strict=True):
        end = row.index(EOS)
        assert set(row[end + 1 :]) <= {PAD}
        assert grade(tok.decode(row[:end]), p.answer) == (1.0 if row[:end] == tok.encode(p.steps).ids else -1.0)


# ------------------------------------------------------------------------------------------------------------------- building


def test_muon_orthogonalises_stacks_and_steps_downhill():
    g = torch.randn(3, 48, 16, generator=torch.Generator().manual_seed(0))
    singular = torch.linalg.svdvals(orthogonalise(g))
    assert singular.min() > 0.5 and singular.max() < 1.3
    torch.testing.assert_close(orthogonalise(g)[1], orthogonalise(g[1]))
    torch.testing.assert_close(orthogonalise(g.mT), orthogonalise(g).mT, rtol=1e-4, atol=1e-5)
    w, target = torch.zeros(4, 8, requires_grad=True), torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    optimizer, losses = Muon([w], lr=0.2), []
    for _ in range(60):
        loss = (w - target).square().sum()
        w.grad = None
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]


def test_muon_takes_nesterov_s_momentum_and_decays_what_has_no_gradient():
    one, two = (torch.randn(6, 4, generator=torch.Generator().manual_seed(seed)) for seed in (2, 3))
    w = torch.ones(6, 4, requires_grad=True)
    optimizer, want = Muon([w], lr=0.1, momentum=0.9, weight_decay=0.5), torch.ones(6, 4)
    velocity = torch.zeros(6, 4)
    for gradient in (one, two, torch.zeros(6, 4)):
        w.grad = gradient.clone()
        optimizer.step()
        velocity = 0.9 * velocity + 0.1 * gradient
        want = want * (1 - 0.1 * 0.5) - 0.1 * 0.2 * 6**0.5 * orthogonalise(0.1 * gradient + 0.9 * velocity)
        torch.testing.assert_close(w.detach(), want)


def test_build_is_repeatable_by_seed_and_complete(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny_m3, "EVALUATED", 8)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        short = Training(steps=3, batch=8, warmup=1)
        made = [tiny_m3.build(tmp_path / n, seed=s, progress=False, training=short) for n, s in (("a", 0), ("b", 0), ("c", 1))]
    finally:
        torch.set_num_threads(threads)
    assert made[0] == made[1] and made[0]["model.safetensors"]["sha256"] != made[2]["model.safetensors"]["sha256"]
    assert {p.name for p in (tmp_path / "a").iterdir()} == {p.name for p in BASE.iterdir()}
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (BASE / name).read_bytes()
    with pytest.raises(FileExistsError, match="is not empty"):
        tiny_m3.build(tmp_path / "a", steps=1, progress=False)


def test_training_lowers_the_loss_and_moves_the_router_bias():
    recipe = Training(steps=12, batch=16, warmup=2)
    start = tiny_m3.initialise(SIZES, 0)
    trained = tiny_m3.train(SIZES, recipe, 0, progress=False)
    tok = character_tokenizer()
    ids, targets = tiny_m3._batch(tok, [chat(p, p.steps) for p in draw("train", 32)])

    def loss(w):
        return F.cross_entropy(TinyModel(SIZES).forward(w, ids).flatten(0, 1), targets.flatten(), ignore_index=PAD).item()

    assert loss(trained) < 0.8 * loss(start)
    bias = trained["model.layers.1.block_sparse_moe.e_score_correction_bias"]
    assert bias.any() and bias.abs().max() <= 12 * recipe.bias_rate + 1e-6


def test_targets_are_the_response_and_its_end_only():
    tok = character_tokenizer()
    chosen = draw("train", 4)
    ids, targets = tiny_m3._batch(tok, [chat(p, p.steps) for p in chosen])
    for row, target, p in zip(ids, targets, chosen, strict=True):
        assert tok.decode(target[target != PAD].tolist(), skip_special_tokens=False) == p.steps + "<eos>"
        assert not target[:9].any() and target[9] == ids[0].new_tensor(tok.encode(p.steps[0]).ids[0])
        assert row[0] == VOCABULARY.index("<user>")

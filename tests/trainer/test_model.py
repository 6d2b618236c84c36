"""The training model against the plain reference forward, and its replay, packing and freezing."""

from __future__ import annotations

import pytest
import torch

from samebits.alignment_checks.reference_m3 import ReferenceM3
from samebits.kernels import taps
from samebits.kernels.moe import route_weights
from samebits.quant.checkpoint import Checkpoint, CheckpointError
from samebits.quant.profile import NumericsProfile, ProfileMismatch, get_profile
from samebits.trainer import moe as trainer_moe
from samebits.trainer.head import token_logprobs
from samebits.trainer.model import M3ForTraining

BLOCK, TOPK = 128, 4  # of the random fixture


def reference_logprobs(reference, tokens, lengths, labels, temperature):
    rows = []
    for ids in tokens.split(lengths):
        rows.append(reference(ids.tolist())[0])
    return (torch.cat(rows) / temperature[:, None]).log_softmax(-1).gather(-1, labels[:, None])[:, 0]


@pytest.mark.parametrize("kv_cache", ["auto", "nvfp4"])
def test_forward_equals_the_reference_beyond_topk_blocks(m3, make_model, packed, kv_cache):
    model = make_model(kv_cache=kv_cache)
    batch = packed(7, 5 * BLOCK + 61, 130, temperature=0.7)
    with torch.no_grad():
        out = model(*batch, capture=True)
        reference = ReferenceM3(m3, dict(model.export_adapter()), packed_kv=kv_cache == "nvfp4")
        want = reference_logprobs(reference, *batch)
    # The last label of a sequence is the next sequence's first token in both.
    error = (out.logprobs - want).abs()
    if kv_cache == "nvfp4":
        # Sums in another order may push a key over a rounding boundary of the cache: few tokens, and far less than the format itself.
        with torch.no_grad():
            unrounded = (make_model()(*batch).logprobs - want).abs()
        assert error.median() < 1e-4 and error.max() < 0.02 and unrounded.median() > 0.02
    else:
        assert error.max() < 1e-4, f"largest difference {error.max()} at token {int(error.argmax())}"
    assert (out.blocks[:, 1:] >= 0).sum(-1).max() == TOPK and (out.blocks[:, 0] == -1).all()
    tail = out.blocks[7 + 5 * BLOCK : 7 + 5 * BLOCK + 61, 1:]
    assert (tail.amax(-1) == 5).all() and not (tail[..., 0] == 0).all(), "late queries must leave out some block"


@pytest.mark.parametrize("checkpointing", [False, True])
def test_with_a_packed_cache_a_sequence_has_the_same_bits_in_every_batch(make_model, packed, checkpointing):
    """Keys and values that differ in their last bits round to other codes; nothing may differ, sequences of one token included."""
    model = make_model(kv_cache="nvfp4")
    model.checkpoint_activations(checkpointing)
    lengths = [3, 1, BLOCK + 9, 2, 1, 40, 7]
    tokens, _, labels, temperature = packed(*lengths)

    def run(span: slice, lengths: list[int]):
        with taps.record() as recorder:
            out = model(tokens[span], lengths, labels[span], temperature[span])
        return out.logprobs, recorder.tensors()

    logprobs, points = run(slice(None), lengths)
    assert len(points) > 30 and logprobs.dtype is torch.float32
    start = 0
    for n in lengths:
        alone, own = run(slice(start, start + n), [n])
        for point, value in own.items():
            assert torch.equal(value, points[point][start : start + n]), point
        assert torch.equal(alone, logprobs[start : start + n])
        start += n
    logprobs.sum().backward()
    assert all(p.grad.dtype is torch.float32 and p.grad.isfinite().all() for _, p in model.adapter_parameters())


def test_packed_sequences_do_not_see_each_other(make_model, packed):
    model = make_model()
    lengths = (5, BLOCK + 3, 4 * BLOCK + 200, 2)
    tokens, _, labels, temperature = packed(*lengths)
    with torch.no_grad():
        whole = model(tokens, list(lengths), labels, temperature, capture=True)
        start = 0
        for n in lengths:
            span = slice(start, start + n)
            alone = model(tokens[span], [n], labels[span], temperature[span], capture=True)
            assert torch.equal(whole.routes[span], alone.routes) and torch.equal(whole.blocks[span], alone.blocks)
            torch.testing.assert_close(whole.logprobs[span], alone.logprobs, rtol=0, atol=2e-5)
            start += n


def test_gradients_equal_those_of_the_reference(m3, make_model, packed):
    model = make_model()
    batch = packed(9, 6, seed=2)
    weight = torch.linspace(-1, 1, 15)
    (model(*batch).logprobs * weight).sum().backward()
    leaves = {name: t.float().requires_grad_() for name, t in model.export_adapter()}
    reference = ReferenceM3(m3, leaves)
    (reference_logprobs(reference, *batch) * weight).sum().backward()
    scale = model.settings.scale
    assert scale != 1.0
    checked = 0
    for layer in model.layers:
        for pair in layer.lora.pairs.values():
            names = [name for name, _ in pair.export()]
            for side, master, factor in (("A", pair.lora_A, 1.0), ("B", pair.lora_B, scale)):
                grads = master.grad if pair.experts else master.grad[None]
                for name, got in zip((n for n in names if f"lora_{side}" in n), grads, strict=True):
                    want = leaves[name].grad
                    want = torch.zeros_like(got) if want is None else want * factor
                    torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")
                    checked += bool(want.abs().max() > 1e-3)
    assert checked > 60


def test_replay_of_own_choices_changes_no_bit(make_model, packed):
    model = make_model()
    batch = packed(4, 5 * BLOCK + 9, 30)
    with torch.no_grad():
        own = model(*batch, capture=True)
        shuffled = own.routes.flip(-1)  # the order of a row's ids means nothing
        again = model(*batch, routes=shuffled, blocks=own.blocks, capture=True)
    assert torch.equal(own.logprobs, again.logprobs)
    assert torch.equal(own.routes, again.routes) and torch.equal(own.blocks, again.blocks)
    tokens = len(batch[0])
    assert again.replayed.tolist() == [0, tokens, tokens] and again.agreed.tolist() == again.replayed.tolist()


@pytest.mark.parametrize("layer", [1, 2])
def test_replay_follows_the_routes_of_each_layer(make_model, packed, layer):
    model = make_model()
    batch = packed(20)
    with torch.no_grad():
        own = model(*batch, capture=True)
        routes = own.routes.clone()
        routes[:10, layer] = (routes[:10, layer] + 3) % 8
        out = model(*batch, routes=routes, capture=True)
    assert (out.logprobs != own.logprobs).any()
    assert torch.equal(out.routes[:, layer], routes[:, layer].sort(-1).values)
    own_below = torch.full((20,), True) if layer == 1 else None
    if own_below is not None:  # layer 1 is the first with routes, so its own top-k is unchanged below
        assert out.agreed[1] == (out.routes[:, 1] == own.routes[:, 1]).all(-1).sum()


def test_a_row_of_minus_one_keeps_the_models_own_choice(make_model, packed):
    model = make_model()
    batch = packed(12)
    with torch.no_grad():
        own = model(*batch, capture=True)
        out = model(*batch, routes=torch.full_like(own.routes, -1), blocks=torch.full_like(own.blocks, -1), capture=True)
        part = own.routes.clone()
        part[::2] = -1
        half = model(*batch, routes=part)
    assert torch.equal(out.logprobs, own.logprobs) and out.replayed.sum() == 0
    assert torch.equal(half.logprobs, own.logprobs) and half.replayed.tolist() == [0, 6, 6]


def test_replayed_blocks_are_attended_to(make_model, packed):
    model = make_model()
    batch = packed(5 * BLOCK + 40)
    with torch.no_grad():
        own = model(*batch, capture=True)
        blocks = own.blocks.clone()
        blocks[-1, 2] = torch.tensor([0, 1, 2, 5], dtype=torch.int16)
        assert not torch.equal(blocks, own.blocks)
        out = model(*batch, blocks=blocks, capture=True)
    assert torch.equal(out.logprobs[:-1], own.logprobs[:-1]) and out.logprobs[-1] != own.logprobs[-1]
    assert torch.equal(out.blocks, blocks)


def test_a_replayed_expert_outside_the_top_k_has_weight_and_router_gradient(make_model, packed, monkeypatch):
    model = make_model()
    batch = packed(1)
    with torch.no_grad():
        own = model(*batch, capture=True)
    routes = own.routes.clone()
    routes[0, 1] = torch.tensor([e for e in range(8) if e not in own.routes[0, 1]][:2], dtype=torch.int16)
    seen = []

    def watched(logits, *rest):
        logits.retain_grad()
        seen.append(logits)
        return route_weights(logits, *rest)

    monkeypatch.setattr(trainer_moe, "route_weights", watched)
    model(*batch, routes=routes).logprobs.sum().backward()
    rows = seen[0].grad[0].abs()  # of the first layer with experts, which is layer 1
    assert (rows[routes[0, 1].long()] > 0).all() and (rows[own.routes[0, 1].long()] == 0).all()


def test_activation_checkpointing_changes_no_bit(make_model, packed):
    batch = packed(40, 3)
    grads = []
    for enabled in (False, True):
        model = make_model()
        model.checkpoint_activations(enabled)
        calls = 0

        def count(*_):
            nonlocal calls
            calls += 1

        model.layers[1].attention.register_forward_hook(count)
        model(*batch).logprobs.sum().backward()
        assert calls == (2 if enabled else 1)
        grads.append({n: p.grad for n, p in model.adapter_parameters()})
    assert all(torch.equal(grads[0][n], grads[1][n]) for n in grads[0])


def test_the_base_stays_packed_and_frozen(make_model):
    model = make_model()
    trained = {n for n, _ in model.adapter_parameters()}
    assert trained and all(".lora." in n for n in trained)
    assert all(p.dtype == torch.float32 for _, p in model.adapter_parameters())
    experts = model.layers[1].mlp.w13
    assert experts.codes.dtype == experts.block_scales.dtype == torch.uint8
    assert experts.codes.shape == (8, 192, 32) and experts.global_scale.shape == (8,)
    assert model.layers[1].attention.proj["q"].exponents.dtype == torch.uint8
    # In all, less than a bf16 copy: nothing else may hold the base.
    stored = sum(p.numel() * p.element_size() for n, p in model.named_parameters() if n not in trained)
    assert stored < 700_000 and not list(model.buffers())


def test_disabled_adapter_is_the_base(m3, make_model, packed):
    model = make_model()
    batch = packed(11)
    bare = M3ForTraining(Checkpoint(m3), get_profile("w4a16-fp32"))
    with torch.no_grad():
        with_adapter = model(*batch).logprobs
        with model.disable_adapter():
            without = model(*batch).logprobs
        assert torch.equal(without, bare(*batch).logprobs) and not torch.equal(without, with_adapter)
        assert torch.equal(model(*batch).logprobs, with_adapter)


@pytest.mark.parametrize(
    "role", ["attn.q", "attn.k", "attn.v", "attn.o", "shared.gate", "shared.down", "dense.up", "expert.gate", "expert.up", "expert.down"]
)
def test_each_role_alone_moves_the_output(m3, make_model, packed, role):
    model = make_model(role, b_scale=1.0)
    batch = packed(16)
    with torch.no_grad():
        out = model(*batch).logprobs
        with model.disable_adapter():
            assert not torch.equal(out, model(*batch).logprobs)
    want = reference_logprobs(ReferenceM3(m3, dict(model.export_adapter())), *batch)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-4)


def test_bf16_profile_computes_in_bf16(make_model, packed):
    batch = packed(9, 14)
    with torch.no_grad():
        exact, rounded = make_model()(*batch).logprobs, make_model(profile="w4a16")(*batch).logprobs
    assert rounded.dtype == torch.float32
    assert 1e-4 < (exact - rounded).abs().max() < 0.5


def test_refusals(m3, make_model, packed):
    model = make_model()
    tokens, lengths, labels, temperature = packed(6)
    with pytest.raises(ValueError, match="sequence lengths sum to 5, but there are 6 tokens"):
        model(tokens, [5], labels, temperature)
    with pytest.raises(ValueError, match="routes have shape"):
        model(tokens, lengths, labels, temperature, routes=torch.zeros(6, 2, 2, dtype=torch.int16))
    other = NumericsProfile("other", rules="another")
    with pytest.raises(ProfileMismatch, match="would not compute the same bits"):
        M3ForTraining(Checkpoint(m3), other)
    with pytest.raises(ValueError, match="w4a4"):
        M3ForTraining(Checkpoint(m3), get_profile("w4a4"))


def test_experts_with_two_global_scales_are_refused(m3):
    class Broken(Checkpoint):
        def tensor(self, name):
            t = super().tensor(name)
            return t * 2 if name.endswith("experts.5.w3.weight_scale_2") else t

    with pytest.raises(CheckpointError, match=r"experts\.5\.w1 and .*w3 have different global scales"):
        M3ForTraining(Broken(m3), get_profile("w4a16-fp32"))


def test_rows_of_the_head_that_are_no_tokens_have_no_probability(make_model, packed):
    """As in the engine, which never samples them (`forbid_tokens`)."""
    model = make_model()
    tokens, lengths, labels, temperature, *_ = batch = packed(30)
    with torch.no_grad():
        whole = model(*batch, entropy=True)
        model.only_tokens(90)
        cut = model(tokens, lengths, labels.clamp_max(89), temperature, entropy=True)
        model.only_tokens(96)
        assert torch.equal(model(*batch).logprobs, whole.logprobs)
    kept = labels < 90
    # What the six rows had is shared out: every other token gains, by the same factor in a row.
    assert (cut.logprobs[kept] > whole.logprobs[kept]).all() and (cut.entropy != whole.entropy).all()
    for count in (0, 97):
        with pytest.raises(ValueError, match=f"the tokenizer has {count} tokens, the head 96 rows"):
            model.only_tokens(count)


def test_temperature_divides_the_logits_once():
    hidden, weight = torch.eye(3)[:1], torch.tensor([[2.0, 0, 0], [1, 0, 0], [0, 0, 0]])
    logprob, entropy = token_logprobs(hidden, weight, torch.tensor([0]), torch.tensor([0.5]), entropy=True)
    assert logprob.item() == pytest.approx(-0.1429, abs=1e-4)
    p = torch.tensor([4.0, 2, 0]).softmax(-1)
    assert entropy.item() == pytest.approx(-(p * p.log()).sum().item(), abs=1e-6)


def test_chunks_of_the_head_change_nothing():
    g = torch.Generator().manual_seed(0)
    weight, labels = torch.randn(50, 16, generator=g), torch.randint(0, 50, (21,), generator=g)
    temperature = torch.rand(21, generator=g) + 0.5
    results = []
    for chunk in (50 * 21, 50 * 4):
        hidden = torch.randn(21, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
        logprobs, entropy = token_logprobs(hidden, weight, labels, temperature, True, chunk)
        (logprobs * torch.linspace(0, 1, 21)).sum().backward()
        results.append((logprobs, entropy, hidden.grad))
    for whole, parts in zip(*results, strict=True):
        torch.testing.assert_close(whole, parts, rtol=0, atol=1e-5)

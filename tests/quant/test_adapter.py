"""Adapter names, key sets, digests, manifests and PEFT folders."""

import dataclasses
import json
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits.quant.adapter import (
    AdapterError,
    AdapterSpec,
    Manifest,
    ModelShape,
    Taking,
    digest,
    load_peft,
    parse_name,
    peft_metadata,
    save_peft,
    target_roles,
    tensor_name,
)
from samebits.quant.digests import digests
from samebits.quant.ranks import Ranks
from samebits.quant.roles import ATTENTION_ROLES, LORA_ROLES, ModuleId, Role
from tests.support import random_m3

SHAPE = ModelShape.from_config(random_m3.config())
PROFILE = "0123456789abcdef"
E3 = "base_model.model.model.layers.3.block_sparse_moe.experts.7."


def spec(targets: str = "all", rank: int = 8) -> AdapterSpec:
    return AdapterSpec(SHAPE, rank, target_roles(targets))


def adapter(s: AdapterSpec) -> dict[str, torch.Tensor]:
    """A distinct constant in every tensor, exact in bf16."""
    return {name: torch.full(shape, float(i + 1)).bfloat16() for i, (name, shape) in enumerate(s.shapes().items())}


@pytest.mark.parametrize(
    ("module", "side", "name"),
    [
        (ModuleId(Role.EXPERT_GATE, 3, 7), "A", E3 + "w1.lora_A.weight"),
        (ModuleId(Role.EXPERT_DOWN, 3, 7), "B", E3 + "w2.lora_B.weight"),
        (ModuleId(Role.EXPERT_UP, 3, 7), "A", E3 + "w3.lora_A.weight"),
        (ModuleId(Role.ATTN_Q, 0), "B", "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"),
        (ModuleId(Role.ATTN_O, 12), "A", "base_model.model.model.layers.12.self_attn.o_proj.lora_A.weight"),
        (ModuleId(Role.SHARED_UP, 4), "B", "base_model.model.model.layers.4.block_sparse_moe.shared_experts.up_proj.lora_B.weight"),
        (ModuleId(Role.DENSE_DOWN, 0), "A", "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"),
    ],
)
def test_golden_names_both_ways(module, side, name):
    assert tensor_name(module, side) == name
    assert parse_name(name) == (module, side)
    assert parse_name(name.removeprefix("base_model.model.")) == (module, side)


@pytest.mark.parametrize("name", [E3 + "w1.lora_C.weight", E3 + "w1.weight", E3 + "w4.lora_A.weight", "lora_A.weight"])
def test_names_that_are_none_raise(name):
    with pytest.raises(AdapterError):
        parse_name(name)


def test_every_name_of_a_spec_parses_to_a_distinct_module_with_that_shape():
    shapes = spec().shapes()
    parsed = {parse_name(name): shape for name, shape in shapes.items()}
    assert len(parsed) == len(shapes)
    for (module, side), shape in parsed.items():
        n, k = SHAPE.matrix(module.role)
        assert shape == ((8, k) if side == "A" else (n, 8))
        assert tensor_name(module, side) in shapes


def test_spec_covers_layers_times_experts_times_three():
    names = spec().shapes()
    routed = [n for n in names if ".experts." in n]
    layers, experts = len(SHAPE.moe_layers), SHAPE.experts
    assert len(routed) == layers * experts * 3 * 2 == 96
    assert len([n for n in names if "shared_experts" in n]) == layers * 3 * 2
    assert len([n for n in names if ".self_attn." in n]) == SHAPE.layers * 4 * 2
    assert len([n for n in names if ".mlp." in n]) == 3 * 2  # the one dense layer
    assert len(names) == 96 + 12 + 24 + 6
    assert not [n for n in names if "index" in n or ".gate." in n or "norm" in n]


@pytest.mark.parametrize(("targets", "count"), [("experts", 96), ("attention", 24), ("shared", 12), ("dense", 6), ("attn.q", 6)])
def test_spec_of_a_group_holds_that_group_alone(targets, count):
    assert len(spec(targets).shapes()) == count


def test_target_roles():
    assert target_roles("all") == LORA_ROLES
    assert target_roles("attention, attn.q") == ATTENTION_ROLES  # named twice, taken once
    assert target_roles(["expert.up", "dense"]) == (Role.EXPERT_UP, Role.DENSE_GATE, Role.DENSE_UP, Role.DENSE_DOWN)
    for bad in ("index.q", "router", "q_proj", ""):
        with pytest.raises(ValueError, match=f"unknown LoRA target '{bad}'; known: all, attention"):
            target_roles(bad)


def test_model_shape_names_a_missing_key():
    config = random_m3.config()
    del config["text_config"]["num_local_experts"]
    with pytest.raises(ValueError, match="no key 'num_local_experts'"):
        ModelShape.from_config(config)
    assert ModelShape.from_config(random_m3.config()["text_config"]) == SHAPE
    assert SHAPE.moe_layers == (1, 2)


def test_check_names_what_is_wrong():
    s = spec("experts")
    good = adapter(s)
    s.check(good)
    first, second = list(good)[:2]
    with pytest.raises(AdapterError, match=f"{first} is missing"):
        s.check({n: t for n, t in good.items() if n != first})
    with pytest.raises(AdapterError, match=r"extra\.lora_A\.weight is unknown"):
        s.check(good | {"extra.lora_A.weight": good[first]})
    with pytest.raises(AdapterError, match=f"{second} has shape"):
        s.check(good | {second: good[second].mT.contiguous()})
    with pytest.raises(AdapterError, match=f"{second} is float32, not bfloat16"):
        s.check(good | {second: good[second].float()})
    with pytest.raises(AdapterError, match=r"\(and 93 more\)"):
        s.check({})


def test_digest_tells_bits_shape_and_dtype():
    x = torch.arange(6.0).reshape(2, 3)
    assert digest(x) == digest(x.clone()) == digest(x.t().contiguous().t())
    flipped = x.clone()
    flipped.view(torch.int32)[1, 2] ^= 1
    others = [flipped, x.reshape(3, 2), x.t(), x.view(torch.int32), -x, torch.cat((x, x))]
    assert len({digest(t) for t in [x, *others]}) == len(others) + 1
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))


def test_digests_of_two_algorithms_are_not_compared():
    """One line, not one difference a tensor; and a manifest of before, which names none, has the former."""
    t = adapter(spec("attention"))
    sent = Manifest.of(t, 3, PROFILE)
    assert json.loads(sent.to_json())["algorithm"] == "multilinear64x4-1"
    other = dataclasses.replace(sent, algorithm="other-2", digests={n: "0" * 32 for n in t})
    assert sent.differences(other) == ["digests of other-2 cannot be compared with those sent, of multilinear64x4-1"]
    old = {k: v for k, v in json.loads(sent.to_json()).items() if k != "algorithm"}
    assert sent.differences(Manifest.from_json(json.dumps(old))) == [
        "digests of blake2b-128 cannot be compared with those sent, of multilinear64x4-1"
    ]


def test_manifest_takes_digests_that_were_taken_before():
    t = adapter(spec("attention"))
    first = next(iter(t))
    for world in (1, 2):
        taking = Taking({name: tuple(x.shape) for name, x in t.items()}, world)
        for name, x in t.items():
            taking.add(name, x)
        before = taking.finish()
        wrong = t | {first: t[first] + 1}  # what a copy that went wrong looks like
        taken, after = Manifest.of(wrong, 1, PROFILE, before, world), Manifest.of(wrong, 1, PROFILE, world=world)
        assert taken == Manifest.of(t, 1, PROFILE, world=world) and taken.digests != after.digests


def test_digests_are_taken_of_what_was_announced_and_of_all_of_it():
    t = adapter(spec("attention"))
    shapes = {name: tuple(x.shape) for name, x in t.items()}
    first, *rest = t
    taking = Taking(shapes, 2)
    with pytest.raises(AdapterError, match="x is no tensor of this adapter"):
        taking.add("x", t[first])
    for name in rest:
        taking.add(name, t[name])
    with pytest.raises(AdapterError, match=f"{first} was announced and did not come"):
        taking.finish()


def test_a_manifest_for_two_ranks_holds_the_digests_of_their_parts():
    t = adapter(spec())
    sent = Manifest.of(t, 3, PROFILE, world=2)
    parts = Ranks(2, SHAPE.experts).adapters(spec().shapes())
    assert sent.digests == digests(t) and sent.ranks == 2
    answers = []
    for rank, held in enumerate(parts):
        mine = digests({name: part.of(t[name]).contiguous() for name, part in held.items()})
        assert sent.parts[rank] == mine and len(mine) < len(t)
        answers.append(dataclasses.replace(sent, digests=mine, parts=[], rank=rank, world=2))
    assert Manifest.from_json(sent.to_json()) == sent and sent.agrees(answers)
    assert not sent.agrees(answers[::-1]) and not sent.agrees(answers[:1]) and not sent.agrees([answers[0]] * 2)
    swapped = dataclasses.replace(answers[1], rank=0)
    assert any("is missing" in problem for problem in sent.differences(swapped))
    alone = Manifest.of(t, 3, PROFILE)
    assert sent.differences(alone) == ["rank 0 of 1 answered, the adapter was sent to 2"]
    assert alone.differences(answers[1]) == ["rank 1 of 2 answered, the adapter was sent to 1"]
    name = next(n for n in answers[1].digests if n.endswith("q_proj.lora_B.weight"))
    false = dataclasses.replace(answers[1], digests=answers[1].digests | {name: sent.digests[name]})
    assert [p.split()[0] for p in sent.differences(false)] == [name], "the whole is no part"


def test_manifest_of_equal_tensors_has_no_differences():
    t = adapter(spec("experts"))
    sent, held = (Manifest.of(t, 3, PROFILE) for _ in range(2))
    assert sent.differences(held) == []
    sent.require(held, "replica 0")
    assert sent.bytes == sum(x.numel() * 2 for x in t.values())
    assert Manifest.from_json(sent.to_json()) == sent


def held_variants():
    t = adapter(spec("experts"))
    first, second = list(t)[:2]
    flipped = t[first].clone()
    flipped.view(torch.int16)[0, 0] ^= 1
    swapped = t | {first: t[second].reshape(t[first].shape) if t[first].shape == t[second].shape else t[first] + 1}
    yield "stale", Manifest.of(t, 2, PROFILE), "adapter version 2 is held, 3 was sent"
    yield "profile", Manifest.of(t, 3, "f" * 16), f"engine computes with numerics profile {'f' * 16}, trainer with {PROFILE}"
    yield "missing", Manifest.of({n: x for n, x in t.items() if n != first}, 3, PROFILE), f"{first} is missing"
    yield "unknown", Manifest.of(t | {"x": t[first]}, 3, PROFILE), "x is unknown"
    yield "one bit", Manifest.of(t | {first: flipped}, 3, PROFILE), f"{first} differs: "
    yield "swapped", Manifest.of(swapped, 3, PROFILE), f"{first} differs: "
    yield "nothing", Manifest.of({}, 3, PROFILE), f"{first} is missing"


@pytest.mark.parametrize(("held", "message"), [pytest.param(h, m, id=i) for i, h, m in held_variants()])
def test_manifest_tells_each_kind_of_difference(held, message):
    sent = Manifest.of(adapter(spec("experts")), 3, PROFILE)
    problems = sent.differences(held)
    assert problems[0].startswith(message) and (len(problems) == 1 or not held.digests)
    with pytest.raises(AdapterError, match="replica 1 rank 0: "):
        sent.require(held, "replica 1 rank 0")


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 95), st.integers(0, 10**6), st.integers(0, 15))
def test_any_single_bit_is_noticed(which, element, bit):
    t = adapter(spec("experts"))
    sent = Manifest.of(t, 1, PROFILE)
    name = list(t)[which]
    bits = t[name].view(torch.int16).flatten()
    bits[element % bits.numel()] ^= 1 << bit if bit < 15 else -(1 << 15)
    assert [p.split()[0] for p in sent.differences(Manifest.of(t, 1, PROFILE))] == [name]


def test_peft_folder_round_trips_byte_for_byte(tmp_path):
    s = spec()
    t = adapter(s)
    save_peft(tmp_path / "a", t, s, "base", {"version": "3"})
    back = load_peft(tmp_path / "a", s)
    assert back.keys() == t.keys() and all(torch.equal(back[n], t[n]) and back[n].dtype == torch.bfloat16 for n in t)
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert config["r"] == config["lora_alpha"] == 8
    assert set(config["target_modules"]) == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
    }
    from safetensors import safe_open

    with safe_open(tmp_path / "a" / "adapter_model.safetensors", "pt") as f:
        assert f.metadata().keys() == {"version", "digest"} and f.metadata()["version"] == "3"


def test_peft_folder_that_does_not_fit_raises(tmp_path):
    s = spec("attention")
    with pytest.raises(AdapterError, match="no adapter at"):
        load_peft(tmp_path / "none", s)
    with pytest.raises(AdapterError, match="is missing"):
        save_peft(tmp_path / "a", {}, s, "base", {})
    assert not (tmp_path / "a").exists()
    save_peft(tmp_path / "a", adapter(s), s, "base", {})
    with pytest.raises(AdapterError, match=r"experts\.0\.w1\.lora_A\.weight is missing"):
        load_peft(tmp_path / "a", dataclasses.replace(s, roles=(*s.roles, Role.EXPERT_GATE)))
    with pytest.raises(AdapterError, match="the adapter has rank 8, not 16"):
        load_peft(tmp_path / "a", dataclasses.replace(s, rank=16))
    with pytest.raises(AdapterError, match=r"a: .*has shape"):
        load_peft(tmp_path / "a", dataclasses.replace(s, shape=dataclasses.replace(s.shape, hidden=s.shape.hidden * 2)))
    config = tmp_path / "a" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": 64}))
    with pytest.raises(AdapterError, match="lora_alpha 64 is not r 8"):
        load_peft(tmp_path / "a", s)
    for text in ("{", "[]", "{}"):
        config.write_text(text)
        with pytest.raises(AdapterError, match="is no PEFT adapter configuration"):
            load_peft(tmp_path / "a", s)
    config.unlink()
    with pytest.raises(AdapterError, match="adapter_config.json cannot be read"):
        load_peft(tmp_path / "a", s)


def test_peft_tensors_that_cannot_be_read_raise_in_one_line(tmp_path):
    s = spec("attention")
    save_peft(tmp_path / "a", adapter(s), s, "base", {"profile": PROFILE})
    assert peft_metadata(tmp_path / "a")["profile"] == PROFILE
    path = tmp_path / "a" / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    for read in (lambda: load_peft(tmp_path / "a", s), lambda: peft_metadata(tmp_path / "a")):
        with pytest.raises(AdapterError, match="adapter_model.safetensors cannot be read") as error:
            read()
        assert "\n" not in str(error.value)
    with pytest.raises(AdapterError, match="no adapter at"):
        peft_metadata(tmp_path / "none")


def test_an_adapter_file_that_changed_since_it_was_written_is_refused(tmp_path):
    """One bit, in a file that safetensors reads without complaint."""
    s = spec()
    save_peft(tmp_path, adapter(s), s, "base", {"adapter_version": "3"})
    assert len(load_peft(tmp_path, s)) == len(s.shapes()) and peft_metadata(tmp_path)["adapter_version"] == "3"
    path = tmp_path / "adapter_model.safetensors"
    data = bytearray(path.read_bytes())
    data[-7] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(AdapterError, match="is not what was written"):
        load_peft(tmp_path, s)


def test_a_manifest_s_text_comes_back_and_one_with_a_name_or_digest_too_few_is_refused():
    sent = Manifest.of(adapter(spec()), 4, PROFILE, world=2)
    assert Manifest.from_json(sent.to_json()) == sent
    empty = Manifest.of({}, 4, PROFILE)
    assert Manifest.from_json(empty.to_json()) == empty
    names, digests_ = json.loads(sent.to_json())["digests"]
    for wrong in ([names, digests_[:-33]], [names.partition("\n")[2], digests_], [names.replace(".w1.", ".w3."), digests_], ["", digests_]):
        for key, value in (("digests", wrong), ("parts", [wrong])):
            with pytest.raises(AdapterError, match="a manifest has .* digests for .* names"):
                Manifest.from_json(json.dumps(json.loads(sent.to_json()) | {key: value}))


def test_digests_of_stacks_are_those_of_tensors_for_every_rank():
    s = spec()
    tensors = adapter(s)
    for world in (1, 2):
        one, many = Taking(s.shapes(), world), Taking(s.shapes(), world)
        for name, t in tensors.items():
            one.add(name, t)
        groups: dict[str, list[str]] = {}
        for name in tensors:
            groups.setdefault(re.sub(r"experts\.\d+", "experts.*", name), []).append(name)
        for names in groups.values():
            many.add_stack(tuple(names), torch.stack([tensors[name] for name in names]))
        assert one.finish() == many.finish()
    with pytest.raises(AdapterError, match="x is no tensor of this adapter"):
        Taking(s.shapes()).add_stack((next(iter(tensors)), "x"), torch.zeros(2, 1))

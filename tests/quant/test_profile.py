"""Numerics profiles: formats by role, pinned hashes, and refusal."""

import pytest

from samebits.quant.profile import PROFILES, Format, NumericsProfile, ProfileMismatch, get_profile, require_same
from samebits.quant.roles import Role

# (hash, weights_hash). They change exactly when a format or a rounding rule changes, and then a checkpoint of before no longer fits.
PINNED = {
    "w4a16": ("62ebbdae8af70c25", "186e6551457499f9"),
    "w4a16-fp32": ("db092b7cd6e6864b", "186e6551457499f9"),
    "w4a4": ("7cc3c4878accdc7b", "186e6551457499f9"),
}


def test_hashes_are_pinned():
    assert {n: (p.hash, p.weights_hash) for n, p in PROFILES.items()} == PINNED


def test_formats_by_role():
    profile = get_profile("w4a16")
    formats = {role: profile.weight_format(role) for role in Role}
    assert {r for r, f in formats.items() if f is Format.NVFP4} == {Role.EXPERT_GATE, Role.EXPERT_UP, Role.EXPERT_DOWN}
    assert {r for r, f in formats.items() if f is Format.FP32} == {Role.ROUTER, Role.ROUTER_BIAS}
    assert {r for r, f in formats.items() if f is Format.BF16} == {Role.NORM, Role.EMBEDDING, Role.HEAD}
    assert sum(f is Format.MXFP8 for f in formats.values()) == 12


@pytest.mark.parametrize("field", ["activations", "accumulation", "kv_cache", "kv_read", "lora", "lora_scale", "rules"])
def test_every_field_but_the_name_changes_the_hash(field):
    profile = get_profile("w4a16")
    changed = profile.replace(**{field: "other"})
    assert changed.hash != profile.hash
    assert (changed.weights_hash != profile.weights_hash) == (field == "rules")
    assert profile.replace(name="other").hash == profile.hash


def test_a_weight_format_changes_both_hashes():
    profile = get_profile("w4a16")
    weights = tuple((r, "bfloat16" if r == "attn.q" else f) for r, f in profile.weights)
    changed = NumericsProfile("w4a16", weights=weights)
    assert changed.weight_format(Role.ATTN_Q) is Format.BF16
    assert changed.hash != profile.hash and changed.weights_hash != profile.weights_hash


def test_kv_format_is_chosen_among_those_of_the_profile():
    assert get_profile("w4a16").kv_cache == Format.BF16
    assert get_profile("w4a16-fp32").kv_cache == Format.FP32
    assert get_profile("w4a16", "auto") == get_profile("w4a16")
    assert get_profile("w4a16", "nvfp4").kv_cache == Format.NVFP4
    assert get_profile("w4a16", "nvfp4").hash not in {h for h, _ in PINNED.values()}
    with pytest.raises(ValueError, match="takes a KV cache in float32, nvfp4 or nvfp4-e4m3, not 'bfloat16'"):
        get_profile("w4a16-fp32", "bfloat16")
    with pytest.raises(ValueError, match="takes a KV cache in nvfp4 or nvfp4-e4m3, not 'fp8_e4m3'"):
        get_profile("w4a4", "fp8_e4m3")


@pytest.mark.parametrize("kv_cache", ["nvfp4", "nvfp4-e4m3"])
def test_fp32_activations_are_summed_in_fp64_where_a_packed_cache_rounds_them(kv_cache):
    assert get_profile("w4a16-fp32", kv_cache).accumulation == Format.FP64
    assert get_profile("w4a16", kv_cache).accumulation == get_profile("w4a16-fp32").accumulation == Format.FP32
    assert get_profile("w4a16-fp32", "float32") == get_profile("w4a16-fp32")


def test_an_nvfp4_cache_may_be_read_as_e4m3():
    plain, rounded = get_profile("w4a16", "nvfp4"), get_profile("w4a16", "nvfp4-e4m3")
    assert not plain.rounded_reads and rounded.rounded_reads
    assert plain.hash != rounded.hash and plain.weights_hash == rounded.weights_hash
    assert get_profile("w4a4").rounded_reads and get_profile("w4a4", "nvfp4") == get_profile("w4a4")
    assert not get_profile("w4a16").replace(kv_read=Format.FP8).rounded_reads  # a bf16 cache holds what it holds


def test_unknown_profile_names_the_known():
    with pytest.raises(ValueError, match="unknown numerics profile 'w8a8'; known: w4a16, w4a16-fp32, w4a4"):
        get_profile("w8a8")


def test_different_hashes_refuse():
    require_same("trainer", "aa", "engine", "aa")
    with pytest.raises(ProfileMismatch, match="numerics profile of trainer is aa, of engine bb"):
        require_same("trainer", "aa", "engine", "bb")

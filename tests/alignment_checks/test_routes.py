"""Comparison of routes on generated ones: what is sound passes, and every way to break one row is found and named."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits.alignment_checks.limits import Limits
from samebits.alignment_checks.report import AGREE, CheckResult
from samebits.alignment_checks.routing import check_agreement, check_rows
from samebits.trainer.m3_config import M3Dims
from tests.support import random_m3

DIMS = M3Dims.from_config(random_m3.config(layers=4, experts=8, top_k=3))
LAYERS, EXPERTS, TOP_K, MOE = 4, 8, 3, (1, 2, 3)


def routes(tokens: int, seed: int) -> np.ndarray:
    """int16 [tokens - 1, layers, k] as an engine tells them, no two neighbours and no two layers of a token alike."""
    rng = np.random.default_rng(seed)
    out = np.full((tokens - 1, LAYERS, TOP_K), -1, dtype=np.int16)
    for t in range(tokens - 1):
        for layer in MOE:
            while True:
                row = np.sort(rng.permutation(EXPERTS)[:TOP_K])
                if not (t and (row == out[t - 1, layer]).all()) and not any((row == out[t, other]).all() for other in range(layer)):
                    break
            out[t, layer] = row
    return out


batches = st.lists(st.integers(2, 12), min_size=1, max_size=4)


def found(check, *arguments) -> CheckResult:
    result = CheckResult("routing.rows")
    check(result, *arguments)
    return result


@settings(deadline=None)
@given(batches, st.integers(0, 1 << 16))
def test_sound_routes_are_agreed_with(tokens, seed):
    batch = [routes(n, seed + i) for i, n in enumerate(tokens)]
    assert found(check_rows, batch, tokens, DIMS).status == AGREE
    assert found(check_agreement, batch, [r.copy() for r in batch], DIMS, Limits()).status == AGREE


BREAKS = {
    "outside": lambda row: row.__setitem__(-1, EXPERTS),
    "negative": lambda row: row.__setitem__(slice(None), -1),
    "repeated": lambda row: row.__setitem__(1, row[0]),
    "reordered": lambda row: row.__setitem__(slice(None), row[::-1].copy()),
}


@settings(deadline=None)
@given(batches, st.integers(0, 1 << 16), st.sampled_from([*BREAKS, "dense"]), st.data())
def test_one_broken_row_is_named(tokens, seed, kind, data):
    batch = [routes(n, seed + i) for i, n in enumerate(tokens)]
    sequence = data.draw(st.integers(0, len(tokens) - 1))
    token = data.draw(st.integers(0, tokens[sequence] - 2))
    layer = 0 if kind == "dense" else data.draw(st.sampled_from(MOE))
    row = batch[sequence][token, layer]
    BREAKS.get(kind, lambda row: row.__setitem__(0, 0))(row)
    (finding,) = found(check_rows, batch, tokens, DIMS).findings
    place = finding.place
    assert (place.sequence, place.token, place.layer) == (sequence, token, layer)
    assert str(row.tolist()) in finding.message


@settings(deadline=None)
@given(batches, st.integers(0, 1 << 16), st.sampled_from(["none", "short", "long", "layers", "k"]), st.data())
def test_rows_of_another_shape_are_named_by_sequence(tokens, seed, kind, data):
    batch = [routes(n, seed + i) for i, n in enumerate(tokens)]
    at = data.draw(st.integers(0, len(tokens) - 1))
    whole = batch[at]
    cut = {"none": None, "short": whole[:-1], "long": np.concatenate([whole, whole[:1]]), "layers": whole[:, :-1], "k": whole[..., :-1]}
    batch[at] = cut[kind]
    (finding,) = found(check_rows, batch, tokens, DIMS).findings
    assert finding.place.sequence == at and f"sequence {at} " in finding.message


def test_one_row_for_all_tokens_is_no_capture():
    batch = [np.repeat(routes(2, 0), 40, axis=0)]
    result = found(check_rows, batch, [41], DIMS)
    assert [f.place.layer for f in result.findings] == list(MOE) and "one row was repeated" in result.findings[0].message


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(30, 60), min_size=1, max_size=3), st.integers(0, 1 << 16), st.sampled_from(MOE), st.sampled_from([-1, 1]))
def test_a_shift_by_a_token_is_told_from_a_swap_of_layers(tokens, seed, layer, shift):
    ours = [routes(n, seed + i) for i, n in enumerate(tokens)]
    moved = [r.copy() for r in ours]
    for r in moved:
        r[:, layer] = np.roll(r[:, layer], -shift, axis=0)
    result = found(check_agreement, moved, ours, DIMS, Limits())
    assert [f.place.layer for f in result.findings] == [layer] and f"shifted by {shift:+d} token" in result.findings[0].message
    other = MOE[MOE.index(layer) - 1]
    swapped = [r.copy() for r in ours]
    for r in swapped:
        r[:, [layer, other]] = r[:, [other, layer]]
    result = found(check_agreement, swapped, ours, DIMS, Limits())
    said = {f.place.layer: f.message for f in result.findings}
    assert said.keys() == {layer, other}
    assert f"the engine's layer {other} fits better" in said[layer] and f"the engine's layer {layer} fits better" in said[other]


@settings(deadline=None, max_examples=40)
@given(st.integers(20, 60), st.integers(0, 1 << 16), st.data())
def test_the_share_of_equal_rows_is_counted(tokens, seed, data):
    ours = routes(tokens, seed)
    theirs = ours.copy()
    wrong = data.draw(st.sets(st.integers(0, tokens - 2), max_size=tokens - 1))
    layer = data.draw(st.sampled_from(MOE))
    for t in wrong:
        theirs[t, layer] = next(c for c in ([0, 1, 2], [3, 4, 5]) if c != ours[t, layer].tolist())
    result = found(check_agreement, [theirs], [ours], DIMS, Limits())
    assert result.metrics[f"agreement/layer_{layer}"] == pytest.approx(1 - len(wrong) / (tokens - 1))
    assert bool(result.findings) == bool(wrong) and all(f.place.layer == layer for f in result.findings)

"""The first operation that parts is named, and noise is not."""

import torch

from samebits.alignment_checks.bisect import compare, first_difference, first_parting
from samebits.alignment_checks.limits import Limits

LIMITS = Limits()
POINTS = ["model.embed_tokens", "model.layers.0.self_attn.q", "model.layers.1.block_sparse_moe.ids", "model.layers.1.mlp", "model.norm"]


def taps(seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {p: torch.randint(0, 8, (20, 2), generator=g) if p.endswith("ids") else torch.randn(20, 4, 8, generator=g) for p in POINTS}


def changed(point: str, change) -> dict[str, torch.Tensor]:
    other = {k: v.clone() for k, v in taps().items()}
    other[point] = change(other[point])
    return other


def test_equal_taps_do_not_part():
    steps = compare(taps(), taps(), LIMITS)
    assert [s.point for s in steps] == POINTS and first_parting(steps) is None


def test_the_first_operation_with_a_difference_beyond_its_format():
    def shift(x):
        x[13] += 0.1
        return x

    step = first_parting(compare(taps(), changed(POINTS[1], shift), LIMITS))
    assert (step.point, step.layer, step.token) == (POINTS[1], 0, 13)


def test_noise_within_the_limit_is_not_a_parting_and_may_grow_slowly():
    other = {k: v.clone() for k, v in taps().items()}
    other[POINTS[1]] += 1e-4
    other[POINTS[3]] += 6e-4  # beyond the format's limit, but grown from what was there
    assert first_parting(compare(taps(), other, LIMITS)) is None
    other[POINTS[3]] += 1e-2
    assert first_parting(compare(taps(), other, LIMITS)).point == POINTS[3]


def test_other_choices_missing_points_shapes_and_nan_part():
    def flip(x):
        x[4] = x[4].flip(0) + 1
        return x

    assert first_parting(compare(taps(), changed(POINTS[2], flip), LIMITS)).token == 4
    less = taps()
    del less[POINTS[3]]
    assert first_parting(compare(taps(), less, LIMITS)).point == POINTS[3]
    assert first_parting(compare(taps(), changed(POINTS[3], lambda x: x[:-1]), LIMITS)).point == POINTS[3]

    def nan(x):
        x[7, 1, 1] = float("nan")
        return x

    step = first_parting(compare(taps(), changed(POINTS[4], nan), LIMITS))
    assert (step.point, step.token, step.layer) == (POINTS[4], 7, None)


def test_one_bit_is_a_difference_where_none_is_allowed():
    def nudge(x):
        x[7, 0, 3] = torch.nextafter(x[7, 0, 3], torch.tensor(9.0))
        return x

    other = changed(POINTS[3], nudge)
    assert first_parting(compare(taps(), other, LIMITS)) is None
    step = first_difference(taps(), other)
    assert (step.point, step.token) == (POINTS[3], 7) and 0 < step.difference < 1e-5
    assert first_difference(taps(), taps()) is None


def test_rows_of_one_number_and_points_that_are_missing():
    flat = {"a": torch.arange(4.0), "b": torch.arange(4)}
    assert first_difference(flat, {k: v.clone() for k, v in flat.items()}) is None
    assert first_difference(flat, {"a": flat["a"]}).point == "b"
    assert first_difference(flat, flat | {"a": flat["a"] * torch.tensor([1, 1, -1, 1])}).token == 2

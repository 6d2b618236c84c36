"""Evaluation statistics against brute force."""

from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits.recipes.eval_stats import ProblemResult, bootstrap, pass_at_k, summarise


@settings(deadline=None)
@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_k_subsets_with_a_right_one(case):
    n, right, k = case
    responses = [i < right for i in range(n)]
    subsets = [any(subset) for subset in combinations(responses, k)]
    assert pass_at_k(n, right, k) == pytest.approx(sum(subsets) / len(subsets), abs=1e-12)


@settings(max_examples=20, deadline=None)
@given(st.floats(0.05, 0.95), st.integers(1, 6), st.data())
def test_pass_at_k_is_unbiased(p, n, data):
    k = data.draw(st.integers(1, n))
    expected = 0.0
    for outcome in product((0, 1), repeat=n):
        right = sum(outcome)
        expected += p**right * (1 - p) ** (n - right) * pass_at_k(n, right, k)
    assert expected == pytest.approx(1 - (1 - p) ** k, abs=1e-9)


def test_pass_at_k_known_values_and_large_counts():
    assert pass_at_k(32, 0, 32) == 0.0 and pass_at_k(32, 32, 1) == 1.0 and pass_at_k(32, 8, 1) == pytest.approx(0.25)
    assert pass_at_k(4, 2, 2) == pytest.approx(5 / 6)
    assert pass_at_k(100_000, 1, 50_000) == pytest.approx(0.5)


@pytest.mark.parametrize(("n", "right", "k"), [(4, 2, 0), (4, 2, 5), (0, 0, 1), (4, 5, 1), (4, -1, 1)])
def test_impossible_counts_are_refused(n, right, k):
    with pytest.raises(ValueError):
        pass_at_k(n, right, k)


def test_bootstrap_agrees_with_every_possible_draw():
    values = [0.0, 0.25, 1.0, 0.5]
    means = sorted(np.mean(draw) for draw in product(values, repeat=len(values)))
    got = bootstrap(values, draws=200_000)
    assert got.value == pytest.approx(0.4375)
    assert (got.low, got.high) == pytest.approx(tuple(np.quantile(means, [0.025, 0.975])), abs=1e-12)


def test_bootstrap_interval_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(7)
    covered = 0
    for trial in range(300):
        values = rng.binomial(32, rng.beta(2, 3, size=30)) / 32
        got = bootstrap(values, confidence=0.9, draws=1000, seed=trial)
        covered += got.low <= 0.4 <= got.high
    assert 0.82 <= covered / 300 <= 0.96


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.integers(0, 3))
def test_bootstrap_brackets_and_repeats(values, seed):
    got = bootstrap(values, draws=300, seed=seed)
    assert min(values) - 1e-12 <= got.low <= got.high <= max(values) + 1e-12
    assert got.value == pytest.approx(np.mean(values)) and got == bootstrap(values, draws=300, seed=seed)
    wide = bootstrap(values, draws=300, seed=seed, confidence=0.99)
    assert wide.low <= got.low and got.high <= wide.high


def test_problems_and_not_responses_are_the_unit():
    """Responses to one problem agree: 900 of them in 3 problems say no more than 3 do."""
    mean = summarise([ProblemResult("a", 300, 300), ProblemResult("b", 0, 300), ProblemResult("c", 300, 300)]).mean
    # Three draws of three problems are all right with a chance of 8 in 27, all wrong with 1 in 27: either is within 95 %.
    assert mean == bootstrap([1.0, 0.0, 1.0]) and (mean.value, mean.low, mean.high) == (2 / 3, 0.0, 1.0)


counts = st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(0, n)))


@settings(max_examples=40, deadline=None)
@given(st.lists(counts, min_size=1, max_size=12))
def test_summary_equals_an_independent_recount(rows):
    results = [ProblemResult(str(i), right, n, cut) for i, (n, right, cut) in enumerate(rows)]
    got = summarise(results, draws=50)
    fewest = min(n for n, _, _ in rows)
    assert got.mean.value == pytest.approx(sum(right / n for n, right, _ in rows) / len(rows))
    assert got.truncated == pytest.approx(sum(cut for _, _, cut in rows) / sum(n for n, _, _ in rows))
    assert got.pass_at[1].value == pytest.approx(got.mean.value)
    assert set(got.pass_at) == {k for k in (1, 2, 4, 8) if k <= fewest} | {fewest}
    values = [got.pass_at[k].value for k in sorted(got.pass_at)]
    assert values == sorted(values)
    json = got.as_dict()
    assert json["mean"]["value"] == got.mean.value and json["pass@1"]["low"] == got.pass_at[1].low and json["problems"] == len(rows)


def test_bad_results_are_refused_by_name():
    with pytest.raises(ValueError, match="problem p: 3 right and 0 truncated of 2 responses"):
        ProblemResult("p", 3, 2)
    with pytest.raises(ValueError, match="problem p: 0 right and 3 truncated of 2 responses"):
        ProblemResult("p", 0, 2, 3)
    with pytest.raises(ValueError, match="problem p: 0 right and 0 truncated of 0 responses"):
        ProblemResult("p", 0, 0)
    with pytest.raises(ValueError, match="problem p comes twice"):
        summarise([ProblemResult("p", 1, 2), ProblemResult("p", 1, 2)])
    with pytest.raises(ValueError, match="no results"):
        summarise([])
    with pytest.raises(ValueError, match="pass@4 needs 1 <= k <= the 2 responses"):
        summarise([ProblemResult("p", 1, 2)], ks=[4])
    for options in ({"confidence": 1.0}, {"confidence": 0.0}, {"draws": 0}):
        with pytest.raises(ValueError, match="a bootstrap needs"):
            bootstrap([1.0], **options)
    with pytest.raises(ValueError, match="no problems"):
        bootstrap([])

"""Spans of time against a count of instants, one by one."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from samebits.kernels.spans import Work, length, minus, overlaps, union

END = 24
spans = st.lists(st.tuples(st.integers(0, END), st.integers(0, END)).map(lambda s: (min(s), max(s))), max_size=8)


def instants(some) -> set[int]:
    """The unit intervals [i, i + 1) that are covered."""
    return {i for start, end in some for i in range(start, end)}


@settings(deadline=None)
@given(spans)
def test_a_union_has_the_same_instants_once(some):
    found = union(some)
    assert instants(found) == instants(some) and length(some) == len(instants(some))
    assert all(start < end for start, end in found) and all(a[1] < b[0] for a, b in pairwise(found))
    assert union(found) == found and union(reversed(some)) == found


@settings(deadline=None)
@given(spans, spans)
def test_a_difference_has_the_instants_of_the_first_alone(some, others):
    found = minus(some, others)
    assert instants(found) == instants(some) - instants(others) and union(found) == found
    assert length(found) + len(instants(some) & instants(others)) == length(some)


@settings(deadline=None)
@given(spans, spans, spans, spans)
def test_exposed_is_what_no_compute_of_any_phase_covers(sent_a, done_a, sent_b, done_b):
    found = overlaps({"a": Work(sent_a, done_a), "b": Work(sent_b, done_b)})
    busy = instants(done_a) | instants(done_b)
    for name, sent, done in (("a", sent_a, done_a), ("b", sent_b, done_b)):
        one = found[name]
        assert (one.communication, one.compute) == (len(instants(sent)), len(instants(done)))
        assert one.exposed == len(instants(sent) - busy)


def test_a_collective_that_runs_into_the_next_phase_is_hidden_by_its_work():
    found = overlaps({"forward": Work([(8, 14)], [(0, 10)]), "backward": Work([], [(11, 20)])})
    assert (found["forward"].communication, found["forward"].exposed, found["backward"].exposed) == (6, 1, 0)

"""The comparison over random cases, on CPU: what it draws, that it names what differs, and the kernels under it in the interpreter."""

from importlib.util import find_spec

import pytest
import torch

from samebits.kernels.msa_ops import Pages
from tests.support.interpreter import interpreted
from tests.support.random_attention import Limits, check_set, comparisons, draw, fast_ops, near, run, same_bytes, worst

SMALL = Limits(blocks=2, new=3, shapes=((2, 4),), each=3, batches=(1, 2), width=3, topk=1)


def test_a_thousand_cases_reach_every_length_tail_and_count():
    sets = draw(5, 1000, Limits())
    cases = [case for one in sets for case in one.cases]
    assert [case.number for case in cases] == list(range(1000)) and len(sets) == 16
    assert {-(-case.total // 128) for case in cases} >= set(range(1, 41)) and {case.new for case in cases} == set(range(1, 9))
    assert all(1 <= case.new <= case.total <= 40 * 128 + 1 for case in cases)
    tails = [case.total % 128 for case in cases]
    assert min(tails.count(tail) for tail in (0, 1, 127)) > 150 and len(set(tails)) > 60
    assert {one.form for one in sets} == {"bf16", "fp8", "nvfp4"}


def test_a_set_is_drawn_the_same_again_and_otherwise_by_another_seed():
    assert draw(5, 200, Limits()) == draw(5, 200, Limits())
    assert draw(5, 200, Limits())[1] != draw(6, 200, Limits())[1]


def test_the_references_of_trainer_and_engine_agree():
    """In torch a sum has an order of its own for every shape: rows are compared within rounding, choices exactly."""
    said = []
    found = run(1, 9, SMALL, fast_ops(), "cpu", differing=near, tell=said.append)
    assert not found.wrong and found.cases == 9
    assert found.least == comparisons(SMALL) == 36 and found.comparisons == 9 * 36 and found.bytes > 10_000_000
    assert said == [f"attention, seed 1: 9 cases in 3 sets, at least 36 comparisons of each, {found.bytes} bytes compared, 0 sets differ"]


def wrong_in_company(name: str):
    """Operations of which the engine's `name` is wrong for the second of two requests, and for nobody alone."""
    ops = fast_ops()
    right = getattr(ops, name)

    def call(*args):
        out = right(*args)
        tables = [a.table for a in args if isinstance(a, Pages)]
        if tables and len(tables[0]) == 2:
            out = out.clone()
            out[-1] += 1
        return out

    return ops._replace(**{name: call})


@pytest.mark.parametrize("name", ["index_topk", "sparse", "dense"])
def test_what_differs_in_company_names_its_case_and_how_to_see_it_again(name):
    said = []
    assert run(1, 6, SMALL, wrong_in_company(name), "cpu", only=1, differing=near, tell=said.append).wrong
    assert said[0].startswith("case ") and "(set 1, request " in said[0] and "fp8 pages" in said[0]
    assert f"{name} of the tokens that come at once, 2 requests a batch" in said[0] and "1 requests a batch" not in said[0]
    assert "again alone: python -m tests.support.random_attention --seed 1 --cases 6 --set 1" in said[0]
    assert "3 cases in 1 sets" in said[1] and said[1].endswith("1 sets differ")


def test_an_insertion_that_touches_a_neighbour_is_found():
    """A byte of a page that another token or nobody owns."""
    ops = fast_ops()

    def insert(*args):
        out = ops.kv_insert(*args)
        if len(args[0]) < 10:
            args[-2].view(torch.uint8)[-1, -1, -1, -1] ^= 1
        return out

    (one,) = draw(1, 3, SMALL)
    assert check_set(one, SMALL, ops, "cpu", near).wrong == ()
    assert "pages of " in check_set(one, SMALL, ops._replace(kv_insert=insert), "cpu", near).wrong[0]


def test_one_bit_counts_and_signs_of_zero_too():
    a = torch.tensor([[1.0, 2.0], [0.0, float("nan")]])
    b = torch.tensor([[1.0, 2.0], [-0.0, float("nan")]])
    assert same_bytes(a, b).tolist() == [0, 1] and near(a[:1], a[:1] * 1.02).tolist() == [1]


def test_the_first_wrong_case_is_told():
    (one,) = draw(1, 3, SMALL)
    lines = worst(one, {"a": torch.tensor([0, 0, 2, 0]), "b": torch.tensor([0, 3, 0, 0])})
    assert len(lines) == 1 and lines[0].startswith("case 1 ") and lines[0].endswith("differs in bytes of b: 3")


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_kernels_in_the_interpreter_have_the_same_bits_in_every_company():
    said = interpreted("tests.kernels.interpret_random_attention")
    assert said.startswith("attention, seed 0: 6 cases in 3 sets") and said.endswith("0 sets differ")

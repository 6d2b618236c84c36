"""The comparison of experts over random tokens, on CPU: that it names what differs, and the kernels under it in the interpreter."""

from importlib.util import find_spec

import pytest

from tests.support.interpreter import interpreted
from tests.support.random_attention import near
from tests.support.random_experts import Layer, Limits, comparisons, fast_ops, run

SMALL = Limits(layers=(Layer(64, 32, 4, 2, 4, 2),), each=9, batches=(1, 3, 9), others=(5,))


def test_the_references_of_trainer_and_engine_agree():
    """In torch a sum has an order of its own for every shape: rows are compared within rounding, routes exactly."""
    said = []
    found = run(1, 20, SMALL, fast_ops(), "cpu", differing=near, tell=said.append)
    assert not found.wrong and found.cases == 20
    assert found.least == comparisons(SMALL) == 14 and found.comparisons == 20 * 14
    assert said == [f"experts, seed 1: 20 cases in 3 sets, at least 14 comparisons of each, {found.bytes} bytes compared, 0 sets differ"]


@pytest.mark.parametrize("what", ["company", "slot"])
def test_what_differs_names_its_token_and_how_to_see_it_again(what):
    ops = fast_ops()

    def moe(x, w13, w2, ids, weights, lora, slots, train):
        out = ops.moe(x, w13, w2, ids, weights, lora, slots, train)
        if not train and what == "company" and len(x) == 3:
            out[1:] *= 1.5  # whoever is not first
        elif not train and what == "slot":
            out[slots == 1] *= 1.5
        return out

    said = []
    assert run(1, 20, SMALL, ops._replace(moe=moe), "cpu", only=1, differing=near, tell=said.append).wrong
    assert said[0].startswith("case ") and "(set 1, token " in said[0] and "experts, 3 tokens a batch" in said[0]
    assert ("adapter 1" in said[0] and "1 tokens a batch" in said[0]) == (what == "slot")
    assert "again alone: python -m tests.support.random_experts --seed 1 --cases 20 --set 1" in said[0]


@pytest.mark.parametrize(("tokens", "train", "where"), [(14, False, "experts, among others"), (2, True, "experts of replayed routes")])
def test_prefill_and_an_adapters_batch_are_compared_too(tokens, train, where):
    ops = fast_ops()

    def moe(*args):
        out = ops.moe(*args)
        return out * 1.5 if len(out) == tokens and args[-1] is train else out

    said = []
    assert run(1, 20, SMALL, ops._replace(moe=moe), "cpu", only=1, differing=near, tell=said.append).wrong
    assert said[0].startswith("case ") and said[0].split("\n")[0].endswith(f"in bytes of {where}: 1")


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_kernels_in_the_interpreter_have_the_same_bits_in_every_batch():
    assert interpreted("tests.kernels.interpret_random_experts").endswith("0 sets differ")

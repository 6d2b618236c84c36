"""What of the kernels between GPUs can be shown without GPUs: three processes with each other's memory, in the interpreter."""

from importlib.util import find_spec

import pytest

from tests.support.interpreter import interpreted


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_ranks_have_the_bits_of_one():
    assert interpreted("tests.kernels.interpret_parallel") == "same results"

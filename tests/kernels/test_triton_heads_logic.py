"""Norm, RoPE, pages and the projection before them, as kernels, in Triton's interpreter."""

from importlib.util import find_spec

import pytest

from tests.support.interpreter import interpreted


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_rows_of_heads_in_the_interpreter_have_the_bits_of_torch():
    assert interpreted("tests.kernels.interpret_heads") == "same results"

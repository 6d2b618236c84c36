"""What of the kernels of dense attention can be shown without a GPU: all of them in Triton's interpreter."""

from importlib.util import find_spec

import pytest

from tests.support.interpreter import interpreted

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")


def test_kernels_in_the_interpreter_give_the_results_of_torch():
    assert interpreted("tests.kernels.interpret_msa_dense") == "same results"

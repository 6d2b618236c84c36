"""What of the row kernels can be shown without a GPU."""

from importlib.util import find_spec

import pytest

from tests.support.interpreter import interpreted


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_kernels_in_the_interpreter_compute_what_the_references_say():
    assert interpreted("tests.kernels.interpret_rows") == "as the references"

"""Where the order of a sum is left to Triton, no bit may be compared with anything else's: another kernel's, or another cut's."""

import os
import subprocess
import sys

import pytest

from tests.kernels.test_targets import KERNELS

LEFT_TO_TRITON = {
    "_choose_kernel": "one of the numbers is not zero",
    "_combine_kernel": "one of the numbers is not zero",
    "_swiglu_back_kernel": "a weight's gradient, by one kernel whose tiles follow the width alone",
    "grad_query_kernel": "delta of dense attention's gradients, by one kernel of one size",
}


def test_what_a_thread_adds_is_added_in_an_order_that_is_said():
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.kernels.float_sums"],
        capture_output=True,
        text=True,
        timeout=600,
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = {name: [int(n) for n in sums] for name, *sums in (line.split() for line in done.stdout.splitlines())}
    assert found.keys() == KERNELS, found.keys() ^ KERNELS
    assert found["grad_query_kernel"] == [128], "sums are no longer found"
    assert {name for name, sums in found.items() if sums} <= LEFT_TO_TRITON.keys()


def test_sums_are_found_in_code():
    pytest.importorskip("triton")
    from tests.kernels.float_sums import float_sums

    def reduction(combine: str, kind: str, axis: int = 1) -> str:
        body = f"^bb0(%a: {kind}, %b: {kind}):\n %s = arith.{combine} %a, %b : {kind}\n tt.reduce.return %s : {kind}"
        return f'%y = "tt.reduce"(%x) <{{axis = {axis} : i32}}> ({{\n{body}\n}}) : (tensor<4x16x{kind}>) -> tensor<4x{kind}>\n'

    assert float_sums(reduction("addf", "f32") + reduction("addf", "f64", 0)) == {16, 4}
    assert float_sums(reduction("maxnumf", "f32") + reduction("addi", "i32")) == set()
    assert float_sums(reduction("addf", "f32").replace("4x16x", "16x2x")) == set()

"""Kernels for a GPU that is not here compile down to machine code: all of them for Blackwell, through the ops and the whole model."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

KERNELS = {
    "_experts_kernel", "_group_kernel", "_combine_kernel", "_back_kernel", "_outer_kernel", "_rank_kernel", "_swiglu_back_kernel",
    "_norm_kernel", "_norm_backward_kernel", "_product_kernel", "_choose_kernel", "_forward_kernel", "_gradient_kernel", "_cut_kernel",
    "attend_kernel", "choose_kernel", "score_kernel", "insert_kernel", "rotate_kernel", "rotate_gradient_kernel",
    "exchange_kernel", "prefill_kernel", "split_kernel", "merge_kernel", "grad_keys_kernel", "grad_query_kernel",
}  # fmt: skip


def sizes(target: str, kind: str, seconds: int) -> dict[str, int]:
    """Bytes of machine code by kernel. Fails where one does not compile or is not there."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.kernels.compile_for", target],
        capture_output=True,
        text=True,
        timeout=seconds,
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = {name: int(size) for name, made, size in (line.split() for line in done.stdout.splitlines()) if made == kind}
    assert found.keys() >= KERNELS, KERNELS - found.keys()
    return found


@pytest.mark.slow
def test_blackwell():
    """Compiled only: nothing here says that the results are right there."""
    assert min(sizes("cuda:100", "cubin", 1500).values()) > 1000


@pytest.mark.long
@pytest.mark.timeout(3100)
def test_cdna4():
    """Compiled only, by the forms without PTX, whose values `interpret_decode` compares with the reference.

    No operation calls these kernels on AMD (`quant.blocks.fast_path`).
    """
    assert min(sizes("hip:gfx950", "hsaco", 3000).values()) > 1000

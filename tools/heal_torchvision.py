"""Remove torchvision, torchaudio and torchcodec when they do not fit the installed torch, and only then.

vLLM's CPU build depends on the three; the index may serve builds that were compiled for CUDA and do not load beside a CPU torch
("operator torchvision::nms does not exist"). transformers imports torchvision whenever it is there, so a broken one breaks everything.
samebits serves text and needs none of them.
"""

import subprocess
import sys

PACKAGES = ("torchvision", "torchaudio", "torchcodec")


def loads(package: str) -> bool:
    """Whether `package` imports in a fresh process, or is not installed."""
    code = f"import importlib.util as u\nif u.find_spec('{package}'): import torch, {package}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


if __name__ == "__main__":
    broken = [package for package in PACKAGES if not loads(package)]
    if broken:
        print(f"removing {', '.join(broken)}: not built for the installed torch")
        subprocess.run([sys.executable, "-m", "pip", "uninstall", "--quiet", "--yes", *broken], check=True)

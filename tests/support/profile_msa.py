"""A few calls of MSA decode on a CUDA device, for a profiler.

`python -m tests.support.profile_msa [--requests 32] [--context 131072] [--format nvfp4]`

Index scores and sparse attention at MiniMax-M3's shapes, as `samebits bench kernels --what msa` times them, three calls each. On an H200:

    ncu --clock-control none --set full -k 'regex:score_kernel|attend_kernel|merge_kernel' python -m tests.support.profile_msa
"""

from __future__ import annotations

import argparse
import sys

import torch

from samebits.kernels import bench_msa


def main() -> int:
    """Exit code: 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--context", type=int, default=131072)
    parser.add_argument("--format", choices=bench_msa.FORMATS, default="nvfp4")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("samebits: a profile of decode needs a CUDA GPU", file=sys.stderr)
        return 2
    operations = bench_msa.Case(args.requests, args.context, args.format).operations()
    for name in ("scores", "attention"):
        for call in operations[name][:3]:
            call()
    torch.cuda.synchronize()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""The command line of comparisons over random cases: a seed, a number of cases, and one set of them alone."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch


def main(what: str, run: Callable[[int, int, int | None], bool], argv: list[str] | None = None) -> int:
    """Exit code. `run`: seed, cases and set (None: all) to whether nothing differs; `what`: the kernels, for who has no GPU."""
    parser = argparse.ArgumentParser(description=f"Compare {what} kernels of engine and trainer over random cases, bit for bit.")
    parser.add_argument("--seed", type=int, default=None, help="default: one of the clock's, which is printed")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--set", type=int, default=None, help="only the set of this number")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print(f"samebits: the comparison of {what} kernels needs a CUDA GPU", file=sys.stderr)
        return 2
    seed = time.time_ns() % 1_000_000 if args.seed is None else args.seed
    return 0 if run(seed, args.cases, args.set) else 1

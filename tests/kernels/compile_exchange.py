"""Assembly of the exchange of candidates over peer memory, a line, and of that over an all-gather: a process of its own.

`python -m tests.kernels.compile_exchange cuda|hip`: for Hopper (PTX) or an MI355X.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from samebits.kernels.index_parallel import Ranks, exchange, share_of
from samebits.kernels.msa import SparseConfig
from samebits.kernels.msa_ops import batch_of

from .compile_for import NoDevice

TARGETS = {"cuda": (GPUTarget("cuda", 90, 32), "ptx"), "hip": (GPUTarget("hip", "gfx950", 64), "amdgcn")}


def main(name: str) -> None:
    """Print both."""
    target, kind = TARGETS[name]
    driver.set_active(NoDevice(target))
    original, found = JITFunction.run, []

    def run(self, *args, grid, warmup, **kwargs):
        found.append(original(self, *args, grid=grid, warmup=True, **kwargs).asm[kind])

    JITFunction.run = run
    share, words = share_of(batch_of([1, 1], [2500, 130]), 2, 0), torch.zeros(2, 2, 8, 16, dtype=torch.int64)
    for shared in (object(), None):
        inbox = SimpleNamespace(
            shared=shared, words=words, calls=torch.zeros(8, dtype=torch.int32), addresses=words[:, 0, 0, 0], room=8, ranks=Ranks(2, 0)
        )
        out = torch.zeros(2, 4, 16, dtype=torch.int32)
        exchange(torch.zeros(2, 4, 10), share, SparseConfig(), inbox, out, send=True, merge=True)
    print(("\n" + "=" * 9 + "\n").join(found))


if __name__ == "__main__":
    main(sys.argv[1])

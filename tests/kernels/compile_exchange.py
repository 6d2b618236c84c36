"""PTX of the exchange of candidates over peer memory, a line, and that over an all-gather, for Hopper: a process of its own."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from samebits.kernels.index_parallel import Ranks, exchange, share_of
from samebits.kernels.msa import SparseConfig
from samebits.kernels.msa_ops import batch_of

from .compile_for import NoDevice


def main() -> None:
    """Print both."""
    driver.set_active(NoDevice(GPUTarget("cuda", 90, 32)))
    original, found = JITFunction.run, []

    def run(self, *args, grid, warmup, **kwargs):
        found.append(original(self, *args, grid=grid, warmup=True, **kwargs).asm["ptx"])

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
    main()

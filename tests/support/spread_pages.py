"""Index pages of a case dealt out to ranks, each with a table and page numbers of its own, and unused pages full of NaN."""

from __future__ import annotations

import torch

from samebits.kernels.index_parallel import Share, share_of
from samebits.kernels.msa_ops import Batch, Pages


def spread(index: Pages, batch: Batch, world: int, seed: int = 0) -> list[tuple[Pages, Share]]:
    """(pages, share) of each rank. A table's entries past a request's last page would fault if read, as in the whole one."""
    g = torch.Generator().manual_seed(seed)
    dealt = []
    for rank in range(world):
        width = -(-index.table.shape[1] // world)
        table = index.table[:, rank::world]
        table = torch.nn.functional.pad(table, (0, width - table.shape[1]), value=2**30)
        used = table < len(index.data)
        pages = table[used].long()
        order = torch.randperm(len(pages) + 2, generator=g).to(table.device)
        # Page numbers of this rank's own, in another order; the two spare pages hold what no score may see.
        data = torch.full_like(index.data[:1].view(torch.uint8), 0xFF).expand(len(order), *[-1] * (index.data.dim() - 1)).clone()
        data[order[: len(pages)]] = index.data.view(torch.uint8)[pages]
        own = torch.full_like(table, 2**30)
        own[used] = order[: len(pages)].to(table.dtype)
        dealt.append((Pages(data.view(index.data.dtype), own.contiguous()), share_of(batch, world, rank)))
    return dealt

"""The kernels that exchange rows and candidates between GPUs, on CPU: `TRITON_INTERPRET=1 python -m tests.kernels.interpret_parallel`.

One process plays all ranks: their memory is CPU tensors, addressed as peer memory is, and each step is done for every rank before the
next. What is shown is addresses, tags, orders and masks; that ranks wait for one another is left to tests/gpu.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

from samebits.kernels import msa_ops, triton_msa
from samebits.kernels.index_parallel import exchange
from samebits.kernels.msa import SparseConfig
from samebits.kernels.triton_tiles import INTERPRETED
from tests.support.msa_cases import make
from tests.support.spread_pages import spread


def check(name: str, condition: bool) -> None:
    """Stop with the case's name."""
    if not condition:
        raise SystemExit(f"{name}: differs")


def shared(tensors: list[torch.Tensor]) -> list[SimpleNamespace]:
    """Peer memory of ranks that are none."""
    addresses = torch.tensor([t.data_ptr() for t in tensors])
    return [SimpleNamespace(local=t, addresses=addresses, barrier=lambda channel: None) for t in tensors]


def inboxes(world: int, room: int, topk: int) -> list[SimpleNamespace]:
    """One for each rank, full of what the tags of other calls may have left."""
    memory = shared([torch.full((2, world, room, topk), 501 << 54) for _ in range(world)])
    return [
        SimpleNamespace(shared=m, words=m.local, room=room, addresses=m.addresses, calls=torch.zeros(room, dtype=torch.int32)) for m in memory
    ]


def choices() -> None:
    """Several calls over the same inboxes: other queries, other contexts, fewer rows, and past the end of the count of calls."""
    for world, config in ((2, SparseConfig()), (3, SparseConfig(topk=8, init_blocks=1, local_blocks=2))):
        boxes = inboxes(world, 8, config.topk)
        for box in boxes:
            box.calls += 998
        for seed, (new, total) in enumerate((([1, 1], [2306, 200]), ([2], [3500]), ([1, 1], [2306, 1]), ([1], [1000]))):
            case = make(new, total, "nvfp4", groups=2, heads=2, integers=True, seed=seed)
            want = msa_ops.index_topk(case.index_q, case.index, case.batch, config)
            dealt = spread(case.index, case.batch, world)
            scores = [triton_msa.index_scores(case.index_q, keys, share.local) for keys, share in dealt]
            out = [torch.full_like(want, -7) for _ in dealt]
            for send in (True, False):
                for (_, share), s, box, o in zip(dealt, scores, boxes, out, strict=True):
                    exchange(s, share, config, box, o, send=send, merge=not send)
            for o in out:
                check(f"choice on {world} ranks, call {seed}", torch.equal(o, want))


def main() -> None:
    """All cases."""
    if not INTERPRETED:
        raise SystemExit("set TRITON_INTERPRET=1")
    choices()
    print("same results")


if __name__ == "__main__":
    main()

"""The CUDA prefill kernel, on a CPU, against the Triton kernel in its interpreter.

Run as `TRITON_INTERPRET=1 python -m tests.kernels.interpret_cuda_prefill`.

Scores are integers, so that weights are powers of two, and values small ones: sums inside a block are exact in any order, whatever the
interpreter's is. Blocks differ in size so much that joining them rounds: the order of joins is in the bits.
"""

from __future__ import annotations

import torch

from samebits.kernels import cuda_prefill, triton_msa, triton_msa_tiles
from samebits.kernels.msa_ops import Packed, batch_of
from tests.support import cuda_shim, ordered_attention


def case() -> tuple:
    """(q, packed keys, chosen, batch): tokens behind 1 to 19 blocks, each of which has keys of a size of its own."""
    g = torch.Generator().manual_seed(0)
    total, new, heads = [2432, 700], [6, 2], 4
    keys = torch.zeros(sum(total), 1, 128)
    values = torch.randint(-64, 65, keys.shape, generator=g).float()
    # A key's score is the sum of two of its dimensions: 0 to -7 inside of a block, 0 to -12 from block to block.
    keys[:, 0, 5] = -torch.randint(0, 8, (sum(total),), generator=g).float()
    block = torch.cat([torch.arange(n) // 128 for n in total])
    keys[:, 0, 77] = -torch.randint(0, 13, (20,), generator=g)[block].float()
    q = torch.zeros(sum(new), heads, 128)
    q[:, :, 5] = 1.0
    q[:, :, 77] = torch.arange(heads).float()[None] - 1  # heads see the blocks differently
    batch = batch_of(new, total)
    chosen = torch.full((sum(new), 1, 16), -1, dtype=torch.int32)
    for t, position in enumerate(batch.position.tolist()):
        blocks = torch.randperm(position // 128, generator=g)[:15]
        ids = torch.cat((blocks, torch.tensor([position // 128])))[t % 3 * 2 :].sort().values
        chosen[t, 0, : len(ids)] = ids.int()
    packed = Packed(keys.bfloat16(), values.bfloat16(), torch.tensor([0, total[0]], dtype=torch.int32), 19)
    return q.bfloat16(), packed, chosen, batch


def main() -> None:
    """Compare."""
    if not triton_msa_tiles.INTERPRETED.value:
        raise SystemExit("set TRITON_INTERPRET=1")
    q, packed, chosen, batch = case()
    scale = 0.6931471805599453
    triton_msa.SPLIT = 0  # a program takes all blocks of a query
    want, want_lse = triton_msa.attend(q.float(), packed, chosen, batch, scale, lse=True)
    model, model_lse = ordered_attention.attend(q, packed, chosen, batch, 1.0, torch.exp2, torch.log2)
    have = cuda_shim.run(cuda_prefill.plan(q, packed, chosen, batch, scale, True, multiprocessors=1))
    if not torch.equal(have.out.float(), want.bfloat16().float()) or not torch.equal(model.float(), want.bfloat16().float()):
        raise SystemExit("output: differs")
    for lse in (have.lse, model_lse):
        if not torch.allclose(lse, want_lse, rtol=0, atol=2e-6):
            raise SystemExit("log of the sum: differs")
    print("same bits")


if __name__ == "__main__":
    main()

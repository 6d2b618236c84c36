"""Random cases of attention in Triton's interpreter: `TRITON_INTERPRET=1 python -m tests.kernels.interpret_random_attention`.

The kernels' own logic, bit for bit: which keys a query sees, in which order tiles are summed, and that neither the batch nor the kind of
cache is part of it. Tiles are fp32 there and codes are decoded by plain operations, as in `interpret_msa`; a product of tiles is summed in
fp64 and rounded, since the order of numpy's fp32 sums depends on a tile's shape. Rows of heads take a long time there: the trainer's, and
those that the engine inserts before the tokens that come in batches, are the reference's, which has the same bits where rows are integers.
"""

from __future__ import annotations

import numpy as np
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from samebits.kernels import msa_ops, triton_msa, triton_msa_dense_ops, triton_msa_tiles
from tests.support.random_attention import SCALE, Limits, Ops, run

LIMITS = Limits(blocks=5, new=2, shapes=((1, 2),), each=2, batches=(1, 2), width=6, topk=2, whole=False, chunk=2, integers=True)
FEW = 16  # tokens that the kernel of rows takes here


def exact_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    """A product of tiles whose bits do not depend on their shape."""
    product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64)) + d.data
    return TensorHandle(product.astype(d.data.dtype), d.dtype.scalar)


def ops() -> Ops:
    """Launches of the kernels, in fp32 where tiles are."""

    def insert(q, *rest):
        return (triton_msa if len(q) <= FEW else msa_ops).kv_insert(q, *rest)

    def sparse(q, cache, chosen, batch, lse=False):
        return triton_msa.attend(q.float(), cache, chosen, batch, SCALE, lse=lse)[0]

    def dense(q, cache, batch, lse=False):
        return triton_msa_dense_ops.attend(q.float(), cache, batch, SCALE, lse=lse)[0]

    return Ops(
        insert,
        msa_ops.rotate_heads,
        lambda *args: triton_msa.index_topk(*args, None),
        sparse,
        dense,
        lambda *args: sparse(*args, lse=True),
        lambda *args: dense(*args, lse=True),
    )


def main() -> None:
    """A set of each format."""
    if not triton_msa_tiles.INTERPRETED.value:
        raise SystemExit("set TRITON_INTERPRET=1")
    InterpreterBuilder.create_dot = exact_dot
    if run(0, 3 * LIMITS.each, LIMITS, ops(), "cpu").wrong:
        raise SystemExit("bits differ")


if __name__ == "__main__":
    main()

"""Random tokens through the experts in Triton's interpreter: `TRITON_INTERPRET=1 python -m tests.kernels.interpret_random_experts`.

That no batch, adapter slot or tile is part of a token's sums, bit for bit; tiles are fp32 there, and their products are summed in fp64 and
rounded, as in `interpret_random_attention`.
"""

from __future__ import annotations

from triton.runtime.interpreter import InterpreterBuilder

from samebits.kernels import moe_fused, triton_moe
from samebits.kernels.moe import route_topk, route_weights
from samebits.kernels.triton_tiles import INTERPRETED
from tests.kernels.interpret_random_attention import exact_dot
from tests.support.random_experts import ACT, Layer, Limits, Ops, run

LIMITS = Limits(layers=(Layer(144, 48, 4, 2, 4, 2),), each=4, batches=(1, 3), others=(5,))


def ops() -> Ops:
    """Launches of the kernels. The router's kernel has no part in how tokens are batched, and is left to tests/gpu."""

    def experts(x, w13, w2, ids, weights, lora, slots, train):
        return moe_fused.fused_experts(x.requires_grad_(train), w13, w2, ids, weights, ACT, lora, slots, False).detach()

    return Ops(route_topk, route_weights, experts)


def main() -> None:
    """A set."""
    if not INTERPRETED:
        raise SystemExit("set TRITON_INTERPRET=1")
    InterpreterBuilder.create_dot = exact_dot
    triton_moe.SHRINK_PART = 64
    if run(0, 4, LIMITS, ops(), "cpu").wrong:
        raise SystemExit("bits differ")


if __name__ == "__main__":
    main()

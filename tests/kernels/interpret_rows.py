"""The kernels of rows in Triton's interpreter: `TRITON_INTERPRET=1 python -m tests.kernels.interpret_rows`.

Products are fp32 there: the interpreter's bf16 dot is wrong. Those of tensor cores are left to tests/gpu.
"""

from __future__ import annotations

from samebits.kernels import activation, linear, logprobs, moe, norm, rope, triton_logprob
from samebits.kernels.triton_tiles import INTERPRETED
from tests.support import row_checks


def main() -> None:
    """Every check, on shapes that fill no tile."""
    if not INTERPRETED:
        raise SystemExit("set TRITON_INTERPRET=1")
    for module in (activation, linear, logprobs, moe, norm, rope):
        module.fast_path = lambda x: True
    triton_logprob.BLOCK = triton_logprob.BACK_BLOCK = 64
    row_checks.sums("cpu", 5, 128, 2, 4)
    row_checks.norm_bits("cpu", 5, 96)
    row_checks.norm_gradients("cpu", 3, 144)
    row_checks.rotation_bits("cpu", 5)
    row_checks.activation("cpu", 3, 1100)
    row_checks.routing("cpu", 5)
    row_checks.products("cpu", 18, 70, 544)
    row_checks.products("cpu", 3, 1030, 70)
    row_checks.rows_of_a_matrix("cpu", 2, 1030, 400)
    row_checks.logprobs("cpu", 5, 200)
    print("as the references")


if __name__ == "__main__":
    main()

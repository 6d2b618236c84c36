"""The CUDA kernel on the CPU against the Triton kernels in the interpreter.

`TRITON_INTERPRET=1 python -m tests.kernels.interpret_cuda_attend`. Over cases whose sums are exact (`cuda_attend_cases`), since neither
adds as a tensor core does: equal bits then mean equal addresses, labels, masks, and the same joins of blocks in the same order.
"""

from __future__ import annotations

import torch

from samebits.kernels import cuda_attend, triton_msa, triton_msa_tiles
from samebits.kernels.cuda_attend import Variant
from tests.support.cuda_attend_cases import SCALE, exact_case
from tests.support.cuda_on_cpu import on_cpu


def main() -> None:
    """Ragged decode, past the 16 blocks that are chosen, two tokens of a request, a block that is not full, padding."""
    if not triton_msa_tiles.INTERPRETED.value:
        raise SystemExit("set TRITON_INTERPRET=1")
    case = exact_case([1, 2, 1, 1], [2500, 130, 700, 1], groups=1, heads=5)
    case.batch.position[3] = -1
    case.chosen[3] = -1
    triton_msa.SPLIT, parts = 10**6, []
    want, sums = triton_msa.attend(case.q.float(), case.cache, case.chosen, case.batch, SCALE, lse=True)
    with on_cpu():
        for unit, wide in ((2, True), (4, False), (16, False)):  # others have the bits of these, see test_cuda_attend
            variant = Variant(unit, wide=wide)
            have, lse = cuda_attend.attend(case.q, case.cache, case.chosen, case.batch, SCALE, lse=True, variant=variant)
            parts.append(have)
            if not torch.equal(have.view(torch.int16), want.bfloat16().view(torch.int16)):
                raise SystemExit(f"{variant}: {int((have != want.bfloat16()).sum())} of {have.numel()} outputs differ")
            if not torch.allclose(lse, sums, rtol=1e-6, atol=1e-6):
                raise SystemExit(f"{variant}: the log of the sum differs by {float((lse - sums).abs().max())}")
    if not (want[:3].unique().numel() > 500 and not want[3].any() and sums[3].isinf().all()):
        raise SystemExit("the case shows nothing")
    print("same bits")


if __name__ == "__main__":
    main()

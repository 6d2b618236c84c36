"""The digest kernel in Triton's interpreter, against numpy: `TRITON_INTERPRET=1 python -m tests.quant.interpret_digest`."""

import numpy as np

from samebits.quant import triton_digest
from samebits.quant.digests import host_lanes
from tests.support.digest_cases import cases, stacked_cases


def main() -> None:
    """All cases in one launch; then the first alone, which is empty and has no program."""
    triton_digest.BLOCK = 2048  # fewer rounds: the interpreter is slow, and any width gives the same
    stacks = [t if t.is_contiguous() or t[0].is_contiguous() else t.contiguous() for t in stacked_cases().values()]
    tensors = [t.contiguous()[None] for t in cases().values()] + stacks
    if not (triton_digest.device_lanes(tensors).numpy().view(np.uint64) == host_lanes(tensors)).all():
        raise SystemExit("lanes differ")
    if triton_digest.device_lanes(tensors[:1]).any():
        raise SystemExit("an empty tensor has lanes")
    print("same lanes")


if __name__ == "__main__":
    main()

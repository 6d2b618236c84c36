"""The Triton kernels against torch on CPU, in Triton's interpreter: `TRITON_INTERPRET=1 python -m tests.quant.interpret_triton`.

The interpreter has no fused multiply-add and rounds E4M3 casts wrongly, so the kernels divide exactly and round by integers there; the
other ways are left to tests/gpu. Subnormal bf16 results are left out too: its own bf16 cast loses them.
"""

from __future__ import annotations

import torch

from samebits.quant import mxfp8, nvfp4, triton_quant
from samebits.quant.nvfp4 import NonFiniteWeight
from tests.support.quant_cases import inputs, same_bytes

DTYPES = (torch.bfloat16, torch.float32, torch.float16)


def check(name: str, have: tuple, want: tuple) -> None:
    """Stop with the case's name when bytes differ."""
    if not same_bytes(have, want):
        raise SystemExit(f"{name}: {have} is not {want}")


def check_values(name: str, have: torch.Tensor, want: torch.Tensor) -> None:
    """As `check`, apart from subnormal bf16 values."""
    lost = (want.float().abs() < 2.0**-126) & (want.dtype == torch.bfloat16)
    check(name, (have.masked_fill(lost, 0),), (want.masked_fill(lost, 0),))


def check_raises(call, error: type[Exception], message: str) -> None:
    """Stop unless `call` raises."""
    try:
        call()
    except error as raised:
        if message in str(raised):
            return
    raise SystemExit(f"no {error.__name__} with {message!r}")


def main() -> None:
    """Compare all inputs in all dtypes."""
    if not triton_quant.INTERPRETED:
        raise SystemExit("set TRITON_INTERPRET=1")
    g = torch.Generator().manual_seed(1)
    for dtype in DTYPES:
        for name, x in inputs(dtype, rows=9):
            case = f"{name} {dtype}"
            scales = torch.rand(x.shape[:-2], generator=g) + 0.01
            for given in (None, scales, torch.ones(())):
                t = nvfp4.quantize(x, given)
                check(f"nvfp4 {case}", triton_quant.nvfp4_quantize(x, given, "w"), t)
                check(f"nvfp4 {case}, unnamed", triton_quant.nvfp4_quantize(x, given, None), nvfp4.quantize(x, given, None))
            m = mxfp8.quantize(x)
            check(f"mxfp8 {case}", triton_quant.mxfp8_quantize(x, "w"), m)
            for out in DTYPES:
                check_values(f"nvfp4 {case} to {out}", triton_quant.nvfp4_dequantize(t, out), nvfp4.dequantize(t, out))
                check_values(f"mxfp8 {case} to {out}", triton_quant.mxfp8_dequantize(m, out), mxfp8.dequantize(m, out))
        bad = torch.ones(5, 64, dtype=dtype)
        for value in (float("nan"), float("inf"), -float("inf")):
            bad[4, 63] = value
            triton_quant.nvfp4_quantize(bad, torch.ones(()), None)  # nothing is looked for
            check_raises(lambda bad=bad: triton_quant.nvfp4_quantize(bad, None, "w1"), NonFiniteWeight, "w1: holds NaN or infinity")
            check_raises(lambda bad=bad: triton_quant.nvfp4_quantize(bad, torch.ones(()), "w1"), NonFiniteWeight, "w1: holds NaN")
            check_raises(lambda bad=bad: triton_quant.mxfp8_quantize(bad, "w1"), NonFiniteWeight, "w1: holds NaN or infinity")
    check_raises(lambda: triton_quant.nvfp4_quantize(torch.ones(16), torch.tensor(2.0**-91), "w1"), ValueError, "w1: global scale")
    print("same bytes")


if __name__ == "__main__":
    main()

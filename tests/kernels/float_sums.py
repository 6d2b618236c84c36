"""Sums of fp32 whose order a Triton kernel leaves to Triton: `python -m tests.kernels.float_sums`, no GPU needed.

What lies in one thread is added one after the other by some versions of Triton and as a tree by others, and which elements that are is a
matter of layouts. Reductions (`tl.sum`) that add more than two floats are therefore found in the intermediate code of every kernel of
`compile_for`, which is taken before it has layouts. Prints one line for each: kernel, elements of the sum.
"""

from __future__ import annotations

import re
import sys
import warnings

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests.kernels import compile_for

REDUCTION = re.compile(r'"tt\.reduce"\(.*?axis = (\d+) : i32.*?\}\) : \((.*?)\) ->', re.DOTALL)


class _Enough(Exception):
    """There is intermediate code."""


def float_sums(code: str) -> set[int]:
    """Elements of each sum of floats in TTIR, those of two left out: they have one order."""
    found = set()
    for reduction in REDUCTION.finditer(code):
        shapes = re.findall(r"tensor<([\dx]+)xb?f\d+>", reduction[2])
        if shapes and "arith.addf" in reduction[0]:
            found.add(int(shapes[0].split("x")[int(reduction[1])]))
    return found - {1, 2}


def watch() -> dict[str, set[int]]:
    """Make every launch a translation to TTIR; returns the dictionary that it fills: kernel to `float_sums`."""
    driver.set_active(compile_for.NoDevice(GPUTarget("cuda", 90, 32)))
    original, add_stages, found, seen, codes = JITFunction.run, CUDABackend.add_stages, {}, set(), []

    def stages(self, stages, *rest):
        add_stages(self, stages, *rest)

        def enough(code, metadata):
            codes.append(str(code))
            raise _Enough

        stages["ttgir"] = enough

    def run(self, *args, grid, warmup, **options):
        name = self.fn.__name__
        key = (name, *(str(getattr(a, "dtype", type(a))) for a in args), repr(sorted(options.items(), key=str)))
        if key in seen:
            return
        seen.add(key)
        try:
            original(self, *args, grid=grid, warmup=True, **options)
        except _Enough:
            found.setdefault(name, set()).update(float_sums(codes.pop()))

    CUDABackend.add_stages, JITFunction.run = stages, run
    return found


def main() -> None:
    """All kernels."""
    found = watch()
    compile_for.on_kernels()
    for part in (compile_for.experts, compile_for.pages, compile_for.training):
        part()
    for kernel, sums in sorted(found.items()):
        print(kernel, *sorted(sums))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main())

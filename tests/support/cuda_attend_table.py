"""Variants of `kernels.cuda_attend` on a GPU, compared with the Triton kernels bit by bit, then timed.

`python -m tests.support.cuda_attend_table`. First a small ragged case, whose first wrong output is named; then the shapes of decode, a line
for each variant: microseconds by graph replay over eight sets of queries, and how many outputs differ. Nothing new is begun after
`--seconds`. Exit status 1 when bits differ or something fails.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from samebits.kernels import bench_msa, cuda_attend, cuda_module, msa_ops, triton_msa
from samebits.kernels.cuda_attend import Variant
from samebits.kernels.msa import SparseConfig
from tests.support.msa_cases import make

SHAPES = ((32, 131072), (1, 131072), (8, 131072), (64, 32768))
# Of every shape.
FIRST = [Variant(16), Variant(4), Variant(4, wide=True), Variant(2, wide=True), Variant(2)]
FIRST += [Variant(16, quarters=True), Variant(4, quarters=True)]
REST = [Variant(unit, tiles, mixed) for unit in (16, 4) for tiles in cuda_attend.TILES for mixed in (True, False)]


def named(variant: Variant) -> str:
    """For a line."""
    codes, values = "mixed" if variant.mixed else "plain", "quarters" if variant.quarters else "whole"
    return f"unit {variant.unit:2d}, tiles {variant.tiles}, {codes} codes, {values:8s}{', wide' if variant.wide else ''}"


def differences(have: Tensor, want: Tensor) -> Tensor:
    """Coordinates of elements whose bits differ."""
    kind = torch.int16 if have.dtype is torch.bfloat16 else torch.int32
    return (have.view(kind) != want.view(kind)).nonzero()


def ragged() -> Iterator[str]:
    """Lines of what is wrong in a small case: tails, several tokens, padding, two groups, rounded reads, sums."""
    case = make([1, 3, 2, 1, 8], [2175, 2177, 129, 700, 5003], "nvfp4", groups=4, heads=20, device="cuda", seed=1)
    case.batch.position[5] = -1
    chosen = msa_ops.index_topk(case.index_q, case.index, case.batch, SparseConfig())
    for rounded in (False, True):
        wants = triton_msa.attend(case.q, case.cache, chosen, case.batch, 0.1, lse=True, rounded=rounded)
        for variant in FIRST:
            haves = cuda_attend.attend(case.q, case.cache, chosen, case.batch, 0.1, lse=True, rounded=rounded, variant=variant)
            torch.cuda.synchronize()
            for name, have, want in zip(("output", "log of the sum"), haves, wants, strict=True):
                if len(found := differences(have, want)):
                    at = tuple(found[0].tolist())
                    off = (have.float() - want.float()).abs().max().item()
                    yield (
                        f"{named(variant)}, rounded {rounded}: {name}: {len(found)} of {have.numel()} differ, first {at}: "
                        f"{have[at].item():.9g} for {want[at].item():.9g}, at most {off:.3g} apart"
                    )


def shape_lines(requests: int, context: int, until: float) -> Iterator[tuple[str, bool]]:
    """(line, whether it is good) of one shape."""
    case = bench_msa.Case(requests, context, "nvfp4")
    scale, each = msa_ops.default_scale(), range(len(case.queries))

    def calls(variant: Variant | None) -> list:
        by = triton_msa.attend if variant is None else lambda *args: cuda_attend.attend(*args, variant=variant)
        return [lambda i=i: by(case.queries[i], case.cache, case.chosen[i], case.batch, scale)[0] for i in each]

    triton = calls(None)
    wants = [call() for call in triton]
    yield f"{requests} x {context}: Triton {bench_msa.replay(triton, 20):.2f} us", True
    for variant in dict.fromkeys(FIRST + (REST if requests >= 32 else [])):
        if time.monotonic() > until:
            yield "  time is up", True
            return
        ours = calls(variant)
        try:
            different = sum(len(differences(call(), want)) for call, want in zip(ours, wants, strict=True))
            us = bench_msa.replay(ours, 20)
        except RuntimeError as error:
            yield f"  {named(variant)}: FAILED: {str(error).splitlines()[0]}", False
            continue
        yield f"  {named(variant)}: {us:6.2f} us, " + (f"{different} outputs DIFFER" if different else "equal"), not different


def compile_all() -> None:
    """Every kernel that follows, side by side."""
    small = [(variant, 4, 5, True, rounded) for variant in FIRST for rounded in (False, True)]
    large = [(variant, bench_msa.GROUPS, bench_msa.HEADS // bench_msa.GROUPS, False, False) for variant in FIRST + REST]
    every = [cuda_attend._constants(variant, 0, *rest, "cuda") for variant, *rest in small + large]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda one: cuda_module.compiled(cuda_attend.SOURCE, one.defines), dict.fromkeys(every)))


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=90)
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("samebits: the table needs a CUDA GPU", file=sys.stderr)
        return 2
    until, good = time.monotonic() + args.seconds, True
    print(torch.cuda.get_device_name(), "torch", torch.__version__, flush=True)
    compile_all()
    print(f"compiled after {args.seconds - until + time.monotonic():.0f} s", flush=True)
    for line in ragged():
        print(line, flush=True)
        good = False
    print("small case:", "equal" if good else "DIFFERS", flush=True)
    for requests, context in SHAPES:
        if time.monotonic() < until:
            for line, right in shape_lines(requests, context, until):
                print(line, flush=True)
                good &= right
            torch.cuda.empty_cache()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

"""The CUDA prefill kernel on a Hopper GPU, bits first and then times: `python -m tests.support.cuda_prefill_gpu [--json FILE]`.

Each format is a process of its own, so that one that fails or hangs leaves the others. All compile and compare at once: every case with the
Triton kernel, bit for bit, and one case in every variant. Then they are timed one after the other: 32768 tokens of one request, 64 query
and 4 KV heads, 16 of up to 256 blocks, drawn at random for each token, or for 64 tokens at a time; the Triton kernel in the same process,
both with the sums that gradients need. Exit status 1 when a bit differs or a process does not end well. With `--dry` all runs on a CPU, in
small: the shim instead of the kernel, torch in the order of the kernels' sums instead of Triton, no times.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samebits.kernels import cuda_module, cuda_prefill
from samebits.kernels.cuda_prefill import Variant
from samebits.kernels.msa_ops import BLOCK, DIM, Batch, Packed, Pages, batch_of
from samebits.quant import kv
from tests.support.msa_cases import make, with_weights_that_vanish

FORMS = ("bf16", "packed", "nvfp4", "fp8")
ROWS = (Variant(2, 1, 4), Variant(2, 2, 4), Variant(2, 1, 3), Variant(1, 1, 5), Variant(1, 2, 5), Variant(1, 4, 5))
DECODED = (Variant(2, 1, 4), Variant(2, 1, 3), Variant(1, 1, 5), Variant(1, 1, 3))
VARIANTS = {"bf16": ROWS, "packed": ROWS, "nvfp4": DECODED, "fp8": DECODED[:1]}
TAILS = ([1, 8, 2, 5, 1, 3, 1, 1, 4, 40], [1, 2048, 127, 128, 129, 2049, 2177, 5003, 3968, 2500])
WHOLE = [4200, 1, 300, 2049, 128, 129, 127, 3000]
SMALL = ([18, 1, 5], [300, 129, 2200])
LONG = 32768
SCALE = 0.125 * 0.6931471805599453  # times log2(e) a power of two, as the model of `--dry` wants it
STEP_SECONDS = 60  # that nothing takes


class Asked(NamedTuple):
    """One call."""

    q: Tensor
    cache: Pages | Packed
    chosen: Tensor
    batch: Batch
    packed: Packed  # the same values, for the model of `--dry`
    scale: float = SCALE
    rounded: bool = False


def choices(batch: Batch, groups: int, alike: int = 1, seed: int = 0, topk: int = 16) -> Tensor:
    """int32 [T, G, topk]: the own block and others at random, ascending, then -1; `alike` tokens of a tile draw the same numbers."""
    device = batch.position.device
    g = torch.Generator(device).manual_seed(seed)
    own = (batch.position // BLOCK).long()  # -1 for padding
    width = max(int(own.max()) + 1, topk)
    result = torch.empty(len(own), groups, topk, dtype=torch.int32, device=device)
    for first in range(0, len(own), 4096):
        mine = own[first : first + 4096, None, None]
        tiles = -(-len(mine) // alike)
        score = torch.rand(tiles, groups, width, generator=g, device=device).repeat_interleave(alike, 0)[: len(mine)]
        block = torch.arange(width, device=device)
        score = torch.where(block == mine, 2.0, torch.where(block < mine, score, -1.0))
        best = score.topk(topk, dim=-1)
        ids = best.indices.masked_fill(best.values < 0, width).sort(-1).values
        result[first : first + 4096] = ids.masked_fill(ids == width, -1).int()
    return result


def cases(form: str, device: str, dry: bool) -> Iterator[tuple[str, Asked]]:
    """What is compared: ragged requests with tails, whole sequences, choices alike and not, padding, values that vanish, E4M3 reads."""
    heads, groups = (12, 1) if dry else (64, 4)
    pages = "nvfp4" if form == "packed" else form
    shapes = {"tails": SMALL} if dry else {"tails": TAILS, "whole": (WHOLE, WHOLE), "chunk": ([2100, 3], [5003, 64])}
    for seed, (name, (new, total)) in enumerate(shapes.items()):
        case = make(new, total, pages, groups=groups, heads=heads, seed=seed, device=device)
        cache = case.packed if form == "packed" else case.cache
        for alike in (1, 64):
            chosen = choices(case.batch, groups, alike, seed)
            asked = Asked(case.q, cache, chosen, case.batch, case.packed)
            yield f"{name}, {'random' if alike == 1 else 'alike'}", asked
        if name == "tails":
            position = torch.where(torch.arange(len(case.q), device=device) % 5 == 3, -1, case.batch.position)
            batch = case.batch._replace(position=position)
            yield "padding", asked._replace(batch=batch, chosen=choices(batch, groups))
            if form == "nvfp4" and not dry:
                yield "read as E4M3", asked._replace(rounded=True)
    if form in ("nvfp4", "packed") and not dry:
        total = [2500, 129, 700]
        case, held = with_weights_that_vanish(make(total, total, "nvfp4", groups=groups, heads=heads, seed=12, device=device), total)
        cache = held[False] if form == "packed" else case.cache
        yield "weights that vanish", Asked(case.q, cache, choices(case.batch, groups, 1, 3), case.batch, held[False], 0.5)


def long_case(form: str, tokens: int, alike: int, device: str) -> Asked:
    """What is timed."""
    g = torch.Generator(device).manual_seed(0)
    heads, groups, blocks = 64, 4, tokens // BLOCK
    q = torch.randn(tokens, heads, DIM, generator=g, device=device).bfloat16()
    table = torch.randperm(blocks, generator=g, device=device).int()[None]
    batch = batch_of([tokens], device=device)
    if form == "nvfp4":
        data = torch.randint(0, 256, kv.page_shape(blocks, groups, DIM), generator=g, device=device, dtype=torch.uint8)
        scales = data.view(*data.shape[:-2], -1)[..., BLOCK * DIM // 2 :]
        scales.copy_(scales % 32 + 0x20)
        cache = Pages(data, table)
    elif form == "packed":
        k, v = (torch.randn(tokens, groups, DIM, generator=g, device=device).bfloat16() for _ in range(2))
        cache = Packed(k, v, batch.start[:1], blocks)
    else:
        data = torch.randn(blocks, groups, BLOCK, 2 * DIM, generator=g, device=device)
        cache = Pages(data.to(torch.bfloat16 if form == "bf16" else torch.float8_e4m3fn), table)
    return Asked(q, cache, choices(batch, groups, alike), batch, Packed(q, q, batch.start, 0), DIM**-0.5)


class OnGPU:
    """The kernel and the one that it is compared with."""

    device = "cuda"

    def reference(self, asked: Asked) -> tuple[Tensor, Tensor]:
        """Triton, a program for all blocks of a query."""
        from samebits.kernels import triton_msa

        split, triton_msa.SPLIT = triton_msa.SPLIT, 0
        try:
            return triton_msa.attend(asked.q, asked.cache, asked.chosen, asked.batch, asked.scale, True, asked.rounded)
        finally:
            triton_msa.SPLIT = split

    def ours(self, asked: Asked, variant: Variant | None = None) -> tuple[Tensor, Tensor]:
        """CUDA."""
        return cuda_prefill.attend(asked.q, asked.cache, asked.chosen, asked.batch, asked.scale, True, asked.rounded, variant)

    def compile(self, wanted: list[cuda_module.Defines]) -> None:
        """All at once."""
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda defines: cuda_module.compiled(cuda_prefill.SOURCE, defines), wanted))

    def wait(self) -> None:
        """Until the GPU is done."""
        torch.cuda.synchronize()

    def time(self, call: Callable[[], Any]) -> float:
        """Milliseconds, median of 5."""
        from samebits.quant import bench

        return bench.time_cuda(call, 5) * 1e3


class OnCPU:
    """The same for `--dry`."""

    device = "cpu"

    def reference(self, asked: Asked) -> tuple[Tensor, Tensor]:
        """The model."""
        from tests.support import cuda_shim, ordered_attention

        plan = self._plan(asked, None)
        functions = [lambda x, i=i: cuda_shim.functions(plan, x)[i] for i in range(2)]
        return ordered_attention.attend(asked.q, asked.packed, asked.chosen, asked.batch, 0.125, *functions)

    def ours(self, asked: Asked, variant: Variant | None = None) -> tuple[Tensor, Tensor]:
        """The shim."""
        from tests.support import cuda_shim

        return cuda_shim.run(self._plan(asked, variant))[:2]

    def _plan(self, asked: Asked, variant: Variant | None) -> cuda_prefill.Plan:
        return cuda_prefill.plan(
            asked.q, asked.cache, asked.chosen, asked.batch, asked.scale, True, asked.rounded, variant, multiprocessors=4
        )

    def compile(self, wanted: list[cuda_module.Defines]) -> None:
        """Nothing: the shim does."""

    def wait(self) -> None:
        """Nothing is under way."""

    def time(self, call: Callable[[], Any]) -> float:
        """No time."""
        return 0.0


def difference(have: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> str | None:
    """None where all bits are equal, or how many rows differ and the first."""
    for name, a, b in zip(("output", "log of sums"), have, want, strict=True):
        a, b = (x.reshape(*x.shape[:2], -1).view(torch.int16 if x.dtype is torch.bfloat16 else torch.int32) for x in (a, b))
        wrong = (a != b).any(-1)
        if wrong.any():
            t, h = wrong.nonzero()[0].tolist()
            x, y = (z[0 if name == "output" else 1][t, h].flatten()[:4].tolist() for z in (have, want))
            return f"{name}: {int(wrong.sum())} of {wrong.numel()} heads differ, first token {t} head {h}: {x} instead of {y}"
    return None


def watched(seconds: float, what: str) -> threading.Timer:
    """Ends the process when it is not cancelled in time: a kernel that hangs would hold the GPU."""

    def end() -> None:
        say(error=f"{what}: not done after {seconds:.0f} s")
        os._exit(3)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    return timer


def say(**line: Any) -> None:
    """To the parent."""
    print(json.dumps(line), flush=True)


def child(form: str, dry: bool) -> None:
    """Bits of one format; after a line on standard input its times."""
    run = OnCPU() if dry else OnGPU()
    asked = list(cases(form, run.device, dry))
    variants = VARIANTS[form][:2] if dry else VARIANTS[form]
    first = asked[0][1]

    def defines(one: Asked, variant: Variant | None) -> cuda_module.Defines:
        return cuda_prefill.plan(one.q, one.cache, one.chosen, one.batch, one.scale, True, one.rounded, variant).defines

    began = time.monotonic()
    wanted = [defines(first, v) for v in variants] + [defines(a, None) for _, a in asked]
    run.compile(list(dict.fromkeys(wanted)))
    say(compiled=round(time.monotonic() - began, 1))

    def compare(name: str, one: Asked, variant: Variant | None = None) -> None:
        timer = watched(STEP_SECONDS, f"{form}, {name}")
        want = run.reference(one)
        have = run.ours(one, variant)
        run.wait()
        timer.cancel()
        say(bits=name, wrong=difference(have, want), compared=have[0].numel())

    for name, one in asked:
        compare(name, one)
    for variant in variants[1:]:
        compare(f"{first_name(asked)}, {tuple(variant)}", first, variant)
    say(done="bits")
    sys.stdin.readline()
    for alike in (1, 64):
        one = first if dry else long_case(form, LONG, alike, run.device)
        words = "random" if alike == 1 else "alike"
        timer = watched(STEP_SECONDS, f"{form}, {words}, times")
        want = run.reference(one)
        have = run.ours(one)
        say(bits=f"{LONG if not dry else len(one.q)} tokens, {words}", wrong=difference(have, want), compared=have[0].numel())
        del want, have
        say(choices=words, variant="triton", ms=run.time(lambda one=one: run.reference(one)))
        for variant in variants:
            say(choices=words, variant=list(variant), ms=run.time(lambda one=one, v=variant: run.ours(one, v)))
        run.wait()
        timer.cancel()


def first_name(asked: list[tuple[str, Asked]]) -> str:
    """Of the case that all variants are compared in."""
    return asked[0][0]


def lines_of(process: subprocess.Popen) -> Iterator[dict[str, Any]]:
    """What a child says."""
    for line in process.stdout:
        if line.startswith("{"):
            yield json.loads(line)


def until_bits(process: subprocess.Popen) -> list[dict[str, Any]]:
    """The lines up to the end of the comparisons."""
    found = []
    for line in lines_of(process):
        found.append(line)
        if "done" in line:
            break
    return found


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--json", type=Path, help="write the lines here")
    parser.add_argument("--dry", action="store_true", help="on a CPU, in small, without times")
    parser.add_argument("--child", choices=FORMS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if not args.dry and not (torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)):
        print("needs a Hopper GPU, or --dry", file=sys.stderr)
        return 2
    if args.child:
        child(args.child, args.dry)
        return 0
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.cuda_prefill_gpu", *(["--dry"] if args.dry else []), "--child"]
    pipe = subprocess.PIPE
    running = {form: subprocess.Popen([*command, form], stdin=pipe, stdout=pipe, stderr=pipe, text=True) for form in args.forms}
    heard = {form: [] for form in running}
    with concurrent.futures.ThreadPoolExecutor(len(running)) as pool:
        for form, found in zip(running, pool.map(until_bits, running.values()), strict=True):
            heard[form] += found
            report(form, found)
    good = True
    for form, process in running.items():
        rest, errors = process.communicate("go\n") if process.poll() is None else (process.stdout.read(), process.stderr.read())
        found = [json.loads(line) for line in rest.splitlines() if line.startswith("{")]
        heard[form] += found
        report(form, found)
        ended = process.wait()
        wrong = any(line.get("wrong") or "error" in line for line in heard[form])
        if ended:
            print(f"{form}: exit status {ended}\n{errors[-3000:]}", flush=True)
        good &= not ended and not wrong
    if args.json:
        args.json.write_text(json.dumps(heard, indent=1) + "\n")
    print("all bits are equal" if good else "NOT all is well", flush=True)
    return 0 if good else 1


def report(form: str, found: list[dict[str, Any]]) -> None:
    """For a terminal."""
    for line in found:
        if "bits" in line:
            print(f"{form:7s} {line['bits']:34s} {line['wrong'] or 'same bits'}", flush=True)
        elif "ms" in line:
            print(f"{form:7s} {line['choices']:7s} {line['variant']!s:12s} {line['ms']:8.2f} ms", flush=True)
        elif "done" not in line:
            print(f"{form:7s} {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

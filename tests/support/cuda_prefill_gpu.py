"""The CUDA prefill kernel on a Hopper GPU, bits first and then times: `python -m tests.support.cuda_prefill_gpu [--json FILE]`.

bf16 pages and packed bf16 keys are a process each, so that one that fails or hangs leaves the other. Both compile and compare at once:
every case with the Triton kernel, bit for bit. Then they are timed one after the other: the last 32768, 2048 and 512 tokens of a request of
32768, 64 query and 4 KV heads, 16 of up to 256 blocks, drawn at random for each token, or for 64 tokens at a time; the Triton kernel in the
same process, both with the sums that gradients need. Exit status 1 when a bit differs or a process does not end well. With `--dry` all runs
on a CPU, in small: the shim instead of the kernel, torch in the order of the kernels' sums instead of Triton, no times.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
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
from samebits.kernels.msa_ops import BLOCK, DIM, Batch, Packed, Pages, batch_of
from tests.support.msa_cases import make, with_weights_that_vanish

FORMS = ("bf16", "packed")
TAILS = ([1, 8, 2, 5, 1, 3, 1, 1, 4, 40], [1, 2048, 127, 128, 129, 2049, 2177, 5003, 3968, 2500])
WHOLE = [4200, 1, 300, 2049, 128, 129, 127, 3000]
SMALL = ([18, 1, 5], [300, 129, 2200])
LONG, NEW = 32768, (32768, 2048, 512)
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
    """What is compared: ragged requests with tails, whole sequences, choices alike and not, padding, values that vanish."""
    heads, groups = (12, 1) if dry else (64, 4)
    shapes = {"tails": SMALL} if dry else {"tails": TAILS, "whole": (WHOLE, WHOLE), "chunk": ([2100, 3], [5003, 64])}
    for seed, (name, (new, total)) in enumerate(shapes.items()):
        case = make(new, total, "bf16", groups=groups, heads=heads, seed=seed, device=device)
        cache = case.packed if form == "packed" else case.cache
        for alike in (1, 64):
            chosen = choices(case.batch, groups, alike, seed)
            asked = Asked(case.q, cache, chosen, case.batch, case.packed)
            yield f"{name}, {'random' if alike == 1 else 'alike'}", asked
        if name == "tails":
            position = torch.where(torch.arange(len(case.q), device=device) % 5 == 3, -1, case.batch.position)
            batch = case.batch._replace(position=position)
            yield "padding", asked._replace(batch=batch, chosen=choices(batch, groups))
    if form == "packed" and not dry:
        total = [2500, 129, 700]
        case, held = with_weights_that_vanish(make(total, total, "nvfp4", groups=groups, heads=heads, seed=12, device=device), total)
        yield "weights that vanish", Asked(case.q, held[False], choices(case.batch, groups, 1, 3), case.batch, held[False], 0.5)


def long_case(form: str, new: int, alike: int, device: str) -> Asked:
    """What is timed: the last `new` tokens of LONG."""
    g = torch.Generator(device).manual_seed(0)
    heads, groups, blocks = 64, 4, LONG // BLOCK
    q = torch.randn(new, heads, DIM, generator=g, device=device).bfloat16()
    batch = batch_of([new], [LONG], device)
    k, v = (torch.randn(LONG, groups, DIM, generator=g, device=device).bfloat16() for _ in range(2))
    packed = Packed(k, v, batch.start[:1], blocks)
    cache = packed
    if form == "bf16":
        place = torch.randperm(blocks, generator=g, device=device)
        pages = torch.empty(blocks, groups, BLOCK, 2 * DIM, dtype=torch.bfloat16, device=device)
        pages[place] = torch.cat((k, v), -1).view(blocks, BLOCK, groups, 2 * DIM).transpose(1, 2)
        cache = Pages(pages, place.int()[None])
    return Asked(q, cache, choices(batch, groups, alike), batch, packed, DIM**-0.5)


class OnGPU:
    """The kernel and the one that it is compared with."""

    device = "cuda"

    def reference(self, asked: Asked) -> tuple[Tensor, Tensor]:
        """Triton, a program for all blocks of a query."""
        from samebits.kernels import triton_msa

        split, triton_msa.SPLIT = triton_msa.SPLIT, 0
        try:
            return triton_msa.attend_in_triton(asked.q, asked.cache, asked.chosen, asked.batch, asked.scale, True)
        finally:
            triton_msa.SPLIT = split

    def ours(self, asked: Asked) -> tuple[Tensor, Tensor]:
        """CUDA."""
        return cuda_prefill.attend(asked.q, asked.cache, asked.chosen, asked.batch, asked.scale, True)

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

        plan = self._plan(asked)
        functions = [lambda x, i=i: cuda_shim.functions(plan, x)[i] for i in range(2)]
        return ordered_attention.attend(asked.q, asked.packed, asked.chosen, asked.batch, 0.125, *functions)

    def ours(self, asked: Asked) -> tuple[Tensor, Tensor]:
        """The shim."""
        from tests.support import cuda_shim

        return cuda_shim.run(self._plan(asked))[:2]

    def _plan(self, asked: Asked) -> cuda_prefill.Plan:
        return cuda_prefill.plan(asked.q, asked.cache, asked.chosen, asked.batch, asked.scale, True, multiprocessors=4)

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
    began = time.monotonic()
    plans = (cuda_prefill.plan(one.q, one.cache, one.chosen, one.batch, one.scale, True) for _, one in asked)
    run.compile(list(dict.fromkeys(plan.defines for plan in plans)))
    say(compiled=round(time.monotonic() - began, 1))
    for name, one in asked:
        timer = watched(STEP_SECONDS, f"{form}, {name}")
        want = run.reference(one)
        have = run.ours(one)
        run.wait()
        timer.cancel()
        say(bits=name, wrong=difference(have, want), compared=have[0].numel())
    say(done="bits")
    sys.stdin.readline()
    for new, alike in itertools.product(NEW[:1] if dry else NEW, (1, 64)):
        one = asked[0][1] if dry else long_case(form, new, alike, run.device)
        words = f"{len(one.q)} tokens, {'random' if alike == 1 else 'alike'}"
        timer = watched(STEP_SECONDS, f"{form}, {words}, times")
        want = run.reference(one)
        have = run.ours(one)
        say(bits=words, wrong=difference(have, want), compared=have[0].numel())
        del want, have
        say(choices=words, kernel="triton", ms=run.time(lambda one=one: run.reference(one)))
        say(choices=words, kernel="cuda", ms=run.time(lambda one=one: run.ours(one)))
        run.wait()
        timer.cancel()


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
            print(f"{form:7s} {line['choices']:34s} {line['kernel']:7s} {line['ms']:8.3f} ms", flush=True)
        elif "done" not in line:
            print(f"{form:7s} {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

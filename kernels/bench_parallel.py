"""Speed of the layers that are spread over the GPUs of one host: `samebits bench kernels --what parallel --json FILE`.

Starts a process for each GPU, two of them. In this order, so that what matters most is there first: the link between the GPUs, experts with
4096 tokens on every rank, the indexer at 512k of context, then other numbers of tokens and contexts, then a training step
(`bench_parallel_experts`, `bench_parallel_index`). Results are saved after every line. Every figure is the slowest rank's median; one GPU's
is measured in the same run, and every result is compared with it bit for bit.

Two claims are answered in figures of the run: that experts over two GPUs hide at least half of the time in which rows move behind the
products, and how many times as fast the indexer is, with the reason where it is less than 1.6 times. Only a result that differs, or a rank
that fails, makes the run fail.
"""

from __future__ import annotations

import datetime
import json
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from samebits.quant.bench import machine

from . import bench_parallel_experts as experts
from . import bench_parallel_index as index
from .bench_msa import copy_bandwidth
from .bench_ranks import median_us, slowest

WORLD = 2
PARTS = ("experts", "index", "training")
TOKENS = (4096, 1, 16, 64, 256, 1024)
SHAPES = ((1, 524288), (8, 524288), (32, 524288), (1, 131072), (8, 131072), (32, 131072))
LONG = 524288
FIRST = 3  # shapes that are measured before other numbers of tokens
HIDDEN_SHARE = 0.5
LINK_BYTES = 1 << 28  # of a copy between GPUs
PATIENCE = 240  # seconds without a new result after which ranks are taken to wait for each other for ever


def main() -> int:
    """`python -m samebits.kernels.bench_parallel [FILE]`: the command without the recipes' parts; returns the exit code."""
    missing_here = missing()
    if missing_here:
        print(f"samebits: {missing_here}", file=sys.stderr)
        return 2
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    result = run(save=lambda partial: path and path.write_text(json.dumps(partial, indent=1) + "\n"))
    show(result)
    return 0 if result["right"] else 1


def missing() -> str | None:
    """What this machine lacks for the benchmark, in one line."""
    count = torch.cuda.device_count()
    return None if count >= WORLD else f"layers over several GPUs need {WORLD} CUDA GPUs, here {'is' if count == 1 else 'are'} {count}"


def run(
    save: Callable[[dict[str, Any]], Any] = lambda result: None,
    parts: Sequence[str] | None = None,
    rank: Callable[..., None] | None = None,
) -> dict[str, Any]:
    """All figures, or those of some `PARTS`. `save` gets what there is after every line.

    A rank that fails or waits for ever leaves its error under `failed`. rank: what each process runs, with its number, a port, a queue for
    results and the parts; the benchmark where it is not given.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    results = mp.get_context("spawn").SimpleQueue()
    ranks = mp.spawn(rank or measure, (port, results, tuple(parts or PARTS)), nprocs=WORLD, join=False)
    result: dict[str, Any] = {"right": False, "done": False}
    heard = time.monotonic()
    try:
        while not result["done"]:
            if not results.empty():
                result, heard = results.get(), time.monotonic()
                save(result)
            elif ranks.join(timeout=0.2) and results.empty():
                raise RuntimeError("ranks ended without their last result")
            elif time.monotonic() - heard > PATIENCE:
                raise RuntimeError(f"no rank had a result for {PATIENCE} s")
        while not ranks.join():
            pass
    except (mp.ProcessRaisedException, mp.ProcessExitedException, RuntimeError) as error:
        for process in ranks.processes:
            process.kill()
        where = "" if isinstance(error, RuntimeError) else f"rank {error.error_index}: "
        result |= {"right": False, "failed": where + str(error).strip().splitlines()[-1]}
        save(result)
    return result


def measure(rank: int, port: int, results: Any, parts: Sequence[str]) -> None:
    """What a rank does."""
    torch.cuda.set_device(rank)
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    dist.init_process_group(
        "nccl",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=WORLD,
        device_id=torch.device("cuda", rank),
        pg_options=options,
    )
    measured(rank, results, parts)
    dist.barrier()
    dist.destroy_process_group()


def measured(rank: int, results: Any, parts: Sequence[str] = PARTS) -> None:
    """The lines of `parts`, within a group; rank 0 puts what there is into `results` after each."""
    result: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **machine("cuda"),
        "world": WORLD,
        "experts": [],
        "training": [],
        "index": [],
        "done": False,
    }

    def add(part: str, line: dict[str, Any]) -> None:
        result[part].append(line)
        save()

    def save() -> None:
        lines = [line for part in ("experts", "training", "index") for line in result[part]]
        result["right"] = all(line.get("equal", True) for line in lines)
        result["claims"] = claims(result)
        if rank == 0:
            results.put(result)

    with torch.no_grad():
        result["copy_gb_s"] = slowest(copy_bandwidth(10) / 1e9)
        result["link"] = link()
        save()
        layer = experts.Layer() if "experts" in parts else None
        inboxes = index.inboxes() if "index" in parts else None

        def expert_lines(tokens: Sequence[int]) -> None:
            for count in tokens if layer is not None else ():
                for line in layer.lines(count):
                    add("experts", line)

        def index_lines(shapes: Sequence[tuple[int, int]]) -> None:
            for requests, context in shapes if inboxes is not None else ():
                torch.cuda.empty_cache()
                add("index", index.index_line(requests, context, inboxes, result["copy_gb_s"]))

        expert_lines(TOKENS[:1])
        index_lines(SHAPES[:FIRST])
        expert_lines(TOKENS[1:])
        index_lines(SHAPES[FIRST:])
        layer = None
    torch.cuda.empty_cache()
    for line in experts.training_lines() if "training" in parts else ():
        add("training", line)
    result["done"] = True
    save()


def claims(result: dict[str, Any]) -> dict[str, Any]:
    """Answers to the two claims, of the lines that there are."""
    found: dict[str, Any] = {}
    moved = [line for line in result["experts"] if line["tokens"] == TOKENS[0] and line["way"] == "peer memory"]
    if moved:
        best = max(moved, key=lambda line: line["hidden"])
        found["experts"] = {
            "tokens": TOKENS[0],
            "equal": all(line["equal"] for line in moved),
            "hidden": best["hidden"],
            "parts": best["parts"],
            "holds": all(line["equal"] for line in moved) and best["hidden"] >= HIDDEN_SHARE,
        }
    long = [line for line in result["index"] if line["context"] == LONG]
    if long:
        found["index"] = [
            {name: line[name] for name in ("requests", "equal", "one_gpu_us", "peer memory us", "peer memory times", "reason")}
            for line in long
        ]
    return found


def link() -> dict[str, float]:
    """GB/s of this rank's copy to its neighbour, both ways at once, and of NCCL's exchange."""
    from .peer_memory import PeerMemory

    memory = PeerMemory((LINK_BYTES,), torch.uint8)
    world, rank = dist.get_world_size(), dist.get_rank()
    there = memory.of((rank + 1) % world)
    source = torch.ones_like(memory.local)
    size = source.nbytes / 1e3
    out = torch.empty_like(source)
    return {
        "copy_gb_s": size / median_us(lambda: there.copy_(source), 10),
        "nccl_gb_s": size * (world - 1) / world / median_us(lambda: dist.all_to_all_single(out, source), 10),
    }


def show(result: dict[str, Any]) -> None:
    """Print what was found."""
    if "machine" not in result:
        print("nothing was measured")
        return
    where = " · ".join(str(v) for v in result["machine"].values())
    print(result["world"], "x", where, "·", ", ".join(f"{k} {v}" for k, v in result["versions"].items()))
    if "link" in result:
        print("to the next GPU {copy_gb_s:.0f} GB/s each way, NCCL {nccl_gb_s:.0f}".format(**result["link"]))
    for line in sorted(result["experts"], key=lambda line: line["tokens"]):
        text = f"{line['tokens']:5d} tokens {line['way']:12s} {line['parts']:2d} parts"
        text += f" one GPU {line['one_gpu_us']:8.1f} computing {line['computing_us']:8.1f} together {line['together_us']:8.1f} us"
        if "hidden" in line:
            text += f" moving {line['moving_us']:7.1f} exposed {line['exposed_us']:7.1f} hidden {100 * line['hidden']:4.0f} %"
        print(text, "" if line["equal"] else "DIFFERS")
    for line in result["training"]:
        print(f"{line['tokens']:5d} tokens trained, {line['way']:24s} {line['us']:9.1f} us", "" if line.get("equal", True) else "DIFFERS")
    for line in sorted(result["index"], key=lambda line: (line["context"], line["requests"])):
        text = f"index {line['requests']:3d} x {line['context']:7d} one GPU {line['one_gpu_us']:7.1f} us (bytes {line['floor_us']:.1f})"
        for way in index.WAYS:
            text += f"  {way} {line[way + ' us']:7.1f} us, {line[way + ' times']:.2f} times"
        print(text, "" if line["equal"] else "DIFFERS")
    for text in verdicts(result["claims"]):
        print(text)


def verdicts(claims: dict[str, Any]) -> list[str]:
    """The claims as sentences."""
    said = []
    if "experts" in claims:
        c = claims["experts"]
        bits = "every token has the bits of one GPU" if c["equal"] else "bits DIFFER from one GPU's"
        share = f"{100 * c['hidden']:.0f} % of the moving is hidden in {c['parts']} parts"
        said.append(
            f"experts, {c['tokens']} tokens on each of {WORLD} GPUs: {bits}; {share}: half of it or more {'yes' if c['holds'] else 'NO'}"
        )
    for line in claims.get("index", []):
        bits = "choices of one GPU" if line["equal"] else "choices DIFFER from one GPU's"
        text = f"indexer, {line['requests']} x {LONG}: {bits}; {line['one_gpu_us']:.1f} us a layer on one GPU, "
        text += f"{line['peer memory us']:.1f} shared, {line['peer memory times']:.2f} times"
        said.append(text + (f"; {line['reason']}" if line["reason"] else ""))
    return said


if __name__ == "__main__":
    sys.exit(main())

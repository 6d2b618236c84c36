"""Speed of MSA: `samebits bench kernels --what msa --json FILE`, or `python -m samebits.kernels.bench_msa --json FILE`.

Decode at MiniMax-M3's shapes (64 query, 4 KV and 4 index heads of 128, 16 blocks of 128 keys), one query token a request, shuffled pages.
Each line is CUDA-graph replay: the graph holds several calls on different queries and block choices over pages larger than the L2
cache, and the median replay is divided by their number. Prefill, training and gradients of 32768 tokens (CUDA events, with
`bench_prefill`) and the lines of `bench_heads` follow. The copy that gives the bandwidth runs first, in the same process; a floor is the
bytes that must be moved (keys of the context; K and V of chosen blocks) over that bandwidth, which counts bytes read and written.

Peers (`bench_msa_peers`), where they can be imported, get the same pages, queries and choices; otherwise their absence is recorded. Before
a shape is timed, our choice and attention are compared with torch in fp64 on two of its requests. `compared` sets lines beside those that
they must beat. The file is written after every line; `--part` runs parts alone.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from samebits.quant import bench as formats
from samebits.quant import kv

from . import msa_ops
from .bench_msa_peers import Peer, Prefill, lines, load_peers
from .bench_record import Record, Save, chosen_parts, command, nowhere
from .msa import SparseConfig
from .msa_ops import BLOCK, DIM, Batch, Packed, Pages, batch_of

HEADS, GROUPS, TOPK = 64, 4, 16
SHAPES = ((1, 131072), (8, 131072), (32, 131072), (32, 8192), (32, 32768))
PARTS = ("decode", "prefill", "training", "heads")
LONG = 32768  # tokens of prefill and training
FORMATS = ("nvfp4", "fp8", "bf16")
BYTES = {"nvfp4": 72, "fp8": 128, "bf16": 256}  # of one head row
CONFIG = SparseConfig()


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    return command(__doc__, "MSA", sys.modules[__name__], argv)


def copy_bandwidth(repeat: int) -> float:
    """Bytes a second of a device copy of 2 GiB, read and written."""
    w = torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16)
    return 2 * w.nbytes / formats.time_copy(w, repeat)


def run(
    shapes: tuple[tuple[int, int], ...] = SHAPES, repeat: int = 20, save: Save = nowhere, parts: Iterable[str] | None = None
) -> dict[str, Any]:
    """All shapes and formats, and what peers there are. `save` gets what there is after each line. `parts`: some of `PARTS`."""
    parts = chosen_parts(parts, PARTS)
    record = Record(save)
    copy = copy_bandwidth(repeat)
    record.update(copy_gb_s=copy / 1e9, equal={}, results=[], peers={})
    result = record.result
    peers = load_peers(result["peers"])
    if "decode" in parts:
        for requests, context in shapes:
            for form in FORMATS:
                torch.cuda.empty_cache()
                case = Case(requests, context, form)
                result["equal"][f"{requests} x {context} {form}"] = case.agrees()
                record.add(decode(case, copy, peers, repeat))
                del case
    torch.cuda.empty_cache()
    if "prefill" in parts:
        record.add(prefill(LONG, peers, result["equal"]))
        torch.cuda.empty_cache()
    if "training" in parts:
        record.add(training(LONG, result["equal"]))
    if "heads" in parts:
        from .bench_heads import head_lines

        record.add(head_lines(copy, result["peers"]))
    record.update(compared=compared(result["results"]), right=all(result["equal"].values()))
    return result


def decode(case: Case, copy: float, peers: list[Peer], repeat: int) -> Iterator[dict[str, Any]]:
    """Lines of one shape and format, ours and the peers'."""
    floors = {"scores": case.index_bytes / copy * 1e6, "attention": case.chosen_bytes / copy * 1e6}
    floors["chain"] = floors["scores"] + floors["attention"]
    head = {"requests": case.requests, "context": case.context, "format": case.form}
    for name, calls in case.operations().items():
        line = head | {"name": name, "us": replay(calls, repeat)}
        if name in floors:
            line |= {"floor_us": floors[name], "of_floor": floors[name] / line["us"]}
        yield line
    for peer in peers:
        yield from lines(head | {"peer": peer.name}, peer.decode, (case,), partial(replay, repeat=repeat))


def compared(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lines beside those that they are measured against: `ratio` is how many times as long the other takes, and what is `wanted` of it.

    In decode each of our formats stands beside every peer's of the same operation, whatever pages that peer reads. Training is forward over
    packed bf16, which computes over the same number of keys as prefill over bf16 pages. Of the ratio of backward to forward the wanted
    number is the most it may be.
    """
    times = {
        (line.get("requests"), line.get("context", line.get("tokens")), line["format"], line["name"]): line["us"]
        for line in found
        if "us" in line
    }
    rows = []

    def row(name: str, shape: str, ours: float | None, other: float | None, **wanted: float) -> None:
        if ours is not None and other is not None:
            rows.append({"name": name, "shape": shape, "ratio": other / ours} | wanted)

    for (requests, context, form, name), us in times.items():
        peer, _, operation = name.partition(" ")
        if requests is None or peer not in ("vllm", "flashinfer"):
            continue
        for own in FORMATS:
            what = f"{operation}: {peer} on {form} over ours on {own}"
            row(what, f"{requests} x {context}", times.get((requests, context, own, operation)), us)

    def at(tokens: int, form: str, name: str) -> float | None:
        return times.get((None, tokens, form, name))

    for kind in ("", ", alike"):
        stock, forward = at(LONG, "bf16", f"vllm prefill{kind}"), at(LONG, "bf16", f"training forward{kind}")
        for name in ("prefill", "training forward"):
            ours, other = at(LONG, "bf16", name + kind), at(LONG, "bf16", f"{name}, Triton{kind}")
            row(f"{name}{kind}, bf16: Triton over ours", f"{LONG} tokens", ours, other, at_least=1.0)
        ours = at(LONG, "bf16", f"prefill{kind}")
        row(f"prefill{kind}: vllm over ours, bf16 pages", f"{LONG} tokens", ours, stock, at_least=1.5)
        row(f"prefill{kind}: vllm on bf16 pages over our training forward", f"{LONG} tokens", forward, stock, at_least=1.5)
    forward = at(LONG, "bf16", "training forward")
    row("training: backward over forward", f"{LONG} tokens", forward, at(LONG, "bf16", "backward"), at_most=3.0)
    one = "project and insert, one launch"
    for tokens in dict.fromkeys(tokens for requests, tokens, *_ in times if requests is None):
        for form, other in (("bf16", "cuBLAS bf16, then vllm insert"), ("nvfp4", "cuBLAS bf16, then insert")):
            row(f"{form} pages: {other}, over one launch", f"{tokens} tokens", at(tokens, form, one), at(tokens, form, other))
    return rows


def prefill(tokens: int, peers: list[Peer], equal: dict[str, bool], repeat: int = 5) -> Iterator[dict[str, Any]]:
    """One sequence: choice from bf16 index pages, and attention over pages of each format, ours and the peers'. Keys are random.

    Attention has its lines twice: with the choices of random index queries, and with those that neighbours share (`bench_prefill`).
    """
    from . import triton_msa
    from .bench_prefill import KINDS, in_triton, together

    g = torch.Generator("cuda").manual_seed(0)
    blocks, scale = tokens // BLOCK, msa_ops.default_scale()
    q, index_q, rows = (random_rows((tokens, heads, DIM), torch.bfloat16, g) for heads in (HEADS, GROUPS, 2 * GROUPS))
    table = torch.randperm(blocks, generator=g, device="cuda").int()[None]
    index = Pages(random_rows((blocks, BLOCK, DIM), torch.bfloat16, g), table)
    k, v = (kv.round_trip(x) for x in rows.chunk(2, dim=1))
    slots = (table.long()[0, :, None] * BLOCK + torch.arange(BLOCK, device="cuda")).flatten()
    caches = {}
    for form in FORMATS:
        if form == "nvfp4":
            data = torch.zeros(kv.page_shape(blocks, GROUPS, DIM), dtype=torch.uint8, device="cuda")
            kv.write_pages(data, slots, k, v)
        else:
            dtype = torch.bfloat16 if form == "bf16" else torch.float8_e4m3fn
            data = torch.empty(blocks, GROUPS, BLOCK, 2 * DIM, dtype=dtype, device="cuda")
            whole = torch.cat((k, v), -1).view(blocks, BLOCK, GROUPS, 2 * DIM).transpose(1, 2).to(dtype)
            data.view(torch.uint8)[table.long()[0]] = whole.view(torch.uint8)  # E4M3 cannot be indexed
        caches[form] = Pages(data, table)
    batch = batch_of([tokens], device="cuda")

    def choose(queries: Tensor) -> Tensor:
        return msa_ops.index_topk(queries, index, batch, CONFIG)

    def timed(calls: list[Callable[[], Any]]) -> float:
        return formats.time_cuda(calls[0], repeat) * 1e6

    # Keys that are seen: of the own block, which always is chosen, those up to the query.
    seen = sum(min(p // BLOCK, TOPK - 1) * BLOCK + p % BLOCK + 1 for p in range(tokens))
    head = {"tokens": tokens, "format": "bf16"}
    yield head | {"name": "choice", "us": timed([partial(choose, index_q)])}
    for form in FORMATS:
        head = {"tokens": tokens, "format": form}
        for kind, queries in zip(KINDS, (index_q, together(index_q)), strict=True):
            call = (q, caches[form], choose(queries), batch, scale)
            work = Prefill(q, queries, caches, index, call[2], {form: triton_msa.attend(*call)[0]})
            us = timed([partial(triton_msa.attend, *call)])
            yield head | {"name": "prefill" + kind, "us": us, "tflop_s": 4 * HEADS * DIM * seen / us / 1e6}
            yield from in_triton(head, "prefill", kind, call, False, timed, equal)
            for peer in peers:
                for line in lines(head | {"peer": peer.name}, peer.prefill, (work, form), timed):
                    yield line | {"name": line["name"] + kind}


def training(tokens: int, equal: dict[str, bool], repeat: int = 5) -> Iterator[dict[str, Any]]:
    """One sequence: forward over packed bf16 keys, with the sums that gradients need, and all gradients.

    That is what a trainer reads whatever the cache's format: K and V go through the format and come back in bf16. Keys are random. Forward
    has its lines twice, as prefill has; gradients are those of the choices that neighbours share no more than chance has it.
    """
    from . import triton_msa
    from .bench_prefill import KINDS, in_triton, together
    from .triton_msa_backward import gradients

    g = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, device="cuda").bfloat16()

    q, index_q, index_k = normal(tokens, HEADS, DIM), normal(tokens, GROUPS, DIM), normal(tokens, DIM)
    k, v = (kv.round_trip(normal(tokens, GROUPS, DIM)) for _ in range(2))
    batch = batch_of([tokens], device="cuda")
    packed = Packed(k, v, batch.start[:1], tokens // BLOCK)
    index = packed._replace(keys=index_k, values=None)
    scale = msa_ops.default_scale()
    head = {"tokens": tokens, "format": "bf16"}

    def timed(calls: list[Callable[[], Any]]) -> float:
        return formats.time_cuda(calls[0], repeat) * 1e6

    for kind, queries in zip(KINDS, (index_q, together(index_q)), strict=True):
        call = (q, packed, msa_ops.index_topk(queries, index, batch, CONFIG), batch, scale)
        yield head | {"name": "training forward" + kind, "us": timed([partial(triton_msa.attend, *call, lse=True)])}
        yield from in_triton(head, "training forward", kind, call, True, timed, equal)
        if not kind:
            out, lse = triton_msa.attend(*call, lse=True)
            saved = (normal(tokens, HEADS, DIM), q, k, v, out, lse, call[2], batch.start, batch.request, batch.position, scale)
            yield head | {"name": "backward", "us": timed([partial(gradients, *saved)])}
            del out, lse, saved


class Case:
    """Pages, queries and block choices of one shape."""

    def __init__(self, requests: int, context: int, form: str, copies: int = 8) -> None:
        self.requests, self.context, self.form = requests, context, form
        g = torch.Generator("cuda").manual_seed(requests * context)
        blocks = context // BLOCK
        pages = requests * blocks
        self.table = torch.randperm(pages, generator=g, device="cuda").int().view(requests, blocks)
        if form == "nvfp4":
            data = random_pages(kv.page_shape(pages, GROUPS, DIM), g)
            index = random_pages(kv.index_page_shape(pages, DIM), g)
        else:
            dtype = torch.bfloat16 if form == "bf16" else torch.float8_e4m3fn
            data = random_rows((pages, GROUPS, BLOCK, 2 * DIM), dtype, g)
            index = random_rows((pages, BLOCK, DIM), dtype, g)
        self.cache, self.index = Pages(data, self.table), Pages(index, self.table)
        self.queries = [torch.randn(requests, HEADS, DIM, generator=g, device="cuda").bfloat16() for _ in range(copies)]
        self.index_queries = [torch.randn(requests, GROUPS, DIM, generator=g, device="cuda").bfloat16() for _ in range(copies)]
        row = torch.arange(requests + 1, dtype=torch.int32, device="cuda")
        self.batch = Batch(row, row[:-1], torch.full_like(row[:-1], context - 1), 1)
        self.chosen = [msa_ops.index_topk(q, self.index, self.batch, CONFIG) for q in self.index_queries]
        self.index_bytes = requests * context * BYTES[form]
        self.chosen_bytes = requests * GROUPS * min(context, TOPK * BLOCK) * 2 * BYTES[form]

    def operations(self) -> dict[str, list[Callable[[], Any]]]:
        """Our calls by name, one for each copy of the queries."""
        from . import triton_msa

        scale = msa_ops.default_scale()
        scores = [triton_msa.index_scores(q, self.index, self.batch) for q in self.index_queries]
        out = [torch.empty_like(c) for c in self.chosen]
        each = range(len(self.queries))

        def chain(i: int) -> None:
            chosen = msa_ops.index_topk(self.index_queries[i], self.index, self.batch, CONFIG)
            msa_ops.sparse_attention(self.queries[i], self.cache, chosen, self.batch, scale)

        return {
            "scores": [lambda i=i: triton_msa.index_scores(self.index_queries[i], self.index, self.batch) for i in each],
            "top-k": [lambda i=i: triton_msa.choose(scores[i], self.batch.position, CONFIG, out[i]) for i in each],
            "attention": [lambda i=i: self.attend(i) for i in each],
            "chain": [lambda i=i: chain(i) for i in each],
        }

    def attend(self, i: int) -> Tensor:
        """Our attention of query set i to its choices."""
        return msa_ops.sparse_attention(self.queries[i], self.cache, self.chosen[i], self.batch, msa_ops.default_scale())

    def agrees(self) -> bool:
        """Scores, choice and attention of the first and the last request against torch in fp32."""
        from . import triton_msa

        scores = triton_msa.index_scores(self.index_queries[0], self.index, self.batch)
        out = msa_ops.sparse_attention(self.queries[0], self.cache, self.chosen[0], self.batch, msa_ops.default_scale())
        good = True
        for r in {0, self.requests - 1}:
            k = msa_ops._index_keys(self.index, r, self.context, DIM)
            exact = (self.index_queries[0][r].double() @ k.double().T).view(GROUPS, -1, BLOCK).amax(-1)
            good &= bool((scores[r] - exact).abs().max() < 1e-4 * exact.abs().max())
            # The choice from these very scores, by a stable sort.
            ranked = scores[r].clone()
            ranked[:, -1] = math.inf
            want = ranked.sort(dim=-1, descending=True, stable=True).indices[:, :TOPK].sort(-1).values
            good &= torch.equal(self.chosen[0][r].long(), want)
            slots = self.table[r].long()[want] * BLOCK
            for g in range(GROUPS):
                at = (slots[g][:, None] + torch.arange(BLOCK, device="cuda")).flatten()
                key, value = self._rows(at, g)
                q = self.queries[0][r, 16 * g : 16 * g + 16].double()
                exact_out = ((q @ key.double().T) / math.sqrt(DIM)).softmax(-1) @ value.double()
                good &= bool((out[r, 16 * g : 16 * g + 16] - exact_out).norm() < 1e-2 * exact_out.norm())
        return good

    def _rows(self, slots: Tensor, group: int) -> tuple[Tensor, Tensor]:
        if self.form == "nvfp4":
            k, v = kv.read_pages(self.cache.data, slots, DIM)
            return k[:, group], v[:, group]
        rows = (slots // BLOCK * GROUPS + group) * BLOCK + slots % BLOCK
        both = msa_ops._pick(self.cache.data.view(-1, 2 * DIM), rows)
        return both[:, :DIM], both[:, DIM:]


def random_pages(shape: tuple[int, ...], g: torch.Generator) -> Tensor:
    """NVFP4 pages with random codes and block scales between 2^-3 and 2."""
    pages = torch.randint(0, 256, shape, generator=g, device="cuda", dtype=torch.uint8)
    scales = pages.view(*shape[:-2], BLOCK * shape[-1])[..., BLOCK * DIM // 2 :]
    scales.copy_(scales % 32 + 0x20)
    return pages


def random_rows(shape: tuple[int, ...], dtype: torch.dtype, g: torch.Generator) -> Tensor:
    """Normal values, drawn in parts to save memory."""
    out = torch.empty(shape, dtype=dtype, device="cuda")
    for part in out.split(max(1, (1 << 28) // math.prod(shape[1:]))):
        part.copy_(torch.randn(part.shape, generator=g, device="cuda", dtype=torch.bfloat16))
    return out


def replay(calls: list[Callable[[], Any]], repeat: int) -> float:
    """Median microseconds of a call in graph replay."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return formats.time_cuda(graph.replay, repeat) * 1e6 / len(calls)


def show(result: dict[str, Any]) -> None:
    """Print what was found."""
    print(" · ".join(str(v) for v in result["machine"].values()), "·", ", ".join(f"{k} {v}" for k, v in result["versions"].items()))
    print(f"copy {result['copy_gb_s']:.0f} GB/s, {result['seconds']:.0f} s in all")
    for name, text in result["peers"].items():
        print(f"{name}: {text}")
    for line in result["results"]:
        shape = f"{line['requests']:3d} x {line['context']:6d}" if "context" in line else f"{line['tokens']:5d} tok."
        text = f"{shape} {line['format']:5s} {line['name']:28s} "
        text += f"{line['us']:8.1f} us" if "us" in line else line["error"]
        if "tflop_s" in line:
            text += f"  {line['tflop_s']:6.1f} TFLOP/s"
        if "distance" in line:
            text += f"  from ours {line['distance']:.1e}"
        if "floor_us" in line:
            text += f"  floor {line['floor_us']:6.1f} us, {100 * line['of_floor']:4.0f} %"
        print(text)
    for row in result.get("compared", ()):
        wanted = "".join(f", wanted {kind.replace('_', ' ')} {row[kind]}" for kind in ("at_least", "at_most") if kind in row)
        print(f"{row['shape']:14s} {row['name']:60s} {row['ratio']:6.2f}{wanted}")
    wrong = [name for name, ok in result["equal"].items() if not ok]
    print(f"reference: {len(result['equal']) - len(wrong)} of {len(result['equal'])} cases agree")
    for name in wrong:
        print(f"  differs: {name}")


if __name__ == "__main__":
    sys.exit(main())

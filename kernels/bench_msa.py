"""Speed of MSA: `samebits bench kernels --what msa --json FILE`, or `python -m samebits.kernels.bench_msa --json FILE`.

Decode at MiniMax-M3's shapes (64 query, 4 KV and 4 index heads of 128, 16 blocks of 128 keys), one query token a request, shuffled pages.
Each line is CUDA-graph replay: the graph holds several calls on different queries and block choices over pages larger than the L2
cache, and the median replay is divided by their number. Prefill, training and gradients of 32768 tokens (CUDA events) and the lines of
`bench_heads` follow. The copy that gives the bandwidth runs first, in the same process; a floor is the bytes that must be moved (keys of
the context; K and V of chosen blocks) over that bandwidth, which counts bytes read and written.

Peers where they can be imported: FlashInfer's `msa_ops` (fp8 and bf16 pages) and vLLM's own MiniMax-M3 kernels (bf16 pages); otherwise
their absence is recorded. Before a shape is timed, our choice and attention are compared with torch in fp64 on two of its requests.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samebits.quant import bench as formats
from samebits.quant import kv

from . import msa_ops
from .msa import SparseConfig
from .msa_ops import BLOCK, DIM, Batch, Packed, Pages, batch_of

HEADS, GROUPS, TOPK = 64, 4, 16
SHAPES = ((1, 131072), (8, 131072), (32, 8192), (32, 32768), (32, 131072))
FORMATS = ("nvfp4", "fp8", "bf16")
BYTES = {"nvfp4": 72, "fp8": 128, "bf16": 256}  # of one head row
CONFIG = SparseConfig()


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="write the results here")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("samebits: the MSA benchmark needs a CUDA GPU", file=sys.stderr)
        return 2
    result = run()
    show(result)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if result["right"] else 1


def run(
    shapes: tuple[tuple[int, int], ...] = SHAPES, repeat: int = 20, save: Callable[[dict[str, Any]], Any] = lambda result: None
) -> dict[str, Any]:
    """All shapes and formats, and what peers there are. `save` gets what there is after each shape, and all of it at the end."""
    result: dict[str, Any] = {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), **formats.machine("cuda")}
    w = torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16)
    copy = 2 * w.nbytes / formats.time_copy(w, repeat)
    del w
    result |= {"copy_gb_s": copy / 1e9, "equal": {}, "results": [], "peers": {}}
    peers = load_peers(result["peers"])
    for requests, context in shapes:
        for form in FORMATS:
            torch.cuda.empty_cache()
            case = Case(requests, context, form)
            result["equal"][f"{requests} x {context} {form}"] = case.agrees()
            floors = {"scores": case.index_bytes / copy * 1e6, "attention": case.chosen_bytes / copy * 1e6}
            floors["chain"] = floors["scores"] + floors["attention"]
            for name, calls in case.operations().items():
                line = {"requests": requests, "context": context, "format": form, "name": name, "us": replay(calls, repeat)}
                if name in floors:
                    line |= {"floor_us": floors[name], "of_floor": floors[name] / line["us"]}
                result["results"].append(line)
            for peer in peers:
                for name, calls in peer(case).items():
                    result["results"].append(
                        {"requests": requests, "context": context, "format": form, "name": name, "us": replay(calls, repeat)}
                    )
            del case
        save(result)
    torch.cuda.empty_cache()
    from .bench_heads import head_lines

    for line in (*training(32768), *head_lines(copy, result["peers"])):
        result["results"].append(line)
    result["right"] = all(result["equal"].values())
    save(result)
    return result


def training(tokens: int, repeat: int = 5) -> list[dict[str, Any]]:
    """One sequence: choice, forward over NVFP4 pages (prefill) and over packed bf16 (training), and all gradients.

    Keys are random: neighbouring queries share no more blocks than chance has it.
    """
    from . import triton_msa
    from .triton_msa_backward import gradients

    g = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, device="cuda").bfloat16()

    q, index_q, index_k = normal(tokens, HEADS, DIM), normal(tokens, GROUPS, DIM), normal(tokens, DIM)
    k, v = (kv.round_trip(normal(tokens, GROUPS, DIM)) for _ in range(2))
    batch = batch_of([tokens], device="cuda")
    packed = Packed(k, v, batch.start[:1], tokens // BLOCK)
    index = packed._replace(keys=index_k, values=None)
    pages = torch.zeros(kv.page_shape(tokens // BLOCK, GROUPS, DIM), dtype=torch.uint8, device="cuda")
    kv.write_pages(pages, torch.arange(tokens, device="cuda"), k, v)
    cache = Pages(pages, torch.arange(tokens // BLOCK, dtype=torch.int32, device="cuda")[None])
    scale = msa_ops.default_scale()
    chosen = msa_ops.index_topk(index_q, index, batch, CONFIG)
    out, lse = triton_msa.attend(q, packed, chosen, batch, scale, lse=True)
    saved = (normal(tokens, HEADS, DIM), q, k, v, out, lse, chosen, batch.start, batch.request, batch.position, scale)
    calls: dict[str, tuple[str, Callable[[], Any]]] = {
        "choice": ("bf16", lambda: msa_ops.index_topk(index_q, index, batch, CONFIG)),
        "prefill": ("nvfp4", lambda: triton_msa.attend(q, cache, chosen, batch, scale)),
        "training forward": ("bf16", lambda: triton_msa.attend(q, packed, chosen, batch, scale, lse=True)),
        "backward": ("bf16", lambda: gradients(*saved)),
    }
    return [
        {"tokens": tokens, "format": form, "name": name, "us": formats.time_cuda(call, repeat) * 1e6}
        for name, (form, call) in calls.items()
    ]


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

        def attend(i: int) -> None:
            msa_ops.sparse_attention(self.queries[i], self.cache, self.chosen[i], self.batch, scale)

        return {
            "scores": [lambda i=i: triton_msa.index_scores(self.index_queries[i], self.index, self.batch) for i in each],
            "top-k": [lambda i=i: triton_msa.choose(scores[i], self.batch.position, CONFIG, out[i]) for i in each],
            "attention": [lambda i=i: attend(i) for i in each],
            "chain": [lambda i=i: chain(i) for i in each],
        }

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


def load_peers(found: dict[str, str]) -> list[Callable[[Case], dict[str, list[Callable[[], Any]]]]]:
    """Peers' calls on a case; `found` says version or absence of each."""
    peers = []
    for name, load in (("flashinfer msa_ops", _flashinfer), ("vllm minimax_m3", _vllm)):
        try:
            version, calls = load()
        except ImportError as error:
            found[name] = f"absent: {error}"
        else:
            found[name] = version
            peers.append(calls)
    return peers


def _flashinfer() -> tuple[str, Callable[[Case], dict[str, list[Callable[[], Any]]]]]:
    import flashinfer
    import flashinfer.msa_ops as ops
    import flashinfer.msa_ops._sm90_dispatch as dispatch

    dispatch._cute_proxy_decode_preferred = lambda *_: False  # its CuTe DSL program needs another package

    def calls(case: Case) -> dict[str, list[Callable[[], Any]]]:
        if case.form == "nvfp4":
            return {}
        requests, blocks = case.requests, case.context // BLOCK
        keys = case.index.data[:, None]
        queries = [q.to(keys.dtype) for q in case.index_queries]
        lengths = torch.full((requests,), case.context, dtype=torch.int32, device="cuda")
        valid = torch.full((requests,), blocks, dtype=torch.int32, device="cuda")
        scores = [torch.empty(GROUPS, blocks, requests, device="cuda") for _ in queries]
        chosen = [torch.empty(requests, GROUPS, TOPK, dtype=torch.int32, device="cuda") for _ in queries]
        out = torch.empty_like(case.queries[0])

        def score(i: int) -> None:
            ops.msa_proxy_score(
                queries[i],
                keys,
                case.batch.start,
                page_table=case.table,
                seqused_k=lengths,
                max_seqlen_q=1,
                max_k_tiles=blocks,
                output=scores[i],
            )

        def choose(i: int) -> None:
            ops.msa_topk_select(scores[i], TOPK, num_valid_pages=valid, force_end_blocks=1, output=chosen[i])

        def attend(i: int) -> None:
            k, v = case.cache.data[..., :DIM], case.cache.data[..., DIM:]
            ops.msa_sparse_decode_attention(
                case.queries[i],
                k,
                v,
                chosen[i].permute(1, 0, 2).contiguous(),
                page_table=case.table,
                seqused_k=lengths,
                seqlen_q=1,
                softmax_scale=msa_ops.default_scale(),
                out=out,
            )

        def chain(i: int) -> None:
            score(i)
            choose(i)
            attend(i)

        steps = {"scores": score, "top-k": choose}
        if case.form == "fp8":
            steps |= {"attention": attend, "chain": chain}
        return {f"flashinfer {name}": [lambda i=i, f=f: f(i) for i in range(len(queries))] for name, f in steps.items()}

    return flashinfer.__version__, calls


def _vllm() -> tuple[str, Callable[[Case], dict[str, list[Callable[[], Any]]]]]:
    import vllm
    from vllm.models.minimax_m3.common.ops.index_topk import minimax_m3_index_decode
    from vllm.models.minimax_m3.common.ops.sparse_attn import minimax_m3_sparse_attn_decode

    def calls(case: Case) -> dict[str, list[Callable[[], Any]]]:
        if case.form != "bf16":
            return {}
        lengths = torch.full((case.requests,), case.context, dtype=torch.int32, device="cuda")
        out = torch.empty_like(case.queries[0])

        def choose(i: int) -> Tensor:
            return minimax_m3_index_decode(
                case.index_queries[i], case.index.data, case.table, lengths, case.context, TOPK, 0, 1, GROUPS, 1, 1
            )

        chosen = [choose(i) for i in range(len(case.queries))]

        def attend(i: int, ids: Tensor | None = None) -> None:
            ids = chosen[i] if ids is None else ids
            scale = msa_ops.default_scale()
            minimax_m3_sparse_attn_decode(case.queries[i], case.cache.data, ids, case.table, lengths, GROUPS, scale, out, 1)

        def chain(i: int) -> None:
            attend(i, choose(i))

        steps = {"scores and top-k": choose, "attention": attend, "chain": chain}
        return {f"vllm {name}": [lambda i=i, f=f: f(i) for i in range(len(case.queries))] for name, f in steps.items()}

    return vllm.__version__, calls


def show(result: dict[str, Any]) -> None:
    """Print what was found."""
    print(" · ".join(str(v) for v in result["machine"].values()), "·", ", ".join(f"{k} {v}" for k, v in result["versions"].items()))
    print(f"copy {result['copy_gb_s']:.0f} GB/s; " + "; ".join(f"{k}: {v}" for k, v in result["peers"].items()))
    for line in result["results"]:
        shape = f"{line['requests']:3d} x {line['context']:6d}" if "context" in line else f"{line['tokens']:5d} tok."
        text = f"{shape} {line['format']:5s} {line['name']:28s} {line['us']:8.1f} us"
        if "floor_us" in line:
            text += f"  floor {line['floor_us']:6.1f} us, {100 * line['of_floor']:4.0f} %"
        print(text)
    wrong = [name for name, ok in result["equal"].items() if not ok]
    print(f"reference: {len(result['equal']) - len(wrong)} of {len(result['equal'])} cases agree")
    for name in wrong:
        print(f"  differs: {name}")


if __name__ == "__main__":
    sys.exit(main())

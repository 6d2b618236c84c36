"""Speed of dense attention: `samebits bench kernels --what dense --json FILE`, or `python -m samebits.kernels.bench_dense --json FILE`.

Decode at MiniMax-M3's shapes (64 query and 4 KV heads of 128), one query token a request, shuffled pages, by CUDA-graph replay of several
calls on different queries. A floor is the bytes of all K and V over the bandwidth of a copy in the same process, which counts bytes read
and written. Training of one sequence follows: forward and backward over packed bf16 at 8192 tokens, and at 32768 tokens the forward of
dense and of sparse attention (over the blocks of a random choice), over packed bf16 as training and over NVFP4 pages as prefill; beside
them torch's scaled dot product attention on the same K, V and queries, by the flash and the cuDNN backend, where those take it.

Before a shape is timed its output is compared with torch in fp64 on two requests, or on some tokens of the sequence.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from samebits.quant import bench as formats
from samebits.quant import kv

from . import msa_ops
from .bench_msa import BYTES, GROUPS, HEADS, copy_bandwidth, random_pages, random_rows, replay
from .bench_msa import show as show
from .bench_record import Record, Save, absence, chosen_parts, command, nowhere
from .msa import SparseConfig
from .msa_ops import BLOCK, DIM, Batch, Packed, Pages, batch_of

SHAPES = ((1, 8192), (1, 131072), (32, 8192), (32, 32768))
FORMATS = ("nvfp4", "fp8", "bf16")
TRAINING, PREFILL = 8192, 32768  # tokens
PARTS = ("decode", "training", "prefill")
SCALE = msa_ops.default_scale()
PEERS = {"torch flash": SDPBackend.FLASH_ATTENTION, "torch cudnn": SDPBackend.CUDNN_ATTENTION}


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    return command(__doc__, "dense attention", sys.modules[__name__], argv)


def run(
    shapes: tuple[tuple[int, int], ...] = SHAPES, repeat: int = 20, save: Save = nowhere, parts: Iterable[str] | None = None
) -> dict[str, Any]:
    """All shapes and formats, and torch's own attention. `save` gets what there is after each line. `parts`: some of `PARTS`."""
    parts = chosen_parts(parts, PARTS)
    record = Record(save)
    copy = copy_bandwidth(repeat)
    record.update(copy_gb_s=copy / 1e9, equal={}, results=[], peers={})
    result = record.result
    if "decode" in parts:
        record.add(decode(shapes, copy, result["equal"], repeat))
    torch.cuda.empty_cache()
    if "training" in parts:
        record.add(training(TRAINING, result))
    if "prefill" in parts:
        record.add(prefill(PREFILL, result))
    record.update(right=all(result["equal"].values()))
    return result


def decode(shapes: tuple[tuple[int, int], ...], copy: float, equal: dict[str, bool], repeat: int) -> Iterator[dict[str, Any]]:
    """One query token a request, over pages of each format."""
    for requests, context in shapes:
        for form in FORMATS:
            torch.cuda.empty_cache()
            queries, cache, batch = decode_case(requests, context, form)
            equal[f"{requests} x {context} {form}"] = decode_agrees(queries[0], cache, batch)
            calls = [lambda q=q, c=cache, b=batch: msa_ops.dense_attention(q, c, b, SCALE) for q in queries]
            line = {"requests": requests, "context": context, "format": form, "name": "decode", "us": replay(calls, repeat)}
            line["floor_us"] = requests * context * GROUPS * 2 * BYTES[form] / copy * 1e6
            yield line | {"of_floor": line["floor_us"] / line["us"]}
            del queries, cache, batch, calls


def decode_case(requests: int, context: int, form: str, copies: int = 4) -> tuple[list[Tensor], Pages, Batch]:
    """Queries, one token a request, and pages of random keys and values."""
    g = torch.Generator("cuda").manual_seed(requests * context)
    blocks = context // BLOCK
    pages = requests * blocks
    if form == "nvfp4":
        data = random_pages(kv.page_shape(pages, GROUPS, DIM), g)
    else:
        data = random_rows((pages, GROUPS, BLOCK, 2 * DIM), torch.bfloat16 if form == "bf16" else torch.float8_e4m3fn, g)
    table = torch.randperm(pages, generator=g, device="cuda").int().view(requests, blocks)
    row = torch.arange(requests + 1, dtype=torch.int32, device="cuda")
    batch = Batch(row, row[:-1], torch.full_like(row[:-1], context - 1), 1)
    return [torch.randn(requests, HEADS, DIM, generator=g, device="cuda").bfloat16() for _ in range(copies)], Pages(data, table), batch


def decode_agrees(q: Tensor, cache: Pages, batch: Batch) -> bool:
    """The first and the last request against fp64."""
    out = msa_ops.dense_attention(q, cache, batch, SCALE)
    length = int(batch.position[0]) + 1
    return all(_near(out[r], _exact(q[r], *msa_ops._keys_values(cache, r, length, GROUPS, DIM))) for r in {0, batch.position.numel() - 1})


def _exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """fp64 attention [H, D] of one token's queries [H, D] to keys and values [K, G, D]."""
    scores = torch.einsum("ghd,kgd->ghk", q.double().view(k.shape[1], -1, DIM), k.double()) * SCALE
    return torch.einsum("ghk,kgd->ghd", scores.softmax(-1), v.double()).flatten(0, 1)


def _near(have: Tensor, want: Tensor) -> bool:
    return bool((have.double() - want).norm() < 1e-2 * want.norm())


class Sequence:
    """One packed sequence, and the same keys and values as torch's attention takes them."""

    def __init__(self, tokens: int) -> None:
        g = torch.Generator("cuda").manual_seed(tokens)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g, device="cuda").bfloat16()

        self.tokens, self.q, self.grad = tokens, normal(tokens, HEADS, DIM), normal(tokens, HEADS, DIM)
        self.k, self.v = (kv.round_trip(normal(tokens, GROUPS, DIM)) for _ in range(2))
        self.batch = batch_of([tokens], device="cuda")
        self.packed = Packed(self.k, self.v, self.batch.start[:1], -(-tokens // BLOCK))

    def agrees(self) -> bool:
        """Some tokens against fp64."""
        out = msa_ops.dense_attention(self.q, self.packed, self.batch, SCALE)
        return all(_near(out[t], _exact(self.q[t], self.k[: t + 1], self.v[: t + 1])) for t in (0, self.tokens // 3, self.tokens - 1))

    def peers(self, found: dict[str, str]) -> Iterator[tuple[str, Callable[..., Tensor]]]:
        """torch's attention by backend, on [1, heads, T, D]; `found` says what is wrong with a backend that does not take it."""
        for name, backend in PEERS.items():

            def call(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend = backend) -> Tensor:
                with sdpa_kernel(backend):
                    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE, enable_gqa=True)

            try:
                call(*self.torch_heads())
            except RuntimeError as error:
                found[name] = absence(error)
            else:
                found[name] = torch.__version__
                yield name, call

    def torch_heads(self) -> list[Tensor]:
        """q, k and v contiguous in torch's order."""
        return [x.transpose(0, 1)[None].contiguous() for x in (self.q, self.k, self.v)]


def training(tokens: int, result: dict[str, Any], repeat: int = 10) -> Iterator[dict[str, Any]]:
    """Forward and backward over packed bf16."""
    from . import triton_msa_dense_ops
    from .triton_msa_dense_backward import gradients

    case = Sequence(tokens)
    result["equal"][f"{tokens} tokens"] = case.agrees()
    out, lse = triton_msa_dense_ops.attend(case.q, case.packed, case.batch, SCALE, lse=True)
    yield _line(tokens, "training forward", lambda: triton_msa_dense_ops.attend(case.q, case.packed, case.batch, SCALE, lse=True), repeat)
    saved = (case.grad, case.q, case.k, case.v, out, lse, case.batch, SCALE)
    yield _line(tokens, "backward", lambda: gradients(*saved), repeat)
    for name, call in case.peers(result["peers"]):
        q, k, v = (x.requires_grad_() for x in case.torch_heads())
        with torch.no_grad():
            yield _line(tokens, f"{name} forward", lambda call=call, q=q, k=k, v=v: call(q, k, v), repeat)
        peer_out, grad = call(q, k, v), case.grad.transpose(0, 1)[None].contiguous()
        args = (peer_out, (q, k, v), grad)
        yield _line(tokens, f"{name} backward", lambda args=args: torch.autograd.grad(*args, retain_graph=True), repeat)


def prefill(tokens: int, result: dict[str, Any], repeat: int = 5) -> Iterator[dict[str, Any]]:
    """Dense and sparse forward over packed bf16 and over NVFP4 pages."""
    case, config = Sequence(tokens), SparseConfig()
    result["equal"][f"{tokens} tokens"] = case.agrees()
    pages = torch.zeros(kv.page_shape(tokens // BLOCK, GROUPS, DIM), dtype=torch.uint8, device="cuda")
    kv.write_pages(pages, torch.arange(tokens, device="cuda"), case.k, case.v)
    cache = Pages(pages, torch.arange(tokens // BLOCK, dtype=torch.int32, device="cuda")[None])
    g = torch.Generator("cuda").manual_seed(0)
    index_q, index_k = (torch.randn(tokens, n, DIM, generator=g, device="cuda").bfloat16() for n in (GROUPS, 1))
    chosen = msa_ops.index_topk(index_q, case.packed._replace(keys=index_k[:, 0], values=None), case.batch, config)
    for form, keys in (("bf16", case.packed), ("nvfp4", cache)):
        yield _line(tokens, "dense forward", lambda keys=keys: msa_ops.dense_attention(case.q, keys, case.batch, SCALE), repeat, form)
        yield _line(
            tokens, "sparse forward", lambda keys=keys: msa_ops.sparse_attention(case.q, keys, chosen, case.batch, SCALE), repeat, form
        )
    heads = case.torch_heads()
    for name, call in case.peers(result["peers"]):
        yield _line(tokens, f"{name} forward", lambda call=call: call(*heads), repeat)


def _line(tokens: int, name: str, call: Callable[[], Any], repeat: int, form: str = "bf16") -> dict[str, Any]:
    seconds = formats.time_cuda(call, repeat)
    line = {"tokens": tokens, "format": form, "name": name, "us": seconds * 1e6}
    if "sparse" not in name:
        # Two products in the forward pass over half of the square, five in the backward pass.
        operations = 2 * tokens * (tokens + 1) / 2 * HEADS * DIM * (5 if "backward" in name else 2)
        line["tflop_s"] = operations / seconds / 1e12
    return line


if __name__ == "__main__":
    sys.exit(main())

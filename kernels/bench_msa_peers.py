"""Peers of the MSA benchmark, where they can be imported: FlashInfer's `msa_ops` and the MiniMax-M3 kernels that vLLM ships.

They get the pages, tables, queries and block choices of our own lines, in the same process. FlashInfer on Hopper scores with queries in the
format of its index keys (E4M3 or bf16) and attends in decode to E4M3 pages only; vLLM scores bf16 index keys. Neither reads NVFP4 pages
there. A call that raises is a line with its error instead of a time. Where a peer does what we do, its line says how far its result
is from ours (relative norm; for a choice, the share of ids that differ), so that no time stands for something else.

FlashInfer prefers programs of its CuTe DSL for some shapes; those need a further package, and its own SM90 programs are taken for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import msa_ops
from .bench_record import absence
from .msa_ops import BLOCK, DIM, Pages


class Call(NamedTuple):
    """One line: the calls that a graph holds, and how far the result is from ours, if that can be said."""

    calls: list[Callable[[], Any]]
    distance: Callable[[], float] | None = None


class Prefill(NamedTuple):
    """One sequence, all of it queries."""

    q: Tensor  # bf16 [T, H, D]
    index_q: Tensor  # bf16 [T, G, D]
    caches: dict[str, Pages]  # by format
    index: Pages  # bf16
    chosen: Tensor  # int32 [T, G, topk]
    out: dict[str, Tensor]  # ours, by format


class Peer(NamedTuple):
    """What a peer can be asked."""

    name: str
    decode: Callable[[Any], dict[str, Call]]  # of a `bench_msa.Case`
    prefill: Callable[[Prefill, str], dict[str, Call]]


def load_peers(found: dict[str, str]) -> list[Peer]:
    """Those that can be imported; `found` says version or absence of each."""
    peers = []
    for name, load in (("flashinfer msa_ops", _flashinfer), ("vllm minimax_m3", _vllm)):
        try:
            found[name], peer = load()
        except Exception as error:  # packages of kernels raise much when they are imported beside what they were not built for
            found[name] = absence(error)
        else:
            peers.append(peer)
    return peers


def lines(
    head: dict[str, Any], ask: Callable[..., dict[str, Call]], args: tuple, time: Callable[[list], float]
) -> Iterator[dict[str, Any]]:
    """What a peer's `ask(*args)` comes to: `head`, and name with microseconds by `time` and distance, or with the error."""
    try:
        found = ask(*args)
    except Exception as error:  # a peer's refusal is a result
        yield head | {"name": f"{head['peer']}, all", "error": _short(error)}
        return
    for name, call in found.items():
        line = head | {"name": name}
        try:
            line["us"] = time(call.calls)
            if call.distance is not None:
                line["distance"] = call.distance()
        except Exception as error:
            line["error"] = _short(error)
        yield line


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0][:200]


def _distance(have: Tensor, want: Tensor) -> float:
    return ((have.float() - want.float()).norm() / want.float().norm()).item()


def _flashinfer() -> tuple[str, Peer]:
    import flashinfer
    import flashinfer.msa_ops as ops
    import flashinfer.msa_ops._sm90_dispatch as dispatch

    for rule in ("_cute_proxy_decode_preferred", "_cute_prefill_preferred"):
        if not hasattr(dispatch, rule):
            raise ImportError(f"flashinfer {flashinfer.__version__} has no {rule}")
        setattr(dispatch, rule, lambda *_: False)

    def decode(case: Any) -> dict[str, Call]:
        if case.form == "nvfp4":
            return {}
        groups, topk = case.chosen[0].shape[1:]
        requests, blocks, each = case.requests, case.context // BLOCK, range(len(case.queries))
        keys = case.index.data[:, None]
        queries = [q.to(keys.dtype) for q in case.index_queries]
        lengths = torch.full_like(case.table[:, 0], case.context)
        valid = torch.full_like(lengths, blocks)
        scores = [torch.empty(groups, blocks, requests, device=lengths.device) for _ in each]
        chosen = [torch.empty_like(case.chosen[0]) for _ in each]
        ours = [c.permute(1, 0, 2).contiguous() for c in case.chosen]
        out = torch.empty_like(case.queries[0])
        k, v = case.cache.data[..., :DIM], case.cache.data[..., DIM:]

        def score(i: int) -> None:
            place = {"page_table": case.table, "seqused_k": lengths, "max_seqlen_q": 1, "max_k_tiles": blocks}
            ops.msa_proxy_score(queries[i], keys, case.batch.start, **place, output=scores[i])

        def choose(i: int) -> None:
            ops.msa_topk_select(scores[i], topk, num_valid_pages=valid, force_end_blocks=1, output=chosen[i])

        def attend(i: int, ids: Tensor | None = None) -> None:
            place = {"page_table": case.table, "seqused_k": lengths, "seqlen_q": 1, "softmax_scale": msa_ops.default_scale()}
            ops.msa_sparse_decode_attention(case.queries[i], k, v, ours[i] if ids is None else ids, **place, out=out)

        def chain(i: int) -> None:
            score(i)
            choose(i)
            attend(i, chosen[i].permute(1, 0, 2).contiguous())

        def attended() -> float:
            attend(0)
            return _distance(out, case.attend(0))

        def chose() -> float:
            score(0)
            choose(0)
            return (chosen[0] != case.chosen[0]).float().mean().item()

        found = {"scores": Call([lambda i=i: score(i) for i in each]), "top-k": Call([lambda i=i: choose(i) for i in each], chose)}
        if case.form == "fp8":
            found["attention"] = Call([lambda i=i: attend(i) for i in each], attended)
            found["chain"] = Call([lambda i=i: chain(i) for i in each])
        return {f"flashinfer {name}": call for name, call in found.items()}

    def prefill(work: Prefill, form: str) -> dict[str, Call]:
        if form == "nvfp4":
            return {}
        cache = work.caches[form]
        tokens = work.q.shape[0]
        ids = work.chosen.permute(1, 0, 2).contiguous()
        start = torch.tensor([0, tokens], dtype=torch.int32, device=work.q.device)
        lengths = start[1:].clone()
        out = torch.empty_like(work.q)

        def attend() -> None:
            place = {"page_table": cache.table, "seqused_k": lengths, "softmax_scale": msa_ops.default_scale()}
            k, v = cache.data[..., :DIM], cache.data[..., DIM:]
            ops.msa_sparse_attention(work.q, k, v, ids, start, causal=True, **place, out=out)

        return {"flashinfer prefill": Call([attend], lambda: _distance(out, work.out[form]))}

    return flashinfer.__version__, Peer("flashinfer", decode, prefill)


def _vllm() -> tuple[str, Peer]:
    import vllm
    from vllm.models.minimax_m3.common.ops import index_topk, sparse_attn

    def decode(case: Any) -> dict[str, Call]:
        if case.form == "nvfp4":
            return {}
        groups, topk = case.chosen[0].shape[1:]
        each = range(len(case.queries))
        lengths = torch.full_like(case.table[:, 0], case.context)
        out = torch.empty_like(case.queries[0])
        ours = [c.permute(1, 0, 2).contiguous() for c in case.chosen]

        def choose(i: int) -> Tensor:
            numbers = (case.context, topk, 0, 1, groups, 1, 1)  # no first block is forced, one last is; one query token
            return index_topk.minimax_m3_index_decode(case.index_queries[i], case.index.data, case.table, lengths, *numbers)

        def attend(i: int, ids: Tensor | None = None) -> None:
            place = (ours[i] if ids is None else ids, case.table, lengths, groups, msa_ops.default_scale(), out, 1)
            sparse_attn.minimax_m3_sparse_attn_decode(case.queries[i], case.cache.data, *place)

        def attended() -> float:
            attend(0)
            return _distance(out, case.attend(0))

        def chose() -> float:
            return (choose(0).permute(1, 0, 2).sort(-1).values != case.chosen[0]).float().mean().item()

        found = {"attention": Call([lambda i=i: attend(i) for i in each], attended)}
        if case.form == "bf16":
            found["scores and top-k"] = Call([lambda i=i: choose(i) for i in each], chose)
            found["chain"] = Call([lambda i=i: attend(i, choose(i)) for i in each])
        return {f"vllm {name}": call for name, call in found.items()}

    def prefill(work: Prefill, form: str) -> dict[str, Call]:
        if form == "nvfp4":
            return {}
        cache, (tokens, groups, topk) = work.caches[form], work.chosen.shape
        ids = work.chosen.permute(1, 0, 2).contiguous()
        start = torch.tensor([0, tokens], dtype=torch.int32, device=work.q.device)
        lengths, before = start[1:].clone(), start[:1].clone()
        out = torch.empty_like(work.q)

        def choose() -> Tensor:
            place = (work.index.data, work.index.table, start, lengths, before, tokens, tokens, groups)
            scores = index_topk.minimax_m3_index_score(work.index_q, *place)
            return index_topk.minimax_m3_index_topk(scores, start, before, tokens, topk, 0, 1)

        def attend() -> None:
            place = (ids, cache.table, start, lengths, before, tokens, groups, msa_ops.default_scale(), out)
            sparse_attn.minimax_m3_sparse_attn(work.q, cache.data, *place)

        found = {"vllm prefill": Call([attend], lambda: _distance(out, work.out[form]))}
        if form == "bf16":

            def chose() -> float:
                ids = choose().permute(1, 0, 2)
                ids = torch.where(ids < 0, 2**30, ids).sort(-1).values  # -1 last, as ours
                return (torch.where(ids == 2**30, -1, ids) != work.chosen).float().mean().item()

            found["vllm choice"] = Call([choose], chose)
        return found

    return vllm.__version__, Peer("vllm", decode, prefill)

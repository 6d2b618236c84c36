"""Launches for rows of heads: how `kv_insert`'s inputs are cut into programs, and `rotate_heads` with its gradient."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from .msa_ops import DIM, Norms
from .triton_msa_insert import rotate_gradient_kernel, rotate_kernel
from .triton_tiles import on

FORMATS = {None: 0, "bf16": 0, "fp8": 1, "nvfp4": 2}
GRADIENT_ROWS, GRADIENT_WARPS = 16, 2


class Cut(NamedTuple):
    """How rows are cut into programs. Speed alone depends on it."""

    rows: int
    warps: int
    tiles: int  # of query heads of one token


def cut_of(tokens: int) -> Cut:
    """By the number of tokens; from a sweep on an H200 at MiniMax-M3's shape."""
    return Cut(8, 1, 1) if tokens <= 1024 else Cut(8, 1, 2)


class HeadRows(NamedTuple):
    """The heads of a layer as the kernels take them; for an absent indexer stands any tensor, which is not read."""

    heads: list[Tensor]  # q, k, v, index q, index k
    strides: list[int]  # of their tokens
    norms: list[Tensor]
    table: list[Tensor]
    programs: int
    shape: dict[str, Any]  # constants of the kernels, and launch options

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        index_q: Tensor | None,
        index_k: Tensor | None,
        norms: Norms,
        table: tuple[Tensor, Tensor],
        position: Tensor,
    ) -> HeadRows:
        """Arguments of `msa_ops.kv_insert`."""
        tokens, heads, _ = q.shape
        groups, indexed = k.shape[1], index_q is not None
        given = (q, k, v, index_q, index_k) if indexed else (q, k, v, k, k)
        rows = [plain_rows(x) for x in given]
        weights = norms[:4] if indexed else (norms.q, norms.k, norms.k, norms.k)
        cut = cut_of(tokens)
        tiles = cut.tiles if heads % (cut.tiles * cut.rows) == 0 else 1
        index_heads = index_q.shape[1] if indexed else 0  # as many as the groups, or those of all ranks where these are one rank's
        counts = [tokens * groups] * 2 + [tokens * index_heads] + ([tokens] if indexed else [])
        programs = sum(triton.cdiv(n, cut.rows) for n in counts) + triton.cdiv(tokens * heads, cut.rows * tiles)
        shape = {
            "H": heads,
            "G": groups,
            "INDEX_HEADS": index_heads,
            "INDEXED": indexed,
            "ROTARY": table[0].shape[1],
            "R": cut.rows,
            "TILES": tiles,
            "num_warps": cut.warps,
            "enable_fp_fusion": False,
        }
        return cls(rows, [x.stride(0) for x in rows], list(weights), [t.contiguous() for t in table], programs, shape)

    @staticmethod
    def like(x: Tensor | None) -> Tensor | None:
        """A contiguous tensor for results."""
        return None if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)


def plain_rows(x: Tensor) -> Tensor:
    """`x` [T, heads, 128] or [T, 128] with the heads of a token one after the other."""
    return x if x.stride(-1) == 1 and (x.dim() == 2 or x.stride(-2) == DIM) else x.contiguous()


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, index_q, index_k, norms: Norms, table, position: Tensor, form: str | None):
        rows = HeadRows.of(q, k, v, index_q, index_k, norms, table, position)
        out = [rows.like(x) for x in (q, k, v, index_q, index_k)]
        if len(q):
            with on(q):
                rotate_kernel[(rows.programs,)](
                    *rows.heads,
                    *(out[0] if x is None else x for x in out),
                    *rows.norms,
                    *rows.table,
                    position,
                    *rows.strides,
                    norms.eps,
                    len(q),
                    FORMAT=FORMATS[form],
                    **rows.shape,
                )
        ctx.save_for_backward(q, k, position, norms.q, norms.k, *rows.table)
        ctx.eps = norms.eps
        ctx.mark_non_differentiable(*(x for x in out[3:] if x is not None))
        return tuple(out)

    @staticmethod
    def backward(ctx, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, *_):
        q, k, position, q_norm, k_norm, cos, sin = ctx.saved_tensors
        grads = HeadRows.like(q), HeadRows.like(k)
        if len(q):
            rows = [plain_rows(x) for x in (q, k, grad_q, grad_k)]
            programs = [triton.cdiv(len(q) * x.shape[1], GRADIENT_ROWS) for x in (k, q)]
            with on(q):
                rotate_gradient_kernel[(sum(programs),)](
                    *rows,
                    *grads,
                    q_norm,
                    k_norm,
                    cos,
                    sin,
                    position,
                    *(x.stride(0) for x in rows),
                    ctx.eps,
                    len(q),
                    H=q.shape[1],
                    G=k.shape[1],
                    ROTARY=cos.shape[1],
                    R=GRADIENT_ROWS,
                    num_warps=GRADIENT_WARPS,
                    enable_fp_fusion=False,
                )
        return *grads, grad_v, None, None, None, None, None, None


def rotate_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index_q: Tensor | None,
    index_k: Tensor | None,
    norms: Norms,
    table: tuple[Tensor, Tensor],
    position: Tensor,
    form: str | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """`msa_ops.rotate_heads` on CUDA."""
    return _Rotate.apply(q, k, v, index_q, index_k, norms, table, position, form)

"""Triton kernels of single rows: Gemma RMS norm with and without residual, rotary embedding, SwiGLU-OAI, forward and backward.

A row's bits depend on that row alone. Whatever is not a sum is the arithmetic of the torch code beside which a kernel stands, product for
product (nothing is contracted), and every sum has one order that no tile, warp or batch can move: the tree of `tree_sum`.

Inputs may be views whose rows lie together within a token and whose tokens lie apart, as the parts of a fused projection do.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .activation import SwiGLU
from .triton_tiles import bf16, on

ELEMENTS = 2048
"""Elements of a program, where a row is not longer."""


@triton.jit
def tree_sum(x):
    """Sums [R] of rows of fp32 [R, W], W a power of two: neighbours first, x[2i] + x[2i + 1], and so on up.

    A sum of two is the same in either order, so the result is the same in every layout, with any number of warps. A row padded with zeros
    on the right has the sum of the shorter tree.
    """
    for _ in tl.static_range(20):
        if x.shape[1] > 1:
            x = tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]), axis=2)
    return tl.reshape(x, [x.shape[0]])


@triton.jit
def inverse_root(mean, eps):
    """1 / sqrt(mean + eps), root and quotient correctly rounded."""
    return tl.math.div_rn(tl.full(mean.shape, 1.0, tl.float32), tl.math.sqrt_rn(mean + eps))


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x) with a correctly rounded quotient."""
    return tl.math.div_rn(tl.full(x.shape, 1.0, tl.float32), 1.0 + tl.exp(-x))


@triton.jit
def _mean(x, D: tl.constexpr):
    """Means [R] of rows [R, W], of which D elements count and the others are 0."""
    return tl.math.div_rn(tree_sum(x), tl.full([x.shape[0]], D, tl.float32))


@triton.jit
def _rows_at(row, heads, token_stride, width):
    """Offsets of rows: `heads` of them lie together in a token."""
    return (row // heads).to(tl.int64) * token_stride + row % heads * width


@triton.jit
def _norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr, rows, heads, token_stride, residual_stride, eps,
    ADD: tl.constexpr, D: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    row, col = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, W)[None, :]
    real = (row < rows)[:, None] & (col < D)
    x = tl.load(x_ptr + _rows_at(row, heads, token_stride, D)[:, None] + col, mask=real, other=0.0).to(tl.float32)
    at = row.to(tl.int64)[:, None] * D + col
    if ADD:
        x += tl.load(residual_ptr + _rows_at(row, heads, residual_stride, D)[:, None] + col, mask=real, other=0.0).to(tl.float32)
        tl.store(sum_ptr + at, bf16(x), mask=real)
    inverse = inverse_root(_mean(x * x, D), eps)[:, None]
    weight = 1.0 + tl.load(weight_ptr + col, mask=col < D, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, bf16(x * inverse * weight), mask=real)


@triton.jit
def _norm_backward_kernel(
    x_ptr, residual_ptr, weight_ptr, grad_ptr, grad_sum_ptr, out_ptr, rows, heads, token_stride, residual_stride, eps,
    ADD: tl.constexpr, SUM: tl.constexpr, D: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """s g' - x s^3 mean(g' x) with g' = g (1 + w), as in `norm`; and the gradient of the sum added, where there is one."""
    row, col = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, W)[None, :]
    real = (row < rows)[:, None] & (col < D)
    x = tl.load(x_ptr + _rows_at(row, heads, token_stride, D)[:, None] + col, mask=real, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(residual_ptr + _rows_at(row, heads, residual_stride, D)[:, None] + col, mask=real, other=0.0).to(tl.float32)
    at = row.to(tl.int64)[:, None] * D + col
    weight = 1.0 + tl.load(weight_ptr + col, mask=col < D, other=0.0).to(tl.float32)
    g = tl.load(grad_ptr + at, mask=real, other=0.0).to(tl.float32) * weight
    inverse = inverse_root(_mean(x * x, D), eps)
    along = inverse * inverse * _mean(g * x, D)
    g = (g - x * along[:, None]) * inverse[:, None]
    if SUM:
        g += tl.load(grad_sum_ptr + at, mask=real, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, bf16(g), mask=real)


@triton.jit
def _rope_kernel(
    x_ptr, cos_ptr, sin_ptr, out_ptr, rows, heads, token_stride, cos_stride, sin_stride,
    BACK: tl.constexpr, HALF: tl.constexpr, D: tl.constexpr, R: tl.constexpr, W: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """W and REST: powers of two that hold half of the rotated elements, and those that are not."""
    row, col = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, W)[None, :]
    real = (row < rows)[:, None] & (col < HALF)
    token = (row // heads).to(tl.int64)[:, None]
    cos = tl.load(cos_ptr + token * cos_stride + col, mask=real, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * sin_stride + col, mask=real, other=0.0).to(tl.float32)
    if BACK:  # the gradient is rotated back
        sin = -sin
    x_at = x_ptr + _rows_at(row, heads, token_stride, D)[:, None]
    out_at = out_ptr + row.to(tl.int64)[:, None] * D
    a = tl.load(x_at + col, mask=real, other=0.0).to(tl.float32)
    b = tl.load(x_at + HALF + col, mask=real, other=0.0).to(tl.float32)
    tl.store(out_at + col, bf16(a * cos - b * sin), mask=real)
    tl.store(out_at + HALF + col, bf16(b * cos + a * sin), mask=real)
    if D > 2 * HALF:
        rest = 2 * HALF + tl.arange(0, REST)[None, :]
        real = (row < rows)[:, None] & (rest < D)
        tl.store(out_at + rest, tl.load(x_at + rest, mask=real, other=0.0), mask=real)


@triton.jit
def _clamped(gate, up, limit):
    """As `torch.clamp` does it: NaN stays."""
    return tl.where(gate > limit, limit, gate), tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))


@triton.jit
def _swiglu_kernel(gate_ptr, up_ptr, out_ptr, inner, gate_stride, up_stride, alpha, beta, limit, BLOCK: tl.constexpr):
    row, col = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = col < inner
    gate = tl.load(gate_ptr + row * gate_stride + col, mask=real, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + col, mask=real, other=0.0).to(tl.float32)
    gate, up = _clamped(gate, up, limit)
    out = sigmoid(alpha * gate) * gate * (up + beta)
    if out_ptr.dtype.element_ty == tl.bfloat16:
        out = bf16(out)
    tl.store(out_ptr + row * inner + col, out, mask=real)


@triton.jit
def _swiglu_backward_kernel(
    gate_ptr, up_ptr, grad_ptr, grad_gate_ptr, grad_up_ptr, inner, gate_stride, up_stride, alpha, beta, limit, BLOCK: tl.constexpr
):  # fmt: skip
    """See `activation`."""
    row, col = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = col < inner
    gate = tl.load(gate_ptr + row * gate_stride + col, mask=real, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + col, mask=real, other=0.0).to(tl.float32)
    at = row * inner + col
    grad = tl.load(grad_ptr + at, mask=real, other=0.0).to(tl.float32)
    g, u = _clamped(gate, up, limit)
    s = sigmoid(alpha * g)
    gs = g * s
    slope = s + alpha * (gs - gs * s)
    tl.store(grad_up_ptr + at, bf16(tl.where(tl.abs(up) <= limit, grad * gs, 0.0)), mask=real)
    tl.store(grad_gate_ptr + at, bf16(tl.where(gate <= limit, slope * (u + beta) * grad, 0.0)), mask=real)


def _tokens(x: Tensor) -> tuple[Tensor, int, int]:
    """`x` [..., D], copied only where its rows do not lie as `_rows_at` wants them; rows of a token, and the distance of tokens."""
    if x.is_contiguous():
        return x, 1, x.shape[-1]
    if x.dim() == 2 and x.stride(1) == 1:
        return x, 1, x.stride(0)
    if x.dim() == 3 and x.stride(2) == 1 and x.stride(1) == x.shape[2]:
        return x, x.shape[1], x.stride(0)
    return x.contiguous(), 1, x.shape[-1]


def _tile(rows: int, width: int) -> tuple[int, int, dict[str, int | bool]]:
    """Programs, rows of one, and launch options."""
    each = max(1, ELEMENTS // triton.next_power_of_2(width))
    warps = min(16, max(4, triton.next_power_of_2(width) // 1024))
    return triton.cdiv(rows, each), each, {"num_warps": warps, "enable_fp_fusion": False}


def norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor | None]:
    """`norm.gemma_rms_norm_add` of bf16 [..., D], or `gemma_rms_norm` (no residual, and no sum)."""
    dim = x.shape[-1]
    rows = x.numel() // dim
    out, total = (None if t is None else torch.empty(x.shape, dtype=x.dtype, device=x.device) for t in (x, residual))
    if not rows:
        return out, total
    x, residual, heads, stride, residual_stride = _both(x, residual)
    programs, each, options = _tile(rows, dim)
    with on(x):
        _norm_kernel[(programs,)](
            x, residual, weight, out, total, rows, heads, stride, residual_stride, eps,
            ADD=residual is not None, D=dim, R=each, W=triton.next_power_of_2(dim), **options,
        )  # fmt: skip
    return out, total


def norm_gradient(x: Tensor, residual: Tensor | None, weight: Tensor, grad: Tensor, grad_sum: Tensor | None, eps: float) -> Tensor:
    """Gradient bf16 of `x` (and of `residual`): of the norm, and of the sum where `grad_sum` is given."""
    dim = x.shape[-1]
    rows = x.numel() // dim
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not rows:
        return out
    x, residual, heads, stride, residual_stride = _both(x, residual)
    programs, each, options = _tile(rows, dim)
    with on(x):
        _norm_backward_kernel[(programs,)](
            x, residual, weight, grad.contiguous(), None if grad_sum is None else grad_sum.contiguous(), out,
            rows, heads, stride, residual_stride, eps,
            ADD=residual is not None, SUM=grad_sum is not None, D=dim, R=each, W=triton.next_power_of_2(dim), **options,
        )  # fmt: skip
    return out


def _both(x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor | None, int, int, int]:
    """Both inputs with the same number of rows a token."""
    x, heads, stride = _tokens(x)
    if residual is None:
        return x, None, heads, stride, 0
    residual, residual_heads, residual_stride = _tokens(residual)
    if heads != residual_heads:
        x, residual, heads, stride, residual_stride = x.contiguous(), residual.contiguous(), 1, x.shape[-1], x.shape[-1]
    return x, residual, heads, stride, residual_stride


def rotate(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    """`rope.apply_rope` of bf16 [T, heads, D], or its gradient."""
    tokens, count, dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return out
    half = cos.shape[-1]
    x, heads, stride = _tokens(x)
    if heads == 1 and count > 1:  # contiguous: the rows of a token share its angles all the same
        heads, stride = count, count * dim
    cos, sin = (t if t.stride(-1) == 1 else t.contiguous() for t in (cos, sin))
    programs, each, options = _tile(tokens * count, dim)
    with on(x):
        _rope_kernel[(programs,)](
            x, cos, sin, out, tokens * count, heads, stride, cos.stride(0), sin.stride(0),
            BACK=back, HALF=half, D=dim, R=each, W=triton.next_power_of_2(half), REST=triton.next_power_of_2(max(1, dim - 2 * half)),
            **options,
        )  # fmt: skip
    return out


def _flat(x: Tensor) -> Tensor:
    """[rows, I], elements of a row beside one another."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def swiglu(gate: Tensor, up: Tensor, params: SwiGLU, dtype: torch.dtype) -> Tensor:
    """`activation.swiglu_oai_halves` of bf16 [..., I], fp32 or rounded to bf16."""
    out = torch.empty(gate.shape, dtype=dtype, device=gate.device)
    if out.numel():
        gate, up = _flat(gate), _flat(up)
        rows, inner = gate.shape
        with on(out):
            _swiglu_kernel[(rows, triton.cdiv(inner, 1024))](
                gate, up, out, inner, gate.stride(0), up.stride(0), *params, BLOCK=1024, num_warps=4, enable_fp_fusion=False
            )
    return out


def swiglu_gradient(gate: Tensor, up: Tensor, grad: Tensor, params: SwiGLU) -> tuple[Tensor, Tensor]:
    """Gradients bf16 of gate and up."""
    grads = tuple(torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
    if gate.numel():
        gate, up = _flat(gate), _flat(up)
        rows, inner = gate.shape
        with on(gate):
            _swiglu_backward_kernel[(rows, triton.cdiv(inner, 1024))](
                gate, up, grad.contiguous(), *grads, inner, gate.stride(0), up.stride(0), *params,
                BLOCK=1024, num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip
    return grads

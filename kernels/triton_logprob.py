"""Triton kernels of log-probabilities of given tokens, with the entropy of each row, and their gradient.

A program reads a row of logits once: each of its lanes keeps the largest value z of those it saw, their sum of e^(x - z), and, for the
entropy, their sum of e^(x - z) (x - z); lanes are joined at the end by `tree_sum`. Nothing else of the row is kept than its maximum, the
logarithm of its sum and its entropy. Lane i sees the elements i, i + BLOCK, and so on, so a row's bits depend on the row alone.

Temperature divides by Triton's plain division, as the temperature kernel of vLLM's V2 runner does, and 1 leaves the logits alone there too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_rows import tree_sum
from .triton_tiles import on

BLOCK, WARPS = 8192, 16
BACK_BLOCK = 4096


@triton.jit
def _scaled(logits, temperature_ptr, row, SCALED: tl.constexpr):
    if SCALED:
        t = tl.load(temperature_ptr + row)
        return tl.where(t == 1.0, logits, logits / t)
    else:
        return logits


@triton.jit
def _forward_kernel(
    logits_ptr, ids_ptr, temperature_ptr, out_ptr, entropy_ptr, stats_ptr, vocabulary, stride, count,
    SCALED: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    lane = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], -3.4028234663852886e38, tl.float32)  # finite: a logit of -inf is then no NaN
    total = tl.zeros([BLOCK], tl.float32)
    mean = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        x = tl.load(logits_ptr + start + lane, mask=start + lane < vocabulary, other=float("-inf"))
        x = _scaled(x, temperature_ptr, row, SCALED)
        above = x - top
        up = above > 0
        e = tl.exp(-tl.abs(above))
        if ENTROPY:
            # With a new top, what was summed moves down by `above`; no term where there was none, nor where e is 0.
            moved = tl.where(total > 0, (mean - total * above) * e, 0.0)
            mean = tl.where(up, moved, mean + tl.where(e > 0, e * above, 0.0))
        total = tl.where(up, total * e + 1.0, total + e)
        top = tl.where(up, x, top)
    most = tl.max(top, axis=0)
    share = tl.exp(top - most)
    sums = tree_sum(tl.reshape(total * share, [1, BLOCK]))
    log_sum = tl.log(sums)
    one = tl.arange(0, 1)
    tl.store(stats_ptr + row * 3 + one, tl.full([1], 0.0, tl.float32) + most)
    tl.store(stats_ptr + row * 3 + 1 + one, log_sum)
    if ENTROPY:
        means = tree_sum(tl.reshape((mean + total * (top - most)) * share, [1, BLOCK]))
        entropy = log_sum - tl.math.div_rn(means, sums)
        tl.store(entropy_ptr + row + one, entropy)
        tl.store(stats_ptr + row * 3 + 2 + one, entropy)
    for i in range(count):
        token = tl.load(ids_ptr + row * count + i + one)
        known = (token >= 0) & (token < vocabulary)
        x = tl.load(logits_ptr + token, mask=known, other=float("nan"))
        tl.store(out_ptr + row * count + i + one, _scaled(x, temperature_ptr, row, SCALED) - most - log_sum)


@triton.jit
def _gradient_kernel(
    logits_ptr, ids_ptr, temperature_ptr, stats_ptr, grad_ptr, grad_entropy_ptr, out_ptr, vocabulary, stride, count,
    SCALED: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(sum over ids of g (1[id] - p) - h p (log p + entropy)) / temperature."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = at < vocabulary
    x = _scaled(tl.load(logits_ptr + row * stride + at, mask=real, other=float("-inf")), temperature_ptr, row, SCALED)
    logprob = x - tl.load(stats_ptr + row * 3) - tl.load(stats_ptr + row * 3 + 1)
    p = tl.exp(logprob)
    out, total = tl.zeros([BLOCK], tl.float32), 0.0
    for i in range(count):
        g = tl.load(grad_ptr + row * count + i)
        total += g
        out += tl.where(at == tl.load(ids_ptr + row * count + i), g, 0.0)
    out -= total * p
    if ENTROPY:
        slope = tl.load(grad_entropy_ptr + row) * (logprob + tl.load(stats_ptr + row * 3 + 2))
        out -= tl.where(p > 0, slope * p, 0.0)
    if SCALED:
        out = out / tl.load(temperature_ptr + row)
    tl.store(out_ptr + row * vocabulary + at, out, mask=real)


class TokenLogprobs(torch.autograd.Function):
    """`kernels.logprobs.token_logprob_rows` of fp32 logits [T, V] on CUDA."""

    @staticmethod
    def forward(ctx, logits: Tensor, ids: Tensor, temperature: Tensor | None, entropy: bool) -> tuple[Tensor, Tensor | None]:
        """See the module."""
        rows, vocabulary = logits.shape
        logits, ids = logits if logits.stride(1) == 1 else logits.contiguous(), ids.contiguous()
        temperature = temperature if temperature is None else temperature.float().contiguous()
        out = torch.empty(ids.shape, dtype=torch.float32, device=logits.device)
        stats = torch.empty(rows, 3, dtype=torch.float32, device=logits.device)
        entropies = torch.empty(rows, dtype=torch.float32, device=logits.device) if entropy else None
        if rows:
            with on(logits):
                _forward_kernel[(rows,)](
                    logits, ids, temperature, out, entropies, stats, vocabulary, logits.stride(0), ids.shape[1],
                    SCALED=temperature is not None, ENTROPY=entropy, BLOCK=BLOCK, num_warps=WARPS, enable_fp_fusion=False,
                )  # fmt: skip
        ctx.save_for_backward(logits, ids, temperature, stats)
        ctx.set_materialize_grads(False)
        return out, entropies

    @staticmethod
    def backward(ctx, grad: Tensor | None, grad_entropy: Tensor | None):
        """See the module."""
        logits, ids, temperature, stats = ctx.saved_tensors
        rows, vocabulary = logits.shape
        out = torch.empty(rows, vocabulary, dtype=torch.float32, device=logits.device)
        if grad is None:
            grad = torch.zeros(ids.shape, dtype=torch.float32, device=logits.device)
        if rows:
            with on(logits):
                _gradient_kernel[(rows, triton.cdiv(vocabulary, BACK_BLOCK))](
                    logits, ids, temperature, stats, grad.contiguous(), None if grad_entropy is None else grad_entropy.contiguous(), out,
                    vocabulary, logits.stride(0), ids.shape[1],
                    SCALED=temperature is not None, ENTROPY=grad_entropy is not None, BLOCK=BACK_BLOCK, num_warps=8,
                    enable_fp_fusion=False,
                )  # fmt: skip
        return out, None, None, None

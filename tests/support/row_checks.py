"""What the kernels of rows must compute, on any device: small shapes in Triton's interpreter, real ones on a GPU.

The kernels are reached through the operations that stand before them; `fast_path` is True there, which the caller sees to.
References are fp64, or torch's arithmetic in fp32 where every bit is fixed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from samebits.kernels.activation import SwiGLU, swiglu_oai, swiglu_oai_halves
from samebits.kernels.linear import frozen_linear
from samebits.kernels.logprobs import token_logprob_rows
from samebits.kernels.moe import route_topk, route_weights
from samebits.kernels.norm import gemma_rms_norm, gemma_rms_norm_add
from samebits.kernels.rope import apply_rope, rope_table

EPS = 1e-6


def same(name: str, have: Tensor, want: Tensor) -> None:
    """Equal bits, NaN and signed zeros included."""
    have, want = have.detach().cpu().contiguous(), want.detach().cpu().contiguous()
    assert have.dtype is want.dtype and have.shape == want.shape, f"{name}: {have.dtype} {have.shape}, not {want.dtype} {want.shape}"
    wrong = (have.view(-1).view(torch.uint8) != want.view(-1).view(torch.uint8)).sum().item()
    assert not wrong, f"{name}: {wrong} bytes differ"


def close(name: str, have: Tensor, want: Tensor, limit: float) -> None:
    """Relative distance in norm; NaN never passes."""
    error = ((have.double() - want.double()).norm() / want.double().norm()).item()
    assert error < limit, f"{name}: off by {error:.1e}, limit {limit:.1e}"


class Draw:
    """Random inputs: the same on every device."""

    def __init__(self, device: str, seed: int = 0) -> None:
        self.device, self.g = device, torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Normal values."""
        return torch.randn(shape, generator=self.g).to(self.device, dtype)


def gradients(call: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """Of the inputs, for outputs weighted by position."""
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    out = call(*leaves)
    outs = out if isinstance(out, tuple) else (out,)
    total = sum((o * torch.linspace(-1, 1, o.numel(), device=o.device).to(o.dtype).view(o.shape)).sum() for o in outs)
    return list(torch.autograd.grad(total, leaves))


def tree(x: Tensor) -> Tensor:
    """Sums [..., 1] of rows in fp32, by neighbours; zeros on the right make their number a power of two."""
    x = torch.nn.functional.pad(x, (0, (1 << (x.shape[-1] - 1).bit_length()) - x.shape[-1]))
    while x.shape[-1] > 1:
        x = x[..., ::2] + x[..., 1::2]
    return x


def inverse_root(mean: Tensor) -> Tensor:
    """1 / sqrt(mean + EPS) in fp32, sum, root and quotient each rounded to nearest: what the kernels promise in every layout.

    Root and quotient go through fp64, which has bits enough that the second rounding changes nothing; torch's fp32 square root on a CPU
    is that of a vector library, and a fifth of its results are the neighbour of the nearest number.
    """
    root = (mean + torch.full_like(mean, EPS)).double().sqrt().float()
    return (1.0 / root.double()).float()


def sums(device: str, rows: int, width: int, each: int, warps: int) -> None:
    """The tree's bits with `each` rows and `warps` warps a program; values of all sizes, so that other orders have others."""
    from tests.support.row_kernels import sums_kernel

    draw = Draw(device, 7)
    x = (draw(rows, width, dtype=torch.float32) * torch.exp2(draw(rows, width, dtype=torch.float32) * 4)).square()
    total, inverse = (torch.empty(rows, device=device) for _ in range(2))
    sums_kernel[(-(-rows // each),)](x, total, inverse, rows, EPS, R=each, W=width, num_warps=warps, enable_fp_fusion=False)
    want = tree(x.cpu())[:, 0]
    same("sums", total, want)
    same("inverse roots", inverse, inverse_root(want))
    folded = x.cpu()
    while folded.shape[1] > 1:
        folded = folded[:, : folded.shape[1] // 2] + folded[:, folded.shape[1] // 2 :]
    assert not torch.equal(folded[:, 0], want)


def tree_norm(x: Tensor, weight: Tensor) -> Tensor:
    """bf16 norm of fp32 rows, the squares summed by neighbours."""
    squares = tree(x.square())
    return (x * inverse_root(squares / torch.full_like(squares, x.shape[-1])) * (1.0 + weight.float())).bfloat16()


def formula_norm(x: Tensor, weight: Tensor) -> Tensor:
    """The norm in x's precision."""
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * (1 + weight)


def norm_bits(device: str, tokens: int, hidden: int) -> None:
    """The tree's bits: hidden states and heads, whole and as views, with and without residual."""
    draw = Draw(device)
    for shape in ((tokens, hidden), (tokens, 3, 128)):
        x, residual, weight = draw(*shape), draw(*shape) * 0.1, draw(shape[-1]) * 0.2
        same("norm", gemma_rms_norm(x, weight, EPS), tree_norm(x.float().cpu(), weight.cpu()))
        out, total = gemma_rms_norm_add(x, residual, weight, EPS)
        exact = x.float().cpu() + residual.float().cpu()
        same("sum", total, exact.bfloat16())
        same("norm of the sum", out, tree_norm(exact, weight.cpu()))
    parts = draw(tokens, 5 * 128).split((2 * 128, 3 * 128), dim=1)
    for part in parts:
        heads, weight = part.unflatten(1, (-1, 128)), draw(128)
        assert not heads.is_contiguous() or tokens == 1
        same("norm of a view", gemma_rms_norm(heads, weight, EPS), gemma_rms_norm(heads.contiguous(), weight, EPS))
        both = gemma_rms_norm_add(heads, heads.contiguous(), weight, EPS)
        same("sum with a view", both[1], (heads.float() * 2).bfloat16())
        same("norm of rows that lie apart", gemma_rms_norm(heads[:, 0], weight, EPS), gemma_rms_norm(heads, weight, EPS)[:, 0])


def norm_gradients(device: str, tokens: int, hidden: int) -> None:
    """Against fp64 autograd, with the sum used and not, and of the weight."""
    draw = Draw(device, 1)
    x, residual, weight = draw(tokens, hidden), draw(tokens, hidden), draw(hidden) * 0.2

    def add(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return formula_norm(x + residual, weight), x + residual

    def kernel(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return gemma_rms_norm_add(x, residual, weight, EPS)

    wide = [t.double() for t in (x, residual, weight)]
    for outputs in (slice(2), slice(1)):
        have = gradients(lambda *a, o=outputs: kernel(*a)[o], x, residual, weight)
        want = gradients(lambda *a, o=outputs: add(*a)[o], *wide)
        for name, h, w in zip(("x", "residual", "weight"), have, want, strict=True):
            close(f"gradient of {name}", h, w, 4e-3)
    have, want = gradients(lambda x: gemma_rms_norm(x, weight, EPS), x), gradients(lambda x: formula_norm(x, wide[2]), wide[0])
    close("gradient without residual", have[0], want[0], 4e-3)


def rotation_bits(device: str, tokens: int) -> None:
    """torch's own bits, forward and back: products, sums and rounding."""
    draw = Draw(device, 2)
    for heads, dim, rotary in ((3, 128, 64), (1, 128, 128), (2, 40, 24)):
        cos, sin = (t[torch.arange(tokens) * 7 % 61] for t in rope_table(61, rotary, 1e4, "cpu"))
        x = draw(tokens, heads + 2, dim)[:, 1:-1]
        want = apply_rope(x.float().cpu(), cos, sin).bfloat16()
        on_device = cos.to(device), sin.to(device)
        same("rotation", apply_rope(x, *on_device), want)
        same("rotation of a whole tensor", apply_rope(x.contiguous(), *on_device), want)
        (have,) = gradients(lambda x, a=on_device: apply_rope(x, *a), x)
        grad = torch.linspace(-1, 1, x.numel(), device=device).bfloat16().view(x.shape)
        same("rotated back", have, apply_rope(grad.float().cpu(), cos, -sin).bfloat16())


def activation(device: str, rows: int, inner: int) -> None:
    """Against fp64, past the limits on all sides, one tensor and two, rounded here or by the caller."""
    draw, params = Draw(device, 3), SwiGLU()
    gate, up = draw(rows, inner) * 4, draw(rows, inner) * 4

    def formula(gate: Tensor, up: Tensor) -> Tensor:
        g = gate.clamp(max=params.limit)
        return g * torch.sigmoid(params.alpha * g) * (up.clamp(-params.limit, params.limit) + params.beta)

    have = swiglu_oai_halves(gate, up, params)
    assert have.dtype is torch.float32
    close("activation", have, formula(gate.double(), up.double()), 1e-6)
    same("rounded here", swiglu_oai_halves(gate, up, params, torch.bfloat16), have.bfloat16())
    same("one tensor", swiglu_oai(torch.cat((gate, up), -1), params), have)
    want = gradients(formula, gate.double(), up.double())
    for dtype in (torch.float32, torch.bfloat16):
        grads = gradients(lambda *a, d=dtype: swiglu_oai_halves(*a, params, d), gate, up)
        for name, h, w in zip(("gate", "up"), grads, want, strict=True):
            close(f"gradient of {name}", h, w, 4e-3)
            assert torch.equal(h == 0, w == 0), f"{name}: other places are clamped"
    gate[0, 0], up[0, 1] = float("nan"), float("nan")
    assert swiglu_oai_halves(gate, up, params).isnan().sum() == 2


def routing(device: str, tokens: int) -> None:
    """The choice of torch's stable sort, ties included; weights, replayed weights, gradients; NaN, and ids that are none."""
    draw = Draw(device, 4)
    for experts, top, biased in ((128, 4, True), (6, 2, False), (256, 8, True), (40, 1, True)):
        # Steps of 1/8: sigmoids tie exactly or differ by far more than their last bit.
        logits = (draw(tokens, experts, dtype=torch.float32) * 16).round() / 8
        _routing_case(logits, (draw(experts, dtype=torch.float32) * 2).round() if biased else None, top)
    logits[0, 3], logits[1:] = float("nan"), -200.0
    ids, _ = route_topk(logits, None, 1, 1.0)
    assert ids[0, 0] == 3 and (ids[1:] == 0).all(), "NaN comes first; all equal, the lowest"
    bias = torch.zeros(logits.shape[1], dtype=torch.int32, device=device)
    bias[5] = -0x400000  # bits of NaN with a sign
    assert (route_topk(logits[1:], bias.view(torch.float32), 1, 1.0)[0] == 5).all()
    outside = torch.tensor([[0], [-1], [logits.shape[1]]], device=device)
    assert route_weights(logits[:1].zero_().expand(3, -1), outside, 1.0).flatten().isnan().tolist() == [False, True, True]


def _routing_case(logits: Tensor, bias: Tensor | None, top: int) -> None:
    def formula(logits: Tensor, ids: Tensor) -> Tensor:
        chosen = logits.sigmoid().gather(-1, ids)
        return chosen / chosen.sum(-1, keepdim=True) * 2.5

    ids, weights = route_topk(logits, bias, top, 2.5)
    scores = logits.double().sigmoid()
    ranked = (scores if bias is None else scores + bias).sort(dim=-1, descending=True, stable=True).indices
    same("ids", ids, ranked[:, :top].sort(-1).values)
    close("weights", weights, formula(logits.double(), ids), 1e-6)
    same("weights of the same ids", route_weights(logits, ids, 2.5), weights)
    other = (ids * 3 + 1) % logits.shape[1]  # some of them twice
    close("weights of other ids", route_weights(logits, other, 2.5), formula(logits.double(), other), 1e-6)
    if top > 1:  # the share of one alone is constant
        for chosen, call in ((ids, lambda x: route_topk(x, bias, top, 2.5)[1]), (other, lambda x: route_weights(x, other, 2.5))):
            (have,), (want,) = gradients(call, logits), gradients(lambda x, i=chosen: formula(x, i), logits.double())
            close("gradient of logits", have, want, 1e-4)
            assert not have.masked_fill(torch.zeros_like(have, dtype=torch.bool).scatter(1, chosen, True), 0.0).any()


def products(device: str, tokens: int, outputs: int, inputs: int) -> None:
    """Both kinds of weight against fp64; an fp32 weight comes out bit for bit; the gradient keeps more of its input than bf16 has."""
    from samebits.kernels.triton_dense import product

    draw = Draw(device, 5)
    size = torch.exp2(torch.linspace(-20, 4, outputs, device=device))[:, None]  # of rows, against the usual one
    for dtype in (torch.bfloat16, torch.float32):
        # What lies between the rows is NaN.
        x, w = draw(tokens, inputs + 8), draw(outputs, inputs + 16, dtype=dtype) * size.to(dtype)
        x[:, inputs:], w[:, inputs:] = float("nan"), float("nan")
        x, w = x[:, :inputs], w[:, :inputs]
        out = frozen_linear(x, w)
        want = x.double() @ w.double().T
        for row in range(0, outputs, max(1, outputs // 5)):
            close(f"product with {dtype}, output {row}", out[:, row], want[:, row], 3e-6)
        same("parts in programs of their own", product(x, w, split=True), product(x, w, split=False))
        grad = draw(tokens, outputs, dtype=torch.float32)
        (have,) = torch.autograd.grad(frozen_linear(leaf := x.clone().requires_grad_(), w), leaf, grad)
        exact = (grad.double() @ w.double()).bfloat16()
        close("gradient of x", have, exact, 1e-3)
        assert (have != exact).float().mean() < 0.04, "the gradient is not fp32's, rounded"
    eye = torch.eye(inputs, device=device).bfloat16()
    same("an fp32 weight", frozen_linear(eye, w), w.T.contiguous())


def rows_of_a_matrix(device: str, tokens: int, outputs: int, inputs: int) -> None:
    """Some rows of a matrix, on a rank of several, give the bits that they have in all of it; it is split where part sizes change."""
    from samebits.kernels.triton_dense import SMALL

    draw = Draw(device, 7)
    x = draw(tokens, inputs)
    assert outputs > SMALL >= outputs // 2, "the sizes show nothing"
    for dtype in (torch.bfloat16, torch.float32):
        w = draw(outputs, inputs, dtype=dtype)
        whole, parts = frozen_linear(x, w), w.split(-(-outputs // 2))
        same(f"rows of {dtype}", torch.cat([frozen_linear(x, part, outputs=outputs) for part in parts], 1), whole)
        assert not torch.equal(torch.cat([frozen_linear(x, part) for part in parts], 1), whole), "no sum is cut in another place"


def logprobs(device: str, rows: int, vocabulary: int) -> None:
    """Values, entropies and gradients against fp64; forbidden tokens; no row without company of its own."""
    draw = Draw(device, 6)
    logits = draw(rows, vocabulary + 3, dtype=torch.float32)[:, :vocabulary] * 5
    logits[:, 5::7] = float("-inf")
    logits[0, 0] += 60.0  # one token takes nearly all
    logits[-1, 6:] = float("-inf")
    ids = torch.arange(rows * 2, device=device).view(rows, 2) * 7 % (vocabulary - vocabulary % 7)
    ids[0], ids[-1] = torch.tensor([0, 1], device=device), torch.tensor([2, 2], device=device)
    temperature = torch.linspace(0.5, 2.0, rows, device=device)
    temperature[rows // 2] = 1.0

    def formula(logits: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
        table = (logits / temperature[:, None]).log_softmax(-1)
        finite = table.exp() * table.masked_fill(table == float("-inf"), 0.0)
        return table.gather(-1, ids), -finite.sum(-1)

    picked, entropy = token_logprob_rows(logits, ids, temperature, True)
    want, want_entropy = formula(logits.double(), temperature.double())
    assert (picked <= 0).all() and picked.dtype is torch.float32
    torch.testing.assert_close(picked.double(), want, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(entropy.double(), want_entropy, rtol=1e-5, atol=1e-5)
    assert token_logprob_rows(logits, ids, temperature)[1] is None
    same("one id of two", token_logprob_rows(logits, ids[:, 1:], temperature)[0], picked[:, 1:])
    ones = torch.ones_like(temperature)
    same("temperature 1", token_logprob_rows(logits, ids)[0], token_logprob_rows(logits.contiguous(), ids, ones)[0])
    for part in (slice(0, 1), slice(2), slice(1, 2)):
        (have,) = gradients(lambda x, p=part: token_logprob_rows(x, ids, temperature, True)[p], logits)
        (expected,) = gradients(lambda x, p=part: formula(x, temperature.double())[p], logits.double())
        close(f"gradient {part}", have, expected.nan_to_num(0.0), 1e-5)
    outside = torch.tensor([[-1, vocabulary]], device=device)
    assert token_logprob_rows(logits[:1], outside)[0].isnan().all()

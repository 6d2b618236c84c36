"""Routing and experts against a loop over tokens in fp64, with a distinct constant in every expert."""

import pytest
import torch

from samebits.kernels.activation import SwiGLU
from samebits.kernels.expert_tiles import pack_experts
from samebits.kernels.linear import LoRA, select, values
from samebits.kernels.moe import W4A4, ExpertLoRA, moe, route_topk, route_weights
from samebits.quant import activations, nvfp4

T, H, WIDTH, E, TOP, R, SLOTS = 24, 32, 48, 6, 2, 4, 3
ACT = SwiGLU()
G = torch.Generator().manual_seed(0)
SIZE = torch.arange(1.0, E + 1)[:, None, None]  # expert e is e + 1 times as large
W13 = torch.randn(E, 2 * WIDTH, H, generator=G) * SIZE / H**0.5
W2 = torch.randn(E, H, WIDTH, generator=G) / SIZE / WIDTH**0.5
X = torch.randn(T, H, generator=G)
LOGITS = torch.randn(T, E, generator=G)
BIAS = torch.randn(E, generator=G) * 0.3


def lora() -> ExpertLoRA:
    g = torch.Generator().manual_seed(1)
    slot = torch.tensor([1.0, -2.0, 3.0])[:, None, None, None]

    def pair(n: int, k: int) -> LoRA:
        return LoRA(torch.randn(SLOTS, E, R, k, generator=g) * slot, torch.randn(SLOTS, E, n, R, generator=g) * 0.1 * SIZE)

    return ExpertLoRA(pair(WIDTH, H), pair(WIDTH, H), pair(H, WIDTH))


LORA = lora()


def expert(x, w13, w2, l=None, slot=-1, e=0):  # noqa: E741
    """One expert on one token [H], in fp64."""

    def adapted(y, x, pair):
        if l is None or pair is None or slot < 0:
            return y
        return y + pair.b[slot, e].double() @ (pair.a[slot, e].double() @ x)

    gate, up = (w13.double() @ x).chunk(2)
    if l is not None:
        gate, up = adapted(gate, x, l.gate), adapted(up, x, l.up)
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    act = gate * torch.sigmoid(1.702 * gate) * (up + 1)
    y = w2.double() @ act
    return adapted(y, act, l.down) if l is not None else y


def reference(x, w13, w2, ids, weights, l=None, slots=None):  # noqa: E741
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(len(x)):
        slot = 0 if slots is None else int(slots[t])
        for e, w in zip(ids[t].tolist(), weights[t], strict=True):
            out[t] += w.double() * expert(x[t].double(), values(select(w13, e)), values(select(w2, e)), l, slot, e)
    return out


def routes(kind: str) -> torch.Tensor:
    if kind == "all on one":
        return torch.tensor([[1, 4]]).repeat(T, 1)
    if kind == "some empty":
        return torch.tensor([[0, 3], [3, 5]]).repeat(T // 2, 1)
    return route_topk(LOGITS, BIAS, TOP, 2.0)[0]


# --------------------------------------------------------------------------------------------------------------------- router


def test_choice_by_biased_sigmoid_weight_by_unbiased():
    ids, weights = route_topk(LOGITS, BIAS, TOP, 2.0)
    for t in range(T):
        scores = LOGITS[t].double().sigmoid()
        want = sorted(range(E), key=lambda e, s=scores: -(s[e] + BIAS[e].double()).item())[:TOP]
        assert ids[t].tolist() == sorted(want)
        chosen = scores[ids[t]]
        torch.testing.assert_close(weights[t].double(), chosen / chosen.sum() * 2.0, rtol=1e-6, atol=1e-7)
    assert ids.dtype == torch.int64 and weights.dtype == torch.float32
    assert not torch.equal(ids, route_topk(LOGITS, None, TOP, 2.0)[0])  # the bias matters here


def test_ties_go_to_the_lower_expert_and_ids_ascend():
    ids, weights = route_topk(torch.zeros(1, E), None, TOP, 2.0)
    assert ids.tolist() == [[0, 1]] and weights.tolist() == [[1.0, 1.0]]
    assert route_topk(torch.tensor([[0.0, 5.0, 1.0, 5.0, 9.0, 5.0]]), None, 3, 1.0)[0].tolist() == [[1, 3, 4]]
    # Saturated sigmoids tie although their logits differ.
    assert route_topk(torch.tensor([[90.0, 100.0, 95.0]]), None, 2, 1.0)[0].tolist() == [[0, 1]]


def test_a_replayed_id_outside_the_live_choice_keeps_weight_and_gradient():
    logits = LOGITS.clone().requires_grad_()
    ids = torch.tensor([[0, 1]]).repeat(T, 1)
    weights = route_weights(logits, ids, 2.0)
    torch.testing.assert_close(weights.sum(-1), torch.full((T,), 2.0))
    weights[:, 0].sum().backward()
    assert logits.grad[:, :2].ne(0).all() and not logits.grad[:, 2:].any()


# -------------------------------------------------------------------------------------------------------------------- experts


@pytest.mark.parametrize("kind", ["router", "all on one", "some empty"])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "nvfp4"])
def test_equals_a_loop_over_tokens(kind, packed):
    ids = routes(kind)
    weights = route_weights(LOGITS, ids, 2.0)
    w13, w2 = (nvfp4.quantize(w, nvfp4.global_scale(w.abs().amax((1, 2)))) for w in (W13, W2)) if packed else (W13, W2)
    out = moe(X, w13, w2, ids, weights, ACT)
    torch.testing.assert_close(out.double(), reference(X, w13, w2, ids, weights), rtol=1e-4, atol=1e-4)
    slots = torch.arange(T) % 4 - 1  # -1, 0, 1, 2
    for s in (None, slots):
        out = moe(X, w13, w2, ids, weights, ACT, LORA, s)
        torch.testing.assert_close(out.double(), reference(X, w13, w2, ids, weights, LORA, s), rtol=1e-4, atol=1e-3)


def test_each_expert_is_itself():
    # All but one weight zero: token t must see exactly expert ids[t, 0].
    ids = torch.arange(E)[:, None].repeat(1, 2)
    ids[:, 1] = (ids[:, 0] + 1) % E
    weights = torch.tensor([[1.0, 0.0]]).repeat(E, 1)
    x = X[:1].repeat(E, 1)
    out = moe(x, W13, W2, ids, weights, ACT)
    for e in range(E):
        torch.testing.assert_close(out[e].double(), expert(X[0].double(), W13[e], W2[e]), rtol=1e-4, atol=1e-5)
    assert len({tuple(r) for r in out.tolist()}) == E


def test_one_token():
    ids, weights = route_topk(LOGITS[:1], BIAS, TOP, 2.0)
    slots = torch.tensor([2])
    out = moe(X[:1], W13, W2, ids, weights, ACT, LORA, slots)
    torch.testing.assert_close(out.double(), reference(X[:1], W13, W2, ids, weights, LORA, slots), rtol=1e-4, atol=1e-4)


def test_no_token():
    out = moe(X[:0], W13, W2, torch.empty(0, TOP, dtype=torch.int64), torch.empty(0, TOP), ACT, LORA)
    assert out.shape == (0, H)


def test_an_empty_expert_is_never_read():
    ids = routes("some empty")
    weights = route_weights(LOGITS, ids, 2.0)
    w13, w2 = W13.clone(), W2.clone()
    for e in (1, 2, 4):
        w13[e], w2[e] = float("nan"), float("nan")
    assert torch.equal(moe(X, w13, w2, ids, weights, ACT), moe(X, W13, W2, ids, weights, ACT))


@pytest.mark.parametrize("part", ["gate", "up", "down"])
def test_each_part_of_the_adapter_alone(part):
    only = ExpertLoRA(**{p: getattr(LORA, p) if p == part else None for p in ("gate", "up", "down")})
    ids, weights = route_topk(LOGITS, BIAS, TOP, 2.0)
    out = moe(X, W13, W2, ids, weights, ACT, only)
    torch.testing.assert_close(out.double(), reference(X, W13, W2, ids, weights, only), rtol=1e-4, atol=1e-4)
    base = moe(X, W13, W2, ids, weights, ACT)
    assert not torch.isclose(out, base).all(-1).any()


def test_tokens_without_an_adapter_and_zero_b_keep_their_bits():
    ids, weights = route_topk(LOGITS, BIAS, TOP, 2.0)
    base = moe(X, W13, W2, ids, weights, ACT)
    slots = torch.arange(T) % 4 - 1
    assert torch.equal(moe(X, W13, W2, ids, weights, ACT, LORA, slots)[slots < 0], base[slots < 0])
    assert torch.equal(moe(X, W13, W2, ids, weights, ACT, LORA, torch.full((T,), -1)), base)
    zero = ExpertLoRA(*(LoRA(p.a, torch.zeros_like(p.b)) for p in LORA))
    assert torch.equal(moe(X, W13, W2, ids, weights, ACT, zero), base)


def test_order_of_ids_in_a_row_is_free():
    ids, weights = route_topk(LOGITS, BIAS, TOP, 2.0)
    flipped = moe(X, W13, W2, ids.flip(-1), weights.flip(-1), ACT)
    assert torch.equal(flipped, moe(X, W13, W2, ids, weights, ACT))


def test_int16_routes_as_the_engine_sends_them():
    ids, weights = route_topk(LOGITS, BIAS, TOP, 2.0)
    assert torch.equal(moe(X, W13, W2, ids.short(), weights, ACT), moe(X, W13, W2, ids, weights, ACT))


def test_gradients_equal_autograd_of_the_loop():
    ids, _ = route_topk(LOGITS, BIAS, TOP, 2.0)
    packed = [nvfp4.quantize(w, nvfp4.global_scale(w.abs().amax((1, 2)))) for w in (W13, W2)]

    def leaves(dtype):
        flat = [X, LOGITS, *(t for pair in LORA for t in pair)]
        return [t.detach().clone().to(dtype).requires_grad_() for t in flat]

    def adapters(ts):
        return ExpertLoRA(*(LoRA(a, b) for a, b in zip(ts[::2], ts[1::2], strict=True)))

    g32, g64 = leaves(torch.float32), leaves(torch.float64)
    moe(g32[0], *packed, ids, route_weights(g32[1], ids, 2.0), ACT, adapters(g32[2:])).square().sum().backward()
    weights = g64[1].sigmoid().gather(-1, ids)
    weights = weights / weights.sum(-1, keepdim=True) * 2.0
    # The reference casts to fp64, which passes gradients through.
    reference(g64[0], *packed, ids, weights, adapters(g64[2:])).square().sum().backward()
    for a, b in zip(g32, g64, strict=True):
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=1e-3, atol=1e-3 * b.grad.abs().max().item())
        assert b.grad.any()


def test_bf16_rounds_activation_and_output():
    ids, weights = route_topk(LOGITS, BIAS, TOP, 2.0)
    out = moe(X.bfloat16(), W13.bfloat16(), W2.bfloat16(), ids, weights, ACT)
    assert out.dtype == torch.bfloat16
    want = reference(X.bfloat16(), W13.bfloat16(), W2.bfloat16(), ids, weights)
    torch.testing.assert_close(out.double(), want, rtol=2e-2, atol=2e-2 * want.abs().max().item())


# ----------------------------------------------------------------------------------------------------------------------- w4a4


def seen(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """fp64 values of the codes and scales that an activation [K] becomes."""
    if scale is None:
        return nvfp4.dequantize(activations.quantize_per_token(x[None]))[0].double()
    return activations.dequantize_static(activations.quantize_static(x[None], scale))[0].double()


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_w4a4_quantizes_what_enters_each_gemm_and_not_what_enters_the_adapter(static, dtype):
    scales = W4A4(torch.tensor(3.0 / 2688), torch.tensor(11.0 / 2688)) if static else W4A4()
    packed = [nvfp4.quantize(w, nvfp4.global_scale(w.abs().amax((1, 2)))) for w in (W13, W2)]
    lora = ExpertLoRA(*(LoRA(p.a.to(dtype), p.b.to(dtype)) for p in LORA))
    ids, weights = route_topk(LOGITS, BIAS, TOP, 2.0)
    x = X.to(dtype)
    have = moe(x, *packed, ids, weights, ACT, lora, w4a4=scales)

    def delta(pair, e, v):
        return pair.b[0, e].double() @ (pair.a[0, e].double() @ v.double()).to(dtype).double()

    want = torch.zeros(T, H, dtype=torch.float64)
    for t in range(T):
        for e, w in zip(ids[t].tolist(), weights[t], strict=True):
            gate, up = (values(select(packed[0], e)).double() @ seen(x[t], scales.w13)).chunk(2)
            gate, up = (gate + delta(lora.gate, e, x[t])).to(dtype), (up + delta(lora.up, e, x[t])).to(dtype)
            act = gate.double().clamp(max=7) * torch.sigmoid(1.702 * gate.double().clamp(max=7)) * (up.double().clamp(-7, 7) + 1)
            act = act.to(dtype)
            want[t] += w.double() * (values(select(packed[1], e)).double() @ seen(act, scales.w2) + delta(lora.down, e, act))
    # A rounding that goes the other way upstream can move an activation to the next code: rare, and far below what leaving a
    # quantization out would do.
    error = (have.double() - want).norm() / want.norm()
    assert error < (1e-3 if dtype is torch.float32 else 1e-2)
    plain = moe(x, *packed, ids, weights, ACT, lora)
    assert (plain.double() - want).norm() / want.norm() > 4 * error
    tiles = [pack_experts(w) for w in packed]
    assert torch.equal(moe(x, *tiles, ids, weights, ACT, lora, w4a4=scales), have)
    # Of adapters that are zero, nothing is left.
    zero = ExpertLoRA(*(LoRA(p.a, torch.zeros_like(p.b)) for p in lora))
    assert torch.equal(moe(x, *packed, ids, weights, ACT, zero, w4a4=scales), moe(x, *packed, ids, weights, ACT, w4a4=scales))


def test_w4a4_gradients_pass_straight_through():
    packed = [nvfp4.quantize(w, nvfp4.global_scale(w.abs().amax((1, 2)))) for w in (W13, W2)]
    ids, weights = route_topk(LOGITS, BIAS, TOP, 2.0)
    x = X.clone().requires_grad_()
    a = LORA.gate.a.clone().requires_grad_()
    lora = LORA._replace(gate=LoRA(a, LORA.gate.b))
    moe(x, *packed, ids, weights, ACT, lora, w4a4=W4A4()).sum().backward()
    plain = X.clone().requires_grad_()
    moe(plain, *packed, ids, weights, ACT, LORA).sum().backward()
    assert a.grad[0].any() and (x.grad - plain.grad).norm() < 0.3 * plain.grad.norm() and not torch.equal(x.grad, plain.grad)

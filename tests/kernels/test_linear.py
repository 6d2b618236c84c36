"""Frozen linears and adapters: values and gradients against fp64 autograd on dense weights, slots, and bits that must not move."""

import pytest
import torch

from samebits.kernels.linear import LoRA, adapter_rows, add_lora, frozen_linear, lora_linear, select, values
from samebits.quant import mxfp8, nvfp4

T, K, N, R, SLOTS = 12, 64, 48, 4, 3
G = torch.Generator().manual_seed(0)
W = torch.randn(N, K, generator=G)
X = torch.randn(T, K, generator=G)
# Distinct sizes per slot, so that a wrong slot cannot pass.
LORA = LoRA(
    torch.randn(SLOTS, R, K, generator=G) * torch.tensor([1.0, 2.0, 3.0])[:, None, None],
    torch.randn(SLOTS, N, R, generator=G) * 0.1,
)
FORMATS = {"dense": W, "bf16": W.bfloat16(), "nvfp4": nvfp4.quantize(W), "mxfp8": mxfp8.quantize(W)}
formats = pytest.mark.parametrize("weight", FORMATS.values(), ids=FORMATS.keys())
SLOT_IDS = torch.tensor([2, -1, 0, 2, 2, -1, 0, 0, -1, 2, 0, 2])


def reference(x, w, a, b):
    return x @ w.mT + x @ a.mT @ b.mT


@formats
def test_forward_and_gradient_equal_autograd_on_the_dense_weight(weight):
    dense = values(weight).double()
    x64, a64, b64 = (t.double().requires_grad_() for t in (X, LORA.a[0], LORA.b[0]))
    want = reference(x64, dense, a64, b64)
    want.square().sum().backward()
    x, a, b = (t.clone().requires_grad_() for t in (X, LORA.a, LORA.b))
    out = lora_linear(x, weight, LoRA(a, b))
    out.square().sum().backward()
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(x.grad.double(), x64.grad, rtol=1e-5, atol=1e-2)
    torch.testing.assert_close(a.grad[0].double(), a64.grad, rtol=1e-5, atol=1e-2)
    torch.testing.assert_close(b.grad[0].double(), b64.grad, rtol=1e-5, atol=1e-2)
    assert not a.grad[1:].any() and not b.grad[1:].any()


@formats
def test_packed_equals_its_values_bit_for_bit(weight):
    assert torch.equal(frozen_linear(X, weight), frozen_linear(X, values(weight)))
    assert torch.equal(lora_linear(X, weight, LORA), lora_linear(X, values(weight), LORA))


def test_values_and_select_of_a_stack():
    stack = torch.stack([W, 2 * W, 3 * W])
    packed = nvfp4.quantize(stack, nvfp4.global_scale(stack.abs().amax((1, 2))))
    assert torch.equal(values(packed)[2], values(select(packed, 2)))
    assert torch.equal(values(select(packed, 1)), nvfp4.dequantize(nvfp4.quantize(2 * W)))
    assert torch.equal(select(stack, 1), 2 * W)
    assert torch.equal(select(mxfp8.quantize(stack), 1).codes, mxfp8.quantize(2 * W).codes)


def test_autograd_keeps_the_packed_bytes_only():
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        frozen_linear(X.clone().requires_grad_(), nvfp4.quantize(W)).sum()
    assert {t.dtype for t in kept if t.dim() == 2} == {torch.uint8}


def test_bf16_sums_in_fp32_and_rounds_once():
    x, w = X.bfloat16(), W.bfloat16()
    a, b = LORA.a.bfloat16(), LORA.b.bfloat16()
    out = lora_linear(x, w, LoRA(a, b))
    u = (x.float() @ a[0].float().mT).bfloat16().float()  # the one inner rounding
    want = (x.float() @ w.float().mT + u @ b[0].float().mT).bfloat16()
    assert out.dtype == torch.bfloat16 and torch.equal(out, want)
    merged = x.float() @ (w.float() + b[0].float() @ a[0].float()).bfloat16().float().mT
    assert not torch.equal(out, merged.bfloat16())


def test_each_token_gets_its_slot():
    out = lora_linear(X, W, LORA, SLOT_IDS)
    for t, slot in enumerate(SLOT_IDS.tolist()):
        row = X[t : t + 1].double()
        want = row @ W.double().mT if slot < 0 else reference(row, W.double(), LORA.a[slot].double(), LORA.b[slot].double())
        torch.testing.assert_close(out[t].double(), want[0], rtol=1e-5, atol=1e-4)


def test_a_token_without_an_adapter_keeps_its_bits():
    base = lora_linear(X, W)
    out = lora_linear(X, W, LORA, SLOT_IDS)
    assert torch.equal(out[SLOT_IDS < 0], base[SLOT_IDS < 0])
    assert not torch.isclose(out[SLOT_IDS >= 0], base[SLOT_IDS >= 0]).all(-1).any()
    assert torch.equal(lora_linear(X, W, LORA, torch.full((T,), -1)), base)


def test_a_slot_that_no_token_uses_is_never_read():
    poisoned = LoRA(LORA.a.clone(), LORA.b.clone())
    poisoned.a[1], poisoned.b[1] = float("nan"), float("nan")
    assert torch.equal(lora_linear(X, W, poisoned, SLOT_IDS), lora_linear(X, W, LORA, SLOT_IDS))


def test_adapter_of_zero_b_changes_no_bit():
    zero = LoRA(LORA.a, torch.zeros_like(LORA.b))
    assert torch.equal(lora_linear(X, W, zero), lora_linear(X, W))
    assert torch.equal(lora_linear(X, W, zero, SLOT_IDS), lora_linear(X, W))


def test_no_ids_mean_slot_zero_and_one_slot_moves_no_rows():
    zeros = torch.zeros(T, dtype=torch.int64)
    assert torch.equal(lora_linear(X, W, LORA), lora_linear(X, W, LORA, zeros))
    assert adapter_rows(None) == [(0, None)] and adapter_rows(zeros + 2) == [(2, None)] and adapter_rows(zeros - 1) == []
    rows = {slot: r.tolist() for slot, r in adapter_rows(SLOT_IDS)}
    assert rows == {0: [2, 6, 7, 10], 2: [0, 3, 4, 9, 11]}


def test_gradients_of_slots_come_from_their_tokens_alone():
    a, b = (t.clone().requires_grad_() for t in LORA)
    out = lora_linear(X, W, LoRA(a, b), SLOT_IDS)
    out.sum().backward()
    assert not a.grad[1].any() and not b.grad[1].any()
    for slot in (0, 2):
        alone_a, alone_b = (t.clone().requires_grad_() for t in LORA)
        lora_linear(X[slot == SLOT_IDS], W, LoRA(alone_a, alone_b), SLOT_IDS[slot == SLOT_IDS]).sum().backward()
        torch.testing.assert_close(a.grad[slot], alone_a.grad[slot], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(b.grad[slot], alone_b.grad[slot], rtol=1e-5, atol=1e-5)


def test_add_lora_leaves_its_input_alone():
    out = frozen_linear(X, W)
    before = out.clone()
    add_lora(out, X, LORA, SLOT_IDS)
    add_lora(out, X, LORA, None)
    assert torch.equal(out, before)

"""The Triton kernels of the experts against the torch reference on CPU: `TRITON_INTERPRET=1 python -m tests.kernels.interpret_moe`.

Small shapes that are no multiples of anything: inputs end within a chunk, outputs within a band, ranks below the padding, a shrink in
several parts, tokens with and without an adapter, an expert without tokens. Inline assembly and bf16 products are left to tests/gpu.
"""

from __future__ import annotations

import torch

from samebits.kernels import moe_fused, triton_linear, triton_moe
from samebits.kernels.activation import SwiGLU
from samebits.kernels.expert_tiles import pack_experts
from samebits.kernels.linear import LoRA, lora_linear
from samebits.kernels.linear_tiles import pack_linear
from samebits.kernels.moe import ExpertLoRA, moe
from samebits.kernels.triton_group import group
from samebits.kernels.triton_moe import Cut
from samebits.kernels.triton_moe_grad import BackCut
from samebits.kernels.triton_tiles import INTERPRETED
from samebits.quant import mxfp8, nvfp4

T, H, WIDTH, E, TOP, R, SLOTS = 7, 144, 48, 4, 2, 4, 2


def distance(have: torch.Tensor, want: torch.Tensor) -> float:
    """Relative error in norm."""
    return ((have.double() - want.double()).norm() / want.double().norm()).item()


def compare(name: str, have: torch.Tensor, want: torch.Tensor, limit: float) -> None:
    """Stop with the name where the two differ by more than `limit`, or the result is not finite."""
    error = distance(have, want)
    if not error <= limit:
        raise SystemExit(f"{name}: off by {error:.1e}")


def adapters(g: torch.Generator, size: torch.Tensor) -> ExpertLoRA:
    """bf16 adapters, larger with each expert and slot."""
    slot = torch.tensor([1.0, -2.0])[:, None, None, None]

    def pair(n: int, k: int) -> LoRA:
        a, b = torch.randn(SLOTS, E, R, k, generator=g) * slot / k**0.5, torch.randn(SLOTS, E, n, R, generator=g) * 0.3 * size
        return LoRA(a.bfloat16(), b.bfloat16())

    return ExpertLoRA(pair(WIDTH, H), pair(WIDTH, H), pair(H, WIDTH))


def check_linear() -> None:
    """An MXFP8 layer: forward with and without an adapter, and all gradients."""
    g = torch.Generator().manual_seed(1)
    tokens, n, k = 18, 70, 160
    packed = mxfp8.quantize(torch.randn(n, k, generator=g) * torch.linspace(0.01, 3, n)[:, None])
    tiles = pack_linear(packed)
    lora = LoRA(*(torch.randn(*shape, generator=g).bfloat16() for shape in ((SLOTS, R, k), (SLOTS, n, R))))
    slots = torch.arange(tokens) % 3 - 1
    base = torch.randn(tokens, k, generator=g).bfloat16()
    compare("linear", triton_linear.fused_linear(base, tiles, None, None), lora_linear(base, packed), 1e-3)
    results = []
    for fused in (False, True):
        x, a, b = (t.clone().requires_grad_() for t in (base, *lora))
        call = triton_linear.fused_linear if fused else lora_linear
        out = call(x, tiles if fused else packed, LoRA(a, b), slots)
        (out.float() * torch.arange(1.0, tokens + 1)[:, None]).square().sum().backward()
        results.append((out.detach(), x.grad, a.grad, b.grad))
    for name, want, have in zip(("linear with adapter", "dx", "dA", "dB"), *results, strict=True):
        compare(name, have, want, 5e-3)


def check_large_linear() -> None:
    """Tiles that come through a tensor descriptor: whole ones, a tail that fits a quarter, a last wave cut in quarters."""
    g = torch.Generator().manual_seed(2)
    n, k = 70, 160
    packed = mxfp8.quantize(torch.randn(n, k, generator=g) * torch.linspace(0.01, 3, n)[:, None])
    tiles = pack_linear(packed)
    lora = LoRA(*(torch.randn(*shape, generator=g).bfloat16() for shape in ((1, R, k), (1, n, R))))
    usual, triton_linear.cut_of = triton_linear.cut_of, lambda *_: Cut(128, 32, 4, 3)
    for tokens in (100, 150):
        x = torch.randn(tokens, k, generator=g).bfloat16()
        compare(f"linear, {tokens} tokens", triton_linear.fused_linear(x, tiles, lora, None), lora_linear(x, packed, lora), 5e-3)
    triton_linear.cut_of = usual


def check_widths() -> None:
    """Experts with 70, 44, 12 and 20 pairs in tiles of 64: two tiles, and each of the three widths."""
    moe_fused.cuts = lambda pairs, experts: (Cut(64, 32, 4, 3), Cut(64, 64, 4, 3))
    g = torch.Generator().manual_seed(3)
    packed = [nvfp4.quantize(torch.randn(E, *shape, generator=g) / shape[1] ** 0.5) for shape in ((2 * WIDTH, H), (H, WIDTH))]
    ids = torch.tensor([2] * 70 + [0] * 44 + [3] * 12 + [1] * 20)[torch.randperm(146, generator=g)].view(-1, 2)
    x, weights = torch.randn(len(ids), H, generator=g).bfloat16(), torch.rand(ids.shape, generator=g)
    lora = adapters(g, torch.ones(E, 1, 1))
    have = moe_fused.fused_experts(x, *(pack_experts(w) for w in packed), ids, weights, SwiGLU(), lora, None, False)
    compare("experts of all widths", have, moe(x, *packed, ids, weights, SwiGLU(), lora), 1e-3)


def check_signals() -> None:
    """Without adapter ids only slot 0's shrink says that u is there, however many slots there are: any other would say it too early."""
    g = torch.Generator().manual_seed(4)
    w13, lora = pack_experts(nvfp4.quantize(torch.randn(E, 2 * WIDTH, H, generator=g))), adapters(g, torch.ones(E, 1, 1))
    ids = torch.tensor([[0, 1], [3, 0]])
    plan = group(ids, E, 16, 1 + SLOTS)
    x = torch.randn(2, H, generator=g).bfloat16()
    triton_moe.weight_product(x, w13, plan, Cut(16, 32, 4, 3), SwiGLU(), (lora.gate, lora.up), None)
    if plan.counters[0].tolist() != [1, 1, 1, 0]:
        raise SystemExit(f"signals of the tiles of three experts: {plan.counters[0].tolist()}")


def check_experts() -> None:
    """Forward with and without adapters, and all gradients."""
    moe_fused.back_cut = lambda pairs, experts: BackCut(16, 32, 4, 3)
    moe_fused.cuts = lambda pairs, experts: (Cut(16, 32, 4, 3), Cut(16, 64, 4, 3))
    g = torch.Generator().manual_seed(0)
    size = torch.arange(1.0, E + 1)[:, None, None]
    packed = [
        nvfp4.quantize(torch.randn(E, 2 * WIDTH, H, generator=g) * size / H**0.5),
        nvfp4.quantize(torch.randn(E, H, WIDTH, generator=g) / size / WIDTH**0.5),
    ]
    tiles = [pack_experts(w) for w in packed]
    x = torch.randn(T, H, generator=g).bfloat16()
    ids = torch.tensor([[3, 0], [0, 1], [1, 3], [3, 1], [0, 3], [1, 0], [0, 3]])  # none to expert 2
    weights = torch.rand(T, TOP, generator=g)
    slots = torch.tensor([0, 1, -1, 1, 0, -1, 1])
    lora, act = adapters(g, size), SwiGLU()
    base = moe_fused.fused_experts(x, *tiles, ids, weights, act, None, None, False)
    compare("base", base, moe(x, *packed, ids, weights, act), 1e-3)
    zero = ExpertLoRA(*(LoRA(p.a, torch.zeros_like(p.b)) for p in lora))
    if not torch.equal(moe_fused.fused_experts(x, *tiles, ids, weights, act, zero, slots, False), base):
        raise SystemExit("an adapter with B zero moves bits")
    for pair in (broken := ExpertLoRA(*(LoRA(*(t.clone() for t in p)) for p in lora))):
        pair.a[1], pair.b[1] = float("nan"), float("inf")
    mine = slots < 1  # tokens of the other slot, or of none, in the same tiles
    whole, beside = (moe_fused.fused_experts(x, *tiles, ids, weights, act, one, slots, False)[mine] for one in (lora, broken))
    if not torch.equal(whole, beside):
        raise SystemExit("a broken adapter reaches the tokens of another")
    names = ("x", "weights", *(f"{p}.{m}" for p in ("gate", "up", "down") for m in "ab"))
    results = []
    for fused, recompute in ((False, False), (True, False), (True, True)):
        leaves = [t.clone().requires_grad_() for t in (x, weights, *(t for pair in lora for t in pair))]
        own = ExpertLoRA(*(LoRA(a, b) for a, b in zip(leaves[2::2], leaves[3::2], strict=True)))
        if fused:
            out = moe_fused.fused_experts(leaves[0], *tiles, ids, leaves[1], act, own, slots, recompute)
        else:
            out = moe(leaves[0], *packed, ids, leaves[1], act, own, slots)
        (out.float() * torch.arange(1.0, T + 1)[:, None]).square().sum().backward()
        results.append((out.detach(), [leaf.grad for leaf in leaves]))
    (want, want_grads), *fused_results = results
    for out, grads in fused_results:
        compare("with adapters", out, want, 1e-3)
        for name, have, expected in zip(names, grads, want_grads, strict=True):
            compare(f"gradient of {name}", have, expected, 1.5e-2)
    if not all(torch.equal(a, b) for a, b in zip(fused_results[0][1], fused_results[1][1], strict=True)):
        raise SystemExit("recomputing changes gradients")
    if (fused_results[0][1][2][:, 2] != 0).any():
        raise SystemExit("an expert without tokens has a gradient")


def main() -> None:
    """All."""
    if not INTERPRETED:
        raise SystemExit("set TRITON_INTERPRET=1")
    triton_moe.SHRINK_PART = 64
    check_linear()
    check_large_linear()
    check_signals()
    check_widths()
    check_experts()
    print("as the reference")


if __name__ == "__main__":
    main()

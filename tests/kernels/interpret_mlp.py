"""The MLP's Triton path, alone and beside the routed experts, against the torch path on CPU: `TRITON_INTERPRET=1 python -m
tests.kernels.interpret_mlp`. Small shapes that are no multiples of anything; streams are left to tests/gpu."""

from __future__ import annotations

import torch

from samebits.kernels import mlp_fused, moe_fused, triton_moe
from samebits.kernels.activation import SwiGLU
from samebits.kernels.expert_tiles import pack_experts
from samebits.kernels.linear import LoRA, lora_linear
from samebits.kernels.linear_tiles import pack_linear
from samebits.kernels.mlp import MLPLoRA, SharedExpert, mlp, moe_with_shared
from samebits.kernels.moe import ExpertLoRA, moe
from samebits.kernels.taps import record
from samebits.kernels.triton_linear import fused_linear
from samebits.kernels.triton_moe import Cut
from samebits.kernels.triton_moe_grad import BackCut
from samebits.kernels.triton_tiles import INTERPRETED
from samebits.quant import mxfp8, nvfp4

from .interpret_moe import compare

T, H, WIDTH, E, TOP, R, SLOTS = 6, 160, 96, 3, 2, 4, 2
ACT = SwiGLU()
G = torch.Generator().manual_seed(0)


def pair(n: int, k: int, *stack: int) -> LoRA:
    """An adapter, fp32 tensors of bf16 numbers."""
    a, b = torch.randn(SLOTS, *stack, R, k, generator=G) / k**0.5, torch.randn(SLOTS, *stack, n, R, generator=G) * 0.3
    return LoRA(a.bfloat16().float(), b.bfloat16().float())


def unrounded(name: str, grad: torch.Tensor) -> None:
    """Stop where an fp32 gradient is one of bf16 numbers."""
    if grad.dtype is not torch.float32 or torch.equal(grad, grad.bfloat16().float()):
        raise SystemExit(f"{name}: the gradient was rounded to bf16")


def check(name: str, reference, fused, leaves: dict[str, torch.Tensor], limit: float = 1.5e-2) -> list[torch.Tensor]:
    """Output and all gradients of two calls; returns the fused gradients."""
    results = []
    for call in (reference, fused):
        own = {n: t.clone().requires_grad_() for n, t in leaves.items()}
        out = call(own)
        (out.float() * torch.arange(1.0, len(out) + 1)[:, None]).square().sum().backward()
        results.append((out.detach(), {n: t.grad for n, t in own.items()}))
    (want, want_grads), (have, grads) = results
    compare(name, have, want, 2e-3)
    for n, grad in grads.items():
        compare(f"{name}: gradient of {n}", grad, want_grads[n], limit)
        if leaves[n].dtype is torch.float32:
            unrounded(f"{name}: {n}", grad)
    return list(grads.values())


def split_over_ranks(x: torch.Tensor, weights: tuple, tiles: tuple, lora: MLPLoRA, slots: torch.Tensor) -> None:
    """Gate and up split over two ranks by rows, then down, have the bits of the fused whole; the parts are of unequal height."""
    with record() as recorder, torch.no_grad():
        want = mlp_fused.fused_mlp(x, *tiles, ACT, lora, slots, False, "")

    def rows(weight: mxfp8.MXFP8Tensor, pair: LoRA, part: slice) -> tuple[mxfp8.MXFP8Tensor, LoRA]:
        return mxfp8.MXFP8Tensor(*(t[part] for t in weight)), LoRA(pair.a, pair.b[:, part])

    gate, up, down = weights
    acts, outs = [], []
    with torch.no_grad():
        for part in (slice(0, 32), slice(32, WIDTH)):
            (g, g_lora), (u, u_lora) = rows(gate, lora.gate, part), rows(up, lora.up, part)
            both = pack_linear(mxfp8.MXFP8Tensor(*(torch.cat(t) for t in zip(g, u, strict=True))))
            acts.append(mlp_fused.fused_activation(x, both, ACT, MLPLoRA(g_lora, u_lora, None), slots))
        act = torch.cat(acts, 1)
        for part in (slice(0, 96), slice(96, H)):
            d, d_lora = rows(down, lora.down, part)
            outs.append(fused_linear(act, pack_linear(d), d_lora, slots))
    if not torch.equal(act, recorder.tensors()["activation"]) or not torch.equal(torch.cat(outs, 1), want):
        raise SystemExit("an MLP split over ranks has other bits")


def main() -> None:
    """All."""
    if not INTERPRETED:
        raise SystemExit("set TRITON_INTERPRET=1")
    triton_moe.SHRINK_PART = 64
    moe_fused.back_cut = lambda pairs, experts: BackCut(16, 32, 4, 3)
    moe_fused.cuts = lambda pairs, experts: (Cut(16, 32, 4, 3), Cut(16, 64, 4, 3))
    gate, up = (mxfp8.quantize(torch.randn(WIDTH, H, generator=G) * scale / H**0.5) for scale in (1.0, 3.0))
    gate_up = mxfp8.MXFP8Tensor(*(torch.cat(parts) for parts in zip(gate, up, strict=True)))
    down = mxfp8.quantize(torch.randn(H, WIDTH, generator=G) / WIDTH**0.5)
    tiles = pack_linear(gate_up), pack_linear(down)
    x = torch.randn(T, H, generator=G).bfloat16()
    slots = torch.tensor([0, 1, -1, 1, 0, -1])
    lora = MLPLoRA(pair(WIDTH, H), pair(WIDTH, H), pair(H, WIDTH))
    leaves = {"x": x} | {f"{p}.{m}": getattr(getattr(lora, p), m) for p in lora._fields for m in "ab"}

    def mine(own: dict[str, torch.Tensor], prefix: str = "") -> MLPLoRA:
        return MLPLoRA(*(LoRA(own[f"{prefix}{p}.a"], own[f"{prefix}{p}.b"]) for p in lora._fields))

    def alone(which, recompute):
        return lambda own: mlp_fused.fused_mlp(own["x"], *tiles, ACT, mine(own), which, recompute, "")

    for which in (None, slots):
        kept = check("mlp", lambda own, w=which: mlp(own["x"], gate_up, down, ACT, mine(own), w), alone(which, False), leaves)
        again = check("mlp", lambda own, w=which: mlp(own["x"], gate_up, down, ACT, mine(own), w), alone(which, True), leaves)
        if not all(torch.equal(a, b) for a, b in zip(kept, again, strict=True)):
            raise SystemExit("recomputing changes gradients of the MLP")
    leaf = {"x": x[:, :WIDTH].contiguous(), "a": lora.down.a, "b": lora.down.b}
    check(
        "linear",
        lambda own: lora_linear(own["x"], down, LoRA(own["a"], own["b"]), slots),
        lambda own: fused_linear(own["x"], tiles[1], LoRA(own["a"], own["b"]), slots),
        leaf,
    )
    # Stacked or alone, with slots told by token or one for all: an output row has one value.
    halves = [fused_linear(x, pack_linear(w), p, slots) for w, p in ((gate, lora.gate), (up, lora.up))]
    block = LoRA(
        torch.cat((lora.gate.a, lora.up.a), dim=1),
        torch.stack([torch.block_diag(g, u) for g, u in zip(lora.gate.b, lora.up.b, strict=True)]),
    )
    if not torch.equal(fused_linear(x, tiles[0], block, slots), torch.cat(halves, dim=1)):
        raise SystemExit("rows have other bits in a stack")
    split_over_ranks(x, (gate, up, down), tiles, lora, slots)
    one = MLPLoRA(*(LoRA(p.a[:1], p.b[:1]) for p in lora))
    by_token, for_all = (mlp_fused.fused_mlp(x, *tiles, ACT, a, w, False, "") for a, w in ((lora, slots * 0), (one, None)))
    if not torch.equal(by_token, for_all):
        raise SystemExit("slots told by token move bits")
    base = mlp_fused.fused_mlp(x, *tiles, ACT, None, None, False, "")
    compare("mlp base", base, mlp(x, gate_up, down, ACT), 2e-3)
    zero = MLPLoRA(*(LoRA(p.a, torch.zeros_like(p.b)) for p in lora))
    if not torch.equal(mlp_fused.fused_mlp(x, *tiles, ACT, zero, slots, False, ""), base):
        raise SystemExit("an adapter with B zero moves bits of the MLP")
    only_up = MLPLoRA(None, lora.up, None)
    compare("up alone", mlp_fused.fused_mlp(x, *tiles, ACT, only_up, slots, False, ""), mlp(x, gate_up, down, ACT, only_up, slots), 2e-3)

    w13 = nvfp4.quantize(torch.randn(E, 2 * WIDTH, H, generator=G) / H**0.5)
    w2 = nvfp4.quantize(torch.randn(E, H, WIDTH, generator=G) / WIDTH**0.5)
    experts = pack_experts(w13), pack_experts(w2)
    ids = torch.tensor([[2, 0], [0, 1], [1, 2], [2, 1], [0, 2], [1, 0]])
    routed = ExpertLoRA(pair(WIDTH, H, E), pair(WIDTH, H, E), pair(H, WIDTH, E))
    leaves["weights"] = torch.rand(T, TOP, generator=G)
    leaves |= {f"routed.{p}.{m}": getattr(getattr(routed, p), m) for p in routed._fields for m in "ab"}

    def both(fused: bool):
        def call(own: dict[str, torch.Tensor]) -> torch.Tensor:
            shared = SharedExpert(*(tiles if fused else (gate_up, down)), mine(own))
            adapters = ExpertLoRA(*mine(own, "routed."))
            if fused:
                return mlp_fused.fused_moe_with_shared(own["x"], *experts, ids, own["weights"], shared, ACT, adapters, slots, False, "moe.")
            return moe_with_shared(own["x"], w13, w2, ids, own["weights"], shared, ACT, adapters, slots)

        return call

    check("beside", both(False), both(True), leaves)
    with record() as recorder, torch.no_grad():
        out = both(True)(leaves)
    seen = recorder.tensors()
    if list(seen) != ["moe.experts", "moe.shared_experts.activation", "moe.shared_experts.down_proj"]:
        raise SystemExit(f"taps: {list(seen)}")
    if not torch.equal(seen["moe.experts"] + seen["moe.shared_experts.down_proj"], out):
        raise SystemExit("the sum is not routed + shared")
    whole = moe_fused.fused_experts(x, *experts, ids, leaves["weights"], ACT, routed, slots, False)
    if not torch.equal(seen["moe.experts"], whole):
        raise SystemExit("routed experts have other bits beside the shared one")
    compare("routed", whole, moe(x, w13, w2, ids, leaves["weights"], ACT, routed, slots), 2e-3)
    kept = []
    for recompute in (False, True):
        seen: dict[int, int] = {}
        with torch.autograd.graph.saved_tensors_hooks(lambda t, seen=seen: seen.setdefault(t.data_ptr(), t.nbytes) and t, lambda t: t):
            own = SharedExpert(*tiles, lora)
            mlp_fused.fused_moe_with_shared(
                x.clone().requires_grad_(), *experts, ids, leaves["weights"], own, ACT, routed, slots, recompute, ""
            )
        kept.append(sum(seen.values()))
    if kept[0] - kept[1] != 2 * (T * TOP + T) * 2 * WIDTH:  # gate and up in bf16, of pairs and of tokens
        raise SystemExit(f"recomputing keeps {kept[1]} bytes of {kept[0]}")
    print("as the torch path")


if __name__ == "__main__":
    main()

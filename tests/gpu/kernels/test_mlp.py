"""The MLP and the shared expert beside the routed ones on a GPU: fp64, bits that neither batch, stack nor stream may move, CUDA graphs."""

import pytest
import torch

from samebits.kernels.activation import SwiGLU
from samebits.kernels.expert_tiles import pack_experts
from samebits.kernels.linear import LoRA, lora_linear
from samebits.kernels.linear_tiles import pack_linear
from samebits.kernels.mlp import MLPLoRA, SharedExpert, mlp, mlp_activation, moe_with_shared
from samebits.kernels.moe import ExpertLoRA, moe
from samebits.kernels.taps import record
from samebits.quant import mxfp8, nvfp4

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
ACT, DEVICE = SwiGLU(), "cuda"
WIDE, SMALL, RANK = (6144, 3072, 4), (512, 256, 5), 32  # hidden, intermediate, experts


def layer(h: int, width: int, experts: int, slots: int = 2, dtype: torch.dtype = torch.bfloat16):
    """(stored gate_up and down, tiles of all four weights, shared and routed adapters of bf16 numbers)."""
    g = torch.Generator(DEVICE).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=DEVICE, generator=g)

    def pair(n: int, k: int, *stack: int) -> LoRA:
        a, b = normal(slots, *stack, RANK, k) / k**0.5, normal(slots, *stack, n, RANK) * 0.3
        return LoRA(a.bfloat16().to(dtype), b.bfloat16().to(dtype))

    up = torch.arange(2 * width, device=DEVICE)[:, None] >= width
    gate_up = mxfp8.quantize(normal(2 * width, h) * torch.where(up, 3.0, 1.0) / h**0.5)
    down = mxfp8.quantize(normal(h, width) / width**0.5)
    w13, w2 = nvfp4.quantize(normal(experts, 2 * width, h) / h**0.5), nvfp4.quantize(normal(experts, h, width) / width**0.5)
    tiles = pack_experts(w13), pack_experts(w2), pack_linear(gate_up), pack_linear(down)
    shapes = (width, h), (width, h), (h, width)
    return (gate_up, down), tiles, MLPLoRA(*(pair(*s) for s in shapes)), ExpertLoRA(*(pair(*s, experts) for s in shapes))


@pytest.fixture(scope="module")
def wide():
    return layer(*WIDE)


def inputs(tokens: int, h: int, experts: int, top: int = 2, seed: int = 1):
    g = torch.Generator(DEVICE).manual_seed(seed)
    x = torch.randn(tokens, h, device=DEVICE, generator=g).bfloat16()
    ids = torch.randn(tokens, experts, device=DEVICE, generator=g).topk(top, 1).indices
    return x, ids, torch.rand(tokens, top, device=DEVICE, generator=g), torch.arange(tokens, device=DEVICE) % 3 - 1


def reference(x, stored, lora=None, slots=None):
    """fp64 with the roundings to bf16 that the operation has, gradients passing through them."""

    def rounded(t):
        return t + (t.bfloat16().double() - t).detach()

    def linear(x, weight, pair):
        out = x @ weight.mT
        for s in range(0 if pair is None else len(pair.a)):
            mask = torch.ones(len(x), 1, device=DEVICE) * (s == 0) if slots is None else (slots == s).double()[:, None]
            out = out + mask * (rounded(x @ pair.a[s].double().mT) @ pair.b[s].double().mT)
        return out

    gate_w, up_w = mxfp8.dequantize(stored[0]).double().chunk(2)
    gate, up, down = lora or (None, None, None)
    g, u = (rounded(linear(x.double(), w, p)) for w, p in ((gate_w, gate), (up_w, up)))
    act = rounded(g.clamp(max=7) * torch.sigmoid(1.702 * g.clamp(max=7)) * (u.clamp(-7, 7) + 1))
    return linear(act, mxfp8.dequantize(stored[1]).double(), down)


def distance(have, want) -> float:
    return ((have.double() - want.double()).norm() / want.double().norm()).item()


@pytest.mark.parametrize("tokens", [1, 3, 64, 100, 1024])
def test_mlp_of_m3_against_fp64(wide, tokens):
    stored, tiles, lora, _ = wide
    x, _, _, slots = inputs(tokens, WIDE[0], WIDE[2])
    for adapters, which in ((None, None), (lora, None), (lora, slots)):
        out = mlp(x, *tiles[2:], ACT, adapters, which)
        assert distance(out, reference(x, stored, adapters, which)) < 5e-3
    zero = MLPLoRA(*(LoRA(p.a, torch.zeros_like(p.b)) for p in lora))
    base = mlp(x, *tiles[2:], ACT)
    assert torch.equal(mlp(x, *tiles[2:], ACT, zero, slots), base)
    assert torch.equal(mlp(x, *tiles[2:], ACT, lora, slots)[slots < 0], base[slots < 0])


def test_rows_have_the_same_bits_stacked_and_alone(wide):
    """Gate and up, and projections that a host stacks with their adapters as one block-diagonal B."""
    stored, tiles, lora, _ = wide
    gate, up = (mxfp8.MXFP8Tensor(*(part.chunk(2)[i] for part in stored[0])) for i in (0, 1))
    for tokens in (1, 40, 300):
        x, _, _, slots = inputs(tokens, WIDE[0], WIDE[2])
        alone = torch.cat([lora_linear(x, pack_linear(w), p, slots) for w, p in ((gate, lora.gate), (up, lora.up))], dim=1)
        a = torch.cat((lora.gate.a, lora.up.a), dim=1)
        b = torch.stack([torch.block_diag(g, u) for g, u in zip(lora.gate.b, lora.up.b, strict=True)])
        assert torch.equal(lora_linear(x, tiles[2], LoRA(a, b), slots), alone)
        assert torch.equal(lora_linear(x, tiles[2]), torch.cat([lora_linear(x, pack_linear(w)) for w in (gate, up)], dim=1))
        # Slots told by token, as the engine tells them, or one for all, as the trainer has it.
        first = LoRA(a[:1], b[:1])
        assert torch.equal(lora_linear(x, tiles[2], LoRA(a, b), slots * 0), lora_linear(x, tiles[2], first))
        one = MLPLoRA(*(LoRA(p.a[:1], p.b[:1]) for p in lora))
        assert torch.equal(mlp(x, *tiles[2:], ACT, lora, slots * 0), mlp(x, *tiles[2:], ACT, one))
        # The MLP's one launch: its activation is SwiGLU of the very same gate and up.
        g, u = (half.float() for half in alone.chunk(2, dim=1))
        act = (g.clamp(max=7) * torch.sigmoid(1.702 * g.clamp(max=7)) * (u.clamp(-7, 7) + 1)).bfloat16()
        have = mlp(x, tiles[2], tiles[3], ACT, MLPLoRA(lora.gate, lora.up, None), slots)
        assert distance(have, lora_linear(act, tiles[3])) < 1e-3


def test_a_token_has_the_same_bits_in_any_batch_and_beside_anything(wide, monkeypatch):
    from samebits.kernels import mlp_fused

    _, tiles, lora, routed = wide
    x, ids, weights, slots = inputs(700, WIDE[0], WIDE[2])

    def run(part, adapters: bool):
        which = slots[part] if adapters else None
        shared = SharedExpert(*tiles[2:], lora if adapters else None)
        return moe_with_shared(x[part], *tiles[:2], ids[part], weights[part], shared, ACT, routed if adapters else None, which)

    for adapters in (False, True):
        whole = run(slice(None), adapters)
        which = slots if adapters else None
        parts = moe(x, *tiles[:2], ids, weights, ACT, routed if adapters else None, which)
        assert torch.equal(whole, parts + mlp(x, *tiles[2:], ACT, lora if adapters else None, which))
        for part in (slice(0, 1), slice(7, 8), slice(10, 30), slice(100, 180), slice(0, 512), slice(3, 700)):
            for beside in (0, 10**6):
                monkeypatch.setattr(mlp_fused, "BESIDE", beside)
                assert torch.equal(run(part, adapters), whole[part]), (part, beside)


@pytest.mark.parametrize("tokens", [9, 300])
@pytest.mark.parametrize("slotted", [False, True])
def test_gradients_against_fp64_autograd(tokens, slotted):
    h, width, experts = SMALL
    stored, tiles, lora, _ = layer(h, width, experts, 2 if slotted else 1, torch.float32)
    x, _, _, slots = inputs(tokens, h, experts)
    which = slots if slotted else None
    direction = torch.randn(tokens, h, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(5))
    leaves = {"x": x} | {f"{p}.{m}": getattr(getattr(lora, p), m) for p in lora._fields for m in "ab"}

    def gradients(call, dtype=None):
        own = {name: t.detach().to(dtype or t.dtype).clone().requires_grad_() for name, t in leaves.items()}
        out = call(own["x"], MLPLoRA(*(LoRA(own[f"{p}.a"], own[f"{p}.b"]) for p in lora._fields)))
        (out * direction.to(out.dtype)).sum().backward()
        return out.detach(), {name: t.grad for name, t in own.items()}

    want_out, want = gradients(lambda x, l: reference(x, stored, l, which), torch.float64)  # noqa: E741
    out, have = gradients(lambda x, l: mlp(x, *tiles[2:], ACT, l, which))  # noqa: E741
    assert distance(out, want_out) < 5e-3
    for name, grad in have.items():
        assert grad.dtype == leaves[name].dtype and distance(grad, want[name]) < 1e-2, name
    again = gradients(lambda x, l: mlp(x, *tiles[2:], ACT, l, which, recompute=True))  # noqa: E741
    assert torch.equal(again[0], out) and all(torch.equal(again[1][name], have[name]) for name in leaves)


def training_call(tiles, lora, routed, batch):
    """A function that gives output and all gradients of one forward and backward of `moe_with_shared`, or of its parts."""
    x, ids, weights, slots = batch
    adapters = [t for pair in (*routed, *lora) for t in pair]

    def call(fused: bool) -> list[torch.Tensor]:
        own = [t.detach().clone().requires_grad_() for t in (x, weights, *adapters)]
        pairs = [LoRA(a, b) for a, b in zip(own[2::2], own[3::2], strict=True)]
        shared, experts = SharedExpert(*tiles[2:], MLPLoRA(*pairs[3:])), ExpertLoRA(*pairs[:3])
        if fused:
            out = moe_with_shared(own[0], *tiles[:2], ids, own[1], shared, ACT, experts, slots)
        else:
            out = moe(own[0], *tiles[:2], ids, own[1], ACT, experts, slots) + mlp(own[0], *shared[:2], ACT, shared.lora, slots)
        out.square().sum().backward()
        return [out.detach(), *(t.grad for t in own)]

    return call


def test_gradients_are_those_of_the_parts_and_not_rounded():
    h, width, experts = SMALL
    _, tiles, lora, routed = layer(h, width, experts, 2, torch.float32)
    call = training_call(tiles, lora, routed, inputs(200, h, experts))
    fused, parts = call(True), call(False)
    for i, (have, want) in enumerate(zip(fused, parts, strict=True)):
        assert have.dtype == want.dtype and torch.equal(have, want), i
    for grad in fused[3:]:
        assert grad.dtype is torch.float32 and not torch.equal(grad, grad.bfloat16().float())
    _, _, lora, routed = layer(h, width, experts, 2)
    rounded = training_call(tiles, lora, routed, inputs(200, h, experts))(True)
    for have, want in zip(rounded[3:], fused[3:], strict=True):
        assert have.dtype is torch.bfloat16 and torch.equal(have, want.bfloat16())


def test_memory_of_two_streams_is_never_shared_too_early():
    """The same bits every time, while the allocator is kept busy from both sides."""
    h, width, experts = SMALL
    _, tiles, lora, routed = layer(h, width, experts, 2, torch.float32)
    call = training_call(tiles, lora, routed, inputs(90, h, experts))
    first, noise = call(True), torch.Generator(DEVICE).manual_seed(9)
    for _ in range(60):
        again = call(True)
        junk = [torch.randn(n, device=DEVICE, generator=noise) for n in (90 * h, 90 * width, 180 * width, 180 * h)]
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))
        del junk, again


def test_cuda_graph_replays_with_new_routes(wide):
    _, tiles, lora, routed = wide
    x, ids, weights, slots = inputs(48, WIDE[0], WIDE[2])
    shared = SharedExpert(*tiles[2:], lora)

    def call(x, ids, weights, slots):
        return moe_with_shared(x, *tiles[:2], ids, weights, shared, ACT, routed, slots)

    call(x, ids, weights, slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(x, ids, weights, slots)
    for seed in (3, 4):
        new = inputs(48, WIDE[0], WIDE[2], seed=seed)
        for old, fresh in zip((x, ids, weights), new, strict=False):
            old.copy_(fresh)
        for _ in range(3):
            graph.replay()
        assert torch.equal(out, call(*new))


def test_no_host_sync():
    h, width, experts = SMALL
    _, tiles, lora, routed = layer(h, width, experts, 2, torch.float32)
    x, ids, weights, slots = inputs(64, h, experts)
    x.requires_grad_()

    def step():
        moe_with_shared(x, *tiles[:2], ids, weights, SharedExpert(*tiles[2:], lora), ACT, routed, slots).sum().backward()

    step()
    torch.cuda.synchronize()
    x.grad = None
    try:
        torch.cuda.set_sync_debug_mode("error")  # raises where the host waits
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert x.grad.abs().sum() > 0


@pytest.mark.parametrize("tokens", [1, 40, 300, 1024])
def test_gate_and_up_split_over_ranks_have_the_bits_of_the_whole(wide, tokens):
    stored, tiles, lora, _ = wide
    gate, up = (mxfp8.MXFP8Tensor(*(part.chunk(2)[i] for part in stored[0])) for i in (0, 1))
    x, _, _, slots = inputs(tokens, WIDE[0], WIDE[2])
    with record() as recorder, torch.no_grad():
        want = mlp(x, *tiles[2:], ACT, lora, slots)

    def rows(pair, part):
        return LoRA(pair.a, pair.b.chunk(4, dim=1)[part])

    acts, outs = [], []
    with torch.no_grad():
        for part in range(4):
            g, u = (mxfp8.MXFP8Tensor(*(t.chunk(4)[part] for t in w)) for w in (gate, up))
            both = pack_linear(mxfp8.MXFP8Tensor(*(torch.cat(t) for t in zip(g, u, strict=True))))
            acts.append(mlp_activation(x, both, ACT, MLPLoRA(rows(lora.gate, part), rows(lora.up, part), None), slots))
        act = torch.cat(acts, 1)
        for part in range(4):
            down = pack_linear(mxfp8.MXFP8Tensor(*(t.chunk(4)[part] for t in stored[1])))
            outs.append(lora_linear(act, down, rows(lora.down, part), slots))
    assert torch.equal(act.cpu(), recorder.tensors()["activation"]) and torch.equal(torch.cat(outs, 1), want)

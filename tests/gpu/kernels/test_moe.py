"""The experts' Triton kernels on a GPU: fp64 from dequantised weights, bits that no batch may move, gradients, CUDA graphs."""

import pytest
import torch

from samebits.kernels.activation import SwiGLU
from samebits.kernels.expert_tiles import NVFP4Tiles, pack_experts, unpack_experts
from samebits.kernels.linear import LoRA
from samebits.kernels.moe import ExpertLoRA, moe
from samebits.quant import nvfp4

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
ACT = SwiGLU()


def layer(h: int, width: int, experts: int, slots: int, rank: int = 32, seed: int = 0):
    """(packed w13, packed w2, adapters): expert e is e + 1 times as large, slot s also."""
    g = torch.Generator("cuda").manual_seed(seed)
    size = torch.arange(1.0, experts + 1, device="cuda")[:, None, None] ** 0.5

    def normal(*shape: int):
        return torch.randn(shape, device="cuda", generator=g)

    def pair(n: int, k: int) -> LoRA:
        slot = torch.arange(1.0, slots + 1, device="cuda")[:, None, None, None]
        return LoRA((normal(slots, experts, rank, k) * slot / k**0.5).bfloat16(), (normal(slots, experts, n, rank) * 0.3 * size).bfloat16())

    w13 = nvfp4.quantize(normal(experts, 2 * width, h) * size / h**0.5)
    w2 = nvfp4.quantize(normal(experts, h, width) / size / width**0.5)
    return w13, w2, ExpertLoRA(pair(width, h), pair(width, h), pair(h, width))


def batch(tokens: int, h: int, experts: int, top: int = 4, seed: int = 1):
    g = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(tokens, h, device="cuda", generator=g).bfloat16()
    ids = torch.randn(tokens, experts, device="cuda", generator=g).topk(top, 1).indices
    return x, ids, torch.rand(tokens, top, device="cuda", generator=g)


def reference(x, w13, w2, ids, weights, lora=None, slots=None, rounded=False):
    """fp64, differentiable in x, weights and adapters (any dtype).

    `rounded`: gate, up and A x are rounded to bf16, as the operation has it, with the gradient passing through. Without that, values
    next to the clamp fall on its other side, and their gradients are none instead of all.
    """

    def bf16(t):
        return t + (t.bfloat16().double() - t).detach() if rounded else t

    dense13, dense2 = nvfp4.dequantize(w13).double(), nvfp4.dequantize(w2).double()
    out = torch.zeros(x.shape, dtype=torch.float64, device="cuda")
    slots = torch.zeros(len(x), dtype=torch.int64, device="cuda") if slots is None else slots

    def delta(pair, xs, e, where):
        if lora is None or pair is None:
            return 0
        masks = [(slots[where] == s).double()[:, None] for s in range(len(pair.a))]
        return sum(m * (bf16(xs @ pair.a[s, e].double().mT) @ pair.b[s, e].double().mT) for s, m in enumerate(masks))

    gates, ups, downs = lora or (None, None, None)
    for e in range(len(dense13)):
        token, choice = (ids == e).nonzero(as_tuple=True)
        xs = x[token].double()
        gate, up = (xs @ dense13[e].mT).chunk(2, dim=1)
        gate, up = bf16(gate + delta(gates, xs, e, token)), bf16(up + delta(ups, xs, e, token))
        gate, up = gate.clamp(max=7), up.clamp(-7, 7)
        act = gate * torch.sigmoid(1.702 * gate) * (up + 1)
        y = act @ dense2[e].mT + delta(downs, act, e, token)
        out = out.index_add(0, token, y * weights[token, choice].double()[:, None])
    return out


def distance(have, want) -> float:
    return ((have.double() - want.double()).norm() / want.double().norm()).item()


@pytest.fixture(scope="module")
def m3():
    """MiniMax-M3's width, 6 experts, two adapters."""
    w13, w2, lora = layer(6144, 3072, 6, 2)
    return w13, w2, pack_experts(w13), pack_experts(w2), lora


def test_tiles_give_the_bytes_back(m3):
    w13, w2, tiles13, tiles2, _ = m3
    for packed, tiles in ((w13, tiles13), (w2, tiles2)):
        assert all(torch.equal(a, b) for a, b in zip(unpack_experts(tiles), packed, strict=True))


@pytest.mark.parametrize("tokens", [1, 2, 3, 17, 64, 100, 1024, 8192])
def test_width_of_m3_against_fp64(m3, tokens):
    w13, w2, tiles13, tiles2, lora = m3
    x, ids, weights = batch(tokens, 6144, 6)
    slots = torch.arange(tokens, device="cuda") % 3 - 1
    for adapters, which in ((None, None), (lora, None), (lora, slots)):
        out = moe(x, tiles13, tiles2, ids, weights, ACT, adapters, which)
        # bf16 roundings of gate, up, act, u and the output; without them the distance is about 1e-6.
        assert distance(out, reference(x, w13, w2, ids, weights, adapters, which)) < 5e-3


@pytest.mark.parametrize("kind", ["all on one", "two of six", "one expert, every choice"])
def test_uneven_routes(m3, kind):
    w13, w2, tiles13, tiles2, lora = m3
    for tokens in (1, 5, 133):
        x, ids, weights = batch(tokens, 6144, 6)
        if kind == "all on one":
            ids = torch.tensor([[5, 2, 0, 1]], device="cuda").repeat(tokens, 1)
        elif kind == "two of six":
            ids, weights = torch.tensor([[4, 1]], device="cuda").repeat(tokens, 1), weights[:, :2].contiguous()
        else:
            ids = torch.full_like(ids, 3)
        out = moe(x, tiles13, tiles2, ids, weights, ACT, lora)
        assert distance(out, reference(x, w13, w2, ids, weights, lora)) < 5e-3


def test_a_token_has_the_same_bits_alone_and_in_any_batch_and_tile(m3, monkeypatch):
    from samebits.kernels import moe_fused
    from samebits.kernels.triton_moe import Cut

    _, _, tiles13, tiles2, lora = m3
    x, ids, weights = batch(300, 6144, 6)
    slots = torch.arange(300, device="cuda") % 3 - 1
    order = torch.randperm(300, device="cuda")
    for adapters, which in ((None, None), (lora, None), (lora, slots)):

        def run(part, adapters=adapters, which=which):
            return moe(x[part], tiles13, tiles2, ids[part], weights[part], ACT, adapters, None if which is None else which[part])

        whole = run(slice(None))
        for tile, rows, warps, stages in ((16, 32, 4, 4), (16, 64, 4, 5), (64, 64, 8, 4), (128, 64, 4, 2), (128, 128, 8, 3)):
            pair = (Cut(tile, rows, warps, stages), Cut(tile, min(128, 2 * rows), warps, stages))
            with monkeypatch.context() as m:
                m.setattr(moe_fused, "cuts", lambda pairs, experts, pair=pair: pair)
                # About 200, 40 and 13 pairs an expert: all widths of the larger tiles.
                for part in (slice(None), slice(100, 160), slice(10, 30)):
                    assert torch.equal(run(part), whole[part]), (tile, rows, part)
        assert torch.equal(run(order), whole[order])
        for part in (slice(0, 1), slice(7, 8), slice(10, 30), slice(100, 300)):
            assert torch.equal(run(part), whole[part]), part
        assert torch.equal(run(torch.full((40,), 9, device="cuda")), whole[9:10].expand(40, -1))


def test_zero_b_and_tokens_without_an_adapter_keep_their_bits(m3):
    _, _, tiles13, tiles2, lora = m3
    x, ids, weights = batch(70, 6144, 6)
    base = moe(x, tiles13, tiles2, ids, weights, ACT)
    zero = ExpertLoRA(*(LoRA(p.a, torch.zeros_like(p.b)) for p in lora))
    slots = torch.arange(70, device="cuda") % 3 - 1
    for which in (None, slots):
        assert torch.equal(moe(x, tiles13, tiles2, ids, weights, ACT, zero, which), base)
    out = moe(x, tiles13, tiles2, ids, weights, ACT, lora, slots)
    assert torch.equal(out[slots < 0], base[slots < 0]) and not (out == base)[slots >= 0].all(1).any()
    # The other slot's adapter may hold anything.
    poisoned = ExpertLoRA(*(LoRA(*(t.clone() for t in p)) for p in lora))
    for pair in poisoned:
        pair.a[1], pair.b[1] = float("nan"), float("nan")
    have = moe(x, tiles13, tiles2, ids, weights, ACT, poisoned, slots)
    assert torch.equal(have[slots < 1], out[slots < 1])


@pytest.mark.parametrize("part", ["gate", "up", "down"])
def test_each_expert_and_rank_of_each_projection(part):
    """One rank of one expert at a time has a constant of its own: the difference it makes is that one's, and only its tokens see it."""
    h, width, experts, rank = 256, 128, 5, 20
    w13, w2, _ = layer(h, width, experts, 1)
    tiles = pack_experts(w13), pack_experts(w2)
    n, k = (h, width) if part == "down" else (width, h)
    x, ids, weights = batch(40, h, experts, top=2)
    base = moe(x, *tiles, ids, weights, ACT)
    for e in range(experts):
        for r in (0, 7, rank - 1):
            a, b = torch.zeros(1, experts, rank, k, device="cuda"), torch.zeros(1, experts, n, rank, device="cuda")
            a[0, e, r] = 0.01 * (e + 1)
            b[0, e, :, r] = torch.linspace(0.5, 1 + r, n, device="cuda")
            only = ExpertLoRA(**{p: LoRA(a.bfloat16(), b.bfloat16()) if p == part else None for p in ("gate", "up", "down")})
            out = moe(x, *tiles, ids, weights, ACT, only)
            touched = (ids == e).any(1)
            assert torch.equal(out[~touched], base[~touched])
            want = reference(x, w13, w2, ids, weights, only)
            assert distance(out, want) < 5e-3
            assert distance(base[touched], want[touched]) > 2e-2


def test_an_expert_without_tokens_is_never_read(m3):
    _, _, tiles13, tiles2, _ = m3
    ids = torch.tensor([[0, 3], [3, 5]], device="cuda").repeat(20, 1)
    x, _, weights = batch(40, 6144, 6, top=2)
    g13, g2 = tiles13.global_scale.clone(), tiles2.global_scale.clone()
    g13[[1, 2, 4]], g2[[1, 2, 4]] = float("nan"), float("nan")
    out = moe(x, tiles13._replace(global_scale=g13), tiles2._replace(global_scale=g2), ids, weights, ACT)
    assert torch.equal(out, moe(x, tiles13, tiles2, ids, weights, ACT))


def test_odd_shapes():
    """Inputs that end within a chunk, outputs within a band, a rank below the padding."""
    for h, width, rank in ((144, 80, 4), (272, 48, 16), (1040, 208, 40)):
        w13, w2, lora = layer(h, width, 5, 2, rank)
        tiles = pack_experts(w13), pack_experts(w2)
        for tokens in (1, 37, 700):
            x, ids, weights = batch(tokens, h, 5, top=3)
            slots = torch.arange(tokens, device="cuda") % 3 - 1
            for adapters in (None, lora):
                out = moe(x, *tiles, ids.short(), weights, ACT, adapters, slots)
                assert distance(out, reference(x, w13, w2, ids, weights, adapters, slots)) < 5e-3


@pytest.mark.parametrize("tokens", [9, 60, 1500])
@pytest.mark.parametrize("slotted", [False, True])
def test_gradients_against_fp64_autograd(tokens, slotted):
    h, width, experts = 512, 256, 5
    w13, w2, lora = layer(h, width, experts, 2 if slotted else 1)
    tiles = pack_experts(w13), pack_experts(w2)
    x, ids, weights = batch(tokens, h, experts, top=2)
    ids[ids == 3] = 0  # an expert without tokens; some tokens choose expert 0 twice
    slots = torch.arange(tokens, device="cuda") % 3 - 1 if slotted else None
    direction = torch.randn(tokens, h, device="cuda", generator=torch.Generator("cuda").manual_seed(5))
    leaves = {"x": x, "weights": weights} | {f"{p}.{m}": getattr(getattr(lora, p), m) for p in lora._fields for m in "ab"}

    def gradients(call, dtype=None):
        own = {name: t.detach().to(dtype or t.dtype).clone().requires_grad_() for name, t in leaves.items()}
        adapters = ExpertLoRA(*(LoRA(own[f"{p}.a"], own[f"{p}.b"]) for p in lora._fields))
        out = call(own["x"], own["weights"], adapters)
        (out * direction.to(out.dtype)).sum().backward()
        return out.detach(), {name: t.grad for name, t in own.items()}

    want_out, want = gradients(lambda x, w, l: reference(x, w13, w2, ids, w, l, slots, True), torch.float64)  # noqa: E741
    out, have = gradients(lambda x, w, l: moe(x, *tiles, ids, w, ACT, l, slots))  # noqa: E741
    assert distance(out, want_out) < 5e-3
    for name in leaves:
        assert have[name].dtype == leaves[name].dtype
        assert distance(have[name], want[name]) < 1e-2, name
    again_out, again = gradients(lambda x, w, l: moe(x, *tiles, ids, w, ACT, l, slots, recompute=True))  # noqa: E741
    assert torch.equal(again_out, out) and all(torch.equal(again[name], have[name]) for name in leaves)
    with torch.no_grad():  # what the engine computes
        assert torch.equal(moe(x, *tiles, ids, weights, ACT, lora, slots), out)
    for name in leaves:
        if "." in name:
            assert not have[name][:, 3].any() and have[name][:, 0].any()


def test_the_base_stays_packed_and_recompute_keeps_less():
    w13, w2, lora = layer(512, 256, 5, 1)
    tiles = pack_experts(w13), pack_experts(w2)
    x, ids, weights = batch(64, 512, 5, top=2)
    kept = {}
    for recompute in (False, True):
        seen = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, seen=seen: seen.append(t) or t, lambda t: t):
            moe(x.clone().requires_grad_(), *tiles, ids, weights, ACT, lora, recompute=recompute)
        base = {part.data_ptr() for t in tiles for part in t[:3]}
        assert all(t.numel() < w13.codes.numel() * 2 for t in seen if t.data_ptr() not in base)
        kept[recompute] = sum(t.nbytes for t in seen)
    assert kept[False] - kept[True] == 128 * 512 * 2  # gate and up, bf16


def test_cuda_graph_replays_with_new_routes(m3):
    _, _, tiles13, tiles2, lora = m3
    x, ids, weights = batch(48, 6144, 6)
    slots = torch.zeros(48, dtype=torch.int64, device="cuda")
    moe(x, tiles13, tiles2, ids, weights, ACT, lora, slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe(x, tiles13, tiles2, ids, weights, ACT, lora, slots)
    for seed in (3, 4, 5):
        new = batch(48, 6144, 6, seed=seed)
        for old, fresh in zip((x, ids, weights), new, strict=True):
            old.copy_(fresh)
        slots.copy_(torch.arange(48, device="cuda") % 3 - 1)
        for _ in range(3):
            graph.replay()
        assert torch.equal(out, moe(*new[:1], tiles13, tiles2, *new[1:], ACT, lora, slots))


def test_no_host_sync():
    w13, w2, lora = layer(512, 256, 5, 1)
    tiles = pack_experts(w13), pack_experts(w2)
    x, ids, weights = batch(64, 512, 5, top=2)
    x.requires_grad_()
    moe(x, *tiles, ids, weights, ACT, lora).sum().backward()
    torch.cuda.synchronize()
    x.grad = None
    try:
        torch.cuda.set_sync_debug_mode("error")  # raises where the host waits
        moe(x, *tiles, ids, weights, ACT, lora).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert x.grad.abs().sum() > 0


def test_tiles_in_fp32_or_on_cpu_take_the_reference():
    w13, w2, lora = layer(128, 64, 3, 1)
    tiles = pack_experts(w13), pack_experts(w2)
    x, ids, weights = batch(6, 128, 3, top=2)
    lora = ExpertLoRA(*(LoRA(p.a.float(), p.b.float()) for p in lora))
    assert torch.equal(moe(x.float(), *tiles, ids, weights, ACT, lora), moe(x.float(), w13, w2, ids, weights, ACT, lora))
    cpu = [NVFP4Tiles(*(part.cpu() for part in t[:3]), t.inputs) for t in tiles]
    out = moe(x.cpu(), *cpu, ids.cpu(), weights.cpu(), ACT)
    assert distance(out, reference(x, w13, w2, ids, weights).cpu()) < 1e-2

"""Experts on two GPUs against one that has them all: bits of results and gradients, over NCCL and over peer memory."""

import pytest
import torch

from samebits.kernels.activation import SwiGLU
from samebits.kernels.expert_pairs import some_experts
from samebits.kernels.expert_routes import owned
from samebits.kernels.expert_tiles import pack_experts
from samebits.kernels.linear import LoRA
from samebits.kernels.moe import ExpertLoRA, moe
from samebits.kernels.triton_moe import Cut
from samebits.kernels.triton_moe_grad import BackCut
from samebits.quant import nvfp4
from tests.support.ranks import on_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")]
ACT = SwiGLU()
H, WIDTH, E, TOP, R, SLOTS = 6144, 3072, 10, 4, 32, 2
# name: tokens of each rank, adapters, slots, all tokens to the experts of one rank
CASES = {
    "base": ((33, 20), False, False, False),
    "adapters": ((300, 257), True, False, False),
    "slots": ((40, 64), True, True, False),
    "a rank without tokens": ((0, 65), True, True, False),
    "one token": ((1, 0), True, False, False),
    "all to one rank": ((50, 31), True, False, True),
    "many tokens": ((1500, 1100), True, False, False),
}
NAMES = ("x", "weights", "gate.a", "gate.b", "up.a", "up.b", "down.a", "down.b")


def layer():
    g = torch.Generator("cuda").manual_seed(0)
    size = torch.arange(1.0, E + 1, device="cuda")[:, None, None] ** 0.5

    def normal(*shape: int):
        return torch.randn(shape, device="cuda", generator=g)

    def pair(n: int, k: int) -> LoRA:
        slot = torch.arange(1.0, SLOTS + 1, device="cuda")[:, None, None, None]
        return LoRA((normal(SLOTS, E, R, k) * slot / k**0.5).bfloat16(), (normal(SLOTS, E, n, R) * 0.3 * size).bfloat16())

    tiles = (
        pack_experts(nvfp4.quantize(normal(E, 2 * WIDTH, H) * size / H**0.5)),
        pack_experts(nvfp4.quantize(normal(E, H, WIDTH) / size / WIDTH**0.5)),
    )
    return tiles, ExpertLoRA(pair(WIDTH, H), pair(WIDTH, H), pair(H, WIDTH))


def batch(name: str, seed: int = 1):
    tokens, _, slotted, narrow = CASES[name]
    count = sum(tokens)
    g = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(count, H, device="cuda", generator=g).bfloat16()
    ids = torch.randn(count, E // 2 if narrow else E, device="cuda", generator=g).topk(TOP, 1).indices
    if narrow:
        ids += E // 2
    slots = torch.randint(-1, SLOTS, (count,), device="cuda", generator=g) if slotted else None
    return x, ids, torch.rand(count, TOP, device="cuda", generator=g), slots


def gradients(call, x, weights, lora, scale):
    leaves = [t.clone().requires_grad_() for t in (x, weights, *(t for p in lora or () for t in p))]
    adapter = ExpertLoRA(*(LoRA(a, b) for a, b in zip(leaves[2::2], leaves[3::2], strict=True))) if lora else None
    out = call(leaves[0], leaves[1], adapter)
    (out.float() * scale).sum().backward()
    return out.detach(), [t.grad for t in leaves]


def worker(rank: int, world: int) -> dict:
    """Which things are equal to one rank's, by name."""
    from samebits.kernels import moe_fused, triton_moe, triton_moe_grad
    from samebits.kernels.expert_parallel import expert_parallel_moe
    from samebits.kernels.expert_peers import PeerExperts

    # One tiling for any number of tokens, so that few kernels are compiled; that no bit depends on it is test_moe's to show.
    triton_moe.cuts = moe_fused.cuts = lambda pairs, experts: (Cut(128, 64, 4, 2), Cut(128, 128, 4, 2))
    triton_moe_grad.back_cut = moe_fused.back_cut = lambda pairs, experts: BackCut(128, 64, 4, 3)
    tiles, lora = layer()
    first, end = owned(E, world, rank)
    shards = [some_experts(t, first, end) for t in tiles]
    mine_lora = ExpertLoRA(*(LoRA(p.a[:, first:end], p.b[:, first:end]) for p in lora))
    peers = PeerExperts(E, TOP, H, 1600)
    equal = {}
    for name, (tokens, adapted, slotted, _) in CASES.items():
        x, ids, weights, slots = batch(name)
        mine = slice(sum(tokens[:rank]), sum(tokens[: rank + 1]))
        whole, own = (lora, mine_lora) if adapted else (None, None)
        slot = None if slots is None else slots[mine]
        want = moe(x, *tiles, ids, weights, ACT, whole, slots)
        for parts in (1, 3, 8):
            have = peers(x[mine], *shards, ids[mine], weights[mine], ACT, own, slot, parts)
            equal[f"{name}: peer memory, {parts} parts"] = torch.equal(have, want[mine])

        def spread(x, w, a, parts, recompute=False):
            return expert_parallel_moe(
                x, *shards, ids[mine], w, ACT, a, slot, experts=E, parts=parts, recompute=recompute  # noqa: B023
            )  # fmt: skip

        equal[f"{name}: NCCL"] = torch.equal(spread(x[mine], weights[mine], own, 2), want[mine])
        if slotted or not adapted:
            continue
        scale = torch.randn(len(x), H, device="cuda", generator=torch.Generator("cuda").manual_seed(5))
        out, grads = gradients(lambda x, w, a: moe(x, *tiles, ids, w, ACT, a), x, weights, whole, scale)  # noqa: B023
        for parts, recompute in ((1, False), (3, True)):
            have, found = gradients(lambda x, w, a: spread(x, w, a, parts, recompute), x[mine], weights[mine], own, scale[mine])  # noqa: B023
            equal[f"{name}: training over NCCL, {parts} parts"] = torch.equal(have, out[mine])
            for i, (a, b) in enumerate(zip(found, grads, strict=True)):
                part = b[mine] if i < 2 else b[:, first:end]
                equal[f"{name}: {NAMES[i]}, {parts} parts"] = torch.equal(a, part) and bool(b.any())
    equal |= replays(rank, peers, tiles, shards)
    return equal


def replays(rank: int, peers, tiles, shards) -> dict[str, bool]:
    """A CUDA graph with other tokens and routes at every replay, and no wait of the host."""
    x, ids, weights, _ = batch("base")
    mine = slice(0, 20) if rank == 0 else slice(33, 53)
    held = [t[mine].clone() for t in (x, ids, weights)]
    peers(held[0], *shards, held[1], held[2], ACT)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        peers(held[0], *shards, held[1], held[2], ACT)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = peers(held[0], *shards, held[1], held[2], ACT, None, None, 2)
    equal = {}
    for seed in (7, 8, 9, 7):
        fresh = batch("base", seed)[:3]
        for old, new in zip(held, fresh, strict=True):
            old.copy_(new[mine])
        graph.replay()
        equal[f"replay {seed}"] = torch.equal(out, moe(fresh[0], *tiles, *fresh[1:], ACT)[mine])
    return equal


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    pytest.importorskip("triton")
    return on_ranks(2, worker, tmp_path_factory.mktemp("experts"), "nccl")


def test_every_rank_has_the_bits_of_one(found):
    assert len(found[0]) > 90
    assert [[name for name, same in equal.items() if not same] for equal in found] == [[], []]

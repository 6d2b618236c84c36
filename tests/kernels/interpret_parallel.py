"""The kernels that exchange rows and candidates between GPUs, on CPU: `TRITON_INTERPRET=1 python -m tests.kernels.interpret_parallel`.

One process plays all ranks: their memory is CPU tensors, addressed as peer memory is, and each step is done for every rank before the
next. What is shown is addresses, tags, orders and masks; that ranks wait for one another is left to tests/gpu.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch

from samebits.kernels import expert_pairs, expert_parallel, moe_fused, msa_ops, triton_moe, triton_moe_grad, triton_msa
from samebits.kernels.activation import SwiGLU
from samebits.kernels.expert_pairs import some_experts
from samebits.kernels.expert_peers import PeerExperts, _Work
from samebits.kernels.expert_routes import owned
from samebits.kernels.expert_tiles import pack_experts
from samebits.kernels.index_parallel import exchange
from samebits.kernels.linear import LoRA
from samebits.kernels.moe import ExpertLoRA
from samebits.kernels.msa import SparseConfig
from samebits.kernels.triton_moe import Cut
from samebits.kernels.triton_moe_grad import BackCut
from samebits.kernels.triton_tiles import INTERPRETED
from samebits.quant import nvfp4
from tests.support.msa_cases import make
from tests.support.ranks import on_ranks
from tests.support.spread_pages import spread

H, WIDTH, E, TOP, R, SLOTS, ROOM = 144, 48, 5, 3, 4, 2, 5
TOKENS = {2: (5, 3), 3: (4, 0, 2)}


def check(name: str, condition: bool) -> None:
    """Stop with the case's name."""
    if not condition:
        raise SystemExit(f"{name}: differs")


def shared(tensors: list[torch.Tensor]) -> list[SimpleNamespace]:
    """Peer memory of ranks that are none."""
    addresses = torch.tensor([t.data_ptr() for t in tensors])
    return [SimpleNamespace(local=t, addresses=addresses, barrier=lambda channel: None) for t in tensors]


def inboxes(world: int, room: int, topk: int) -> list[SimpleNamespace]:
    """One for each rank, full of what the tags of other calls may have left."""
    memory = shared([torch.full((2, world, room, topk), 501 << 54) for _ in range(world)])
    return [
        SimpleNamespace(shared=m, words=m.local, room=room, addresses=m.addresses, calls=torch.zeros(room, dtype=torch.int32))
        for m in memory
    ]


def choices() -> None:
    """Several calls over the same inboxes: other queries, other contexts, fewer rows, and past the end of the count of calls."""
    for world, config in ((2, SparseConfig()), (3, SparseConfig(topk=8, init_blocks=1, local_blocks=2))):
        boxes = inboxes(world, 8, config.topk)
        for box in boxes:
            box.calls += 998
        for seed, (new, total) in enumerate((([1, 1], [2306, 200]), ([2], [3500]), ([1, 1], [2306, 1]), ([1], [1000]))):
            case = make(new, total, "nvfp4", groups=2, heads=2, integers=True, seed=seed)
            want = msa_ops.index_topk(case.index_q, case.index, case.batch, config)
            dealt = spread(case.index, case.batch, world)
            scores = [triton_msa.index_scores(case.index_q, keys, share.local) for keys, share in dealt]
            out = [torch.full_like(want, -7) for _ in dealt]
            for send in (True, False):
                for (_, share), s, box, o in zip(dealt, scores, boxes, out, strict=True):
                    exchange(s, share, config, box, o, send=send, merge=not send)
            for o in out:
                check(f"choice on {world} ranks, call {seed}", torch.equal(o, want))


def small_tiles() -> None:
    """Tiles of 16 pairs, and a shrink in several parts."""
    triton_moe.SHRINK_PART = 64
    triton_moe.cuts = moe_fused.cuts = lambda pairs, experts: (Cut(16, 32, 4, 3), Cut(16, 64, 4, 3))
    moe_fused.back_cut = triton_moe_grad.back_cut = lambda pairs, experts: BackCut(16, 32, 4, 3)


def layer(world: int):
    """(tokens of each rank, tiles, adapters, x, ids, weights, slots) of all ranks together; a token may choose an expert twice."""
    g = torch.Generator().manual_seed(world)
    size = torch.arange(1.0, E + 1)[:, None, None]
    w13 = nvfp4.quantize(torch.randn(E, 2 * WIDTH, H, generator=g) * size / H**0.5)
    w2 = nvfp4.quantize(torch.randn(E, H, WIDTH, generator=g) / size / WIDTH**0.5)
    slot = torch.tensor([1.0, -2.0])[:, None, None, None]

    def pair(n: int, k: int) -> LoRA:
        a, b = torch.randn(SLOTS, E, R, k, generator=g) * slot / k**0.5, torch.randn(SLOTS, E, n, R, generator=g) * 0.3 * size
        return LoRA(a.bfloat16(), b.bfloat16())

    lora = ExpertLoRA(pair(WIDTH, H), pair(WIDTH, H), pair(H, WIDTH))
    tokens = TOKENS[world]
    count = sum(tokens)
    x = torch.randn(count, H, generator=g).bfloat16()
    ids, weights = torch.randint(0, E, (count, TOP), generator=g), torch.rand(count, TOP, generator=g)
    return tokens, (pack_experts(w13), pack_experts(w2)), lora, x, ids, weights, torch.randint(-1, SLOTS, (count,), generator=g)


def shard(tiles, lora: ExpertLoRA, world: int, rank: int):
    """A rank's experts and adapters."""
    first, end = owned(E, world, rank)
    return [some_experts(t, first, end) for t in tiles], ExpertLoRA(*(LoRA(p.a[:, first:end], p.b[:, first:end]) for p in lora))


def experts_over_peer_memory() -> None:
    """Every step for all ranks, against one that has all tokens and experts, twice over the same memory and in several parts."""
    act = SwiGLU()
    for world in TOKENS:
        tokens, tiles, lora, x, ids, weights, slots = layer(world)
        rows = shared([torch.full((world * ROOM, H), float("nan")).bfloat16() for _ in tokens])
        routes = shared([torch.full((ROOM, TOP + 1), 9, dtype=torch.int32) for _ in tokens])
        results = shared([torch.full((ROOM * TOP, H), float("nan")) for _ in tokens])
        peers = [PeerExperts.__new__(PeerExperts) for _ in tokens]
        for rank, p in enumerate(peers):
            p._set_up(E, ROOM, world, rank, rows[rank], routes[rank], results[rank])
        for parts, adapted, slotted in ((1, True, True), (3, False, False), (3, True, True)):
            want = moe_fused.fused_experts(x, *tiles, ids, weights, act, lora if adapted else None, slots if slotted else None, False)
            works, begin = [], 0
            for rank, p in enumerate(peers):
                mine = slice(begin, begin + tokens[rank])
                begin = mine.stop
                (w13, w2), own = shard(tiles, lora, world, rank)
                slot = slots[mine] if slotted else None
                works.append((_Work(p, x[mine], w13, w2, ids[mine], act, own if adapted else None, slot, parts), weights[mine]))
            for step in ("publish", "plan"):
                for work, _ in works:
                    getattr(work, step)()
            check("parts", max(work.parts for work, _ in works) == parts)
            for step in ("pull", "compute", "push"):
                for work, _ in works:
                    for part in range(work.parts):
                        getattr(work, step)(part)
            have = torch.cat([work.combine(w) for work, w in works])
            check(f"experts over peer memory, {world} ranks, {parts} parts", torch.equal(have, want))


def over_gloo(rank: int, world: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Output and gradients of a rank, by the kernels."""
    small_tiles()
    for module in (expert_pairs, expert_parallel):
        module.takes_kernels = lambda *_: True
    tokens, tiles, lora, x, ids, weights, slots = layer(world)
    mine = slice(sum(tokens[:rank]), sum(tokens[: rank + 1]))
    shards, own = shard(tiles, lora, world, rank)
    found = []
    for recompute in (False, True):
        leaves = [t.clone().requires_grad_() for t in (x[mine], weights[mine], *(t for p in own for t in p))]
        adapter = ExpertLoRA(*(LoRA(a, b) for a, b in zip(leaves[2::2], leaves[3::2], strict=True)))
        out = expert_parallel.expert_parallel_moe(
            leaves[0], *shards, ids[mine], leaves[1], SwiGLU(), adapter, slots[mine], experts=E, parts=2, recompute=recompute
        )
        (out.float() * torch.arange(1.0, sum(tokens) + 1)[mine, None]).sum().backward()
        found.append((out.detach(), [t.grad for t in leaves]))
    check("recomputing", all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True)))
    return found[0]


def training_over_gloo() -> None:
    """Bits of output and gradients of one rank that has all."""
    world = 2
    tokens, tiles, lora, x, ids, weights, slots = layer(world)
    leaves = [t.clone().requires_grad_() for t in (x, weights, *(t for p in lora for t in p))]
    adapter = ExpertLoRA(*(LoRA(a, b) for a, b in zip(leaves[2::2], leaves[3::2], strict=True)))
    out = moe_fused.fused_experts(leaves[0], *tiles, ids, leaves[1], SwiGLU(), adapter, slots, False)
    (out.float() * torch.arange(1.0, sum(tokens) + 1)[:, None]).sum().backward()
    with tempfile.TemporaryDirectory() as folder:
        results = on_ranks(world, over_gloo, Path(folder))
    check("output over gloo", torch.equal(torch.cat([r[0] for r in results]), out))
    for i, leaf in enumerate(leaves):
        have = torch.cat([r[1][i] for r in results], 0 if i < 2 else 1)
        check(f"gradient {i} over gloo", torch.equal(have, leaf.grad) and leaf.grad.any())


def main() -> None:
    """All cases."""
    if not INTERPRETED:
        raise SystemExit("set TRITON_INTERPRET=1")
    small_tiles()
    choices()
    experts_over_peer_memory()
    training_over_gloo()
    print("same results")


if __name__ == "__main__":
    main()

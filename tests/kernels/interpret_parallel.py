"""The kernels that exchange rows and candidates between GPUs, on CPU: `TRITON_INTERPRET=1 python -m tests.kernels.interpret_parallel`.

Three processes of a gloo group map each other's memory from files and address it as GPUs address peer memory, so that they wait for one
another as GPUs do, by tags and by barriers, and run ahead of one another where they may. Streams are the one thing that is missing: what
a call gives to its side stream is done at once. The same ranks then train through gloo, with the kernels. All is compared with one
process that has all tokens, experts and pages.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor

from samebits.kernels import expert_pairs, expert_parallel, moe_fused, msa_ops, triton_moe, triton_moe_grad, triton_msa
from samebits.kernels.activation import SwiGLU
from samebits.kernels.expert_pairs import some_experts
from samebits.kernels.expert_peers import PeerExperts
from samebits.kernels.expert_routes import owned
from samebits.kernels.expert_tiles import pack_experts
from samebits.kernels.index_parallel import Inbox, exchange, split_index_topk
from samebits.kernels.linear import LoRA
from samebits.kernels.moe import ExpertLoRA
from samebits.kernels.msa import SparseConfig
from samebits.kernels.triton_moe import Cut
from samebits.kernels.triton_moe_grad import BackCut
from samebits.kernels.triton_tiles import INTERPRETED
from samebits.quant import nvfp4
from tests.support.mapped_memory import FOLDER, Line, Mapped
from tests.support.msa_cases import make
from tests.support.ranks import on_ranks
from tests.support.spread_pages import spread

WORLD, TOKENS, ROOM = 3, (3, 0, 2), 4
H, WIDTH, E, TOP, R, SLOTS = 80, 32, 4, 2, 4, 2
ACT = SwiGLU()
# (new tokens, all tokens) of each call of the indexer, and its configuration; the rows of an inbox are used more and less often.
CONTEXTS = (([1, 1], [1000, 200]), ([2], [1100]), ([1, 1], [900, 1]), ([1], [600]), ([1], [1300]))
CONFIGS = (SparseConfig(topk=4), SparseConfig(topk=4, init_blocks=1, local_blocks=2))
CALLS = ((1, True, False, ROOM), (3, True, True, 3), (1, True, True, ROOM))  # of the experts: parts, adapters, slots, room


def check(name: str, condition: bool) -> None:
    """Stop with the case's name."""
    if not condition:
        raise SystemExit(f"{name}: differs")


def small_tiles() -> None:
    """Tiles of 16 pairs, and a shrink in several parts."""
    triton_moe.SHRINK_PART = 64
    triton_moe.cuts = moe_fused.cuts = lambda pairs, experts: (Cut(16, 32, 4, 3), Cut(16, 64, 4, 3))
    moe_fused.back_cut = triton_moe_grad.back_cut = lambda pairs, experts: BackCut(16, 32, 4, 3)


def layer() -> tuple[list, ExpertLoRA]:
    """Tiles and adapters, every expert and slot of a size of its own."""
    g = torch.Generator().manual_seed(0)
    size = torch.arange(1.0, E + 1)[:, None, None]
    w13 = nvfp4.quantize(torch.randn(E, 2 * WIDTH, H, generator=g) * size / H**0.5)
    w2 = nvfp4.quantize(torch.randn(E, H, WIDTH, generator=g) / size / WIDTH**0.5)
    slot = torch.tensor([1.0, -2.0])[:, None, None, None]

    def pair(n: int, k: int) -> LoRA:
        a, b = torch.randn(SLOTS, E, R, k, generator=g) * slot / k**0.5, torch.randn(SLOTS, E, n, R, generator=g) * 0.3 * size
        return LoRA(a.bfloat16(), b.bfloat16())

    return [pack_experts(w13), pack_experts(w2)], ExpertLoRA(pair(WIDTH, H), pair(WIDTH, H), pair(H, WIDTH))


def batch(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, ids, weights and slots of all ranks; a token may choose an expert twice."""
    g = torch.Generator().manual_seed(seed)
    count = sum(TOKENS)
    x, weights = torch.randn(count, H, generator=g).bfloat16(), torch.rand(count, TOP, generator=g)
    return x, torch.randint(0, E, (count, TOP), generator=g), weights, torch.randint(-1, SLOTS, (count,), generator=g)


def gradients(call, x: Tensor, weights: Tensor, lora: ExpertLoRA, scale: Tensor) -> list[Tensor]:
    """Output, and the gradients of x, weights and the six adapter tensors."""
    leaves = [t.clone().requires_grad_() for t in (x, weights, *(t for p in lora for t in p))]
    out = call(leaves[0], leaves[1], ExpertLoRA(*(LoRA(a, b) for a, b in zip(leaves[2::2], leaves[3::2], strict=True))))
    (out.float() * scale[:, None]).sum().backward()
    return [out.detach(), *(t.grad for t in leaves)]


def case_of(call: int):
    """A call's pages and queries."""
    return make(*CONTEXTS[call], "nvfp4", groups=2, heads=2, integers=True, seed=call)


def tagged(words: Tensor, tag: int) -> int:
    """Words of an inbox's first row that have a tag: 1 + the count of calls modulo 500."""
    return int((words[:, :, 0] >> 54 == tag).sum())


def choices(rank: int) -> list[Tensor]:
    """Every call with every configuration, past the end of the count of calls; no rank waits for another but by the tags."""
    found = []
    for number, config in enumerate(CONFIGS):
        memory = Mapped(f"inbox{number}", (2, WORLD, 8, config.topk), torch.int64, 501 << 54)
        calls = torch.full((8,), 998, dtype=torch.int32)
        inbox = SimpleNamespace(shared=memory, words=memory.local, room=8, addresses=memory.addresses, calls=calls)
        for call in range(len(CONTEXTS)):
            case = case_of(call)
            keys, share = spread(case.index, case.batch, WORLD)[rank]
            scores = triton_msa.index_scores(case.index_q, keys, share.local)
            out = torch.full((*case.index_q.shape[:2], config.topk), -7, dtype=torch.int32)
            if (rank, call) == (1, 1):
                # The others have what they need of this rank, and write of their next call before it reads of this one.
                exchange(scores, share, config, inbox, out, send=True, merge=False)
                while tagged(memory.local, 1) < (WORLD - 1) * config.topk:
                    time.sleep(0.01)
                check("an inbox that was written to too early", tagged(memory.local, 500) == WORLD * config.topk)
                exchange(scores, share, config, inbox, out, send=False, merge=True)
            else:
                exchange(scores, share, config, inbox, out, send=True, merge=True)
            found.append(out)
    return found


def whole_case():
    """Several queries a request, requests of fewer pages than ranks, scales that saturate when they are read as E4M3."""
    case = make([1, 3, 1], [129, 700, 3], "nvfp4", groups=2, heads=2, seed=9)
    scales = case.index.data.view(len(case.index.data), -1)[..., 8192:]
    scales[torch.rand(scales.shape, generator=torch.Generator().manual_seed(1)) < 0.02] = 0x7E
    return case


def whole_calls(rank: int) -> list[Tensor]:
    """`split_index_topk` by the kernels, two queries at a time, over each kind of inbox, read as stored and as E4M3."""
    msa_ops._kernels_take = lambda *_: True
    case, config = whole_case(), CONFIGS[0]
    keys, share = spread(case.index, case.batch, WORLD)[rank]
    memory = Mapped("whole", (2, WORLD, 4, config.topk), torch.int64, 501 << 54)
    calls = torch.zeros(4, dtype=torch.int32)
    mapped = SimpleNamespace(shared=memory, words=memory.local, room=4, addresses=memory.addresses, calls=calls)
    own = Inbox(4, config.topk, peers=False, gather=lambda out, mine: dist.all_gather(list(out.unbind()), mine.clone()))
    found = []
    for inbox in (mapped, Inbox(4, config.topk, peers=False), own):
        for rounded in (False, True):
            found.append(split_index_topk(case.index_q, keys, share, config, inbox, rounded=rounded))
    check("rows of an inbox that were used", calls.tolist() == [6, 6, 4, 4])
    return found


def peer_calls(rank: int, mine: slice, shards: list, own: ExpertLoRA) -> list[Tensor]:
    """Calls over the same memory, which holds NaN where nobody wrote."""
    torch.cuda.current_stream, torch.cuda.stream = Line, lambda line: contextlib.nullcontext()
    peers = PeerExperts.__new__(PeerExperts)
    nan = float("nan")
    rows, results = (Mapped(n, s, t, nan) for n, s, t in (("x", (WORLD * ROOM, H), torch.bfloat16), ("y", (ROOM * TOP, H), torch.float32)))
    peers._set_up(E, ROOM, WORLD, rank, rows, Mapped("routes", (ROOM, TOP + 1), torch.int32, 9), results)
    peers.side = Line()
    found = []
    for seed, (parts, adapted, slotted, room) in enumerate(CALLS):
        x, ids, weights, slots = (t[mine] for t in batch(seed))
        run = peers if room == ROOM else peers.smaller(room)
        found.append(run(x, *shards, ids, weights, ACT, own if adapted else None, slots if slotted else None, parts))
    return found


def trained(mine: slice, shards: list, own: ExpertLoRA) -> list[Tensor]:
    """Output and gradients of a rank over gloo, by the kernels."""
    expert_pairs.takes_kernels = expert_parallel.takes_kernels = lambda *_: True
    x, ids, weights, slots = (t[mine] for t in batch(0))
    found = []
    for recompute in (False, True):

        def call(x: Tensor, w: Tensor, a: ExpertLoRA, recompute: bool = recompute) -> Tensor:
            run = expert_parallel.expert_parallel_moe
            return run(x, *shards, ids, w, ACT, a, slots, experts=E, parts=2, recompute=recompute)

        found.append(gradients(call, x, weights, own, torch.arange(1.0, sum(TOKENS) + 1)[mine]))
    check("recomputing", all(torch.equal(a, b) for a, b in zip(*found, strict=True)))
    return found[0]


def worker(rank: int, world: int) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    """All that a rank computes."""
    small_tiles()
    tiles, lora = layer()
    first, end = owned(E, world, rank)
    mine = slice(sum(TOKENS[:rank]), sum(TOKENS[: rank + 1]))
    shards, own = [some_experts(t, first, end) for t in tiles], ExpertLoRA(*(LoRA(p.a[:, first:end], p.b[:, first:end]) for p in lora))
    return choices(rank), peer_calls(rank, mine, shards, own), trained(mine, shards, own), whole_calls(rank)


def main() -> None:
    """Start the ranks and compare."""
    if not INTERPRETED:
        raise SystemExit("set TRITON_INTERPRET=1")
    small_tiles()
    with tempfile.TemporaryDirectory() as folder:
        os.environ[FOLDER] = folder
        results = on_ranks(WORLD, worker, Path(folder))
    for number, config in enumerate(CONFIGS):
        for call in range(len(CONTEXTS)):
            case = case_of(call)
            want = msa_ops.index_topk(case.index_q, case.index, case.batch, config)
            for chosen, *_ in results:
                check(f"choice {number}, call {call}", torch.equal(chosen[number * len(CONTEXTS) + call], want))
    case = whole_case()
    wants = [msa_ops.index_topk(case.index_q, case.index, case.batch, CONFIGS[0], rounded=rounded) for rounded in (False, True)]
    check("reads that round", not torch.equal(*wants))
    for *_, chosen in results:
        check("choices of whole calls", len(chosen) == 6 and all(torch.equal(c, wants[i % 2]) for i, c in enumerate(chosen)))
    tiles, lora = layer()
    for seed, (_, adapted, slotted, _) in enumerate(CALLS):
        x, ids, weights, slots = batch(seed)
        want = moe_fused.fused_experts(x, *tiles, ids, weights, ACT, lora if adapted else None, slots if slotted else None, False)
        check(f"experts over peer memory, call {seed}", torch.equal(torch.cat([calls[seed] for _, calls, *_ in results]), want))
    x, ids, weights, slots = batch(0)

    def one(x: Tensor, w: Tensor, a: ExpertLoRA) -> Tensor:
        return moe_fused.fused_experts(x, *tiles, ids, w, ACT, a, slots, False)

    wants = gradients(one, x, weights, lora, torch.arange(1.0, sum(TOKENS) + 1))
    for i, want in enumerate(wants):
        have = torch.cat([one[i] for _, _, one, _ in results], 0 if i < 3 else 1)
        check(f"trained tensor {i}", torch.equal(have, want) and bool(want.any()))
    print("same results")


if __name__ == "__main__":
    main()

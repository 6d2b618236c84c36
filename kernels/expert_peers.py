"""Routed experts over the GPUs of one host by peer memory, for inference: nothing is known on the host, everything can be replayed.

The bits are those of `moe` on one GPU, as in `expert_parallel`, and for the same reason. Here ranks read and write each other's memory
(`peer_memory`), so that neither counts nor buffers of a fixed share for each rank are needed:

    publish   a rank's tokens and routes into memory that all can read; a barrier
    plan      each rank reads all routes and sorts the pairs of its experts into tiles, which are cut into `parts` runs
    pull      the rows that a part needs and no part before it, by a stream of its own      | for each part, one
    compute   gate, up, down: the kernels of `triton_moe` on the part's tiles               | behind the other
    push      result rows to their tokens' own ranks, by that stream
    combine   after a second barrier, the sum of `moe`

A row is read by a rank once, and moved only where it is needed. Parts are runs of tiles, not ranges of experts: their number of
programs is known on the host, and the tiles that no pair needed (their number is bounded by all pairs of all ranks) lie in the last parts.
Memory: `room` rows bf16 of each rank and k fp32 rows for each own token, and while it runs about as many of those again.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .activation import SwiGLU
from .expert_routes import owned
from .expert_tiles import NVFP4Tiles
from .linear import LoRA
from .moe import ExpertLoRA
from .peer_memory import First, PeerMemory, Shared

MANY = 4096  # pairs of a rank from which on it computes in parts
PARTS = 8


class PeerExperts:
    """What layers of one shape share, one after the other. All ranks construct it, and call it alike."""

    def __init__(self, experts: int, top_k: int, hidden: int, room: int, group: dist.ProcessGroup | None = None) -> None:
        """`room`: no rank has more tokens in a call. Raises `RuntimeError` where the GPUs cannot address each other."""
        world, rank = dist.get_world_size(group), dist.get_rank(group)
        self._set_up(
            experts,
            room,
            world,
            rank,
            PeerMemory((world * room, hidden), torch.bfloat16, group),
            PeerMemory((room, top_k + 1), torch.int32, group),
            PeerMemory((room * top_k, hidden), torch.float32, group),
        )
        self.side = torch.cuda.Stream(priority=-1)

    def _set_up(self, experts: int, room: int, world: int, rank: int, rows: Shared, routes: Shared, results: Shared) -> None:
        if rows.local.shape[1] % 8:
            raise ValueError(f"rows move in words of 16 bytes: a width of {rows.local.shape[1]} is no multiple of 8")
        self.experts, self.room, self.world, self.rank = experts, room, world, rank
        self.first, self.end = owned(experts, world, rank)
        self.rows, self.routes, self.results = rows, routes, results

    def smaller(self, room: int) -> PeerExperts:
        """One for calls of at most `room` tokens a rank, in the first part of the same memory: plans and launches are of that size.

        Calls of the two are not under way together.
        """
        if not 0 < room <= self.room:
            raise ValueError(f"there is room for {self.room} tokens, not for {room}")
        other = object.__new__(type(self))
        results = First(self.results, self.results.local.shape[0] // self.room * room)
        other._set_up(self.experts, room, self.world, self.rank, First(self.rows, self.world * room), First(self.routes, room), results)
        other.side = self.side
        return other

    def __call__(
        self,
        x: Tensor,
        w13: NVFP4Tiles,
        w2: NVFP4Tiles,
        ids: Tensor,
        weights: Tensor,
        activation: SwiGLU,
        lora: ExpertLoRA | None = None,
        adapter_ids: Tensor | None = None,
        parts: int | None = None,
    ) -> Tensor:
        """`moe` of this rank's tokens: x bf16 [T, H], T at most `room`, 0 too. No gradients, no wait of the host.

        w13, w2, lora: this rank's experts. adapter_ids: int [T], on all ranks or on none. Other arguments as in `moe`.
        """
        work = _Work(self, x, w13, w2, ids, activation, lora, adapter_ids, parts)
        work.publish()
        self.routes.barrier(0)
        work.plan()
        main = torch.cuda.current_stream()
        self.side.wait_stream(main)
        pulled = []
        with torch.cuda.stream(self.side):
            for part in range(work.parts):
                work.pull(part)
                pulled.append(self.side.record_event())
        for part in range(work.parts):
            main.wait_event(pulled[part])
            work.compute(part)
            self.side.wait_stream(main)
            with torch.cuda.stream(self.side):
                work.push(part)
        with torch.cuda.stream(self.side):
            self.results.barrier(1)
        main.wait_stream(self.side)
        return work.combine(weights)


class _Work:
    """The steps of one call. What it holds lives until both streams are done with it."""

    def __init__(
        self,
        peers: PeerExperts,
        x: Tensor,
        w13: NVFP4Tiles,
        w2: NVFP4Tiles,
        ids: Tensor,
        activation: SwiGLU,
        lora: ExpertLoRA | None,
        adapter_ids: Tensor | None,
        parts: int | None,
    ) -> None:
        held = peers.end - peers.first
        width = peers.rows.local.shape[1]
        if len(w13.codes) != held or x.dtype is not torch.bfloat16 or x.shape[1] != width:
            raise ValueError(f"needs bf16 tokens of width {width} and {held} experts, got {x.dtype} {tuple(x.shape)} and {len(w13.codes)}")
        if len(x) > peers.room:
            raise ValueError(f"{len(x)} tokens where there is room for {peers.room}")
        self.peers, self.x, self.w13, self.w2 = peers, x.contiguous(), w13, w2
        self.ids, self.activation = ids.contiguous(), activation
        self.slots = None if adapter_ids is None else adapter_ids.contiguous()
        self.loras: tuple[LoRA | None, ...] = tuple(
            None if p is None else LoRA(*(t.to(x.dtype).contiguous() for t in p)) for p in lora or (None, None, None)
        )
        # On average a rank computes as many pairs as its tokens have.
        self.expected = peers.room * ids.shape[1]
        self.parts = parts or (1 if self.expected < MANY else PARTS)
        if not held:
            self.parts = 0

    def publish(self) -> None:
        """Tokens and routes to where others read them."""
        from .triton_peers import publish

        p = self.peers
        publish(self.x, self.ids, self.slots, p.rows.local[p.rank * p.room : (p.rank + 1) * p.room], p.routes.local)

    def plan(self) -> None:
        """Which pairs are this rank's, and in which part."""
        from .triton_group import group
        from .triton_moe import cuts
        from .triton_peers import cut_plan, gather_routes

        if not self.parts:
            return
        p, k = self.peers, self.ids.shape[1]
        experts = p.end - p.first
        self.own, self.row_slots = gather_routes(p.routes.addresses, p.world, p.room, k, p.first, p.end, self.slots is not None)
        self.inner, self.outer = cuts(self.expected, experts)
        whole = group(self.own, experts, self.inner.tokens)
        slots = max((a.a.shape[0] for a in self.loras if a is not None), default=1)
        self.parts = min(self.parts, whole.most)
        self.plans, self.place_slots, self.sizes = cut_plan(whole, self.row_slots, self.parts, self.inner.tokens, 2 * (1 + slots))
        self.places = torch.arange(self.plans[0].pairs, dtype=torch.int32, device=self.x.device)
        self.results: list[Tensor | None] = [None] * self.parts

    def pull(self, part: int) -> None:
        """Other ranks' rows that come with this part."""
        from .triton_peers import pull

        p = self.peers
        pull(p.rows.addresses, p.rows.local, self.own, self.plans[part], self.sizes[part:], p.rank, p.room)

    def compute(self, part: int) -> None:
        """Results of a part, by place."""
        from .triton_moe import weight_product

        gate, up, down = self.loras
        plan = self.plans[part]
        act, _, _ = weight_product(self.peers.rows.local, self.w13, plan, self.inner, self.activation, (gate, up), self.row_slots)
        by_place = plan._replace(order=self.places, top_k=1)
        self.results[part], _, _ = weight_product(
            act, self.w2, by_place, self.outer, None, (down, None), self.place_slots[part], counter=len(plan.counters) // 2
        )

    def push(self, part: int) -> None:
        """Results of a part home."""
        from .triton_peers import push

        p = self.peers
        push(p.results.addresses, self.results[part], self.plans[part], self.sizes[part:], p.room)

    def combine(self, weights: Tensor) -> Tensor:
        """The sums of this rank's tokens."""
        from .triton_group import combine

        if not len(self.x):
            return torch.empty_like(self.x)
        return combine(self.peers.results.local, self.ids, weights.float().contiguous())

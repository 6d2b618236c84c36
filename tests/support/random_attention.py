"""Attention of an engine against attention of a trainer, bit for bit, over random cases: `python -m tests.support.random_attention`.

A case is a request: a context of 1 to 40 blocks, whose last block is full, or one key short or long of that, or anything, and of whose
tokens the last 1 to 8 come at once. Cases are drawn in sets of up to 64, which share a cache format, head counts and pages. Of a set

- the trainer takes every token of every context: heads normed, rotated and rounded as the cache rounds (`rotate_heads`), blocks chosen
  (`index_topk`), sparse and dense attention forward with what gradients need, all over packed keys;
- the engine inserts all tokens (`kv_insert`) into shuffled pages that held NaN, and attends over them in a chunk of each request;
- then it has, in pages of their own, the cases' last tokens inserted and attended in batches of 1, of 7 and of 64 requests: all the tokens
  that come at once, and the last one alone, as decode has it.

Every result of the engine, its pages included, must have the bytes of the trainer's or of the one insertion. A byte that differs names the
case, and its set can be run alone: shapes and values of a set follow from the seed and the set's number.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from samebits.kernels import msa_ops
from samebits.kernels.msa import SparseConfig
from samebits.kernels.msa_ops import BLOCK, DIM, Batch, Norms, Packed, Pages, batch_of
from samebits.kernels.rope import rope_table
from samebits.quant import kv

from . import random_command
from .msa_cases import FORMATS
from .random_command import Finding, again, summary

SCALE = msa_ops.default_scale()
SPARE = 3  # pages that are nobody's


class Limits(NamedTuple):
    """From what cases are drawn, and how much of a context the trainer takes."""

    blocks: int = 40
    new: int = 8
    shapes: tuple[tuple[int, int], ...] = ((4, 64),)  # KV groups and query heads
    forms: tuple[str, ...] = FORMATS
    each: int = 64  # cases of a set
    batches: tuple[int, ...] = (1, 7, 64)
    width: int = 48  # of the page tables
    topk: int = 16
    whole: bool = True  # the trainer takes every token, not only those that come at once
    chunk: int = 1 << 30  # tokens of a request's chunk, at most
    integers: bool = False  # rows of small integers, whose squares sum exactly in any order


class Case(NamedTuple):
    """A request of `total` tokens, the last `new` of which come at once."""

    number: int
    total: int
    new: int


class CaseSet(NamedTuple):
    """Cases that share what is launched for them."""

    number: int
    seed: int
    form: str
    groups: int
    heads: int
    cases: tuple[Case, ...]

    def words(self, at: int) -> str:
        """What there is to know about its case `at`."""
        case = self.cases[at]
        return (
            f"case {case.number} (set {self.number}, request {at}: {case.new} tokens behind {case.total - case.new}, {self.form} pages, "
            f"{self.groups} KV groups, {self.heads} heads)"
        )


class Ops(NamedTuple):
    """The operations; see `msa_ops`. The trainer's attention is that over packed keys, with what its gradients need."""

    kv_insert: Callable
    rotate_heads: Callable
    index_topk: Callable
    sparse: Callable  # (q, cache, chosen, batch)
    dense: Callable  # (q, cache, batch)
    train_sparse: Callable
    train_dense: Callable


def comparisons(limits: Limits) -> int:
    """Of each case: what prefill inserts, a chunk of it, then insertion and attention in batches of each size, of all that come and one."""
    return 5 + 3 + 2 * len(limits.batches) * (2 + 3 + 2)


def draw(seed: int, count: int, limits: Limits) -> list[CaseSet]:
    """`count` cases in sets. A set depends on the seed, its number and how many cases it has."""
    sets = []
    for number, first in enumerate(range(0, count, limits.each)):
        rng = random.Random(f"{seed}/{number}")
        form = limits.forms[number % len(limits.forms)]
        groups, heads = rng.choice(limits.shapes)
        cases = []
        for n in range(first, min(first + limits.each, count)):
            tail = rng.choice((-1, 0, 1, rng.randrange(-BLOCK + 1, 1)))
            total = rng.randint(1, limits.blocks) * BLOCK + tail
            cases.append(Case(n, total, rng.randint(1, min(limits.new, total))))
        sets.append(CaseSet(number, seed, form, groups, heads, tuple(cases)))
    return sets


def fast_ops() -> Ops:
    """`msa_ops` as trainer and engine call it."""

    def trained(call: Callable[..., Tensor], q: Tensor, packed: Packed, *rest: object) -> Tensor:
        q, k, v = (t.detach().requires_grad_() for t in (q, packed.keys, packed.values))
        return call(q, packed._replace(keys=k, values=v), *rest, SCALE).detach()

    return Ops(
        msa_ops.kv_insert,
        msa_ops.rotate_heads,
        msa_ops.index_topk,
        lambda *args: msa_ops.sparse_attention(*args, SCALE),
        lambda *args: msa_ops.dense_attention(*args, SCALE),
        lambda *args: trained(msa_ops.sparse_attention, *args),
        lambda *args: trained(msa_ops.dense_attention, *args),
    )


def same_bytes(have: Tensor, want: Tensor) -> Tensor:
    """Bytes that differ, int64 for each row."""
    a, b = (x.reshape(len(x), -1).contiguous().view(torch.uint8) for x in (have, want))
    return (a != b).sum(1)


def near(have: Tensor, want: Tensor) -> Tensor:
    """As `same_bytes`, for operations whose sums have an order of their own for every shape: a row that is off by more than 1 % counts."""
    if not have.is_floating_point() or have.dtype is torch.float8_e4m3fn:
        return same_bytes(have, want)
    a, b = (x.reshape(len(x), -1).float() for x in (have, want))
    return (~((a - b).norm(dim=1) <= 1e-2 * b.norm(dim=1))).long()


class Inputs(NamedTuple):
    """Tensors of a set: what a layer's projection gives, and where it goes."""

    rows: tuple[Tensor, ...]  # q, k, v, index_q, index_k, of all tokens of all contexts
    norms: Norms
    table: tuple[Tensor, Tensor]
    tokens: Batch  # all of them
    start: Tensor  # int32 [R], first token of each context
    slots: Tensor  # int64, of each token
    pages: Tensor  # int32 [R, width]
    owner: Tensor  # int64, the case of each page; the number of cases where it is nobody's
    blank: tuple[Tensor, Tensor]  # main and index pages


def inputs(one: CaseSet, limits: Limits, device: str) -> Inputs:
    """Values of a set: normal, with the head's rows as views of one tensor, as a projection leaves them."""
    g = torch.Generator(device).manual_seed(one.seed * 1_000_003 + one.number)
    totals = [case.total for case in one.cases]
    split = (one.heads, one.groups, one.groups, one.groups, 1)
    x = torch.empty(sum(totals), sum(split), DIM, dtype=torch.bfloat16, device=device)
    for part in x.split(1 << 14):
        drawn = torch.randn(part.shape, generator=g, device=device)
        part.copy_((drawn * 3).round() if limits.integers else drawn)
    *heads, index_k = x.split(split, dim=1)
    norms = Norms(*((torch.randn(DIM, generator=g, device=device) * 0.2).bfloat16() for _ in range(4)), 1e-6)
    each = [-(-n // BLOCK) for n in totals]
    order = torch.randperm(sum(each) + SPARE, generator=g, device=device)
    pages = torch.full((len(totals), limits.width), 2**30, dtype=torch.int32, device=device)  # a page that is read by mistake is none
    owner = torch.full((len(order),), len(totals), device=device)
    slots, first = [], 0
    for r, (n, blocks) in enumerate(zip(totals, each, strict=True)):
        own = order[first : first + blocks]
        pages[r, :blocks], owner[own] = own.int(), r
        at = torch.arange(n, device=device)
        slots.append(own[at // BLOCK] * BLOCK + at % BLOCK)
        first += blocks
    tokens = batch_of(totals, device=device)
    table = rope_table(limits.width * BLOCK, 64, 5e6, device)
    blank = tuple(blank_pages(one.form, len(order), one.groups, device))
    return Inputs((*heads, index_k[:, 0]), norms, table, tokens, tokens.start[:-1], torch.cat(slots), pages, owner, blank)


def blank_pages(form: str, pages: int, groups: int, device: str) -> list[Tensor]:
    """Main and index pages in which every value is NaN."""
    if form == "nvfp4":
        shapes, dtype = (kv.page_shape(pages, groups, DIM), kv.index_page_shape(pages, DIM)), torch.uint8
    else:
        shapes, dtype = ((pages, groups, BLOCK, 2 * DIM), (pages, BLOCK, DIM)), torch.bfloat16 if form == "bf16" else torch.float8_e4m3fn
    whole = [torch.full((*s[:-1], s[-1] * dtype.itemsize), 0xFF, dtype=torch.uint8, device=device) for s in shapes]
    return [w.view(dtype) for w in whole]


def cached(one: CaseSet, data: Inputs, main: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """K, V [T, G, 128] and index keys [T, 128] of all tokens in bf16, as their pages hold them, by the reference."""
    if one.form == "nvfp4":
        k, v = kv.read_pages(main, data.slots, DIM, torch.bfloat16)
        return k, v, kv.read_index_pages(index, data.slots, DIM, torch.bfloat16)
    page, place = data.slots // BLOCK, data.slots % BLOCK
    both = msa_ops._pick(main, page[:, None], torch.arange(one.groups, device=page.device), place[:, None]).bfloat16()
    return both[..., :DIM], both[..., DIM:], msa_ops._pick(index, page, place).bfloat16()


class Engine:
    """Pages of a set, and what is inserted and attended over them."""

    def __init__(self, data: Inputs, ops: Ops, config: SparseConfig) -> None:
        self.data, self.ops, self.config = data, ops, config
        self.main, self.index = (page.clone() for page in data.blank)

    def insert(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens `rows` into their pages: their queries and index queries."""
        d = self.data
        heads = (x[rows] for x in d.rows)
        return self.ops.kv_insert(*heads, d.norms, d.table, d.tokens.position[rows], d.slots[rows], self.main, self.index)

    def attend(self, q: Tensor, index_q: Tensor, batch: Batch, requests: Tensor) -> dict[str, Tensor]:
        """What a batch of these requests gives."""
        table = self.data.pages[requests]
        chosen = self.ops.index_topk(index_q, Pages(self.index, table), batch, self.config)
        cache = Pages(self.main, table)
        return {"index_topk": chosen, "sparse": self.ops.sparse(q, cache, chosen, batch), "dense": self.ops.dense(q, cache, batch)}


def check_set(one: CaseSet, limits: Limits, ops: Ops, device: str, differing: Callable[[Tensor, Tensor], Tensor]) -> Finding:
    """All comparisons of a set; what differs is looked at once, at the end."""
    data, config = inputs(one, limits, device), SparseConfig(topk=limits.topk)
    counts: dict[str, Tensor] = {}
    size, times = 0, torch.zeros(len(one.cases) + 1, dtype=torch.int64, device=device)

    def compare(name: str, have: Tensor, want: Tensor, owner: Tensor) -> None:
        nonlocal size
        size += have.nbytes
        times.add_(torch.zeros_like(times).index_fill_(0, owner, 1))
        found = counts.setdefault(name, torch.zeros(len(one.cases) + 1, dtype=torch.int64, device=device))
        found.index_add_(0, owner, differing(have, want))

    request = data.tokens.request.long()
    ends = data.start.long() + torch.tensor([case.total for case in one.cases], device=device)

    def last(requests: Sequence[int], new: Sequence[int]) -> tuple[Batch, Tensor]:
        """Batch of the last `new` tokens of each request, and their rows among all tokens."""
        batch = batch_of(list(new), [one.cases[r].total for r in requests], device)
        back = torch.cat([torch.arange(n, 0, -1) for n in new]).to(device)
        return batch, ends[torch.tensor(requests, device=device)[batch.request.long()]] - back

    # The trainer.
    q, k, v, index_q, index_k = ops.rotate_heads(*data.rows, data.norms, data.table, data.tokens.position, one.form)
    everyone, coming = list(range(len(one.cases))), [case.new for case in one.cases]
    batch, rows = (data.tokens, slice(None)) if limits.whole else last(everyone, coming)
    packed = Packed(k, v, data.start, limits.width)
    chosen = ops.index_topk(index_q[rows], Packed(index_k, None, data.start, limits.width), batch, config)
    want = {
        "index_topk": chosen,
        "sparse": ops.train_sparse(q[rows], packed, chosen, batch),
        "dense": ops.train_dense(q[rows], packed, batch),
    }
    if not all(out.isfinite().all() for out in want.values()):
        return Finding(len(one.cases), 0, 0, 0, (f"set {one.number}: the trainer's attention is not finite",))
    place = torch.full_like(request, -1)  # of a token among the trainer's results
    place[rows] = torch.arange(len(chosen), device=device)

    # The engine, all tokens at once, then a chunk.
    whole = Engine(data, ops, config)
    everything = torch.arange(len(request), device=device)
    new_q, new_index_q = whole.insert(everything)
    for name, have, expected in zip(
        ("queries", "index queries", "cached K", "cached V", "cached index keys"),
        (new_q, new_index_q, *cached(one, data, whole.main, whole.index)),
        (q, index_q, k, v, index_k),
        strict=True,
    ):
        compare(f"{name} of prefill", have, expected, request)
    rng = random.Random(f"{one.seed}/{one.number}/chunks")
    chunks = [rng.randint(1, min(n if not limits.whole else case.total, limits.chunk)) for n, case in zip(coming, one.cases, strict=True)]
    batch, rows = last(everyone, chunks)
    for name, have in whole.attend(new_q[rows], new_index_q[rows], batch, torch.arange(len(everyone), device=device)).items():
        compare(f"{name} of a chunk of prefill", have, want[name][place[rows]], request[rows])

    # Tokens that come in batches, into pages that hold what came before them.
    order = rng.sample(everyone, len(everyone))
    for kind, new in (("the tokens that come at once", coming), ("the last token", [1] * len(coming))):
        late = torch.zeros(len(request), dtype=torch.bool, device=device)
        late[last(everyone, new)[1]] = True
        before = Engine(data, ops, config)
        before.insert((~late).nonzero().flatten())
        for batch_size in limits.batches:
            engine = Engine(data, ops, config)
            engine.main.view(torch.uint8).copy_(before.main.view(torch.uint8))
            engine.index.view(torch.uint8).copy_(before.index.view(torch.uint8))
            where = f"of {kind}, {batch_size} requests a batch"
            for first in range(0, len(order), batch_size):
                members = order[first : first + batch_size]
                batch, rows = last(members, [new[r] for r in members])
                some_q, some_index_q = engine.insert(rows)
                compare(f"queries {where}", some_q, q[rows], request[rows])
                compare(f"index queries {where}", some_index_q, index_q[rows], request[rows])
                for name, have in engine.attend(some_q, some_index_q, batch, torch.tensor(members, device=device)).items():
                    compare(f"{name} {where}", have, want[name][place[rows]], request[rows])
            for name, have, expected in (("pages", engine.main, whole.main), ("index pages", engine.index, whole.index)):
                compare(f"{name} {where}", have.view(torch.uint8), expected.view(torch.uint8), data.owner)
    of_cases = times[: len(one.cases)]
    return Finding(len(one.cases), size, int(of_cases.sum()), int(of_cases.min()), tuple(worst(one, counts)))


def worst(one: CaseSet, counts: dict[str, Tensor]) -> list[str]:
    """One line about the first case of a set that differs, none where all agree."""
    table = torch.stack(list(counts.values())).cpu()
    if not table.any():
        return []
    at = int(table.any(0).nonzero()[0])
    who = one.words(at) if at < len(one.cases) else f"pages of nobody in set {one.number}"
    what = [f"{name}: {int(n)}" for name, n in zip(counts, table[:, at], strict=True) if n]
    return [f"{who} differs in bytes of {'; '.join(what[:4])}{'; and more' if len(what) > 4 else ''}"]


def run(
    seed: int,
    count: int,
    limits: Limits,
    ops: Ops,
    device: str,
    only: int | None = None,
    differing: Callable[[Tensor, Tensor], Tensor] = same_bytes,
    tell: Callable[[str], None] = print,
) -> Finding:
    """All sets, or the one numbered `only`; tells what differs as soon as it is found, and at the end how much was compared."""
    findings = []
    for one in draw(seed, count, limits):
        if only is None or one.number == only:
            found = check_set(one, limits, ops, device, differing)
            findings.append(found._replace(wrong=tuple(line + again("random_attention", seed, count, one.number) for line in found.wrong)))
            for line in findings[-1].wrong:
                tell(line)
    return summary(f"attention, seed {seed}", findings, tell)


def on_gpu(seed: int, count: int, number: int) -> Finding:
    """The set `number` of `count` cases, on the kernels; other processes get back what memory it took."""
    found = run(seed, count, Limits(), fast_ops(), "cuda", number, tell=lambda line: None)
    torch.cuda.empty_cache()
    return found


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    return random_command.main("attention", lambda count: -(-count // Limits().each), on_gpu, argv)


if __name__ == "__main__":
    sys.exit(main())

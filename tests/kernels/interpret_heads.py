"""Rows of heads against torch on CPU, in Triton's interpreter: `TRITON_INTERPRET=1 python -m tests.kernels.interpret_heads`.

`kv_insert` into pages that are views of one buffer, with and without an indexer; `rotate_heads` and its gradient; the projection with all
of it behind it; choice and attention over such pages. Integers, whose squares sum exactly, so that bits must be equal though torch sums
in another order.
"""

from __future__ import annotations

import torch

from samebits.kernels import msa_ops, triton_msa, triton_msa_project, triton_msa_rotate, triton_msa_tiles
from samebits.kernels.linear import LoRA
from samebits.kernels.linear_tiles import pack_linear
from samebits.kernels.msa import SparseConfig
from samebits.kernels.msa_ops import Pages
from samebits.kernels.rope import rope_table
from samebits.quant import mxfp8
from tests.support.msa_cases import FORMATS, insert_case, make, one_buffer, without_indexer


def check(name: str, condition: bool) -> None:
    """Stop with the case's name."""
    if not condition:
        raise SystemExit(f"{name}: differs")


def same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Equal bytes, or both absent."""
    return a is b or torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def inserted() -> None:
    """Pages and queries, in one buffer, for tiles that span tokens (3 heads), fill one (8) and are several of one (16)."""
    for form in FORMATS:
        for heads, groups, indexed in ((3, 1, True), (8, 2, False), (16, 2, True)):
            args, caches = insert_case(form, tokens=5, heads=heads, groups=groups)
            args[2][0] *= 2.0**-11  # values that become zeros of both signs
            _, *views = one_buffer(*caches)
            triton_msa_rotate.cut_of = lambda _, tiles=heads // 8: triton_msa_rotate.Cut(8, 1, max(1, tiles))
            if not indexed:
                args, caches[1], views[1] = without_indexer(args), None, None
            want, have = msa_ops.kv_insert(*args, *caches), triton_msa.kv_insert(*args, *views)
            check(f"{form} {heads} queries", all(same(a, b) for a, b in zip(have, want, strict=True)))
            check(f"{form} {heads} pages", all(same(a, b) for a, b in zip(views, caches, strict=True)))
            have = triton_msa_rotate.rotate_heads(*args[:8], form)
            check(f"{form} {heads} training", all(same(a, b) for a, b in zip(have, msa_ops.rotate_heads(*args[:8], form), strict=True)))


def inserted_in_two_formats() -> None:
    """Main KV in one format, index keys in another."""
    args, (cache, _) = insert_case("nvfp4", tokens=4, heads=2, groups=1)
    _, (_, index) = insert_case("bf16", tokens=4, heads=2, groups=1)
    others = cache.clone(), index.clone()
    msa_ops.kv_insert(*args, cache, index)
    triton_msa.kv_insert(*args, *others)
    check("two formats", same(cache, others[0]) and same(index, others[1]))


def rotated_whole() -> None:
    """All 128 elements of a head rotated, forward and backward, in fp32 (the interpreter has no right cast to bf16)."""
    for rotary in (32, 64):
        (*heads, norms, _, position, _), _ = insert_case("bf16", tokens=5, heads=3, groups=1)
        table = rope_table(4096, 2 * rotary, 5e6)
        q, k, v = (x.float().requires_grad_() for x in heads[:3])
        results = []
        for call in (msa_ops.rotate_heads, triton_msa_rotate.rotate_heads):
            out = call(q, k, v, None, None, norms, table, position, "nvfp4")
            grads = torch.autograd.grad(out[:3], (q, k, v), [torch.linspace(-1, 2, x.numel()).view(x.shape) for x in out[:3]])
            results.append((out, grads))
        (want, want_grads), (have, have_grads) = results
        # The kernel rounds to bf16 where the engine does, fp32 or not.
        check(f"rotation of {2 * rotary}", (have[0] - want[0]).norm() < 4e-3 * want[0].norm())
        check(f"values beside a rotation of {2 * rotary}", torch.equal(have[2], want[2]))
        check(f"gradients of {2 * rotary}", all((a - b).norm() < 1e-5 * b.norm() for a, b in zip(have_grads, want_grads, strict=True)))


def projected() -> None:
    """Two tiles of tokens, K no multiple of 128; without adapters, with one for all, with a slot for each token and V without one."""
    g = torch.Generator().manual_seed(3)

    def adapter(slots: int, heads: int) -> LoRA:
        return LoRA(torch.randn(slots, 4, 160, generator=g).bfloat16(), (torch.randn(slots, heads * 128, 4, generator=g) * 0.1).bfloat16())

    whole = triton_msa_project.whole_programs
    for form, slots in (("nvfp4", 0), ("bf16", 1), ("nvfp4", 2)):
        args, caches = insert_case(form, tokens=40, heads=2, groups=1)
        _, *views = one_buffer(*caches)
        norms, table, position, where = args[5:]
        heads = 6
        if slots == 1:
            heads, norms, caches[1], views[1] = 4, without_indexer(args)[5], None, None
        weight = pack_linear(mxfp8.quantize(torch.randn(heads * 128, 160, generator=g) * 0.1))
        x = torch.randn(40, 160, generator=g).bfloat16()
        loras = msa_ops.HeadLoRA(adapter(slots, 2), adapter(slots, 1), None) if slots else None
        ids = (torch.arange(40) % 3 - 1).int() if slots > 1 else None
        rest = (norms, table, position, where)
        want = msa_ops.project_insert(x, weight, loras, ids, *rest, *caches)
        cut = None
        if slots:  # x by the copy engine, and the last tiles in quarters
            cut, triton_msa_project.whole_programs = triton_msa_project.Cut(128, 4, 1), lambda programs, _: programs - 2
        have = triton_msa_project.project_insert(x, weight, loras, ids, *rest, *views, (2, 1), cut)
        for name, a, b in zip(("q", "index q", "pages", "index pages"), (*have, *views), (*want, *caches), strict=True):
            # fp32 sums of torch have another order: a few roundings fall otherwise.
            check(f"projected {name} {form}", a is b or (a.view(torch.uint8) != b.view(torch.uint8)).float().mean() < 1e-3)
    triton_msa_project.whole_programs = whole


def read_from_one_buffer() -> None:
    """Choice and attention over pages that lie further apart than they are long."""
    for form in FORMATS:
        case = make([1], [200], form, groups=1, heads=2, integers=True)
        _, cache, index = one_buffer(case.cache.data, case.index.data)
        chosen = msa_ops.index_topk(case.index_q, case.index, case.batch, SparseConfig(topk=2))
        keys = Pages(index, case.index.table)
        check(f"{form} choice", same(triton_msa.index_topk(case.index_q, keys, case.batch, SparseConfig(topk=2), None), chosen))
        q = case.q.float()
        want, _ = triton_msa.attend(q, case.cache, chosen, case.batch, 0.1)
        have, _ = triton_msa.attend(q, Pages(cache, case.cache.table), chosen, case.batch, 0.1)
        check(f"{form} attention", same(have, want) and bool(have.any()))


def main() -> None:
    """All cases."""
    if not triton_msa_tiles.INTERPRETED.value:
        raise SystemExit("set TRITON_INTERPRET=1")
    inserted()
    inserted_in_two_formats()
    rotated_whole()
    projected()
    read_from_one_buffer()
    print("same results")


if __name__ == "__main__":
    main()

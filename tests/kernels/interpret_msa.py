"""The MSA kernels against torch on CPU, in Triton's interpreter: `TRITON_INTERPRET=1 python -m tests.kernels.interpret_msa`.

The interpreter has no inline assembly and no bf16 dots, so tiles are fp32 there and codes are decoded by plain operations; what is shown is
everything else: addresses, masks, labels, the choice, the order of folding. The decode by assembly is left to `test_triton_msa_logic` and
tests/gpu, that without to `interpret_decode`.
"""

from __future__ import annotations

import math

import torch

from samebits.kernels import msa_ops, triton_msa, triton_msa_backward, triton_msa_tiles
from samebits.kernels.msa import SparseConfig
from tests.support.msa_cases import FORMATS, insert_case, make, vanishing, with_weights_that_vanish

CONFIG = SparseConfig()


def check(name: str, condition: bool) -> None:
    """Stop with the case's name."""
    if not condition:
        raise SystemExit(f"{name}: differs")


def close(name: str, have: torch.Tensor, want: torch.Tensor, tolerance: float = 1e-2) -> None:
    """Relative distance, as a whole; NaN never passes."""
    error = (have.float() - want.float()).norm() / want.float().norm().clamp_min(1e-9)
    if not error < tolerance:
        raise SystemExit(f"{name}: relative distance {error:.2e}")


def choice_and_attention() -> None:
    """Ragged decode, past the 16 blocks that are chosen."""
    new, total = [1, 1], [129, 2306]
    for form in FORMATS:
        case = make(new, total, form, groups=1, heads=2, integers=True)
        want = msa_ops.index_topk(case.index_q, case.index, case.batch, CONFIG)
        for keys in (case.index, case.packed_index) if form == "nvfp4" else (case.index,):
            have = triton_msa.index_topk(case.index_q, keys, case.batch, CONFIG, None)
            check(f"{form} choice", torch.equal(have, want))
        out = msa_ops.sparse_attention(case.q.float(), case.cache, want, case.batch, 0.1)
        have, _ = triton_msa.attend(case.q.float(), case.cache, want, case.batch, 0.1)
        close(f"{form} attention", have, out, 1e-5)
        if form == "nvfp4":
            packed, _ = triton_msa.attend(case.q.float(), case.packed, want, case.batch, 0.1)
            close("packed", packed, out, 1e-5)
            for split in (0, 32):  # all blocks a program; one block a program. By default it was four
                triton_msa.SPLIT, default = split, triton_msa.SPLIT
                again, lse = triton_msa.attend(case.q.float(), case.cache, want, case.batch, 0.1, lse=True)
                triton_msa.SPLIT = default
                check(f"split {split}", torch.equal(again.view(torch.int32), have.view(torch.int32)))
            exact = reference_lse(case, want, 0.1)
            close("log of the sum", lse, exact, 1e-5)


def groups_one_after_the_other() -> None:
    """Two KV groups and two requests, programs that take all blocks of a query: against torch, and the bits of one block a program."""
    case = make([1, 2], [3, 140], "nvfp4", groups=2, heads=4, integers=True)
    chosen = msa_ops.index_topk(case.index_q, case.index, case.batch, CONFIG)
    chosen[1:, 1] = torch.tensor([1] + 15 * [-1])  # another choice in the second group
    out = msa_ops.sparse_attention(case.q.float(), case.cache, chosen, case.batch, 0.1)
    have = []
    for split in (0, 1000):
        triton_msa.SPLIT, default = split, triton_msa.SPLIT
        have.append(triton_msa.attend(case.q.float(), case.cache, chosen, case.batch, 0.1)[0])
        triton_msa.SPLIT = default
    close("two groups", have[0], out, 1e-5)
    check("two groups, one block a program", torch.equal(*(x.view(torch.int32) for x in have)))


def reference_lse(case, chosen: torch.Tensor, scale: float) -> torch.Tensor:
    """log2 of the softmax's sum [T, H] of one KV group."""
    rows = []
    for t, start in enumerate(case.packed.start.tolist()):
        keys = torch.cat([torch.arange(128) + 128 * b for b in chosen[t, 0].tolist() if b >= 0])
        k = case.packed.keys[start + keys[keys <= case.batch.position[t]], 0].double()
        rows.append((case.q[t].double() @ k.T * scale).logsumexp(-1) / math.log(2))
    return torch.stack(rows)


def rounded_reads() -> None:
    """NVFP4 pages read as E4M3: scales that saturate, and NaN scales, which count as 0."""
    case = make([1, 1], [129, 700], "nvfp4", groups=1, heads=2)
    g = torch.Generator().manual_seed(1)
    for data in (case.cache.data, case.index.data):
        scales = data.view(*data.shape[:-2], -1)[..., 8192:]
        scales[torch.rand(scales.shape, generator=g) < 0.02] = 0x7E
        scales[torch.rand(scales.shape, generator=g) < 0.02] = 0x7F
    config = SparseConfig(topk=4)
    want = msa_ops.index_topk(case.index_q, case.index, case.batch, config, rounded=True)
    have = triton_msa.index_topk(case.index_q, case.index, case.batch, config, None, rounded=True)
    check("choice from rounded keys", torch.equal(have, want) and bool((want[1] >= 0).all()))
    out = msa_ops.sparse_attention(case.q.float(), case.cache, want, case.batch, 0.1, rounded=True)
    close("attention to rounded keys", triton_msa.attend(case.q.float(), case.cache, want, case.batch, 0.1, rounded=True)[0], out, 1e-5)


def weights_that_vanish() -> None:
    """As in `interpret_msa_dense`: pages and packed keys have the same bits."""
    total = [300, 140]
    case, held = with_weights_that_vanish(make([1, 9], total, "nvfp4", groups=2, heads=4), total)
    block = torch.arange(16, dtype=torch.int32).expand(len(case.q), 2, 16)
    chosen = torch.where(block <= (case.batch.position // 128)[:, None, None], block, -1)
    for rounded, packed in held.items():
        have, _ = triton_msa.attend(case.q.float(), case.cache, chosen, case.batch, 0.5, rounded=rounded)
        want, _ = triton_msa.attend(case.q.float(), packed, chosen, case.batch, 0.5)
        check("outputs that vanish", vanishing(want) > 100)
        check("bits of outputs that vanish", torch.equal(have.view(torch.int32), want.view(torch.int32)))


def padding() -> None:
    """A token at position -1 of a request whose table holds no page: nothing is read through it, and zeros come out."""
    case = make([1, 1], [129, 300], "nvfp4", groups=1, heads=2)
    position, table = case.batch.position.clone(), case.cache.table.clone()
    position[1], table[1] = -1, 2**30
    batch = case.batch._replace(position=position)
    chosen = triton_msa.index_topk(case.index_q, case.index._replace(table=table), batch, CONFIG, None)
    check("no choice", bool((chosen[1] == -1).all() and (chosen[0, :, :2] >= 0).all()))
    for split in (0, 4, 32):
        triton_msa.SPLIT, default = split, triton_msa.SPLIT
        have, _ = triton_msa.attend(case.q.float(), case.cache._replace(table=table), chosen, batch, 0.1)
        triton_msa.SPLIT = default
        check("zeros", not have[1].any() and bool(have[0].any()))


def parts_of_a_long_batch() -> None:
    """More queries than scores are held for: some at a time, with the choices of all at once.

    No block is forced, and queries look for their own key, the last that they may see, or for the next one, which they may not.
    """
    case = make([3, 40], [3, 200], "nvfp4", groups=1, heads=2, integers=True)
    config = SparseConfig(topk=1, local_blocks=0)
    own = case.packed_index.keys[case.packed_index.start[case.batch.request.long()] + case.batch.position]
    index_q = case.index_q.clone()
    index_q[::2, 0], index_q[1::2, 0] = own[::2], own.roll(-1, 0)[1::2]
    want = msa_ops.index_topk(index_q, case.index, case.batch, config)
    triton_msa.SCORE_MEMORY = 1
    check("parts", torch.equal(triton_msa.index_topk(index_q, case.index, case.batch, config, None), want))


def inserted_bytes() -> None:
    """Pages and queries of `kv_insert`; rows whose squares sum exactly, so that the order of the sum is no matter."""
    for form in FORMATS:
        args, caches = insert_case(form, tokens=3, heads=2, groups=1)
        others = [c.clone() for c in caches]
        want = msa_ops.kv_insert(*args, *caches)
        have = triton_msa.kv_insert(*args, *others)
        check(f"{form} queries", all(torch.equal(a, b) for a, b in zip(have, want, strict=True)))
        check(f"{form} pages", all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(caches, others, strict=True)))
        ranks_insert(form)


def ranks_insert(form: str) -> None:
    """What two ranks with a KV head each insert, beside the index heads of both, is what one rank with both heads does."""
    args, (main, index) = insert_case(form, tokens=3, heads=4, groups=2)
    (q, k, v, *rest), want_main, want_index = args, main.clone(), index.clone()
    want = triton_msa.kv_insert(*args, want_main, want_index)
    planes = main.shape[1] // 2
    for r in range(2):
        part, keys = main[:, r * planes : (r + 1) * planes].clone(), index.clone()
        have = triton_msa.kv_insert(q[:, 2 * r : 2 * r + 2], k[:, r : r + 1], v[:, r : r + 1], *rest, part, keys)
        check(f"{form} queries of rank {r}", torch.equal(have[0], want[0][:, 2 * r : 2 * r + 2]) and torch.equal(have[1], want[1]))
        same = torch.equal(part.view(torch.uint8), want_main[:, r * planes : (r + 1) * planes].contiguous().view(torch.uint8))
        check(f"{form} pages of rank {r}", same and torch.equal(keys.view(torch.uint8), want_index.view(torch.uint8)))


def gradients_of_packed_keys() -> None:
    """Against autograd through the reference: two sequences, one with more blocks than are chosen."""
    total = [3, 130]
    case = make(total, total, "bf16", groups=2, heads=2)
    config = SparseConfig(topk=1)
    chosen = msa_ops.index_topk(case.index_q, case.packed_index, case.batch, config)
    chosen[131:, 1] = 0  # one group has another choice than the other
    q, k, v = (t.float().requires_grad_() for t in (case.q, case.packed.keys, case.packed.values))
    packed = case.packed._replace(keys=k, values=v)
    out = msa_ops.sparse_attention(q, packed, chosen, case.batch, 0.1)
    grad = torch.randn_like(out)
    want = torch.autograd.grad(out, (q, k, v), grad)
    have_out, lse = triton_msa.attend(q.detach(), case.packed, chosen, case.batch, 0.1, lse=True)
    close("training forward", have_out, out, 1e-5)
    batch = case.batch
    have = triton_msa_backward.gradients(
        grad, q.detach(), k.detach(), v.detach(), have_out, lse, chosen, batch.start, batch.request, batch.position, 0.1
    )
    for name, a, b in zip("qkv", have, want, strict=True):
        close(f"gradient of {name}", a, b, 1e-4)


def main() -> None:
    """All cases."""
    if not triton_msa_tiles.INTERPRETED.value:
        raise SystemExit("set TRITON_INTERPRET=1")
    choice_and_attention()
    groups_one_after_the_other()
    rounded_reads()
    weights_that_vanish()
    padding()
    parts_of_a_long_batch()
    inserted_bytes()
    gradients_of_packed_keys()
    print("same results")


if __name__ == "__main__":
    main()

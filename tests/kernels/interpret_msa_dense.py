"""Kernels of dense attention against torch on CPU, in the interpreter: `TRITON_INTERPRET=1 python -m tests.kernels.interpret_msa_dense`.

As for the other MSA kernels (`interpret_msa`) tiles are fp32 there and codes are decoded by plain operations: addresses, masks, the cut
into tiles, chunks and programs, and merging are what is shown. That bits are equal is shown on a GPU.
"""

from __future__ import annotations

import torch

from samebits.kernels import msa_ops, triton_msa_dense_backward, triton_msa_dense_ops, triton_msa_tiles
from tests.kernels.interpret_msa import check, close
from tests.support.msa_cases import FORMATS, make, vanishing, with_weights_that_vanish


def every_kernel_over_every_cache() -> None:
    """Requests that go chunk by chunk and one that does not, ends of tiles, blocks and chunks, padding within and behind requests."""
    new, total = [1, 2, 0, 9, 1, 4], [800, 513, 40, 140, 128, 127]
    for form in FORMATS:
        case = make(new, total, form, groups=2, heads=4)
        position = torch.cat((case.batch.position, torch.tensor([-1, -1], dtype=torch.int32)))
        request = torch.cat((case.batch.request, torch.tensor([5, 5], dtype=torch.int32)))
        position[[2, 7]] = -1
        batch = case.batch._replace(position=position, request=request)
        q = torch.cat((case.q, case.q[:2])).float()
        want = msa_ops.dense_attention(q, case.cache, batch, 0.1)
        real = position >= 0
        have, _ = triton_msa_dense_ops.attend(q, case.cache, batch, 0.1)
        close(f"{form} attention", have[real], want[real], 1e-6)
        check(f"{form} padding", not have[~real].any())
    triton_msa_dense_ops.PARTS = 1  # a request a launch
    check("a request a launch", torch.equal(triton_msa_dense_ops.attend(q, case.cache, batch, 0.1)[0], have))
    triton_msa_dense_ops.SMALL = 1  # others as prefill
    have, _ = triton_msa_dense_ops.attend(q, case.cache, batch, 0.1)
    close("prefill", have[real], want[real], 1e-6)
    check("padding of prefill", not have[~real].any())


def rounded_reads() -> None:
    """NVFP4 pages read as E4M3 by both kernels: scales that saturate, and NaN scales, which count as 0."""
    case = make([1, 9], [300, 140], "nvfp4", groups=2, heads=4)
    g = torch.Generator().manual_seed(1)
    scales = case.cache.data.view(*case.cache.data.shape[:-2], -1)[..., 8192:]
    scales[torch.rand(scales.shape, generator=g) < 0.02] = 0x7E
    scales[torch.rand(scales.shape, generator=g) < 0.02] = 0x7F
    want, plain = (msa_ops.dense_attention(case.q.float(), case.cache, case.batch, 0.1, rounded=r) for r in (True, False))
    have, _ = triton_msa_dense_ops.attend(case.q.float(), case.cache, case.batch, 0.1, rounded=True)
    close("attention to rounded keys", have, want, 1e-6)
    check("a read that rounds", not torch.allclose(want, plain, rtol=1e-2))


def weights_that_vanish() -> None:
    """Pages and packed keys have the same bits where weights are so small that a power of two decides what fp32 keeps of a product."""
    total = [300, 140]
    case, held = with_weights_that_vanish(make([1, 9], total, "nvfp4", groups=2, heads=4), total)
    for rounded, packed in held.items():
        have, _ = triton_msa_dense_ops.attend(case.q.float(), case.cache, case.batch, 0.5, rounded=rounded)
        want, _ = triton_msa_dense_ops.attend(case.q.float(), packed, case.batch, 0.5)
        check("outputs that vanish", vanishing(want) > 100)
        check("bits of outputs that vanish", torch.equal(have.view(torch.int32), want.view(torch.int32)))


def packed_keys_and_their_gradients() -> None:
    """Against autograd through the reference: sequences of less than a program's queries, of more than a tile of keys, of two chunks."""
    total = [3, 70, 1, 515]
    case = make(total, total, "bf16", groups=1, heads=2)
    q, k, v = (t.float().requires_grad_() for t in (case.q, case.packed.keys, case.packed.values))
    out = msa_ops.dense_attention(q, case.packed._replace(keys=k, values=v), case.batch, 0.1)
    grad = torch.randn_like(out)
    want = torch.autograd.grad(out, (q, k, v), grad)
    both = torch.cat((case.packed.keys, case.packed.values), 1).float()  # strided, as one projection's output gives them
    packed = case.packed._replace(keys=both[:, :1], values=both[:, 1:])
    have_out, lse = triton_msa_dense_ops.attend(q.detach(), packed, case.batch, 0.1, lse=True)
    close("training forward", have_out, out, 1e-6)
    have = triton_msa_dense_backward.gradients(grad, q.detach(), packed.keys, packed.values, have_out, lse, case.batch, 0.1)
    for name, a, b in zip("qkv", have, want, strict=True):
        close(f"gradient of {name}", a, b, 1e-5)


def padding_has_no_gradient() -> None:
    """Nor gives it any: a padded last token of one sequence, and nothing but padding in another."""
    total = [70, 2]
    case = make(total, total, "bf16", groups=1, heads=2)
    batch = case.batch._replace(position=case.batch.position.index_fill(0, torch.tensor([69, 70, 71]), -1))
    q, k, v = (t.float().requires_grad_() for t in (case.q, case.packed.keys, case.packed.values))
    out = msa_ops.dense_attention(q, case.packed._replace(keys=k, values=v), batch, 0.1)
    grad = torch.randn_like(out)
    want = torch.autograd.grad(out, (q, k, v), grad)
    q, k, v = (t.detach() for t in (q, k, v))
    have_out, lse = triton_msa_dense_ops.attend(q, case.packed._replace(keys=k, values=v), batch, 0.1, lse=True)
    have = triton_msa_dense_backward.gradients(grad, q, k, v, have_out, lse, batch, 0.1)
    for name, a, b in zip("qkv", have, want, strict=True):
        close(f"gradient of {name} beside padding", a, b, 1e-5)
        check(f"gradient of padding's {name}", not a[69:].any())


def main() -> None:
    """All cases."""
    if not triton_msa_tiles.INTERPRETED.value:
        raise SystemExit("set TRITON_INTERPRET=1")
    every_kernel_over_every_cache()
    rounded_reads()
    weights_that_vanish()
    packed_keys_and_their_gradients()
    padding_has_no_gradient()
    print("same results")


if __name__ == "__main__":
    main()

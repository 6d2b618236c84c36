"""The CUDA prefill kernel on a CPU (`tests.support.cuda_shim`): bits in the Triton kernel's order, its walk, its barriers and its banks.

What inline PTX does is not shown here, but in tests/gpu/kernels/test_cuda_prefill.py.
"""

import json
import subprocess
import sys

import pytest
import torch

from samebits.kernels import cuda_prefill, msa_ops
from samebits.kernels.cuda_prefill import Variant
from samebits.kernels.msa import SparseConfig
from samebits.kernels.msa_ops import Pages
from samebits.quant import kv
from tests.support import cuda_shim, ordered_attention
from tests.support.interpreter import interpreted
from tests.support.msa_cases import make, vanishing, with_weights_that_vanish
from tests.support.msa_gpu import same

pytestmark = pytest.mark.skipif(not cuda_shim.AVAILABLE, reason="needs g++ on x86-64")
CONFIG = SparseConfig()
FACTOR = 0.125
SCALE = FACTOR * 0.6931471805599453
RAGGED = ([18, 1, 7, 3], [300, 129, 2200, 128])
LONG = pytest.mark.long
# Format, and variant.
CASES = [
    ("bf16", Variant(2, 1, 4)),
    ("packed", Variant(2, 2, 4)),
    ("nvfp4", Variant(2, 1, 4)),
    pytest.param("packed", Variant(2, 1, 4), marks=LONG),
    pytest.param("packed", Variant(1, 1, 3), marks=LONG),
    pytest.param("bf16", Variant(1, 4, 5), marks=LONG),
    pytest.param("bf16", Variant(2, 2, 3), marks=LONG),
    pytest.param("nvfp4", Variant(1, 1, 5), marks=LONG),
    pytest.param("fp8", Variant(2, 1, 4), marks=LONG),
    pytest.param("fp8", Variant(1, 1, 2), marks=LONG),
]


def plan_of(case, cache, chosen, variant, programs=4, scale=SCALE, **options):
    return cuda_prefill.plan(case.q, cache, chosen, case.batch, scale, True, variant=variant, multiprocessors=programs, **options)


def ordered(plan, case, chosen, packed=None, factor=FACTOR):
    """The model's output and logs."""
    each = [lambda x, i=i: cuda_shim.functions(plan, x)[i] for i in range(2)]
    return ordered_attention.attend(case.q, packed or case.packed, chosen, case.batch, factor, *each)


@pytest.mark.parametrize(("form", "variant"), CASES)
def test_bits_are_those_of_the_order_of_the_triton_kernels(form, variant):
    """Ragged requests that share tiles, one with more blocks than are chosen; two KV heads; heads that do not fill an MMA."""
    case = make(*RAGGED, "nvfp4" if form == "packed" else form, groups=2, heads=12)
    chosen = msa_ops.index_topk(case.index_q, case.index, case.batch, CONFIG)
    plan = plan_of(case, case.packed if form == "packed" else case.cache, chosen, variant)
    want = ordered(plan, case, chosen)
    assert want[0].isfinite().all()
    for seed in range(1 if form != "nvfp4" else 2):
        plan.out.fill_(float("nan"))
        have = cuda_shim.run(plan, seed)
        assert have.conflicts == 0, "a bank is wanted twice at a time"
        assert same(have.out, want[0]) and same(have.lse, want[1])
    items = int((chosen >= 0).sum())
    assert have.mmas == items * 256, "a block was taken by a token that did not choose it, or twice"


def test_blocks_are_brought_once_for_all_tokens_of_a_tile():
    case = make([16], [300], "bf16", groups=2, heads=12)
    chosen = msa_ops.index_topk(case.index_q, case.index, case.batch, CONFIG)
    have = cuda_shim.run(plan_of(case, case.cache, chosen, Variant(2, 1, 4)))
    assert int((chosen >= 0).sum()) == 2 * 48 and have.boxes == 2 * 3 * (4 + 32)


def test_ids_that_no_context_has_are_not_followed():
    """They would lie outside of the bits of blocks in shared memory."""
    case = make([5], [300], "bf16", groups=2, heads=12)
    chosen = msa_ops.index_topk(case.index_q, case.index, case.batch, CONFIG)
    want = cuda_shim.run(plan_of(case, case.cache, chosen, Variant(2, 1, 4)))
    have = cuda_shim.run(plan_of(case, case.cache, torch.where(chosen < 0, 1 << 24, chosen), Variant(2, 1, 4)))
    assert same(have.out, want.out) and have.mmas == want.mmas


def test_rounded_reads():
    """NVFP4 read as E4M3, scales that saturate and NaN scales too."""
    case = make([9], [700], "nvfp4", groups=2, heads=12)
    scales = case.cache.data.view(*case.cache.data.shape[:-2], -1)[..., 8192:]
    g = torch.Generator().manual_seed(1)
    scales[torch.rand(scales.shape, generator=g) < 0.02] = 0x7E
    scales[torch.rand(scales.shape, generator=g) < 0.02] = 0x7F
    k, v = kv.read_pages(case.cache.data, msa_ops._slots(case.cache, 0, 700), 128, torch.bfloat16, rounded=True)
    assert k.isfinite().all() and k.float().abs().max() == 448
    chosen = msa_ops.index_topk(case.index_q, case.index, case.batch, CONFIG)
    plan = plan_of(case, case.cache, chosen, Variant(2, 1, 4), rounded=True)
    want = ordered(plan, case, chosen, case.packed._replace(keys=k, values=v))
    have = cuda_shim.run(plan)
    assert same(have.out, want[0]) and same(have.lse, want[1])


def test_weights_that_vanish_and_padding():
    """Outputs near the least number that fp32 has; tokens at position -1 of a request whose table says nothing; blocks ahead of a token."""
    total = [300, 140]
    case, held = with_weights_that_vanish(make([3, 17], total, "nvfp4", groups=2, heads=12), total)
    position = case.batch.position.clone()
    position[[1, 5]], position[2] = -1, 127
    table = torch.cat((case.cache.table, torch.full_like(case.cache.table[:1], 2**30)))
    request = case.batch.request.clone()
    request[-2:], position[-2:] = 2, -1
    case = case._replace(batch=case.batch._replace(position=position, request=request))
    block = torch.arange(16, dtype=torch.int32).expand(20, 2, 16)
    chosen = torch.where(block <= (position // 128)[:, None, None], block, -1)
    chosen[2, 1, :3] = torch.tensor([1, 2, -1])  # which it does not see
    plan = plan_of(case, Pages(case.cache.data, table), chosen, Variant(2, 1, 4), scale=4 * 0.6931471805599453)
    packed = held[False]._replace(start=torch.cat((held[False].start, torch.zeros(1, dtype=torch.int32))))
    want = ordered(plan, case, chosen, packed, 4.0)
    have = cuda_shim.run(plan)
    assert same(have.out, want[0]) and same(have.lse, want[1]) and vanishing(want[0]) > 20
    assert not have.out[2, 6:].any() and (have.lse[2, 6:] == float("-inf")).all() and have.out[2, :6].any()
    assert not have.out[[1, 5, -2, -1]].any() and (have.lse[[1, 5, -2, -1]] == float("-inf")).all()


def test_the_order_of_joins_is_that_of_the_kernel_in_the_interpreter():
    assert interpreted("tests.kernels.interpret_cuda_prefill") == "same bits"


@LONG
def test_the_command_for_a_gpu_runs_to_its_end_on_a_cpu(tmp_path):
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.cuda_prefill_gpu", "--dry", "--json", tmp_path / "lines.json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("all bits are equal\n"), done.stdout + done.stderr
    lines = json.loads((tmp_path / "lines.json").read_text())
    assert all(
        len([line for line in found if "ms" in line]) >= 4 and not any(line.get("wrong") for line in found) for found in lines.values()
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda q, cache, chosen: (q.float(), cache, chosen),
        lambda q, cache, chosen: (q, cache._replace(values=cache.values.flatten()[1:-127].view(-1, 1, 128)), chosen),
        lambda q, cache, chosen: (q, cache._replace(blocks=1 << 20), chosen),
        lambda q, cache, chosen: (q, cache, chosen[..., :12]),
        lambda q, cache, chosen: (q.repeat(1, 3, 1), cache, chosen),
    ],
    ids=["fp32", "addresses", "contexts", "choices", "heads"],
)
def test_tensors_that_it_does_not_take(change):
    case = make([5], [40], "bf16", groups=1, heads=16)
    chosen = torch.zeros(5, 1, 16, dtype=torch.int32)
    assert cuda_prefill.takes(case.q, case.packed, chosen)
    changed = change(case.q, case.packed, chosen)
    assert not cuda_prefill.takes(*changed)
    with pytest.raises(ValueError, match="does not take"):
        cuda_prefill.plan(*changed, case.batch, 0.1)


@pytest.mark.parametrize("variant", [Variant(2, 1, 6), Variant(2, 4, 2), Variant(3, 1, 2)])
def test_variants_that_do_not_fit(variant):
    case = make([5], [40], "bf16", groups=1, heads=16)
    with pytest.raises(ValueError, match="does not fit"):
        plan_of(case, case.packed, torch.zeros(5, 1, 16, dtype=torch.int32), variant)

"""The CUDA prefill kernel on a CPU (`tests.support.cuda_shim`): bits in the Triton kernel's order, its walk, its barriers and its banks.

What inline PTX does is not shown here, but in tests/gpu/kernels/test_cuda_prefill.py.
"""

import json
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

from samebits.kernels import cuda_module, cuda_prefill, msa_ops
from samebits.kernels.msa import SparseConfig
from tests.support import cuda_shim, ordered_attention
from tests.support.interpreter import interpreted
from tests.support.msa_cases import make, vanishing, with_weights_that_vanish
from tests.support.msa_gpu import same

shim = pytest.mark.skipif(not cuda_shim.AVAILABLE, reason="needs g++ on x86-64")
CONFIG = SparseConfig()
FACTOR = 0.125
SCALE = FACTOR * 0.6931471805599453
RAGGED = ([18, 1, 7, 3, 2], [300, 129, 2200, 128, 127])
LONG = pytest.mark.long


def plan_of(case, cache, chosen, programs=4, scale=SCALE):
    return cuda_prefill.plan(case.q, cache, chosen, case.batch, scale, True, multiprocessors=programs)


def ordered(plan, case, chosen, packed=None, factor=FACTOR):
    """The model's output and logs."""
    each = [lambda x, i=i: cuda_shim.functions(plan, x)[i] for i in range(2)]
    return ordered_attention.attend(case.q, packed or case.packed, chosen, case.batch, factor, *each)


@shim
@pytest.mark.parametrize("form", ["bf16", "packed"])
def test_bits_are_those_of_the_order_of_the_triton_kernels(form):
    """Ragged requests that share tiles, one with more blocks than are chosen; two KV heads; heads that do not fill an MMA."""
    case = make(*RAGGED, "bf16", groups=2, heads=12)
    chosen = msa_ops.index_topk(case.index_q, case.index, case.batch, CONFIG)
    plan = plan_of(case, case.packed if form == "packed" else case.cache, chosen)
    want = ordered(plan, case, chosen)
    assert want[0].isfinite().all()
    for seed in range(2):
        plan.out.fill_(float("nan"))
        have = cuda_shim.run(plan, seed)
        assert have.conflicts == 0, "a bank is wanted twice at a time"
        assert same(have.out, want[0]) and same(have.lse, want[1])
    items = int((chosen >= 0).sum())
    assert have.mmas == items * 256, "a block was taken by a token that did not choose it, or twice"


@shim
def test_blocks_are_brought_once_for_all_tokens_of_a_tile():
    case = make([16], [300], "bf16", groups=2, heads=12)
    chosen = msa_ops.index_topk(case.index_q, case.index, case.batch, CONFIG)
    have = cuda_shim.run(plan_of(case, case.cache, chosen))
    assert int((chosen >= 0).sum()) == 2 * 48 and have.boxes == 2 * 2 * 3 * (4 + 32)


@shim
def test_ids_that_no_context_has_are_not_followed():
    """They would lie outside of the bits of blocks in shared memory."""
    case = make([5], [300], "bf16", groups=2, heads=12)
    chosen = msa_ops.index_topk(case.index_q, case.index, case.batch, CONFIG)
    want = cuda_shim.run(plan_of(case, case.cache, chosen))
    have = cuda_shim.run(plan_of(case, case.cache, torch.where(chosen < 0, 1 << 24, chosen)))
    assert same(have.out, want.out) and have.mmas == want.mmas


@shim
def test_weights_that_vanish_and_padding():
    """Outputs near the least number that fp32 has; tokens at position -1 of a request whose place says nothing; blocks ahead of a token."""
    total = [300, 140]
    case, held = with_weights_that_vanish(make([3, 17], total, "nvfp4", groups=2, heads=12), total)
    position = case.batch.position.clone()
    position[[1, 5]], position[2] = -1, 127
    packed = held[False]._replace(start=torch.cat((held[False].start, torch.full((1,), 2**30, dtype=torch.int32))))
    request = case.batch.request.clone()
    request[-2:], position[-2:] = 2, -1
    case = case._replace(batch=case.batch._replace(position=position, request=request))
    block = torch.arange(16, dtype=torch.int32).expand(20, 2, 16)
    chosen = torch.where(block <= (position // 128)[:, None, None], block, -1)
    chosen[2, 1, :3] = torch.tensor([1, 2, -1])  # which it does not see
    plan = plan_of(case, packed, chosen, scale=4 * 0.6931471805599453)
    want = ordered(plan, case, chosen, packed, 4.0)
    have = cuda_shim.run(plan)
    assert same(have.out, want[0]) and same(have.lse, want[1]) and vanishing(want[0]) > 20
    assert not have.out[2, 6:].any() and (have.lse[2, 6:] == float("-inf")).all() and have.out[2, :6].any()
    assert not have.out[[1, 5, -2, -1]].any() and (have.lse[[1, 5, -2, -1]] == float("-inf")).all()


@shim
def test_the_order_of_joins_is_that_of_the_kernel_in_the_interpreter():
    assert interpreted("tests.kernels.interpret_cuda_prefill") == "same bits"


@shim
@LONG
def test_the_command_for_a_gpu_runs_to_its_end_on_a_cpu(tmp_path):
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.cuda_prefill_gpu", "--dry", "--json", tmp_path / "lines.json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("all bits are equal\n"), done.stdout + done.stderr
    lines = json.loads((tmp_path / "lines.json").read_text())
    assert all(
        len([line for line in found if "ms" in line]) == 4 and not any(line.get("wrong") for line in found) for found in lines.values()
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


def test_the_longest_context_fits():
    assert cuda_prefill.shared_bytes(16, cuda_prefill.WORDS) <= 232448  # what a block of threads may have on sm_90


CUDA = torch.device("cuda")


@pytest.fixture
def hopper(monkeypatch, caplog):
    """A Hopper GPU of four multiprocessors with NVRTC, and no reason given yet."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(cuda_module, "_compiler_absence", lambda: None)
    monkeypatch.setattr(cuda_prefill, "_multiprocessors", lambda device: 4)
    cuda_prefill._say.cache_clear()
    yield caplog
    cuda_prefill._say.cache_clear()


def asked(tokens, form="packed", topk=16):
    """Arguments of `wanted`, as if they were on a GPU."""
    case = make(tokens, [max(300, n) for n in tokens], "bf16" if form == "packed" else form, groups=1, heads=16)
    q = SimpleNamespace(dtype=case.q.dtype, shape=case.q.shape, device=CUDA)
    return q, case.packed if form == "packed" else case.cache, torch.zeros(sum(tokens), 1, topk, dtype=torch.int32), case.batch


def test_many_neighbours_over_bf16_are_wanted_and_nothing_else(hopper):
    assert cuda_prefill.wanted(*asked([32])) and cuda_prefill.wanted(*asked([2, 40], "bf16"))
    for others in (asked([31, 31]), asked([1] * 40), asked([40], "nvfp4"), asked([40], "fp8"), asked([40], topk=32)):
        assert not cuda_prefill.wanted(*others)
    q, *rest = asked([40])
    q.device = torch.device("cpu")
    assert not cuda_prefill.wanted(q, *rest)
    assert not hopper.records


def test_fewer_tiles_than_multiprocessors_stay_in_triton(hopper, monkeypatch):
    monkeypatch.setattr(cuda_prefill, "_multiprocessors", lambda device: 5)
    assert not cuda_prefill.wanted(*asked([32])) and cuda_prefill.wanted(*asked([33]))


def test_why_a_gpu_does_without_is_said_once(hopper, monkeypatch):
    for reason in ("needs NVRTC: not found", None):
        monkeypatch.setattr(cuda_module, "_compiler_absence", lambda reason=reason: reason)
        for _ in range(2):
            assert cuda_prefill.wanted(*asked([40])) == (reason is None)
    (record,) = hopper.records
    assert record.levelname == "WARNING" and record.getMessage().endswith("since the CUDA C++ kernel needs NVRTC: not found")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert not cuda_prefill.wanted(*asked([40])) and hopper.records[-1].getMessage().endswith("kernel needs a Hopper GPU")


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_attention_goes_where_it_is_wanted(monkeypatch):
    """And its errors come out: NVRTC refuses a source that is wrong, not one that is better done in Triton."""
    from samebits.kernels import triton_msa

    args = (object(), object(), object(), object(), 0.1)
    monkeypatch.setattr(triton_msa, "attend_in_triton", lambda *given: ("triton", given))
    monkeypatch.setattr(cuda_prefill, "attend", lambda *given: ("cuda", given))
    monkeypatch.setattr(cuda_prefill, "wanted", lambda *given: given == args[:4])
    assert triton_msa.attend(*args, lse=True) == ("cuda", (*args, True))
    monkeypatch.setattr(cuda_prefill, "wanted", lambda *given: False)
    assert triton_msa.attend(*args, lse=True, rounded=True) == ("triton", (*args, True, True))

    def refused(*given):
        raise RuntimeError("cuda_prefill.cu does not compile")

    monkeypatch.setattr(cuda_prefill, "wanted", lambda *given: True)
    monkeypatch.setattr(cuda_prefill, "attend", refused)
    with pytest.raises(RuntimeError, match="does not compile"):
        triton_msa.attend(*args)

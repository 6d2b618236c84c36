"""The digest kernel on a GPU: hex of the CPU, few launches, one wait, and positions beyond 2^31."""

import warnings

import pytest
import torch

from samebits.quant import digests
from samebits.quant.digests import Digester, digest
from tests.support.digest_cases import cases, noise, stacked_cases

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def on_gpu(t: torch.Tensor) -> torch.Tensor:
    """The same view, strides and offset included, of storage on the GPU."""
    return torch.empty(0, dtype=t.dtype, device="cuda").set_(t.untyped_storage().cuda(), t.storage_offset(), t.shape, t.stride())


@pytest.fixture(params=["triton", "torch"])
def path(request, monkeypatch):
    """Both ways a CUDA tensor can go."""
    if request.param == "torch":
        monkeypatch.setattr(digests, "fast_path", lambda x: False)
    else:
        pytest.importorskip("triton")
        assert digests.fast_path(torch.ones(1, device="cuda"))
    return request.param


def test_hex_is_that_of_the_cpu(path):
    tensors = cases()
    assert digests.digests({n: on_gpu(t) for n, t in tensors.items()}) == digests.digests(tensors)
    for name, t in tensors.items():
        assert digest(on_gpu(t)) == digest(t), name


def test_cpu_and_gpu_tensors_in_one_call_and_many_batches(path, monkeypatch):
    monkeypatch.setattr(digests, "_BATCH_BYTES", 40_000)
    tensors = cases()
    mixed = {n: on_gpu(t) if i % 3 else t for i, (n, t) in enumerate(tensors.items())}
    assert digests.digests(mixed) == digests.digests(tensors)


def test_large_tensors_of_many_tiles(path):
    x = noise(50_000_000)
    assert digests.digests({"a": x.cuda(), "b": x[8:].cuda(), "c": x[1:].cuda()}) == digests.digests({"a": x, "b": x[8:], "c": x[1:]})


def test_the_last_word_beyond_2_to_the_31_counts(monkeypatch):
    """3 GiB of bytes: element positions need more than 32 bits, and no program may fold them onto others."""
    count = 3 * 2**30
    x = torch.zeros(count, dtype=torch.uint8, device="cuda")
    plain = digest(x)
    seen = {plain}
    for at in (0, 2**31 - 1, 2**31, 2**31 + 5, count - 1):
        x[at] = 1
        seen.add(digest(x))
        x[at] = 0
    assert len(seen) == 6 and digest(x) == plain
    x[2**31 + 77] = 1
    by_kernel = digest(x)
    monkeypatch.setattr(digests, "fast_path", lambda x: False)
    assert digest(x) == by_kernel


def test_any_bit_of_any_word_changes_it():
    g = torch.Generator().manual_seed(3)
    x = noise(300_000).cuda()
    before = digest(x)
    for at, bit in zip(
        torch.randint(0, 300_000, (200,), generator=g).tolist(), torch.randint(0, 8, (200,), generator=g).tolist(), strict=True
    ):
        x[at] ^= 1 << bit
        assert digest(x) != before
        x[at] ^= 1 << bit
    assert digest(x) == before


def test_many_tensors_are_one_launch_and_one_wait(monkeypatch):
    pytest.importorskip("triton")
    from samebits.quant import triton_digest

    tensors = {str(i): noise(1000 + 8 * i, i).cuda() for i in range(300)}
    digests.digests(tensors)
    launches = 0
    kernel = triton_digest._lanes_kernel

    class Counting:
        def __getitem__(self, grid):
            nonlocal launches
            launches += 1
            return kernel[grid]

    monkeypatch.setattr(triton_digest, "_lanes_kernel", Counting())
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]) as profile:
        digests.digests(tensors)
    to_host = sum(e.count for e in profile.key_averages() if "Memcpy DtoH" in e.key)
    assert launches == 1 and to_host == 1


def test_stacks_have_the_hex_of_the_cpu_one_by_one(path, monkeypatch):
    for batch in (1, 1 << 30):
        monkeypatch.setattr(digests, "_BATCH_BYTES", batch)
        digester, want = Digester(), {}
        for name, stack in stacked_cases().items():
            names = tuple(f"{name} {i}" for i in range(len(stack)))
            digester.add_stack(names, on_gpu(stack))
            want |= {each: digest(t.clone()) for each, t in zip(names, stack, strict=True)}
        assert digester.finish() == want


def test_batches_are_queued_without_waiting_and_their_memory_may_be_used_again(monkeypatch):
    """The host waits once, for the lanes; memory of a batch may be freed and written over by what is queued behind it."""
    pytest.importorskip("triton")
    monkeypatch.setattr(digests, "_BATCH_BYTES", 1 << 20)
    whole = noise(12 << 20)
    want = {str(i): digest(part) for i, part in enumerate(whole.chunk(12))}
    digests.digests({"warm": whole.cuda()})
    parts = [part.cuda() for part in whole.chunk(12)]
    torch.cuda.synchronize()
    digester = Digester()
    try:
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda._sleep(int(1e8))
            for i in range(12):
                digester.add(str(i), parts[i])
                parts[i] = None
                torch.full((1 << 20,), 77, dtype=torch.uint8, device="cuda")
            before = sum("synchroniz" in str(s.message) for s in seen)
            found = digester.finish()
            after = sum("synchroniz" in str(s.message) for s in seen)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found == want and (before, after) == (0, 1)

"""What a recording says of traces as Kineto writes them: of CUDA by hand, since there is none here, and of gloo for real."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist

from samebits.kernels import expert_peers, tracing, triton_index_parallel, triton_peers
from samebits.kernels.meter import Meter
from samebits.kernels.tracing import PEER_KERNELS, Tracer, read, summary
from tests.support.ranks import on_ranks


def host(name: str, ts: float, dur: float, cat: str = "cpu_op", tid: int = 1, **args) -> dict:
    return {"ph": "X", "cat": cat, "name": name, "pid": 9, "tid": tid, "ts": ts, "dur": dur, "args": args}


def phase(name: str, ts: float, dur: float) -> dict:
    return host(f"samebits:{name}", ts, dur, "user_annotation")


def kernel(name: str, launched: float, ts: float, dur: float, number: int) -> list[dict]:
    launch = host("cudaLaunchKernel", launched, 1, "cuda_runtime", correlation=number)
    return [launch, host(name, ts, dur, "kernel", tid=7, correlation=number)]


GATHER = {"Input Dims": [[800], [200], [], []], "Input type": ["unsigned char", "unsigned char", "", "Scalar"]}


def test_kernels_belong_to_the_phase_that_launched_them():
    """Launches run ahead of the device: what forward launched still runs when the host is in backward."""
    events = [
        phase("forward", 0, 100),
        phase("backward", 100, 100),
        *kernel("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 10, 50, 100, 1),
        *kernel("_grouped_kernel", 20, 60, 30, 2),
        *kernel("_grouped_kernel", 120, 140, 100, 3),
        *kernel("_pull_kernel", 150, 300, 40, 4),
        host("ncclDevKernel_AllGather_RING_LL", 50, 100, "gpu_user_annotation"),
    ]
    found = summary(events, 4)
    forward, backward = found["forward"], found["backward"]
    assert (forward.seconds, backward.seconds) == pytest.approx((1e-4, 1e-4))
    assert forward.overlap.communication == pytest.approx(100e-6)
    assert forward.overlap.exposed == pytest.approx(60e-6), "of 50..150 compute covers 60..90 and 140..150"
    assert (forward.overlap.compute, backward.overlap.compute) == pytest.approx((30e-6, 100e-6))
    assert backward.overlap.communication == backward.overlap.exposed == pytest.approx(40e-6)
    assert found["other"].overlap.communication == 0


def test_peer_kernels_are_known_by_the_names_that_they_have():
    there = vars(triton_peers) | vars(triton_index_parallel) | vars(expert_peers)
    assert all(name in there for name in PEER_KERNELS)
    assert not tracing.is_communication("_grouped_kernel") and tracing.is_communication("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL")


@pytest.mark.parametrize(
    ("name", "args", "kind", "size"),
    [
        ("_allgather_base_", GATHER, "all_gather", 600),
        ("_reduce_scatter_base_", {"Input Dims": [[50], [200]], "Input type": ["float", "float"]}, "reduce_scatter", 600),
        ("alltoall_base_", {"Input Dims": [[30, 4], [10, 4]], "Input type": ["c10::BFloat16", "c10::BFloat16"]}, "all_to_all", 240),
        ("allreduce_", {"Input Dims": [[[40], [8]]], "Input type": ["TensorList"]}, "all_reduce", 2 * 48 * 8 * 3 // 4),
        ("broadcast_", {"Input Dims": [[[16]]], "Input type": ["TensorList"]}, "broadcast", 128),
    ],
)
def test_bytes_of_a_collective_are_what_a_rank_receives(name, args, kind, size):
    record = host("record_param_comms", 12, 1, dtype="Long")  # inside, as NCCL's calls have it
    found = summary([phase("forward", 0, 100), host(f"c10d::{name}", 10, 5, **args), record], 4)["forward"].volume
    assert {k: (v.calls, v.bytes, v.unsized) for k, v in found.items()} == {kind: (1, size, 0)}


def test_records_of_one_moment_are_no_matter():
    records = [host("record_param_comms", 12, 1, dtype="Long", rank=rank) for rank in (0, 1)]
    reduce = host("c10d::allreduce_", 10, 5, **{"Input Dims": [[[4]]], "Input type": ["TensorList"]})
    assert summary([reduce, *records], 2)["other"].volume["all_reduce"].bytes == 32


def test_a_collective_of_unknown_size_is_counted_as_such():
    found = summary([host("c10d::allreduce_", 10, 5, **{"Input Dims": [[[4]]], "Input type": ["TensorList"]})], 2)["other"].volume
    assert (found["all_reduce"].calls, found["all_reduce"].bytes, found["all_reduce"].unsized) == (1, 0, 1)


def test_on_a_cpu_operations_that_call_others_are_no_compute():
    events = [
        phase("backward", 0, 100),
        host("autograd::engine::evaluate_function: MmBackward0", 0, 90),
        host("aten::mm", 5, 20),
        host("c10d::allreduce_", 30, 50, **{"Input Dims": [[[4]]], "Input type": ["TensorList"]}),
        host("gloo:all_reduce", 32, 40, "user_annotation", tid=2, **{"Input Dims": [[4]], "Input type": ["float"]}),
        host("aten::add", 60, 6, tid=3),
    ]
    found = summary(events, 2)["backward"]
    assert found.overlap.compute == pytest.approx(26e-6)
    assert found.overlap.communication == pytest.approx(40e-6) and found.overlap.exposed == pytest.approx(34e-6)
    assert found.volume["all_reduce"].bytes == 16, "2 * 4 * 4 bytes * (2 - 1) / 2: the span of gloo says that they are floats"


def memory(ts: float, address: int, size: int) -> dict:
    return {"name": "[memory]", "ts": ts, "args": {"Addr": address, "Bytes": size, "Device Type": 0}}


def test_peaks_are_of_what_the_recording_allocated():
    events = [
        phase("forward", 0, 10),
        phase("backward", 10, 10),
        phase("forward", 20, 10),
        *(memory(*change) for change in ((1, 1, 100), (2, 2, 50), (3, 2, -50), (4, 9, -1000), (12, 3, 70), (15, 1, -100), (25, 4, 10))),
    ]
    found = summary(events, 1)
    assert (found["forward"].peak, found["backward"].peak) == (150, 170), "address 9 was there before"


def _recorded(rank: int, world: int) -> dict:
    """One step of two phases on two ranks: gathers of bytes in forward, a sum in backward."""
    folder = tracing.Path(tracing.os.environ["TRACED"])
    tracer = Tracer(folder, first=2, steps=1)
    meter = Meter("cpu", tracer.boundary)
    parameter = torch.nn.Parameter(torch.ones(4, 4))
    for step in (1, 2, 3):
        with tracer.recording("train", step, lambda: {"base": 7}):
            meter.enter("forward")
            out = torch.empty(64 * world, dtype=torch.uint8)
            dist.all_gather_into_tensor(out, torch.full((64,), rank, dtype=torch.uint8))
            torch.mm(torch.ones(64, 64), torch.ones(64, 64))
            meter.enter("backward")
            dist.all_reduce(torch.ones(10))
            meter.enter("optimizer")
            loss = torch.nn.functional.linear(torch.ones(1, 4), parameter).sum()
            loss.backward()
            parameter.grad = loss = None
            meter.stop()
        # What verl does to move a model to another device; it refuses a tensor to which the profiler still refers.
        torch.utils.swap_tensors(parameter, torch.nn.Parameter(torch.ones(4, 4)))
    return {name: measured.seconds for name, measured in meter.take().items()}


def test_two_ranks_record_the_wanted_step_only(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACED", str(tmp_path / "traces"))
    on_ranks(2, _recorded, tmp_path)
    found = read(tmp_path / "traces")
    assert [(one["step"], one["stretch"], one["rank"], one["held"]) for one in found] == [(2, "train", r, {"base": 7}) for r in (0, 1)]
    for one in found:
        phases = one["phases"]
        assert list(phases) == ["forward", "backward", "optimizer", "other"]
        assert phases["forward"]["volume"] == {"all_gather": {"calls": 1, "bytes": 64, "unsized": 0}}
        assert phases["backward"]["volume"] == {"all_reduce": {"calls": 1, "bytes": 40, "unsized": 0}}
        for name in ("forward", "backward"):
            overlap = phases[name]["overlap"]
            assert 0 < overlap["exposed"] <= overlap["communication"] and phases[name]["seconds"] > 0
        assert phases["forward"]["overlap"]["compute"] > 0 and phases["forward"]["peak"] >= 64 * 64 * 4
        assert phases["optimizer"]["volume"] == {} and phases["optimizer"]["overlap"]["communication"] == 0


def test_without_the_variable_nothing_listens(monkeypatch, tmp_path):
    monkeypatch.delenv(tracing.VARIABLE, raising=False)
    tracing.tracer.cache_clear()
    assert tracing.tracer() is None and tracing.boundary() is None
    with tracing.recording("train", 1, lambda: pytest.fail("nothing is held")):
        pass
    monkeypatch.setenv(tracing.VARIABLE, json.dumps({"folder": str(tmp_path), "first": 3, "steps": 2}))
    tracing.tracer.cache_clear()
    try:
        assert tracing.tracer().wanted == range(3, 5) and tracing.boundary() is not None
    finally:
        tracing.tracer.cache_clear()

"""Benchmarks of kernels: a peer's error is a line, no time stands for another result, and every line is saved as soon as it is there."""

import json
import sys
from importlib.util import find_spec

import pytest

from samebits.kernels import bench_msa_peers, bench_record
from samebits.kernels.bench_msa_peers import Call, lines, load_peers
from tests.support.interpreter import interpreted

HEAD = {"requests": 1, "peer": "someone"}


def fails(*_):
    raise ValueError("no such shape\nand more")


def test_times_and_distances_are_lines():
    found = {"scores": Call([lambda: None]), "attention": Call([lambda: None], lambda: 0.25)}
    have = lines(HEAD, lambda case: found if case == "case" else {}, ("case",), lambda calls: 7.0 + len(calls))
    assert list(have) == [HEAD | {"name": "scores", "us": 8.0}, HEAD | {"name": "attention", "us": 8.0, "distance": 0.25}]


def test_an_error_of_one_call_leaves_the_others():
    found = {"scores": Call([fails]), "top-k": Call([lambda: None], fails), "attention": Call([lambda: None])}
    first, second, third = lines(HEAD, lambda: found, (), lambda calls: [call() for call in calls] and 1.0)
    assert first == HEAD | {"name": "scores", "error": "ValueError: no such shape"} and "us" not in first
    assert second == HEAD | {"name": "top-k", "us": 1.0, "error": "ValueError: no such shape"}
    assert third == HEAD | {"name": "attention", "us": 1.0}


def test_a_peer_that_takes_nothing_is_one_line():
    assert list(lines(HEAD, fails, (), lambda calls: 1.0)) == [HEAD | {"name": "someone, all", "error": "ValueError: no such shape"}]


def test_absent_peers_are_named(monkeypatch):
    for name in ("flashinfer", "vllm"):
        monkeypatch.setitem(sys.modules, name, None)
    found = {}
    assert load_peers(found) == [] and set(found) == {"flashinfer msa_ops", "vllm minimax_m3"}
    assert all(text.startswith("not installed: ") for text in found.values())


def test_a_peer_that_cannot_be_imported_for_another_reason_says_so(monkeypatch):
    def broken():
        raise RuntimeError("no CUDA here\nmore")

    monkeypatch.setattr(bench_msa_peers, "_vllm", broken)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    found = {}
    assert load_peers(found) == [] and found["vllm minimax_m3"] == "cannot be used: RuntimeError: no CUDA here"


def test_another_flashinfer_is_refused(monkeypatch):
    """Its rules of dispatch are set: where they have other names, it would be another program that is timed."""
    import types

    package, ops, dispatch = (types.ModuleType(n) for n in ("flashinfer", "flashinfer.msa_ops", "flashinfer.msa_ops._sm90_dispatch"))
    package.__version__, package.msa_ops, ops._sm90_dispatch = "9.9", ops, dispatch
    for module in (package, ops, dispatch):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(ImportError, match="has no _cute_proxy_decode_preferred"):
        bench_msa_peers._flashinfer()


@pytest.fixture
def record(monkeypatch):
    """A record and what it saved, as it was then."""
    monkeypatch.setattr(bench_record, "machine", lambda device: {"machine": {}, "versions": {}})
    saved = []
    return bench_record.Record(lambda result: saved.append(json.loads(json.dumps(result)))), saved


def test_a_run_that_dies_keeps_its_lines(record, tmp_path):
    record, saved = record

    def dying():
        yield {"name": "first"}
        yield {"name": "second"}
        raise KeyboardInterrupt

    record.update(right=True)
    with pytest.raises(KeyboardInterrupt):
        record.add(dying())
    assert [len(result.get("results", [])) for result in saved] == [0, 1, 2]
    assert saved[-1]["results"][1] == {"name": "second"} and saved[-1]["right"] and saved[-1]["seconds"] >= 0
    out = tmp_path / "out.json"
    for result in saved:
        bench_record.write(out, result)
    assert json.loads(out.read_text()) == saved[-1] and list(tmp_path.iterdir()) == [out]
    bench_record.write(None, {})


def test_parts_are_known():
    assert bench_record.chosen_parts(None, ("a", "b")) == {"a", "b"} == bench_record.chosen_parts([], ("a", "b"))
    assert bench_record.chosen_parts(["b"], ("a", "b")) == {"b"}
    with pytest.raises(ValueError, match="no part called 'c'; there are: a, b"):
        bench_record.chosen_parts(["b", "c"], ("a", "b"))


@pytest.mark.parametrize("name", ["bench_msa", "bench_dense", "bench_rows", "bench_moe"])
def test_without_a_gpu_there_is_one_line(name, capsys, monkeypatch):
    pytest.importorskip("triton")
    import importlib

    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert importlib.import_module(f"samebits.kernels.{name}").main([]) == 2
    assert "needs a CUDA GPU" in (said := capsys.readouterr().err) and said.count("\n") == 1


@pytest.fixture(scope="module")
def dry():
    """Every benchmark from its first line to its last, on a CPU."""
    if find_spec("triton") is None:
        pytest.skip("needs Triton")
    return json.loads(interpreted("tests.kernels.dry_bench").splitlines()[-1])


def test_attention_has_all_its_lines_in_one_run(dry):
    found = {(line.get("context", line.get("tokens")), line["format"], line["name"]) for line in dry["msa"]["results"]}
    decode = {(256, form, name) for form in ("nvfp4", "fp8", "bf16") for name in ("scores", "top-k", "attention", "chain")}
    stock = {(256, "bf16", f"vllm {name}") for name in ("attention", "chain", "prefill")}
    long = {(256, form, "prefill") for form in ("nvfp4", "fp8", "bf16")} | {
        (256, "bf16", name) for name in ("training forward", "backward")
    }
    one = {(n, form, "project and insert, one launch") for n in (512, 1) for form in ("nvfp4", "bf16")}
    apart = {(512, "bf16", "cuBLAS bf16, then vllm insert"), (512, "nvfp4", "cuBLAS bf16, then insert")}
    beside = {(256, form, "prefill, alike") for form in ("nvfp4", "fp8", "bf16")} | {(256, "bf16", "vllm prefill, alike")}
    names = (", alike", ", Triton", ", Triton, alike")
    beside |= {(256, "bf16", f"{what}{n}") for what in ("prefill", "training forward") for n in names}
    assert found >= decode | stock | long | one | apart | beside
    assert not [name for _, form, name in found if form != "bf16" and "Triton" in name]
    assert len([n for n in dry["msa"]["equal"] if "CUDA" in n]) == 4
    floors = [line["name"] for line in dry["msa"]["results"] if "context" in line and "floor_us" in line]
    assert floors == ["scores", "attention", "chain"] * 3 and dry["msa"]["copy_gb_s"] == 1000 and dry["msa"]["right"]
    assert {"requests": 1, "context": 256, "format": "fp8", "peer": "vllm", "name": "vllm, all", "error": "ValueError: no E4M3"} in dry[
        "msa"
    ]["results"]


def test_attention_is_compared_with_what_it_must_beat(dry):
    rows = {(row["name"], row["shape"]): row for row in dry["msa"]["compared"]}
    assert rows["prefill: vllm on bf16 pages over our training forward", "256 tokens"]["at_least"] == 1.5
    assert rows["prefill, alike: vllm over ours, bf16 pages", "256 tokens"]["at_least"] == 1.5
    assert rows["training forward, alike, bf16: Triton over ours", "256 tokens"]["ratio"] == 1
    assert rows["training: backward over forward", "256 tokens"]["at_most"] == 3
    assert ("chain: vllm on bf16 over ours on nvfp4", "1 x 256") in rows
    assert ("bf16 pages: cuBLAS bf16, then vllm insert, over one launch", "512 tokens") in rows


def test_ratios_are_the_others_time_over_ours():
    from samebits.kernels.bench_msa import LONG, compared

    found = [{"requests": 8, "context": 9, "format": form, "name": name, "us": us} for form, name, us in (
        ("nvfp4", "chain", 2.0), ("bf16", "chain", 5.0), ("bf16", "vllm chain", 20.0), ("bf16", "vllm attention", 3.0)
    )]  # fmt: skip
    found += [{"tokens": LONG, "format": "bf16", "name": name, "us": us} for name, us in (("training forward", 4.0), ("backward", 10.0))]
    found.append({"tokens": LONG, "format": "bf16", "name": "vllm prefill", "error": "none"})
    ratios = {row["name"]: row["ratio"] for row in compared(found)}
    assert ratios == {
        "chain: vllm on bf16 over ours on nvfp4": 10.0,
        "chain: vllm on bf16 over ours on bf16": 4.0,
        "training: backward over forward": 2.5,
    }


def test_a_cuda_kernel_that_differs_is_no_result(monkeypatch):
    pytest.importorskip("triton")
    import torch

    from samebits.kernels import bench_prefill

    call = (torch.zeros(2), None, None, None, 1.0)
    head, options = {"format": "bf16"}, (True, lambda calls: 1.0)
    monkeypatch.setattr(bench_prefill.cuda_prefill, "takes", lambda *args: True)
    monkeypatch.setattr(bench_prefill.cuda_module, "absence", lambda device: None)
    monkeypatch.setattr(bench_prefill.triton_msa, "attend_in_triton", lambda *args, lse: (torch.zeros(2), torch.ones(1)))
    for out, log, kind in ((0.0, 1.0, ""), (-0.0, 1.0, ", alike"), (0.0, 2.0, ", alike")):
        monkeypatch.setattr(bench_prefill.triton_msa, "attend", lambda *args, lse, o=out, x=log: (torch.full((2,), o), torch.full((1,), x)))
        equal = {}
        lines = list(bench_prefill.in_triton(head, "prefill", kind, call, *options, equal))
        assert lines == [head | {"name": f"prefill, Triton{kind}", "us": 1.0}] and equal == {f"prefill, CUDA{kind} bf16": not kind}
    monkeypatch.setattr(bench_prefill.cuda_module, "absence", lambda device: "needs a Hopper GPU")
    (line,) = bench_prefill.in_triton(head, "prefill", "", call, *options, equal)
    assert line == head | {"name": "prefill, CUDA", "error": "needs a Hopper GPU"}
    monkeypatch.setattr(bench_prefill.cuda_prefill, "takes", lambda *args: False)
    assert not list(bench_prefill.in_triton(head, "prefill", "", call, *options, equal))


def test_the_others_run_to_their_end(dry):
    assert dry["dense"]["right"] and dry["moe"]["right"] and dry["rows"]["right"]
    assert {line["name"] for line in dry["dense"]["results"]} >= {
        "decode",
        "training forward",
        "backward",
        "dense forward",
        "sparse forward",
    }
    assert len(dry["moe"]["linear"]) == 6 and not any("error" in line for line in dry["moe"]["experts"] + dry["moe"]["training"])
    assert dry["moe"]["absent"] == ["vLLM: not installed: No module named 'vllm'"] or dry["moe"]["absent"][0].startswith(
        "vLLM: cannot be used"
    )
    assert all(line["distance"] < 1e-2 for line in dry["rows"]["results"]) and len(dry["rows"]["results"]) > 20

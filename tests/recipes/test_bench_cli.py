"""`samebits bench kernels`: one line for what cannot be measured, and results written where they are asked for."""

import json
import sys
import types

import pytest
import torch
from typer.testing import CliRunner

from samebits.kernels import bench_moe
from samebits.recipes import bench_cli
from samebits.recipes.cli import app


def run(*arguments: str):
    return CliRunner().invoke(app, ["bench", "kernels", *arguments])


@pytest.fixture
def gpu(monkeypatch):
    """A machine that says it has a GPU and Triton, and a benchmark of known result."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench_cli, "find_spec", lambda name: object())
    shown = []

    def measure(save, parts):
        result = {"right": True, "results": [1], "parts": parts}
        save(result)
        return result

    module = types.SimpleNamespace(run=measure, show=shown.append, PARTS=("one", "two"))
    for name in bench_cli.KERNELS.values():
        monkeypatch.setitem(sys.modules, name, module)
    return module, shown


def test_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = run("--what", "msa")
    assert done.exit_code == 2 and "need a CUDA GPU" in done.stderr and done.stderr.count("\n") == 1


def test_unknown_kernels_are_named(gpu):
    done = run("--what", "mas")
    assert done.exit_code == 2 and "'mas'" in done.stderr and "msa" in done.stderr


def test_a_folder_that_does_not_exist_is_said_before_the_run(gpu, tmp_path):
    done = run("--what", "msa", "--json", str(tmp_path / "none" / "out.json"))
    assert done.exit_code == 2 and "there is no folder" in done.stderr and not gpu[1]


@pytest.mark.parametrize("what", ["moe", "msa", "dense", "rows", "parallel"])
def test_results_are_shown_and_written(gpu, tmp_path, what):
    out = tmp_path / "out.json"
    assert run("--what", what, "--json", str(out)).exit_code == 0
    assert json.loads(out.read_text())["results"] == [1] and len(gpu[1]) == 1


def test_parts_are_run_alone_and_unknown_ones_named(gpu, tmp_path):
    out = tmp_path / "out.json"
    assert run("--what", "msa", "--part", "two", "--json", str(out)).exit_code == 0
    assert json.loads(out.read_text())["parts"] == ["two"]
    done = run("--what", "msa", "--part", "three")
    assert done.exit_code == 2 and done.stderr == "samebits: no part called 'three' of msa; there are: one, two\n" and len(gpu[1]) == 1


def test_every_benchmark_has_its_parts():
    pytest.importorskip("triton")
    import importlib

    for name in bench_cli.KERNELS.values():
        module = importlib.import_module(name)
        assert module.PARTS and callable(module.run) and callable(module.show)


def test_disagreement_is_exit_1(gpu):
    gpu[0].run = lambda save, parts: {"right": False}
    done = run("--what", "msa")
    assert done.exit_code == 1 and "disagree" in done.stderr


def test_what_a_machine_lacks_is_one_line_before_the_run(gpu):
    gpu[0].missing = lambda: "layers over several GPUs need 2 CUDA GPUs, here is 1"
    done = run("--what", "parallel")
    assert done.exit_code == 2 and not gpu[1]
    assert done.stderr.strip() == "samebits: layers over several GPUs need 2 CUDA GPUs, here is 1"


def test_a_run_that_ended_early_shows_and_says_so(gpu, tmp_path):
    gpu[0].run = lambda save, parts: {"right": False, "failed": "rank 1: ValueError: too small"}
    done = run("--what", "parallel")
    assert done.exit_code == 1 and done.stderr.strip() == "samebits: stopped: rank 1: ValueError: too small" and len(gpu[1]) == 1


def test_the_peer_computes_the_same_experts(monkeypatch):
    """grouped_mm in bf16 with adapters of its own, against the torch reference: a peer that computes less would be no peer."""
    from samebits.kernels.linear import LoRA
    from samebits.kernels.moe import ExpertLoRA, moe

    monkeypatch.setattr(bench_moe, "EXPERTS", 6)
    monkeypatch.setattr(bench_moe, "TOP", 2)
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int):
        return torch.randn(shape, generator=g).bfloat16()

    w13, w2 = normal(6, 96, 64) * 0.1, normal(6, 64, 48) * 0.1
    lora = ExpertLoRA(*(LoRA(normal(1, 6, 16, k) * 0.1, normal(1, 6, n, 16) * 0.1) for n, k in ((48, 64), (48, 64), (64, 48))))
    ids = torch.stack([torch.randperm(6, generator=g)[:2] for _ in range(20)])
    x, weights = normal(20, 64), torch.rand(20, 2, generator=g)
    for adapters in (None, lora):
        have = bench_moe.grouped_experts(x, w13, w2, ids, weights, adapters).double()
        want = moe(x, w13, w2, ids, weights, bench_moe.ACT, adapters).double()
        assert (have - want).norm() < 2e-2 * want.norm()

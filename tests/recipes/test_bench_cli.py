"""`samebits bench`: one line for what cannot be measured."""

import pytest
import torch
from typer.testing import CliRunner

from samebits.kernels import bench_moe
from samebits.recipes.cli import app


def test_an_unknown_benchmark_is_one_line():
    result = CliRunner().invoke(app, ["bench", "kernels", "--what", "mow"])
    assert result.exit_code == 2 and result.stderr == "samebits: no benchmark 'mow': one of moe\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_it_says_so():
    result = CliRunner().invoke(app, ["bench", "kernels"])
    assert result.exit_code == 2 and result.stderr == "samebits: bench kernels needs a CUDA GPU\n"
    assert bench_moe.main([]) == 2


@pytest.mark.parametrize("right", [True, False])
def test_results_are_written_and_wrong_ones_are_status_1(right, tmp_path, monkeypatch):
    def run(save):
        save({"right": right})
        return {"right": right}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench_moe, "run", run)
    monkeypatch.setattr(bench_moe, "show", lambda result: None)
    result = CliRunner().invoke(app, ["bench", "kernels", "--what", "moe", "--json", str(tmp_path / "out.json")])
    assert result.exit_code == (0 if right else 1)
    assert '"right"' in (tmp_path / "out.json").read_text()


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

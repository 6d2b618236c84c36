"""`samebits bench kernels`: one line for what cannot be measured, and results written where they are asked for."""

import json
import sys
import types

import pytest
import torch
from typer.testing import CliRunner

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
    module = types.SimpleNamespace(run=lambda: {"equal": {"a": True}, "results": [1]}, show=shown.append)
    monkeypatch.setitem(sys.modules, "samebits.kernels.bench_msa", module)
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
    assert done.exit_code == 2 and "no such folder" in done.stderr and not gpu[1]


def test_results_are_shown_and_written(gpu, tmp_path):
    out = tmp_path / "out.json"
    assert run("--what", "msa", "--json", str(out)).exit_code == 0
    assert json.loads(out.read_text())["results"] == [1] and len(gpu[1]) == 1


def test_disagreement_is_exit_1(gpu):
    gpu[0].run = lambda: {"equal": {"a": True, "b": False}}
    done = run("--what", "msa")
    assert done.exit_code == 1 and "disagree" in done.stderr

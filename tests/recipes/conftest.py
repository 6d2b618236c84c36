"""Real evaluations and an adapter on the shipped tiny model, shared by the slow tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from samebits.quant.adapter import AdapterSpec, ModelShape, target_roles
from samebits.quant.profile import get_profile
from tests.support.adapters import random_adapter

RECIPE = "recipes/tiny_m3_grpo.yaml"
EVALUATED = ("--limit", "8", "-n", "4", "--seed", "11")
FOUR_AT_A_TIME = "actor_rollout_ref.rollout.max_num_seqs=4"


def tiny_spec() -> AdapterSpec:
    """What an adapter of the shipped recipe consists of."""
    config = json.loads(Path("recipes/tiny_m3_base/config.json").read_text())
    return AdapterSpec(ModelShape.from_config(config), 32, target_roles("all"))


@pytest.fixture(scope="session")
def tiny_adapter(tmp_path_factory) -> Path:
    """An adapter of the shipped recipe on CPU that changes what the model says."""
    return random_adapter(tmp_path_factory.mktemp("adapters") / "step_7", tiny_spec(), get_profile("w4a16-fp32").hash, version=7)


def start_evaluation(adapter: Path, out: Path, *settings: str) -> subprocess.Popen:
    """`samebits eval` of the shipped recipe with an engine in its process."""
    command = [sys.executable, "-m", "samebits.recipes.cli", "eval", RECIPE, "device=cpu", "threads=1", FOUR_AT_A_TIME, *settings]
    command += ["--adapter", str(adapter), *EVALUATED, "--out", str(out), "--json", str(out.with_suffix(".json"))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | {"COLUMNS": "160"})


@pytest.fixture(scope="session")
def straight(tiny_adapter, tmp_path_factory) -> Path:
    """Folder of an undisturbed evaluation of the adapter, eight problems four times."""
    out = tmp_path_factory.mktemp("evaluations") / "straight"
    process = start_evaluation(tiny_adapter, out)
    said, _ = process.communicate(timeout=400)
    assert process.returncode == 0, said
    return out


def texts(folder: Path) -> dict[tuple[str, int], str]:
    """Response texts of an evaluation by problem and sample number; fails where one is there twice."""
    lines = [json.loads(line) for line in (folder / "responses.jsonl").read_text().splitlines()]
    found = {(line["problem"], line["sample"]): line["text"] for line in lines}
    assert len(found) == len(lines)
    return found

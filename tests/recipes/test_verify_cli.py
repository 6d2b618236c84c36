"""`samebits verify` as people call it."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from samebits.alignment_checks.report import SCHEMA
from samebits.recipes.cli import app

RECIPE = "recipes/tiny_m3_grpo.yaml"
TWO_RANKS = ("device=cpu", "trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.tensor_model_parallel_size=2")


def verify(*arguments: str, timeout: int = 400) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "samebits.recipes.cli", "verify", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["all", "recipes/none.yaml"], "no recipe at recipes/none.yaml"),
        (["weights", RECIPE, "nonsense=1"], "unknown key nonsense"),
        (["all", RECIPE, "device=cpu", "--inject", "nothing_such"], "there is no fault 'nothing_such'"),
        (["all", RECIPE, *TWO_RANKS, "--inject", "router_in_bf16"], "router_in_bf16 changes the engine in its own process, which tensor"),
        (["all", RECIPE, "device=cpu", "--check", "weights.nothing"], "there is no check 'weights.nothing'"),
        (["all", RECIPE, "--json", "no/such/folder/x.json"], "there is no folder"),
        (["weights", RECIPE, "--html", "docs"], "docs is a folder"),
        (["weights", "docs"], "docs is no run directory"),
        (["logprobs", RECIPE, "device=cpu", "model=no_such_model"], "no_such_model"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments, says, capfd):
    with pytest.raises(SystemExit) as end:
        app(["verify", *arguments])
    errors = capfd.readouterr().err
    assert end.value.code == 2, errors
    assert says in errors and "Traceback" not in errors
    assert len(errors.strip().splitlines()) == 1, errors


def test_a_run_without_an_adapter_is_refused(tmp_path):
    (tmp_path / "config.yaml").write_text("recipe: {}\n")
    done = verify("all", str(tmp_path))
    assert done.returncode == 2 and "config.yaml cannot be read" in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_list_of_faults():
    done = verify("--list-faults")
    lines = done.stdout.strip().splitlines()
    assert done.returncode == 0 and len(lines) >= 45
    assert all(len(line.split(maxsplit=1)) == 2 for line in lines)


@pytest.mark.slow
def test_no_verdict_in_time_is_status_2():
    done = verify("all", RECIPE, "device=cpu", "--timeout", "10")
    assert done.returncode == 2 and "no verdict after 10 s" in done.stderr and "Traceback" not in done.stderr


def catches_sigterm(pid: int) -> bool:
    (mask,) = re.findall(r"^SigCgt:\t(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(mask, 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status", "says"), [(signal.SIGTERM, 143, "terminated"), (signal.SIGINT, 130, "interrupted")])
def test_a_signal_ends_it_with_one_line(number, status, says):
    command = [sys.executable, "-m", "samebits.recipes.cli", "verify", "all", RECIPE, "device=cpu"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not catches_sigterm(process.pid):  # before it imported what it needs for that, a signal ends it as any Python program
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == status, errors
    assert says in errors and len(errors.strip().splitlines()) == 1, errors


@pytest.mark.slow
def test_an_injected_fault_end_to_end(tmp_path):
    report, page = tmp_path / "r.json", tmp_path / "r.html"
    arguments = [
        "all",
        RECIPE,
        "device=cpu",
        "--inject",
        "base_changed",
        "--check",
        "weights.base",
        "--json",
        str(report),
        "--html",
        str(page),
    ]
    done = verify(*arguments)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "layers.1.block_sparse_moe.experts.5.w2 differs" in done.stdout and "DISAGREE" in done.stdout
    data = json.loads(report.read_text())
    assert data["schema"] == SCHEMA and data["verdict"] == "disagree" and data["settings"]["fault"].startswith("base_changed")
    assert data["results"][0]["findings"][0]["place"]["expert"] == 5
    assert "disagree" in Path(page).read_text()

"""`samebits eval` with a real engine in its process, on the shipped tiny model: killed and resumed, and what a bad engine says."""

from __future__ import annotations

import json
import signal
import time

import pytest
from typer.testing import CliRunner

from samebits.recipes.cli import app

from .conftest import RECIPE, start_evaluation, texts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_killed_evaluation_ends_as_an_undisturbed_one(straight, tiny_adapter, tmp_path):
    out = tmp_path / "killed"
    log = out / "responses.jsonl"
    process = start_evaluation(tiny_adapter, out)
    deadline = time.monotonic() + 300
    while process.poll() is None and not (log.is_file() and log.read_bytes().count(b"\n") >= 4):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert process.poll() is None, process.stdout.read()
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = log.read_bytes()
    assert 4 <= before.count(b"\n") < 32
    resumed = start_evaluation(tiny_adapter, out)
    said, _ = resumed.communicate(timeout=400)
    assert resumed.returncode == 0, said
    kept = before.count(b"\n")
    assert f"{kept} of 32 responses are there already" in said and "with step_7 (version 7)" in said
    assert log.read_bytes().startswith(before[: before.rfind(b"\n") + 1])
    assert texts(out) == texts(straight) and len(texts(out)) == 32
    assert out.with_suffix(".json").read_bytes() == straight.with_suffix(".json").read_bytes()


def test_settings_of_another_adapter_are_refused(straight):
    arguments = ["eval", RECIPE, "device=cpu", "--limit", "8", "-n", "4", "--seed", "11", "--out", str(straight)]
    result = CliRunner().invoke(app, arguments)
    (line,) = result.stderr.strip().splitlines()
    digest = json.loads((straight / "settings.json").read_text())["adapter"]
    assert result.exit_code == 2 and f"adapter {digest} there, none now" in line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--adapter", "absent"], "no adapter at absent"),
        (["--max-tokens", "5000"], "prompt and response need 50"),
        (["model=absent"], "model: no model at"),
    ],
)
def test_bad_input_is_found_before_the_engine_starts(tmp_path, arguments, said):
    result = CliRunner().invoke(app, ["eval", RECIPE, "device=cpu", "--out", str(tmp_path / "o"), *arguments])
    (line,) = result.stderr.strip().splitlines()
    assert result.exit_code == 2 and said in line and not (tmp_path / "o").exists()

"""`samebits quantize` and `samebits plan weights` as a user calls them: exit status, one line on standard error, files, and imports."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from samebits.quant.checkpoint import Checkpoint, quantize_tensors
from samebits.quant.profile import get_profile
from samebits.recipes.cli import app
from tests.support import random_m3, stored

M3 = Path(__file__).parents[1] / "fixtures" / "minimax_m3_config.json"
runner = CliRunner()


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return stored.write(tmp_path_factory.mktemp("source"), random_m3.tensors(), shards=4)


def run(*args):
    result = runner.invoke(app, [str(a) for a in args])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def one_line(result) -> str:
    assert result.exit_code == 2 and result.stderr.startswith("samebits: ") and result.stderr.count("\n") == 1, result.stderr
    return result.stderr


def test_quantize_writes_a_checkpoint_and_says_what_it_did(source, tmp_path):
    result = run("quantize", source, tmp_path / "out", "--workers", "2")
    assert result.exit_code == 0, result.stderr
    assert "4 files, 217 tensors, 0.001 GB to 0.001 GB" in result.stdout
    checkpoint = Checkpoint(tmp_path / "out")
    for name, want in quantize_tensors(random_m3.tensors(), get_profile("w4a16")).items():
        assert torch.equal(checkpoint.tensor(name).view(-1).view(torch.uint8), want.view(-1).view(torch.uint8))
    assert "already holds a finished checkpoint" in one_line(run("quantize", source, tmp_path / "out"))


def test_quantize_takes_the_profile(source, tmp_path):
    assert run("quantize", source, tmp_path / "out", "--profile", "w4a4").exit_code == 0
    assert Checkpoint(tmp_path / "out").config["samebits"]["profile"] == "w4a4"
    assert "unknown numerics profile 'w3a3'" in one_line(run("quantize", source, tmp_path / "x", "--profile", "w3a3"))


def test_what_was_taken_over_and_left_out_is_said(tmp_path):
    stored.write(tmp_path / "source", stored.modelopt(random_m3.tensors()))
    result = run("quantize", tmp_path / "source", tmp_path / "out")
    assert "73 weights were quantized already and keep their codes" in result.stdout
    assert "left out: 48 activation scales, which profile w4a16 does not use" in result.stdout


def test_bad_input_is_one_line_and_status_2(source, tmp_path):
    out = tmp_path / "out"
    assert "no folder" in one_line(run("quantize", tmp_path / "nothing", out))
    assert "is the source itself" in one_line(run("quantize", source, source))
    tensors = random_m3.tensors()
    tensors["model.layers.1.self_attn.o_proj.weight"][3, 4] = float("nan")
    stored.write(tmp_path / "nan", tensors)
    assert "model.layers.1.self_attn.o_proj.weight: holds NaN" in one_line(run("quantize", tmp_path / "nan", out))
    stored.write(tmp_path / "short", random_m3.tensors(), shards=3)
    shard = tmp_path / "short" / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-7])
    line = one_line(run("quantize", tmp_path / "short", tmp_path / "never"))
    assert f"{shard} is truncated" in line and not (tmp_path / "never").exists()
    (tmp_path / "locked").write_text("")
    assert "Not a directory" in one_line(run("quantize", source, tmp_path / "locked" / "out"))


def command(*args) -> list[str]:
    return [sys.executable, "-m", "samebits.recipes.cli", *map(str, args)]


def hears() -> None:
    """What a shell runs in the background ignores SIGINT, and so does all that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def until_shards(process, out: Path, count: int) -> None:
    while process.poll() is None and len(list(out.glob("*.safetensors"))) < count:
        time.sleep(0.002)


def test_the_command_stopped_and_killed_and_run_again_gives_the_same_bytes(tmp_path):
    sizes = dict(hidden=256, intermediate=512, experts=16, dense=1024)
    source = stored.write(tmp_path / "source", random_m3.tensors(**sizes), shards=12, config=random_m3.config(**sizes))
    assert run("quantize", source, tmp_path / "want").exit_code == 0
    out = tmp_path / "out"
    for count, sign, status in ((1, signal.SIGINT, 1), (4, signal.SIGKILL, -signal.SIGKILL)):
        arguments = command("quantize", source, out, "--workers", "1")
        for _ in range(5):  # on a busy machine it may be ready before it is looked at
            process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, preexec_fn=hears)
            until_shards(process, out, count)
            process.send_signal(sign)
            said = process.communicate(timeout=60)[1]
            if process.returncode:
                break
            shutil.rmtree(out)
        assert process.returncode == status and not (out / "config.json").exists()
        if sign == signal.SIGINT:
            assert said == "samebits: stopped; the same command goes on from here\n"
            assert not any("tmp" in p.name for p in out.iterdir())
    again = subprocess.run(command("quantize", source, out), capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stderr
    assert "files were finished before" in again.stdout
    assert {p.name: p.read_bytes() for p in out.iterdir()} == {p.name: p.read_bytes() for p in (tmp_path / "want").iterdir()}


def test_quantize_and_plan_import_nothing_heavy(source, tmp_path):
    code = (
        "import sys\nfrom samebits.recipes.cli import app\n"
        f"app({['quantize', str(source), str(tmp_path / 'out')]!r}, standalone_mode=False)\n"
        f"app({['plan', 'weights', str(M3)]!r}, standalone_mode=False)\n"
        "print([m for m in ('verl', 'ray', 'vllm', 'transformers', 'samebits.trainer', 'samebits.rollout') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=os.environ)
    assert result.stdout.rstrip().endswith("[]"), result.stdout + result.stderr


# ------------------------------------------------------------------------------------------------------------------------- plan


def test_plan_weights_gives_m3_s_size_and_what_separates_it_from_mxfp8(tmp_path):
    result = run("plan", "weights", M3, "--json", tmp_path / "plan.json")
    assert result.exit_code == 0
    assert "w4a16: 250.1 GB. Counted: codes and scales, embedding, head, router, norms, vision tower and projector." in result.stdout
    assert "all-mxfp8: 443.7 GB, 193.7 GB more in expert.gate, expert.up, expert.down" in result.stdout
    assert "has 451.5 GB: 193.7 GB of experts and 7.7 GB of MTP more than 250.1 GB." in result.stdout
    rows = [line for line in result.stdout.splitlines() if "expert.up" in line]
    assert "137,707,388,928" in rows[0] and "77.460" in rows[0] and "142.011" in rows[0] and "64.550" in rows[0]
    figures = json.loads((tmp_path / "plan.json").read_text())
    assert figures["plan"]["bytes"] == sum(r["bytes"] for r in figures["plan"]["rows"]) == 250_088_146_432
    assert figures["mxfp8"]["mtp"]["bytes"] == 7_728_059_904
    down = {"role": "expert.down", "format": "nvfp4", "tensors": 7296, "elements": 137707388928, "bytes": 77460435456}
    assert down in figures["plan"]["rows"]


def test_plan_weights_of_a_folder_without_vision_and_mtp(source):
    result = run("plan", "weights", source)
    assert result.exit_code == 0 and "vision" not in result.stdout and "MTP" not in result.stdout


def test_plan_weights_refuses_in_one_line(tmp_path):
    assert "No such file" in one_line(run("plan", "weights", tmp_path / "none.json"))
    (tmp_path / "config.json").write_text("{")
    assert "config.json is no JSON" in one_line(run("plan", "weights", tmp_path))
    (tmp_path / "config.json").write_text("[]")
    assert "is no config.json" in one_line(run("plan", "weights", tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert "model config has no key 'num_hidden_layers'" in one_line(run("plan", "weights", tmp_path))
    assert "unknown numerics profile" in one_line(run("plan", "weights", M3, "--profile", "x"))
    assert "No such file" in one_line(run("plan", "weights", M3, "--json", tmp_path / "no" / "x.json"))

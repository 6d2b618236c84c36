"""What a queue has left becomes the files of docs/results, and what is missing is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.recipes.test_run_groups import folder, metrics
from tools.measure import collect, state
from tools.measure.state import Status

H200 = {"gpus": ["NVIDIA H200"], "driver": "580.1", "cpu": "Xeon", "cores": 16, "versions": {"python": "3.12.3", "torch": "2.13.0"}}
JUNIT = """<testsuites><testsuite>
<testcase classname="tests.gpu.test_a" name="test_right"/>
<testcase classname="tests.gpu.test_a" name="test_other"><failure message="1 bit differs">trace</failure></testcase>
<testcase classname="" name="tests.gpu.test_b"><skipped message="needs two GPUs"/></testcase>
</testsuite></testsuites>"""
SKIPPED = '<testsuites><testsuite><testcase classname="" name="t"><skipped message="needs a GPU"/></testcase></testsuite></testsuites>'


class Left:
    """A folder as a queue leaves it."""

    def __init__(self, here: Path) -> None:
        self.here, self.out, self.to, self.plan = here, here / "out", here / "docs", here / "plan.txt"
        for name in ("log", "results", "runs"):
            (self.out / name).mkdir(parents=True)
        self.status = Status(self.out)
        self.status.data |= {"machines": [H200], "out": "/machine/out"}
        self.text = ""

    def line(
        self,
        name: str,
        lane: str = "0",
        how: str = "done",
        begun: float = 0.0,
        seconds: float = 10.0,
        exit_status: int | None = 0,
        attempts: int = 1,
    ) -> None:
        command = f"make {name} in /machine/out"
        self.text += f"{lane} | {name} | 60 | {command}\n"
        self.status.lines[name] = {
            "lane": lane,
            "limit": 60,
            "command": command,
            "state": how,
            "exit": exit_status,
            "seconds": seconds,
            "begun": begun,
        }
        self.status.lines[name] |= {"attempts": attempts, "started": "2026-11-30T10:00:00+00:00", "machine": 0}

    def run(self, name: str, *overrides: str, apart: float = 0.0, **how) -> None:
        self.line(name, **how)
        lines = metrics(int(name[-1]) if name[-1].isdigit() else 0)
        path = folder(self.out / "runs" / name, "mini_m3_h200.yaml", list(overrides), lines)
        summary = json.loads((path / "summary.json").read_text()) | {"mismatch_max_abs_max": apart}
        (path / "summary.json").write_text(json.dumps(summary))

    def collect(self, capsys) -> tuple[int, str]:
        self.plan.write_text(self.text)
        self.status.save()
        code = collect.main([str(self.plan), str(self.out), str(self.to)])
        return code, capsys.readouterr().out

    def read(self, name: str) -> dict:
        return json.loads((self.to / name).read_text())


@pytest.fixture
def left(tmp_path):
    return Left(tmp_path)


def test_seeds_are_pooled_and_every_run_is_there_with_what_it_was_made_by(left, capsys):
    for seed in range(3):
        left.run(f"seed{seed}", f"seed={seed}", lane="0+", begun=5.0 * seed, attempts=1 + (seed == 2))
    code, said = left.collect(capsys)
    assert code == 0 and "3 seeds" in said and "0 missing" in said, said
    (group,) = left.read("h200_mini_m3_grpo.json")["groups"]
    assert group["seeds"] == [0, 1, 2] and group["accuracy_end"]["low"] is not None
    assert (left.to / "h200_mini_m3_grpo.png").read_bytes()[:4] == b"\x89PNG" and "3 seeds" in (
        left.to / "h200_mini_m3_grpo.html"
    ).read_text()
    one = left.read("h200_mini_m3_grpo_seed2.json")
    assert (one["command"], one["seed"], len(one["metrics"])) == ("make seed2 in $OUT", 2, 5)
    assert one["machine"] == "1 x NVIDIA H200, driver 580.1, 16 cores (Xeon)" and one["versions"] == {"torch": "2.13.0"}
    assert one["note"] == "beside it ran seed1; started 2 times, the seconds of the queue are those of the last"
    assert left.read("h200_mini_m3_grpo_seed1.json")["note"] == "beside it ran seed0, seed2"


def test_seeds_that_differ_in_more_are_said(left, capsys):
    for seed in range(3):
        left.run(f"seed{seed}", f"seed={seed}", *(["threads=4"] if seed == 1 else []))
    code, said = left.collect(capsys)
    assert code == 1 and "MISSING mini_m3_grpo: the seeds are not one group; they differ in threads" in said


def test_what_is_not_done_is_missing_loudly(left, capsys):
    left.run("seed0", "seed=0")
    left.line("seed1", how="timed out", exit_status=-2)
    state.log_of(left.out, "seed1").write_text("step 150 of 200\n")
    left.text += "0 | seed2 | 60 | never begun\n0 | step | 60 | never begun\n0 | w | 60 | wait step\n0 | mystery | 60 | true\n"
    code, said = left.collect(capsys)
    assert code == 1
    for one in (
        "seed1: timed out (step 150 of 200)",
        "seed2: queued",
        "mini_m3_grpo: the report is of 1 runs, not of 3",
        "step: queued",
        "mystery: nothing is collected of it",
    ):
        assert f"MISSING {one}\n" in said, said
    assert said.count("MISSING") == 5 and "5 missing" in said
    assert (left.to / "h200_mini_m3_grpo_seed0.json").exists() and not (left.to / "h200_mini_m3_grpo_seed1.json").exists()


def test_ablations_and_parity_stand_side_by_side_and_a_bit_that_differs_is_said(left, capsys):
    left.run("whole")
    left.run("bf16_kv", "numerics.kv_cache=auto")
    left.run("no_parity")
    left.run("parity", "numerics.parity=bitwise", apart=2.0**-10)
    code, said = left.collect(capsys)
    assert code == 1 and "MISSING parity: logprobs differ by up to 0.000976562, not by 0" in said
    assert "MISSING mini_m3_ablations: the report is of 2 runs, not of 5" in said and "parity: the report" not in said
    assert [group["label"] for group in left.read("h200_mini_m3_ablations.json")["groups"]][1] == "kv_cache=auto"
    assert len(left.read("h200_mini_m3_parity.json")["groups"]) == 2


def test_an_unfinished_run_is_no_result(left, capsys):
    left.run("whole")
    (left.out / "runs" / "whole" / "summary.json").unlink()
    code, said = left.collect(capsys)
    assert code == 1 and f"MISSING whole: {left.out / 'runs' / 'whole'} has no summary.json: it is not finished" in said


def test_measurements_are_taken_over_with_what_made_them(left, capsys):
    left.line("step", lane="all")
    (left.out / "results" / "mini_m3_step.json").write_text(
        json.dumps({"seconds": 1.5, "versions": {"torch": "own"}, "subject": "/machine/out/mini"})
    )
    left.line("kv_formats", lane="all", begun=20.0)
    (left.out / "results" / "kv_formats.json").write_text("[1, 2]")
    left.line("sync", lane="all", begun=40.0)
    (left.out / "mini").mkdir()
    (left.out / "mini" / "pretrain.json").write_text('{"steps": 7}')
    left.line("mini", lane="all", begun=60.0)
    code, said = left.collect(capsys)
    assert code == 1 and "MISSING sync: " in said and "cannot be read (FileNotFoundError)" in said and said.count("MISSING") == 1
    step = left.read("h200_mini_m3_step.json")
    assert step == {
        "command": "make step in $OUT",
        "machine": "1 x NVIDIA H200, driver 580.1, 16 cores (Xeon)",
        "versions": {"torch": "own"},
        "date": "2026-11-30",
        "seconds": 1.5,
        "subject": "$OUT/mini",
    }
    assert left.read("h200_kv_formats.json")["results"] == [1, 2] and left.read("h200_mini_m3_pretrain.json")["steps"] == 7


def test_checks_are_one_file_and_those_that_failed_are_in_it(left, capsys):
    left.line("tests_w4a4", how="failed", exit_status=1)
    (left.out / "results" / "tests_w4a4.xml").write_text(JUNIT)
    left.line("tests_quant", begun=20.0)
    (left.out / "results" / "tests_quant.xml").write_text(SKIPPED)
    left.line("random_attention", begun=40.0)
    state.log_of(left.out, "random_attention").write_text("== one\nold\n== two\nseed 0\n1000 cases equal\n")
    left.line("random_experts", how="interrupted", exit_status=None)
    code, said = left.collect(capsys)
    assert code == 1 and "MISSING tests_w4a4: failed" in said and "MISSING random_experts: interrupted" in said
    assert "MISSING tests_quant: no test ran, all 1 were skipped" in said
    found = left.read("h200_gpu_checks.json")
    assert set(found) == {"tests_w4a4", "tests_quant", "random_attention"}
    failing = found["tests_w4a4"]
    assert (failing["right"], failing["tests"], failing["passed"]) == (False, 3, 1)
    assert failing["failed"] == [{"test": "tests.gpu.test_a.test_other", "said": "1 bit differs"}]
    assert failing["skipped"] == {"tests.gpu.test_b": "needs two GPUs"}
    assert found["random_attention"]["right"] and found["random_attention"]["said"] == ["seed 0", "1000 cases equal"]


def test_bad_input_is_one_line(left, capsys):
    left.plan.write_text("what\n")
    assert collect.main([str(left.plan), str(left.out), str(left.to)]) == 2
    assert capsys.readouterr().err == "measure: line 1: not `lane | name | limit in seconds | command`\n"
    left.plan.write_text("0 | seed0 | 60 | true\n")
    assert collect.main([str(left.plan), str(left.here / "none"), str(left.to)]) == 2
    assert capsys.readouterr().err == f"measure: {left.here / 'none'} holds no status of a queue\n"


def test_a_machine_without_a_gpu_has_its_own_prefix():
    cpu = H200 | {"gpus": [], "driver": None}
    assert collect.short(cpu) == "cpu" and collect.told(cpu) == "16 cores (Xeon)"
    assert collect.told(H200 | {"gpus": ["NVIDIA H200"] * 2}).startswith("2 x NVIDIA H200, ")


def test_every_run_of_a_report_has_a_name_of_its_own():
    names = [collect.target_of(run) for runs in collect.RUNS.values() for run in runs]
    assert len(set(names)) == len(names) and collect.target_of("tiny_seed1") == "tiny_m3_grpo_seed1.json"

"""The plans that are shipped: every command in them is one that the programs it names would take, and every product has its place."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
import shlex
from pathlib import Path

import pytest
import torch
import typer
from _pytest.config import get_config
from xdist.plugin import pytest_addoption as add_xdist_options

from samebits.recipes import baseline, bench_scale, bench_step
from samebits.recipes.bench_cli import KERNELS
from samebits.recipes.check import check
from samebits.recipes.cli import app
from samebits.recipes.config import load_recipe
from tests.support import cuda_prefill_gpu, kv_formats, random_command
from tools.measure import collect
from tools.measure.plan import ALL, Line, parse

FOLDER = Path("tools/measure")
PLANS = {name: parse((FOLDER / f"{name}.txt").read_text()) for name in ("one_gpu", "two_gpus")}
LINES = [pytest.param(line, id=f"{plan}-{line.name}") for plan, lines in PLANS.items() for line in lines]
LONGEST = 25 * 60
"""Seconds of a machine's time at most."""
ENGINE = "actor_rollout_ref.rollout.engine_kwargs.vllm."
COMPARISONS = ("tests.support.random_attention", "tests.support.random_experts")


def commands(line: Line) -> list[list[str]]:
    """Words of each simple command of a line."""
    lexer = shlex.shlex(line.command, posix=True, punctuation_chars="|&;")
    lexer.whitespace_split = True
    found: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= set("|&;"):
            found.append([])
        else:
            found[-1].append(word)
    return found


@functools.cache
def engine_options() -> set[str]:
    """What vLLM's engine may be given."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    return {field.name for field in dataclasses.fields(AsyncEngineArgs)}


def understood(words: list[str]) -> tuple[str, dict]:
    """The command of samebits that `words` call, and its parameters as its own parser has them."""
    command = typer.main.get_command(app)
    context = command.make_context("samebits", list(words))
    while hasattr(context.command, "resolve_command"):  # a group
        rest = [*context._protected_args, *context.args]
        name, command, rest = context.command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)
    return context.command_path, context.params


def require_sound(words: list[str]) -> None:
    """Raise whatever the command would be refused with, short of the machine it wants."""
    path, given = understood(words)
    for word in given.get("overrides") or ():  # what vLLM is given nobody looks at before it starts
        key = word.partition("=")[0]
        assert not key.startswith(ENGINE) or key.removeprefix(ENGINE) in engine_options(), key
    match path.removeprefix("samebits "):
        case "train":
            check(given["recipe"], given["overrides"])
        case "bench step":
            own = [o for o in given["overrides"] for key in bench_step.OWN if o.split("=")[0] == key]
            assert not own, own
            check(given["subject"], given["overrides"])
            _, verl = load_recipe(given["subject"], given["overrides"], planned=True)
            for count in bench_scale.parse(given["gpus"]) if given["gpus"] else ():
                check(given["subject"], [*given["overrides"], *bench_scale.overrides_for(count, verl, given["total"])])
        case "bench sync":
            check(given["recipe"], given["overrides"])
        case "verify all":
            check(given["subject"], given["overrides"] or [])
        case "bench baseline":
            job = baseline.Job(
                *(given[key] for key in ("model", "recipe", "device", "steps", "warm_up", "limit")), given["overrides"] or ()
            )
            baseline.configuration(job)
        case "bench kernels":
            assert given["what"] in KERNELS
        case "mini-m3":
            assert given["steps"] is None
        case other:
            raise AssertionError(f"nobody looks at what {other} is given")


def of_pytest(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """What pytest and its plugin for several processes make of `words`, and what neither knows."""
    parser = get_config()._parser
    add_xdist_options(parser)
    return parser.parse_known_and_unknown_args(words)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("line", LINES)
def test_every_command_is_taken_by_its_own_parser(line, no_gpu, capsys):
    assert line.limit <= LONGEST
    for words in commands(line):
        match words:
            case ["samebits", *rest]:
                require_sound(rest)
            case ["python", "-m", "pytest", *rest]:
                known, unknown = of_pytest(rest)
                assert not unknown and known.file_or_dir
                assert all(Path(path).exists() for path in [*known.file_or_dir, *(known.ignore or ())])
            case ["python", "-m", module, *rest] if module in COMPARISONS:
                assert random_command.main("these", None, None, rest) == 2 and "CUDA" in capsys.readouterr().err
            case ["python", "-m", "tests.support.cuda_prefill_gpu", *rest]:
                assert cuda_prefill_gpu.main(rest) == 2 and "needs a Hopper GPU" in capsys.readouterr().err
            case ["python", "-m", "tests.support.kv_formats", *rest]:
                kv_formats.parser().parse_args(rest)
            case ["test", "-f", _]:
                pass
            case _:
                raise AssertionError(f"nobody looks at {words}")


@pytest.mark.parametrize("line", LINES)
def test_every_line_leaves_what_is_collected_of_it(line):
    named = re.findall(r'(?:--json|--junitxml=?)\s*"\$OUT/([^"]+)"', line.command)
    if line.name in collect.MEASURED:
        assert named == [collect.MEASURED[line.name]] or (line.name == "mini" and '"$OUT/mini"' in line.command)
    elif line.name in collect.CHECKED:
        assert named == [one for one in [collect.CHECKED[line.name]] if one] or line.name == "prefill_table"  # its log says it all
    else:
        assert f'run_dir="$OUT/runs/{line.name}"' in line.command
    assert collect.target_of(line.name)


def test_lines_of_both_plans_are_the_same():
    one, two = ({line.name: (line.limit, line.command) for line in lines} for lines in PLANS.values())
    both = one.keys() & two.keys()
    assert len(both) > 10 and all(one[name] == two[name] for name in both)


def test_nothing_is_collected_that_no_plan_makes():
    planned = {line.name for lines in PLANS.values() for line in lines}
    assert planned == {*collect.MEASURED, *collect.CHECKED, *(name for names in collect.RUNS.values() for name in names)}


def test_one_gpu_runs_every_gpu_test_once():
    taken = [Path("tests/gpu/kernels/test_random_cases.py")]  # the comparisons are lines of their own, and that test runs them once more
    assert {words[2] for line in PLANS["one_gpu"] for words in commands(line) if words[2:]} >= set(COMPARISONS)
    for line in PLANS["one_gpu"]:
        for words in commands(line):
            if words[:3] == ["python", "-m", "pytest"]:
                known, _ = of_pytest(words[3:])
                files = {file for path in map(Path, known.file_or_dir) for file in ([path] if path.is_file() else path.rglob("test_*.py"))}
                taken += files - set(map(Path, known.ignore or ()))
    assert sorted(taken) == sorted(Path("tests/gpu").rglob("test_*.py"))
    two = {
        Path(word) for line in PLANS["two_gpus"] if line.name == "tests_two_gpus" for word in commands(line)[0] if word.startswith("tests/")
    }
    wants_two = {path for path in Path("tests/gpu").rglob("test_*.py") if "device_count() < 2" in path.read_text()}
    assert two == wants_two


def test_what_is_timed_runs_alone():
    """A line whose seconds are published has every GPU for itself."""
    timed = {name for name in collect.MEASURED if name.startswith(("step", "sync", "baseline", "bench_"))} | {"parity", "no_parity"}
    for lines in PLANS.values():
        assert all(line.lane == ALL for line in lines if line.name in timed)


def test_readme_names_every_line_and_its_file():
    rows = [row.split("|") for row in (FOLDER / "README.md").read_text().splitlines() if row.startswith("|")]
    for lines in PLANS.values():
        for line in lines:
            files = [row[-2].strip() for row in rows if f"`{line.name}`" in row[1]]
            assert files == [f"`{collect.target_of(line.name)}`"], line.name

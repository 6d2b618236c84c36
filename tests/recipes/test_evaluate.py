"""`samebits eval` against a stand-in server: what is kept, what is counted, and what is refused."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from samebits.recipes.cli import app
from samebits.recipes.config import RecipeError
from samebits.recipes.eval_engine import checkpoint_digest, read_adapter
from samebits.recipes.eval_log import EvalLog, Response, sample_seed, samples
from samebits.recipes.eval_page import render
from samebits.recipes.eval_result import evaluate
from samebits.recipes.eval_tasks import EvalProblem, EvalTask, load_task
from samebits.recipes.grading import Grade
from tests.support.openai_server import Answer, started

RECIPE = "recipes/tiny_m3_grpo.yaml"
PROBLEMS = 6
SETTINGS = {"task": "t", "n": 2, "seed": 3}


@pytest.fixture
def problem_file(tmp_path) -> Path:
    """Six distinct problems, each five times, with answers 10 to 15."""
    path = tmp_path / "problems.jsonl"
    rows = [{"problem": f"What is {i} plus ten?", "answer": str(10 + i)} for i in range(PROBLEMS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows * 5))
    return path


def gold(body: dict) -> int:
    return int(body["messages"][0]["content"].split("What is ")[1].split(" plus")[0]) + 10


def right(body: dict) -> bool:
    """Which samples the stand-in gets right: a property of the seed alone."""
    return hashlib.sha256(str(body["seed"]).encode()).digest()[0] % 3 == 0


def answer(body: dict, attempt: int = 1) -> Answer:
    value = gold(body) if right(body) else 999
    return Answer(f"Thinking of seed {body['seed']}.\nAnswer: {value}", tokens=5 + body["seed"] % 11)


def run(*arguments: object, env: dict[str, str] | None = None):
    return CliRunner().invoke(app, ["eval", RECIPE, *map(str, arguments)], env={"COLUMNS": "160", **(env or {})})


def error_of(result) -> str:
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("samebits: "), result.stderr
    assert "Traceback" not in result.output
    return lines[0]


def lines_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "responses.jsonl").read_text().splitlines()]


def test_figures_are_those_of_an_independent_count(problem_file, tmp_path):
    def cut_some(body: dict, attempt: int) -> Answer:
        found = answer(body)
        found.finish = "length" if body["seed"] % 5 == 0 else "stop"
        return found

    with started(cut_some) as server:
        result = run("--url", server.url, "--task", problem_file, "-n", 6, "--out", tmp_path / "out", "--json", tmp_path / "r.json")
    assert result.exit_code == 0, result.output
    content = json.loads((tmp_path / "r.json").read_text())
    assert content["schema"] == "samebits.evaluation/1" and content["settings"]["n"] == 6
    assert content == json.loads((tmp_path / "out" / "result.json").read_text())
    assert len(server.requests) == PROBLEMS * 6 == len({body["seed"] for body in server.requests})
    asked = {body["seed"]: body for body in server.requests}
    kept = {line["seed"]: line for line in lines_of(tmp_path / "out")}
    right_of: dict[str, list[bool]] = {}
    lengths, cut = [], 0
    for problem in content["problems"]:
        for response in problem["responses"]:
            body = asked[response["seed"]]
            truncated = response["seed"] % 5 == 0
            assert response["correct"] == (right(body) and not truncated)
            assert response["truncated"] == truncated and problem["gold"] == str(gold(body))
            assert response["answer"] == (str(gold(body)) if right(body) else "999")
            assert kept[response["seed"]]["problem"] == problem["problem"] and kept[response["seed"]]["sample"] == response["sample"]
            right_of.setdefault(problem["problem"], []).append(response["correct"])
            lengths.append(5 + response["seed"] % 11)
            cut += truncated
        assert [r["sample"] for r in problem["responses"]] == list(range(6))
        assert problem["right"] == sum(right_of[problem["problem"]])
    summary = content["summary"]
    assert 0 < cut < 36 and summary["truncated"] == pytest.approx(cut / 36)
    assert summary["tokens_mean"] == pytest.approx(sum(lengths) / 36)
    assert summary["mean"]["value"] == pytest.approx(sum(map(sum, right_of.values())) / 36)
    assert sorted(key for key in summary if key.startswith("pass@")) == ["pass@1", "pass@2", "pass@4", "pass@6"]
    for k in (1, 2, 4, 6):
        shares = []
        for marks in right_of.values():
            subsets = [any(subset) for subset in itertools.combinations(marks, k)]
            shares.append(sum(subsets) / len(subsets))
        estimate = summary[f"pass@{k}"]
        assert estimate["value"] == pytest.approx(sum(shares) / PROBLEMS)
        assert estimate["low"] <= estimate["value"] <= estimate["high"]
    assert f"mean@6 {'':8}".strip() in result.stdout and f"{summary['mean']['value']:.1%}" in result.stdout
    assert f"{PROBLEMS} x 6" in result.stdout and f"{cut / 36:.1%}" in result.stdout


def test_every_request_states_its_sampling_in_full(problem_file, tmp_path):
    arguments = (
        "--task",
        problem_file,
        "-n",
        2,
        "--limit",
        3,
        "--temperature",
        0.6,
        "--max-tokens",
        77,
        "--seed",
        5,
        "--out",
        tmp_path / "o",
    )
    with started(answer) as server:
        assert run("--url", f"{server.url}/v1/", *arguments).exit_code == 0
    assert len(server.requests) == 6
    problems = load_task(str(problem_file), 0, 3).problems
    want = {(p.prompt, sample_seed(5, p.id, i)) for p in problems for i in range(2)}
    assert {(b["messages"][0]["content"], b["seed"]) for b in server.requests} == want
    for body in server.requests:
        assert (body["temperature"], body["top_p"], body["max_tokens"], body["model"]) == (0.6, 1.0, 77, "tiny")


def test_busy_and_broken_servers_are_tried_again(problem_file, tmp_path):
    failures = itertools.cycle([429, 500, 503])

    def flaky(body: dict, attempt: int) -> Answer:
        return Answer(status=next(failures)) if attempt == 1 and body["seed"] % 2 else answer(body)

    with started(flaky) as server:
        result = run("--url", server.url, "--task", problem_file, "-n", 2, "--limit", 4, "--out", tmp_path / "o")
    assert result.exit_code == 0, result.output
    retried = {key for key, count in server.attempts.items() if count == 2}
    assert retried and max(server.attempts.values()) == 2
    assert len(lines_of(tmp_path / "o")) == 8


def test_no_more_requests_than_asked_for_are_under_way(problem_file, tmp_path):
    def slow(body: dict, attempt: int) -> Answer:
        found = answer(body)
        found.delay = 0.03
        return found

    with started(slow) as server:
        result = run("--url", server.url, "--task", problem_file, "-n", 4, "--concurrency", 3, "--out", tmp_path / "o")
    assert result.exit_code == 0
    assert server.most_busy == 3


@pytest.mark.parametrize(("status", "said"), [(500, "500"), (400, "400")])
def test_a_server_that_fails_for_good_ends_with_one_line_and_keeps_the_rest(problem_file, tmp_path, status, said):
    broken = threading.Event()
    broken.set()

    def half(body: dict, attempt: int) -> Answer:
        return Answer(status=status) if broken.is_set() and body["seed"] % 2 else answer(body)

    arguments = ("--task", problem_file, "-n", 4, "--retries", 0, "--concurrency", 4, "--out", tmp_path / "o")
    with started(half) as server:
        result = run("--url", server.url, *arguments)
        assert result.exit_code == 1
        line = error_of(result)
        assert said in line and "sample" in line and str(tmp_path / "o") in line
        before = lines_of(tmp_path / "o")
        assert 0 < len(before) < 24
        broken.clear()
        server.requests.clear()
        assert run("--url", server.url, *arguments).exit_code == 0
        assert len(server.requests) == 24 - len(before)
    after = lines_of(tmp_path / "o")
    assert after[: len(before)] == before and len({(x["problem"], x["sample"]) for x in after}) == len(after) == 24


def test_a_silent_server_runs_into_the_timeout(problem_file, tmp_path):
    with started(lambda body, attempt: Answer("x", delay=4)) as server:
        result = run("--url", server.url, "--task", problem_file, "-n", 1, "--timeout", 1, "--retries", 0, "--out", tmp_path / "o")
    assert result.exit_code == 1 and "timed out" in error_of(result)


@pytest.mark.parametrize("finish", [None, "content_filter", "tool_calls"])
def test_a_response_that_did_not_end_is_none(problem_file, tmp_path, finish):
    with started(lambda body, attempt: Answer("Answer: 10", finish=finish)) as server:
        result = run("--url", server.url, "--task", problem_file, "-n", 1, "--out", tmp_path / "o")
    assert result.exit_code == 1 and "finish reason" in error_of(result)
    assert lines_of(tmp_path / "o") == []


def test_reasoning_that_a_server_splits_off_is_no_answer(problem_file, tmp_path):
    """What is boxed while thinking does not count, and thinking that was cut has no answer."""

    def thinking(body: dict, attempt: int) -> Answer:
        if body["seed"] % 2:
            return Answer(None, "length", message={"reasoning_content": f"so \\boxed{{{gold(body)}}}"})
        return Answer(f"Answer: {gold(body)}", tokens=None, message={"reasoning": "so \\boxed{999}"})

    with started(thinking) as server:
        result = run("--url", server.url, "--task", problem_file, "-n", 3, "--out", tmp_path / "o")
    assert result.exit_code == 0, result.output
    content = json.loads((tmp_path / "o" / "result.json").read_text())
    responses = [r for p in content["problems"] for r in p["responses"]]
    assert {r["seed"] % 2 == 0 for r in responses} == {True, False}
    assert all(r["correct"] == (r["seed"] % 2 == 0) for r in responses)
    assert all((r["tokens"] is None) == (r["seed"] % 2 == 0) for r in responses)
    assert content["summary"]["tokens_mean"] == 7.0
    cut = {line["text"] for line in lines_of(tmp_path / "o") if line["seed"] % 2}
    assert cut and cut <= {f"<think>so \\boxed{{{10 + i}}}" for i in range(PROBLEMS)}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--served-name", "other"], "no model 'other'; it serves tiny"),
        (["--adapter", "x"], "--adapter goes with an engine"),
        (["--json", "/no/where/r.json"], "there is no folder /no/where"),
        (["--api-key-env", "SAMEBITS_TEST_ABSENT"], "the environment has no SAMEBITS_TEST_ABSENT"),
        (["--task", "absent.jsonl"], "no file absent.jsonl"),
        (["trainer.unknown=1"], "unknown key trainer.unknown"),
    ],
)
def test_bad_input_is_one_line_and_starts_nothing(problem_file, tmp_path, arguments, said):
    with started(answer) as server:
        task = [] if "--task" in arguments else ["--task", problem_file]
        result = run("--url", server.url, *task, "-n", 1, "--out", tmp_path / "o", *arguments)
    assert result.exit_code == 2 and said in error_of(result)
    assert server.requests == [] and not (tmp_path / "o").exists()


def test_options_of_a_server_without_one_are_refused(tmp_path):
    assert "--served-name and --api-key-env go with --url" in error_of(run("--served-name", "x"))


def test_wrong_key_and_wrong_address(problem_file, tmp_path):
    arguments = ("--task", problem_file, "-n", 1, "--limit", 1, "--out", tmp_path / "o", "--api-key-env", "SAMEBITS_TEST_KEY")
    with started(answer, key="right") as server:
        result = run("--url", server.url, *arguments, env={"SAMEBITS_TEST_KEY": "wrong"})
        assert result.exit_code == 2 and "401" in error_of(result) and "wrong" not in error_of(result).replace("wrong key", "")
        assert run("--url", server.url, *arguments, env={"SAMEBITS_TEST_KEY": "right"}).exit_code == 0
        url = server.url
    result = run("--url", url, *arguments, env={"SAMEBITS_TEST_KEY": "right"})
    assert result.exit_code == 2 and url in error_of(result)


def test_other_settings_are_refused_by_name(problem_file, tmp_path):
    base = ("--task", problem_file, "-n", 1, "--limit", 2, "--out", tmp_path / "o")
    with started(answer) as server:
        assert run("--url", server.url, *base).exit_code == 0
        seen = len(server.requests)
        for change, said in (
            (["-n", 2], "n 1 there, 2 now"),
            (["--seed", 1], "seed 0 there, 1 now"),
            (["--temperature", 0.5], "temperature 1.0 there, 0.5 now"),
            (["--limit", 3], "limit 2 there, 3 now"),
            (["--max-tokens", 5], "max_tokens 26 there, 5 now"),
        ):
            result = run("--url", server.url, *base, *change)
            assert result.exit_code == 2 and said in error_of(result), change
        problem_file.write_text(problem_file.read_text().replace('"answer": "1', '"answer": "2'))
        assert "other settings: problems " in error_of(run("--url", server.url, *base))
        assert len(server.requests) == seen


def evaluation(url: str, problem_file: Path, out: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "samebits.recipes.cli", "eval", RECIPE, "--url", url, "--task", problem_file]
    command += ["-n", "10", "--concurrency", "2", "--out", out, "--json", out.with_suffix(".json")]
    return subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def test_killed_evaluations_lose_and_double_nothing(problem_file, tmp_path):
    """Killed outright twice, torn at the end each time: the result is that of an undisturbed one."""
    delay = 0.03

    def slow(body: dict, attempt: int) -> Answer:
        found = answer(body)
        found.delay = delay
        return found

    out, total = tmp_path / "killed", PROBLEMS * 10
    log = out / "responses.jsonl"
    with started(slow) as server:
        for stop in (5, 30):
            process = evaluation(server.url, problem_file, out)
            deadline = time.monotonic() + 120
            while process.poll() is None and (not log.is_file() or log.read_bytes().count(b"\n") < stop):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert process.poll() is None, process.stderr.read()
            process.send_signal(signal.SIGKILL)
            process.wait()
            before = log.read_bytes()
            assert stop <= before.count(b"\n") < total
            with log.open("ab") as file:
                file.write(b'{"problem": "torn')
        delay = 0.0
        asked = len(server.requests)
        process = evaluation(server.url, problem_file, out)
        assert process.wait(timeout=120) == 0, process.stderr.read()
        whole = before.rfind(b"\n") + 1
        assert log.read_bytes()[:whole] == before[:whole]
        assert len(server.requests) - asked == total - before.count(b"\n")
        straight = evaluation(server.url, problem_file, tmp_path / "straight")
        assert straight.wait(timeout=120) == 0, straight.stderr.read()
    keys = [(line["problem"], line["sample"]) for line in lines_of(out)]
    assert len(keys) == len(set(keys)) == total
    assert (tmp_path / "killed.json").read_bytes() == (tmp_path / "straight.json").read_bytes()
    assert sorted(log.read_text().splitlines()) == sorted((tmp_path / "straight" / "responses.jsonl").read_text().splitlines())


def problem(name: str) -> EvalProblem:
    return EvalProblem(name, f"say {name}", "1")


def response(name: str = "a", number: int = 0, text: str = "x") -> Response:
    return Response(name, number, sample_seed(3, name, number), text, 4, "stop")


def test_seeds_follow_from_problem_number_and_seed_alone():
    assert sample_seed(0, "a", 0) == 345219296  # responses that were kept stay valid
    every = {sample_seed(s, p, n) for s in range(5) for p in "abcde" for n in range(20)}
    assert len(every) == 500 and all(0 <= seed < 2**31 for seed in every)
    wanted = samples([problem("a"), problem("b")], 2, 9)
    assert [(s.problem.id, s.number, s.seed) for s in wanted] == [(p, n, sample_seed(9, p, n)) for n in (0, 1) for p in ("a", "b")]


def test_a_torn_last_line_is_dropped_and_a_damaged_one_refused(tmp_path):
    with EvalLog(tmp_path / "o", SETTINGS) as log:
        log.append(response(text="line\r\nand \u2028 and \ud800"))
        log.append(response("b"))
    path = tmp_path / "o" / "responses.jsonl"
    whole = path.read_bytes()
    for torn in (b'{"problem": "c"', b"\x80", whole.split(b"\n")[0].replace(b'"a"', b'"c"')):
        path.write_bytes(whole + torn)
        with EvalLog(tmp_path / "o", SETTINGS) as log:
            assert list(log.responses) == [("a", 0), ("b", 0)]
            assert [s.key for s in log.missing(samples([problem("a"), problem("c")], 1, 3))] == [("c", 0)]
        assert path.read_bytes() == whole
    for damaged, said in (
        (whole + b"{}\n", "line 3 is damaged"),
        (b"nonsense\n" + whole, "line 1 is damaged"),
        (whole + whole, "line 3: a second response to sample 0 of a"),
        (whole.replace(b'"seed": ', b'"seed": 1'), "line 1: seed"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(RecipeError, match=said):
            EvalLog(tmp_path / "o", SETTINGS)
        assert path.read_bytes() == damaged


def test_a_log_takes_one_response_to_a_sample_and_one_process(tmp_path):
    with EvalLog(tmp_path / "o", SETTINGS) as log:
        log.append(response())
        with pytest.raises(ValueError, match="has a response to sample 0 already"):
            log.append(response(text="other"))
        with pytest.raises(RecipeError, match="is in use by another process"):
            EvalLog(tmp_path / "o", SETTINGS)
    (tmp_path / "o" / "settings.json").unlink()
    with pytest.raises(RecipeError, match="holds responses without settings"):
        EvalLog(tmp_path / "o", SETTINGS)


def test_a_response_is_on_disk_as_soon_as_it_was_taken(tmp_path):
    with EvalLog(tmp_path / "o", SETTINGS) as log:
        for number in range(3):
            log.append(response(number=number))
            assert len(lines_of(tmp_path / "o")) == number + 1


def test_aime_as_dapo_repeats_it_is_thirty_problems(tmp_path):
    path = tmp_path / "aime.jsonl"
    rows = [{"problem": f"Problem {i}.", "answer": f"{i:03d}"} for i in range(30)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows * 32))
    task = load_task(str(path), 0)
    assert (len(task.problems), task.rows) == (30, 960)
    assert load_task(str(path), 0, 7).problems == task.problems[:7] and load_task(str(path), 0, 7).fingerprint != task.fingerprint


def test_arithmetic_is_the_held_out_set_of_the_job_with_its_own_grader():
    from samebits.recipes.arithmetic import draw
    from samebits.recipes.data import HELD_OUT

    task = load_task("arithmetic", 4)
    assert [p.prompt for p in task.problems] == [p.prompt for p in draw("test", HELD_OUT, 4)] and len(task.problems) == HELD_OUT
    texts = ["1*2=2;2+3=5;answer:5", "answer:5", "\\boxed{5}", "answer:5 answer:5", "answer:5"]
    grades = task.grade(texts, ["5"] * 5, [False, False, False, False, True])
    assert [(g.correct, g.answer, g.truncated) for g in grades] == [
        (True, "5", False),
        (True, "5", False),
        (False, None, False),
        (False, None, False),
        (False, "5", True),
    ]


EVIL = '<script>document.title="owned"</script></pre></details><img src=x onerror="document.title=1"> & <b>bold</b>'


def page(tmp_path: Path) -> Path:
    """Two problems with three responses: right, wrong, cut off; and all wrong."""
    problems = (EvalProblem("one<b>", f"prompt {EVIL}", "7"), EvalProblem("two", "say", f"8{EVIL}"))
    marks = {("one<b>", 0): True, ("one<b>", 1): False, ("one<b>", 2): False, ("two", 0): False, ("two", 1): False, ("two", 2): False}
    responses = {
        key: Response(key[0], key[1], 1, f"text {key[1]} {EVIL}\nsecond line", 3, "length" if key == ("one<b>", 2) else "stop")
        for key in marks
    }

    def grader(texts, golds, cut) -> list[Grade]:
        return [Grade(mark, f"answer{EVIL}", c) for mark, c in zip(marks.values(), cut, strict=True)]

    result = evaluate(EvalTask("task", problems, 2, grader), responses, 3, f"model {EVIL}", {"task": "task", "adapter": None})
    path = tmp_path / "page.html"
    path.write_text(render(result), encoding="utf-8")
    return path


def shown(browser) -> list[str]:
    script = """return [...document.querySelectorAll('.response')].filter(e => getComputedStyle(e).display !== 'none'
        && getComputedStyle(e.parentElement).display !== 'none').map(e => e.dataset.problem + e.dataset.sample);"""
    return browser.run(script)


def test_page_shows_every_response_as_text_and_asks_for_nothing(browser, tmp_path):
    browser.open(page(tmp_path))
    assert browser.requests() == [] and browser.console() == []
    assert browser.run("return document.title") == f"task: model {EVIL}"
    assert browser.run("return document.querySelectorAll('img, b').length") == 0
    texts = browser.run("return [...document.querySelectorAll('.response pre')].map(e => e.textContent)")
    assert texts == [f"text {n} {EVIL}\nsecond line" for n in (0, 1, 2, 0, 1, 2)]
    assert browser.run("return document.querySelector('.prompt').textContent") == f"prompt {EVIL}"
    assert browser.run("return document.querySelector('h1').textContent") == "mean@3 16.7%"
    data = json.loads(browser.run("return document.getElementById('data').textContent"))
    assert data["schema"] == "samebits.evaluation/1" and data["problems"][1]["gold"] == f"8{EVIL}"
    browser.open(page(tmp_path), (360, 740))
    assert browser.overflow() == 0


def test_page_is_filtered_and_opened(browser, tmp_path):
    browser.open(page(tmp_path))
    every = ["one<b>0", "one<b>1", "one<b>2", "two0", "two1", "two2"]
    for choice, want in (("right", every[:1]), ("wrong", every[1:]), ("cut", every[2:3]), ("all", every)):
        browser.run(f"document.getElementById('show-{choice}').click()")
        assert shown(browser) == want, choice
    assert browser.run("return document.querySelector('.problem').open") is False
    browser.run("document.getElementById('open-all').click()")
    assert browser.run("return [...document.querySelectorAll('details')].every(e => e.open)") is True
    assert browser.run("return document.querySelector('.response pre').checkVisibility()") is True


def test_page_is_written_by_the_command(problem_file, tmp_path):
    with started(answer) as server:
        arguments = ("--url", server.url, "--task", problem_file, "-n", 2, "--out", tmp_path / "o", "--html", tmp_path / "p.html")
        assert run(*arguments).exit_code == 0
        text = (tmp_path / "p.html").read_text()
        assert all(f"Thinking of seed {body['seed']}." in text for body in server.requests)
        os.mkdir(tmp_path / "folder.html")
        result = run(*arguments[:-1], tmp_path / "folder.html")
    assert result.exit_code == 2 and "folder.html" in error_of(result)


@pytest.fixture(scope="module")
def tiny():
    """The shipped recipe on CPU and what its adapter must consist of."""
    from samebits.recipes.config import load_recipe
    from samebits.recipes.validate import validate

    recipe, verl = load_recipe(RECIPE, ["device=cpu"])
    return recipe, validate(recipe, verl)


def test_an_adapter_must_fit_the_recipe(tiny, tmp_path):
    import dataclasses

    from samebits.quant.adapter import target_roles
    from tests.support.adapters import random_adapter

    recipe, spec = tiny
    good = random_adapter(tmp_path / "step_5", spec, recipe.profile.hash, version=5)
    found = read_adapter(good, recipe, spec)
    assert (found.manifest.version, found.manifest.profile) == (5, recipe.profile.hash)
    other = read_adapter(random_adapter(tmp_path / "step_6", spec, recipe.profile.hash, seed=2), recipe, spec)
    assert found.digest != other.digest
    run_folder = tmp_path / "run"
    random_adapter(run_folder / "adapters" / "step_9", spec, recipe.profile.hash)
    random_adapter(run_folder / "adapters" / "step_10", spec, recipe.profile.hash)
    cases = [
        (run_folder, "is a run: name one of its adapters, such as .*step_10"),
        (tmp_path / "absent", "no adapter at"),
        (random_adapter(tmp_path / "numerics", spec, "0123"), "numerics profile of adapter .*numerics is 0123, of the recipe"),
        (random_adapter(tmp_path / "silent", spec, None), "does not say which numerics profile"),
        (random_adapter(tmp_path / "rank", dataclasses.replace(spec, rank=8), recipe.profile.hash), "the adapter has rank 8, not 32"),
        (
            random_adapter(tmp_path / "roles", dataclasses.replace(spec, roles=target_roles("attention")), recipe.profile.hash),
            "roles: .*is missing",
        ),
    ]
    for folder, said in cases:
        with pytest.raises(RecipeError, match=said) as error:
            read_adapter(folder, recipe, spec)
        assert "\n" not in str(error.value)


def test_digest_of_a_checkpoint_sees_other_weights(tiny, tmp_path):
    import shutil

    folder = tmp_path / "m"
    shutil.copytree(tiny[0].model_path, folder)
    before = checkpoint_digest(folder)
    assert before == checkpoint_digest(tiny[0].model_path)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for place in (100_000, -1):  # within the first MiB alone, and within the last
        data = bytearray(whole)
        data[place] ^= 1
        weights.write_bytes(data)
        assert checkpoint_digest(folder) != before

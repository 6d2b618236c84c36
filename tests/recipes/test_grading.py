"""Grading: a battery in both directions, properties over numbers, cut responses, the overlong penalty, speed, and verl's own path."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console

from samebits.recipes import answers
from samebits.recipes.answers import compare, tidy
from samebits.recipes.grading import Statement, compute_score, final_statement, grade, grade_many, overlong_penalty
from samebits.recipes.grading_workers import SymbolicPool

from . import battery

CASES = battery.cases()
EVERY_CLASS = {
    "leading zero",
    "window",
    "multi box",
    "asymmetry",
    "no statement",
    "macro",
    "truncation",
    "parser",
    "echo",
    "unicode",
    "dfrac",
    "hang",
}


@pytest.fixture(scope="module")
def pool():
    pool = SymbolicPool(limit_s=30.0)
    yield pool
    pool.close()


def test_battery_is_large_distinct_and_covers_every_class_in_both_directions():
    assert len(CASES) >= 650
    assert len({(c["gold"], c["text"], c.get("truncated"), c.get("policy")) for c in CASES}) == len(CASES)
    assert {c["cls"] for c in CASES} >= EVERY_CLASS
    for name in {c["cls"] for c in CASES} - {"no statement", "hang"}:
        assert {c["correct"] for c in CASES if c["cls"] == name} == {True, False}, name


@pytest.mark.parametrize("name", sorted({c["cls"] for c in CASES} - {"hang"}))
def test_no_false_accept_and_no_false_reject(name, pool):
    wrong = [c for c in CASES if c["cls"] == name and battery.ours(c, pool) != c["correct"]]
    assert not wrong
    assert pool.failures == 0


def test_math_dapo_on_the_same_battery():
    """Both tables, side by side; what is asserted of verl's grader is only that this battery tells the two apart."""
    rows = [c for c in CASES if c["cls"] != "hang"]
    theirs = battery.tally(battery.math_dapo, rows)
    with Console(width=100).capture():
        battery.show("verl math_dapo", theirs, Console(width=100))
    counts = battery.totals(theirs)
    assert counts["cases"] == len(rows)
    assert counts["false accept"] > 10 and counts["false reject"] > 50


def test_each_of_two_answers_judges_the_other_alike(pool):
    """Brackets, order and form decide the same way whichever side is gold."""
    stated = [(final_statement(c["text"]).text, c["gold"], c["correct"]) for c in CASES if c["cls"] in ("asymmetry", "dfrac")]
    for answer, gold, correct in stated:
        back = compare(gold, answer)
        verdict = back if isinstance(back, bool) else any(all(pool.equal(*pair) for pair in pairs) for pairs in back)
        if answers.tidy(answer).startswith("x "):
            continue  # `x \in (1,2)` is an answer, no gold
        assert verdict == correct, (answer, gold)


FORMS = [
    "Answer: {}",
    "Answer: {}.",
    "**Answer:** {}",
    "Answer: ${}$",
    "Answer: \\({}\\)",
    "\\boxed{{{}}}",
    "\\boxed{{{{{}}}}}",
    "Answer: x = {}",
    "Answer: {}.0",
    "Answer: {}\\%",
    "The final answer is {}",
    "so the answer is {}, as claimed",
    "\\boxed{{{}}} is what was asked for. " + "And so on. " * 60,
]


@settings(deadline=None)
@given(st.integers(-(10**12), 10**12), st.integers(-3, 3), st.sampled_from(FORMS), st.sampled_from(["", "0", "00"]))
def test_an_integer_is_right_exactly_when_it_is_equal(n, off, form, zeros):
    digits = f"-{zeros}{-n}" if n < 0 else f"{zeros}{n}"
    assert grade("Some steps.\n" + form.format(digits), str(n + off)).correct is (off == 0)


@settings(deadline=None)
@given(st.integers(1, 10**9), st.integers(1, 10**4))
def test_grouped_digits_and_decimals_are_exact(n, d):
    assert compare(f"{n:,}", str(n)) is True
    assert compare(f"{n:,}".replace(",", "\\,"), str(n)) is True
    assert compare(f"{n}.{d}", str(n)) is False
    assert compare(f"\\frac{{{n * d}}}{{{d}}}", str(n)) is True
    assert compare(f"\\frac{{{n * d + 1}}}{{{d}}}", str(n)) is (d == 1 and False)


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ("\\dfrac{68}{2}", True),
        ("\\tfrac{68}{2}", True),
        ("34{,}000", False),
        ("\\frac{34}{1", False),
        ("(17+17", False),
        ("17+17)", False),
        ("34 + x - x", False),
        ("34\\ldots", False),
        ("3:4", False),
    ],
)
def test_what_reading_alone_decides(answer, verdict):
    """No computer algebra is asked: for speed where it is plain, and because a parser would read something into it where it is not."""
    assert compare(answer, "34") is verdict
    assert compare("12{,}345", "12345") is True


# What the rules look for comes as whole pieces: letters alone hardly ever make a box or an answer.
PIECES = (
    "\\boxed", "\\fbox", "{", "}", "{}", "answer", "Answer:", "ANSWER: ", "final answer is ", "**", "$", "\\frac",
    "\\dfrac{1}{2}", "\\sqrt", "=", "x = ", "x+1=2=3", "\\implies", "<", "\\leq", "34", "-7", "0.5", "1e9", "1,000", "50%",
    "(1,2)", "[0,1)", "\\{1,2\\}", ",", "\\text{cm}", " ", "\n", "<think>", "</think>", "^", "!", "\\", "\\left(", "\\right)",
    "\\cup", "\\infty", "\\pm",
)  # fmt: skip
TEXTS = st.lists(st.sampled_from(PIECES), max_size=14).map("".join) | st.text(alphabet="0123456789 .,-+{}()[]\\$=*/^_%!abx:\n", max_size=80)


@settings(max_examples=600, deadline=None)
@given(TEXTS, st.sampled_from(["34", "(1,2)", "\\frac12", "x=2", "[0,1)"]))
@example("answer: x=2=3", "34")
@example("\\boxed{34", "34")
def test_any_text_gets_a_verdict_and_never_an_error(text, gold):
    statement = final_statement(text)
    assert statement is None or isinstance(statement, Statement)
    if statement is not None:
        compare(statement.text, gold)
    tidy(text)


def test_cost_of_junk_is_bounded():
    started = time.process_time()
    for junk in (  # each was quadratic once, or could be
        "answer is " * 20_000,
        "\\boxed{" * 20_000,
        "Answer: " + "(a " * 20_000,
        "Answer: " + "3,4 or " * 5_000,
        "\\boxed{}" * 20_000,
    ):
        assert not grade(junk, "34").correct
    assert time.process_time() - started < 5


def test_ten_thousand_integer_responses_in_well_under_five_seconds():
    filler = "We add both numbers, compare the sum with the answer of the first part and go on with the next step. "
    golds = [str(17 * i - 3000) for i in range(10_000)]
    texts = [filler * (5 + i % 40) + FORMS[i % len(FORMS)].format(g if i % 2 else int(g) + 1) for i, g in enumerate(golds)]
    started = time.process_time()
    graded = grade_many(texts, golds)
    assert time.process_time() - started < 4.0  # seconds of one core
    assert [g.correct for g in graded] == [bool(i % 2) for i in range(10_000)]


def test_many_at_once_as_one_by_one(pool):
    rows = [c for c in CASES if c["cls"] in ("symbolic", "window", "text")]
    many = grade_many([c["text"] for c in rows], [c["gold"] for c in rows], pool=pool)
    assert [g.correct for g in many] == [c["correct"] for c in rows]
    cut = grade_many(["Answer: 34\nand so", "Answer: 34\nand so"], ["34", "34"], [True, False], pool=pool)
    assert [(g.correct, g.truncated) for g in cut] == [(False, True), (True, False)]
    with pytest.raises(ValueError):
        grade_many(["Answer: 1"], ["1", "2"], pool=pool)


def test_no_gold_answer_is_an_error_and_no_verdict():
    with pytest.raises(ValueError, match="no gold answer"):
        grade("Answer: 34", " ")
    with pytest.raises(ValueError, match="unknown policy for cut responses 'lenient'; known: wrong, grade"):
        grade("Answer: 34", "34", policy="lenient")


@pytest.mark.parametrize(
    ("length", "penalty"), [(0, 0.0), (16383, 0.0), (16384, 0.0), (17408, -0.25), (18432, -0.5), (20480, -1.0), (30000, -1.0)]
)
def test_overlong_penalty_is_anchored_at_the_response_limit(length, penalty):
    assert overlong_penalty(length, 20480, 4096) == penalty
    assert overlong_penalty(length, 20480, 4096, factor=0.5) == penalty / 2


@settings(deadline=None)
@given(st.integers(2, 40_000), st.data())
def test_overlong_penalty_falls_from_zero_to_the_factor(longest, data):
    buffer = data.draw(st.integers(1, longest - 1))
    a, b = sorted(data.draw(st.tuples(st.integers(0, 2 * longest), st.integers(0, 2 * longest))))
    assert -1.0 <= overlong_penalty(b, longest, buffer) <= overlong_penalty(a, longest, buffer) <= 0.0
    assert overlong_penalty(longest, longest, buffer) == -1.0 and overlong_penalty(longest - buffer, longest, buffer) == 0.0


@pytest.mark.parametrize("buffer", [0, -1, 20480, 20481])
def test_a_buffer_that_would_punish_every_response_is_refused(buffer):
    with pytest.raises(ValueError, match="overlong buffer must be within 1..20479 tokens"):
        overlong_penalty(100, 20480, buffer)


def test_reward_function_as_the_rollout_calls_it():
    extra = {"index": 3, "finish_reason": "stop", "response_tokens": 900}
    right = compute_score(data_source="math_dapo", solution_str="Answer: 34", ground_truth="34", extra_info=extra)
    assert right == {"score": 1.0, "acc": 1.0, "overlong": 0.0, "truncated": 0.0, "answered": 1.0}
    assert compute_score("aime2024", "nothing", "34") == {"score": -1.0, "acc": 0.0, "overlong": 0.0, "truncated": 0.0, "answered": 0.0}
    options = {"max_response_tokens": 1000, "overlong_buffer": 200}
    late = compute_score("math_dapo", "Answer: 34", "34", extra, **options)
    assert late["score"] == 0.5 and late["overlong"] == -0.5 and late["acc"] == 1.0
    cut = extra | {"finish_reason": "length", "response_tokens": 1000}
    assert compute_score("math_dapo", "Answer: 34\nso", "34", cut, **options)["score"] == -2.0
    assert compute_score("math_dapo", "Answer: 34\nso", "34", cut, truncation="grade", **options)["score"] == 0.0
    with pytest.raises(ValueError, match="asked to grade 'gsm8k'"):
        compute_score("gsm8k", "Answer: 34", "34")
    with pytest.raises(ValueError, match="response_tokens, which is missing"):
        compute_score("math_dapo", "Answer: 34", "34", {"index": 3}, **options)


def test_verl_finds_the_function_and_its_options():
    from omegaconf import OmegaConf
    from verl.trainer.ppo.reward import get_custom_reward_fn

    options = {"max_response_tokens": 1000, "overlong_buffer": 200}
    function = {"path": "pkg://samebits.recipes.grading", "name": "compute_score", "reward_kwargs": options}
    score = get_custom_reward_fn(OmegaConf.create({"reward": {"custom_reward_function": function}}))
    extra = {"finish_reason": "stop", "response_tokens": 1000}
    assert score(data_source="math_dapo", solution_str="Answer: 34", ground_truth="34", extra_info=extra)["score"] == 0.0


def test_threads_may_grade(pool):
    rows = [c for c in CASES if c["cls"] == "symbolic"]
    with ThreadPoolExecutor(8) as threads:
        verdicts = list(threads.map(lambda c: battery.ours(c, pool), rows))
    assert verdicts == [c["correct"] for c in rows]


def test_overlong_penalty_is_the_one_of_verls_dapo_manager():
    """Same reward from verl's reward manager with its own options, whatever the prompt's length is."""
    import asyncio

    import numpy as np
    import torch
    from omegaconf import OmegaConf
    from verl import DataProto
    from verl.experimental.reward_loop.reward_manager.dapo import DAPORewardManager

    buffer = {"enable": True, "len": 20, "penalty_factor": 0.5, "log": True}
    config = OmegaConf.create({"reward": {"reward_kwargs": {"overlong_buffer_cfg": buffer, "max_resp_len": 100}}})

    class Tokenizer:
        def decode(self, ids, skip_special_tokens):
            return "Answer: 34"

    for prompt, length in ((5, 10), (5, 80), (90, 80), (5, 85), (90, 90), (5, 100)):
        mask = torch.zeros(1, prompt + 100, dtype=torch.long)
        mask[0, : prompt + length] = 1
        row = {"data_source": "math_dapo", "reward_model": {"ground_truth": "34"}, "extra_info": {}}
        data = DataProto.from_dict(
            tensors={"responses": torch.zeros(1, 100, dtype=torch.long), "attention_mask": mask},
            non_tensors={k: np.array([v], dtype=object) for k, v in row.items()},
        )

        async def theirs(data=data):
            return await DAPORewardManager(config, Tokenizer(), compute_score).run_single(data)

        extra = {"response_tokens": length, "finish_reason": "stop"}
        mine = compute_score("math_dapo", "Answer: 34", "34", extra, max_response_tokens=100, overlong_buffer=20, overlong_factor=0.5)
        assert float(asyncio.run(theirs())["reward_score"]) == pytest.approx(mine["score"])

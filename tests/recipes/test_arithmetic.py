"""The tiny task: its text, its splits, its slips, a battery of gradings in both directions, and verl's files."""

import random
import re

import pytest

from samebits.recipes import arithmetic
from samebits.recipes.arithmetic import DATA_SOURCE, Problem, compute_score, draw, grade, problems, row, write_parquet

P = Problem(34, 7, 58)


def test_text_of_a_problem():
    assert (P.prompt, P.steps, P.answer) == ("34*7+58=", "34*7=238;238+58=296;answer:296", "296")
    assert P.steps_with(248, 305) == "34*7=248;248+58=305;answer:305"


def test_splits_cover_all_64800_prompts_without_overlap():
    train, test = problems("train"), problems("test")
    assert len(train) + len(test) == 64_800 and len({p.prompt for p in train + test}) == 64_800
    assert all(p.held_out for p in test) and not any(p.held_out for p in train)
    assert 5_500 < len(test) < 6_300
    # Pinned: a changed hash would leak held-out prompts into a model trained before.
    assert [p.prompt for p in test[:3]] == ["10*2+24=", "10*2+38=", "10*2+42="]
    with pytest.raises(ValueError, match="unknown split 'validation'; known: train, test"):
        problems("validation")


def test_drawing_is_by_seed_and_distinct():
    a, b, c = draw("train", 50, 0), draw("train", 50, 0), draw("train", 50, 1)
    assert a == b and a != c and len(set(a)) == 50
    assert draw("train", 10, 0) == a[:10]
    with pytest.raises(ValueError, match="test split has"):
        draw("test", 10_000)


def test_longest_response_fits():
    longest = max(len(p.steps) - len("answer:") + 2 for p in problems("train") + problems("test"))
    assert longest == arithmetic.MAX_RESPONSE_TOKENS - 1


def test_slips():
    rng = random.Random(0)
    assert all(p.steps_with_slips(0.0, rng) == p.steps for p in draw("train", 200))
    pattern = re.compile(r"(\d+)\*(\d)=(\d+);(\d+)\+(\d+)=(\d+);answer:(\d+)")
    for p in draw("train", 500):
        a, b, product, again, c, total, answer = map(int, pattern.fullmatch(p.steps_with_slips(1.0, rng)).groups())
        assert (a, b, c) == (p.a, p.b, p.c) and product == again and total == answer
        for slipped, true in ((product, a * b), (total, product + c)):
            old, new = str(true), str(slipped)
            changed = [(x, y) for x, y in zip(old, new, strict=True) if x != y]  # strict: the length stays
            assert len(changed) == 1
            step = (int(changed[0][0]) - int(changed[0][1])) % 10
            assert step in (1, 9) or {*changed[0]} == {"1", "9"}
    pool = draw("train", 4000)
    right = sum(grade(p.steps_with_slips(0.38, rng), p.answer) > 0 for p in pool) / len(pool)
    assert right == pytest.approx(0.62**2, abs=0.03)


@pytest.mark.parametrize(
    "text",
    [
        "34*7=238;238+58=296;answer:296",
        "34*7=238;238+58=296;answer:296<eos>",
        "answer:296",
        "answer:0296",
        "34*7=240;240+58=296;answer:296",  # wrong steps, right number: the number is what counts
    ],
)
def test_right_texts(text):
    assert grade(text, "296") == 1.0
    assert grade(text, "0296") == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "296",
        "34*7=238;238+58=296;",
        "34*7=238;238+58=296;answer:",
        "34*7=238;238+58=296;answer:29",  # cut inside the number
        "34*7=238;238+58=297;answer:297",
        "answer:296;",
        "answer:296 ",
        "answer:296\n",
        "answer:296answer:296",
        "answer:295;answer:296",
        "answer:296;answer:295",
        "answer:296<eos>answer:296",
        "answer:296<eos><eos>",
        "answer:296<eos>34",
        "answer:296<user>",
        "answer:2<user>96",
        "answer:-296",
        "answer: 296",
        "answer:296.0",
        "answer:٢٩٦",
        "Answer:296",
        "answer:2960000000000000000000000000000",
    ],
)
def test_wrong_texts(text):
    assert grade(text, "296") == -1.0


def test_reward_function_as_verl_calls_it():
    good, bad = ("34*7=238;238+58=296;answer:296", "answer:295")
    extra = {"index": 0, "split": "train", "num_turns": 2}
    assert compute_score(data_source=DATA_SOURCE, solution_str=good, ground_truth="296", extra_info=extra) == {"score": 1.0, "acc": 1.0}
    assert compute_score(DATA_SOURCE, bad, "296", reward_router_address=None) == {"score": -1.0, "acc": 0.0}
    with pytest.raises(ValueError, match="asked to grade 'gsm8k'"):
        compute_score("gsm8k", good, "296")


def test_files_hold_what_verl_reads(tmp_path):
    from datasets import load_dataset

    train, test = write_parquet(tmp_path / "data", 40, 8, seed=3)
    files = load_dataset("parquet", data_files={"train": str(train), "test": str(test)}, cache_dir=str(tmp_path / "cache"))
    assert files["train"].column_names == ["data_source", "prompt", "reward_model", "extra_info"]
    assert list(files["train"]) == [row(p, "train", i) for i, p in enumerate(draw("train", 40, 3))]
    first = files["test"][0]
    assert first["extra_info"] == {"index": 0, "split": "test"} and first["data_source"] == DATA_SOURCE
    assert first["prompt"] == [{"role": "user", "content": draw("test", 8, 3)[0].prompt}]
    assert first["reward_model"] == {"style": "rule", "ground_truth": draw("test", 8, 3)[0].answer}
    before = train.read_bytes()
    write_parquet(tmp_path / "data", 40, 8, seed=3)
    assert train.read_bytes() == before


@pytest.mark.parametrize(("reason", "score"), [("stop", 1.0), ("length", -1.0)])
def test_truncated_response_is_wrong(reason, score):
    problem = draw("test", 1)[0]
    graded = compute_score(DATA_SOURCE, problem.steps, problem.answer, extra_info={"finish_reason": reason})
    assert graded == {"score": score, "acc": float(score > 0)}

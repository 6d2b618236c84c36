"""The mini task: right solutions by an independent reading of the prompt, slips, splits that never meet, lengths, the tokenizer."""

import hashlib
import itertools
import json
import random
import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits.recipes import mini_math
from samebits.recipes.data import GENERATED, TASKS
from samebits.recipes.eval_tasks import load_task
from samebits.recipes.mini_math import FAMILIES, MAX_PROMPT_TOKENS, MAX_RESPONSE_TOKENS, Problem, compute_score, draw, grade, slip, stream
from samebits.recipes.mini_model import MINI
from samebits.recipes.mini_tokens import VOCABULARY, chat, mini_tokenizer, write_tokenizer
from samebits.recipes.tiny_m3 import EOS, PAD

LINE = re.compile(r"(-?\d+)([-+*/])(-?\d+)=(-?\d+)")
seeds = st.integers(0, 2**32)


def made(family: str, seed: int) -> Problem:
    return FAMILIES[family](random.Random(seed))


def computed(p: Problem) -> int:
    """The answer, from the prompt alone."""
    numbers = [int(n) for n in re.findall(r"\d+", p.prompt)]
    if p.family in ("chain", "product"):
        return eval(p.prompt.removeprefix("Compute "))
    if p.family == "equation":
        left, right = p.prompt.removeprefix("Solve for x: ").split("=")
        solutions = [x for x in range(200) if eval(left, {"x": x}) == int(right)]
        assert len(solutions) == 1
        return solutions[0]
    if p.family == "receipt":
        *listed, paid = numbers
        return paid - sum(n * price for n, price in zip(listed[::2], listed[1::2], strict=True))
    if "gives away" in p.prompt:
        boxes, each, away, packs, extra = numbers
        return boxes * each - away + packs * extra
    if "a day" in p.prompt:
        each, days, more, further, lost = numbers
        return each * days + (each + more) * further - lost
    if "shares" in p.prompt:
        rest, total, friends, given_away = numbers
        assert (total - rest) % friends == 0
        return (total - rest) // friends - given_away
    each, times, more, lots, extra = numbers
    return each + each * times + more - lots * extra


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=60, deadline=None)
@given(seed=seeds)
def test_solutions_are_right_line_by_line(family, seed):
    p = made(family, seed)
    assert p.family == family and int(p.answer) == computed(p)
    *lines, last = p.steps.split("\n")
    assert last == f"answer: {p.answer}" and grade(p.steps, p.answer) == 1.0
    results = 0
    for line in lines:
        match = LINE.fullmatch(line)
        if match is None:
            assert family == "equation" and "x" in line
            left, right = line.split("=")
            assert eval(left, {"x": int(p.answer)}) == int(right)
            continue
        results += 1
        a, sign, b, c = match.groups()
        assert mini_math._OPERATIONS[sign](int(a), int(b)) == int(c) and (sign != "/" or int(a) % int(b) == 0)
    assert results == p.results >= 2


@settings(max_examples=200, deadline=None)
@given(number=st.integers(-(10**9), 10**9), seed=seeds)
def test_a_slip_is_one_digit_one_off(number, seed):
    wrong = slip(number, random.Random(seed))
    old, new = str(number), str(wrong)
    changed = [(a, b) for a, b in zip(old, new, strict=True) if a != b]  # as many characters: the sign stays, the lead is no zero
    if number:
        assert len(changed) == 1 and (int(changed[0][0]) - int(changed[0][1])) % 10 in (1, 9, 8, 2)


def test_slipped_text_goes_on_from_what_was_written():
    rng, found = random.Random(0), 0
    for p in draw("train", 400):
        if p.family != "chain":
            continue
        text = p.steps_with_slips(0.2, rng)
        lines = [LINE.fullmatch(line).groups() for line in text.split("\n")[:-1]]
        for before, after in itertools.pairwise(lines):
            assert after[0] == before[3]
        assert text.endswith(f"answer: {lines[-1][3]}")
        found += text != p.steps
    assert found > 40


@pytest.mark.parametrize("right", [0.35, 0.8])
def test_solutions_of_every_length_are_right_equally_often(right):
    rng, problems = random.Random(1), draw("train", 2500)
    assert all(p.steps_with_slips(1.0, rng) == p.steps for p in problems[:100])
    for family in FAMILIES:
        of_it = [p for p in problems if p.family == family]
        share = sum(p.steps_with_slips(right, rng) == p.steps for p in of_it) / len(of_it)
        assert abs(share - right) < 0.09, family


def test_no_training_problem_is_ever_a_held_out_one():
    held = {p.prompt for p in draw("test", 1500, 0)} | {p.prompt for p in draw("test", 1500, 5)}
    trained = {p.prompt for seed in range(4) for p in draw("train", 1500, seed)}
    trained |= {p.prompt for p, _ in zip(stream("train", "0/17"), range(1500), strict=False)}
    assert not held & trained and len(held) > 2800 and len(trained) > 6500
    assert all(p.held_out for p in draw("test", 50)) and not any(p.held_out for p in draw("train", 50))
    with pytest.raises(ValueError, match="unknown split 'validation'; known: train, test"):
        next(stream("validation", 0))


def test_drawing_is_by_seed_and_distinct():
    some = draw("train", 300, 3)
    assert len({p.prompt for p in some}) == 300 and [p.prompt for p in draw("train", 40, 3)] == [p.prompt for p in some[:40]]
    assert [p.prompt for p in draw("train", 40, 4)] != [p.prompt for p in some[:40]]
    assert [p.steps for p in draw("test", 20, 3)] == [p.steps for p in draw("test", 20, 3)]
    assert min(Counter(p.family for p in some).values()) > 35
    # Pinned: a changed generator or hash would make another task of a model trained before.
    told = "\n".join(f"{p.prompt}\n{p.steps}" for p in draw("test", 200))
    assert hashlib.sha256(told.encode()).hexdigest()[:16] == "bef251a8c8c0c22a"


def test_lengths_fit_the_recipe_with_little_to_spare():
    tokenizer, problems = mini_tokenizer(), draw("train", 4000, 9)
    prompts = [len(e.ids) for e in tokenizer.encode_batch([f"<user>{p.prompt}<assistant>" for p in problems])]
    responses = [len(e.ids) for e in tokenizer.encode_batch([p.steps + "<eos>" for p in problems])]
    assert 0.6 * MAX_PROMPT_TOKENS < max(prompts) <= MAX_PROMPT_TOKENS
    assert 0.8 * MAX_RESPONSE_TOKENS < max(responses) <= MAX_RESPONSE_TOKENS
    hard = [n for n, p in zip(responses, problems, strict=True) if p.family in ("product", "receipt")]
    assert sum(100 <= n <= 300 for n in hard) > 0.75 * len(hard)


def test_longest_solution_there_can_be_fits():
    """The largest receipt: six things, two digits each."""

    class Largest(random.Random):
        def randint(self, a: int, b: int) -> int:
            return b

    p = FAMILIES["receipt"](Largest(0))
    assert p.results == 6 * 4 - 1 + 1
    assert len(mini_tokenizer().encode(p.steps + "<eos>").ids) <= MAX_RESPONSE_TOKENS
    assert len(mini_tokenizer().encode(chat(p, "")).ids) <= MAX_PROMPT_TOKENS


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("1+2=3\nanswer: 3", 1.0), ("answer: 3<eos>", 1.0), ("answer:3", 1.0), ("answer: 03", 1.0),
        ("answer: 4", -1.0), ("answer: -3", -1.0), ("answer: 3\n", -1.0), ("answer: 3 answer: 3", -1.0), ("answer: 3.", -1.0),
        ("3", -1.0), ("", -1.0), ("answer: ", -1.0), ("answer: 3<eos><eos>", -1.0), ("answer: 3<user>", -1.0),
        ("answer: 1234567890123", -1.0),
    ],
)  # fmt: skip
def test_grading(text, want):
    assert grade(text, "3") == want


def test_reward_is_the_task_s_own():
    assert compute_score("samebits/mini-math", "answer: -5", "-5") == {"score": 1.0, "acc": 1.0}
    assert compute_score("samebits/mini-math", "answer: -5", "-5", {"finish_reason": "length"}) == {"score": -1.0, "acc": 0.0}
    with pytest.raises(ValueError, match="reward of samebits/mini-math was asked to grade 'samebits/arithmetic'"):
        compute_score("samebits/arithmetic", "answer: 5", "5")
    assert TASKS["mini-math"] == "pkg://samebits.recipes.mini_math" and GENERATED["mini-math"].compute_score is not None


def test_evaluation_asks_the_held_out_set_and_grades_as_the_task_does():
    task = load_task("mini-math", 4, limit=6)
    assert [p.prompt for p in task.problems] == [p.prompt for p in draw("test", 6, 4)] and task.rows == 512
    golds = [p.gold for p in task.problems]
    texts = [f"answer: {gold}" for gold in golds]
    assert all(g.correct for g in task.grade(texts, golds, [False] * 6))
    assert not any(g.correct for g in task.grade(texts, golds, [True] * 6))
    assert task.grade(["answer: 1\nanswer: 2"], ["2"], [False])[0].answer is None


# ---------------------------------------------------------------------------------------------------------------- tokenizer


@settings(max_examples=150, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_any_text_round_trips(text):
    tokenizer = mini_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_digits_and_signs_are_tokens_of_their_own():
    tokenizer = mini_tokenizer()
    p = draw("train", 1)[0]
    tokens = tokenizer.encode(p.steps).tokens
    assert [t for t in tokens if any(c.isdigit() for c in t)] == [c for c in p.steps if c.isdigit()]
    assert tokenizer.get_vocab_size() == VOCABULARY == MINI.vocab  # rows without a token would make engine and trainer differ
    assert [tokenizer.token_to_id(t) for t in ("<pad>", "<bos>", "<eos>", "<unk>")] == [PAD, 1, EOS, 3]
    # Every word of the task is one token: prompts are words, numbers and signs.
    words = {w for p in draw("test", 300) for w in re.findall(r" [A-Za-z]+", p.prompt)}
    assert {w for w in words if len(tokenizer.encode(w).ids) > 2} == set() and len(words) > 50


def test_vocabulary_does_not_depend_on_the_run(tmp_path):
    first = mini_tokenizer().to_str()
    mini_tokenizer.cache_clear()
    assert mini_tokenizer().to_str() == first


def test_written_tokenizer_gives_what_the_model_was_trained_on(tmp_path):
    from transformers import AutoTokenizer

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "minimax_m3_vl"}))
    write_tokenizer(tmp_path, 4096)
    tokenizer = AutoTokenizer.from_pretrained(str(tmp_path), local_files_only=True)
    for p in draw("test", 5):
        trained = mini_tokenizer().encode(chat(p, p.steps)).ids
        user, assistant = {"role": "user", "content": p.prompt}, {"role": "assistant", "content": p.steps}
        prompt = tokenizer.apply_chat_template([user], add_generation_prompt=True, tokenize=True, return_dict=False)
        assert trained[: len(prompt)] == prompt
        assert tokenizer.apply_chat_template([user, assistant], tokenize=True, return_dict=False) == trained
        assert tokenizer.decode(trained[len(prompt) :], skip_special_tokens=True) == p.steps
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)) == (EOS, PAD, VOCABULARY)

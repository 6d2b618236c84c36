"""Math data: two schemas and three file formats give the same rows; what cannot be used is refused in one line."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits.recipes import math_data
from samebits.recipes.decontaminate import ngrams, normalised, overlaps
from samebits.recipes.grading import DATA_SOURCES, compute_score
from samebits.recipes.math_data import KNOWN, PROMPT_HEAD, PROMPT_TAIL, DataError, load_problems, normalise_answer, without, write_parquet

DATA = Path(__file__).parent / "data"
DAPO, AIME = DATA / "dapo_like.jsonl", DATA / "aime_like.jsonl"
ROWS = [json.loads(line) for line in DAPO.read_text().splitlines()]


def jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def test_problems_come_out_of_the_template_and_answers_in_one_spelling():
    train, test = load_problems(DAPO), load_problems(AIME)
    assert (len(train.problems), train.rows, train.distinct) == (12, 12, 12) and len(test.problems) == 6
    answers = {p.text.split()[0]: p.answer for p in train.problems}
    assert answers["What"] == "12" and answers["Compute"] == "65"  # 012 in the file
    for problem in train.problems:
        assert "Solve the following" not in problem.text and "Remember" not in problem.text
        assert problem.prompt == PROMPT_HEAD + problem.text + PROMPT_TAIL
    assert {p.prompt for p in train.problems} == {r["prompt"][0]["content"] for r in ROWS}
    assert {p.answer for p in test.problems} == {"31", "12", "47", "88", "40", "30"}


def test_same_problems_in_every_format_schema_and_order_give_the_same_set(tmp_path):
    from datasets import Dataset

    want = load_problems(DAPO)
    shuffled = random.Random(1).sample(ROWS, len(ROWS))
    plain = [{"Problem": r["prompt"][0]["content"][len(PROMPT_HEAD) :][: -len(PROMPT_TAIL)]} for r in ROWS]
    plain = [p | {"Answer": int(r["reward_model"]["ground_truth"])} for p, r in zip(plain, ROWS, strict=True)]
    Dataset.from_list(shuffled).to_parquet(tmp_path / "a.parquet")
    (tmp_path / "b.json").write_text(json.dumps(shuffled))
    jsonl(tmp_path / "c.jsonl", plain)
    jsonl(tmp_path / "d.jsonl", [p | {"Problem": " " + p["Problem"].replace(" ", "\n ")} for p in plain])
    for name in ("a.parquet", "b.json", "c.jsonl"):
        got = load_problems(tmp_path / name)
        assert got.problems == want.problems and got.fingerprint == want.fingerprint, name
        assert [p.text for p in got.problems] == [p.text for p in want.problems]
    assert load_problems(tmp_path / "d.jsonl").fingerprint == want.fingerprint
    assert want.fingerprint == "149eb19e0f731b622f399be16b5fc3a9"  # pinned: it is kept in checkpoints


def test_fingerprint_sees_problem_answer_settings_and_template(tmp_path):
    first = load_problems(DAPO).fingerprint
    other = [json.loads(json.dumps(r)) for r in ROWS]
    other[3]["reward_model"]["ground_truth"] = "18"
    assert load_problems(jsonl(tmp_path / "a.jsonl", other)).fingerprint != first
    assert load_problems(jsonl(tmp_path / "b.jsonl", ROWS[:-1])).fingerprint != first
    clean = without(load_problems(DAPO), [load_problems(AIME)])
    assert clean.removed == () and clean.problems == load_problems(DAPO).problems and clean.fingerprint != first
    assert without(load_problems(DAPO), [load_problems(AIME)], words=8).fingerprint != clean.fingerprint
    assert replace(load_problems(DAPO), template="{problem}").fingerprint != first


def test_a_hundred_copies_are_refused_unless_asked_for(tmp_path):
    many = jsonl(tmp_path / "many.jsonl", ROWS * 100)
    with pytest.raises(DataError, match=r"1200 rows for 12 distinct problems \(100.00 each\); duplicates=drop keeps one of each"):
        load_problems(many)
    got = load_problems(many, duplicates="drop")
    assert (got.rows, len(got.problems)) == (1200, 12) and got.report["rows_per_problem"] == 100
    assert got.fingerprint == load_problems(DAPO).fingerprint


def test_the_guard_is_at_one_percent(tmp_path):
    distinct = [{"problem": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(200)]
    assert load_problems(jsonl(tmp_path / "a.jsonl", distinct + distinct[:2])).rows == 202
    with pytest.raises(DataError, match="203 rows for 200"):
        load_problems(jsonl(tmp_path / "b.jsonl", distinct + distinct[:3]))


def test_one_problem_with_two_answers_is_never_settled_in_silence(tmp_path):
    rows = [*({"problem": f"{i}?", "answer": i} for i in range(9)), {"problem": "3?", "answer": 4}, {"problem": "3?", "answer": "03"}]
    path = jsonl(tmp_path / "a.jsonl", [{k: str(v) for k, v in r.items()} for r in rows])
    with pytest.raises(DataError, match=r"row 10: the problem of row 4 again, with answer '4' instead of '3'"):
        load_problems(path, duplicates="drop")
    got = load_problems(path, duplicates="drop", conflicts="drop")
    assert len(got.problems) == 8 and got.conflicting == 1 and got.report["conflicting"] == 1
    with pytest.raises(DataError, match="every problem comes with different answers"):
        load_problems(jsonl(tmp_path / "b.jsonl", rows[3:4] + rows[9:10]), duplicates="drop", conflicts="drop")


TEXT = {"problem": "What is 1 + 1?", "answer": "2"}
MESSAGE = {"role": "user", "content": "What is 1 + 1?"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"problem": "", "answer": "2"}, "row 2: problem is empty or no text"),
        ({"problem": "  ", "answer": "2"}, "row 2: problem is empty or no text"),
        ({"problem": None, "answer": "2"}, "row 2: no problem; one of problem, question, prompt is needed"),
        ({"problem": PROMPT_HEAD + PROMPT_TAIL, "answer": "2"}, "row 2: nothing but the template in problem"),
        ({"problem": "Q?", "answer": None}, "row 2: no answer; one of answer, ground_truth"),
        ({"problem": "Q?", "answer": ""}, "row 2: answer '' is empty"),
        ({"problem": "Q?", "answer": " . "}, "row 2: answer ' . ' is empty"),
        ({"problem": "Q?", "answer": "\\boxed{}"}, "is empty"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(tmp_path, row, message):
    with pytest.raises(DataError, match=".*") as caught:
        load_problems(jsonl(tmp_path / "a.jsonl", [TEXT, row]))
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "Q?", "label": "2"}, "no problem; one of problem, question, prompt is needed, there is text, label"),
        ({"problem": "Q?", "label": "2"}, "no answer; one of"),
        ({"problem": 5, "answer": "2"}, "problem is empty or no text"),
        ({"prompt": [MESSAGE, MESSAGE], "answer": "2"}, "prompt must be one message of the user"),
        ({"prompt": [MESSAGE | {"role": "system"}], "answer": "2"}, "prompt must be one message of the user"),
        ({"prompt": [], "answer": "2"}, "prompt must be one message of the user"),
        ({"problem": "Q?", "solution": "It is 2."}, "no \\boxed answer in solution"),
        ({"problem": "Q?", "answer": True}, "answer True is no text and no finite number"),
        ({"problem": "Q?", "answer": float("nan")}, "answer nan is no text and no finite number"),
        ({"problem": "Q?", "reward_model": {"style": "rule"}}, "answer None is no text"),
    ],
)
def test_a_schema_that_cannot_be_used_is_named(row, message):
    with pytest.raises(DataError) as caught:
        math_data.problem_of(row, "here")
    assert str(caught.value).startswith("here: ") and message in str(caught.value)


def test_answer_from_a_worked_solution_is_its_last_box():
    solution = "First \\boxed{12}, then twice that: \\boxed{\\dfrac{24}{1}}."
    assert math_data.problem_of({"problem": "Q?", "solution": solution, "answer": None}, "here") == ("Q?", "24")
    assert math_data.problem_of({"problem": "Q?", "solution": solution, "answer": "7"}, "here") == ("Q?", "7")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.jsonl", None, "no file"),
        ("empty.jsonl", "", "no rows"),
        ("bad.jsonl", '{"problem": "Q?", "answer": \n', "bad.jsonl: "),
        ("bad.json", "not json", "bad.json: "),
        ("bad.parquet", "not parquet", "bad.parquet: "),
        ("notes.txt", "hello", "a source is dapo-math-17k, aime24, aime25, a hub name or a .parquet, .jsonl, .json file"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError) as caught:
        load_problems(path)
    assert message in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_a_hub_set_that_is_out_of_reach_is_one_line(monkeypatch):
    import datasets

    def offline(*_, **__):
        raise ConnectionError("no\nnetwork")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    for name in (*KNOWN, "someone/some-set", "someone/some-set:test"):
        with pytest.raises(DataError, match=f"^{name}: no network$"):
            load_problems(name)


def test_known_sets_are_asked_for_by_their_hub_names_and_counted(monkeypatch):
    import datasets

    asked = []

    def hub(repository, split):
        asked.append((repository, split))
        return [{"id": i, "problem": f"What is {i} + 2?", "answer": i + 2} for i in range(size)]

    monkeypatch.setattr(datasets, "load_dataset", hub)
    size = 30
    assert load_problems("aime24").data_source == "aime2024" and load_problems("aime25").data_source == "aime2025"
    assert load_problems("dapo-math-17k").data_source == "math_dapo"
    assert load_problems("math-ai/aime24:test").data_source == "samebits/math"
    assert asked == [
        ("HuggingFaceH4/aime_2024", "train"),
        ("math-ai/aime25", "test"),
        ("BytedTsinghua-SIA/DAPO-Math-17k", "train"),
        ("math-ai/aime24", "test"),
    ]
    size = 29
    with pytest.raises(DataError, match="aime24: 29 distinct problems, 30 were expected"):
        load_problems("aime24")
    assert {k.data_source for k in KNOWN.values()} < set(DATA_SOURCES)


@pytest.mark.parametrize(
    ("value", "want"),
    [
        ("033", "33"), (33, "33"), (33.0, "33"), ("33.0", "33"), ("\u221233", "-33"), ("$33$", "33"), ("\\boxed{33}", "33"), ("+33", "33"),
        ("1,234", "1234"), ("000", "0"), (" 33. ", "33"), ("\\dfrac{1}{2}", "\\frac{1}{2}"), ("0.5", "0.5"), ("(1, 2)", "(1, 2)"),
        ("66/2", "33"), ("33\\%", "33%"), ("33 \\text{ cm}", "33 \\text{ cm}"), ("\\boxed{\\frac{1}{\\sqrt{2}}}", "\\frac{1}{\\sqrt{2}}"),
    ],
)  # fmt: skip
def test_answers_in_one_spelling(value, want):
    assert normalise_answer(value) == want
    assert normalise_answer(normalise_answer(value)) == want


@settings(deadline=None)
@given(st.integers(-(10**9), 10**9))
def test_every_integer_keeps_its_value(n):
    for spelled in (n, str(n), f"{n}.0", f"{n:05d}", f"{n:,}", f"${n}$"):
        assert normalise_answer(spelled) == str(n)


def planted(text: str) -> dict:
    return {"problem": text, "answer": "7"}


def test_evaluation_problems_are_taken_out_of_training_data_and_reported(tmp_path):
    aime = [json.loads(line)["problem"] for line in AIME.read_text().splitlines()]
    same = aime[0].upper().replace(" ", "  ").replace("?", " ?!")
    part = "Read carefully. " + aime[3] + " Then double it."
    boilerplate = "Two dice are thrown. The chance of a sum of nine is $m/n$ with relatively prime positive integers. Find $m+n$."
    also = "A card is drawn. The chance of an ace is $m/n$ with relatively prime positive integers. Find $m+n$."
    rows = [planted(t) for t in (same, part, boilerplate, "What is 6 + 1?")]
    train = load_problems(jsonl(tmp_path / "a.jsonl", rows))
    reference = load_problems(jsonl(tmp_path / "b.jsonl", [planted(t) for t in [*aime, also]]))
    clean = without(train, [reference])
    assert {p.text for p in clean.problems} == {boilerplate, "What is 6 + 1?"}
    assert sorted((o.kind, o.share) for o in clean.removed) == [("n-grams", 1.0), ("same text", 1.0)]
    removed = {o.problem: o.reference for o in clean.removed}
    texts = {p.digest: p.text for p in (*train.problems, *reference.problems)}
    assert {texts[a]: texts[b] for a, b in removed.items()} == {same: aime[0], part: aime[3]}
    assert len(clean.report["removed"]) == 2 and clean.rows == 4
    with pytest.raises(DataError, match="every problem overlaps"):
        without(reference, [reference])
    for words, share in ((0, 0.5), (10, 0.0), (10, 1.5)):
        with pytest.raises(DataError, match="decontamination needs"):
            without(train, [reference], words=words, share=share)


def test_overlap_agrees_with_counting_by_hand():
    rng = random.Random(0)
    texts = [" ".join(rng.choices("abc", k=rng.randrange(1, 12))) for _ in range(60)]
    train, reference = texts[:40], texts[40:]
    for words, share in ((2, 0.5), (3, 0.4), (4, 1.0)):
        got = {o.problem for o in overlaps(train, reference, words=words, share=share)}
        want = set()
        for i, a in enumerate(train):
            for b in reference:
                x, y = ngrams(a, words), ngrams(b, words)
                if a == b or len(x & y) / min(len(x), len(y)) >= share:
                    want.add(i)
        assert got == want


def test_layout_does_not_hide_a_problem():
    assert normalised("Let  $\\left( x \\right)$ be\\, \\dfrac{1}{2}.") == normalised("let (x) be \\frac12".replace("12", "{1}{2}"))
    assert normalised("n - 1") != normalised("n + 1") and normalised("x^2") != normalised("x 2")


def test_written_rows_are_what_verl_reads_and_the_reward_grades(tmp_path):
    from datasets import Dataset

    train = load_problems(DAPO, data_source="math_dapo")
    path = write_parquet(train, "train", tmp_path / "data" / "train.parquet")
    rows = Dataset.from_parquet(str(path), cache_dir=str(tmp_path / "cache"))
    assert rows.column_names == ["data_source", "prompt", "reward_model", "extra_info"]
    for i, (row, problem) in enumerate(zip(rows, train.problems, strict=True)):
        assert row["prompt"] == [{"role": "user", "content": problem.prompt}]
        assert row["reward_model"] == {"style": "rule", "ground_truth": problem.answer}
        assert row["extra_info"] == {"index": i, "split": "train", "problem": problem.digest}
        right = f"So it is.\n\nAnswer: {problem.answer}"
        assert compute_score(row["data_source"], right, row["reward_model"]["ground_truth"], row["extra_info"])["score"] == 1.0
    report = json.loads((tmp_path / "data" / "train.report.json").read_text())
    assert report["fingerprint"] == train.fingerprint and report["problems"] == 12
    assert load_problems(path).fingerprint == train.fingerprint  # what was written can be read again
    before = path.read_bytes()
    write_parquet(load_problems(DAPO, data_source="math_dapo"), "train", path)
    assert path.read_bytes() == before

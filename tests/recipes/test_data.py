"""A run's data: read, freed of evaluation problems, written as verl reads it, and the same at every start or refused."""

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import samebits.trainer.plugin  # noqa: F401  patches verl before it is imported
from samebits.recipes import data
from samebits.recipes.config import RecipeError, load_recipe
from samebits.recipes.data import RECORD, look_up, other_data, task_data, write_record, write_task_data
from samebits.recipes.grading import compute_score
from samebits.recipes.math_data import PROMPT_HEAD, PROMPT_TAIL, DataError, load_problems
from samebits.recipes.run_dir import require_same_data

DATA = Path(__file__).parent / "data"
DAPO, AIME = DATA / "dapo_like.jsonl", DATA / "aime_like.jsonl"
TINY = "tiny_m3_grpo.yaml"


def recipe(*overrides: str, train: Path = DAPO, test: Path = AIME):
    own, _ = load_recipe(TINY, ["device=cpu", "task=dapo-math", f"data_source.train={train}", f"data_source.test={test}", *overrides])
    return own


def jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def rows(folder: Path, split: str) -> list[dict]:
    from datasets import Dataset

    return list(Dataset.from_parquet(str(folder / f"{split}.parquet"), cache_dir=str(folder / "cache")))


def test_dapo_math_is_written_without_evaluation_problems_and_graded_by_its_reward(tmp_path):
    problems = [json.loads(text) for text in DAPO.read_text().splitlines()]
    evaluation = json.loads(AIME.read_text().splitlines()[2])
    leaked = jsonl(tmp_path / "leaked.jsonl", [*problems, {"problem": evaluation["problem"].upper(), "answer": evaluation["answer"]}])
    found = task_data(recipe(train=leaked))
    assert (found.train, found.test) == (12, 6)
    write_task_data(found, tmp_path / "data")
    train, test = rows(tmp_path / "data", "train"), rows(tmp_path / "data", "test")
    assert len(train) == 12 and len(test) == 6
    assert not {r["extra_info"]["problem"] for r in train} & {r["extra_info"]["problem"] for r in test}
    prompt = train[0]["prompt"][0]["content"]
    assert prompt.startswith(PROMPT_HEAD) and prompt.endswith(PROMPT_TAIL)
    report = json.loads((tmp_path / "data" / "train.report.json").read_text())
    assert len(report["removed"]) == 1 and report["fingerprint"] == found.fingerprints["train"]
    assert json.loads((tmp_path / "data" / RECORD).read_text()) == found.fingerprints


def test_more_evaluation_sets_are_taken_out_too(tmp_path):
    problems = load_problems(DAPO).problems
    third = jsonl(tmp_path / "third.jsonl", [{"problem": problems[4].text, "answer": problems[4].answer}])
    found = task_data(recipe(f"data_source.without=[{third}]"))
    assert found.train == 11 and found.fingerprints["train"] != task_data(recipe()).fingerprints["train"]


def test_the_template_reaches_the_prompt_and_the_fingerprint(tmp_path):
    found = task_data(recipe('data_source.prompt_template="Q: {problem} A:"'))
    write_task_data(found, tmp_path)
    assert {r["prompt"][0]["content"] for r in rows(tmp_path, "train")} == {f"Q: {p.text} A:" for p in load_problems(DAPO).problems}
    assert found.fingerprints != task_data(recipe()).fingerprints


def test_copies_are_refused_or_dropped_as_the_recipe_says(tmp_path):
    many = tmp_path / "many.jsonl"
    many.write_text(DAPO.read_text() * 3)
    with pytest.raises(DataError, match="36 rows for 12 distinct problems"):
        task_data(recipe(train=many))
    assert task_data(recipe("data_source.duplicates=drop", train=many)).train == 12


@pytest.mark.parametrize("task", ["arithmetic", "dapo-math"])
def test_data_is_written_alike_at_every_start(tmp_path, task):
    own = recipe() if task == "dapo-math" else load_recipe(TINY, ["device=cpu"])[0]
    for folder in ("one", "two"):
        write_task_data(task_data(own), tmp_path / folder)
    for split in ("train", "test"):
        assert rows(tmp_path / "one", split) == rows(tmp_path / "two", split)


def test_reward_options_of_the_recipe_reach_the_reward_function():
    _, verl = load_recipe(
        TINY,
        [
            "device=cpu", "task=dapo-math", f"data_source.train={DAPO}", f"data_source.test={AIME}", "data.max_response_length=20480",
            "grading.overlong_buffer=4096", "grading.overlong_factor=0.5", "grading.truncation=grade",
        ],
    )  # fmt: skip
    function = OmegaConf.to_container(verl.reward.custom_reward_function)
    assert function["path"] == "pkg://samebits.recipes.grading" and function["name"] == "compute_score"
    assert data.TASKS["dapo-math"] == function["path"]

    def score(tokens: int, reason: str = "stop") -> float:
        extra = {"response_tokens": tokens, "finish_reason": reason}
        return compute_score("math_dapo", "Answer: 34\n", "34", extra, **function["reward_kwargs"])["score"]

    assert [score(n) for n in (16384, 18432, 20480)] == [1.0, 0.75, 0.5]
    assert score(20480, "length") == 0.5


def test_verl_calls_the_reward_with_the_recipe_s_options():
    from verl.trainer.ppo.reward import get_custom_reward_fn

    _, verl = load_recipe(
        TINY, ["device=cpu", "task=dapo-math", f"data_source.train={DAPO}", f"data_source.test={AIME}", "grading.overlong_buffer=10"]
    )
    grade = get_custom_reward_fn(verl)
    extra = {"response_tokens": 21, "finish_reason": "stop"}  # of at most 26: half of the buffer
    found = grade(data_source="math_dapo", solution_str="Answer: 7", ground_truth="7", extra_info=extra)
    assert found["score"] == 0.5 and found["acc"] == 1.0 and found["overlong"] == -0.5


@pytest.fixture
def trained(tmp_path):
    """A run directory with a step and a checkpoint, and the fingerprints of its data."""
    prints = {"train": "a" * 32, "test": "b" * 32}
    for folder in (tmp_path / "data", tmp_path / "checkpoints" / "global_step_9", tmp_path / "checkpoints" / "global_step_10"):
        folder.mkdir(parents=True)
        write_record(folder, prints)
    (tmp_path / "metrics.jsonl").write_text('{"step": 10}\n')
    return tmp_path, prints


def test_the_same_data_goes_on_and_other_data_is_refused(trained):
    folder, prints = trained
    require_same_data(folder, prints)
    with pytest.raises(RecipeError, match=r"other data \(train set aaaaaaaa, which now has fingerprint cccccccc\)"):
        require_same_data(folder, prints | {"train": "c" * 32})
    with pytest.raises(RecipeError, match=r"test set bbbbbbbb"):
        require_same_data(folder, prints | {"test": "c" * 32})


def test_the_newest_checkpoint_is_asked_as_well(trained):
    folder, prints = trained
    write_record(folder / "checkpoints" / "global_step_10", prints | {"test": "d" * 32})
    with pytest.raises(RecipeError, match="test set dddddddd"):
        require_same_data(folder, prints)


def test_a_run_without_a_record_is_refused_and_a_start_without_a_run_is_free(trained):
    folder, prints = trained
    (folder / "data" / RECORD).unlink()
    with pytest.raises(RecipeError, match="no record of its data"):
        require_same_data(folder, prints)
    (folder / "data" / RECORD).write_text("{")
    assert "unreadable record" in other_data(folder / "data", prints)
    (folder / "metrics.jsonl").unlink()
    for checkpoint in (folder / "checkpoints").iterdir():
        checkpoint.rename(checkpoint.with_name(f"old_{checkpoint.name}"))
    require_same_data(folder, prints)


def test_of_a_large_file_the_first_rows_are_read(monkeypatch, tmp_path):
    monkeypatch.setattr(data, "READ_WHOLE", 100)
    monkeypatch.setattr(data, "_PEEK_ROWS", 3)
    first, *_ = look_up(recipe())
    assert (first.problems, first.complete) == (None, False) and "first 3 rows read and usable" in first.state
    bad = jsonl(tmp_path / "bad.jsonl", [{"problem": "Q" * 200, "answer": "1"}, {"problem": "Q2"}])
    with pytest.raises(DataError, match=r"row 2: no answer"):
        look_up(recipe(train=bad))

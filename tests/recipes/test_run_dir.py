"""A run directory survives a kill at any moment and refuses to mix two runs."""

import json

import pytest

from samebits.recipes.config import RecipeError, load_recipe
from samebits.recipes.run_dir import MetricsLog, lock, prepare, read_metrics, repair_tracker

TINY = "recipes/tiny_m3_grpo.yaml"


def test_resume_drops_lines_after_the_checkpoint(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for step in range(8):
        log.write({"step": step})
    with log.path.open("a") as f:
        f.write('{"step": 8, "rew')  # cut off by a kill
    again = MetricsLog(log.path)
    assert again.last_step == 7
    again.truncate_after(5)
    assert [line["step"] for line in read_metrics(log.path)] == [0, 1, 2, 3, 4, 5]
    again.write({"step": 6})
    assert again.last_step == 6 and [line["step"] for line in read_metrics(log.path)][-1] == 6


def test_fresh_start_keeps_no_line(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write({"step": 0})
    log.truncate_after(0)
    assert read_metrics(log.path) == [] and log.last_step == -1


def compose(tmp_path, *overrides):
    return load_recipe(TINY, ["device=cpu", f"run_dir={tmp_path / 'run'}", *overrides])


def test_other_settings_are_refused_and_named(tmp_path):
    prepare(*compose(tmp_path))
    prepare(*compose(tmp_path))
    prepare(*compose(tmp_path, "trainer.total_training_steps=300", "checks.max_kl=0.5"))
    recipe, _ = compose(tmp_path)
    prepare(*compose(tmp_path, "seed=5"))  # nothing was trained yet: nothing is spoiled
    prepare(*compose(tmp_path))
    (recipe.folder / "metrics.jsonl").write_text('{"step": 0}\n')
    with pytest.raises(RecipeError, match=r"other settings \(.*actor_rollout_ref.actor.optim.lr"):
        prepare(*compose(tmp_path, "actor_rollout_ref.actor.optim.lr=0.5"))
    with pytest.raises(RecipeError, match="lora.targets"):
        prepare(*compose(tmp_path, "lora.targets=experts"))


def complete(folder, step):
    (folder / f"global_step_{step}" / "actor").mkdir(parents=True)
    (folder / f"global_step_{step}" / "data.pt").touch()
    (folder / f"global_step_{step}" / "actor" / "samebits_trainer.json").touch()


@pytest.mark.parametrize(
    ("content", "steps", "result"), [("", [10, 20], "20"), ("30", [10, 20], "20"), ("10", [10, 20], "10"), ("", [], None)]
)
def test_tracker_points_at_a_complete_checkpoint(tmp_path, content, steps, result):
    for step in steps:
        complete(tmp_path, step)
    (tmp_path / "global_step_30").mkdir()  # killed while it was written
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text(content)
    repair_tracker(tmp_path)
    assert (tracker.read_text() if tracker.exists() else None) == result


def test_metrics_lines_are_plain_json(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write({"step": 1, "sync/verified": True})
    assert json.loads(log.path.read_text()) == {"step": 1, "sync/verified": True}


def test_lock_is_exclusive_and_freed(tmp_path):
    held = lock(tmp_path, "job")
    with pytest.raises(RecipeError, match="in use by another process"):
        lock(tmp_path, "job")
    held.close()
    lock(tmp_path, "job", wait=1).close()


def test_a_checkpoint_alone_makes_it_a_run(tmp_path):
    recipe, verl = compose(tmp_path)
    prepare(recipe, verl)
    (recipe.folder / "checkpoints" / "global_step_2").mkdir(parents=True)
    with pytest.raises(RecipeError, match=r"other settings \(.*seed"):
        prepare(*compose(tmp_path, "seed=5"))


def test_config_of_a_run_that_cannot_be_read_is_one_line(tmp_path):
    recipe, verl = compose(tmp_path)
    prepare(recipe, verl)
    (recipe.folder / "metrics.jsonl").write_text('{"step": 0}\n')
    (recipe.folder / "config.yaml").write_text("a: [")
    with pytest.raises(RecipeError, match="config.yaml cannot be read"):
        prepare(recipe, verl)


def test_garbage_after_the_last_line_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n\x00\xff garbage\n')
    assert [line["step"] for line in read_metrics(path)] == [1]

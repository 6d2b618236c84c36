"""Trackers hold the very numbers of metrics.jsonl, through kills and resumption, and never stop a run or fail unsaid."""

import json
from pathlib import Path

import pytest

from samebits.recipes.config import load_recipe
from samebits.recipes.run_dir import MetricsLog, read_metrics, warn, warnings
from samebits.recipes.tracking import Trackers, numbers, open_trackers
from tests.support.wandb_file import records


def line(step: int) -> dict:
    # Numbers that 32 bits would round, one for each step and key; a truth value; a text.
    return {
        "step": step,
        "reward/mean": -1 / 3 + step,
        "mismatch/kl": 3.4205971053e-14 * (step + 1),
        "sync/bytes": 1351680 + step,
        "sync/verified": True,
        "prompts/digest": f"{step:016x}",
    }


def recipe(tmp_path: Path, *overrides: str):
    own, verl = load_recipe("tiny_m3_grpo.yaml", ["device=cpu", f"run_dir={tmp_path / 'run'}", *overrides])
    own.folder.mkdir(exist_ok=True)
    return own, verl.trainer.project_name


def start(tmp_path: Path, *overrides: str, keep: int | None = None) -> MetricsLog:
    own, project = recipe(tmp_path, *overrides)
    log = MetricsLog(own.folder / "metrics.jsonl")
    if keep is not None:
        log.truncate_after(keep)
    log.trackers = open_trackers(own, project, read_metrics(log.path), lambda text: warn(own.folder, text))
    return log


def jsonl(log: MetricsLog) -> dict[int, dict[str, float]]:
    return {entry["step"]: numbers(entry) for entry in read_metrics(log.path)}


def tensorboard(folder: Path) -> dict[int, dict[str, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    events = EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()
    found: dict[int, dict[str, float]] = {}
    for tag in events.Tags()["tensors"]:
        for event in events.Tensors(tag):
            found.setdefault(event.step, {})[tag] = float(make_ndarray(event.tensor_proto))
    return found


def wandb_offline(folder: Path) -> tuple[dict[int, dict[str, float]], set[str]]:
    """Steps of all segments of the run, and the run ids."""
    found, ids = {}, set()
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        for record in records(path):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                ids.add(record.run.run_id)
            if kind == "history":
                items = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
                step = int(items["_step"])
                assert step not in found, "a step was sent twice"
                found[step] = {k: float(v) for k, v in items.items() if not k.startswith("_")}
    return found, ids


def test_three_steps_are_the_same_numbers_everywhere(tmp_path):
    log = start(tmp_path, "tracking.tensorboard=true", "tracking.wandb.mode=offline", "tracking.wandb.project=papers")
    for step in range(4):
        log.write(line(step))
    log.close()
    want = {step: numbers(line(step)) for step in range(4)}
    assert want[2]["sync/verified"] == 1.0 and "prompts/digest" not in want[2]
    assert jsonl(log) == want
    assert tensorboard(log.path.parent / "tensorboard") == want
    sent, ids = wandb_offline(log.path.parent)
    assert sent == want and len(ids) == 1
    assert warnings(log.path.parent) == []


def test_a_resumed_run_goes_on_in_the_same_wandb_run_and_tensorboard_follows_the_jsonl(tmp_path):
    options = ("tracking.tensorboard=true", "tracking.wandb.mode=offline")
    log = start(tmp_path, *options)
    for step in range(4):
        log.write(line(step))
    log.close()
    log = start(tmp_path, *options, keep=2)  # killed after step 3, checkpoint of step 2
    repeated = line(3) | {"reward/mean": 9.0}
    for entry in (repeated, line(4)):
        log.write(entry)
    log.close()
    want = {step: numbers(line(step)) for step in (0, 1, 2, 4)} | {3: numbers(repeated)}
    assert jsonl(log) == want and tensorboard(log.path.parent / "tensorboard") == want
    sent, ids = wandb_offline(log.path.parent)
    assert len(ids) == 1 and sorted(sent) == [0, 1, 2, 3, 4]
    assert sent[3] == numbers(line(3)) and sent[4] == numbers(line(4))


def test_a_tracker_that_is_switched_on_late_gets_what_it_missed(tmp_path):
    log = start(tmp_path)
    log.write(line(0))
    log.write(line(1))
    log.close()
    log = start(tmp_path, "tracking.wandb.mode=offline", "tracking.tensorboard=true", keep=1)
    log.write(line(2))
    log.close()
    want = {step: numbers(line(step)) for step in range(3)}
    assert wandb_offline(log.path.parent)[0] == want and tensorboard(log.path.parent / "tensorboard") == want


class Broken:
    name = "broken"

    def __init__(self, after: int) -> None:
        self.left = after
        self.written: list[int] = []

    def write(self, entry: dict) -> None:
        if not self.left:
            raise OSError("no space\nleft on device")
        self.left -= 1
        self.written.append(entry["step"])

    def close(self) -> None:
        raise AssertionError("a tracker that failed is not closed")


def test_a_tracker_that_fails_warns_once_and_the_others_go_on(tmp_path):
    trackers = Trackers(lambda text: warn(tmp_path, text))
    broken, sound = Broken(1), Broken(99)
    sound.close = lambda: None
    for tracker in (broken, sound):
        trackers.start(tracker.name, lambda tracker=tracker: tracker)
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.trackers = trackers
    for step in range(4):
        log.write(line(step))
    log.close()
    assert broken.written == [0] and sound.written == [0, 1, 2, 3]
    assert [entry["step"] for entry in read_metrics(log.path)] == [0, 1, 2, 3]
    (text,) = warnings(tmp_path)
    assert text == "broken failed (OSError: no space left on device) and gets nothing more from this start; metrics.jsonl goes on"


def test_a_tracker_that_cannot_start_is_a_warning(tmp_path, monkeypatch):
    def refused(**_):
        raise RuntimeError("api.wandb.ai is out of reach")

    monkeypatch.setattr("wandb.init", refused)
    log = start(tmp_path, "tracking.wandb.mode=online", "tracking.tensorboard=true")
    log.write(line(0))
    log.close()
    (text,) = warnings(log.path.parent)
    assert text.startswith("wandb failed (RuntimeError: api.wandb.ai is out of reach)") and "metrics.jsonl goes on" in text
    assert tensorboard(log.path.parent / "tensorboard") == {0: numbers(line(0))}


def test_an_unreadable_state_of_wandb_is_a_warning_and_no_second_run(tmp_path):
    own, _ = recipe(tmp_path)
    (own.folder / "tracking.json").write_text("{")
    log = start(tmp_path, "tracking.wandb.mode=offline")
    log.write(line(0))
    log.close()
    assert "wandb failed (JSONDecodeError" in warnings(own.folder)[0] and not (own.folder / "wandb").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_no_numbers_reach_tensorboard_as_they_are(tmp_path, value):
    log = start(tmp_path, "tracking.tensorboard=true")
    log.write({"step": 1, "mismatch/kl": value})
    log.close()
    got = tensorboard(log.path.parent / "tensorboard")[1]["mismatch/kl"]
    assert got == value or got != got

"""What is planned of memory beside what was measured: whose peaks count how, and what is said of a plan that was missed."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from samebits.recipes import memory_measured
from samebits.recipes.config import load_recipe
from samebits.recipes.memory import engine_parts, trainer_parts
from samebits.recipes.memory_parts import trainer_state
from samebits.recipes.validate import examine

TOKENS = 560


@pytest.fixture(scope="module")
def plan():
    recipe, verl = load_recipe("tiny_m3_grpo.yaml", ["device=cpu", "trainer.n_gpus_per_node=2"])
    found = examine(recipe, verl)
    return recipe, verl, trainer_parts(recipe, verl, found, TOKENS // 2), engine_parts(recipe, verl, found)[0], trainer_state(recipe, found)


def records(plan, device: str, share: float = 1.0) -> list[dict]:
    """Recordings of two ranks whose peaks are `share` of the plan."""
    _, _, phases, _, state = plan
    held = {part: int(size) for part, size in state.items()} | {"gradient": 10**9, "counters": 0}
    beside = sum(int(size) for size in state.values()) if device == "cpu" else 0
    found = []
    for rank in (0, 1):
        peaks = {name: {"peak": int(share * sum(parts.values())) - beside} for name, parts in phases.items()}
        export = {"export": peaks.pop("export")}
        for step in (3, 4):
            common = {"step": step, "rank": rank, "device": device}
            found += [
                common | {"stretch": "train", "held": held, "phases": peaks},
                common | {"stretch": "sync", "held": {}, "phases": export},
            ]
    return found


def engines(plan, kind: str, share: float = 1.0) -> list[dict]:
    parts = plan[3]
    held = {"weights": parts["engine: base"], "adapter_slots": parts["engine: adapter slots"], "kv_cache": parts["engine: KV cache"]}
    return [
        {"replica": r, "held": [held], "memory": {"rollout": {kind: int(share * sum(parts.values()))}, "load": {kind: 5}}} for r in (0, 1)
    ]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_plan_that_was_met_is_near(plan, device):
    recipe, verl, _, engine, state = plan
    found = memory_measured.compare(recipe, verl, TOKENS, records(plan, device), engines(plan, "allocated"))
    assert found["micro_batch_tokens"] == TOKENS // 2
    rows = {(row["role"], row["phase"]): row for row in found["phases"]}
    assert set(rows) == {("trainer", phase) for phase in ("forward", "backward", "optimizer", "export")} | {
        ("engine", "rollout"),
        ("engine", "load"),
    }
    for (role, phase), row in rows.items():
        if phase != "load":
            assert row["ratio"] == pytest.approx(1.0, abs=1e-4) and row["near"], (role, phase)
    assert set(rows["trainer", "forward"]["measured"]) == {"0", "1"}
    assert "engine: one forward" not in rows["engine", "load"]["parts"], "nothing is computed while an adapter is loaded"
    held = {(row["role"], row["part"]): row for row in found["held"]}
    assert held["trainer", "moments"]["counted"] == {"0": int(state["moments"]), "1": int(state["moments"])}
    assert held["engine", "kv_cache"]["counted"] == {"0.0": engine["engine: KV cache"], "1.0": engine["engine: KV cache"]}
    json.dumps(found)


def test_a_plan_that_was_missed_is_said(plan):
    recipe, verl, *_ = plan
    for share, near in ((1.09, True), (1.12, False), (0.91, True), (0.88, False)):
        found = memory_measured.compare(recipe, verl, TOKENS, records(plan, "cuda", share), engines(plan, "allocated"))
        assert all(row["near"] is near for row in found["phases"] if row["role"] == "trainer")
    console = Console(record=True, width=220)
    memory_measured.show(found, console)
    text = console.export_text()
    for word in ("88% (not near)", "activations kept", "kv_cache", "moments", "counted, most"):
        assert word in text, word


def test_a_resident_set_is_shown_and_compared_with_nothing(plan):
    recipe, verl, *_ = plan
    found = memory_measured.compare(recipe, verl, TOKENS, records(plan, "cpu"), engines(plan, "resident"))
    row = next(row for row in found["phases"] if (row["role"], row["phase"]) == ("engine", "rollout"))
    assert row["kind"] == "resident" and row["ratio"] is None and row["near"] is None
    console = Console(record=True, width=220)
    memory_measured.show(found, console)
    assert "resident" in console.export_text()


def test_without_a_recorded_step_there_is_nothing_to_compare(plan, tmp_path):
    recipe, verl, *_ = plan
    assert memory_measured.compare(recipe, verl, TOKENS, [], []) is None and memory_measured.engine_records(tmp_path) == []
    for step in (9, 10):
        (tmp_path / f"engines_{step}.json").write_text(json.dumps([{"replica": step}]))
    assert memory_measured.engine_records(tmp_path) == [{"replica": 10}], "the last one by number"


def test_the_engine_of_a_card_is_compared_with_its_share_of_it():
    """As measured on an H200 with the tiny recipe: the cache is what vLLM left of a fifth of the card."""
    recipe, verl = load_recipe("tiny_m3_grpo.yaml", ["device=cuda", "actor_rollout_ref.rollout.free_cache_engine=true"], planned=True)
    held = {"weights": 1_466_000, "adapter_slots": 3_785_000, "kv_cache": 29_816_095_000, "card": 150_109_000_000}
    memory = {"rollout": {"allocated": 29_833_600_000}, "load": {"allocated": 29_826_400_000}}
    record = {"step": 4, "rank": 0, "device": "cuda", "stretch": "train", "held": {"base": 1, "adapter": 1, "moments": 1}, "phases": {}}
    found = memory_measured.compare(recipe, verl, TOKENS, [record], [{"replica": 0, "held": [held], "memory": memory}])
    rows = {row["phase"]: row for row in found["phases"] if row["role"] == "engine"}
    assert all(0.98 < rows[phase]["ratio"] < 1.0 and rows[phase]["near"] for phase in ("rollout", "load"))
    cache = next(row for row in found["held"] if row["part"] == "kv_cache")
    assert cache["counted"]["0.0"] / cache["planned"] == pytest.approx(1.0, abs=0.01)
    assert (
        "0.2 of a card's 150,109 MB" in found["notes"][-2]
        and "asleep" not in found["notes"][-2]
        and found["notes"][-1] == memory_measured.ASLEEP
    )

"""Nodes that cannot run one job are named in one line, before anything of the job starts on them."""

import os
import socket
import types
from pathlib import Path

import pytest

from samebits.recipes import nodes
from samebits.recipes.config import RecipeError

MODEL, RUN = Path("/models/m3"), Path("/runs/r")
VERSIONS = {"torch": "2.13.0", "verl": "0.9.1"}
FIRST = "the first node 10.0.0.1"


def answer(**changes) -> dict:
    return {
        "versions": VERSIONS, "code": "c", "model": "m", "run_dir": "r", "writable": True, "name": "host", "loops": False,
    } | changes  # fmt: skip


def found(second: dict, third: dict | None = None) -> dict[str, dict]:
    return {FIRST: answer(), "10.0.0.2": second} | ({"10.0.0.3": third} if third else {})


@pytest.mark.parametrize(
    ("second", "line"),
    [
        (answer(), None),
        (
            answer(versions=VERSIONS | {"torch": "2.12.0"}),
            "nodes differ, and other versions compute other bits: torch is 2.13.0, but 2.12.0 on 10.0.0.2",
        ),
        (
            answer(versions={"torch": "2.13.0"}, code="other"),
            "nodes differ, and other versions compute other bits: verl is 0.9.1, but absent on 10.0.0.2",
        ),
        (
            answer(code="other", run_dir=None),
            "node 10.0.0.2 has other files of samebits than the first node 10.0.0.1, though of the same version: install the same ones on "
            "every node",
        ),
        (answer(run_dir=None, model=None), "node 10.0.0.2 does not see run_dir /runs/r: it must lie on a file system that all nodes share"),
        (answer(run_dir="s"), "node 10.0.0.2 does not see run_dir /runs/r: it must lie on a file system that all nodes share"),
        (answer(writable=False), "node 10.0.0.2 cannot write to run_dir /runs/r"),
        (
            answer(model=None),
            "node 10.0.0.2 has no model at /models/m3: it must be there on every node, as a copy or on a file system that all share",
        ),
        (answer(model="n"), "node 10.0.0.2 has another checkpoint at /models/m3 than the first node 10.0.0.1"),
    ],
)
def test_what_differs_is_one_line_that_names_the_node(second, line):
    assert nodes.differences(found(second), FIRST, MODEL, RUN) == line
    assert nodes.differences(found(answer(), second), FIRST, MODEL, RUN) == (line and line.replace("10.0.0.2", "10.0.0.3"))


def test_where_most_nodes_agree_the_odd_one_is_named_even_if_it_is_the_first():
    odd = answer(versions=VERSIONS | {"torch": "2.12.0"})
    line = nodes.differences({FIRST: odd, "10.0.0.2": answer(), "10.0.0.3": answer()}, FIRST, MODEL, RUN)
    assert line.endswith("torch is 2.13.0, but 2.12.0 on the first node 10.0.0.1")


def test_a_host_name_that_leads_back_to_its_machine_is_found(monkeypatch):
    assert nodes.unreachable(found(answer())) is None
    assert nodes.unreachable(found(answer(loops=True))).startswith("node 10.0.0.2: its host name host leads back to it")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    for address, loops in (("127.0.1.1", True), ("10.0.0.2", False)):
        monkeypatch.setattr(socket, "gethostbyname", lambda name, address=address: address)
        assert nodes.facts("", "")["loops"] is loops
    monkeypatch.setattr(socket, "gethostbyname", lambda name: (_ for _ in ()).throw(socket.gaierror("unknown")))
    assert nodes.facts("", "")["loops"] is True
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert nodes.facts("", "")["loops"] is False


def test_a_node_says_what_it_has(tmp_path):
    mark = tmp_path / "mark"
    mark.write_text("seen")
    told = nodes.facts("recipes/tiny_m3_base", str(mark))
    import torch

    assert told["versions"]["torch"] == torch.__version__ and {"verl", "transformers", "samebits"} <= set(told["versions"])
    assert told["run_dir"] == "seen" and told["writable"] and told["model"] == nodes.folder_digest(Path("recipes/tiny_m3_base"))
    assert told["name"] == socket.gethostname() and told["code"] == nodes.code_digest()
    gone = nodes.facts(str(tmp_path / "none"), str(tmp_path / "none" / "mark"))
    assert (gone["model"], gone["run_dir"], gone["writable"]) == (None, None, False)


def test_code_of_another_content_name_or_place_has_another_digest(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.py").write_text("1")
    prints = [nodes.digest_of({"a": tmp_path / "a"}), nodes.digest_of({"b": tmp_path / "a"})]
    (tmp_path / "a" / "x.pyc").write_text("not source")
    assert nodes.digest_of({"a": tmp_path / "a"}) == prints[0]
    (tmp_path / "a" / "x.py").write_text("2")
    prints.append(nodes.digest_of({"a": tmp_path / "a"}))
    os.rename(tmp_path / "a" / "x.py", tmp_path / "a" / "y.py")
    prints.append(nodes.digest_of({"a": tmp_path / "a"}))
    assert len(set(prints)) == 4
    assert nodes.code_digest() == nodes.digest_of({part: Path(part).resolve() for part in nodes.PARTS})


def test_a_checkpoint_of_other_settings_or_sizes_has_another_digest(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(10))
    prints = [nodes.folder_digest(tmp_path)]
    (tmp_path / "config.json").write_text("[]")
    prints.append(nodes.folder_digest(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(bytes(11))
    prints.append(nodes.folder_digest(tmp_path))
    assert len(set(prints)) == 3 and nodes.folder_digest(tmp_path / "none") is None


@pytest.fixture
def cluster(monkeypatch):
    """A cluster of three nodes, the third without a GPU; `cluster.answers` is what they say, `cluster.asked` who was asked."""
    state = types.SimpleNamespace(answers={}, asked=[], marks=[])
    listed = [
        {"NodeID": name, "NodeManagerAddress": f"10.0.0.{i}", "Alive": alive, "Resources": {"GPU": gpus}}
        for i, (name, alive, gpus) in enumerate([("a", True, 0.0), ("b", True, 4.0), ("c", True, 0.0), ("d", False, 4.0)], 1)
    ]

    def asked(at, model, mark):
        state.asked, state.marks = dict(at), [mark.read_text()]
        return {node: answer(run_dir=mark.read_text()) | state.answers.get(node, {}) for node in at}

    monkeypatch.setattr(nodes.ray, "nodes", lambda: listed)
    monkeypatch.setattr(nodes.ray, "get_runtime_context", lambda: types.SimpleNamespace(get_node_id=lambda: "a"))
    monkeypatch.setattr(nodes, "_asked", asked)
    return state


def test_every_node_that_could_take_part_is_asked_and_no_mark_is_left(cluster, tmp_path):
    nodes.require_alike(MODEL, tmp_path, 1, 4)
    assert cluster.asked == {"a": "10.0.0.1", "b": "10.0.0.2"} and len(cluster.marks[0]) == 32
    cluster.answers = {"b": {"run_dir": None}}
    with pytest.raises(RecipeError, match=f"node 10.0.0.2 does not see run_dir {tmp_path}"):
        nodes.require_alike(MODEL, tmp_path, 1, 4)
    assert list(tmp_path.iterdir()) == []


def test_host_names_matter_only_to_a_job_on_several_nodes(cluster, tmp_path):
    cluster.answers = {"b": {"loops": True}}
    nodes.require_alike(MODEL, tmp_path, 1, 4)
    with pytest.raises(RecipeError, match="GLOO_SOCKET_IFNAME"):
        nodes.require_alike(MODEL, tmp_path, 2, 4)


def test_one_node_is_not_asked(cluster, tmp_path):
    nodes.require_alike(MODEL, tmp_path, 1, 8)
    assert cluster.asked == []

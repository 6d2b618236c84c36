"""Checks on what a job has at hand, and their history."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from samebits.alignment_checks.in_run import AgreementLost, History, check_bases, check_batch, read_history, require_agreement
from samebits.alignment_checks.limits import Limits
from samebits.alignment_checks.report import CheckResult, Finding
from samebits.alignment_checks.weights import BaseDigests

LAYERS, EXPERTS, K = 3, 8, 2
DIMS = SimpleNamespace(shape=SimpleNamespace(layers=LAYERS, moe_layers=(1, 2), experts=EXPERTS), top_k=K)
PROMPTS, RESPONSES = [3, 30], [5, 4]


def routes(tokens: int, seed: int) -> np.ndarray:
    g = np.random.default_rng(seed)
    out = np.full((tokens - 1, LAYERS, K), -1, dtype=np.int16)
    for layer in (1, 2):
        out[:, layer] = np.sort(np.stack([g.permutation(EXPERTS)[:K] for _ in range(tokens - 1)]), axis=1)
    return out


def batch() -> dict:
    g = torch.Generator().manual_seed(0)
    engine = [-torch.rand(n, generator=g) for n in RESPONSES]
    found = [routes(p + r, i) for i, (p, r) in enumerate(zip(PROMPTS, RESPONSES, strict=True))]
    return {"trainer": [e + 1e-6 for e in engine], "engine": engine, "routes": found}


def run(b: dict) -> list[CheckResult]:
    return check_batch(b["trainer"], b["engine"], b["routes"], PROMPTS, RESPONSES, DIMS, Limits())


def test_an_agreeing_batch_agrees():
    results = run(batch())
    assert [(r.name, r.status) for r in results] == [("logprobs.generated", "agree"), ("routing.rows", "agree")]
    require_agreement(3, results)
    assert results[0].metrics["k3"] < 1e-9 and results[0].metrics["kl_warn_exceeded"] == 0


def spoil(b: dict, what: str) -> None:
    if what == "one logprob":
        b["trainer"][1][2] += 0.5
    elif what == "shift":
        b["trainer"] = [t + 1e-3 for t in b["trainer"]]
    elif what == "missing logprobs":
        b["engine"][0] = None
    elif what == "short logprobs":
        b["engine"][1] = b["engine"][1][:-1]
    elif what == "trainer short":
        b["trainer"][1] = b["trainer"][1][:-1]
    elif what == "positive":
        b["engine"][0][1] = 0.2
    elif what == "nan":
        b["engine"][0][4] = float("nan")
    elif what == "missing routes":
        b["routes"][1] = None
    elif what == "a row less":
        b["routes"][0] = b["routes"][0][1:]
    elif what == "dense layer":
        b["routes"][0][2, 0] = 0
    elif what == "id":
        b["routes"][1][5, 2, 1] = EXPERTS
    elif what == "repeated id":
        b["routes"][1][5, 1] = 4
    elif what == "one row for all":
        b["routes"][1][:, 1] = b["routes"][1][0, 1]


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("one logprob", "sequence 1 token 32"),
        ("shift", "shifted"),
        ("missing logprobs", "sequence 0 has no logprobs"),
        ("short logprobs", "sequence 1 has 3 logprobs for 4"),
        ("trainer short", "another number of tokens"),
        ("positive", "sequence 0: logprob of response token 1"),
        ("nan", "sequence 0: logprob of response token 4 is nan"),
        ("missing routes", "sequence 1 has no routes"),
        ("a row less", "sequence 0 has 6 rows of routes for 8 tokens, expected prompt + response - 1 = 7"),
        ("dense layer", "layer 0 is dense, but token 2 of sequence 0"),
        ("id", "token 5 of sequence 1 in layer 2"),
        ("repeated id", "token 5 of sequence 1 in layer 1 has ids [4, 4]"),
        ("one row for all", "sequence 1 have the same experts in layer 1"),
    ],
)
def test_what_does_not_agree_is_named(what, names):
    b = batch()
    spoil(b, what)
    with pytest.raises(AgreementLost) as error:
        require_agreement(7, run(b))
    assert names in str(error.value) and str(error.value).startswith("step 7: ")


def test_bases_of_every_rank_of_every_replica():
    expert, norm = {"model.layers.1.block_sparse_moe.experts.3.w2": "aa"}, {"model.norm": "bb"}
    ranks = [norm, norm | expert]
    expected = BaseDigests(norm | expert, ranks)
    assert check_bases(expected, [ranks, ranks]).status == "agree"
    bad = check_bases(expected, [ranks, [norm, norm | {"model.layers.1.block_sparse_moe.experts.3.w2": "cc"}]])
    (finding,) = bad.findings
    assert (finding.place.replica, finding.place.rank, finding.place.layer, finding.place.expert) == (1, 1, 1, 3)
    assert check_bases(expected, []).findings
    for some, says in (([], "replica 0: no rank answered"), (ranks[:1], "replica 0: 1 of 2 ranks answered what they hold")):
        assert next(f.message for f in check_bases(expected, [some]).findings if "answered" in f.message).startswith(says)
    assert check_bases(expected, [[norm, norm]]).findings[0].message.endswith("experts.3.w2 is missing")
    assert check_bases(expected, [ranks[::-1]]).findings, "a rank holds what another should"


def test_nothing_checked_is_no_agreement():
    with pytest.raises(AgreementLost, match="nothing was checked"):
        require_agreement(1, [])
    with pytest.raises(AgreementLost, match="nothing to compare"):
        require_agreement(1, [CheckResult("a")])
    with pytest.raises(AgreementLost, match="step 1: b: worse"):
        require_agreement(1, [CheckResult("a", error="boom"), CheckResult("b", findings=[Finding("worse")])])


def test_history_is_kept_and_cut_for_a_resumed_run(tmp_path):
    history = History(tmp_path)
    for step in range(4):
        history.write(step, "sync", [CheckResult("weights.held", 5)])
    with history.path.open("a") as f:
        f.write('{"step": 4, "occas')
    assert [line["step"] for line in read_history(history.path)] == [0, 1, 2, 3]
    history.truncate_after(2)
    assert [line["step"] for line in read_history(history.path)] == [0, 1, 2]
    assert read_history(history.path)[0]["results"][0]["status"] == "agree"
    history.truncate_after(0)
    assert read_history(history.path) == []

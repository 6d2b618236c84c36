"""A report never passes by default."""

import json

import pytest

from samebits.alignment_checks.report import AGREE, DISAGREE, ERROR, SCHEMA, CheckResult, Finding, Place, Report


def result(name: str, **changes) -> CheckResult:
    return CheckResult(name, **({"compared": 3} | changes))


@pytest.mark.parametrize(
    ("results", "planned", "verdict", "status"),
    [
        ([result("a"), result("b")], ["a", "b"], AGREE, 0),
        ([], [], ERROR, 2),
        ([], ["a"], ERROR, 2),
        ([result("a")], [], ERROR, 2),
        ([result("a")], ["a", "b"], ERROR, 2),
        ([result("a", compared=0)], ["a"], ERROR, 2),
        ([result("a", error="boom")], ["a"], ERROR, 2),
        ([result("a", findings=[Finding("x")])], ["a"], DISAGREE, 1),
        ([result("a", findings=[Finding("x")], compared=0, error="boom")], ["a"], DISAGREE, 1),
        ([result("a", findings=[Finding("x")]), result("b", error="boom")], ["a", "b", "c"], DISAGREE, 1),
    ],
)
def test_verdict(results, planned, verdict, status):
    report = Report("x", planned, results)
    assert (report.verdict, report.exit_status) == (verdict, status)
    assert report.to_json()["verdict"] == verdict


def test_what_a_check_raises_is_its_error():
    report = Report("x", ["a"])

    def check(r: CheckResult) -> None:
        r.require(True, "fine")
        raise RuntimeError("first line\n\n  the engine died  ")

    found = report.run("a", check)
    assert found.status == ERROR and found.error == "RuntimeError: the engine died" and found.seconds > 0
    assert report.exit_status == 2


def test_require_counts_and_keeps_what_does_not_hold():
    r = CheckResult("a")
    assert r.require(True, "fine") and not r.require(False, "not fine", Place(layer=2, expert=5), 0.5, 0.1)
    assert r.compared == 2 and r.status == DISAGREE
    assert r.findings == [Finding("not fine", Place(layer=2, expert=5), 0.5, 0.1)]
    assert str(r.findings[0].place) == "layer 2 expert 5"


@pytest.mark.parametrize("bad", [result("a", error="boom"), result("a", compared=0), result("a", findings=[Finding("x")])])
@pytest.mark.parametrize("bad_first", [True, False])
def test_repeated_runs_add_up_and_one_bad_run_stays(bad, bad_first):
    good = result("a", metrics={"k3": -2.0, "n": 1.0})
    first, second = (bad, good) if bad_first else (good, bad)
    expected = bad.status
    first.absorb(second)
    assert first.status == expected and first.metrics["k3"] == -2.0
    with pytest.raises(ValueError):
        first.absorb(result("b"))


def test_json_is_versioned_and_leaves_out_what_does_not_apply():
    report = Report("x", ["a"], [result("a", findings=[Finding("m", Place(token=3))])])
    data = json.loads(json.dumps(report.to_json()))
    assert data["schema"] == SCHEMA == "samebits.alignment/1"
    assert data["results"][0]["findings"][0]["place"] == {"token": 3}

"""Every fault of the catalogue in the real trainer or engine is caught by every check that claims it, and by name."""

from __future__ import annotations

import pytest

from samebits.alignment_checks import suite
from samebits.alignment_checks.faults import CATALOGUE
from samebits.alignment_checks.report import DISAGREE, Report

pytestmark = pytest.mark.slow
CLASSES = {"wire", "weights", "engine", "transport", "trainer"}


@pytest.mark.parametrize("name", sorted(CATALOGUE))
def test_fault_is_caught_and_named(pair, name):
    fault = CATALOGUE[name]
    suite.prepare(pair)
    with fault.inject(pair) as place:
        suite.advance(pair, 1)
        pair.sync()
        report = suite.Suite(pair, long=False).run(fault.caught_by, Report(name, fault.caught_by))
    assert report.exit_status == 1
    assert {r.name: r.status for r in report.results} == dict.fromkeys(fault.caught_by, DISAGREE)
    assert suite.names_place(place, (f for _, f in report.findings())), (place, [f.message for _, f in report.findings()][:5])


@pytest.mark.parametrize("seed", [0, 1])
def test_no_fault_no_alarm(synced, seed):
    """After all those faults were injected and removed, and with other prompts, lengths and adapters."""
    names = suite.names_of("all")
    report = suite.Suite(synced, seed, short=suite.probe_lengths(seed)).run(names, Report("clean", names))
    assert [(r.name, r.error, [f.message for f in r.findings]) for r in report.results if r.status != "agree"] == []
    assert report.exit_status == 0 and not report.missing


def test_every_check_has_a_fault_that_it_must_catch():
    """So a check that is replaced by "all is well" fails `test_fault_is_caught_and_named`."""
    claimed = {check for fault in CATALOGUE.values() for check in fault.caught_by}
    assert claimed == set(suite.names_of("all"))


def test_the_catalogue_is_whole():
    assert len(CATALOGUE) >= 45
    assert {f.seam for f in CATALOGUE.values()} == CLASSES
    assert all(f.summary and "\n" not in f.summary and len(f.summary) < 140 for f in CATALOGUE.values())


def test_a_check_that_says_all_is_well_is_noticed(synced, monkeypatch):
    """The assertion above is itself able to fail: with one check silenced, its fault is not reported as it must be."""
    from samebits.alignment_checks import adapters

    monkeypatch.setattr(adapters, "base", lambda pair, result: setattr(result, "compared", 1))
    fault = CATALOGUE["base_changed"]
    with fault.inject(synced):
        report = suite.Suite(synced, long=False).run(fault.caught_by, Report("x", fault.caught_by))
    assert report.exit_status == 0


def test_an_engine_that_dies_is_never_a_pass(synced):
    from samebits.alignment_checks.faults.base import replaced
    from samebits.alignment_checks.pair import Replica

    def dead(self, *arguments, **options):
        raise RuntimeError("EngineCore encountered an issue.\nSee stack trace.")

    names = [n for n in suite.names_of("all") if n.startswith(("routing", "logprobs"))]
    with replaced(Replica, "run", dead):
        report = suite.Suite(synced, long=False).run(names, Report("dead", names))
    assert report.exit_status == 2
    assert {r.name for r in report.results if r.status == "error"} == set(names)


@pytest.mark.parametrize("method", ["samebits_held_adapter", "samebits_base_digests", "samebits_profile"])
def test_a_replica_that_answers_nothing_is_never_a_pass(synced, method):
    from samebits.alignment_checks.faults.base import replaced
    from samebits.alignment_checks.pair import Replica

    original = Replica.rpc
    names = ["weights.base", "weights.held"]
    with replaced(Replica, "rpc", lambda self, name, *rest: [] if name == method else original(self, name, *rest)):
        report = suite.Suite(synced, long=False).run(names, Report("silent", names))
    assert report.exit_status == 1

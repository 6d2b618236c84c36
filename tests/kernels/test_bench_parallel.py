"""The benchmark over several GPUs: its answers from figures, what it says of ranks that fail or hang, and a dry run of all of it."""

from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

from samebits.kernels import bench_parallel
from samebits.kernels.bench_parallel import claims, missing, run, verdicts
from samebits.kernels.bench_parallel_experts import shares
from samebits.kernels.bench_parallel_index import reason
from tests.support.interpreter import interpreted


def experts(hidden: float, equal: bool = True, parts: int = 8, tokens: int = 4096, way: str = "peer memory") -> dict:
    return {"tokens": tokens, "way": way, "parts": parts, "equal": equal} | ({"hidden": hidden} if way != "NCCL" else {})


def index(times: float, equal: bool = True, context: int = 524288) -> dict:
    line = {
        "requests": 8,
        "context": context,
        "equal": equal,
        "one_gpu_us": 100.0,
        "one_gpu_scores_us": 90.0,
        "one_gpu_choice_us": 10.0,
        "share_scores_us": 50.0,
        "exchange_us": 17.5,
        "floor_us": 80.0,
        "peer memory us": 100 / times,
        "peer memory times": times,
    }
    return line | {"reason": reason(line, 2)}


def test_how_many_gpus_it_takes(monkeypatch):
    for count, says in ((0, "here are 0"), (1, "here is 1"), (2, None), (8, None)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert (missing() is None) if says is None else (says in missing() and "\n" not in missing())


def test_what_is_hidden_is_what_computing_does_not_wait_for():
    found = shares(computing=100.0, moving=40.0, together=110.0)
    assert found["exposed_us"] == 10 and found["hidden"] == 0.75


def test_claims_are_those_of_the_lines():
    assert claims({"experts": [], "index": []}) == {}
    lines = [experts(0.3, parts=4), experts(0.6), experts(0.9, tokens=1024), experts(0, way="NCCL")]
    found = claims({"experts": lines, "index": [index(1.7), index(1.2, context=131072)]})
    assert found["experts"] == {"tokens": 4096, "equal": True, "hidden": 0.6, "parts": 8, "holds": True}
    assert [(line["requests"], line["peer memory times"], line["reason"]) for line in found["index"]] == [(8, 1.7, None)]
    assert not claims({"experts": [experts(0.49)], "index": []})["experts"]["holds"]
    wrong = claims({"experts": [experts(0.9), experts(0.8, equal=False, parts=4)], "index": [index(1.3, equal=False)]})
    assert not wrong["experts"]["holds"] and not wrong["experts"]["equal"]
    said = verdicts(wrong)
    assert len(said) == 2 and "bits DIFFER" in said[0] and said[0].endswith("NO") and "choices DIFFER" in said[1]
    assert verdicts(found)[0].endswith("yes") and "1.70 times" in verdicts(found)[1]


def test_a_share_that_is_not_fast_enough_says_what_it_is_made_of():
    said = index(1.4)["reason"]
    for figure in ("62.5 us", "take 50.0", "1.80 times", "alone 40.0", "merge 17.5", "GPU 10.0"):
        assert figure in said, figure
    assert index(1.6)["reason"] is None


@pytest.mark.parametrize(
    ("error", "patience", "says"),
    [
        (
            torch.multiprocessing.ProcessRaisedException("-- Process 1 failed:\nTraceback\nValueError: too small\n", 1, 7),
            99,
            "rank 1: ValueErr",
        ),
        (None, 0, "no rank had a result for 0 s"),
    ],
)
def test_ranks_that_fail_or_hang_end_the_run_with_what_there_is(error, patience, says, monkeypatch):
    killed, saved = [], []
    process = SimpleNamespace(kill=lambda: killed.append(1))

    def join(timeout=None):
        if error is not None:
            raise error
        return False

    def spawn(rank, args, nprocs, join):
        args[1].put({"right": True, "done": False, "experts": [1]})
        return context

    context = SimpleNamespace(join=join, processes=[process, process])
    monkeypatch.setattr(bench_parallel.mp, "spawn", spawn)
    monkeypatch.setattr(bench_parallel, "PATIENCE", patience)
    result = run(lambda partial: saved.append(dict(partial)))
    assert result["failed"].startswith(says) and not result["right"] and result["experts"] == [1]
    assert len(killed) == 2 and [s.get("failed") for s in saved] == [None, result["failed"]]


@pytest.mark.long
@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_a_dry_run_of_all_of_it():
    assert interpreted("tests.kernels.interpret_bench_parallel").endswith("same results")

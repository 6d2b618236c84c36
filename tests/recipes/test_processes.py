"""Which process of a job ended, and how: words, roles, logs, and real actors of a Ray that this test starts."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from samebits.recipes import processes
from samebits.rollout import ended


@pytest.mark.parametrize(
    ("name", "class_name", "says"),
    [
        ("actor_rollout_WorkerDict_0:0", "WorkerDict", "trainer rank 0"),
        ("x7Qa_actor_rollout_WorkerDict_2:3", "verl.WorkerDict", "trainer rank 11"),
        ("samebits_server_1_0", "SamebitsServer", "server of engine replica 1"),
        ("samebits_server_5_2", "SamebitsServer", "server of engine replica 5 (its node 2)"),
        ("", "samebits.recipes.job.TaskRunner", "the training loop"),
        ("", "SomethingElse", "SomethingElse"),
    ],
)
def test_roles(name, class_name, says):
    assert processes.role(name, class_name, gpus_per_node=4) == says


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (9, "was ended by signal 9 (SIGKILL)"),
        (signal.SIGSEGV | 0x80, "was ended by signal 11 (SIGSEGV)"),
        (3 << 8, "ended with exit code 3"),
        (0, "ended with exit code 0"),
        (None, "ended"),
        (ended.from_exitcode(-9), "was ended by signal 9 (SIGKILL)"),
        (ended.from_exitcode(7), "ended with exit code 7"),
    ],
)
def test_how_a_process_ended_in_words(code, says):
    assert ended.words(code) == says


def test_status_of_a_process_that_someone_else_has_reaped():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    handle = ended.hold(process.pid)
    assert ended.status(handle) is None  # it runs
    process.kill()
    process.wait()
    assert ended.status(handle) in (signal.SIGKILL, None)  # None before Linux 6.15
    os.close(handle)
    assert ended.hold(process.pid) is None


def test_the_last_error_of_a_log(tmp_path):
    log = tmp_path / "worker.err"
    assert processes.last_error(log) is None
    log.write_text("loading\nINFO: 3 errors so far\n")
    assert processes.last_error(log) is None
    log.write_text("ValueError: first\n  File x\ntorch.OutOfMemoryError: CUDA out of memory. Tried\n(WorkerDict pid=3) bye\n")
    assert processes.last_error(log) == "torch.OutOfMemoryError: CUDA out of memory. Tried"
    log.write_text("*** SIGSEGV received at time=17 on cpu 1 ***\nPC: @ 0x7f\n")
    assert processes.last_error(log) == "*** SIGSEGV received at time=17 on cpu 1 ***"


def test_a_lost_node_and_rays_memory_monitor_are_told():
    from ray.core.generated.common_pb2 import ActorDeathCause

    watch = object.__new__(processes.Watch)
    watch.gpus_per_node = 4
    actor = {"Name": "x_WorkerDict_1:2", "ActorClassName": "WorkerDict", "Pid": 77, "Address": {"IPAddress": "10.0.0.2"}}
    lost, full, asked = ActorDeathCause(), ActorDeathCause(), ActorDeathCause()
    lost.actor_died_error_context.reason = 3
    full.oom_context.error_message = "memory"
    asked.actor_died_error_context.reason = 4
    assert watch._line(actor | {"DeathCause": lost}) == "trainer rank 6 (pid 77) is gone with its node 10.0.0.2"
    assert "trainer rank 6 (pid 77) was ended by Ray's memory monitor" in watch._line(actor | {"DeathCause": full})
    watch._actors = [actor | {"State": "DEAD", "EndTime": t, "DeathCause": c} for t, c in ((1, asked), (9, lost), (5, full))]
    assert [a["EndTime"] for a in watch._ended()] == [5, 9]


@pytest.fixture(scope="module")
def watch():
    import ray

    from samebits.recipes.job import _ray_logs

    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    ray.init(address="local", include_dashboard=False, num_cpus=8, num_gpus=0, log_to_driver=False, logging_level="ERROR")
    watch = processes.Watch(_ray_logs(), gpus_per_node=2)
    yield watch
    watch.close()
    ray.shutdown()


@pytest.mark.slow
def test_real_actors(watch, monkeypatch):
    import ray

    monkeypatch.setattr(processes, "GRACE", 0.5)

    @ray.remote(num_cpus=0)
    class WorkerDict:
        def pid(self):
            return os.getpid()

        def fail(self):
            raise ValueError("no such thing")

        def leave(self, how):
            print("RuntimeError: said before", file=sys.stderr, flush=True)
            os._exit(how)

    one, two, done = (WorkerDict.options(name=f"x_WorkerDict_{n}").remote() for n in ("0:1", "1:0", "1:1"))
    first, second, _ = ray.get([a.pid.remote() for a in (one, two, done)])
    assert not watch.overdue() and watch.told() is None
    # One that is asked to end, or that nobody needs any more, is not missing.
    ray.kill(done)
    del done
    time.sleep(1)
    assert not watch.overdue() and watch.told() is None
    with pytest.raises(ray.exceptions.RayTaskError) as failed:
        ray.get(two.fail.remote())
    assert watch.speaker(str(failed.value)) == "trainer rank 2"
    os.kill(first, signal.SIGKILL)
    deadline = time.monotonic() + 120
    while not watch.overdue():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    told = watch.told()
    how = r"was ended by signal 9 \(SIGKILL\)" if _kernel_tells() else "ended"
    assert re.fullmatch(rf"trainer rank 1 \(pid {first}\) {how}, without an error of its own \(log: .*\.err\)", told), told
    # The first one is told, not what followed from it.
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(two.leave.remote(3))
    deadline = time.monotonic() + 120
    while len(watch._ended()) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
        watch._look()
    assert watch.told() == told
    line = watch._line(watch._ended()[1])
    how = "ended with exit code 3" if _kernel_tells() else "ended"
    assert line.startswith(f"trainer rank 2 (pid {second}) {how}, its last error: RuntimeError: said before (log: "), line
    ended.leave_note(watch.job, 1, "engine replica 1: process EngineCore (pid 5) was ended by signal 9 (SIGKILL)")
    assert watch.told().startswith("engine replica 1: process EngineCore")


def _kernel_tells() -> bool:
    process = subprocess.Popen([sys.executable, "-c", ""])
    handle = ended.hold(process.pid)
    process.wait()
    told = ended.status(handle) is not None
    os.close(handle)
    return told

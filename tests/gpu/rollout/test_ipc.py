"""CUDA's own handles between two processes on one GPU: bits, ends of life, and the memory that must be refused. No vLLM is needed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from samebits.quant.digests import digests
from samebits.quant.stacks import FlatLayout
from samebits.rollout.ipc import CUDA, NotShareable, open_text, shared_text

GPU = torch.device("cuda", 0)
SHAPES = {f"layer{i}.lora_{side}": shape for i in range(40) for side, shape in (("A", (32, 1537 + i)), ("B", (1001 + 3 * i, 32)))}
RECEIVER = """
import json, sys, torch
from samebits.quant.digests import digests
from samebits.quant.stacks import FlatLayout
from samebits.rollout.ipc import open_text
shapes = json.loads(sys.argv[1])
device = torch.device("cuda", 0)
torch.zeros(1, device=device)
print("ready", flush=True)
layout = FlatLayout.of(shapes, torch.bfloat16)
for line in sys.stdin:
    flat = open_text(line.strip(), device)
    slots = {name: view.clone() for name, view in layout.views(flat).items()}
    torch.cuda.synchronize()
    del flat
    print(json.dumps(digests(slots)), flush=True)
"""


@pytest.fixture(scope="module")
def receiver():
    process = subprocess.Popen(
        [sys.executable, "-c", RECEIVER, json.dumps(SHAPES)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdout.readline().strip() == "ready"
    yield process
    process.stdin.close()
    process.wait(timeout=60)


def sent(seed: int) -> tuple[FlatLayout, torch.Tensor]:
    layout = FlatLayout.of(SHAPES, torch.bfloat16)
    flat = layout.buffer(GPU)
    g = torch.Generator(GPU).manual_seed(seed)
    for view in layout.views(flat).values():
        view.copy_(torch.randn(view.shape, generator=g, device=GPU))
    return layout, flat


def ask(receiver, flat: torch.Tensor) -> dict[str, str]:
    receiver.stdin.write(shared_text(flat) + "\n")
    return json.loads(receiver.stdout.readline())


@pytest.fixture(autouse=True)
def plain_memory():
    torch.cuda.memory._set_allocator_settings("expandable_segments:False")
    torch.cuda.empty_cache()
    yield
    torch.cuda.memory._set_allocator_settings("expandable_segments:False")


def test_the_receiver_reads_the_very_bits_of_every_version(receiver):
    for seed in range(5):
        layout, flat = sent(seed)
        assert ask(receiver, flat) == digests(layout.views(flat))


def test_work_that_is_queued_when_the_handle_is_made_is_seen(receiver):
    layout, flat = sent(0)
    views = layout.views(flat)
    torch.cuda._sleep(int(2e8))
    for view in views.values():
        view.add_(1)
    assert ask(receiver, flat) == digests(views)


def test_memory_comes_back_to_the_sender(receiver):
    for seed in range(3):
        _, flat = sent(seed)
        ask(receiver, flat)
        del flat
        CUDA.collect()
    before = torch.cuda.memory_allocated()
    for seed in range(20):
        _, flat = sent(seed)
        ask(receiver, flat)
        del flat
        CUDA.collect()
    assert torch.cuda.memory_allocated() <= before


def test_memory_in_an_expandable_segment_is_refused_and_after_it_plain_memory_is_shared(receiver):
    """As verl has it: expandable segments on while it trains, off before a sync."""
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    kept = torch.empty(64 << 20, dtype=torch.uint8, device=GPU)
    with pytest.raises(NotShareable, match="expandable segment"):
        shared_text(kept)
    torch.cuda.memory._set_allocator_settings("expandable_segments:False")
    layout, flat = sent(9)
    assert ask(receiver, flat) == digests(layout.views(flat))
    del kept


def test_the_process_that_shares_cannot_open_its_own_handle_under_another_uuid():
    _, flat = sent(0)

    class Elsewhere:
        uuid = staticmethod(lambda device: "GPU-elsewhere")
        open, share, collect = CUDA.open, CUDA.share, CUDA.collect

    with pytest.raises(NotShareable, match="on device"):
        open_text(shared_text(flat), GPU, Elsewhere())


def test_a_handle_is_a_short_text_and_takes_no_memory_whatever_it_names():
    for size in (1 << 20, 1 << 30):
        flat = torch.zeros(size // 2, dtype=torch.bfloat16, device=GPU)
        before = torch.cuda.memory_allocated()
        text = shared_text(flat)
        assert len(text) < 1000 and torch.cuda.memory_allocated() == before, size

"""What of the kernels between GPUs can be shown without GPUs: three processes with each other's memory, in the interpreter."""

import os
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

from samebits.kernels.activation import SwiGLU
from samebits.kernels.expert_peers import PeerExperts
from samebits.kernels.expert_tiles import NVFP4Tiles
from samebits.kernels.peer_memory import PATIENCE_S, PeerMemory, agreed
from tests.support.interpreter import interpreted


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_ranks_have_the_bits_of_one():
    assert interpreted("tests.kernels.interpret_parallel") == "same results"


def peers(width: int = 32) -> PeerExperts:
    made = PeerExperts.__new__(PeerExperts)
    made._set_up(8, 4, 2, 0, *(SimpleNamespace(local=torch.empty(8, width)) for _ in range(3)))
    return made


def tiles(experts: int) -> NVFP4Tiles:
    return NVFP4Tiles(torch.empty(experts, 1, 64, 16), torch.empty(experts, 1, 64), torch.empty(experts), 32)


def test_rows_move_in_words_of_16_bytes():
    with pytest.raises(ValueError, match="a width of 36 is no multiple of 8"):
        peers(36)


@pytest.mark.parametrize(
    ("x", "experts", "says"),
    [
        (torch.empty(3, 32), 4, r"got torch.float32 \(3, 32\) and 4"),
        (torch.empty(3, 40).bfloat16(), 4, "needs bf16 tokens of width 32 and 4 experts"),
        (torch.empty(3, 32).bfloat16(), 5, "and 5"),
        (torch.empty(5, 32).bfloat16(), 4, "5 tokens where there is room for 4"),
    ],
)
def test_what_does_not_fit_is_refused_before_others_are_waited_for(x, experts, says):
    with pytest.raises(ValueError, match=says):
        peers()(x, tiles(experts), tiles(experts), torch.zeros(len(x), 2), torch.zeros(len(x), 2), SwiGLU())


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize(
    ("rows", "topk", "blocks", "says"),
    [(9, 4, 8, "9 queries and heads with 4 blocks each"), (8, 8, 8, "do not fit"), (8, 4, 1 << 21, "the limit"), (8, 3, 8, "power of two")],
)
def test_an_inbox_takes_what_it_has_room_for(rows, topk, blocks, says):
    from samebits.kernels.index_parallel import exchange
    from samebits.kernels.msa import SparseConfig

    inbox = SimpleNamespace(room=8, words=torch.empty(2, 2, 8, 4), addresses=torch.empty(2), shared=None)
    scores, out = torch.empty(rows, 1, blocks, device="meta"), torch.empty(rows, 1, topk)
    with pytest.raises(ValueError, match=says):
        exchange(scores, SimpleNamespace(world=2), SparseConfig(topk=topk), inbox, out, send=True, merge=True)


def test_ranks_agree_on_the_host_wherever_tensors_are_made(monkeypatch):
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda said, *_, **__: None)
    with torch.device("meta"):
        assert agreed(True) and not agreed(False)


def test_a_barrier_is_not_waited_at_for_ever():
    given = []
    memory = PeerMemory.__new__(PeerMemory)
    memory._handle = SimpleNamespace(barrier=lambda **options: given.append(options))
    memory.barrier(1)
    assert given == [{"channel": 1, "timeout_ms": 1000 * PATIENCE_S}] and 60 <= PATIENCE_S <= 600


def compiled(target: str) -> list[str]:
    """Assembly of the exchange over peer memory, and over an all-gather."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.compile_exchange", target]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("=" * 9)


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_words_that_never_come_end_the_kernel():
    """As compiled for Hopper: the loop reads the GPU's clock and traps. Where a collective brings the words there is no loop."""
    peers, gathered = compiled("cuda")
    loop = peers[peers.index("ld.volatile", peers.index("%globaltimer")) :]  # what is read again, after the clock was read first
    assert loop.index("%globaltimer") < loop.index(f"{PATIENCE_S * 10**9 + 1}") < loop.index("trap;")
    assert "trap;" not in gathered and "%globaltimer" not in gathered


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_the_exchange_compiles_without_what_only_nvidia_knows():
    assert len(compiled("hip")) == 2

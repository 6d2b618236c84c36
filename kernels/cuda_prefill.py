"""MSA attention of many queries on Hopper in CUDA C++ (`cuda_prefill.cu`): the bits of `triton_msa.attend` where it has a program a query.

There a program reads the blocks of one query; here neighbouring queries of one KV head share what is read. How, says the `.cu`. Pages and
packed keys are bf16: what other formats cost to decode is not won back unless neighbours choose alike, which only the device knows.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import cuda_module
from .cuda_module import Launch
from .msa_ops import BLOCK, DIM, HEADS_A_GROUP, Batch, Packed, Pages

log = logging.getLogger(__name__)
SOURCE, NAME, THREADS = "cuda_prefill.cu", "prefill_kernel", 384
TOKENS = 8  # of a tile
STAGES = 5  # tiles of K or V in shared memory
STAGE, QUERY, KEPT_STATE = 33 * 1024, 4096, 768  # bytes of shared memory: of a tile of K or V, of a token's queries, and its state
WORDS = 512  # of bits of blocks: contexts of 2 M tokens
NEIGHBOURS = 32  # tokens of the largest request, from which on there is something to share


class Plan(NamedTuple):
    """What is launched."""

    defines: cuda_module.Defines
    launch: Launch
    maps: tuple[tuple, tuple]  # arguments of `tensor_map` for keys and values
    arguments: tuple[tuple[Any, Any], ...]  # all but the maps
    out: Tensor
    lse: Tensor | None


def wanted(q: Tensor, cache: Pages | Packed, chosen: Tensor, batch: Batch) -> bool:
    """Whether `attend` is to be called: on a GPU, for tensors that it takes, with neighbours, and a tile at least for each multiprocessor.

    Why a GPU that this would be for does without is logged, once a process.
    """
    if q.device.type != "cuda" or batch.most < NEIGHBOURS or not takes(q, cache, chosen):
        return False
    if _tiles(q, chosen) < _multiprocessors(q.device):
        return False
    if reason := cuda_module.absence(q.device):
        _say(reason)
    return reason is None


@functools.cache
def _say(reason: str) -> None:
    log.warning("samebits: attention of many queries runs in Triton, with the same bits, since the CUDA C++ kernel %s", reason)


def takes(q: Tensor, cache: Pages | Packed, chosen: Tensor) -> bool:
    """Whether this kernel is for such tensors, wherever they are."""
    tensors = (cache.data,) if isinstance(cache, Pages) else (cache.keys, cache.values)
    topk, groups = chosen.shape[2], chosen.shape[1]
    if q.dtype != torch.bfloat16 or q.shape[2] != DIM or q.shape[1] > HEADS_A_GROUP * groups or topk > 16 or topk & (topk - 1):
        return False
    if any(
        t.dtype != torch.bfloat16 or t.data_ptr() % 16 or t.stride(-1) != 1 or any(2 * s % 16 for s in t.stride()[:-1]) for t in tensors
    ):
        return False
    return _words(cache) <= WORDS


def plan(
    q: Tensor, cache: Pages | Packed, chosen: Tensor, batch: Batch, scale: float, lse: bool = False, multiprocessors: int = 132
) -> Plan:
    """What `attend` launches. Raises `ValueError` for what `takes` does not take."""
    if not takes(q, cache, chosen):
        raise ValueError("the CUDA prefill kernel does not take these tensors")
    tokens, heads, _ = q.shape
    groups, topk = chosen.shape[1:]
    paged = isinstance(cache, Pages)
    defines = {
        "PAGED": int(paged),
        "LSE": int(lse),
        "G": groups,
        "HEADS": heads // groups,
        "TOPK": topk,
        "GROUP": min(4, topk),
        "STAGES": STAGES,
    }
    grid = min(multiprocessors, _tiles(q, chosen))
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    sums = torch.empty(tokens, heads, dtype=torch.float32, device=q.device) if lse else None
    table = cache.table if paged else cache.start
    pointer = ctypes.c_void_p
    arguments = (
        (q.contiguous(), pointer),
        (table, pointer),
        (batch.request, pointer),
        (batch.position, pointer),
        (chosen.contiguous(), pointer),
        (out, pointer),
        (sums, pointer),
        (table.stride(0), ctypes.c_int),
        (tokens, ctypes.c_int),
        (_words(cache), ctypes.c_int),
        (scale * math.log2(math.e), ctypes.c_float),
    )
    return Plan(tuple(defines.items()), Launch(grid, THREADS, shared_bytes(topk, _words(cache))), _maps(cache), arguments, out, sums)


def shared_bytes(topk: int, words: int) -> int:
    """Shared memory of a block of threads: tiles, queries and states, the walk with two barriers a block, barriers, tokens, bits."""
    return STAGES * STAGE + TOKENS * (QUERY + KEPT_STATE) + (4 * 4 + 16) * TOKENS * topk + 64 + 3 * 128 + 8 * words


def attend(q: Tensor, cache: Pages | Packed, chosen: Tensor, batch: Batch, scale: float, lse: bool = False) -> tuple[Tensor, Tensor | None]:
    """`triton_msa.attend` on a Hopper GPU, for tensors that `takes` takes.

    Chosen blocks must ascend, as `index_topk` gives them. Raises `RuntimeError` where NVRTC refuses the source or the driver the launch.
    """
    if not q.numel():
        return torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if lse else None
    what = plan(q, cache, chosen, batch, scale, lse, _multiprocessors(q.device))
    with torch.cuda.device(q.device):
        maps = tuple((cuda_module.tensor_map(*m), None) for m in what.maps)
        cuda_module.launch(SOURCE, NAME, what.defines, what.launch, maps + what.arguments)
    return what.out, what.lse


def _tiles(q: Tensor, chosen: Tensor) -> int:
    return -(-q.shape[0] // TOKENS) * chosen.shape[1]


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _words(cache: Pages | Packed) -> int:
    blocks = cache.table.shape[1] if isinstance(cache, Pages) else cache.blocks
    return -(-blocks // 32)


def _maps(cache: Pages | Packed) -> tuple[tuple, tuple]:
    """(address, sizes, strides, box) of keys and values [.., row, head or page, ..]: dimensions, rows, heads, pages.

    A box has 64 dimensions of 64 keys, or of 8 values.
    """
    rows = (64, 8)
    if isinstance(cache, Packed):
        maps = []
        for t, n in zip((cache.keys, cache.values), rows, strict=True):
            token, head = (2 * s for s in t.stride()[:2])
            maps.append((t.data_ptr(), (DIM, t.shape[0], t.shape[1], 1), (token, head, token), (64, n, 1, 1)))
        return tuple(maps)
    data = cache.data
    page, head, token = (2 * s for s in data.stride()[:3])
    sizes = (DIM, BLOCK, data.shape[1], data.shape[0])
    return tuple((data.data_ptr() + 2 * side * DIM, sizes, (token, head, page), (64, n, 1, 1)) for side, n in enumerate(rows))

"""MSA attention of many queries on Hopper in CUDA C++ (`cuda_prefill.cu`): the bits of `triton_msa.attend` where it has a program a query.

There a program reads the blocks of one query; here neighbouring queries of one KV head share what is read and decoded. How, says the `.cu`.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import cuda_module
from .cuda_module import Launch
from .msa_ops import BLOCK, DIM, HEADS_A_GROUP, Batch, Packed, Pages

SOURCE, NAME, THREADS, WARPS = "cuda_prefill.cu", "prefill_kernel", 384, 8
BF16, FP8, NVFP4 = 0, 1, 2
FORMATS = {torch.bfloat16: BF16, torch.float8_e4m3fn: FP8, torch.uint8: NVFP4}
STAGE, QUERY, KEPT_STATE = 33 * 1024, 4096, 768  # bytes of shared memory: of a tile of K or V, of a token's queries, and its state
SHARED = 232448  # what a block of threads may have of it
WORDS = 512  # of bits of blocks: contexts of 2 M tokens


class Variant(NamedTuple):
    """How the work is shared out; the bits are those of any other."""

    per_warp: int  # tokens of a warp: 1 or 2
    cluster: int  # blocks of threads that share what they read; 1 where it is decoded
    stages: int  # tiles of K or V in shared memory


VARIANTS = {BF16: Variant(2, 2, 4), FP8: Variant(2, 1, 4), NVFP4: Variant(2, 1, 4)}
# Registers of a thread that attends and of one that fills: 8 and 4 warps share 65536, less what 12 warps of 168 leave.
REGISTERS = {BF16: (240, 24), FP8: (216, 72), NVFP4: (232, 40)}


class Plan(NamedTuple):
    """What is launched."""

    defines: cuda_module.Defines
    launch: Launch
    maps: tuple[tuple, tuple]  # arguments of `tensor_map` for keys and values
    arguments: tuple[tuple[Any, Any], ...]  # all but the maps
    out: Tensor
    lse: Tensor | None


def takes(q: Tensor, cache: Pages | Packed, chosen: Tensor) -> bool:
    """Whether this kernel is for such tensors, wherever they are."""
    data = cache.data if isinstance(cache, Pages) else cache.keys
    topk, groups = chosen.shape[2], chosen.shape[1]
    form = FORMATS.get(data.dtype)
    if (
        q.dtype != torch.bfloat16
        or q.shape[2] != DIM
        or form is None
        or topk > 16
        or topk & (topk - 1)
        or q.shape[1] > HEADS_A_GROUP * groups
    ):
        return False
    if isinstance(cache, Packed) and form != BF16:
        return False
    if form == BF16:
        tensors = (data,) if isinstance(cache, Pages) else (cache.keys, cache.values)
        if any(t.data_ptr() % 16 or t.stride(-1) != 1 or any(2 * s % 16 for s in t.stride()[:-1]) for t in tensors):
            return False
    elif data.data_ptr() % 16 or data.stride(0) % 16:
        return False
    return _words(cache) <= WORDS


def plan(
    q: Tensor,
    cache: Pages | Packed,
    chosen: Tensor,
    batch: Batch,
    scale: float,
    lse: bool = False,
    rounded: bool = False,
    variant: Variant | None = None,
    multiprocessors: int = 132,
) -> Plan:
    """What `attend` launches. Raises `ValueError` for what `takes` does not take, and for a variant that does not fit."""
    if not takes(q, cache, chosen):
        raise ValueError("the CUDA prefill kernel does not take these tensors")
    tokens, heads, _ = q.shape
    groups, topk = chosen.shape[1:]
    paged = isinstance(cache, Pages)
    data = cache.data if paged else cache.keys
    form = FORMATS[data.dtype]
    per_warp, cluster, stages = variant = variant or VARIANTS[form]
    shared = shared_bytes(variant, topk, _words(cache))
    if (
        shared > SHARED
        or per_warp not in (1, 2)
        or cluster not in (1, 2, 4)
        or cluster * per_warp * WARPS > 32
        or (form != BF16 and cluster > 1)
    ):
        raise ValueError(f"{variant} does not fit: {shared} bytes of shared memory")
    more, fewer = REGISTERS[form]
    defines = {
        "FORMAT": form,
        "PAGED": int(paged),
        "ROUNDED": int(rounded and form == NVFP4),
        "LSE": int(lse),
        "G": groups,
        "HEADS": heads // groups,
        "TOPK": topk,
        "GROUP": min(4, topk),
        "PER_WARP": per_warp,
        "CLUSTER": cluster,
        "STAGES": stages,
        "MORE": more,
        "FEWER": fewer,
    }
    own = per_warp * WARPS
    tiles = -(-tokens // (own * cluster)) * groups
    grid = max(1, min(multiprocessors // cluster, tiles)) * cluster
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    sums = torch.empty(tokens, heads, dtype=torch.float32, device=q.device) if lse else None
    kept = torch.empty(grid * own * HEADS_A_GROUP * DIM, dtype=torch.float32, device=q.device) if per_warp > 1 else None
    table = cache.table if paged else cache.start
    pointer = ctypes.c_void_p
    page_bytes = data.stride(0) * data.element_size() if paged else 0
    arguments = (
        (data, pointer),
        (q.contiguous(), pointer),
        (table, pointer),
        (batch.request, pointer),
        (batch.position, pointer),
        (chosen.contiguous(), pointer),
        (out, pointer),
        (sums, pointer),
        (kept, pointer),
        (page_bytes, ctypes.c_uint64),
        (table.stride(0), ctypes.c_int),
        (tokens, ctypes.c_int),
        (_words(cache), ctypes.c_int),
        (scale * math.log2(math.e) * (128.0 if form == NVFP4 else 1.0), ctypes.c_float),
    )
    return Plan(tuple(defines.items()), Launch(grid, THREADS, shared), _maps(cache, form, cluster), arguments, out, sums)


def shared_bytes(variant: Variant, topk: int, words: int) -> int:
    """Shared memory of a block of threads: tiles, queries and states, the walk with two barriers a block, barriers, tokens, bits."""
    own = variant.per_warp * WARPS
    positions = own * variant.cluster * topk
    return variant.stages * STAGE + own * (QUERY + KEPT_STATE) + (4 * 4 + 16) * positions + 64 + 3 * 128 + 8 * words


def attend(
    q: Tensor,
    cache: Pages | Packed,
    chosen: Tensor,
    batch: Batch,
    scale: float,
    lse: bool = False,
    rounded: bool = False,
    variant: Variant | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`triton_msa.attend` on a Hopper GPU, for tensors that `takes` takes.

    Chosen blocks must ascend, as `index_topk` gives them.
    """
    if not q.numel():
        return torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if lse else None
    count = torch.cuda.get_device_properties(q.device).multi_processor_count
    what = plan(q, cache, chosen, batch, scale, lse, rounded, variant, count)
    with torch.cuda.device(q.device):
        maps = tuple((cuda_module.tensor_map(*m), None) for m in what.maps)
        cuda_module.launch(SOURCE, NAME, what.defines, what.launch, maps + what.arguments)
    return what.out, what.lse


def _words(cache: Pages | Packed) -> int:
    blocks = cache.table.shape[1] if isinstance(cache, Pages) else cache.blocks
    return -(-blocks // 32)


def _maps(cache: Pages | Packed, form: int, cluster: int) -> tuple[tuple, tuple]:
    """(address, sizes, strides, box) of keys and values [.., row, head or page, ..]: dimensions, rows, heads, pages.

    A box has 64 dimensions of `KEY_ROWS` keys, or of 8 values. Formats that are decoded have maps of anything.
    """
    rows = (128 // cluster if cluster > 2 else 64, 8)
    if form != BF16:
        data = cache.data
        return tuple((data.data_ptr(), (64, 8, 1, 1), (128, 128, 128), (64, 8, 1, 1)) for _ in rows)
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

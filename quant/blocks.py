"""What the block formats share: block amax with the finite check in the same pass, E4M3 values, chunks that stay in cache.

The largest magnitude of a block is found on the bits, as integers: with the sign bit cleared, floats order as their bits do, and
NaN and infinity are the largest of all, so one reduction answers both questions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

# Elements worked on at a time. On CPU: intermediates of 1 MB stay in cache, and an operation is long enough to be worth its threads.
_CHUNK_CPU, _CHUNK_CUDA = 1 << 18, 1 << 24
_TABLES: dict[tuple[Callable[[torch.device], Tensor], torch.device], Tensor] = {}
_INFINITY = {torch.bfloat16: 0x7F80, torch.float32: 0x7F800000}


class NonFiniteWeight(ValueError):
    """A weight holds NaN or infinity and cannot be quantized."""


def require(condition: Tensor, message: str, error: type[Exception]) -> None:
    """Raise `error(message)` unless the boolean scalar holds. In a traced graph it is an assertion: `RuntimeError`, same message."""
    if torch.compiler.is_compiling():
        torch._assert_async(condition, message)
    elif not condition:
        raise error(message)


def require_blocks(w: Tensor, block: int) -> None:
    """Raise `ValueError` unless the last dimension of `w` is a multiple of `block`."""
    if w.dim() == 0 or w.shape[-1] % block:
        raise ValueError(f"last dimension must be a multiple of {block}, got shape {tuple(w.shape)}")


def require_finite(w: Tensor, name: str = "weight") -> None:
    """Raise `NonFiniteWeight` naming the tensor when it holds NaN or infinity."""
    if w.numel() and w.is_floating_point():
        flat = w.detach().reshape(-1)
        block_amax(flat.view(-1, 32) if flat.numel() % 32 == 0 else flat.view(1, -1), name)


def for_chunks(blocks: Tensor, work: Callable[[slice], None]) -> None:
    """Call `work` on ranges of rows that cover `blocks` [B, n], each small enough to stay in cache; on all rows in a traced graph."""
    count, width = blocks.shape
    if torch.compiler.is_compiling():
        work(slice(0, count))
        return
    step = max(1, (_CHUNK_CPU if blocks.device.type == "cpu" else _CHUNK_CUDA) // width)
    for at in range(0, count, step):
        work(slice(at, min(at + step, count)))


def _magnitude_bits(x: Tensor) -> Tensor:
    """Bits without the sign: of bf16 as int16, of anything else as fp32 and int32."""
    if x.dtype is torch.bfloat16:
        return x.view(torch.int16) & 0x7FFF
    return x.float().view(torch.int32) & 0x7FFFFFFF


def block_amax(blocks: Tensor, name: str | None) -> Tensor:
    """Largest magnitude, fp32 [B], of the rows of `blocks` [B, n] (bf16, fp16 or fp32).

    Raises `NonFiniteWeight` with `name` when one is NaN or infinite; `name` None looks for nothing, and NaN stays NaN.
    """
    small = blocks.dtype is torch.bfloat16
    top = torch.empty(blocks.shape[0], dtype=torch.int16 if small else torch.int32, device=blocks.device)
    infinity = _INFINITY[torch.bfloat16 if small else torch.float32]

    def work(part: slice) -> None:
        top[part] = _magnitude_bits(blocks[part]).amax(-1)

    for_chunks(blocks, work)
    if name is not None and top.numel():
        require(top.amax() < infinity, f"{name}: holds NaN or infinity", NonFiniteWeight)
    return top.view(torch.bfloat16).float() if small else top.view(torch.float32)


def table(make: Callable[[torch.device], Tensor], device: torch.device) -> Tensor:
    """`make(device)`, made once for each device; anew in a traced graph, where it becomes part of the graph."""
    if torch.compiler.is_compiling():
        return make(device)
    if (make, device) not in _TABLES:
        with torch.inference_mode(False):
            made = make(device)
        if type(made) is not Tensor:  # a fake tensor of some tracing mode must not outlive it
            return made
        _TABLES[make, device] = made
    return _TABLES[make, device]


def e4m3_values(codes: Tensor) -> Tensor:
    """fp32 values of E4M3 bits (uint8, any shape), by table: exact, and on CPU faster than the cast."""
    return table(_e4m3_table, codes.device).index_select(0, codes.reshape(-1).int()).reshape(codes.shape)


def _e4m3_table(device: torch.device) -> Tensor:
    return torch.arange(256, device=device).to(torch.uint8).view(torch.float8_e4m3fn).float()


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    return find_spec("triton") is not None


def fast_path(x: Tensor) -> bool:
    """Whether the Triton kernels take `x`: a CUDA tensor, outside of a traced graph, with Triton installed."""
    return x.is_cuda and not torch.compiler.is_compiling() and _has_triton() and torch.version.hip is None

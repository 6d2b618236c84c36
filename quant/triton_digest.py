"""Triton kernel for CUDA: the lanes of `quant.digests` for many tensors in one launch.

A program takes ROWS chunks of one tensor side by side, so that a key is loaded once for ROWS words, and adds what it found to the four
lanes of its tensor with integer atomics, whose order does not matter. A table says which tensor and which chunks a program has; with the
lanes it is the one thing that is copied to the device. Two uint32 words are loaded as one int64. Tensors that cannot be read that way (an
odd address, or a number of bytes that is no multiple of 8) are copied on the device first.
"""

from __future__ import annotations

import contextlib

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from .digests import CHUNK, LANES, constants

# Chunks and columns (pairs of words) of a program's tile, and its warps: the fastest of a sweep on an H200 with 1 GiB of bf16.
ROWS, BLOCK, WARPS = 4, 256, 8
_KEYS: dict[torch.device, Tensor] = {}


@triton.jit
def _mix(y):
    """SplitMix64's finaliser of int64 with the bits of uint64."""
    y ^= (y.to(tl.uint64, bitcast=True) >> 30).to(tl.int64, bitcast=True)
    y *= -4658895280553007687  # 0xBF58476D1CE4E5B9
    y ^= (y.to(tl.uint64, bitcast=True) >> 27).to(tl.int64, bitcast=True)
    y *= -7723592293110705685  # 0x94D049BB133111EB
    return y ^ (y.to(tl.uint64, bitcast=True) >> 31).to(tl.int64, bitcast=True)


@triton.jit
def _add_lane(sums, row, stride, exists, lane_ptr):
    """Mix S of a tile's chunks ([ROWS, BLOCK], summed here) with their positions into a lane of their tensor."""
    y = _mix(tl.sum(sums, axis=1) + (row + 1) * stride)
    tl.atomic_add(lane_ptr, tl.sum(tl.where(exists, y, 0), axis=0), sem="relaxed")


@triton.jit
def _lanes_kernel(buffer_ptr, keys_ptr, tensors, PAIRS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """One tile of chunks.

    `buffer_ptr`, int64: four lanes of each tensor, then the table: addresses, numbers of pairs of words, and (tensor << 32 | tile) of
    each program.
    """
    table_ptr = buffer_ptr + 4 * tensors
    work = tl.load(table_ptr + 2 * tensors + tl.program_id(0))
    tensor = work >> 32
    row = (work & 0xFFFFFFFF) * ROWS + tl.arange(0, ROWS)
    x_ptr = tl.load(table_ptr + tensor).to(tl.pointer_type(tl.int64))
    pairs = tl.load(table_ptr + tensors + tensor)
    sums0 = tl.zeros([ROWS, BLOCK], tl.int64)
    sums1 = tl.zeros([ROWS, BLOCK], tl.int64)
    sums2 = tl.zeros([ROWS, BLOCK], tl.int64)
    sums3 = tl.zeros([ROWS, BLOCK], tl.int64)
    for start in range(0, PAIRS, BLOCK):
        column = start + tl.arange(0, BLOCK)
        at = row[:, None] * PAIRS + column[None, :]
        x = tl.load(x_ptr + at, mask=at < pairs, other=0)
        low, high = x & 0xFFFFFFFF, (x >> 32) & 0xFFFFFFFF
        key0 = tl.load(keys_ptr + 2 * column)[None, :]
        key1 = tl.load(keys_ptr + 2 * column + 1)[None, :]
        key2 = tl.load(keys_ptr + 2 * column + 2)[None, :]
        key3 = tl.load(keys_ptr + 2 * column + 3)[None, :]
        key4 = tl.load(keys_ptr + 2 * column + 4)[None, :]
        sums0 += low * key0 + high * key1
        sums1 += low * key1 + high * key2
        sums2 += low * key2 + high * key3
        sums3 += low * key3 + high * key4
    exists = row * PAIRS < pairs
    strides_ptr = keys_ptr + 2 * PAIRS + 3
    lanes_ptr = buffer_ptr + 4 * tensor
    _add_lane(sums0, row, tl.load(strides_ptr), exists, lanes_ptr)
    _add_lane(sums1, row, tl.load(strides_ptr + 1), exists, lanes_ptr + 1)
    _add_lane(sums2, row, tl.load(strides_ptr + 2), exists, lanes_ptr + 2)
    _add_lane(sums3, row, tl.load(strides_ptr + 3), exists, lanes_ptr + 3)


def device_lanes(stacks: list[Tensor]) -> Tensor:
    """L, int64 [tensors, 4] with the bits of uint64, of the tensors along the first dimension of `stacks`, which are on one device.

    Each of these tensors is contiguous. Nothing is waited for.
    """
    device = stacks[0].device
    rows = np.array([len(stack) for stack in stacks], np.int64)
    starts = np.array([stack.data_ptr() for stack in stacks], np.int64)
    steps = np.array([stack.stride(0) * stack.itemsize for stack in stacks], np.int64)
    sizes = np.array([stack.nbytes for stack in stacks], np.int64) // rows
    copies = []  # which stay until the kernel is queued behind them
    for i in np.flatnonzero((starts | sizes | np.where(rows > 1, steps, 0)) % 8):
        copies.append(_padded(stacks[i]))
        starts[i], steps[i] = copies[-1].data_ptr(), copies[-1].shape[1]
    count = int(rows.sum())
    row = np.arange(count) - np.repeat(np.cumsum(rows) - rows, rows)
    pairs = np.repeat((sizes + 7) // 8, rows)
    tiles = -(-pairs // (ROWS * CHUNK // 2))
    programs = int(tiles.sum())
    # One buffer, one transfer: the lanes, zero at first, then what `_lanes_kernel` calls the table.
    buffer = np.zeros((LANES + 2) * count + programs, np.int64)
    table = buffer[LANES * count :]
    table[:count], table[count : 2 * count] = np.repeat(starts, rows) + row * np.repeat(steps, rows), pairs
    owner = np.repeat(np.arange(count), tiles)
    table[2 * count :] = owner << 32 | np.arange(programs) - (np.cumsum(tiles) - tiles)[owner]
    host = torch.from_numpy(buffer)
    if device.type == "cuda":  # from memory that is not pinned the host would wait for all that is queued before
        host = host.pin_memory()
    on_device = host.to(device, non_blocking=True)
    lanes = on_device[: LANES * count].view(count, LANES)
    if programs:
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            _lanes_kernel[(programs,)](on_device, _keys(device), count, PAIRS=CHUNK // 2, ROWS=ROWS, BLOCK=BLOCK, num_warps=WARPS)
    return lanes


def _padded(stack: Tensor) -> Tensor:
    """Aligned copies of the bytes of each tensor of a stack, uint8 [tensors, bytes], with zeros up to a multiple of 8."""
    size = stack.nbytes // len(stack)
    out = torch.zeros(len(stack), -(-size // 8) * 8, dtype=torch.uint8, device=stack.device)
    out[:, :size] = stack.detach().reshape(len(stack), stack[0].numel()).view(torch.uint8)
    return out


def _keys(device: torch.device) -> Tensor:
    """K, then G, on the device: int64 with the bits of uint64."""
    if device not in _KEYS:
        _KEYS[device] = torch.from_numpy(np.concatenate(constants()).view(np.int64)).to(device)
    return _KEYS[device]

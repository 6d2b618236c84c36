"""NVFP4 expert matrices in the order in which the Hopper kernels read them: an exact, reversible permutation of their bits.

A chunk is 128 consecutive inputs (K) of one output row: 8 planes of 16, and a plane is one block of NVFP4, so it has one scale.
    codes   int32 [E, chunks, N, 16]: words 2i and 2i + 1 of a row hold inputs 2i and 2i + 1 of each of the 8 planes
    scales  int64 [E, chunks, N]: the bytes j (little endian) are the scales of planes j, each half of four turned left by 4 bits
A row's chunk is 64 + 8 bytes, neighbouring rows are neighbours in memory, and the 16 words of a row are what one matrix instruction of
depth 16 takes, plane after plane: nothing is shuffled between threads.

Decoding is what the kernels wait for, so the bits lie where it takes the fewest instructions. Two E2M1 whose signs are at bits 15 and 31,
and magnitudes at 8..6 and 24..22, read as two bf16 of 2^-126 times their values; one mask takes them out. Of the 16 values of two words
three pairs lie so in the first word, turned by different distances, and three in the second; what is left of both, mixed by one more
mask, is a word that holds the last two. No arrangement does without the mixing: that pattern of bits does not tile a word.

A scale is kept as unsigned E5M3 (value 1.mmm * 2^(eeeee - 10), byte 0 for zero), in which every E4M3 scale is a normal number. Turned by
4 bits, the bytes 0 and 2 of four lie where bf16 has these bits, and after one turn by 8 the bytes 1 and 3.

The bits of canonical tensors come back with `unpack_experts`, so that digests are taken of those.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from samebits.quant.blocks import fast_path
from samebits.quant.nvfp4 import NVFP4Tensor

CHUNK, PLANES, BLOCK = 128, 8, 16
# Where a plane's pair is: in the first word, the second or the mixed one (0, 1, 2), and how far that is turned right to bring it in place.
PLACES = ((0, -6), (0, -2), (0, 4), (1, -4), (1, 0), (1, 6), (2, 2), (2, 8))
MIXED = 0xC180C180  # bits that the mixed word takes from the first
_NIBBLES = 1 << 26  # bytes of them that unpacking holds at a time; operations on them need a few times as much


class NVFP4Tiles(NamedTuple):
    """A stack of NVFP4 matrices [E, N, K] in the kernels' order. Inputs beyond `inputs` pad the last chunk with zeros."""

    codes: Tensor  # int32 [E, ceil(K / 128), N, 16]
    scales: Tensor  # int64 [E, ceil(K / 128), N]
    global_scale: Tensor  # fp32 [E]
    inputs: int  # K


@lru_cache(maxsize=1)
def _runs() -> list[tuple[int, int, int, int, int, int]]:
    """Runs of neighbouring bits: (plane, which input of two, lowest bit of the nibble, word, lowest bit of the word, length)."""
    runs: list[tuple[int, int, int, int, int, int]] = []
    for plane, (source, right) in enumerate(PLACES):
        for which in range(2):
            for bit, target in enumerate((6, 7, 8, 15)):
                at = (target + 16 * which + right) % 32
                word = source if source < 2 else 1 - (MIXED >> at & 1)
                if runs:
                    *same, low, last_word, last_at, length = runs[-1]
                    if same == [plane, which] and last_word == word and last_at + length == at:
                        runs[-1] = (plane, which, low, word, last_at, length + 1)
                        continue
                runs.append((plane, which, bit, word, at, 1))
    return runs


def _turn_left(four: Tensor, bits: int) -> Tensor:
    """32 bits in each int64, turned."""
    return (four << bits | four >> (32 - bits)) & 0xFFFFFFFF


@lru_cache(maxsize=1)
def _scale_bytes() -> tuple[Tensor, Tensor]:
    """E4M3 byte to E5M3 byte (-1 where there is none: NaN and negative) and back, int16 [256] each, on the CPU."""
    there = torch.full((256,), -1, dtype=torch.int16)
    there[0] = 0
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    for byte in range(1, 0x7F):
        fraction, exponent = torch.frexp(values[byte])  # fraction in [0.5, 1)
        there[byte] = (int(exponent) - 1 + 10) * 8 + int(fraction * 16) - 8
    back = torch.full((256,), -1, dtype=torch.int16)
    back[there[:0x7F].long()] = torch.arange(0x7F, dtype=torch.int16)
    return there, back


def pack_experts(weight: NVFP4Tensor, name: str = "experts") -> NVFP4Tiles:
    """Reorder a stack of NVFP4 matrices [E, N, K] with one global scale each.

    Raises `ValueError` with `name` for what the kernels cannot read: a shape that is no such stack, a scale that is NaN or negative, a
    scale of zero over codes that are not.
    """
    codes, scales, g = weight
    if codes.dim() != 3 or g.shape != codes.shape[:1]:
        raise ValueError(f"{name}: needs a stack [E, N, K] with a global scale for each, got {tuple(codes.shape)} and {tuple(g.shape)}")
    experts, n, half = codes.shape
    k, chunks = 2 * half, -(-2 * half // CHUNK)
    there = _scale_bytes()[0].to(codes.device)
    words = torch.empty(experts, chunks, n, BLOCK, dtype=torch.int32, device=codes.device)
    bytes8 = torch.empty(experts, chunks, n, dtype=torch.int64, device=codes.device)
    bad = torch.zeros(2, dtype=torch.bool, device=codes.device)
    for e in range(experts):  # one matrix at a time: the nibbles take eight times its bytes
        nibbles = torch.stack((codes[e] & 15, codes[e] >> 4), dim=-1).view(n, -1)
        scale = there[scales[e].int()]
        bad[0] |= (scale < 0).any()
        bad[1] |= ((scale == 0) & ((nibbles.view(n, -1, BLOCK) & 7) != 0).any(-1)).any()
        nibbles = F.pad(nibbles, (0, chunks * CHUNK - k)).view(n, chunks, PLANES, BLOCK // 2, 2).int()
        word = torch.zeros(2, n, chunks, BLOCK // 2, dtype=torch.int32, device=codes.device)
        for plane, which, low, at, bit, length in _runs():
            word[at] |= (nibbles[:, :, plane, :, which] >> low & (1 << length) - 1) << bit
        words[e] = word.permute(2, 1, 3, 0).flatten(2)
        scale = F.pad(scale, (0, chunks * PLANES - k // BLOCK)).to(torch.uint8).view(n, chunks, PLANES)
        fours = _turn_left(scale.flatten().view(torch.int32).long() & 0xFFFFFFFF, 4).to(torch.int32)
        bytes8[e] = fours.view(torch.int64).view(n, chunks).t()
    if (g > 2.0**100).any():
        raise ValueError(f"{name}: a global scale is beyond 2^100")
    for problem, text in zip(bad.tolist(), ("a block scale is NaN or negative", "a block scale is 0 over codes that are not"), strict=True):
        if problem:
            raise ValueError(f"{name}: {text}")
    return NVFP4Tiles(words, bytes8, g.float().contiguous(), k)


def unpack_experts(tiles: NVFP4Tiles) -> NVFP4Tensor:
    """The tensor that `pack_experts` was given, byte for byte."""
    words, bytes8, g, k = tiles
    experts, chunks, n, _ = words.shape
    codes = torch.empty(experts, n, k // 2, dtype=torch.uint8, device=words.device)
    scales = torch.empty(experts, n, k // BLOCK, dtype=torch.uint8, device=words.device)
    # As many matrices at a time as there is room for their nibbles: an operation on one of many small ones is all launch.
    step = max(1, _NIBBLES // max(1, n * chunks * CHUNK))
    for first in range(0, experts, step):
        some = slice(first, first + step)
        codes[some], scales[some] = _unpack(words[some], bytes8[some], k)
    return NVFP4Tensor(codes, scales, g)


def _unpack(words: Tensor, bytes8: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Canonical codes uint8 [E, N, K/2] and scales uint8 [E, N, K/16] of matrices."""
    experts, chunks, n, _ = words.shape
    nibbles = torch.zeros(experts, chunks, n, PLANES, BLOCK // 2, 2, dtype=torch.uint8, device=words.device)
    for plane, which, low, at, bit, length in _runs():
        nibbles[:, :, :, plane, :, which] |= ((words[..., at::2] >> bit & (1 << length) - 1) << low).to(torch.uint8)
    nibbles = nibbles.transpose(1, 2).reshape(experts, n, chunks * CHUNK)[..., :k]
    fours = _turn_left(bytes8.transpose(1, 2).flatten().view(torch.int32).long() & 0xFFFFFFFF, 28).to(torch.int32)
    scale = fours.view(torch.uint8).view(experts, n, -1)[..., : k // BLOCK]
    back = _scale_bytes()[1].to(words.device)
    return nibbles[..., 0::2] | nibbles[..., 1::2] << 4, back[scale.int()].to(torch.uint8)


def pack_experts_on(device: torch.device, weight: NVFP4Tensor, name: str = "experts") -> NVFP4Tiles:
    """`pack_experts` on `device`, to which the matrices of the stack are brought one at a time."""
    experts = len(weight.codes)
    if weight.codes.dim() != 3 or weight.global_scale.shape != (experts,):
        return pack_experts(weight, name)  # which says what is wrong
    tiles = None
    for e in range(experts):
        one = pack_experts(NVFP4Tensor(*(part[e : e + 1].to(device) for part in weight)), name)
        if tiles is None:
            tiles = NVFP4Tiles(*(part.new_empty(experts, *part.shape[1:]) for part in one[:3]), one.inputs)
        for stack, part in zip(tiles[:3], one[:3], strict=True):
            stack[e] = part[0]
    return tiles


def stack_part(tiles: NVFP4Tiles, some: slice) -> NVFP4Tiles:
    """Some matrices of a stack, as a view."""
    return NVFP4Tiles(tiles.codes[some], tiles.scales[some], tiles.global_scale[some], tiles.inputs)


def expert_of(tiles: NVFP4Tiles, index: int) -> NVFP4Tensor:
    """Matrix `index` of the stack that `pack_experts` was given, byte for byte: [N, K], unpacked alone."""
    return NVFP4Tensor(*(part[0] for part in unpack_experts(stack_part(tiles, slice(index, index + 1)))))


def takes_tiles(device: torch.device | str, dtype: torch.dtype) -> bool:
    """Whether weights for activations of `dtype` on `device` are best held as tiles: where the Triton kernels run, from Hopper on.

    Anywhere else tiles are unpacked again in each call.
    """
    device = torch.device(device)
    if dtype is not torch.bfloat16 or device.type != "cuda" or not torch.cuda.is_available():
        return False
    return fast_path(torch.empty(0, device=device)) and torch.cuda.get_device_capability(device) >= (9, 0)

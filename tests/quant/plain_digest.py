"""The digest's formula in plain Python integers: what `samebits.quant.digests` must give, and nothing of its code."""

import hashlib
import struct

import torch

NAME = "multilinear64x4-1"
WORDS = 8192
MOD = 1 << 64
STREAM = [v | 1 for v in struct.unpack(f"<{WORDS + 7}Q", hashlib.shake_256(NAME.encode()).digest(8 * (WORDS + 7)))]
KEYS, STRIDES = STREAM[: WORDS + 3], STREAM[WORDS + 3 :]


def raw(t: torch.Tensor) -> bytes:
    """Bytes in logical order, gathered element by element from the storage."""
    size = t.element_size()
    storage = torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage()).numpy().tobytes()
    offsets = [t.storage_offset()] if t.numel() else []
    for n, stride in zip(t.shape, t.stride(), strict=True):
        offsets = [o + i * stride for o in offsets for i in range(n)]
    return b"".join(storage[o * size : (o + 1) * size] for o in offsets)


def mix(y: int) -> int:
    y = (y ^ (y >> 30)) * 0xBF58476D1CE4E5B9 % MOD
    y = (y ^ (y >> 27)) * 0x94D049BB133111EB % MOD
    return y ^ (y >> 31)


def lanes(data: bytes) -> list[int]:
    padded = data + bytes(-len(data) % 4)
    words = struct.unpack(f"<{len(padded) // 4}I", padded)
    chunks = [words[i : i + WORDS] for i in range(0, len(words), WORDS)]
    return [
        sum(mix((sum(KEYS[j + lane] * w for j, w in enumerate(chunk)) + (c + 1) * STRIDES[lane]) % MOD) for c, chunk in enumerate(chunks))
        % MOD
        for lane in range(4)
    ]


def plain_digest(t: torch.Tensor) -> str:
    data = raw(t)
    header = f"{NAME} {str(t.dtype).removeprefix('torch.')} {tuple(t.shape)} {len(data)}\0"
    return hashlib.blake2b(header.encode() + struct.pack("<4Q", *lanes(data)), digest_size=16).hexdigest()

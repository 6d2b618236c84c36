"""Digests of tensors: equal hex means equal dtype, shape and bits, at the speed of memory, with the same hex on CPU and GPU.

A sync is proven by digests that the trainer takes of what it sends and every engine rank of what it holds, so they are taken where the
tensors are: by `triton_digest` on CUDA (one pass over many tensors in one launch, nothing but four numbers a tensor comes to the host),
by numpy on the CPU, by torch operations on any other device.

**Formula.** All sums and products are modulo 2^64. The bytes of a tensor in logical order, padded with zeros to a multiple of four, are
little-endian uint32 words; chunk c has the words w[c, 0 .. n-1], n = CHUNK = 8192 (the last one may be short). K[0 .. n+2] and G[0 .. 3]
are odd constants: the SHAKE-256 stream of the algorithm's name, read as little-endian uint64, each with its lowest bit set. For lane
l = 0 .. 3

    S[c, l] = sum over j of K[j + l] * w[c, j]
    L[l]    = sum over c of mix(S[c, l] + (c + 1) * G[l])

where mix is SplitMix64's finaliser, a bijection: y ^= y >> 30; y *= 0xBF58476D1CE4E5B9; y ^= y >> 27; y *= 0x94D049BB133111EB;
y ^= y >> 31. The digest is BLAKE2b-128 of "NAME dtype shape bytes" (ASCII), a zero byte, and L[0 .. 3] as little-endian uint64. As sums
have no order, any division of the work gives the same numbers.

**What it guarantees.** (1) Where one 32-bit word alone differs, all four lanes do, with certainty: K[j + l] is odd, so its product with
the difference is not 0, and mix is a bijection. (2) Tensors of one shape and dtype that differ in any other way, chosen without regard to
the constants, agree in all four lanes with probability of about 2^-128. Within a chunk that is a theorem for keys drawn at random: let j be
the last word that differs; in lane l its factor K[j + l] meets no difference in the lanes before, and of the 2^63 values that it can
have at most 2^31 make the lane's difference 0, since the word's difference has at most 31 factors of two; so each lane in turn agrees with
probability 2^-32 at most. Across chunks mix is taken for a random function, and a lane agrees by chance with 2^-64. This covers words
exchanged, rows shifted, blocks moved, signs flipped, a tensor that is half old. (3) What differs in dtype, shape or length differs as
BLAKE2b-128 does.

**What it does not.** It is no cryptographic hash: the constants are public and S is linear, so who wants a collision can make one. It is
for bits that nobody tampers with, not for files from strangers. Strides, storage offset, device and name are no part of a digest.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from .blocks import fast_path

ALGORITHM = "multilinear64x4-1"
"""Name of the formula above. Digests of another algorithm cannot be compared with these."""
FORMER_ALGORITHM = "blake2b-128"
"""What records that name no algorithm were made with."""
CHUNK, LANES = 8192, 4
CHUNK_BYTES = 4 * CHUNK
# Tensors held back to be digested together: few launches, and a caller that makes tensors as it goes never has many of them at once.
_BATCH_BYTES = 256 << 20
# Chunks that numpy multiplies in one call: 512 KiB of uint64, for second-level caches of 1 MiB and more.
_ROWS = 8
# Below this a second thread costs more than it gives.
_THREADED_BYTES = 8 << 20

# Buffers of each thread, 1 MiB: to ask for them anew costs as much as a small adapter.
_WORKSPACE = threading.local()

_Part = tuple[np.ndarray, int, int]
"""Words [rows, columns] of some chunks, the row of S for the first, and how many rows of S further each next one is."""
_Item = tuple[tuple[str, ...], Tensor]
"""Names, and the tensors below them as one [names, ...], of which each is contiguous."""


@lru_cache(maxsize=1)
def constants() -> tuple[np.ndarray, np.ndarray]:
    """(K uint64 [CHUNK + 3], G uint64 [4])."""
    count = CHUNK + LANES - 1
    stream = np.frombuffer(hashlib.shake_256(ALGORITHM.encode()).digest(8 * (count + LANES)), "<u8").astype(np.uint64) | np.uint64(1)
    return stream[:count], stream[count:]


def digest(tensor: Tensor) -> str:
    """Digest of one tensor, 32 hex digits. Equal digests mean equal dtype, shape and bits (see the module for how surely)."""
    return digests({"": tensor})[""]


def digests(tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Digest of each named tensor, with one host sync a device. An iterable may make its tensors as it goes: few are held at a time."""
    digester = Digester()
    for name, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
        digester.add(name, tensor)
    return digester.finish()


class Digester:
    """Takes tensors, on any devices, and gives their digests at the end. A tensor must keep its values until then."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, ...], tuple[torch.dtype, torch.Size, int]] = {}
        self._names: set[str] = set()
        self._pending: dict[torch.device, list[_Item]] = {}
        self._pending_bytes = 0
        self._launched: dict[torch.device, list[tuple[list[str], Tensor]]] = {}
        self._lanes: dict[str, bytes] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a tensor under a name. Raises `ValueError` when the name was used before."""
        self.add_stack((name,), tensor[None])

    def add_stack(self, names: tuple[str, ...], stack: Tensor) -> None:
        """Take the tensors `stack` [len(names), ...] along its first dimension, as `add` takes them one by one."""
        if len(names) != len(stack):
            raise ValueError(f"{len(names)} names are given for {len(stack)} tensors")
        if not names:
            return
        before = len(self._names)
        if not self._names.isdisjoint(names):
            raise ValueError(f"{next(name for name in names if name in self._names)!r} is digested already")
        self._names.update(names)
        if len(self._names) != before + len(names):
            raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is given twice")
        self._kinds[names] = (stack.dtype, stack.shape[1:], stack.nbytes // len(names))
        held = stack if stack.is_contiguous() or stack[0].is_contiguous() else stack.detach().contiguous()
        self._pending.setdefault(stack.device, []).append((names, held))
        self._pending_bytes += stack.nbytes
        if self._pending_bytes >= _BATCH_BYTES:
            self._flush()

    def finish(self) -> dict[str, str]:
        """Name to digest, in the order of `add`. The one place that waits for a device."""
        self._flush()
        headers = [(names, _header(*kind)) for names, kind in self._kinds.items()]  # while a device works
        for batches in self._launched.values():
            lanes = torch.cat([lanes for _, lanes in batches]) if len(batches) > 1 else batches[0][1]
            self._keep([name for names, _ in batches for name in names], lanes.cpu().numpy())
        self._launched.clear()
        taken = self._lanes
        return {name: hashlib.blake2b(header + taken[name], digest_size=16).hexdigest() for names, header in headers for name in names}

    def _flush(self) -> None:
        pending, self._pending, self._pending_bytes = self._pending, {}, 0
        for device, items in pending.items():
            names = [name for each, _ in items for name in each]
            stacks = [stack for _, stack in items]
            if device.type == "cpu":
                self._keep(names, host_lanes(stacks))
            elif fast_path(stacks[0]):
                from .triton_digest import device_lanes

                self._launched.setdefault(device, []).append((names, device_lanes(stacks)))
            else:
                sums = [torch_sums(t) for stack in stacks for t in stack]
                self._keep(names, combine(torch.cat(sums).cpu().numpy().view(np.uint64), [len(s) for s in sums]))

    def _keep(self, names: list[str], lanes: np.ndarray) -> None:
        data = lanes.astype("<u8", copy=False).tobytes()
        step = 8 * LANES
        self._lanes |= {name: data[i * step : i * step + step] for i, name in enumerate(names)}


@lru_cache(maxsize=4096)
def _header(dtype: torch.dtype, shape: torch.Size, size: int) -> bytes:
    return f"{ALGORITHM} {str(dtype).removeprefix('torch.')} {tuple(shape)} {size}\0".encode()


def host_lanes(stacks: list[Tensor]) -> np.ndarray:
    """L, uint64 [tensors, 4], of the tensors along the first dimension of CPU tensors. Each of them is contiguous."""
    words = [_host_words(stack) for stack in stacks]
    sizes = [-(-w.shape[1] // CHUNK) for w in words]
    counts = [size for w, size in zip(words, sizes, strict=True) for _ in range(len(w))]
    sums = np.empty((sum(counts), LANES), np.uint64)
    # Chunks of one width are multiplied together, whatever tensors they are from: adapters have many small tensors of few shapes.
    by_width: dict[int, list[_Part]] = {}
    at = 0
    for w, size in zip(words, sizes, strict=True):
        rows, width = w.shape
        full = width // CHUNK * CHUNK
        for row in range(rows if full else 0):
            for start in range(0, full, _ROWS * CHUNK):
                part = w[row, start : min(start + _ROWS * CHUNK, full)].reshape(-1, CHUNK)
                by_width.setdefault(CHUNK, []).append((part, at + row * size + start // CHUNK, 1))
        if full < width:
            limit = _ROWS * CHUNK // (width - full)
            for row in range(0, rows, limit):
                by_width.setdefault(width - full, []).append((w[row : row + limit, full:], at + row * size + size - 1, size))
        at += rows * size
    jobs = [job for width, parts in by_width.items() for job in _joined(parts, _ROWS * CHUNK // width)]
    threads = min(torch.get_num_threads(), len(jobs))
    if threads > 1 and sum(w.size for w in words) * 4 >= _THREADED_BYTES:
        # numpy lets go of the interpreter while it multiplies.
        with ThreadPoolExecutor(threads) as pool:
            for done in [pool.submit(_host_sums, jobs[i::threads], sums) for i in range(threads)]:
                done.result()
    else:
        _host_sums(jobs, sums)
    return combine(sums, counts)


def _host_words(stack: Tensor) -> np.ndarray:
    """Little-endian uint32 words [tensors, words] of a CPU stack of contiguous tensors; a view where their length allows it."""
    data = stack.detach().reshape(len(stack), stack[0].numel()).view(torch.uint8).numpy()
    if data.shape[1] % 4:
        data = np.pad(data, ((0, 0), (0, -data.shape[1] % 4)))
    return data.view("<u4")


def _joined(parts: list[_Part], limit: int) -> Iterator[list[_Part]]:
    """Runs of parts with at most `limit` rows together."""
    job: list[_Part] = []
    rows = 0
    for part in parts:
        if job and rows + len(part[0]) > limit:
            yield job
            job, rows = [], 0
        job.append(part)
        rows += len(part[0])
    if job:
        yield job


def _host_sums(jobs: list[list[_Part]], sums: np.ndarray) -> None:
    """Write S of the parts of each job, all of one width, into their rows of `sums`."""
    keys, _ = constants()
    if not hasattr(_WORKSPACE, "buffers"):
        _WORKSPACE.buffers = np.empty((2, _ROWS * CHUNK), np.uint64)
    wide, products = _WORKSPACE.buffers
    for job in jobs:
        columns = job[0][0].shape[1]
        rows = sum(len(words) for words, _, _ in job)
        w, product = (buffer[: rows * columns].reshape(rows, columns) for buffer in (wide, products))
        found = np.empty((LANES, rows), np.uint64)
        at = 0
        into: list[int] = []
        for words, row, step in job:
            w[at : at + len(words)] = words
            at += len(words)
            into += range(row, row + len(words) * step, step)
        for lane in range(LANES):
            np.multiply(w, keys[lane : lane + columns], out=product)
            np.add.reduce(product, axis=1, out=found[lane])
        sums[into] = found.T


def torch_sums(t: Tensor) -> Tensor:
    """S of a contiguous tensor by torch operations on its device, int64 [chunks, 4] with the bits of uint64."""
    data = t.detach().reshape(-1).view(torch.uint8)
    chunks = -(-len(data) // CHUNK_BYTES)
    out = torch.empty(chunks, LANES, dtype=torch.int64, device=t.device)
    keys = torch.from_numpy(constants()[0].view(np.int64)).to(t.device)
    step = 1024  # chunks at a time: 64 MiB of words, as int64
    for at in range(0, chunks, step):
        part = data[at * CHUNK_BYTES : (at + step) * CHUNK_BYTES]
        padded = torch.zeros(-(-len(part) // CHUNK_BYTES) * CHUNK_BYTES, dtype=torch.uint8, device=t.device)
        padded[: len(part)] = part
        words = padded.view(torch.int32).view(-1, CHUNK).to(torch.int64) & 0xFFFFFFFF
        for lane in range(LANES):
            out[at : at + step, lane] = (words * keys[lane : lane + CHUNK]).sum(1)
    return out


def combine(sums: np.ndarray, counts: list[int]) -> np.ndarray:
    """L, uint64 [tensors, 4], from S [chunks of all tensors, 4] and the number of chunks of each tensor."""
    _, strides = constants()
    ends = np.cumsum(np.asarray(counts, np.int64))
    position = (np.arange(len(sums)) - np.repeat(ends - counts, counts) + 1).astype(np.uint64)
    y = sums + position[:, None] * strides
    y ^= y >> np.uint64(30)
    y *= np.uint64(0xBF58476D1CE4E5B9)
    y ^= y >> np.uint64(27)
    y *= np.uint64(0x94D049BB133111EB)
    y ^= y >> np.uint64(31)
    running = np.concatenate((np.zeros((1, LANES), np.uint64), np.cumsum(y, axis=0, dtype=np.uint64)))
    return running[ends] - running[ends - counts]

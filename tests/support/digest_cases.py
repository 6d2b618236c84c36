"""Tensors for the digest: every dtype in use, sizes around words, pairs of words and chunks, strided and unaligned views."""

import torch

DTYPES = (
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.bool),
)
# Bytes: a word is 4, a pair of words 8, a chunk 32768, a tile of the kernel 4 chunks.
SIZES = (0, 1, 2, 3, 4, 5, 7, 8, 9, 12, 100, 32764, 32767, 32768, 32769, 32776, 98304, 131072, 131073, 131080, 300_004)


def noise(count: int, seed: int = 0) -> torch.Tensor:
    """uint8 [count], all byte values."""
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def cases() -> dict[str, torch.Tensor]:
    """Name to CPU tensor."""
    out = {f"{n} bytes": noise(n, n) for n in SIZES}
    for i, dtype in enumerate(DTYPES):
        wide = (noise(48 * 8, i) % 2).bool() if dtype is torch.bool else noise(48 * 8, i).view(dtype)
        out |= {f"{dtype}": wide[:48].reshape(6, 8), f"{dtype} scalar": wide[5], f"{dtype} transposed": wide[:48].reshape(6, 8).t()}
        out |= {f"{dtype} step": wide[1:48:3], f"{dtype} offset": wide[1:30], f"{dtype} empty": wide[:0].reshape(0, 4)}
    x = noise(96 * 1024, 99).view(torch.bfloat16)
    out |= {"NaN": torch.full((9,), float("nan")), "negative zero": torch.tensor([-0.0]), "expanded": x[:6].expand(5, 6)}
    out |= {
        "rows of a slot": x.reshape(3, 128, 128)[1, :, 5:99],
        "odd start over chunks": noise(70_000)[3:],
        "permuted": x.reshape(4, 96, 128).permute(2, 0, 1),
    }
    return out


def stacked_cases() -> dict[str, torch.Tensor]:
    """Stacks as buffers of experts have them: side by side, apart by any distance, of odd sizes, longer than a chunk, and one alone."""
    x = noise(400_000, 5)
    return {
        "side by side": x[:96_000].view(torch.bfloat16).view(6, 100, 80),
        "apart": x[: 5 * 4096].view(5, 4096)[:, :400].view(torch.int16),
        "odd bytes": x[:21].view(3, 7),
        "odd bytes apart": x[1:81].view(4, 20)[:, 3:9],
        "odd distance": x[: 3 * 33].view(3, 33)[:, :32],
        "over chunks": x[: 3 * 90_000].view(3, 90_000),
        "whole chunks": x[: 2 * 131_072].view(2, 131_072),
        "reversed rows": x[:160].view(4, 5, 8).flip(0),
        "inner stride": x[:320].view(4, 10, 8)[:, :, ::2],
        "empty": x[:0].view(3, 0),
        "scalars": x[:16].view(torch.int32),
        "one": x[:24].view(1, 3, 8),
    }

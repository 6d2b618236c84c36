"""NVFP4 KV cache: the format of one token's key, value or index key of one head, alone or in a page as vLLM lays it out.

**Row** (`write`, `read`). D elements (128 in MiniMax-M3) become D/2 bytes of E2M1 codes and D/16 bytes of E4M3 scales: 72 bytes for 128
elements, 4.5 bits each. The global scale is 1.0, as in vLLM's M3 layers, so a row can be written without knowing any other row.

**Page** (`write_pages`, `read_pages`). uint8 [pages, 2 * heads, 128, 72], as vLLM's M3 kernels on Blackwell hold it: slot 2h of a page is
K of head h, slot 2h + 1 is V. A slot is 9216 bytes: the codes of its 128 tokens (64 bytes each), then their 1024 scale bytes, at
    K   8 * token + group
    V   32 * (token // 4) + 4 * group + token % 4         ("token quads": the four tokens of a quad lie side by side)
from there, for the 8 groups of 16 elements. The last two dimensions are a shape only: a token's scales are not in its 72 bytes.
Index keys have pages of one such slot, laid out as K's: uint8 [pages, 128, 72] (`write_index_pages`, `read_index_pages`).

**Re-rounded read** (`rounded=True`). Blackwell's attention takes K and V as E4M3: value = E4M3(code * scale), rounded to nearest even and
saturated at 448, while the cache itself reaches 2688; a NaN scale counts as 0. The product is exact before that rounding (at most six
significant bits, between 2^-10 and 2688), so it does not matter that the hardware forms it in fp16. The query is rounded to E4M3 too:
`round_e4m3`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import nvfp4
from .blocks import e4m3_values

PAGE = 128


def row_bytes(head_dim: int) -> int:
    """Bytes of one row of `head_dim` elements."""
    return head_dim // 2 + head_dim // nvfp4.BLOCK


def write(x: Tensor) -> Tensor:
    """Rows [..., D] (bf16 or fp32) to bytes uint8 [..., D/2 + D/16]: codes first, then scales, both linear.

    Raises `NonFiniteWeight` when a row holds NaN or infinity.
    """
    t = _quantize(x)
    return torch.cat((t.codes, t.block_scales), dim=-1)


def read(rows: Tensor, head_dim: int, dtype: torch.dtype = torch.float32, rounded: bool = False) -> Tensor:
    """Bytes uint8 [..., D/2 + D/16] to values [..., D]; `rounded`: as E4M3, see the module."""
    codes, scales = rows.split((head_dim // 2, head_dim // nvfp4.BLOCK), dim=-1)
    return _values(codes, scales, dtype, rounded)


def page_shape(pages: int, heads: int, head_dim: int) -> tuple[int, int, int, int]:
    """Shape of a paged cache for `heads` KV heads."""
    return pages, 2 * heads, PAGE, row_bytes(head_dim)


def write_pages(pages: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Write tokens into a paged cache, in place.

    Args:
        pages: uint8 [pages, 2 * heads, 128, D/2 + D/16], each contiguous, any distance apart. slots: int64 [T], page * 128 + place in the
            page, no two equal.
        k, v: [T, heads, D] (bf16 or fp32).
    Raises `NonFiniteWeight` when K or V holds NaN or infinity, `ValueError` when the shapes do not fit.
    """
    flat = _slots(pages, k.shape[-2], k.shape[-1])
    for side, x in enumerate((k, v)):
        _write_planes(flat[:, side::2], slots, x, side)


def read_pages(
    pages: Tensor, slots: Tensor, head_dim: int, dtype: torch.dtype = torch.float32, rounded: bool = False
) -> tuple[Tensor, Tensor]:
    """K and V [..., heads, D] of the tokens at `slots` (int64, any shape); `rounded`: as E4M3, see the module."""
    flat = _slots(pages, pages.shape[1] // 2, head_dim)
    k, v = (_read_planes(flat[:, side::2], slots, head_dim, side, dtype, rounded) for side in (0, 1))
    return k, v


def index_page_shape(pages: int, head_dim: int) -> tuple[int, int, int]:
    """Shape of a paged cache of index keys."""
    return pages, PAGE, row_bytes(head_dim)


def write_index_pages(pages: Tensor, slots: Tensor, k: Tensor) -> None:
    """Write index keys `k` [T, D] into `pages` uint8 [pages, 128, D/2 + D/16], in place: each page is one slot as K has it.

    `slots` and errors are those of `write_pages`.
    """
    _write_planes(_index_slots(pages, k.shape[-1]), slots, k[:, None], 0)


def read_index_pages(pages: Tensor, slots: Tensor, head_dim: int, dtype: torch.dtype = torch.float32, rounded: bool = False) -> Tensor:
    """Index keys [..., D] of the tokens at `slots` (int64, any shape)."""
    return _read_planes(_index_slots(pages, head_dim), slots, head_dim, 0, dtype, rounded).squeeze(-2)


def _write_planes(planes: Tensor, slots: Tensor, x: Tensor, side: int) -> None:
    """Write `x` [T, heads, D] into `planes` [pages, heads, slot bytes]."""
    t = _quantize(x)
    codes_at, scales_at = _places(slots, x.shape[-1], side)
    planes[(slots // PAGE)[:, None], :, codes_at] = t.codes.transpose(1, 2)
    planes[(slots // PAGE)[:, None], :, scales_at] = t.block_scales.transpose(1, 2)


def _read_planes(planes: Tensor, slots: Tensor, head_dim: int, side: int, dtype: torch.dtype, rounded: bool) -> Tensor:
    """Values [..., heads, D] of the tokens at `slots`."""
    at = slots.reshape(-1)
    codes_at, scales_at = _places(at, head_dim, side)
    codes = planes[(at // PAGE)[:, None], :, codes_at].transpose(1, 2)
    scales = planes[(at // PAGE)[:, None], :, scales_at].transpose(1, 2)
    return _values(codes.contiguous(), scales.contiguous(), dtype, rounded).reshape(*slots.shape, planes.shape[1], head_dim)


def _index_slots(pages: Tensor, head_dim: int) -> Tensor:
    """`pages` as [pages, 1, bytes of a slot]."""
    want = index_page_shape(pages.shape[0], head_dim)
    if tuple(pages.shape) != want or pages.dtype != torch.uint8:
        raise ValueError(f"index pages must be uint8 {want}, got {pages.dtype} {tuple(pages.shape)}")
    return pages.view(want[0], 1, PAGE * want[2])


def _slots(pages: Tensor, heads: int, head_dim: int) -> Tensor:
    """`pages` as [pages, 2 * heads, bytes of a slot]."""
    want = page_shape(pages.shape[0], heads, head_dim)
    if tuple(pages.shape) != want or pages.dtype != torch.uint8:
        raise ValueError(f"pages must be uint8 {want}, got {pages.dtype} {tuple(pages.shape)}")
    return pages.view(*want[:2], PAGE * want[3])


def _places(slots: Tensor, head_dim: int, side: int) -> tuple[Tensor, Tensor]:
    """Byte places inside a slot of tokens' codes [T, D/2] and scales [T, D/16]; side 0 is K, 1 is V."""
    token = (slots % PAGE)[:, None]
    groups = head_dim // nvfp4.BLOCK
    code, group = (torch.arange(n, device=slots.device) for n in (head_dim // 2, groups))
    scales = token * groups + group if side == 0 else token // 4 * (4 * groups) + group * 4 + token % 4
    return token * (head_dim // 2) + code, PAGE * (head_dim // 2) + scales


def _quantize(x: Tensor, name: str | None = "KV row") -> nvfp4.NVFP4Tensor:
    return nvfp4.quantize(x, torch.ones((), device=x.device), name=name)


def _values(codes: Tensor, scales: Tensor, dtype: torch.dtype, rounded: bool) -> Tensor:
    if not rounded:
        return nvfp4.dequantize(nvfp4.NVFP4Tensor(codes, scales, torch.ones((), device=codes.device)), dtype)
    scale = e4m3_values(scales.reshape(-1)).nan_to_num_(0.0)
    return round_e4m3(nvfp4.scaled_values(codes, scale, torch.float32)).to(dtype)


def round_e4m3(x: Tensor) -> Tensor:
    """`x` rounded to E4M3 (nearest even, saturating at 448) and back, in x's dtype: what `cvt.rn.satfinite.e4m3x2` leaves of it."""
    return x.float().clamp(-nvfp4.E4M3_MAX, nvfp4.E4M3_MAX).to(torch.float8_e4m3fn).to(x.dtype)


class _RoundTrip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, rounded: bool, name: str | None) -> Tensor:
        t = _quantize(x, name)
        return _values(t.codes, t.block_scales, x.dtype, rounded)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None, None


def round_trip(x: Tensor, rounded: bool = False, name: str | None = "KV row") -> Tensor:
    """What an NVFP4 cache gives back for `x` [..., D], with a straight-through gradient; `rounded`: as E4M3, see the module.

    name: what errors call `x`. None: nothing is looked for, so that nothing waits for a device; NaN and infinity give anything.
    """
    return _RoundTrip.apply(x, rounded, name)

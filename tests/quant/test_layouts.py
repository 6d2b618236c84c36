"""Swizzled scales: every byte's place, zero padding, and the way back whatever the padding holds."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits.quant import layouts


def scales(*shape: int) -> torch.Tensor:
    return torch.randint(1, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(("m", "s"), [(1, 1), (127, 3), (128, 4), (129, 5), (257, 12)])
def test_every_byte_is_where_the_formula_says(m, s):
    linear = scales(m, s)
    swizzled = layouts.swizzle(linear)
    rows, columns = layouts.padded_shape(m, s)
    assert swizzled.shape == (rows, columns) and rows % 128 == 0 and columns % 4 == 0
    want = torch.zeros(rows * columns, dtype=torch.uint8)
    for i in range(m):
        for j in range(s):
            tile = (i // 128) * (columns // 4) + j // 4
            want[512 * tile + 16 * (i % 32) + 4 * (i % 128 // 32) + j % 4] = linear[i, j]
    assert torch.equal(swizzled.flatten(), want)


def test_first_bytes_of_a_tile_are_rows_32_apart():
    linear = torch.arange(128, dtype=torch.uint8)[:, None].expand(-1, 4).contiguous()
    assert layouts.swizzle(linear).flatten()[:16].tolist() == [0] * 4 + [32] * 4 + [64] * 4 + [96] * 4


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 300), st.integers(1, 20), st.sampled_from([(), (3,), (2, 2)]))
def test_round_trip(m, s, lead):
    linear = scales(*lead, m, s)
    swizzled = layouts.swizzle(linear)
    assert torch.equal(layouts.unswizzle(swizzled, m, s), linear)
    assert torch.equal(layouts.unswizzle(swizzled.flatten(-2), m, s), linear)
    if lead:
        assert torch.equal(swizzled[-1], layouts.swizzle(linear[-1]))


def test_garbage_in_the_padding_does_not_reach_the_scales():
    linear = scales(129, 5)
    dirty = layouts.swizzle(torch.full((256, 8), 0x7F, dtype=torch.uint8))
    clean = layouts.swizzle(linear)
    inside = layouts.swizzle(torch.ones(129, 5, dtype=torch.uint8)).bool()
    assert torch.equal(layouts.unswizzle(torch.where(inside, clean, dirty), 129, 5), linear)


def test_e4m3_scales_keep_their_dtype_and_wrong_sizes_raise():
    linear = scales(130, 6).view(torch.float8_e4m3fn)
    swizzled = layouts.swizzle(linear)
    assert swizzled.dtype == torch.float8_e4m3fn
    assert torch.equal(layouts.unswizzle(swizzled, 130, 6).view(torch.uint8), linear.view(torch.uint8))
    with pytest.raises(ValueError, match="swizzled scales of 130 x 9 are 256 x 12 bytes"):
        layouts.unswizzle(swizzled, 130, 9)

"""The NVFP4 KV row: layout, fixed global scale, independence of rows, straight-through gradient."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits.quant import kv, nvfp4
from samebits.quant.nvfp4 import NonFiniteWeight


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, 128, generator=torch.Generator().manual_seed(0))


def test_row_is_72_bytes_codes_then_scales():
    x = torch.zeros(128)
    x[0], x[1], x[127] = 6.0, -3.0, 12.0
    row = kv.write(x)
    assert kv.row_bytes(128) == 72 and row.shape == (72,) and row.dtype == torch.uint8
    assert row[0].item() == 0xD7  # -3 is code 13 in the high nibble, 6 is code 7 in the low one
    assert row[63].item() == 0x70
    assert row[64:].tolist() == [0x38] * 7 + [0x40]  # scales: 1, six zero blocks, 2
    assert torch.equal(kv.read(row, 128), x)


def test_global_scale_is_one_whatever_else_is_written():
    x = rows(5)
    together, alone = kv.write(torch.cat((x, 1000 * x))), kv.write(x)
    assert torch.equal(together[:5], alone)


def test_equals_the_weight_format_under_global_scale_one():
    x = rows(2, 3)
    t = nvfp4.quantize(x, torch.ones(()))
    assert torch.equal(kv.read(kv.write(x), 128), nvfp4.dequantize(t))


def test_dtype_of_read_and_round_trip():
    x = rows(2).bfloat16()
    back = kv.round_trip(x)
    assert back.dtype == torch.bfloat16 and torch.equal(back, kv.read(kv.write(x), 128, torch.bfloat16))
    # A row that was read is written again as the same values: a page may be copied through either form.
    assert torch.equal(kv.round_trip(back), back)


def test_gradient_passes_straight_through():
    x = rows(2).requires_grad_()
    weight = torch.arange(128.0)
    (kv.round_trip(x) * weight).sum().backward()
    assert torch.equal(x.grad, weight.expand(2, -1))


def test_nan_raises():
    with pytest.raises(NonFiniteWeight, match="KV row"):
        kv.write(torch.full((128,), float("nan")))


def test_a_row_without_a_name_is_rounded_as_any_and_not_looked_at():
    x = rows(2).bfloat16()
    assert torch.equal(kv.round_trip(x, name=None), kv.round_trip(x))
    bad = torch.full((2, 128), float("nan"))
    with pytest.raises(NonFiniteWeight, match="KV row"):
        kv.round_trip(bad)
    assert kv.round_trip(bad, name=None).shape == bad.shape


def pages_of(tokens: int = 300, heads: int = 2, dim: int = 128):
    g = torch.Generator().manual_seed(1)
    k, v = (torch.randn(tokens, heads, dim, generator=g) * 3 for _ in range(2))
    pages = torch.full(kv.page_shape(4, heads, dim), 0xEE, dtype=torch.uint8)
    slots = torch.randperm(4 * 128, generator=g)[:tokens]
    return pages, slots, k, v


def test_page_bytes_lie_where_vllm_reads_them():
    """Against the layout spelled out element by element: K scales linear, V scales in token quads."""
    pages, slots, k, v = pages_of()
    kv.write_pages(pages, slots, k, v)
    assert pages.shape == (4, 4, 128, 72)
    flat = pages.view(4, 4, 128 * 72)
    touched = torch.zeros_like(flat, dtype=torch.bool)
    for t in range(0, len(slots), 17):
        page, token = divmod(int(slots[t]), 128)
        for head in range(2):
            for side, x in enumerate((k, v)):
                want = nvfp4.quantize(x[t, head], torch.ones(()))
                slot = flat[page, 2 * head + side]
                assert torch.equal(slot[64 * token : 64 * token + 64], want.codes)
                for g in range(8):
                    at = 8192 + (8 * token + g if side == 0 else token // 4 * 32 + g * 4 + token % 4)
                    assert slot[at] == want.block_scales[g]
                    touched[page, 2 * head + side, at] = True
    assert touched.sum() == 18 * 2 * 2 * 8
    # Tokens that were not written kept every byte.
    rest = torch.ones(512, dtype=torch.bool)
    rest[slots] = False
    assert (pages[:, :, :, :].reshape(4, 4, -1)[:, :, :8192].reshape(4, 4, 128, 64).transpose(1, 2).reshape(512, 4, 64)[rest] == 0xEE).all()
    scales = flat[..., 8192:]
    linear = scales[:, 0::2].reshape(4, 2, 128, 8).transpose(1, 2).reshape(512, 2, 8)
    quads = scales[:, 1::2].reshape(4, 2, 32, 8, 4).transpose(3, 4).reshape(4, 2, 128, 8).transpose(1, 2).reshape(512, 2, 8)
    assert (linear[rest] == 0xEE).all() and (quads[rest] == 0xEE).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rounded", [False, True])
def test_pages_read_back_as_rows_do(dtype, rounded):
    pages, slots, k, v = pages_of()
    k[5] *= 200  # beyond 448, where the re-rounded read saturates
    kv.write_pages(pages, slots, k, v)
    back = kv.read_pages(pages, slots.view(10, 30), 128, dtype, rounded)
    for x, have in zip((k, v), back, strict=True):
        want = kv.read(kv.write(x), 128, dtype, rounded)
        assert have.dtype == dtype and torch.equal(have, want.view(10, 30, 2, 128))
    assert (back[0].abs().amax() > 448) == (not rounded)


def test_pages_of_other_heads_and_sizes():
    pages, slots, k, v = pages_of(40, heads=4, dim=64)
    kv.write_pages(pages, slots, k, v)
    assert pages.shape == (4, 8, 128, 36)
    assert torch.equal(kv.read_pages(pages, slots, 64)[1], kv.read(kv.write(v), 64))
    with pytest.raises(ValueError, match="pages must be uint8"):
        kv.write_pages(pages, slots, k[:, :2], v[:, :2])
    with pytest.raises(NonFiniteWeight, match="KV row"):
        kv.write_pages(pages, slots, k, v / 0)


@settings(deadline=None, max_examples=60)
@given(st.data(), st.integers(1, 4), st.sampled_from([32, 64, 128]), st.integers(1, 3), st.integers(0, 1 << 16))
def test_any_order_of_writes_leaves_the_same_pages(data, heads, dim, count, seed):
    """Tokens written one batch after the other, a slot again with other values: the last of each slot is there, and nothing else moved."""
    g = torch.Generator().manual_seed(seed)
    slots = data.draw(st.lists(st.integers(0, count * kv.PAGE - 1), min_size=1, max_size=40))
    k, v = (torch.randn(len(slots), heads, dim, generator=g) * 4 for _ in range(2))
    pages = torch.full(kv.page_shape(count, heads, dim), 0xEE, dtype=torch.uint8)
    index = torch.full(kv.index_page_shape(count, dim), 0xEE, dtype=torch.uint8)
    at = 0
    while at < len(slots):  # a batch ends where a slot would come twice
        end = next((i for i in range(at, len(slots)) if slots[i] in slots[at:i]), len(slots))
        end = min(end, at + data.draw(st.integers(1, 9)))
        part = slice(at, end)
        kv.write_pages(pages, torch.tensor(slots[part]), k[part], v[part])
        kv.write_index_pages(index, torch.tensor(slots[part]), k[part, 0])
        at = end
    last = {slot: i for i, slot in enumerate(slots)}
    held, rows_of = torch.tensor(list(last)), torch.tensor(list(last.values()))
    for have, x in zip(kv.read_pages(pages, held, dim), (k, v), strict=True):
        assert torch.equal(have, kv.read(kv.write(x[rows_of]), dim))
    assert torch.equal(kv.read_index_pages(index, held, dim), kv.read(kv.write(k[rows_of, 0]), dim))
    once = torch.full_like(pages, 0xEE)
    kv.write_pages(once, held, k[rows_of], v[rows_of])
    assert torch.equal(once, pages)
    # Each token is so many bytes of every slot of its page, wherever its scales lie.
    changed = torch.full_like(pages, 0x11)
    kv.write_pages(changed, held, k[rows_of], v[rows_of])
    assert (changed != pages).sum() == (count * kv.PAGE - len(last)) * 2 * heads * kv.row_bytes(dim)


@pytest.mark.parametrize("dim", [32, 64, 128])
def test_full_pages_hold_every_token(dim):
    slots = torch.randperm(2 * kv.PAGE, generator=torch.Generator().manual_seed(2))
    k, v = (torch.randn(len(slots), 3, dim, generator=torch.Generator().manual_seed(seed)) for seed in (3, 4))
    pages = torch.zeros(kv.page_shape(2, 3, dim), dtype=torch.uint8)
    kv.write_pages(pages, slots, k, v)
    for have, x in zip(kv.read_pages(pages, slots, dim), (k, v), strict=True):
        assert torch.equal(have, kv.read(kv.write(x), dim))


def test_re_rounded_read():
    """6 * 448 saturates at 448; 5.5 steps of a subnormal E4M3 go to the even neighbour; a NaN scale counts as 0."""
    x = torch.zeros(3, 16)
    x[0, 0], x[1, 0], x[1, 1] = 2688.0, 6 * 2.0**-9, -1.5 * 2.0**-9
    rows = kv.write(x)
    rows[2, 8], rows[2, :8] = 0x7F, 0x77
    assert kv.read(rows, 16)[0, 0] == 2688.0 and kv.read(rows, 16)[2].isnan().all()
    back = kv.read(rows, 16, rounded=True)
    assert back[0, 0] == 448.0 and back[1, :2].tolist() == [6 * 2.0**-9, -2 * 2.0**-9]
    assert not back[2].any()
    grad_in = torch.randn(2, 128, requires_grad=True)
    out = kv.round_trip(grad_in, rounded=True)
    assert torch.equal(out, kv.read(kv.write(grad_in), 128, rounded=True))
    (out * 3).sum().backward()
    assert (grad_in.grad == 3).all()


def test_round_e4m3():
    x = torch.tensor([1.0625, 1.1875, -1.1875, 449.0, 1e9, -1e9, 2.0**-10, 3 * 2.0**-10])
    assert kv.round_e4m3(x).tolist() == [1.0, 1.25, -1.25, 448.0, 448.0, -448.0, 0.0, 2.0**-8]
    assert kv.round_e4m3(x.bfloat16()).dtype == torch.bfloat16

"""The NVFP4 KV row: layout, fixed global scale, independence of rows, straight-through gradient."""

import pytest
import torch

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

"""Golden vectors of every rule in `quant.nvfp4`, then properties that hold for any tensor."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits.quant import nvfp4
from samebits.quant.nvfp4 import NonFiniteWeight, NVFP4Tensor
from samebits.quant.roles import Role

ONE = torch.ones(())


def block(*values: float) -> torch.Tensor:
    """One block of 16 that starts with `values`."""
    return torch.tensor(list(values) + [0.0] * (16 - len(values)))


def codes(t: NVFP4Tensor) -> list[int]:
    return nvfp4.unpack(t.codes).tolist()


@pytest.mark.parametrize(
    ("value", "code"),
    [(0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5.0, 6)],
)
def test_ties_go_to_the_even_code(value, code):
    assert nvfp4.encode_e2m1(torch.tensor([value, -value])).tolist() == [code, code | 8]
    above, below = (torch.nextafter(torch.tensor(value), torch.tensor(x)) for x in (9.0, 0.0))
    lower = nvfp4.E2M1_VALUES.index(max(v for v in nvfp4.E2M1_VALUES if v < value))
    assert nvfp4.encode_e2m1(torch.stack((below, above))).tolist() == [lower, lower + 1]


def test_each_value_has_its_own_code_and_saturation():
    values = torch.tensor(nvfp4.E2M1_VALUES)
    assert nvfp4.encode_e2m1(values).tolist() == list(range(8))
    assert nvfp4.encode_e2m1(-values).tolist() == [0, *range(9, 16)]
    assert nvfp4.encode_e2m1(torch.tensor([6.5, 1e30, -1e30])).tolist() == [7, 7, 15]
    assert nvfp4.decode_e2m1(torch.arange(16, dtype=torch.uint8)).tolist() == [*nvfp4.E2M1_VALUES, *(-v for v in nvfp4.E2M1_VALUES)]


def test_sign_of_zero():
    assert nvfp4.encode_e2m1(torch.tensor([0.0, -0.0, 0.2, -0.2])).tolist() == [0, 0, 0, 8]
    # Codes decide the sign of a dequantized zero, and no arithmetic is to notice: -0.0 equals 0.0.
    assert nvfp4.dequantize(nvfp4.quantize(block(6.0, -0.2), ONE))[1].item() == 0.0


def test_packing_puts_the_even_element_in_the_low_nibble():
    raw = torch.arange(16, dtype=torch.uint8)
    packed = nvfp4.pack(raw)
    assert packed.tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    assert torch.equal(nvfp4.unpack(packed), raw)


def test_golden_block_under_global_scale_one():
    # Block amax 12 gives scale 2 (E4M3 byte 0x40); values are then halves of what they were.
    t = nvfp4.quantize(block(12.0, 6.0, -4.0, 1.0, 0.5, 9.9, 10.0, -0.0), ONE)
    assert t.block_scales.tolist() == [0x40]
    # 12/2=6, 3, -2, .5, .25 (tie to 0), 4.95 (to 4), 5 (tie to 4), -0.
    assert codes(t)[:8] == [7, 5, 12, 1, 0, 6, 6, 0]
    assert nvfp4.dequantize(t)[:8].tolist() == [12.0, 6.0, -4.0, 1.0, 0.0, 8.0, 8.0, 0.0]


def test_global_scale_is_amax_over_2688():
    w = torch.zeros(2, 32)
    w[1, 20] = -2688.0
    w[0, 0] = 6.0
    t = nvfp4.quantize(w)
    assert t.global_scale.item() == 1.0 and t.global_scale.dtype == torch.float32
    assert t.block_scales.tolist() == [[0x38, 0x38], [0x38, 0x7E]]  # 1, zero block; zero block, 448
    assert nvfp4.quantize(w * 0.5).global_scale.item() == 0.5
    assert nvfp4.global_scale(torch.tensor([0.0, 1344.0])).tolist() == [1.0, 0.5]


def test_block_scale_rounds_to_nearest_even_e4m3():
    # amax/6 of 1.0625 lies between the E4M3 neighbours 1.0 (0x38) and 1.125 (0x39); 1.1875 between 0x39 and 0x3A.
    assert nvfp4.quantize(block(6 * 1.0625), ONE).block_scales.item() == 0x38
    assert nvfp4.quantize(block(6 * 1.1875), ONE).block_scales.item() == 0x3A
    assert nvfp4.quantize(block(6 * 1.0630), ONE).block_scales.item() == 0x39


def test_block_scale_saturates_at_448_and_codes_at_6():
    t = nvfp4.quantize(block(1e6, 2688.0, 1344.0), ONE)
    assert t.block_scales.item() == 0x7E
    assert codes(t)[:3] == [7, 7, 5]


def test_zero_block_has_scale_byte_0x38():
    t = nvfp4.quantize(torch.cat((block(), block(3.0))), ONE)
    assert t.block_scales.tolist() == [0x38, 0x30]
    assert t.codes[:8].tolist() == [0] * 8


def test_zero_tensor_has_global_scale_one():
    t = nvfp4.quantize(torch.zeros(3, 48))
    assert t.global_scale.item() == 1.0
    assert set(t.block_scales.flatten().tolist()) == {0x38} and not t.codes.any()


def test_tiny_block_takes_the_smallest_scale_and_keeps_what_it_can():
    # Under global scale 1 the smallest E4M3, 2^-9, has smallest non-zero value 2^-10.
    t = nvfp4.quantize(block(2.0**-10, 2.0**-11, 0.9 * 2.0**-11), ONE)
    assert t.block_scales.item() == 0x01
    assert codes(t)[:3] == [1, 0, 0]
    assert nvfp4.dequantize(t)[0].item() == 2.0**-10
    # A tensor of amax 0.1 with a block of amax 5.5e-5: the packer keeps the block, a trainer that zeroes it disagrees.
    w = torch.cat((block(0.1), block(5.5e-5)))
    kept = nvfp4.dequantize(nvfp4.quantize(w))[16].item()
    assert kept == pytest.approx(5.58e-5, rel=2e-3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_weights_raise_with_the_name(bad):
    with pytest.raises(NonFiniteWeight, match=r"model\.layers\.3\.q: holds NaN or infinity"):
        nvfp4.quantize(block(1.0, bad), name="model.layers.3.q")


@pytest.mark.parametrize("shape", [(), (15,), (4, 17), (2, 8)])
def test_last_dimension_must_be_a_multiple_of_16(shape):
    with pytest.raises(ValueError, match="multiple of 16"):
        nvfp4.quantize(torch.ones(shape))


def test_stack_of_experts_has_one_global_scale_each():
    w = torch.stack([torch.full((4, 32), float(e + 1)) for e in range(3)])
    scale = nvfp4.global_scale(w.abs().amax((1, 2)))
    t = nvfp4.quantize(w, scale)
    assert t.codes.shape == (3, 4, 16) and t.block_scales.shape == (3, 4, 2) and t.global_scale.shape == (3,)
    for e in range(3):
        alone = nvfp4.quantize(w[e])
        assert torch.equal(t.codes[e], alone.codes) and torch.equal(t.block_scales[e], alone.block_scales)
        assert t.global_scale[e] == alone.global_scale
    assert torch.equal(nvfp4.dequantize(t)[2], nvfp4.dequantize(nvfp4.quantize(w[2])))


def test_a_stack_takes_one_global_scale_for_each_matrix_by_default():
    w = torch.randn(3, 4, 32, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 100.0, 0.01])[:, None, None]
    t = nvfp4.quantize(w)
    assert torch.equal(t.global_scale, nvfp4.global_scale(w.abs().amax((1, 2))))
    given = nvfp4.quantize(w, t.global_scale)
    assert torch.equal(t.codes, given.codes) and torch.equal(t.block_scales, given.block_scales)
    assert nvfp4.quantize(w[0]).global_scale.shape == () and nvfp4.quantize(w[0, 0]).global_scale.shape == ()
    assert nvfp4.quantize(w[:0]).global_scale.shape == (0,) and nvfp4.quantize(w[:, :0]).codes.shape == (3, 0, 16)


@pytest.mark.parametrize("stack", [(), (3,)])
def test_gate_and_up_of_an_expert_share_the_larger_scale_and_down_has_its_own(stack):
    g = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(*stack, 8, 32, generator=g) for _ in range(2))
    up = up * 10 if not stack else up * torch.tensor([10.0, 0.1, 1.0])[:, None, None]
    down = torch.randn(*stack, 32, 16, generator=g) * 7
    experts = nvfp4.quantize_experts({Role.EXPERT_GATE: gate, Role.EXPERT_UP: up, Role.EXPERT_DOWN: down})
    shared = nvfp4.global_scale(torch.maximum(gate.abs().amax((-2, -1)), up.abs().amax((-2, -1))))
    assert torch.equal(experts[Role.EXPERT_GATE].global_scale, shared) and shared.shape == stack
    assert torch.equal(experts[Role.EXPERT_UP].global_scale, shared)
    assert torch.equal(experts[Role.EXPERT_DOWN].global_scale, nvfp4.global_scale(down.abs().amax((-2, -1))))
    want = nvfp4.quantize(gate, shared)
    assert torch.equal(experts[Role.EXPERT_GATE].codes, want.codes)
    assert torch.equal(experts[Role.EXPERT_GATE].block_scales, want.block_scales)
    alone = nvfp4.quantize_experts({Role.EXPERT_UP: up})[Role.EXPERT_UP]
    assert torch.equal(alone.global_scale, nvfp4.global_scale(up.abs().amax((-2, -1))))
    with pytest.raises(NonFiniteWeight, match=r"layer 3\.expert\.up: holds NaN"):
        nvfp4.quantize_experts({Role.EXPERT_GATE: gate, Role.EXPERT_UP: up / 0}, "layer 3")


@pytest.mark.parametrize("rows", [1, 7, 8193])
def test_pieces_of_the_work_do_not_show(rows):
    """More rows than fit one piece: each row as if alone, in every dtype."""
    w = torch.randn(rows, 32, generator=torch.Generator().manual_seed(rows)) * 3
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x, g = w.to(dtype), torch.tensor(0.01)
        t, last = nvfp4.quantize(x, g), nvfp4.quantize(x[-1], g)
        assert torch.equal(t.codes[-1], last.codes) and torch.equal(t.block_scales[-1], last.block_scales)
        assert torch.equal(nvfp4.dequantize(t)[-1], nvfp4.dequantize(last))
        half = nvfp4.quantize(x[: rows // 2], g)
        assert torch.equal(t.codes[: rows // 2], half.codes)


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_change_nothing_in_any_mode(threads):
    w = torch.randn(9000, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        plain = nvfp4.quantize(w)
        with torch.inference_mode():
            inside = nvfp4.quantize(w)
            values = nvfp4.dequantize(inside)
    finally:
        torch.set_num_threads(before)
    rows = [0, 4567, 8999]
    few = nvfp4.quantize(w[rows], plain.global_scale)
    assert torch.equal(plain.codes, inside.codes) and torch.equal(plain.codes[rows], few.codes)
    assert torch.equal(values, nvfp4.dequantize(plain)) and torch.equal(values[rows], nvfp4.dequantize(few))
    bad = w.clone()
    bad[8999, 63] = float("nan")
    with pytest.raises(NonFiniteWeight):
        nvfp4.quantize(bad)


def test_a_view_is_not_written_to_and_order_in_memory_does_not_matter():
    w = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
    before = w.clone()
    assert torch.equal(nvfp4.quantize(w.t()).codes, nvfp4.quantize(w.t().contiguous()).codes)
    nvfp4.quantize(w.requires_grad_().t())
    nvfp4.encode_e2m1(w)
    assert torch.equal(w, before)


def test_bf16_weights_quantize_as_their_fp32_values():
    w = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    a, b = nvfp4.quantize(w), nvfp4.quantize(w.float())
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def tensors(rows: int = 4, blocks: int = 3) -> st.SearchStrategy[torch.Tensor]:
    """Matrices whose blocks differ in size by many powers of two, zeros among them."""

    def make(seed: int, spread: float) -> torch.Tensor:
        g = torch.Generator().manual_seed(seed)
        w = torch.randn(rows, blocks * 16, generator=g)
        size = torch.exp2(torch.randn(rows, blocks, 1, generator=g) * spread)
        size *= torch.rand(rows, blocks, 1, generator=g) > 0.2
        return (w.unflatten(-1, (blocks, 16)) * size).flatten(-2)

    return st.builds(make, st.integers(0, 2**31), st.floats(0.0, 5.0))


@settings(max_examples=40, deadline=None)
@given(tensors())
def test_quantizing_dequantized_values_again_changes_nothing(w):
    first = nvfp4.quantize(w)
    again = nvfp4.quantize(nvfp4.dequantize(first), first.global_scale)
    codes, codes_again = (nvfp4.unpack(t.codes).unflatten(-1, (-1, 16)) for t in (first, again))
    # Two exceptions, both at scales near the smallest: under scale byte 2 (2^-8) a block's largest code can fall to 4 and its
    # scale then to byte 1; and a block whose codes all fell to 0 is a block of zeros the second time.
    stable = (first.block_scales != 2) & (codes & 7).ne(0).any(-1)
    assert torch.equal(first.block_scales[stable], again.block_scales[stable])
    codes = codes.masked_fill(codes == 8, 0)  # a negative value that rounded to zero has lost its sign
    assert torch.equal(codes[stable], codes_again[stable])
    assert (first.block_scales[~stable] <= 2).logical_or(first.block_scales[~stable] == 0x38).all()


def _half_step(w: torch.Tensor, t: NVFP4Tensor) -> torch.Tensor:
    """Half the distance of the two codes around each element, in its block's scale."""
    s = (t.block_scales.view(torch.float8_e4m3fn).float() * t.global_scale).repeat_interleave(16, -1)
    ratio = (w / s).abs()
    step = torch.where(ratio < 2, 0.5, torch.where(ratio < 4, 1.0, 2.0))
    return step / 2 * s * (1 + 1e-6)


@settings(max_examples=40, deadline=None)
@given(tensors())
def test_error_is_at_most_half_a_step(w):
    t = nvfp4.quantize(w)
    s = (t.block_scales.view(torch.float8_e4m3fn).float() * t.global_scale).repeat_interleave(16, -1)
    saturated = w.abs() > 6 * s  # the scale was rounded down: at most 1/16 beyond the largest code
    assert (w.abs() <= 6 * s * (1 + 1 / 15))[s > nvfp4.E4M3_TINY * t.global_scale * 8].all()
    error = (nvfp4.dequantize(t) - w).abs()
    assert (error <= _half_step(w, t))[~saturated].all()


@settings(max_examples=30, deadline=None)
@given(tensors(rows=6), st.permutations(range(6)))
def test_permuting_rows_permutes_bytes(w, order):
    a, b = nvfp4.quantize(w), nvfp4.quantize(w[list(order)])
    assert torch.equal(a.codes[list(order)], b.codes)
    assert torch.equal(a.block_scales[list(order)], b.block_scales)
    assert torch.equal(a.global_scale, b.global_scale)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31))
def test_any_bytes_survive_pack_and_unpack(seed):
    raw = torch.randint(0, 256, (3, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(nvfp4.pack(nvfp4.unpack(raw)), raw)

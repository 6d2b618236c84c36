"""Which cuts an MXFP8 layer takes: any number of tokens keeps to one kind of matrix instruction, and large tiles to the fewest waves."""

from importlib.util import find_spec

import pytest

if not find_spec("triton"):
    pytest.skip("needs Triton", allow_module_level=True)

import torch

from samebits.kernels import mlp_fused, triton_linear
from samebits.kernels.triton_linear import LARGE_CUTS, chunk_time, cut_of
from samebits.kernels.triton_moe import LARGE, Cut, whole_programs

OUTPUTS = (64, 1024, 3072, 4992, 6144, 9216, 9856, 24576)
SMALL, BIG = LARGE_CUTS


@pytest.mark.parametrize("at_once", [2, 78, 132])
def test_no_number_of_tokens_leaves_wgmma(at_once):
    for tokens in [*range(1, 300), *range(300, 20000, 97)]:
        for outputs in OUTPUTS:
            cut = cut_of(tokens, outputs, at_once)
            # wgmma: a warpgroup multiplies 64 rows by a multiple of 8 tokens; quarters of a tile come with the copy engine.
            assert cut.rows % 64 == 0 and cut.warps % 4 == 0 and cut.rows // 64 * 4 >= cut.warps, (tokens, outputs)
            assert cut.tokens % (32 if cut.tokens >= LARGE else 8) == 0, (tokens, outputs)


def test_gate_and_up_together_are_as_many_rows_as_down(monkeypatch):
    monkeypatch.setattr(mlp_fused, "multiprocessors", lambda device: 132)
    for tokens in (1, 20, 64, 65, 512, 4096):
        inner, down = mlp_fused.mlp_cuts(torch.empty(tokens, 0), 6144)
        assert inner.tokens == down.tokens and 2 * inner.rows == down.rows and 2 * inner.rows % 64 == 0


@pytest.mark.parametrize(
    ("programs", "whole"),
    # A last wave of half the multiprocessors or fewer is cut; what does not fill one wave is left alone.
    [(72, 72), (132, 132), (133, 132), (154, 132), (198, 132), (199, 199), (308, 264), (1232, 1188)],
)
def test_last_waves(programs, whole):
    assert whole_programs(programs, 132) == whole


def test_waves_are_counted():
    small, big = LARGE_CUTS.values()
    # 308 programs: two waves of whole tiles, 44 tiles in 176 quarters; 154: one, and 22 in 88.
    assert chunk_time(512, 9856, SMALL, 132) == 2 * small[0] + 2 * small[1]
    assert chunk_time(512, 9856, BIG, 132) == big[0] + big[1]
    # 216 of the smaller, and 144 of the larger: a last wave of 84 is a whole one.
    assert chunk_time(300, 9216, SMALL, 132) == 2 * small[0]
    assert chunk_time(300, 9216, BIG, 132) == big[0] + big[1]


@pytest.mark.parametrize(
    ("tokens", "outputs", "cut"),
    [
        (16, 9856, Cut(16, 64, 4, 4)),
        (17, 9856, Cut(32, 64, 4, 4)),
        (64, 9856, Cut(64, 64, 4, 5)),
        (65, 9856, SMALL),
        (256, 6144, SMALL),
        (384, 9216, SMALL),
        (512, 9856, BIG),
        (512, 6144, BIG),
        (1024, 9216, BIG),
        (8192, 6144, BIG),
    ],
)
def test_cuts_of_an_h200(tokens, outputs, cut):
    assert cut_of(tokens, outputs, 132) == cut


def test_a_layer_asks_for_its_device(monkeypatch):
    asked = []
    monkeypatch.setattr(triton_linear, "multiprocessors", lambda device: asked.append(device) or 132)

    def stop(tokens, outputs, at_once):
        raise LookupError((tokens, outputs, at_once))

    monkeypatch.setattr(triton_linear, "cut_of", stop)
    weight = triton_linear.MXFP8Tiles(torch.zeros(1, 7, 16, dtype=torch.int64), torch.zeros(1, 7, dtype=torch.int32), 128)
    with pytest.raises(LookupError, match="\\(3, 7, 132\\)"):
        triton_linear.fused_linear(torch.zeros(3, 128, dtype=torch.bfloat16), weight, None, None)
    assert asked == [torch.device("cpu")]

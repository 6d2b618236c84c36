"""How many programs compute index scores: what is launched, without a GPU."""

import pytest
import torch

from samebits.kernels import triton_msa
from samebits.kernels.msa_ops import Pages, batch_of
from samebits.quant import kv


@pytest.mark.parametrize(
    ("requests", "blocks", "form", "grid"),
    [
        (32, 1024, "nvfp4", (49, 32, 1)),  # 21 blocks each: 1568 programs of the 12 x 132 that are resident
        (13, 1024, "nvfp4", (114, 13, 1)),  # 9 blocks each
        (12, 1024, "nvfp4", (342, 12, 1)),  # fewer than 8 blocks for each that is resident: 3 blocks
        (32, 256, "nvfp4", (128, 32, 1)),  # 2 blocks
        (32, 1024, "bf16", (128, 32, 1)),  # no registers to give back
    ],
)
def test_programs_of_long_scores_are_those_that_are_resident(requests, blocks, form, grid, monkeypatch):
    launched = []

    class Recorded:
        def __getitem__(self, asked):
            launched.append(asked)
            return lambda *arguments, **options: None

    monkeypatch.setattr(triton_msa, "score_kernel", Recorded())
    monkeypatch.setattr(triton_msa, "_multiprocessors", lambda device: 132)
    shape, dtype = (kv.index_page_shape(1, 128), torch.uint8) if form == "nvfp4" else ((1, 128, 128), torch.bfloat16)
    pages = Pages(torch.zeros(shape, dtype=dtype), torch.zeros(requests, blocks, dtype=torch.int32))
    batch = batch_of([1] * requests, [128 * blocks] * requests, device="cpu")
    triton_msa.index_scores(torch.zeros(requests, 4, 128, dtype=torch.bfloat16), pages, batch)
    assert launched == [grid]

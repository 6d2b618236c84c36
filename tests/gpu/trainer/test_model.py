"""The training model on a GPU: attention on the kernels beside the torch path, and independent of what else is in the batch."""

import pytest
import torch

from samebits.kernels import taps
from samebits.quant.adapter import target_roles
from samebits.quant.checkpoint import Checkpoint
from samebits.quant.profile import get_profile
from samebits.trainer import model as model_module
from samebits.trainer.lora import LoRASettings
from samebits.trainer.model import M3ForTraining
from samebits.trainer.packed import attend, kernels_attend, sequences
from tests.support import random_m3

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
LENGTHS = [7, 5 * 128 + 61, 130, 1100]  # more than the 4 blocks that are chosen, and fewer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    pytest.importorskip("triton")
    settings = LoRASettings(rank=8, alpha=24.0, roles=target_roles("all"), seed=3)
    built = M3ForTraining(Checkpoint(random_m3.build(tmp_path_factory.mktemp("m3"))), get_profile("w4a16", "nvfp4"), settings)
    g = torch.Generator().manual_seed(5)
    for name, parameter in built.adapter_parameters():
        if name.endswith("lora_B"):
            parameter.data.copy_(torch.randn(parameter.shape, generator=g) * 0.3 / parameter.shape[-1])
    return built.cuda()


def batch(lengths):
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, random_m3.SIZES["vocab"], (sum(lengths),), generator=g).cuda()
    return tokens, list(lengths), tokens.roll(-1), torch.ones(sum(lengths), device="cuda")


def run(model, routes=None, blocks=None):
    """Output, attention's points and the adapter's gradient."""
    model.zero_grad()
    with taps.record(lambda point: "self_attn" in point) as recorder:
        out = model(*batch(LENGTHS), routes=routes, blocks=blocks, capture=True)
    (out.logprobs * torch.linspace(-1, 1, sum(LENGTHS), device="cuda")).sum().backward()
    grad = torch.cat([p.grad.flatten() for _, p in model.adapter_parameters()])
    return out, recorder.tensors(), grad


def distance(have, want):
    return ((have.float() - want.float()).norm() / want.float().norm()).item()


def test_the_kernels_agree_with_the_torch_path_within_bf16_rounding(model, monkeypatch):
    """The same routes and blocks on both, since a choice is a jump."""
    assert kernels_attend(model.dims, model.compute_dtype, torch.device("cuda"))
    out, points, grad = run(model)
    monkeypatch.setattr(model_module, "kernels_attend", lambda *_: False)
    want, want_points, want_grad = run(model, out.routes, out.blocks)
    assert list(points) == list(want_points) and torch.equal(out.blocks, want.blocks)
    for point, value in points.items():
        assert value.shape == want_points[point].shape, point
        # Layer 0 has the same input; later ones that of layers which rounded otherwise, and K and V in steps of NVFP4.
        if not point.endswith("blocks"):
            assert distance(value, want_points[point]) < (0.01 if ".0." in point else 0.1), point
    assert (out.logprobs - want.logprobs).abs().median() < 0.02
    assert torch.nn.functional.cosine_similarity(grad, want_grad, dim=0) > 0.98


def test_attention_of_a_sequence_has_the_same_bits_in_every_batch(model):
    _, points, _ = run(model)
    starts = [sum(LENGTHS[:i]) for i in range(len(LENGTHS) + 1)]
    for layer in range(model.dims.shape.layers):
        prefix = f"model.layers.{layer}.self_attn."
        q, k, v = (points[prefix + n].cuda() for n in "qkv")
        config = model.dims.sparse if layer in model.dims.sparse_layers else None
        index_q, index_k = (points[prefix + n].cuda() if config else None for n in ("index_q", "index_k"))
        for members in ([0], [1], [3], [1, 2], [3, 0]):
            rows = torch.cat([torch.arange(starts[m], starts[m + 1], device="cuda") for m in members])
            seqs = sequences([LENGTHS[m] for m in members], model.dims, True, torch.device("cuda"))
            index = (index_q[rows], index_k[rows, 0]) if config else (None, None)
            out, chosen = attend(q[rows], k[rows], v[rows], seqs, model.dims.shape.head_dim**-0.5, *index, config, None)
            assert torch.equal(out.flatten(1).cpu(), points[prefix + "attention"][rows.cpu()]), (layer, members)
            if config:
                assert torch.equal(chosen.cpu(), points[prefix + "blocks"][rows.cpu()]), (layer, members)

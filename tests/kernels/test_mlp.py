"""The MLP, and the shared expert beside the routed ones: the torch path against its parts, the Triton path in the interpreter."""

from importlib.util import find_spec

import pytest
import torch

from samebits.kernels.activation import SwiGLU, swiglu_oai_halves
from samebits.kernels.expert_tiles import expert_of, pack_experts, pack_experts_on, takes_tiles
from samebits.kernels.linear import LoRA, lora_linear
from samebits.kernels.linear_tiles import pack_linear
from samebits.kernels.mlp import MLPLoRA, SharedExpert, mlp, mlp_activation, moe_with_shared
from samebits.kernels.moe import moe
from samebits.kernels.taps import record
from samebits.quant import mxfp8, nvfp4
from tests.support.interpreter import interpreted

G = torch.Generator().manual_seed(0)
ACT, H, I = SwiGLU(), 64, 96  # noqa: E741


def stacked(*parts: mxfp8.MXFP8Tensor) -> mxfp8.MXFP8Tensor:
    return mxfp8.MXFP8Tensor(*(torch.cat(p) for p in zip(*parts, strict=True)))


@pytest.fixture(scope="module")
def case():
    """(gate, up, down) in MXFP8 and their adapters; up is five times gate."""
    gate, up = (mxfp8.quantize(torch.randn(I, H, generator=G) * s / H**0.5) for s in (1, 5))
    down = mxfp8.quantize(torch.randn(H, I, generator=G) / I**0.5)
    lora = MLPLoRA(*(LoRA(torch.randn(2, 4, k, generator=G), torch.randn(2, n, 4, generator=G)) for n, k in ((I, H), (I, H), (H, I))))
    return gate, up, down, lora


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tiles", [False, True])
def test_mlp_is_its_parts(case, dtype, tiles):
    gate, up, down, lora = case
    x, slots = torch.randn(7, H, generator=G).to(dtype), torch.tensor([0, 1, -1, 0, 1, 1, -1])
    weights = [pack_linear(w) if tiles else w for w in (stacked(gate, up), down)]
    for adapters, which in ((None, None), (lora, None), (lora, slots), (MLPLoRA(None, lora.up, None), slots)):
        g, u, d = adapters or (None, None, None)
        act = swiglu_oai_halves(lora_linear(x, gate, g, which), lora_linear(x, up, u, which), ACT).to(dtype)
        with record() as recorder:
            out = mlp(x, *weights, ACT, adapters, which, point="here.")
        assert torch.equal(out, lora_linear(act, down, d, which))
        assert torch.equal(mlp_activation(x, weights[0], ACT, adapters, which), act)
        seen = recorder.tensors()
        assert list(seen) == ["here.activation", "here.down_proj"]
        assert torch.equal(seen["here.activation"], act) and torch.equal(seen["here.down_proj"], out)


def test_moe_with_shared_is_the_sum_of_both(case):
    gate, up, down, lora = case
    w13, w2 = nvfp4.quantize(torch.randn(4, 2 * I, H, generator=G)), nvfp4.quantize(torch.randn(4, H, I, generator=G))
    x = torch.randn(6, H, generator=G).bfloat16()
    ids, weights = torch.tensor([[0, 2], [3, 1], [1, 2]]).repeat(2, 1), torch.rand(6, 2, generator=G)
    shared = SharedExpert(stacked(gate, up), down, lora)
    with record() as recorder:
        out = moe_with_shared(x, w13, w2, ids, weights, shared, ACT, point="m.")
    want = moe(x, w13, w2, ids, weights, ACT) + mlp(x, shared.gate_up, down, ACT, lora)
    assert out.dtype is torch.bfloat16 and torch.equal(out, want)
    assert list(recorder.tensors()) == ["m.experts", "m.shared_experts.activation", "m.shared_experts.down_proj"]
    packed = SharedExpert(pack_linear(shared.gate_up), pack_linear(down), lora)
    assert torch.equal(moe_with_shared(x, pack_experts(w13), pack_experts(w2), ids, weights, packed, ACT), want)


def test_an_expert_is_unpacked_alone(monkeypatch):
    from samebits.kernels import expert_tiles

    packed = nvfp4.quantize(torch.randn(3, 48, 160, generator=G) * torch.tensor([1.0, 5, 25])[:, None, None])
    tiles = pack_experts(packed)
    again = pack_experts_on(torch.device("cpu"), packed)
    assert again.inputs == tiles.inputs and all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(again[:3], tiles[:3], strict=True))
    with pytest.raises(ValueError, match="^w2: needs a stack"):
        pack_experts_on(torch.device("cpu"), packed._replace(global_scale=torch.tensor(1.0)), "w2")
    unpacked = []
    inner = expert_tiles.unpack_experts
    monkeypatch.setattr(expert_tiles, "unpack_experts", lambda t: unpacked.append(len(t.codes)) or inner(t))
    for e in range(3):
        assert all(torch.equal(have, want[e]) for have, want in zip(expert_of(tiles, e), packed, strict=True))
    assert unpacked == [1, 1, 1]


def test_only_bf16_on_a_hopper_gpu_takes_tiles(monkeypatch):
    assert not takes_tiles("cpu", torch.bfloat16) and not takes_tiles("cuda", torch.float32)
    from samebits.kernels import expert_tiles

    monkeypatch.setattr(expert_tiles, "fast_path", lambda x: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(expert_tiles.torch, "empty", lambda *a, **k: None)
    for capability, wanted in (((8, 9), False), ((9, 0), True), ((10, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert takes_tiles("cuda", torch.bfloat16) is wanted


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_kernels_in_the_interpreter_compute_what_the_torch_path_does():
    assert interpreted("tests.kernels.interpret_mlp") == "as the torch path"

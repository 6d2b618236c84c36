"""The training model on a GPU over tiles: logprobs and gradients beside the torch path's, bits in any batch, memory, FSDP2."""

from pathlib import Path

import pytest
import torch

from samebits.kernels.expert_tiles import NVFP4Tiles
from samebits.kernels.mlp import moe_with_shared
from samebits.quant.adapter import target_roles
from samebits.quant.checkpoint import Checkpoint
from samebits.quant.profile import get_profile
from samebits.trainer.base import PackedBase
from samebits.trainer.lora import LoRASettings
from samebits.trainer.model import M3ForTraining
from tests.support import random_m3
from tests.support.ranks import SHARDS_BYTES, on_ranks

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
DEVICE = torch.device("cuda")
SIZES = dict(vocab=512, hidden=512, heads=8, kv_heads=2, layers=3, experts=16, top_k=4, intermediate=768, dense=1024, blocks=4)
LENGTHS = (5, 230, 61)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return random_m3.build(tmp_path_factory.mktemp("m3") / "model", **SIZES)


def build(folder, tiles: bool = True, profile: str = "w4a16", wrap=None) -> M3ForTraining:
    """The model on the GPU, with an adapter that matters; the same for each way to hold the base."""
    settings = LoRASettings(rank=8, alpha=16, roles=target_roles("all"), seed=3)

    def placed(module):
        if wrap is None:
            module.to(DEVICE)
        else:
            wrap(module)

    model = M3ForTraining(Checkpoint(folder), get_profile(profile), settings, wrap=placed, pack_on=DEVICE if tiles else None)
    for at, (name, parameter) in enumerate(model.adapter_parameters()):
        if name.endswith("lora_B"):
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(at)) * 0.1
            local.data.copy_(values.to(DEVICE))
    return model


def batch():
    total = sum(LENGTHS)
    tokens = torch.randint(0, SIZES["vocab"], (total,), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    return tokens, list(LENGTHS), tokens.roll(-1), torch.ones(total, device=DEVICE)


def memory(which: str = "current") -> int:
    """Bytes that were asked for, without what the allocator rounds up."""
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()[f"requested_bytes.all.{which}"]


def step(model: M3ForTraining, routes=None, blocks=None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probabilities and gradients of all masters, for a fixed direction."""
    for _, parameter in model.adapter_parameters():
        parameter.grad = None
    out = model(*batch(), routes=routes, blocks=blocks)
    direction = torch.randn(len(out.logprobs), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(2))
    (out.logprobs * direction).sum().backward()
    whole = {n: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for n, p in model.adapter_parameters()}
    return out.logprobs.detach(), {n: g.clone() for n, g in whole.items()}


def distance(have: torch.Tensor, want: torch.Tensor) -> float:
    return ((have.double() - want.double()).norm() / want.double().norm()).item()


def test_logprobs_and_gradients_are_as_near_to_fp32_as_the_torch_path(folder):
    exact = build(folder, tiles=False, profile="w4a16-fp32")
    with torch.no_grad():
        choices = exact(*batch(), capture=True)
    replay = choices.routes, choices.blocks
    (want, want_grads), (torch_path, torch_grads), (tiles, grads) = (
        step(model, *replay) for model in (exact, build(folder, tiles=False), build(folder))
    )
    assert distance(tiles, want) < 2 * distance(torch_path, want) < 0.03
    assert (tiles - torch_path).abs().max() < 0.2 and distance(tiles, torch_path) < 0.02
    for name, grad in grads.items():
        assert grad.dtype is torch.float32
        assert distance(grad, want_grads[name]) < 2 * distance(torch_grads[name], want_grads[name]) + 3e-3, name
    experts = torch.cat([grads[n].flatten() for n in grads if "EXPERT" in n])
    assert len(experts) == 2 * 16 * 3 * 8 * (512 + 768) and not torch.equal(experts, experts.bfloat16().float())


def test_bits_of_experts_and_mlps_do_not_depend_on_what_is_packed_beside(folder):
    model = build(folder)
    x = torch.randn(300, SIZES["hidden"], device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(4)).bfloat16()
    ids = torch.randn(300, 16, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(5)).topk(4, 1).indices
    weights = torch.rand(300, 4, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(6))
    dense, layer = model.layers[0], model.layers[1]
    mlp, lora = layer.mlp, layer.lora

    def sparse(part: slice) -> torch.Tensor:
        return moe_with_shared(
            x[part], mlp.w13.value(), mlp.w2.value(), ids[part], weights[part], mlp.shared.operands(lora), mlp.dims.activation,
            mlp._expert_lora(lora),
        )  # fmt: skip

    with torch.no_grad():
        for call in (sparse, lambda part: dense.mlp(x[part], dense.lora)):
            whole = call(slice(None))
            for part in (slice(0, 1), slice(5, 235), slice(235, 296)):
                assert torch.equal(call(part), whole[part])


def test_the_base_takes_a_third_of_bf16_and_no_copy_is_made(folder):
    before = memory()
    torch.cuda.reset_peak_memory_stats()
    model = build(folder)
    built, peak = memory() - before, memory("peak") - before
    base = [m for m in model.modules() if isinstance(m, PackedBase)]
    held = sum(p.nbytes for m in base for p in m.parameters())
    names = {n: [t.shape for t in (w if isinstance(w, tuple) else (w,))] for n, w in model.base_weights()}
    experts = 2 * sum(s[0][0] * s[0][1] * 2 for n, s in names.items() if ".experts." in n)
    others = 2 * sum(s[0].numel() for n, s in names.items() if ".experts." not in n)
    adapters = sum(p.nbytes for _, p in model.adapter_parameters())
    layer = experts // 2
    print(f"base {held / 1e6:.1f} MB, bf16 {(experts + others) / 1e6:.1f} MB, built {built / 1e6:.1f} MB, peak {peak / 1e6:.1f} MB")
    assert held <= 0.35 * (experts + others) and built < held + adapters + 2**20
    assert peak < built + layer // 2  # less than half of one layer's experts in bf16 on top
    step(model)
    start = memory()
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        model(*batch())
    forward = memory("peak") - start
    print(f"forward of {sum(LENGTHS)} tokens: {forward / 1e6:.1f} MB; a layer's experts in bf16: {layer / 1e6:.1f} MB")
    assert forward < layer


def test_the_base_comes_back_byte_for_byte(folder):
    checkpoint, seen = Checkpoint(folder), 0
    model = build(folder)
    assert all(isinstance(layer.mlp.w13.value(), NVFP4Tiles) for layer in model.layers if layer.is_moe)
    for name, weight in model.base_weights():
        if "_proj" in name or ".experts." in name:
            assert all(torch.equal(a.cpu().reshape(b.shape), b) for a, b in zip(weight, checkpoint.weight(name), strict=True)), name
            seen += 1
    assert seen == 3 * 4 + 2 * 2 + 3 * 3 + 2 * 16 * 3


def test_what_is_computed_again_in_backward_changes_memory_and_no_bit(folder):
    model = build(folder)
    with torch.no_grad():
        choices = model(*batch(), capture=True)
    replay, results, kept = (choices.routes, choices.blocks), {}, {}
    for layers in (False, True):
        for experts in (False, True):
            model.checkpoint_activations(layers)
            model.recompute_experts(experts)
            results[layers, experts] = step(model, *replay)
            tokens = batch()
            start = memory()
            out = model(*tokens, *replay)
            kept[layers, experts] = memory() - start
            del out
    want, want_grads = results[False, False]
    for logprobs, grads in results.values():
        assert torch.equal(logprobs, want) and all(torch.equal(grads[n], want_grads[n]) for n in grads)
    total, i = sum(LENGTHS), SIZES["intermediate"]
    halves = 2 * (2 * total * (4 + 1) * 2 * i + total * 2 * SIZES["dense"])
    print({f"layers {a}, experts {b}": f"{k / 1e6:.1f} MB" for (a, b), k in kept.items()}, f"gate and up: {halves / 1e6:.1f} MB")
    assert abs(kept[False, False] - kept[False, True] - halves) < 2**16
    assert kept[True, False] == kept[True, True] < kept[False, True] // 3


def sharded_step(rank: int, world: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """In a process of its own, whose working directory holds the model."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cuda", (world,))
    return step(build(Path("model"), wrap=lambda module: fully_shard(module, mesh=mesh)))


@pytest.mark.skipif(not SHARDS_BYTES, reason="needs torch 2.13: FSDP2 of older releases shards no bytes")
def test_fsdp2_over_one_gpu_changes_no_bit(folder, tmp_path, monkeypatch):
    want, want_grads = step(build(folder))
    monkeypatch.chdir(folder.parent)
    ((logprobs, grads),) = on_ranks(1, sharded_step, tmp_path, "nccl")
    assert torch.equal(logprobs, want.cpu()) and grads.keys() == want_grads.keys()
    assert all(torch.equal(grads[n], g.cpu()) for n, g in want_grads.items())

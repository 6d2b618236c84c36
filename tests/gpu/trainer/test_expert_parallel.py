"""The training model on two GPUs with its experts spread over them, against one GPU: bits of logprobs, gradients, memory, off-loading."""

from pathlib import Path

import pytest
import torch

from samebits.kernels.expert_tiles import NVFP4Tiles
from samebits.quant.adapter import target_roles
from samebits.quant.checkpoint import Checkpoint
from samebits.quant.profile import get_profile
from samebits.trainer.expert_ranks import reduce
from samebits.trainer.lora import LoRASettings
from samebits.trainer.model import M3ForTraining
from tests.support import random_m3
from tests.support.ranks import SHARDS_BYTES, on_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
    pytest.mark.skipif(not SHARDS_BYTES, reason="needs torch 2.13: FSDP2 of older releases shards no bytes"),
]
DEVICE = "cuda"
SIZES = dict(vocab=512, hidden=512, heads=8, kv_heads=2, layers=3, experts=16, top_k=4, intermediate=768, dense=1024, blocks=4)
LENGTHS = ((5, 230, 61), (130, 3))  # of the two ranks


def build(folder, mesh=None, spread: bool = False) -> M3ForTraining:
    """On this rank's GPU, or sharded over a mesh, its experts spread or sharded like the rest; the same adapter for all."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, distribute_tensor

    settings = LoRASettings(rank=8, alpha=16, roles=target_roles("all"), seed=3)

    def placed(module):
        if mesh is None:
            module.to(DEVICE)
        else:
            ignored = set() if isinstance(module, M3ForTraining) else {p for p in module.parameters() if isinstance(p, DTensor)}
            fully_shard(module, mesh=mesh, ignored_params=ignored)

    profile, device = get_profile("w4a16", "nvfp4"), torch.device(DEVICE)
    model = M3ForTraining(Checkpoint(folder), profile, settings, placed, device, mesh if spread else None)
    for at, (name, parameter) in enumerate(model.adapter_parameters()):
        if name.endswith("lora_B"):
            values = (torch.randn(parameter.shape, generator=torch.Generator().manual_seed(at)) * 0.1).to(DEVICE)
            with torch.no_grad():
                parameter.copy_(values if mesh is None else distribute_tensor(values, mesh, parameter.placements))
    return model


def batch(*ranks: int):
    """The packed sequences of some ranks, and a direction for their logprobs."""
    tokens, directions = [], []
    for rank in ranks:
        g = torch.Generator().manual_seed(rank)
        tokens.append(torch.randint(0, SIZES["vocab"], (sum(LENGTHS[rank]),), generator=g))
        directions.append(torch.randn(sum(LENGTHS[rank]), generator=g))
    tokens, direction = torch.cat(tokens).to(DEVICE), torch.cat(directions).to(DEVICE)
    lengths = [n for rank in ranks for n in LENGTHS[rank]]
    return (tokens, lengths, tokens.roll(-1), torch.ones(len(tokens), device=DEVICE)), direction


def step(model: M3ForTraining, ranks: tuple[int, ...], loss_times: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logprobs (what follows a rank's last token is another thing in another packing) and gradients of all masters."""
    for _, parameter in model.adapter_parameters():
        parameter.grad = None
    arguments, direction = batch(*ranks)
    ends = torch.tensor(arguments[1]).cumsum(0) - 1
    direction[ends] = 0
    out = model(*arguments)
    (out.logprobs * direction * loss_times).sum().backward()
    for _, parameter in model.adapter_parameters():
        reduce(parameter)
    grads = {n: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for n, p in model.adapter_parameters()}
    logprobs = out.logprobs.detach().clone()
    logprobs[ends] = 0
    return logprobs, {n: g.clone() for n, g in grads.items()}


def memory(which: str = "current") -> int:
    """Bytes that were asked for, without what the allocator rounds up."""
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()[f"requested_bytes.all.{which}"]


def peak_of(call) -> int:
    """Most bytes that a call had beside what was there."""
    start = memory()
    torch.cuda.reset_peak_memory_stats()
    call()
    return memory("peak") - start


def expert_bytes(model: M3ForTraining) -> list[tuple[int, int]]:
    """(held here, whole) of the routed experts and their adapters."""
    parts = [(n, p) for n, p in model.named_parameters() if ".w13." in n or ".w2." in n or "EXPERT_" in n]
    return [(p.to_local().untyped_storage().nbytes(), p.numel() * p.element_size()) for _, p in parts]


def worker(rank: int, world: int) -> dict:
    from torch.distributed.device_mesh import init_device_mesh
    from verl.utils.fsdp_utils import fsdp2_clip_grad_norm_, load_fsdp2_model_to_gpu, offload_fsdp2_model_to_cpu

    mesh, folder = init_device_mesh(DEVICE, (world,)), Path("model")
    found: dict = {}
    one = build(folder)
    found["own"], found["all"] = step(one, (rank,), 1), step(one, tuple(range(world)), 1)
    del one
    sharded, spread = build(folder, mesh), build(folder, mesh, spread=True)
    found["kind"] = type(spread.layers[1].mlp.w13.value())
    found["held"] = expert_bytes(spread)
    found["sharded"], found["spread"] = step(sharded, (rank,), world), step(spread, (rank,), world)
    spread.checkpoint_activations()
    found["recomputed"] = step(spread, (rank,), world)
    spread.checkpoint_activations(False)
    with torch.no_grad():
        arguments, _ = batch(rank)
        found["peaks"] = [peak_of(lambda model=model: model(*arguments)) for model in (sharded, spread)]
    offload_fsdp2_model_to_cpu(spread)
    found["away"] = {p.device.type for p in spread.parameters()}
    load_fsdp2_model_to_gpu(spread)
    found["back"] = step(spread, (rank,), world)
    adapters = []
    for model in (sharded, spread):
        step(model, (rank,), world)
        optimizer = torch.optim.AdamW([p for _, p in model.adapter_parameters()], lr=1e-3)
        norm = fsdp2_clip_grad_norm_(model.parameters(), max_norm=0.5)
        optimizer.step()
        adapters.append((float(norm.full_tensor()), {n: p.detach().full_tensor().cpu() for n, p in model.adapter_parameters()}))
    found["steps"] = adapters
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    pytest.importorskip("triton")
    place = tmp_path_factory.mktemp("spread")
    random_m3.build(place / "model", **SIZES)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)  # where the processes look for the model
        return on_ranks(2, worker, place, "nccl")


def distance(have: torch.Tensor, want: torch.Tensor) -> float:
    return ((have.double() - want.double()).norm() / want.double().norm()).item()


def test_logprobs_have_the_bits_of_one_gpu(ranks):
    for rank, found in enumerate(ranks):
        for which in ("spread", "recomputed", "back"):
            assert torch.equal(found[which][0], found["own"][0]), f"rank {rank}: {which}"
        first = sum(sum(lengths) for lengths in LENGTHS[:rank])
        assert torch.equal(found["own"][0], found["all"][0][first : first + sum(LENGTHS[rank])])


def test_gradients_are_those_of_one_gpu_with_all_tokens(ranks):
    for found in ranks:
        want = found["all"][1]
        far = {n: distance(found["spread"][1][n], want[n]) for n in want}
        print(f"experts within {max(d for n, d in far.items() if 'EXPERT' in n):.2g}, all within {max(far.values()):.2g}")
        assert max(far.values()) < 1e-4, max(far, key=far.get)
        assert max(distance(found["spread"][1][n], found["sharded"][1][n]) for n in want) < 1e-4
        for which in ("recomputed", "back"):
            assert all(torch.equal(found[which][1][n], g) for n, g in found["spread"][1].items()), which


def test_a_step_after_clipping_is_that_of_fsdp_alone(ranks):
    for found in ranks:
        (norm, adapter), (spread_norm, spread) = found["steps"]
        assert spread_norm == pytest.approx(norm, rel=1e-4) and adapter.keys() == spread.keys()
        off = torch.cat([(spread[n] - t).abs().flatten() for n, t in adapter.items()])
        assert (off > 1e-5).float().mean() < 1e-3  # Adam's first step is the sign of a gradient, also of one that is rounding alone


def test_a_rank_holds_its_experts_and_gathers_none(ranks):
    for found in ranks:
        assert found["kind"] is NVFP4Tiles and all(2 * mine == whole for mine, whole in found["held"])
        assert found["away"] == {"cpu"}
        sharded, spread = found["peaks"]
        print(f"forward: {sharded / 1e6:.1f} MB more with layers gathered, {spread / 1e6:.1f} MB with experts spread")
        assert spread < sharded

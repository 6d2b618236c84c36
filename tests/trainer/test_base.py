"""The base as tiles in the training model: the same bits as stored, computed with and given back, whole and sharded over two processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from samebits.kernels.expert_tiles import NVFP4Tiles
from samebits.kernels.linear import values
from samebits.kernels.linear_tiles import MXFP8Tiles
from samebits.quant.checkpoint import Checkpoint
from samebits.quant.digests import digests
from samebits.quant.profile import get_profile
from samebits.trainer.base import PackedBase
from samebits.trainer.lora import LoRASettings
from samebits.trainer.model import M3ForTraining
from tests.support import random_m3
from tests.support.training import engine, free_port, loss_function, random_batch, start_group

# 5 experts, 3 chunks of hidden inputs, 2 of dense ones: no first dimension is even but those.
UNEVEN = dict(experts=5, hidden=320, dense=160, intermediate=96, layers=2)


def engine_module():
    """Imported where it is used: verl chooses its platform with the first import, and the plugin must come before."""
    import samebits.trainer.plugin  # noqa: F401
    from samebits.trainer import engine

    return engine


def parts(weight) -> tuple[torch.Tensor, ...]:
    return weight if isinstance(weight, tuple) else (weight,)


@pytest.fixture(scope="module")
def uneven(tmp_path_factory) -> Path:
    return random_m3.build(tmp_path_factory.mktemp("uneven") / "model", **UNEVEN)


def model_of(folder: Path, tiles: bool) -> M3ForTraining:
    from samebits.quant.adapter import target_roles

    settings = LoRASettings(rank=8, alpha=16, roles=target_roles("all"), seed=3)
    model = M3ForTraining(Checkpoint(folder), get_profile("w4a16"), settings, pack_on=torch.device("cpu") if tiles else None)
    g = torch.Generator().manual_seed(5)
    for name, parameter in model.adapter_parameters():
        if name.endswith("lora_B"):
            parameter.data.copy_(torch.randn(parameter.shape, generator=g) * 0.1)
    return model


def test_tiles_compute_and_give_back_the_same_bits(uneven, packed):
    stored, tiles = model_of(uneven, False), model_of(uneven, True)
    tokens, lengths, labels, temperature = packed(9, 20)
    results = []
    for model in (stored, tiles):
        out = model(tokens, lengths, labels, temperature)
        (out.logprobs * torch.linspace(-1, 1, 29)).sum().backward()
        results.append((out.logprobs.detach(), {n: p.grad for n, p in model.adapter_parameters()}))
    (want, want_grads), (have, grads) = results
    assert torch.equal(have, want) and all(torch.equal(grads[n], want_grads[n]) for n in want_grads)
    kinds = [type(m.value()) for m in tiles.modules() if isinstance(m, PackedBase)]
    assert kinds.count(NVFP4Tiles) == 2 and kinds.count(MXFP8Tiles) == 4 + 2 + 6 + 2
    held, base = dict(stored.base_weights()), dict(tiles.base_weights())
    assert held.keys() == base.keys() and {k for k in held if ".experts.4." in k or "gate_proj" in k}
    for name in held:
        assert type(held[name]) is type(base[name]), name
        for a, b in zip(parts(held[name]), parts(base[name]), strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b), name


def test_base_weights_are_the_checkpoint_s(uneven):
    checkpoint = Checkpoint(uneven)
    held = dict(model_of(uneven, True).base_weights())
    for name, weight in held.items():
        if "_proj" in name or ".experts." in name:
            assert all(torch.equal(a.reshape(b.shape), b) for a, b in zip(weight, checkpoint.weight(name), strict=True)), name
    assert sum("_proj" in n or ".experts." in n for n in held) == 4 + 3 + 6 + 3 + 15


def test_one_expert_at_a_time_is_unpacked(uneven, monkeypatch):
    from samebits.kernels import expert_tiles

    model = model_of(uneven, True)
    seen = []
    inner = expert_tiles.unpack_experts
    monkeypatch.setattr(expert_tiles, "unpack_experts", lambda t: seen.append(len(t.codes)) or inner(t))
    for _ in model.base_weights():
        assert len(seen) <= 10
    assert seen == [1] * 10


def test_tiles_are_not_larger_than_what_is_stored_but_for_whole_chunks(uneven):
    sizes = []
    for tiles in (False, True):
        model = model_of(uneven, tiles)
        sizes.append({n: sum(p.nbytes for p in m.parameters()) for n, m in model.named_modules() if isinstance(m, PackedBase)})
    for name, stored in sizes[0].items():
        k = {"down": 96, "w2": 96, "w13": 320}.get(name.rsplit(".", 1)[-1], 320)
        k = 160 if name == "layers.0.mlp.down" else 512 if name.endswith("proj.o") else k
        assert sizes[1][name] <= stored * -(-k // 128) * 128 / k + 16, name


def test_whole_chunks_take_the_bytes_that_are_stored_a_third_of_bf16(tmp_path):
    """Widths are multiples of 128, as MiniMax-M3's."""
    folder = random_m3.build(tmp_path / "m", hidden=256, intermediate=512, dense=256, heads=2, kv_heads=1, experts=8)
    bases = [[m for m in model_of(folder, tiles).modules() if isinstance(m, PackedBase)] for tiles in (False, True)]
    stored, held = (sum(p.nbytes for m in base for p in m.parameters()) for base in bases)
    assert stored == held
    elements = sum(t.numel() for _, w in model_of(folder, True).base_weights() for t in [values(w)])
    assert held <= 0.35 * 2 * elements


def test_a_weight_that_the_kernels_cannot_read_is_named(uneven):
    class Broken(Checkpoint):
        def tensor(self, name):
            t = super().tensor(name)
            if name == "model.layers.1.block_sparse_moe.experts.3.w2.weight_scale":
                t = torch.full_like(t.view(torch.uint8), 0x7F).view(t.dtype)
            return t

    with pytest.raises(ValueError, match=r"^model\.layers\.1\.mlp\.w2: a block scale is NaN or negative"):
        M3ForTraining(Broken(uneven), get_profile("w4a16"), pack_on=torch.device("cpu"))


def test_only_bf16_on_cuda_is_packed(monkeypatch):
    trainer_engine = engine_module()
    monkeypatch.setattr(trainer_engine, "get_device_name", lambda: "cpu")
    assert trainer_engine.pack_device(get_profile("w4a16")) is None
    monkeypatch.setattr(trainer_engine, "get_device_name", lambda: "cuda")
    monkeypatch.setattr(trainer_engine, "takes_tiles", lambda device, dtype: device.type == "cuda" and dtype is torch.bfloat16)
    assert trainer_engine.pack_device(get_profile("w4a16")) == torch.device("cuda")
    assert trainer_engine.pack_device(get_profile("w4a16-fp32")) is None


def padded_bytes(module: torch.nn.Module, world: int) -> int:
    """What FSDP2 gathers for the parameters of one group: each as it is held, its first dimension made even."""
    own = [
        p for m in ([module] if not isinstance(module, M3ForTraining) else [module.embed, module.norm, module.head]) for p in m.parameters()
    ]
    return sum(-(-p.shape[0] // world) * world * (p.numel() // p.shape[0]) * p.element_size() for p in own)


def shard(rank: int, world: int, port: int, folder: str, out: str) -> None:
    """One training step of the engine with tiles; saves what the rank holds, what was gathered, and digests of the base."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

    torch.set_num_threads(1)
    start_group(rank, world, port)
    trainer_engine = engine_module()
    trainer_engine.pack_device = lambda profile: torch.device("cpu")
    built = engine(Path(folder), model={"override_config": {"samebits_profile": "w4a16"}})
    gathered, collective = [], DefaultAllGather.__call__

    def counting(self, output_tensor, *args, **kwargs):
        gathered.append(output_tensor.nbytes)
        return collective(self, output_tensor, *args, **kwargs)

    DefaultAllGather.__call__ = counting
    with built.train_mode():
        result = built.train_batch(random_batch(4, 96), loss_function=loss_function())
    expected = {padded_bytes(module, world) for module in (*built.module.layers, built.module)}
    held = {n: (p.to_local().dtype, p.to_local().shape) for n, p in built.module.named_parameters()}
    base = digests((f"{n}.{i}", t) for n, w in built.module.base_weights() for i, t in enumerate(parts(w)))
    adapter = digests(built.module.export_adapter())
    saved = {"held": held, "gathered": set(gathered), "expected": expected, "base": base, "adapter": adapter}
    torch.save(saved | {"grad_norm": result["metrics"]["grad_norm"]}, f"{out}/{world}_{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def sharded(uneven, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    mp.spawn(shard, (2, free_port(), str(uneven), str(folder)), nprocs=2)
    return [torch.load(folder / f"2_{rank}.pt", weights_only=False) for rank in (0, 1)]


@pytest.mark.slow
def test_tiles_survive_sharding(sharded, uneven):
    want = digests((f"{n}.{i}", t) for n, w in model_of(uneven, False).base_weights() for i, t in enumerate(parts(w)))
    whole = {n: (p.dtype, p.shape) for n, p in model_of(uneven, True).named_parameters()}
    for saved in sharded:
        assert saved["base"] == want and saved["grad_norm"] > 0 and saved["held"].keys() == whole.keys()
    assert sharded[0]["adapter"] == sharded[1]["adapter"]
    held = [saved["held"] for saved in sharded]
    for name, (dtype, shape) in whole.items():
        assert sum(h[name][1][0] for h in held) == shape[0] and all(h[name][0] == dtype for h in held), name
    w13, q = "layers.1.mlp.w13.", "layers.1.attention.proj.q."
    assert [h[f"{w13}codes"] for h in held] == [(torch.int32, (e, 3, 192, 16)) for e in (3, 2)]
    assert [h[f"{w13}scales"] for h in held] == [(torch.int64, (e, 3, 192)) for e in (3, 2)]
    assert [h[f"{q}codes"] for h in held] == [(torch.int64, (c, 512, 16)) for c in (2, 1)]


@pytest.mark.slow
def test_only_packed_bytes_are_gathered(sharded):
    for saved in sharded:
        assert len(saved["expected"]) == 3 and saved["gathered"] == saved["expected"]

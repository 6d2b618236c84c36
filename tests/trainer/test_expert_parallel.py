"""Routed experts spread over gloo ranks against one rank without: bits of logprobs and loss, gradients, checkpoints, bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tensordict import NonTensorData, TensorDict
from torch.distributed.device_mesh import init_device_mesh

import samebits.kernels.moe as moe_kernels
import samebits.trainer.moe as moe_module
from samebits.kernels.expert_tiles import NVFP4Tiles
from samebits.quant.checkpoint import Checkpoint
from samebits.quant.digests import digests
from samebits.quant.profile import get_profile
from samebits.quant.roles import ModuleId, Role
from samebits.trainer.batch import BatchError, require_equal_work
from samebits.trainer.expert_ranks import ExpertRanks
from samebits.trainer.lora import LoRAPair, LoRASettings, _seed
from samebits.trainer.model import M3ForTraining
from tests.support import random_m3
from tests.support.training import batch, engine, free_port, loss_function, random_batch, start_group
from tests.trainer.test_fsdp2 import LR, STEPS, assert_trained_alike

SEQUENCES, EXPERTS = 8, random_m3.SIZES["experts"]
FIELDS = ("prompts", "responses", "rollout_log_probs", "advantages")


def built(model: str | Path, spread: bool, profile: str = "w4a16-fp32", **changes):
    override = {"samebits_profile": profile, "samebits_expert_parallel": spread}
    layers = changes.pop("checkpointing", False)
    return engine(Path(model), lr=LR, model={"override_config": override, "enable_gradient_checkpointing": layers}, **changes)


def share(rank: int, world: int, seed: int = 0, max_tokens: int = 10**6, one_by_one: bool = False) -> TensorDict:
    """A rank's sequences of a batch: the long ones go to the first ranks, so that ranks have different numbers of tokens."""
    whole = random_batch(SEQUENCES, random_m3.SIZES["vocab"], seed=seed)
    lengths = whole["input_ids"].offsets().diff()
    each = SEQUENCES // world
    mine = lengths.argsort(descending=True, stable=True)[rank * each : (rank + 1) * each].tolist()
    rows = [[whole[k].unbind()[i] for i in mine] for k in FIELDS]
    out = batch(*([x.tolist() for x in r] for r in rows[:2]), *rows[2:], max_tokens=max_tokens)
    if one_by_one:
        from verl.utils import tensordict_utils as tu

        tu.assign_non_tensor(out, use_dynamic_bsz=False, micro_batch_size_per_gpu=1)
    return out


def rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row of an expert is multiplied alone, as if by kernels whose rows do not depend on their batch, which torch's on a CPU do."""
    together = moe_kernels.lora_sum

    def alone(x, *rest):
        return torch.cat([together(row[None], *rest) for row in x])

    monkeypatch.setattr(moe_kernels, "lora_sum", alone)


def logprobs(built, data: TensorDict) -> list[torch.Tensor]:
    with built.eval_mode():
        return list(built.infer_batch(data, loss_function=None)["model_output"]["log_probs"].unbind())


def stirred(built) -> None:
    """B away from zero, the same on every number of ranks, so that A has a gradient and each expert an adapter of its own."""
    for name, parameter in built.module.adapter_parameters():
        if name.endswith("lora_B"):
            whole = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) * 0.02
            with torch.no_grad():
                parameter.copy_(torch.distributed.tensor.distribute_tensor(whole, parameter.device_mesh, parameter.placements))


def gradients(built, data: TensorDict) -> tuple[list[float], dict[str, torch.Tensor]]:
    with built.train_mode():
        out = built.forward_backward_batch(data, loss_function())
        return out["loss"], {n: p.grad.full_tensor().clone() for n, p in built.module.adapter_parameters()}


def step(built, data: TensorDict) -> dict:
    with built.train_mode():
        out = built.train_batch(data, loss_function=loss_function())
        built.lr_scheduler_step()
    return out


def masters(built) -> dict[str, torch.Tensor]:
    return {n: p.detach().full_tensor().clone() for n, p in built.module.adapter_parameters()}


def reading(built_by) -> tuple[object, set[str]]:
    """An engine, and which experts were read from the checkpoint while it was built."""
    read, original = set(), Checkpoint.weight

    def weight(self, path):
        if ".experts." in path:
            read.add(path.split(".experts.")[1].split(".")[0])
        return original(self, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoint, "weight", weight)
        return built_by(), read


def held(built) -> dict[str, tuple[int, int]]:
    """(bytes of memory behind what this rank holds, bytes of the whole parameter) of every parameter."""
    out = {}
    for name, parameter in built.module.named_parameters():
        whole = parameter.numel() * parameter.element_size()
        out[name] = (parameter.to_local().untyped_storage().nbytes(), whole)
    return out


def is_expert(name: str) -> bool:
    return any(part in name for part in (".w13.", ".w2.", "EXPERT_"))


def watched_routes(patch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The expert ids of every call of the spread experts, in order."""
    seen, original = [], moe_module.expert_parallel_moe

    def call(x, w13, w2, ids, *rest, **options):
        seen.append(ids.clone())
        return original(x, w13, w2, ids, *rest, **options)

    patch.setattr(moe_module, "expert_parallel_moe", call)
    return seen


def bits_of(one, rank: int, world: int) -> dict:
    """What must have the bits of one rank: logprobs and losses of sequences that run alone."""
    with pytest.MonkeyPatch.context() as patch:
        rows_alone(patch)
        data = share(rank, world, one_by_one=True)
        return {"logprobs": logprobs(one, data), "losses": gradients(one, data)[0]}


def base_digests(one) -> dict[str, str]:
    return {n: str(digests((str(i), t) for i, t in enumerate(w if isinstance(w, tuple) else (w,)))) for n, w in one.module.base_weights()}


def said(call) -> str:
    try:
        call()
    except BatchError as error:
        return str(error)
    return ""


def on_two_ranks(rank: int, world: int, port: int, model: str, out: str) -> None:
    """Everything that is looked at on two ranks, in one pair of processes, since those take long to start."""
    torch.set_num_threads(1)
    start_group(rank, world, port)
    import samebits.trainer.engine as engine_module

    found: dict = {}
    one, found["read"] = reading(lambda: built(model, True))
    found["held"], found["base"] = held(one), base_digests(one)
    stirred(one)
    found |= bits_of(one, rank, world)
    found["gradients"] = gradients(one, share(rank, world, max_tokens=16))
    with one.disable_adapter():
        found["disabled"] = logprobs(one, share(rank, world))

    again = built(model, True, checkpointing=True)
    stirred(again)
    with pytest.MonkeyPatch.context() as patch:
        found["routes"] = watched_routes(patch)
        found["recomputed"] = gradients(again, share(rank, world, max_tokens=16))

    whole = built(model, False)
    stirred(whole)
    found["sharded"] = gradients(whole, share(rank, world, max_tokens=16))

    one.optimizer_zero_grad()
    found["norms"] = [[step(e, share(rank, world, seed))["metrics"]["grad_norm"] for e in (one, whole)] for seed in range(STEPS)]
    one.to("cpu")
    found["trained"], found["trained whole"] = masters(one), masters(whole)
    found["export"] = dict(one.get_per_tensor_param()[0])
    one.save_checkpoint(f"{out}/spread", global_step=STEPS)
    whole.save_checkpoint(f"{out}/whole", global_step=STEPS)
    step(one, share(rank, world, 9))
    found["straight on"] = masters(one)
    for spread, folder in ((True, "spread"), (False, "spread"), (True, "whole")):
        resumed = built(model, spread)
        resumed.load_checkpoint(f"{out}/{folder}")
        found["resumed", spread, folder] = (masters(resumed), resumed.adapter_version)
        step(resumed, share(rank, world, 9))
        found["resumed on", spread, folder] = masters(resumed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "takes_tiles", lambda device, dtype: dtype is torch.bfloat16)
        tiles = built(model, True, "w4a16")
        found["tiles"], found["tiles held"] = type(tiles.module.layers[1].mlp.w13.value()), held(tiles)
        found["tiles base"] = base_digests(tiles)
        stirred(tiles)
        found["tiles bits"] = bits_of(tiles, rank, world)

    group = dist.group.WORLD
    rows = [TensorDict({}, [2 * rank])]
    rows += [TensorDict({"use_dynamic_bsz": NonTensorData(value, batch_size=[2 + rank])}, [2 + rank]) for value in (False, True)]
    found["said"] = [said(lambda data=data: require_equal_work(data, group, "cpu")) for data in rows]
    torch.save(found, f"{out}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def runs(m3, tmp_path_factory):
    """What two ranks found."""
    folder = tmp_path_factory.mktemp("spread")
    mp.spawn(on_two_ranks, (2, free_port(), str(m3), str(folder)), nprocs=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.fixture(scope="module")
def alone(m3):
    """An engine on one rank, without."""
    start_group()  # it stays, as in test_engine
    one = built(m3, False)
    stirred(one)
    return one


def assert_bits(runs: list[dict], want: dict, world: int) -> None:
    """Of each sequence. verl multiplies losses by the number of ranks, a power of two here."""
    have = [p for r in runs for p in r["logprobs"]]
    assert len(have) == SEQUENCES and all(torch.equal(a, b) for a, b in zip(have, want["logprobs"], strict=True))
    assert [loss / world for r in runs for loss in r["losses"]] == want["losses"]


def distance(have: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """Of the gradient that is furthest from its own, relative to its norm."""
    assert have.keys() == want.keys() and all(w.any() for w in want.values())
    return max(((have[name] - want[name]).norm() / want[name].norm()).item() for name in want)


def noise(one, whole: dict[str, torch.Tensor]) -> float:
    """What fp32 sums in another order do to the gradients `whole` of one rank, on this machine: the batch is cut otherwise there."""
    cut = distance(gradients(one, share(0, 1, max_tokens=16))[1], whole)
    assert cut < 1e-4, "less than what a term left out or counted twice would do"
    return cut


@pytest.mark.slow
def test_logprobs_and_loss_have_the_bits_of_one_rank(runs, alone):
    assert_bits(runs, bits_of(alone, 0, 1), 2)


@pytest.mark.slow
def test_so_they_have_with_experts_in_tiles_and_bf16(runs, m3, monkeypatch):
    start_group()
    import samebits.trainer.engine as engine_module

    assert all(r["tiles"] is NVFP4Tiles for r in runs)
    monkeypatch.setattr(engine_module, "takes_tiles", lambda device, dtype: dtype is torch.bfloat16)
    one = built(m3, False, "w4a16")
    stirred(one)
    assert_bits([r["tiles bits"] for r in runs], bits_of(one, 0, 1), 2)
    assert all(r["tiles base"] == base_digests(one) for r in runs)


@pytest.mark.slow
def test_on_one_rank_the_key_changes_nothing(alone, m3):
    one = built(m3, True)
    stirred(one)
    assert one.module.layers[1].mlp.ranks is None
    data = share(0, 1, max_tokens=24)
    (loss, grads), (want_loss, want) = gradients(one, data.clone()), gradients(alone, data.clone())
    assert loss == want_loss and all(torch.equal(grads[n], want[n]) for n in want)


@pytest.mark.slow
def test_gradients_are_those_of_one_rank_and_of_fsdp_alone(runs, alone):
    grads = gradients(alone, share(0, 1))[1]
    bound = noise(alone, grads)
    for r in runs:
        assert len(r["gradients"][0]) > 2
        assert distance(r["gradients"][1], grads) <= 4 * bound
        assert distance(r["gradients"][1], r["sharded"][1]) <= 4 * bound


@pytest.mark.slow
def test_ranks_of_unequal_work_run_equally_many_micro_batches(runs):
    assert len(runs[0]["gradients"][0]) == len(runs[1]["gradients"][0])
    for r in runs:
        assert r["said"][0] == "rank 0 has no sequence of this batch, others have up to 2"
        assert "ranks have [2, 3] sequences" in r["said"][1] and not r["said"][2]


@pytest.mark.slow
def test_recomputed_layers_exchange_again_along_the_same_routes(runs):
    for r in runs:
        assert r["recomputed"][0] == r["gradients"][0]
        assert all(torch.equal(r["recomputed"][1][n], g) for n, g in r["gradients"][1].items())
        calls, layers = r["routes"], 2
        assert len(calls) == 2 * layers * len(r["recomputed"][0])
        for first in range(0, len(calls), 2 * layers):  # of a micro-batch: both layers, then both again from the last
            forward, backward = calls[first : first + layers], calls[first + layers : first + 2 * layers]
            assert all(torch.equal(a, b) for a, b in zip(forward, reversed(backward), strict=True))


@pytest.mark.slow
def test_a_rank_reads_and_holds_its_own_experts_only(runs):
    assert [r["read"] for r in runs] == [set("0123"), set("4567")]
    for kind in ("held", "tiles held"):
        for r in runs:
            experts = {n: sizes for n, sizes in r[kind].items() if is_expert(n)}
            assert len(experts) == 2 * (6 + 6)  # two layers: three tensors of w13 and of w2, A and B of three roles
            assert all(2 * mine == whole for mine, whole in experts.values()), kind
    # 8 experts in 2 layers: 3 x 64 x 96 weights in NVFP4 with two global scales, 3 adapters of rank 8 in fp32.
    mine = sum(mine for n, (mine, _) in runs[0]["held"].items() if is_expert(n))
    assert mine == 2 * 8 * (3 * 64 * 96 * 9 // 16 + 2 * 4 + 4 * 3 * 8 * (64 + 96)) // 2


@pytest.mark.slow
def test_the_base_is_whole_in_its_digests(runs, alone):
    assert all(r["base"] == base_digests(alone) for r in runs)


@pytest.mark.slow
def test_scores_without_the_adapter(runs, alone):
    with alone.disable_adapter():
        want = logprobs(alone, share(0, 1))
    for have, own in zip([p for r in runs for p in r["disabled"]], want, strict=True):
        torch.testing.assert_close(have[:-1], own[:-1], rtol=0, atol=1e-5)  # nothing follows the last token


@pytest.mark.slow
def test_steps_train_the_adapter_of_fsdp_alone(runs):
    for r in runs:
        for spread, whole in r["norms"]:
            assert spread == pytest.approx(whole, rel=1e-5)
        for name, want in r["trained whole"].items():
            assert_trained_alike(name, r["trained"][name], want, rtol=1e-3)


@pytest.mark.slow
def test_export_is_the_adapter_of_all_ranks(runs, alone):
    for r in runs:
        alone.module.spec.check(r["export"])
        assert all(torch.equal(t, runs[0]["export"][n]) for n, t in r["export"].items())
    for e in range(EXPERTS):
        name = f"base_model.model.model.layers.1.block_sparse_moe.experts.{e}.w1.lora_A.weight"
        assert torch.equal(runs[0]["export"][name], runs[0]["trained"]["layers.1.lora.pairs.EXPERT_GATE.lora_A"][e].bfloat16())


@pytest.mark.slow
def test_checkpoints_resume_with_and_without(runs):
    for r in runs:
        for (spread, folder), trained in (
            ((True, "spread"), "trained"),
            ((False, "spread"), "trained"),
            ((True, "whole"), "trained whole"),
        ):
            found, version = r["resumed", spread, folder]
            assert version == STEPS and all(torch.equal(found[n], t) for n, t in r[trained].items()), (spread, folder)
        for name, want in r["straight on"].items():
            assert torch.equal(r["resumed on", True, "spread"][name], want), name
            assert_trained_alike(name, r["resumed on", False, "spread"][name], want, rtol=1e-3)
            assert_trained_alike(name, r["resumed on", True, "whole"][name], want, rtol=1e-3)


def on_four_ranks(rank: int, world: int, port: int, model: str, out: str) -> None:
    torch.set_num_threads(1)
    start_group(rank, world, port)
    found = {}
    for size in (4, 2):  # two: twice two ranks that exchange tokens
        one = built(model, True, fsdp_size=size)
        stirred(one)
        found[size] = bits_of(one, rank, world) | {"held": held(one), "gradients": gradients(one, share(rank, world))[1]}
        one.optimizer_zero_grad()
        step(one, share(rank, world, 1))
        one.save_checkpoint(f"{out}/of{size}", global_step=1)
        found[size] |= {"trained": masters(one), "experts": one.module.layers[1].lora.pairs["EXPERT_UP"].lora_B.to_local().detach()}
    torch.save(found, f"{out}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.long
def test_four_ranks_and_twice_two(alone, m3, tmp_path):
    mp.spawn(on_four_ranks, (4, free_port(), str(m3), str(tmp_path)), nprocs=4)
    runs = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(4)]
    bits, grads = bits_of(alone, 0, 1), gradients(alone, share(0, 1))[1]
    bound = noise(alone, grads)
    one = built(m3, False)
    stirred(one)
    step(one, share(0, 1, 1))
    for size in (4, 2):
        assert_bits([r[size] for r in runs], bits, 4)
        for r in runs:
            assert distance(r[size]["gradients"], grads) <= 4 * bound
            assert all(size * mine == whole for n, (mine, whole) in r[size]["held"].items() if is_expert(n))
            for name, want in masters(one).items():
                assert_trained_alike(name, r[size]["trained"][name], want, rtol=1e-3)
    for a, b in ((0, 2), (1, 3)):
        assert torch.equal(runs[a][2]["experts"], runs[b][2]["experts"]), "the same experts of two rows of ranks drift apart"


def test_experts_must_divide_over_the_ranks():
    class Mesh:
        ndim = 1

        @staticmethod
        def size(dim):
            return 3

    with pytest.raises(ValueError, match="8 experts do not divide over 3 ranks"):
        ExpertRanks.of(Mesh(), 8)


def test_an_adapter_drawn_expert_by_expert_is_the_one_drawn_at_once():
    pair = LoRAPair(ModuleId(Role.EXPERT_DOWN, 3, 0), 7, 19, 5, LoRASettings(4, 8.0, (), seed=11))
    generator = torch.Generator().manual_seed(_seed(11, 3, Role.EXPERT_DOWN))
    assert torch.equal(pair.lora_A, torch.empty(5, 4, 19).uniform_(-(19**-0.5), 19**-0.5, generator=generator))


def failing(rank: int, world: int, port: int, model: str, out: str) -> None:
    """Rank 1 fails in its second layer with experts; what the other says of it goes to a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    one = M3ForTraining(Checkpoint(Path(model)), get_profile("w4a16-fp32"), experts_over=mesh)
    if rank == 1:
        one.layers[2].mlp._expert_lora = lambda lora: 1 / 0
    tokens = torch.arange(5)
    try:
        one(tokens, [5], tokens, torch.ones(5))
    except (RuntimeError, ZeroDivisionError) as error:
        Path(f"{out}/{rank}").write_text(f"{type(error).__name__}: {error}")
        raise SystemExit(1) from None


def test_a_rank_that_fails_ends_the_others(m3, tmp_path):
    """Not before their process group's timeout, half an hour, would: as soon as the failed process is gone."""
    context, port = mp.get_context("spawn"), free_port()
    processes = [context.Process(target=failing, args=(rank, 2, port, str(m3), str(tmp_path))) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=600)
    assert [process.exitcode for process in processes] == [1, 1]
    assert (tmp_path / "1").read_text() == "ZeroDivisionError: division by zero"
    assert "onnection" in (tmp_path / "0").read_text()

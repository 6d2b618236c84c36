"""The trainer of the shipped tiny model on 1, 2, 4 and 8 ranks of one host, in processes of their own over gloo.

Splitting over ranks moves bytes and changes none: a forward of the same sequence has the same bits however many ranks hold its
weights, each rank holds what the plan counts, and each collective brings what the shards of the others weigh. A step's sums over
sequences have another order on other ranks, so a trained adapter agrees within rounding, and between the ranks of a job in every bit.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from samebits.kernels import tracing
from samebits.quant.digests import digests
from samebits.recipes.config import load_recipe
from samebits.recipes.memory_parts import base, trainable, trainer_state
from samebits.recipes.validate import examine
from tests.support.training import batch, engine, free_port, loss_function, start_group

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
MODEL, RECIPE = Path("recipes/tiny_m3_base"), "recipes/tiny_m3_grpo.yaml"
SEQUENCES, VOCABULARY, RANK, LR = 8, 60, 32, 1e-3
SETTINGS = {"lora_rank": RANK, "lora_alpha": RANK}


def sequences() -> list[dict]:
    g = torch.Generator().manual_seed(4)
    found = []
    for i in range(SEQUENCES):
        prompt, response = (torch.randint(3, VOCABULARY, (n,), generator=g) for n in (5 + i % 3, 9 + (5 * i) % 7))
        advantage = torch.full((len(response),), float(torch.randn((), generator=g)))
        found.append({"prompt": prompt, "response": response, "logprobs": -torch.rand(len(response), generator=g), "advantage": advantage})
    return found


def give_b_a_value(built, rank: int, world: int) -> None:
    """B begins at zero, which would hide the adapter: the same values on any number of ranks."""
    g = torch.Generator().manual_seed(9)
    for name, parameter in built.module.adapter_parameters():
        whole = torch.randn(parameter.shape, generator=g) / RANK
        if name.endswith("lora_B"):
            parameter.detach().to_local().copy_(whole.chunk(world)[rank])


def work(rank: int, world: int, port: int, folder: str) -> None:
    """Logprobs of the rank's sequences one by one, then one recorded step and one recorded export; everything is saved."""
    torch.set_num_threads(1)
    os.environ[tracing.VARIABLE] = json.dumps({"folder": f"{folder}/traces{world}", "first": 1, "steps": 2})
    start_group(rank, world, port)
    built = engine(MODEL, lr=LR, model=SETTINGS)
    give_b_a_value(built, rank, world)
    own = sequences()[rank::world]
    logprobs = []
    with torch.no_grad():
        for one in own:
            tokens = torch.cat((one["prompt"], one["response"]))
            logprobs.append(built.module(tokens, [len(tokens)], tokens.roll(-1), torch.ones(len(tokens))).logprobs)
    built.module.reshard()  # as verl's evaluation ends
    share = batch(
        *([one[key].tolist() for one in own] for key in ("prompt", "response")),
        *([one[key] for one in own] for key in ("logprobs", "advantage")),
    )
    metrics = []
    for _ in range(2):
        with built.train_mode():
            found = built.train_batch(share, loss_function=loss_function())["metrics"]
            built.lr_scheduler_step()
        metrics.append({key: found[key] for key in found if not key.startswith("phase/")})
    with tracing.recording("sync", built.adapter_version):
        tracing.tracer().boundary("export")
        adapter = dict(built.get_per_tensor_param()[0])
    gathered: list = [None] * world
    dist.all_gather_object(gathered, metrics)
    whole = [
        {
            key: type(value).aggregate_dp([each[step][key] for each in gathered])
            for key, value in metrics[step].items()
            if key != "grad_norm"
        }
        for step in range(2)
    ]
    saved = {"logprobs": logprobs, "grad_norm": [float(m["grad_norm"]) for m in metrics], "digests": digests(adapter)}
    torch.save(saved | ({"adapter": adapter, "metrics": whole} if rank == 0 else {}), f"{folder}/{world}.{rank}.pt")
    built.save_checkpoint(f"{folder}/checkpoint{world}", global_step=2)
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    done: dict[int, list[dict]] = {}

    def run(world: int) -> list[dict]:
        if world not in done:
            mp.spawn(work, (world, free_port(), str(folder)), nprocs=world)
            done[world] = [torch.load(folder / f"{world}.{rank}.pt", weights_only=False) for rank in range(world)]
        return done[world]

    run.folder = folder
    return run


WORLDS = [2, pytest.param(4, marks=pytest.mark.long), pytest.param(8, marks=pytest.mark.long)]


@pytest.mark.parametrize("world", WORLDS)
def test_a_sequence_has_the_same_bits_on_any_number_of_ranks(run, world):
    one, many = run(1)[0]["logprobs"], run(world)
    for i in range(SEQUENCES):
        assert torch.equal(many[i % world]["logprobs"][i // world], one[i]), f"sequence {i}"


@pytest.mark.parametrize("world", WORLDS)
def test_ranks_export_the_same_adapter_and_it_is_the_one_rank_s_within_rounding(run, world):
    one, many = run(1)[0], run(world)
    assert all(rank["digests"] == many[0]["digests"] for rank in many)
    assert many[0]["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
    assert all(rank["grad_norm"] == many[0]["grad_norm"] for rank in many)
    for step in range(2):
        assert "mismatch/kl" in one["metrics"][step] and many[0]["metrics"][step] == pytest.approx(one["metrics"][step], rel=1e-3, abs=1e-6)
    for name, tensor in one["adapter"].items():
        off = (many[0]["adapter"][name].float() - tensor.float()).abs()
        # Adam divides a gradient by its own size: one that is rounding alone moves by up to a step in either direction.
        assert (off > 2**-7 * tensor.float().abs() + 1e-5).float().mean() < 2e-3 and off.max() <= 4 * LR, name


def planned(world: int):
    recipe, verl = load_recipe(RECIPE, ["device=cpu", f"trainer.n_gpus_per_node={world}"], planned=True)
    return recipe, examine(recipe, verl, planned=True)


@pytest.mark.parametrize("world", [1, *WORLDS])
def test_each_rank_holds_what_the_plan_counts_to_the_byte(run, world):
    run(world)
    state = trainer_state(*planned(world))
    records = [record for record in tracing.read(run.folder / f"traces{world}") if record["stretch"] == "train"]
    assert [(record["step"], record["rank"]) for record in records] == [(step, rank) for step in (1, 2) for rank in range(world)]
    for record in records:
        held = record["held"]
        assert (held["base"], held["adapter"]) == (state["base"], state["adapter"])
        assert held["moments"] == (state["moments"] if record["step"] == 2 else 0), "moments come with the first step"


@pytest.mark.parametrize("world", WORLDS)
def test_collectives_bring_what_the_shards_of_others_weigh(run, world):
    run(world)
    recipe, found = planned(world)
    packed, adapter = base(recipe, found), 4 * trainable(found).total
    others = (world - 1) / world
    records = tracing.read(run.folder / f"traces{world}")
    for record in (record for record in records if record["stretch"] == "train"):
        forward, backward = (record["phases"][phase]["volume"] for phase in ("forward", "backward"))
        assert forward["all_gather"]["bytes"] == (packed + adapter) * others
        ends = 2 * 2 * found.model.vocabulary * found.model.hidden + 2 * found.model.hidden  # stay gathered for backward
        assert backward["all_gather"]["bytes"] == (packed + adapter - ends) * others
        assert backward["reduce_scatter"]["bytes"] == adapter * others
    exports = [record["phases"]["export"]["volume"] for record in records if record["stretch"] == "sync"]
    assert len(exports) == world and all(volume["all_gather"]["bytes"] == adapter / 2 * others for volume in exports), "in bf16"

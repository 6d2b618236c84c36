"""The memory plan of a recipe against sizes counted otherwise, and the facts about this version that it rests on."""

import pytest
import torch
from torch import nn

from samebits.quant.adapter import AdapterSpec, ModelShape
from samebits.quant.checkpoint import Checkpoint
from samebits.recipes import memory, memory_parts, support
from samebits.recipes.check import check
from samebits.recipes.config import load_recipe
from samebits.recipes.plan_tables import adapter_shape, get_model, model_of_config
from samebits.recipes.planning import plan_memory, plan_step
from samebits.recipes.validate import examine
from samebits.trainer import early_export

GB = 1e9
M31, H200, TINY = "m31_dapo_math_16xgb300.yaml", "m31_dapo_math_8xh200.yaml", "tiny_m3_grpo.yaml"
QWEN = "qwen3_30b_a3b_dapo_math_8xh100.yaml"
ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"


@pytest.mark.parametrize("name", [M31, QWEN])
def test_adapter_and_sync_are_those_of_the_exact_key_set(name):
    report = check(name)
    shapes = report.found.spec.shapes()
    assert report.memory.adapter_parameters == sum(n * k for n, k in shapes.values())
    assert report.memory.sync["to each replica"] == 2 * report.memory.adapter_parameters
    assert report.memory.sync["to all replicas"] == 2 * report.memory.adapter_parameters * report.found.layout.replicas


def test_parts_agree_with_samebits_plan():
    report, model = check(M31), get_model("m31-flash")
    generate, train, sync = report.memory.phases
    served = plan_memory(model, report.found.gpu, 4, "dep4", 22528)
    assert generate.parts["engine: base"] == served.weights_per_gpu
    step = plan_step(
        model, report.found.gpu, 16, layout="dep4", samples=2048, prompt_tokens=2048, response_tokens=20480, micro_batch_tokens=22528
    )
    assert train.parts["trainer: base, its shard"] == pytest.approx(step.base_per_gpu) == pytest.approx(250.1 * GB / 16)
    assert report.memory.adapter_parameters == step.parameters
    assert train.parts["trainer: activations kept"] == pytest.approx(
        2 * step.activations_per_gpu, rel=0.01
    )  # the stream and the residual, which the first layer has not
    one = 72 * model.layers * (2 * model.kv_heads + 1) * 22528  # pages of dense layers have room for index keys, too
    assert report.memory.sequences == int(generate.parts["engine: KV cache"] // one)
    assert "engine: KV cache" not in train.parts and "engine: base" not in train.parts
    assert sync.parts["engine: base"] == served.weights_per_gpu


def test_engine_and_trainer_share_a_gpu_while_it_generates():
    generate = check(M31).memory.phases[0]
    engine = sum(v for k, v in generate.parts.items() if k.startswith("engine: "))
    card = 276.5 * 2**30
    assert engine == pytest.approx(0.6 * card, rel=1e-4) and engine <= 0.6 * card, "but for a part of a page"
    assert generate.usable == pytest.approx(0.945 * card)


@pytest.mark.parametrize(
    ("override", "phase", "part", "ratio"),
    [
        (f"{ACTOR}.fsdp_config.fsdp_size=4", 1, "trainer: base, its shard", 4),
        (f"{ACTOR}.fsdp_config.fsdp_size=4", 1, "trainer: moments", 4),
        ("lora.rank=64", 1, "trainer: moments", 2),
        ("lora.rank=64", 0, "engine: adapter slots", 2),
        (f"{ACTOR}.ppo_max_token_len_per_gpu=45056", 1, "trainer: activations kept", 2),
        (f"{ROLLOUT}.max_num_batched_tokens=16384", 0, "engine: KV cache", 0.957),
    ],
)
def test_settings_move_the_part_that_they_should(override, phase, part, ratio):
    before, after = (check(M31, extra).memory.phases[phase].parts[part] for extra in ([], [override]))
    assert after / before == pytest.approx(ratio, rel=0.01)


def test_experts_that_are_computed_again_keep_neither_gate_nor_up():
    def kept(*overrides: str) -> float:
        recipe, verl = load_recipe(M31, overrides, planned=True)
        return memory.plan(recipe, verl, examine(recipe, verl, planned=True)).phases[1].parts["trainer: activations kept"]

    whole, again = "actor_rollout_ref.model.enable_gradient_checkpointing=false", "recompute.experts=true"
    model, tokens = get_model("m31-flash"), 22528
    pairs = model.experts_per_token * model.expert_intermediate + model.shared_intermediate
    halves = 2 * (model.moe_layers * pairs + model.dense_layers * model.dense_intermediate)
    assert kept(whole) - kept(whole, again) == tokens * 2 * halves  # in bf16
    assert kept() == kept(again) < kept(whole, again)


def test_a_cache_that_holds_no_whole_sequence_does_not_fit():
    recipe, verl = load_recipe(H200, [f"{ROLLOUT}.gpu_memory_utilization=0.39"], planned=True)
    found = memory.plan(recipe, verl, examine(recipe, verl, planned=True))
    assert found.sequences == 0
    one = found.phases[0].parts["engine: KV cache"]
    assert one > 0, "one sequence is planned for, so that the shortage shows"


def test_moved_state_leaves_the_gpu_and_enters_the_host():
    offload = [f"{ACTOR}.fsdp_config.param_offload=true", f"{ACTOR}.fsdp_config.optimizer_offload=true"]
    before, after = check(H200).memory, check(H200, offload).memory
    assert after.phases[0].total < before.phases[0].total - 40 * GB
    assert after.phases[1].total == before.phases[1].total
    assert after.host["trainer state put aside"] > 250 * GB


def test_a_model_from_its_checkpoint_has_the_sizes_of_its_adapter():
    checkpoint = Checkpoint("recipes/tiny_m3_base")
    model = model_of_config(checkpoint.config, "tiny")
    assert adapter_shape(model) == ModelShape.from_config(checkpoint.config)
    report = check(TINY, ["device=cpu"])
    spec = AdapterSpec(adapter_shape(model), 32, report.found.spec.roles)
    assert report.memory.adapter_parameters == sum(n * k for n, k in spec.shapes().values())
    # What the demo's metrics say of each sync.
    assert report.memory.sync["to each replica"] == 1_351_680 and len(report.found.spec.shapes()) == 138


def test_the_engine_keeps_its_base_in_the_bits_that_the_plan_says():
    """With fp32 activations; packed tiles, which bf16 has on a GPU, are counted by the GPU tests."""
    from samebits.rollout.quantization import NVFP4Experts

    layer, method = nn.Module(), NVFP4Experts()
    layer.prefix = "experts"
    method.create_weights(layer, 2, 32, 48)
    for parameter in layer.parameters():
        parameter.data = torch.zeros_like(parameter.data.float()).to(parameter.dtype)
    method.process_weights_after_loading(layer)
    weights = 2 * 3 * 32 * 48
    assert sum(p.numel() * p.element_size() * 8 for p in layer.parameters()) == weights * support.ENGINE_BITS


def test_the_engine_still_refuses_what_support_says_it_refuses():
    """Fails when trainer or engine learn more activation formats: `support.COMPUTED` must follow."""
    from samebits.rollout import settings
    from samebits.trainer import model

    assert {str(f) for f in settings._ACTIVATIONS} == {str(f) for f in model._COMPUTE} == set(support.COMPUTED)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("lengths", "kv_cache"), [([37] * 6 + [34], "auto"), ([42, 5, 30, 19], "auto"), ([42, 5, 30, 19] * 3, "nvfp4")])
def test_what_a_forward_keeps_is_near_its_estimate(lengths, kv_cache, checkpointing):
    """Tensors saved for backward, counted on the real training model of the demo; of references, since these compute on a CPU."""
    from samebits.trainer.lora import LoRASettings
    from samebits.trainer.model import M3ForTraining

    option = f"actor_rollout_ref.model.enable_gradient_checkpointing={str(checkpointing).lower()}"
    recipe, verl = load_recipe(TINY, ["device=cpu", option, f"numerics.kv_cache={kv_cache}"])
    found = examine(recipe, verl)
    model = M3ForTraining(Checkpoint(recipe.model_path), recipe.profile, LoRASettings(32, 32, found.spec.roles))
    model.checkpoint_activations(checkpointing)
    seen = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            kept.append(storage.nbytes())
        return tensor

    tokens = torch.randint(0, 60, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = model(tokens, lengths, tokens.roll(-1), torch.ones(len(tokens)))
    planned = len(tokens) * memory_parts.kept_per_token(recipe, verl, found) + memory_parts.kept_adapters(recipe, verl, found)
    planned += memory_parts.head_work(recipe, found.model, len(tokens))[0]
    assert sum(kept) == pytest.approx(planned, rel=0.02 if checkpointing else 0.1) and out.logprobs.requires_grad


def test_an_engine_on_cuda_has_what_is_left_of_its_share_of_the_card():
    """A GPU that is here by the memory that its driver tells, one that is only named by its table, and a cache of a size of its own."""
    card = 150_109_000_000
    recipe, verl = load_recipe(TINY, ["device=cuda"], planned=True)
    found = examine(recipe, verl, planned=True)
    unknown, none = memory.engine_parts(recipe, verl, found)
    page, one = memory_parts.sequence_bytes(recipe, verl, found)
    assert unknown["engine: KV cache"] == one and none is None
    parts, sequences = memory.engine_parts(recipe, verl, found, card)
    assert 0.2 * card - page < sum(parts.values()) <= 0.2 * card
    assert parts["engine: KV cache"] % page == 0 and sequences == parts["engine: KV cache"] // one
    size = f"{ROLLOUT}.engine_kwargs.vllm.kv_cache_memory_bytes={int(10.5 * page)}"
    for extra in ([size], [size, "cluster.gpu=h200"]):
        recipe, verl = load_recipe(TINY, ["device=cuda", *extra], planned=True)
        parts, _ = memory.engine_parts(recipe, verl, examine(recipe, verl, planned=True), card)
        assert parts["engine: KV cache"] == 10 * page


def test_what_sleeps_is_on_the_host_and_not_on_the_gpu():
    def plan(sleeps: str) -> memory.MemoryReport:
        recipe, verl = load_recipe(H200, [f"{ROLLOUT}.free_cache_engine={sleeps}"], planned=True)
        return memory.plan(recipe, verl, examine(recipe, verl, planned=True))

    awake, asleep = plan("false"), plan("true")
    engine = {name for name in awake.phases[1].parts if name.startswith("engine: ")}
    assert engine == {"engine: base", "engine: adapter slots", "engine: one forward", "engine: KV cache"}
    assert not any(name.startswith("engine: ") for name in asleep.phases[1].parts)
    generate = asleep.phases[0].parts
    aside = asleep.host["engine weights and adapter slots put aside"]
    assert aside == 8 * (generate["engine: base"] + generate["engine: adapter slots"])


@pytest.mark.parametrize("name", [M31, H200, QWEN])
def test_an_adapter_that_is_exported_early_is_there_twice_while_it_is_sent(name, monkeypatch):
    """All of it from the optimizer's step on, beside the buffer that the engine opens; one that is too large for that comes by batches."""
    found = {}
    for share in (early_export.SHARE, 0, 1e9):
        monkeypatch.setattr(early_export, "SHARE", share)
        recipe, verl = load_recipe(name, [], planned=True)
        report = examine(recipe, verl, planned=True)
        sync = next(phase for phase in memory.plan(recipe, verl, report).phases if phase.name == "sync")
        optimizer = memory.trainer_parts(recipe, verl, report, 1024)["optimizer"]
        found[share] = (sync.parts["trainer: masters rounded and gathered"], optimizer.get("trainer: masters rounded and gathered"))
    size, batch = 2 * memory_parts.trainable(report).total, memory_parts.exporting(report)
    assert found[0] == (size, size + batch - memory_parts.BATCH_BYTES) and found[1e9] == (batch, None) and batch < GB
    assert found[16] == found[1e9 if name == H200 else 0], "13.2 GB are more than a sixteenth of an H200"

"""Planning: the published figures, the arithmetic against the real layouts and adapters, and refusals in one line."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from typer.testing import CliRunner

from samebits.quant.adapter import ModelShape
from samebits.quant.roles import ATTENTION_ROLES, DENSE_ROLES, EXPERT_ROLES, LORA_ROLES, SHARED_ROLES, Role
from samebits.recipes.plan_cli import plan_app
from samebits.recipes.plan_tables import BITS, TABLES, PlanError, get_gpu, get_model
from samebits.recipes.planning import PAGE_TOKENS, get_layout, plan_memory, plan_step

M31, B300 = get_model("m31-flash"), get_gpu("b300")
ASKED = ["memory", "--model", "m31-flash", "--gpu", "b300", "--gpus", "4", "--layout", "dep4", "--context", "262144"]


def cli(*arguments: str):
    return CliRunner().invoke(plan_app, [*arguments], env={"COLUMNS": "200"})


def test_published_figures_of_memory():
    nvfp4, fp8 = (plan_memory(M31, B300, 4, "dep4", 262144, kv=kv) for kv in ("nvfp4", "fp8"))
    assert (nvfp4.kv_bytes_per_token, fp8.kv_bytes_per_token) == (34_560, 61_440)
    assert 1 - nvfp4.kv_bytes_per_token / fp8.kv_bytes_per_token == 0.4375
    assert (nvfp4.sequences, fp8.sequences) == (76, 28)
    assert (fp8.index_read, fp8.dense_read) == (128, 1024)
    assert fp8.limit == nvfp4.limit == "KV cache"


def test_command_prints_figures_assumptions_and_sources(tmp_path):
    out = cli(*ASKED, "--json", str(tmp_path / "plan.json"))
    assert out.exit_code == 0
    for text in ("34,560", "61,440", "43.75%", "76", "28", "128", "1,024", "usable share of a GPU's memory: 0.945 of 287.4 GB"):
        assert text in out.stdout, text
    assert "index cache: included, NVFP4, 4,104 bytes a token" in out.stdout
    assert "index cache: included, FP8, 7,296 bytes a token" in out.stdout and "Sources:" in out.stdout
    plans = json.loads((tmp_path / "plan.json").read_text())["plans"]
    assert [p["sequences"] for p in plans] == [76, 28]


def test_the_shares_that_give_the_published_counts_are_the_ones_printed():
    """The usable share is an assumption: say between which values it changes nothing, and be right about it."""
    for kv, count in (("nvfp4", 76), ("fp8", 28)):
        low, high = plan_memory(M31, B300, 4, "dep4", 262144, kv=kv).share_window
        for share, want in ((low + 1e-6, count), (high - 1e-6, count), (low - 1e-6, count - 4), (high + 1e-6, count + 4)):
            assert plan_memory(M31, B300, 4, "dep4", 262144, kv=kv, usable_share=share).sequences == want
    windows = [plan_memory(M31, B300, 4, "dep4", 262144, kv=kv).share_window for kv in ("nvfp4", "fp8")]
    both = max(w[0] for w in windows), min(w[1] for w in windows)
    assert both == pytest.approx((0.934, 0.961), abs=1e-3)  # as the comment at USABLE_SHARE says


def test_bytes_a_token_are_those_of_the_page_layouts():
    """vLLM's NVFP4 pages of this model: uint8 [2 * KV heads, 128 tokens, 72] a layer, 64 bytes of codes and 8 of scales a row."""
    page = 2 * M31.kv_heads * 128 * 72
    assert M31.kv_bytes_per_token("nvfp4") == M31.layers * page / 128
    assert M31.index_bytes_per_token("nvfp4") == 57 * 72 and M31.index_bytes_per_token("fp8") == 57 * 128


def test_sizes_agree_with_the_adapter_specification():
    config = {
        "num_hidden_layers": 60, "hidden_size": 6144, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128,
        "intermediate_size": 3072, "dense_intermediate_size": 12288, "num_local_experts": 128, "moe_layer_freq": [0] * 3 + [1] * 57,
    }  # fmt: skip
    shape = ModelShape.from_config(config)
    groups = {"attention": ATTENTION_ROLES, "experts": EXPERT_ROLES, "shared": SHARED_ROLES, "dense": DENSE_ROLES}
    plan = plan_step(M31, B300, 4, layout="dep4", samples=1, prompt_tokens=1, response_tokens=1, rank=32)
    for name, roles in groups.items():
        modules = shape.modules(roles)
        assert plan.adapter_parameters[name] == sum(32 * sum(shape.matrix(m.role)) for m in modules)
        for role in roles:
            assert M31.matrix(role) == shape.matrix(role) and M31.count(role) == len(shape.modules([role]))
    assert plan.sync_bytes == 2 * plan.parameters == 2 * sum(32 * sum(shape.matrix(m.role)) for m in shape.modules(LORA_ROLES))


def test_sizes_agree_with_what_is_published():
    assert M31.expert_bytes("nvfp4") + M31.other_bytes("nvfp4") == pytest.approx(250.1e9)
    assert M31.expert_bytes("mxfp8") + M31.other_bytes("mxfp8") == pytest.approx(451.5e9)
    qwen = get_model("qwen3-30b-a3b")
    total = qwen.expert_parameters + qwen.projection_parameters + 48 * 128 * 2048 + 2 * 151936 * 2048
    assert total == pytest.approx(30.5e9, rel=0.01) and qwen.active_parameters == pytest.approx(3.3e9, rel=0.1)
    # Where a size is published, what is counted is below it, by no more than vision tower and drafter.
    counted = M31.projection_parameters * 8.25 / 8 + 57 * 128 * 6145 * 4 + 4 * 200064 * 6144
    assert 0 < M31.other_bytes("nvfp4") - counted < 3e9 and 0 < M31.other_bytes("mxfp8") - counted < 10e9


@settings(deadline=None)
@given(
    st.sampled_from(["nvfp4", "fp8", "bf16"]),
    st.sampled_from(["dep4", "tp4", "tp8", "dep8", "tp2"]),
    st.integers(1, 2_000_000),
    st.floats(0.3, 1.0),
    st.sampled_from(["b300", "h200", "h100", "mi355x"]),
)
def test_what_is_said_to_fit_does_and_one_more_does_not(kv, layout, context, share, gpu):
    machine = get_gpu(gpu)
    plan = plan_memory(M31, machine, 8, layout, context, kv=kv, usable_share=share)
    spread, replicas = get_layout(layout, M31, 8)
    per_gpu = plan.sequences // (8 if spread.kind == "dep" else replicas)
    assert plan.sequences % (8 if spread.kind == "dep" else replicas) == 0
    used = plan.weights_per_gpu + per_gpu * plan.cache_per_sequence
    budget = machine.memory_gb * 1e9 * share
    if plan.limit == "weights":
        assert plan.weights_per_gpu > budget and plan.sequences == 0
    else:
        assert used <= budget * (1 + 1e-9) < (used + plan.cache_per_sequence) * (1 + 2e-9)
    assert (plan.sequences == 0) == (plan.limit != "KV cache")
    pages = -(-context // PAGE_TOKENS)
    whole = plan_memory(M31, machine, 8, layout, pages * PAGE_TOKENS, kv=kv, usable_share=share)
    assert whole.cache_per_sequence == plan.cache_per_sequence


def test_layouts_hold_what_they_say():
    dep, tp = (plan_memory(M31, B300, 4, layout, 262144) for layout in ("dep4", "tp4"))
    experts, rest = M31.expert_bytes("nvfp4"), M31.other_bytes("nvfp4")
    assert dep.weights_per_gpu == experts / 4 + rest and tp.weights_per_gpu == (experts + rest) / 4
    assert dep.cache_per_sequence == 262144 * (34_560 + 4_104)
    assert tp.cache_per_sequence == 262144 * (34_560 / 4 + 4_104)  # one KV head a GPU, index keys on every GPU
    assert plan_memory(M31, B300, 8, "tp8", 262144).cache_per_sequence == tp.cache_per_sequence  # KV heads are replicated above 4
    assert plan_memory(M31, B300, 8, "tp4", 262144).sequences == 2 * tp.sequences
    assert plan_memory(M31, B300, 8, "dep4", 262144).sequences == 2 * dep.sequences


def test_options_of_memory_matter():
    base = plan_memory(M31, B300, 4, "dep4", 262144)
    assert plan_memory(M31, B300, 4, "dep4", 262144, index="fp8").sequences < base.sequences
    assert plan_memory(M31, B300, 4, "dep4", 262144, weights="mxfp8").sequences < base.sequences
    assert plan_memory(M31, get_gpu("h100"), 4, "dep4", 262144, kv="fp8").limit == "weights"
    assert plan_memory(M31, get_gpu("h200"), 4, "dep4", 8_000_000).limit == "KV cache of one sequence"


def test_reading_for_one_token():
    context = 262144
    assert M31.decode_read(context, "fp8", "fp8") == 3 * context * 1024 + 57 * (context * 128 + 2048 * 1024)
    assert M31.decode_read(1000, "fp8", "fp8") == 3 * 1000 * 1024 + 57 * (1000 * 128 + 1000 * 1024)
    qwen = get_model("qwen3-30b-a3b")
    assert qwen.decode_read(1000, "bf16", "bf16") == 48 * 1000 * 2 * 4 * 128 * 2 and qwen.index_bytes_per_token("bf16") == 0


def test_step_arithmetic_by_hand():
    sizes = {"layout": "dep4", "samples": 64, "prompt_tokens": 200, "response_tokens": 1800, "rank": 32, "micro_batch_tokens": 8000}
    plan = plan_step(M31, B300, 8, **sizes)
    base, trained = 250.1e9, plan.parameters
    assert plan.tokens == 128_000 and plan.base_per_gpu == pytest.approx(base / 8)
    assert plan.adapter_state_per_gpu == trained * 18 / 8 and plan.activations_per_gpu == 8000 * 60 * 6144 * 2
    assert plan.gathered_per_gpu == pytest.approx(2 * 2 * base * 7 / 8)  # two micro-batches a GPU, forward and backward
    keys = 3 * 1000 + 57 * 1000  # half the sequence: shorter than 16 blocks
    assert plan.train_flops == 128_000 * (6 * M31.active_parameters + 3 * 4 * 8192 * keys)
    assert plan.train_seconds == pytest.approx(plan.train_flops / (8 * 2250e12 * 0.3))
    reads = M31.expert_bytes("nvfp4") / 4 + M31.other_bytes("nvfp4") + 8 * M31.decode_read(1100, "nvfp4", "nvfp4")
    assert plan.decode_bytes_per_gpu == pytest.approx(reads) and plan.decode_seconds == pytest.approx(reads / 8e12)
    assert plan.generate_seconds == pytest.approx(1800 * plan.decode_seconds)
    parts = plan.base_per_gpu + plan.layer_gathered + plan.adapter_state_per_gpu + plan.activations_per_gpu
    assert plan.trainer_per_gpu == parts
    double = plan_step(M31, B300, 8, **sizes | {"samples": 128, "rank": 64})
    assert double.train_flops == 2 * plan.train_flops and double.parameters == 2 * plan.parameters


def test_step_command(tmp_path):
    out = cli("step", "--gpu", "gb300", "--gpus", "16", "--json", str(tmp_path / "step.json"))
    assert out.exit_code == 0 and "Assumptions:" in out.stdout and "adapter sent to each engine replica" in out.stdout
    content = json.loads((tmp_path / "step.json").read_text())
    assert content["parameters"] == sum(content["adapter_parameters"].values()) and f"{content['parameters']:,}" in out.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "m31-flas"], "unknown model 'm31-flas'; known: m31-flash, qwen3-30b-a3b, mini-m3; did you mean m31-flash?"),
        (["--gpu", "b30"], "unknown GPU 'b30'; known: b300, gb300, b200, h200, h100, mi355x; did you mean b300?"),
        (["--layout", "ep4"], "layout must be dep<N> or tp<N>, not 'ep4'"),
        (["--layout", "dep0"], "layout must be dep<N> or tp<N>, not 'dep0'"),
        (["--layout", "dep3", "--gpus", "3"], "MiniMax-M3.1-Flash has 128 experts, which dep3 does not divide"),
        (["--layout", "dep4", "--gpus", "6"], "6 GPUs do not hold whole replicas of dep4"),
        (["--gpus", "0"], "0 GPUs do not hold whole replicas of dep4"),
        (["--context", "0"], "a plan needs a context of a token or more"),
        (["--usable-share", "1.5"], "and a usable share in (0, 1], not 262144 and 1.5"),
        (["--kv", "int4"], "unknown KV format 'int4'; known: nvfp4, fp8, bf16"),
        (["--index", "int4"], "unknown format 'int4'"),
        (["--weights", "int4"], "unknown format 'int4'"),
        (["--json", "/nonexistent/plan.json"], "/nonexistent/plan.json: No such file or directory"),
    ],
)
def test_a_plan_that_cannot_be_made_is_one_line(arguments, message):
    out = cli("memory", *arguments)
    assert out.exit_code == 2 and message in out.stderr and out.stderr.count("\n") == 1


def test_a_step_that_cannot_be_planned_is_one_line():
    for arguments in (["--samples", "0"], ["--utilisation", "0"], ["--rank", "0"]):
        out = cli("step", *arguments)
        assert out.exit_code == 2 and "a step needs at least one sample" in out.stderr and out.stderr.count("\n") == 1
    with pytest.raises(PlanError, match="dep3 does not divide"):
        plan_step(M31, B300, 3, layout="dep3", samples=1, prompt_tokens=1, response_tokens=1)


def test_every_entry_of_the_tables_loads_and_names_its_sources():
    for table, load in (("models", get_model), ("hardware", get_gpu)):
        for name in OmegaConf.load(TABLES / f"{table}.yaml"):
            entry = load(name)
            assert entry.sources and all(len(s) > 20 for s in entry.sources) and entry.title
    assert M31.matrix(Role.INDEX_Q) == (512, 6144) and M31.matrix(Role.INDEX_K) == (128, 6144)
    assert get_model("qwen3-30b-a3b").parameters(Role.INDEX_Q, *SHARED_ROLES, *DENSE_ROLES) == 0


def test_tables_and_checkpoint_sizes_describe_the_same_model():
    """`plan memory` counts from models.yaml, `plan weights` from a config.json: one arithmetic, two ways to name the sizes."""
    from math import prod

    from samebits.quant.profile import Format
    from samebits.quant.roles import EXPERT_ROLES, PROJECTION_ROLES, tensor_role
    from samebits.quant.sizes import text_shapes, weight_bytes

    shapes = text_shapes(json.loads(Path("tests/fixtures/minimax_m3_config.json").read_text()))
    model = get_model("m31-flash")
    for roles, count in ((EXPERT_ROLES, model.expert_parameters), (PROJECTION_ROLES, model.projection_parameters)):
        assert sum(prod(shape) for name, shape in shapes.items() if tensor_role(name) in roles) == count
    for fmt, extra in ((Format.NVFP4, 4), (Format.MXFP8, 0), (Format.BF16, 0), (Format.FP32, 0)):
        name = {"bfloat16": "bf16", "float32": "fp32"}.get(str(fmt), str(fmt))
        assert weight_bytes((64, 256), fmt) - extra == 64 * 256 * BITS[name] / 8


def test_memory_of_a_gpu_is_what_its_driver_gives_in_gib():
    """Of an H200 what torch said on the one that the results were measured on."""
    measured = json.loads(Path("docs/results/h200_formats.json").read_text())["machine"]
    h200 = get_gpu("h200")
    assert h200.title.startswith(measured["gpu"]) and round(h200.memory_gib, 1) == measured["memory_gib"]
    for name in OmegaConf.load(TABLES / "hardware.yaml"):
        gpu = get_gpu(name)
        assert gpu.memory_gb == pytest.approx(gpu.memory_gib * 1.073741824) and any(source.startswith("memory") for source in gpu.sources)

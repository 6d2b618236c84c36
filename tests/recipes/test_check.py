"""`samebits train --check`: sound recipes are planned without GPU or weights; each broken variant ends with one line naming the key."""

import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from samebits.recipes import cli
from samebits.recipes.check import check
from samebits.recipes.config import RECIPES, RecipeError, load_recipe
from samebits.recipes.validate import validate

DATA = Path(__file__).parent / "data"
DAPO, AIME = DATA / "dapo_like.jsonl", DATA / "aime_like.jsonl"
TINY, M31, H200, QWEN = "tiny_m3_grpo", "m31_dapo_math_16xgb300", "m31_dapo_math_8xh200", "qwen3_30b_a3b_dapo_math_8xh100"
B200 = "m31_dapo_math_8xb200"
SHIPPED = (TINY, M31, B200, H200, QWEN)
ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
DP, EP, TP = (f"{ROLLOUT}.{kind}_parallel_size" for kind in ("data", "expert", "tensor_model"))
SPREAD = "expert_parallel.trainer"
LOCAL = ["task=dapo-math", f"data_source.train={DAPO}", f"data_source.test={AIME}", "data_source.without=[]"]


def run(recipe: str, *overrides: str):
    device = ["device=cpu"] if recipe == TINY else []
    return CliRunner().invoke(cli.app, ["train", f"{recipe}.yaml", "--check", *device, *overrides], env={"COLUMNS": "200"})


def batch(prompts: int, samples: int) -> list[str]:
    return [f"data.train_batch_size={prompts}", f"{ACTOR}.ppo_mini_batch_size={prompts}", f"{ROLLOUT}.n={samples}"]


BROKEN = [
    # sizes that do not divide, or that the layout does not hold
    (M31, [f"{TP}=3"], f"{TP}=3 does not divide the 4 KV heads of MiniMax-M3.1-Flash: use more replicas"),
    (M31, [f"{TP}=4"], f"{TP}=4 with {DP}=4: an engine is spread by one of them"),
    (M31, [f"{TP}=4", f"{DP}=1", f"{EP}=2"], f"{EP}=2 must be 1 or tensor_model_parallel_size (4)"),
    (M31, [f"{TP}=4", f"{DP}=1", f"{EP}=1", "trainer.n_gpus_per_node=6"], f"{TP}=4 does not divide trainer.n_gpus_per_node=6"),
    (M31, [f"{ROLLOUT}.pipeline_model_parallel_size=2"], "pipeline_model_parallel_size=2: the engine has no pipeline stages"),
    (M31, [f"{EP}=2"], f"{EP}=2 must be 1 or data_parallel_size (4)"),
    (M31, [f"{DP}=3", f"{EP}=3"], f"{EP}=3 does not divide the 128 experts"),
    (M31, [f"{DP}=32", f"{EP}=32"], f"trainer.nnodes=4 x trainer.n_gpus_per_node=4 GPUs do not hold whole engines of {DP}=32"),
    (M31, [f"{DP}=2", f"{EP}=2"], f"{DP}=2 must be a multiple of trainer.n_gpus_per_node=4"),
    (M31, ["trainer.nnodes=3"], "data.train_batch_size=128 x 16 samples do not divide over 12 ranks"),
    (M31, ["trainer.nnodes=1", "trainer.n_gpus_per_node=2"], "trainer.nnodes=1 x trainer.n_gpus_per_node=2 GPUs do not hold"),
    (M31, ["trainer.nnodes=0"], "trainer.nnodes must be a whole number"),
    (M31, [f"{ACTOR}.fsdp_config.fsdp_size=5"], "fsdp_config.fsdp_size=5 must be -1 (all) or divide the 16 GPUs"),
    (M31, batch(3, 3), "data.train_batch_size=3 x 3 samples do not divide over 16 ranks"),
    (M31, [f"{ACTOR}.ppo_mini_batch_size=64"], "ppo_mini_batch_size (64) must equal data.train_batch_size (128)"),
    (M31, [f"{SPREAD}=true", "trainer.nnodes=3", *batch(96, 16)], "the 128 experts of MiniMax-M3.1-Flash do not divide over the 12 ranks"),
    (M31, [f"{SPREAD}=true", f"{ACTOR}.fsdp_config.offload_policy=true"], f"{SPREAD}=true keeps experts on the GPUs, {ACTOR}.fsdp"),
    (M31, [f"{SPREAD}=4"], f"{SPREAD} must be true or false, not 4"),
    # what the engine takes
    (M31, ["lora.rank=1024"], "lora.rank: vLLM serves ranks"),
    (M31, [f"{ROLLOUT}.engine_kwargs.vllm.max_lora_rank=16"], f"lora.rank=32 is above the engine's {ROLLOUT}.engine_kwargs.vllm.max_lora"),
    (M31, [f"{ROLLOUT}.max_model_len=22527"], f"{ROLLOUT}.max_model_len=22527 is less than prompt plus response (22528)"),
    (M31, [f"{ROLLOUT}.max_model_len=600000"], "max_model_len=600000 is more than the 524288 tokens of MiniMax-M3.1-Flash"),
    (M31, [f"{ROLLOUT}.enable_chunked_prefill=false"], f"{ROLLOUT}.max_num_batched_tokens=8192 cannot hold a prompt of 22528 tokens"),
    (M31, [f"{ACTOR}.ppo_max_token_len_per_gpu=22527"], "ppo_max_token_len_per_gpu=22527 cannot hold one sequence of 22528"),
    (M31, [f"{ROLLOUT}.gpu_memory_utilization=1.5"], f"{ROLLOUT}.gpu_memory_utilization must lie within 0 and 1, not 1.5"),
    # nothing where something is needed
    (M31, ["trainer.nnodes=null"], "trainer.nnodes must not be null: it is 1 in verl's own configuration"),
    (M31, ["actor_rollout_ref.actor.optim=null"], "actor_rollout_ref.actor.optim must not be null: it is a section"),
    (M31, ["tracking=5"], "tracking is a section of keys, not 5"),
    (M31, ["tracking.wandb=true"], "tracking.wandb: Invalid type assigned"),
    # what would make trainer and engine disagree
    (M31, [f"{ROLLOUT}.top_p=0.9"], f"{ROLLOUT}.top_p=0.9 renormalises"),
    (M31, [f"{ROLLOUT}.temperature=-1"], f"{ROLLOUT}.temperature must be positive"),
    (M31, [f"{ROLLOUT}.logprobs_mode=raw_logprobs", f"{ROLLOUT}.temperature=0.7"], "logprobs_mode=raw_logprobs ignores the temperature (0"),
    (M31, [f"{ACTOR}.policy_loss.loss_mode=vanilla"], "importance sampling is configured"),
    (M31, [f"{ROLLOUT}.enable_rollout_routing_replay=false"], "enable_rollout_routing_replay=false, but checks.routing_replay wants"),
    (M31, ["algorithm.adv_estimator=gae"], "algorithm.adv_estimator=gae"),
    (H200, ["numerics.profile=w4a4", "numerics.kv_cache=auto"], "numerics.profile=w4a4 multiplies NVFP4 by NVFP4, which NVIDIA H200"),
    (M31, ["numerics.hash=0123456789abcdef"], "numerics.hash is 0123456789abcdef"),
    # names
    (M31, ["trainer.total_trainig_steps=3"], "unknown key trainer.total_trainig_steps; did you mean trainer.total_training_steps?"),
    (M31, ["train_batch_size=4"], "unknown key train_batch_size; did you mean data.train_batch_size?"),
    (M31, ["lora.rnak=8"], "unknown key lora.rnak; did you mean lora.rank?"),
    (M31, ["grading.overlong_bufer=8"], "unknown key grading.overlong_bufer; did you mean grading.overlong_buffer?"),
    (M31, ["tracking.wandb.projekt=x"], "unknown key tracking.wandb.projekt; did you mean tracking.wandb.project?"),
    (M31, [f"{ROLLOUT}.zzz=1"], f"unknown key {ROLLOUT}.zzz"),
    (M31, ["cluster.gpu=gb3000"], "cluster.gpu: unknown GPU 'gb3000'; known: b300, gb300"),
    (M31, ["architecture=m31-flesh"], "architecture: unknown model 'm31-flesh'; known: m31-flash"),
    (M31, ["lora.targets=all,indexer"], "lora.targets: unknown LoRA target 'indexer'"),
    (QWEN, ["lora.targets=shared"], "lora.targets=shared: Qwen3-30B-A3B has none of these weights"),
    (M31, ["task=dapo_math"], "task: unknown task 'dapo_math'; known: arithmetic, dapo-math, mini-math; did you mean dapo-math?"),
    (TINY, ["architecture=m31-flash"], "architecture: m31-flash has layers 60, the checkpoint at"),
    (TINY, ["model=/no/such/model"], "model: no model at /no/such/model"),
    # data and grading
    (M31, ["data_source.train=/no/such.parquet"], "no file /no/such.parquet"),
    (M31, ["data_source.train="], "data_source.train: task dapo-math needs"),
    (M31, ["data_source.duplicates=maybe"], "data_source.duplicates must be refuse or drop"),
    (M31, ["data_source.prompt_template=solve"], "data_source.prompt_template must hold {problem} once"),
    (M31, ["grading.overlong_buffer=20480"], "grading.overlong_buffer=20480 must be less than the longest response (20480)"),
    (M31, ["grading.max_response_tokens=20481"], "grading.max_response_tokens=20481 must lie within 1 and data.max_response_length=20480"),
    (M31, ["grading.truncation=ignore"], "grading.truncation must be wrong or grade"),
    (M31, ["grading.overlong_factor=-1"], "grading.overlong_factor must not be negative"),
    (M31, ["reward.reward_kwargs.overlong_buffer_cfg.len=4"], "reward.reward_kwargs.overlong_buffer_cfg: verl's overlong settings do"),
    (M31, ["reward.reward_manager.name=dapo"], "reward.reward_manager.name=dapo would do nothing"),
    (TINY, ["grading.overlong_buffer=4"], "grading.overlong_buffer would do nothing: task arithmetic does not read it"),
    (TINY, ["data_source.train=aime24"], "data_source.train would do nothing: task arithmetic does not read it"),
    (M31, ["tracking.wandb.mode=sometimes"], "tracking.wandb.mode must be online or offline"),
    (M31, ["cluster.usable_share=1.2"], "cluster.usable_share"),
    (TINY, LOCAL, "data.train_batch_size=16 is more than the 12 training problems"),
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "overrides", "says"), BROKEN, ids=[" ".join(o)[-60:] for _, o, _ in BROKEN])
def test_broken_variant_is_one_line_with_status_2(recipe, overrides, says):
    result = run(recipe, *overrides)
    assert result.exit_code == 2, result.output
    assert result.output.startswith("samebits: ") and result.output.count("\n") == 1
    assert says in result.output


@pytest.mark.parametrize(
    ("recipe", "overrides", "says"),
    [
        (
            H200,
            [f"{ROLLOUT}.gpu_memory_utilization=0.9"],
            "phase generate needs 176.2 GB of each NVIDIA H200 (SXM), 141.9 of 150.1 GB are usable",
        ),
        (
            H200,
            ["cluster.usable_share=0.8", f"{ROLLOUT}.gpu_memory_utilization=0.5", f"{ACTOR}.ppo_max_token_len_per_gpu=34816"],
            "phase train needs 122.9 GB of each NVIDIA H200 (SXM), 120.1 of 150.1 GB are usable",
        ),
        (H200, [f"{ROLLOUT}.free_cache_engine=false"], "phase train needs"),
        (H200, ["cluster.gpu=h100"], "of 84.9 GB are usable"),
        (M31, [f"{DP}=1", f"{EP}=1", f"{ROLLOUT}.gpu_memory_utilization=0.9"], "largest part: engine: base, 250.1 GB"),
        (H200, ["actor_rollout_ref.model.enable_gradient_checkpointing=false"], "largest part: trainer: activations kept"),
    ],
)
def test_too_little_memory_is_one_line_with_status_1(recipe, overrides, says):
    result = run(recipe, *overrides)
    assert result.exit_code == 1, result.output
    assert result.output.startswith("samebits: does not fit: phase ") and result.output.count("\n") == 1
    assert says in result.output and "GB missing" in result.output


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ([f"{ROLLOUT}.gpu_memory_utilization=0.49"], "gpu_memory_utilization=0.49 gives the engine 73.6 of NVIDIA H200 (SXM)'s 150.1 GB"),
        ([f"{ROLLOUT}.engine_kwargs.vllm.kv_cache_memory_bytes=200000000"], "kv_cache_memory_bytes=200000000 holds no sequence of 22,528"),
        ([f"{ROLLOUT}.gpu_memory_utilization=0.1"], "the 0.29 GB KV cache of one sequence of 22,528 tokens: it takes 0.492 at least"),
    ],
)
def test_an_engine_whose_share_holds_no_sequence_does_not_fit(overrides, says):
    """However much is free on the GPU: vLLM would refuse to start."""
    result = run(H200, *overrides)
    assert result.exit_code == 1 and result.output.startswith("samebits: does not fit: ") and result.output.count("\n") == 1
    assert says in result.output


def test_the_least_share_that_is_named_is_enough_and_one_less_is_not():
    said = run(H200, f"{ROLLOUT}.gpu_memory_utilization=0.3").output
    least = float(re.search(r"it takes ([0-9.]+) at least", said)[1])
    assert 0.3 < least < 0.62
    assert run(H200, f"{ROLLOUT}.gpu_memory_utilization={least}").exit_code == 0
    assert run(H200, f"{ROLLOUT}.gpu_memory_utilization={least - 0.003:.3f}").exit_code == 1


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"PAR1 no parquet", "bad.parquet"),
        (b"", "no rows"),
    ],
)
def test_unreadable_data_is_one_line(tmp_path, content, says):
    bad = tmp_path / "bad.parquet"
    bad.write_bytes(content)
    result = run(M31, f"data_source.train={bad}", f"data_source.test={AIME}", "data_source.without=[]")
    assert (result.exit_code, result.output.count("\n")) == (2, 1) and says in result.output


def test_training_problems_that_are_all_evaluation_problems_are_refused(tmp_path):
    result = run(TINY, *LOCAL, f"data_source.train={AIME}", *batch(4, 4))
    assert result.exit_code == 2 and "every problem overlaps" in result.output


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_recipe_passes_its_check(name, tmp_path):
    result = run(name, "--json", str(tmp_path / "found.json"))
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["name"] == name and {p["name"] for p in found["memory"]["phases"]} == {"generate", "train", "sync"}
    assert all(p["short"] == 0 for p in found["memory"]["phases"])
    assert found["runnable"] is (name == TINY), "a recipe that this version cannot run, or not without a checkpoint, must say so"
    assert bool(found["missing"]) is (name not in (TINY, H200))
    assert ("this version of samebits cannot run the recipe" in result.output) is bool(found["missing"])
    assert ("samebits quantize SOURCE checkpoints/m31-flash makes the checkpoint" in result.output) is (name == H200)
    for reason in found["missing"]:
        assert reason in result.output


def test_shipped_recipes_state_only_what_differs():
    for name in SHIPPED[1:]:
        text = (RECIPES / f"{name}.yaml").read_text()
        assert "base: dapo_math.yaml" in text and len(text.splitlines()) < 30
    mini = {"mini_m3", "mini_m3_h200", "mini_m3_h200_x2"}  # see test_mini_m3
    assert {p.stem for p in RECIPES.glob("*.yaml")} == {*SHIPPED, *mini, "base", "baseline", "dapo_math", "models", "hardware", "serving"}


def test_a_replica_that_is_spread_by_sequences_is_planned_and_not_run():
    result = run(H200, f"{TP}=1", f"{DP}=8", f"{EP}=8")
    assert result.exit_code == 0 and f"{DP}=8: the engine does not spread a replica by it; use tensor_model_parallel_size" in result.output


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (M31, "numerics.profile=w4a4 computes with nvfp4 activations"),
        (QWEN, "architecture qwen3-30b-a3b is of the qwen3_moe family: quantize, trainer and engine implement minimax_m3 only"),
    ],
)
def test_train_refuses_what_this_version_cannot_run(name, says):
    result = CliRunner().invoke(cli.app, ["train", f"{name}.yaml"])
    assert (result.exit_code, result.output.count("\n")) == (2, 1) and says in result.output


def test_reference_run_is_the_published_one():
    report = check(f"{M31}.yaml")
    verl, layout = report.verl, report.found.layout
    assert (layout.nodes, layout.gpus_per_node, layout.gpus, layout.replicas, layout.expert_ranks, layout.fsdp) == (4, 4, 16, 4, 4, 16)
    assert report.recipe.lora.rank == 32 and report.recipe.lora.targets == "all"
    assert verl.trainer.total_training_steps == 200 and verl.algorithm.adv_estimator == "grpo"
    assert verl.algorithm.rollout_correction.rollout_is_threshold == 2.0 and verl.algorithm.rollout_correction.rollout_is == "token"
    assert verl.actor_rollout_ref.actor.ppo_mini_batch_size == verl.data.train_batch_size and verl.actor_rollout_ref.actor.ppo_epochs == 1
    kwargs = verl.reward.custom_reward_function.reward_kwargs
    assert dict(kwargs) == {"truncation": "wrong", "overlong_buffer": 4096, "overlong_factor": 1.0, "max_response_tokens": 20480}
    assert verl.reward.custom_reward_function.path == "pkg://samebits.recipes.grading"


def test_commands_start_ray_on_every_node_and_then_the_job():
    result = run(M31, "cluster.ray_port=6400", "seed=3")
    printed = [line.strip() for line in result.output.split("start:\n")[1].splitlines()]
    head, others, train, stop = [line for line in printed if not line.startswith("#")][:4]
    assert "ray start --head --node-ip-address=HEAD_ADDRESS --port=6400 --num-gpus=4" in head
    assert "ray start --address=HEAD_ADDRESS:6400 --num-gpus=4" in others
    assert train == f"RAY_ADDRESS=HEAD_ADDRESS:6400 RAY_AUTH_MODE=disabled samebits train {M31}.yaml cluster.ray_port=6400 seed=3"
    assert stop == "ray stop"
    assert "each of the other 3 nodes" in result.output
    alone = run(H200).output.split("start:\n")[1]
    assert "ray start" not in alone and f"samebits train {H200}.yaml" in alone


def test_local_data_is_read_and_counted():
    result = run(TINY, *LOCAL, *batch(4, 4))
    assert result.exit_code == 0 and f"data_source.train: {DAPO}: 12 rows, 12 distinct problems" in result.output
    assert f"data_source.test: {AIME}: 6 rows, 6 distinct problems" in result.output


def test_hub_names_are_not_looked_up_but_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert "BytedTsinghua-SIA/DAPO-Math-17k: not looked up: a hub name" in run(M31).output
    snapshot = tmp_path / "datasets--BytedTsinghua-SIA--DAPO-Math-17k" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    assert "BytedTsinghua-SIA/DAPO-Math-17k: in the local Hugging Face cache" in run(M31).output


def test_a_check_needs_no_verl_vllm_or_ray_and_little_time():
    code = (
        "import sys\n"
        "from samebits.recipes.check import check\n"
        f"check('{M31}.yaml')\n"
        "print([m for m in ('verl', 'vllm', 'ray') if m in sys.modules])"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.stdout.strip() == "[]"
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 20, "seconds of one core"


def test_json_without_check_is_refused():
    result = CliRunner().invoke(cli.app, ["train", f"{TINY}.yaml", "--json", "x.json"])
    assert (result.exit_code, result.output) == (2, "samebits: --json goes with --check; a run writes summary.json\n")


def test_a_gpu_is_asked_for_only_when_the_recipe_is_to_run(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert run(TINY, "device=cuda").exit_code == 0
    with pytest.raises(RecipeError, match="no CUDA GPU"):
        validate(*load_recipe(f"{TINY}.yaml", ["device=cuda"], planned=True))


def test_replay_may_be_given_up_in_words():
    assert run(TINY, f"{ROLLOUT}.enable_rollout_routing_replay=false", "checks.routing_replay=false").exit_code == 0


def test_a_replica_over_several_gpus_is_planned_with_its_parts(tmp_path):
    """Experts, heads and large weights are split; index keys, indexer and router are on each GPU."""

    def planned(tp: int) -> dict:
        path = tmp_path / f"{tp}.json"
        result = run(M31, f"{DP}=1", f"{EP}=1", f"{TP}={tp}", "--json", str(path))
        assert result.exit_code == 0, result.output
        return json.loads(path.read_text())

    two, four = planned(2), planned(4)
    layout = four["layout"]
    assert (layout["engine_gpus"], layout["tensor_ranks"], layout["expert_ranks"], layout["replicas"]) == (4, 4, 4, 4)
    assert not any("data_parallel_size" in line for line in four["missing"])
    before, after = (r["memory"]["phases"][0]["parts"]["engine: base"] for r in (two, four))
    assert 0.5 < after / before < 0.51

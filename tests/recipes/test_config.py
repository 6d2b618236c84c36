"""A recipe that cannot agree or is mistyped ends with status 2 and one line, before anything starts."""

import json
import shutil

import pytest
from typer.testing import CliRunner

from samebits.quant.profile import get_profile
from samebits.recipes import cli
from samebits.recipes.config import RecipeError, load_recipe
from samebits.recipes.validate import examine, validate

TINY = "recipes/tiny_m3_grpo.yaml"
ROLLOUT = "actor_rollout_ref.rollout"


def problem(*overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        validate(*load_recipe(TINY, ["device=cpu", *overrides]))
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_shipped_recipe_is_valid_and_covers_every_expert():
    recipe, verl = load_recipe(TINY, ["device=cpu"])
    spec = validate(recipe, verl)
    experts = [name for name in spec.shapes() if ".experts." in name]
    shape = spec.shape
    assert len(experts) == len(shape.moe_layers) * shape.experts * 3 * 2
    assert verl.actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config.samebits.profile == "w4a16-fp32"


def test_overrides_reach_both_kinds_of_keys():
    recipe, verl = load_recipe(TINY, ["device=cpu", "lora.targets=experts", "seed=7", "trainer.total_training_steps=3"])
    assert (recipe.lora.targets, recipe.seed, verl.trainer.total_training_steps, verl.data.seed) == ("experts", 7, 3, 7)
    assert {r.split(".")[0] for r in validate(recipe, verl).roles} == {"expert"}
    assert verl.actor_rollout_ref.actor.optim.override_optimizer_config.fused is True, "AdamW takes one launch a tensor"


@pytest.mark.parametrize("experts", [False, True])
def test_what_is_computed_again_reaches_the_trainer(experts):
    _, verl = load_recipe(TINY, ["device=cpu", f"recompute.experts={str(experts).lower()}"])
    assert verl.actor_rollout_ref.model.override_config.samebits_recompute_experts is experts


def test_whether_ranks_share_the_indexers_work_reaches_the_engine():
    for overrides, split in ((["device=cpu"], True), (["device=cpu", "engine.split_indexer=false"], False)):
        _, verl = load_recipe(TINY, overrides)
        assert verl.actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config.samebits.split_indexer is split


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("recompute.experts=perhaps", "recompute.experts: Value 'perhaps'"),
        ("engine.split_indexer=perhaps", "engine.split_indexer: Value 'perhaps'"),
        ("nonsense=1", "unknown key nonsense"),
        ("trainer.nonsense=1", "unknown key trainer.nonsense"),
        ("lora.nonsense=1", "unknown key lora.nonsense"),
        ("seed=abc", "seed: Value 'abc'"),
        ("trainer.total_training_steps=many", "trainer.total_training_steps"),
        (f"{ROLLOUT}.n=abc", f"{ROLLOUT}.n: expected int"),
        ("device=tpu", "device must be auto, cpu or cuda"),
        ("model=/no/such/model", "model: no model at /no/such/model"),
        ("model=''", "no checkpoint is named"),
        ("numerics.profile=w9a9", "unknown numerics profile 'w9a9'"),
        ("numerics.kv_cache=int3", "KV cache"),
        ("numerics.hash=abcd", "numerics.hash is abcd"),
        ("lora.targets=indexer", "unknown LoRA target 'indexer'"),
        ("lora.rank=33", "lora.rank"),
        ("lora.alpha=0", "lora.alpha must be positive"),
        ("task=chess", "unknown task 'chess'"),
        ("fault.kind=gremlin", "unknown fault 'gremlin'"),
        ("tracing.first=0", "tracing: step 0"),
        ("checks.max_kl=0", "checks.max_kl"),
        ("threads=0", "threads must be at least 1"),
        (f"{ROLLOUT}.top_p=0.9", "kept tokens"),
        (f"{ROLLOUT}.top_k=20", "kept tokens"),
        (f"{ROLLOUT}.temperature=0", "temperature must be positive"),
        (f"{ROLLOUT}.repetition_penalty=1.2", "unknown key"),
        (f"{ROLLOUT}.n=1", "at least 2"),
        (f"{ROLLOUT}.calculate_log_probs=false", "inactive"),
        (f"{ROLLOUT}.load_format=dummy", "leaves the base random"),
        (f"{ROLLOUT}.name=vllm", "samebits rollout only"),
        (f"{ROLLOUT}.max_model_len=20", "max_model_len=20 is less than"),
        (f"{ROLLOUT}.enable_prefix_caching=false", "keeps the routes to replay"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=vanilla", "inactive"),
        ("algorithm.rollout_correction.bypass_mode=false", "inactive"),
        ("algorithm.rollout_correction.bypass_mode=false", "ablation.recompute_old_logprobs=true"),
        ("algorithm.rollout_correction.rollout_is=null", "ablation.importance_sampling=false"),
        ("numerics.parity=exact", "must be auto or bitwise, not 'exact'"),
        ("numerics.parity=bitwise", "does not hold with profile w4a16-fp32 on cpu"),
        ("ablation.replay=false", "unknown key ablation.replay"),
        ("ablation=false", "ablation is a section of keys"),
        ("algorithm.rollout_correction.rollout_is=sequence", "corrects by token"),
        ("algorithm.rollout_correction.rollout_is_threshold=0.5", "at least 1"),
        ("actor_rollout_ref.actor.use_kl_loss=true", "reference model"),
        ("actor_rollout_ref.actor.ppo_epochs=2", "one optimizer step a batch"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=8", "one optimizer step a batch"),
        ("actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum", "use token-mean"),
        ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=30", "cannot hold one sequence"),
        ("trainer.total_training_steps=0", "at least 1"),
        ("trainer.n_gpus_per_node=7", "do not divide"),
        ("trainer.v1.trainer_mode=separate_async", "needs sync"),
        ("skip.rollout_tq.enable=true", "a service that this job does not start"),
        ("seed=-1", "seed"),
        ("seed=99999999999999", "seed"),
        ("name=../../elsewhere", "name"),
        (f"{ROLLOUT}.max_model_len=abc", "max_model_len"),
        ("trainer.n_gpus_per_node=0", "n_gpus_per_node"),
        ("data.train_batch_size=2.5", "train_batch_size"),
        ("actor_rollout_ref.actor.optim.lr=-1", "optim.lr"),
    ],
)
def test_bad_recipe_is_refused_in_one_line(override, says):
    assert says in problem(override)


def test_a_fault_befalls_a_replica_that_there_is():
    two = "trainer.n_gpus_per_node=2"
    assert "fault.replica=2: the recipe has engine replicas 0 to 1" in problem("fault.kind=wrong_tensor", "fault.replica=2", two)
    assert "fault.replica=0 would do nothing" in problem("fault.kind=oom", "fault.replica=0")
    validate(*load_recipe(TINY, ["device=cpu", "fault.kind=skip_sync", "fault.replica=1", two]))


def test_bitwise_parity_is_a_promise_of_gpus(tmp_path):
    bitwise = ["numerics.parity=bitwise", f"run_dir={tmp_path / 'run'}"]
    recipe, verl = load_recipe(TINY, [*bitwise, "device=cuda"], planned=True)
    examine(recipe, verl, planned=True)
    assert verl.actor_rollout_ref.model.override_config.samebits_parity == str(tmp_path / "run" / "parity")
    recipe, verl = load_recipe(TINY, [*bitwise, "device=cuda", "numerics.profile=w4a16-fp32"], planned=True)
    with pytest.raises(RecipeError, match="numerics.parity=bitwise does not hold with profile w4a16-fp32 on cuda"):
        examine(recipe, verl, planned=True)
    _, verl = load_recipe(TINY, ["device=cuda"], planned=True)
    assert verl.actor_rollout_ref.model.override_config.samebits_parity is None


def test_ablations_reach_trainer_and_objective_and_nothing_is_left_out_by_default():
    def settings(*overrides):
        recipe, verl = load_recipe(TINY, ["device=cpu", *overrides])
        validate(recipe, verl)
        actor = verl.actor_rollout_ref
        return actor.actor.policy_loss.rollout_correction.rollout_is, actor.model.override_config.samebits_old_logprobs

    assert settings() == ("token", "rollout")
    assert settings("ablation.importance_sampling=false") == (None, "rollout")
    assert settings("ablation.recompute_old_logprobs=true") == ("token", "recomputed")


def test_raw_logprobs_with_temperature_are_refused():
    assert "ignores the temperature (0.7)" in problem(f"{ROLLOUT}.logprobs_mode=raw_logprobs", f"{ROLLOUT}.temperature=0.7")


def test_checkpoint_of_other_numerics_is_refused(tmp_path):
    recipe, _ = load_recipe(TINY, ["device=cpu"])
    model = tmp_path / "model"
    shutil.copytree(recipe.model_path, model)
    config = json.loads((model / "config.json").read_text())
    config["samebits"]["weights_hash"] = "0" * 16
    (model / "config.json").write_text(json.dumps(config))
    message = problem(f"model={model}")
    assert "0" * 16 in message and get_profile("w4a16").weights_hash in message


@pytest.mark.parametrize("content", ["[1, 2]", "a: [", "base: nothing.yaml", "base: 5", "base: recipe.yaml"])
def test_unreadable_recipe_is_one_line(tmp_path, content):
    path = tmp_path / "r.yaml"
    path.write_text(content)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert "\n" not in str(caught.value)


def test_command_line_exits_2_with_one_line_and_no_run_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("SAMEBITS_TEST", "1")
    result = CliRunner().invoke(cli.app, ["train", TINY, "device=cpu", f"run_dir={tmp_path / 'run'}", f"{ROLLOUT}.top_p=0.9"])
    assert result.exit_code == 2
    assert result.output.count("\n") == 1 and result.output.startswith("samebits: actor_rollout_ref.rollout.top_p=0.9")
    assert not (tmp_path / "run").exists()
    result = CliRunner().invoke(cli.app, ["train", "no_such.yaml"])
    assert (result.exit_code, result.output) == (2, "samebits: no recipe at no_such.yaml\n")


def test_a_run_directory_that_cannot_be_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    result = CliRunner().invoke(cli.app, ["train", TINY, "device=cpu", f"run_dir={tmp_path / 'file'}"])
    assert result.exit_code == 2
    assert result.output.count("\n") == 1 and result.output.startswith(f"samebits: run_dir {tmp_path / 'file'}: ")


def test_an_interrupted_job_says_how_to_go_on(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("samebits.recipes.job.train", interrupted)
    result = CliRunner().invoke(cli.app, ["train", TINY, "device=cpu"])
    assert (result.exit_code, result.output.count("\n")) == (130, 1) and "goes on from the last checkpoint" in result.output

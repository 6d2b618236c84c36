"""`samebits bench baseline`: what stock verl is given, what keeps ours out of it, how it is ended, and what its metrics become."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from samebits.recipes import baseline, baseline_model, baseline_process, baseline_result, baseline_shim
from samebits.recipes.baseline import Job, configuration, environment
from samebits.recipes.cli import app
from samebits.recipes.config import RecipeError, load_recipe
from samebits.recipes.plan_tables import get_model

METRICS = Path(__file__).parent / "data" / "stock_verl_metrics.jsonl"
"""What verl 0.9.1 wrote in three steps of 4 prompts x 2 samples of 24 tokens on a CPU."""


def job(*overrides: str, model: str = "qwen3-moe-mini", device: str = "cuda") -> Job:
    return Job(model, "mini_m3_h200.yaml", device, 8, 2, 100.0, overrides)


# ------------------------------------------------------------------------------------------------------- what stock is given


def test_the_work_is_the_recipe_s_and_the_rest_is_stock():
    recipe, verl = configuration(job())
    own, ours = load_recipe("mini_m3_h200.yaml", [], planned=True)
    assert recipe.seed == own.seed
    for key in baseline._SHARED:
        assert OmegaConf.select(verl, key) == OmegaConf.select(ours, key), key
    work, rollout = verl.data, verl.actor_rollout_ref.rollout
    assert (work.train_batch_size, work.max_response_length, rollout.n, rollout.response_length) == (64, 320, 8, 320)
    assert rollout.name == "vllm" and rollout.ignore_eos and rollout.engine_kwargs.vllm.keys() == {"kernel_config"}
    assert list(verl.actor_rollout_ref.model.target_modules) == ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert verl.trainer.total_training_steps == 10 and verl.trainer.logger == ["file"]
    named = {key for key, value in baseline._settings(verl).items() if "samebits" in f"{key} {value}"}
    assert named == {"reward.custom_reward_function.path"}  # the task


def test_overrides_are_of_stock_verl_and_the_seed_of_both():
    recipe, verl = configuration(job("seed=7", "data.train_batch_size=16", "actor_rollout_ref.rollout.enforce_eager=true"))
    assert (recipe.seed, verl.data.seed, verl.data.train_batch_size, verl.actor_rollout_ref.rollout.enforce_eager) == (7, 7, 16, True)
    assert baseline.rows_of(verl) == 128


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (job("data.train_bach_size=3"), "unknown key data.train_bach_size; did you mean data.train_batch_size?"),
        (job("lora.rank=8"), "lora.rank=8: of samebits' own keys the baseline knows only seed"),
        (job("trainer.save_freq=1"), "trainer.save_freq is set by the measurement itself"),
        (job("actor_rollout_ref.model.path=x"), "actor_rollout_ref.model.path is set by the measurement itself"),
        (job("seed=x"), "seed"),
        (job(model="qwen3-moe"), "no model called 'qwen3-moe'; there are: qwen3-moe-mini, qwen3-tiny"),
        (job(device="cpu"), "qwen3-moe-mini needs a GPU: stock vLLM has no experts under LoRA on a CPU; qwen3-tiny runs there"),
        (job(device="tpu"), "device must be cuda or cpu, not 'tpu'"),
        (Job("qwen3-tiny", "none.yaml", "cpu", 1, 0, 1.0), "no recipe at none.yaml"),
    ],
)
def test_what_cannot_run_is_one_line(given, said):
    with pytest.raises(RecipeError) as error:
        configuration(given)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_no_plugin_of_ours_gets_into_the_environment(tmp_path):
    around = {"VERL_USE_EXTERNAL_MODULES": "samebits.trainer.plugin", "SAMEBITS_FAULT": "{}", "VLLM_PLUGINS": "samebits", "PATH": "/bin"}
    found = environment("cuda", tmp_path, around)
    assert found["VERL_USE_EXTERNAL_MODULES"] == baseline_shim.__name__ and found["VLLM_PLUGINS"] == "" and found["PATH"] == "/bin"
    assert "SAMEBITS_FAULT" not in found and "VERL_PLATFORM" not in found
    assert environment("cpu", tmp_path, around)["VERL_PLATFORM"] == "cpu"


# --------------------------------------------------------------------------------------------------------------------- models


def test_the_model_has_the_mini_s_size():
    mini = get_model("mini-m3")
    router, ends = mini.moe_layers * mini.experts * mini.hidden, 2 * mini.vocabulary * mini.hidden
    want = mini.expert_parameters + mini.projection_parameters + router + ends
    assert baseline_model.parameters("qwen3-moe-mini") == pytest.approx(want, rel=0.05)


@pytest.fixture(params=["qwen3-tiny", "qwen3-moe-mini"])
def small(request, monkeypatch):
    """A model of each family, small."""
    less = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_experts": 4, "moe_intermediate_size": 32}
    sizes = baseline_model.MODELS[request.param]
    monkeypatch.setitem(baseline_model.MODELS, request.param, sizes | {k: v for k, v in less.items() if k in sizes})
    return request.param


def test_a_checkpoint_loads_as_written(small, tmp_path):
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        baseline_model.write_model(small, tmp_path / name, seed)
    a, b, c = (load_file(tmp_path / name / "model.safetensors") for name in "abc")
    assert all(torch.equal(a[n], b[n]) for n in a) and not torch.equal(a["lm_head.weight"], c["lm_head.weight"])
    assert {t.dtype for t in a.values()} == {torch.bfloat16}
    if small in baseline_model.MOE:  # the names that vLLM loads
        assert "model.layers.1.mlp.experts.3.gate_proj.weight" in a and "model.layers.0.mlp.gate_proj.weight" in a
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "a", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert sum(p.numel() for p in loaded.parameters()) == baseline_model.parameters(small) == sum(t.numel() for t in a.values())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Compute 3+4"}], add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(ids) == "<user>Compute 3+4<assistant>" and len(tokenizer) == loaded.config.vocab_size
    with torch.no_grad():
        logits = loaded(torch.tensor([ids])).logits
    assert logits.isfinite().all() and logits.std() > 0.1


# ------------------------------------------------------------------------------------------------------------------- deviations


@pytest.fixture
def finders():
    before = list(sys.meta_path)
    yield
    sys.meta_path[:] = before
    sys.modules.pop("stock_module", None)


def test_the_shim_waits_for_the_module_and_leaves_others_alone(finders, tmp_path, monkeypatch):
    (tmp_path / "stock_module.py").write_text("class WeightsMapper:\n    def get_rename_mapper(self):\n        return 'renamed'\n")
    monkeypatch.syspath_prepend(tmp_path)
    baseline_shim.install({"stock_module": baseline_shim.alias_mapper})
    assert "stock_module" not in sys.modules
    mapper = importlib.import_module("stock_module").WeightsMapper
    assert mapper().get_unstacked_mapper() == "renamed"
    mapper.get_unstacked_mapper = old = lambda self: "old"
    baseline_shim.install({"stock_module": baseline_shim.alias_mapper})  # imported already, and with a name of its own
    assert mapper.get_unstacked_mapper is old


def test_what_the_shim_reaches_for_is_there():
    """In the versions that are installed, as far as their sources tell."""
    wanted = {
        "vllm.model_executor.models.utils": ("class WeightsMapper", "    def get_rename_mapper(self)"),
        "verl.workers.engine_workers": (
            "class TrainingWorker",
            "    def train_mini_batch(self, data",
            "get_torch_device().max_memory_allocated()",
        ),
    }
    assert wanted.keys() == baseline_shim.DEVIATIONS.keys()
    for name, parts in wanted.items():
        package, _, module = name.partition(".")
        source = Path(importlib.util.find_spec(package).origin).parent / f"{module.replace('.', '/')}.py"
        assert all(part in source.read_text() for part in parts), name


def test_peaks_start_anew_with_training():
    order = []

    class Worker:
        def train_mini_batch(self, data):
            order.append(data)
            return "trained"

    device = type("Device", (), {"reset_peak_memory_stats": staticmethod(lambda: order.append("reset"))})
    module = type("Module", (), {"TrainingWorker": Worker, "get_torch_device": staticmethod(lambda: device)})
    Worker.train_mini_batch.dispatch = "kept"  # verl reads an attribute of the method
    baseline_shim.peak_of_training(module)
    assert Worker().train_mini_batch("batch") == "trained" and order == ["reset", "batch"]
    assert Worker.train_mini_batch.dispatch == "kept"


# ---------------------------------------------------------------------------------------------------------------------- process


def start(tmp_path, code: str, limit: float = 60.0, stalled: float = 60.0) -> bool:
    arguments = ([sys.executable, "-u", "-c", code], {"FOLDER": str(tmp_path)}, tmp_path, tmp_path / "metrics.jsonl")
    return baseline_process.run(*arguments, limit, verbose=False, stalled=stalled)


def test_a_process_that_ends_well_leaves_its_output(tmp_path):
    assert start(tmp_path, "import os; print('said', sorted(k for k in os.environ if k == 'HOME' or k == 'FOLDER'))")
    assert (tmp_path / "output.log").read_text() == "said ['FOLDER']\n"


@pytest.mark.parametrize(
    ("code", "limit", "stalled", "said"),
    [
        ("print('AError: warned'); raise ValueError('no such thing')", 60, 60, "it ended with status 1; ValueError: no such thing"),
        ("raise Exception('no Ray')", 60, 60, "it ended with status 1; Exception: no Ray"),
        ("import time; time.sleep(60)", 1, 60, "it did not end within 1 s; it printed nothing"),
        (
            "import traceback, time\ntry: {}['x']\nexcept KeyError: traceback.print_exc()\nprint('AttributeError: gone'); time.sleep(60)",
            60, 1, "it stood still for 1 s after an error; KeyError: 'x'",
        ),
        (
            "import traceback, time\ntry: {}['x']\nexcept KeyError: traceback.print_exc()\nwhile True: print('waits'); time.sleep(0.1)",
            60, 2, "it finished no step for 6 s after an error; KeyError: 'x'",
        ),
    ],
)  # fmt: skip
def test_what_ends_badly_is_one_line(tmp_path, code, limit, stalled, said):
    with pytest.raises(baseline_process.BaselineFailed) as error:
        start(tmp_path, code, limit, stalled)
    assert str(error.value) == f"stock verl: {said}"


def test_a_start_that_goes_on_after_a_traceback_is_waited_for(tmp_path):
    """As of a package that vLLM does without, printed before it compiles and captures."""
    code = """
import os, time
print('Traceback (most recent call last)')
for part in range(10):
    time.sleep(0.8)
    print('captured', part)
print(0, file=open(os.environ['FOLDER'] + '/metrics.jsonl', 'a'))
"""
    start(tmp_path, code, stalled=5)
    (metrics,) = tmp_path.rglob("metrics.jsonl")
    assert metrics.read_text().split() == ["0"]


def test_steps_after_a_traceback_keep_it_going(tmp_path):
    code = """
import os, time
print('Traceback (most recent call last)')
for step in range(4):
    time.sleep(1.6)
    print(step, file=open(os.environ['FOLDER'] + '/metrics.jsonl', 'a'))
"""
    start(tmp_path, code, stalled=5)
    (metrics,) = tmp_path.rglob("metrics.jsonl")
    assert metrics.read_text().split() == list("0123")


@pytest.mark.parametrize("done", [2, 3])
def test_at_its_limit_the_steps_that_are_done_count(tmp_path, monkeypatch, done):
    """Two steps of ten are left out; a line that the end has cut is none."""
    lines = METRICS.read_text().splitlines(keepends=True)
    written = "".join(lines[:done]) + '{"step": 9, "da'
    code = f"""
import os, time
open(os.environ['VERL_FILE_LOGGER_PATH'], 'w').write({written!r})
time.sleep(600)
"""
    monkeypatch.setattr(baseline, "command", lambda folder: [sys.executable, "-c", code])
    monkeypatch.setattr(baseline, "require_device", lambda device: None)
    asked = Job("qwen3-tiny", "tiny_m3_grpo.yaml", "cpu", 8, 2, 6.0)
    if done <= 2:
        with pytest.raises(baseline_process.BaselineFailed, match=f"{done} of 10 steps within 6 s, none after warm-up"):
            baseline.run(asked, tmp_path / "run", Console(quiet=True))
        return
    found = baseline.run(asked, tmp_path / "run", Console(quiet=True))
    assert found["ended"] == "after 3 of 10 steps, by the limit of 6 s" and found["steps"] == 1
    with (console := Console(width=200)).capture() as said:
        baseline_result.show(found, console)
    assert "ended after 3 of 10 steps, by the limit of 6 s" in said.get()
    assert "ended" not in stock()


# ----------------------------------------------------------------------------------------------------------------------- result


def stock(warm_up: int = 1, lines=None, device: str = "cuda") -> dict:
    found = baseline_result.read(METRICS) if lines is None else lines
    return baseline_result.measured("qwen3-tiny", device, found, warm_up, 8, {"data.seed": 0}, ["a shim"])


def test_recorded_metrics_become_a_result():
    lines = baseline_result.read(METRICS)
    result = stock()
    assert len(lines) == 3 and result["steps"] == 2 and result["schema"] == "samebits.bench.step/1"
    assert (
        result["tokens"]["response"] == 8 * 24 and result["baseline"]["shortest_response"] == result["baseline"]["longest_response"] == 24
    )
    whole = [line["perf/total_num_tokens"] for line in lines[1:]]
    assert result["tokens"]["prompt"] + result["tokens"]["response"] == pytest.approx(sum(whole) / 2)
    seconds = result["seconds"]
    assert seconds["step"] == pytest.approx((lines[1]["timing_s/step"] + lines[2]["timing_s/step"]) / 2)
    assert seconds["phases"]["train"]["seconds"] == pytest.approx(sum(line["timing_s/update_actor"] for line in lines[1:]) / 2)
    assert sum(phase["seconds"] for phase in seconds["phases"].values()) == pytest.approx(seconds["step"])
    assert sum(result["share"].values()) == pytest.approx(1)
    assert result["baseline"]["parameters"] == baseline_model.parameters("qwen3-tiny") and result["baseline"]["deviations"] == ["a shim"]
    assert json.loads(json.dumps(result)) == result


def test_the_largest_peak_counts_and_none_is_no_zero():
    lines = [dict(line) for line in baseline_result.read(METRICS)]
    assert stock()["memory"] == {"trainer": {}, "engine": {}}  # a CPU has none
    for gib, line in zip((9.0, 1.5, 1.25), lines, strict=True):
        line["actor/perf/max_memory_allocated_gb"] = gib
    assert stock(1, lines)["memory"]["trainer"] == {"train": {"allocated": 3 * 2**29}}


def test_metrics_that_lack_something_are_refused(tmp_path):
    lines = [dict(line) for line in baseline_result.read(METRICS)]
    del lines[2]["timing_s/update_weights"]
    with pytest.raises(baseline_result.NotMeasured, match="no timing_s/update_weights"):
        stock(1, lines)
    with pytest.raises(baseline_result.NotMeasured, match="3 steps, of which the first 3"):
        stock(3)
    (tmp_path / "broken.jsonl").write_text('{"step": 1\n')
    for name in ("broken.jsonl", "none.jsonl"):
        with pytest.raises(baseline_result.NotMeasured, match=name):
            baseline_result.read(tmp_path / name)


def ours(of: dict, **changes) -> dict:
    """What `samebits bench step` writes of a run with the tokens of `of`, as far as it is compared."""
    phases = {"rollout": 1.0, "collect": 0.5, "advantage": 0.1, "train": 2.0, "sync": 0.2, "check of the sync": 0.05, "rest": 0.15}
    memory = {"forward": {"allocated": 100}, "backward": {"allocated": 300, "reserved": 700}, "export": {"allocated": 9000}}
    return {
        "schema": "samebits.bench.step/1",
        "device": "cuda",
        "seconds": {"step": 4.0, "phases": {name: {"seconds": s, "parts": {}} for name, s in phases.items()}},
        "tokens": {kind: of["tokens"][kind] for kind in ("prompt", "response")},
        "memory": {"trainer": memory, "engine": {}},
    } | changes


def test_ours_beside_stock():
    theirs = stock()
    theirs["memory"]["trainer"] = {"train": {"allocated": 1200}}
    found = baseline_result.comparison(ours(theirs), theirs)
    assert found["step"]["ratio"] == pytest.approx(theirs["seconds"]["step"] / 4)
    rollout, sync = found["phases"]["rollout"], found["phases"]["sync"]
    assert rollout["ours"] == 1.5 and sync["ours"] == 0.25
    assert rollout["ratio"] == pytest.approx(theirs["seconds"]["phases"]["rollout"]["seconds"] / 1.5)
    assert found["phases"]["old logprobs"]["ours"] is None and found["phases"]["old logprobs"]["ratio"] is None
    assert found["training_memory"]["allocated"] == {"ours": 300, "stock": 1200, "ratio": 0.25}
    assert found["training_memory"]["reserved"]["ratio"] is None
    assert sum(row["ours"] or 0 for row in found["phases"].values()) == pytest.approx(4.0)
    console = Console(width=120, record=True)
    baseline_result.show(theirs, console)
    baseline_result.show_comparison(found, console)
    text = console.export_text()
    assert "0.25 of stock" in text and "times faster" in text and "not stock: a shim" in text


@pytest.mark.parametrize("kind", ["prompt", "response"])
def test_unequal_tokens_are_not_compared(kind):
    theirs = stock()
    less = ours(theirs)
    less["tokens"][kind] *= 0.9
    with pytest.raises(baseline_result.NotMeasured, match=f"{kind} tokens a step.*not equal.*ignore_eos"):
        baseline_result.comparison(less, theirs)
    with pytest.raises(baseline_result.NotMeasured, match="ours ran on cpu, stock on cuda"):
        baseline_result.comparison(ours(theirs, device="cpu"), theirs)


# -------------------------------------------------------------------------------------------------------------------------- CLI


def bench(*arguments: str):
    return CliRunner().invoke(app, ["bench", "baseline", *arguments])


def test_two_results_are_compared_without_a_run(tmp_path):
    theirs = stock()
    for name, content in (("ours", ours(theirs)), ("stock", theirs)):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    files = ["--compare", str(tmp_path / "ours.json"), "--stock", str(tmp_path / "stock.json")]
    done = bench(*files, "--json", str(tmp_path / "out.json"))
    assert done.exit_code == 0, done.stderr
    assert json.loads((tmp_path / "out.json").read_text())["comparison"]["step"]["ours"] == 4.0
    assert bench(*files[:1], str(tmp_path / "none.json"), *files[2:]).stderr.count("\n") == 1
    swapped = bench("--compare", files[3], "--stock", files[1])
    assert swapped.exit_code == 2 and "is no result of `samebits bench baseline`" in swapped.stderr
    assert "would change nothing" in bench("seed=1", *files).stderr
    assert "--stock goes with --compare" in bench(*files[2:]).stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU says")
def test_without_a_gpu_it_says_so_and_starts_nothing(tmp_path):
    done = bench("--folder", str(tmp_path / "run"))
    assert done.exit_code == 2 and "no CUDA GPU" in done.stderr and done.stderr.count("\n") == 1 and not (tmp_path / "run").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    full = bench("--folder", str(tmp_path / "full"), "--device", "cpu", "--model", "qwen3-tiny")
    assert full.exit_code == 2 and "is not empty" in full.stderr

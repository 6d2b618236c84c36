"""The mini MiniMax-M3: its model against the tiny twin and the trainer, its corpus, its training and build, its recipes and its errors."""

import dataclasses
import json
import math
import time
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from typer.testing import CliRunner

from samebits.quant.checkpoint import Checkpoint
from samebits.quant.profile import get_profile
from samebits.recipes import cli, mini_m3, mini_model, mini_train
from samebits.recipes.check import check
from samebits.recipes.config import load_recipe
from samebits.recipes.mini_keep import Position
from samebits.recipes.mini_m3 import head_scale, likely, served
from samebits.recipes.mini_math import MAX_PROMPT_TOKENS, MAX_RESPONSE_TOKENS, draw
from samebits.recipes.mini_model import MINI, MiniModel, _grouped
from samebits.recipes.mini_tokens import chat, mini_tokenizer
from samebits.recipes.mini_train import Corpus, Training, pack, train
from samebits.recipes.muon import orthogonalise
from samebits.recipes.plan_tables import get_model, model_of_config
from samebits.recipes.tiny_m3 import EOS, PAD, config, dense_weights
from samebits.recipes.tiny_model import Sizes, TinyModel, initialise
from samebits.trainer.model import M3ForTraining

SMALL = Sizes(
    vocab=512, hidden=64, layers=3, heads=4, kv_heads=2, experts=4, top_k=2, intermediate=32, dense=64, topk_blocks=16, max_position=512
)
CPU = torch.device("cpu")
RECIPES = ("mini_m3_h200", "mini_m3_h200_x2")


def documents(count: int, split: str = "test") -> list[list[int]]:
    return [e.ids for e in mini_tokenizer().encode_batch([chat(p, p.steps) for p in draw(split, count)])]


def model(**options) -> MiniModel:
    return MiniModel(SMALL, CPU, torch.float32, **options)


@pytest.fixture(scope="module")
def weights():
    made = initialise(SMALL, 0)
    g = torch.Generator().manual_seed(1)
    for w in made.values():  # norms and biases that do something
        if w.dim() == 1:
            w.add_(torch.randn(w.shape, generator=g) * 0.2)
    return made


# ---------------------------------------------------------------------------------------------------------------------- model


def test_packed_documents_give_what_the_tiny_twin_gives_each_alone(weights):
    short = [d for d in documents(30) if len(d) < 128][:5]  # the twin's rotary table ends there
    packed, _ = pack(short)
    out = model(quantized_kv=False).forward(weights, packed).split([len(d) for d in short])
    for document, logits in zip(short, out, strict=True):
        want = TinyModel(SMALL).forward(weights, torch.tensor([document]))[0]
        torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-4)


def test_gradients_are_the_tiny_twin_s(weights):
    """Of permutations with gradients of their own, too."""
    document = next(d for d in documents(30) if len(d) < 100)

    def gradients(forward):
        own = {n: w.clone().requires_grad_(not n.endswith("correction_bias")) for n, w in weights.items()}
        F.cross_entropy(forward(own)[:-1], torch.tensor(document[1:])).backward()
        return {n: w.grad for n, w in own.items() if w.requires_grad}

    ours = gradients(lambda w: model(quantized_kv=False).forward(w, pack([document])[0]))
    twin = gradients(lambda w: TinyModel(SMALL).forward(w, torch.tensor([document]))[0])
    for name, want in twin.items():
        torch.testing.assert_close(ours[name], want, rtol=1e-3, atol=1e-6 + 1e-4 * want.abs().max().item(), msg=name)


def test_counts_are_of_the_routes_taken(weights):
    m = model()
    packed, _ = pack(documents(3))
    m.forward(weights, packed)
    assert set(m.counts) == {1, 2}
    assert all(int(count.sum()) == len(packed.ids) * SMALL.top_k for count in m.counts.values())


def test_grouped_product_gives_each_expert_its_rows():
    x, stack = torch.randn(7, 3), torch.randn(4, 5, 3)
    got = _grouped(x, stack, torch.tensor([2, 2, 6, 7], dtype=torch.int32))
    want = torch.cat([x[:2] @ stack[0].T, x[2:6] @ stack[2].T, x[6:] @ stack[3].T])
    torch.testing.assert_close(got, want)


def test_keys_and_values_are_rounded_as_the_cache_rounds_them(weights):
    packed, _ = pack(documents(2))
    plain, rounded = (model(quantized_kv=q).forward(weights, packed) for q in (False, True))
    assert 0.001 < (plain - rounded).std() / plain.std() < 0.5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_samples_continue_prompts_of_any_length_as_one_forward_does(weights, temperature):
    prompts = [e.ids for e in mini_tokenizer().encode_batch([f"<user>{p.prompt}<assistant>" for p in draw("test", 6)])]
    assert len({len(p) for p in prompts}) > 3
    m = model()
    out = m.sample(weights, prompts, 12, EOS, PAD, temperature, torch.Generator().manual_seed(0)).tolist()
    packed, _ = pack([p + o for p, o in zip(prompts, out, strict=True)])
    logits = m.forward(weights, packed).split(packed.ends.diff().tolist())
    for prompt, said, at in zip(prompts, out, logits, strict=True):
        end = said.index(EOS) + 1 if EOS in said else len(said)
        assert set(said[end:]) <= {PAD}
        following = at[len(prompt) - 1 : len(prompt) - 1 + end]
        if temperature == 0:
            assert following.argmax(-1).tolist() == said[:end]
        else:  # not one token that the model holds for impossible
            chances = following.softmax(-1)[torch.arange(end), torch.tensor(said[:end])]
            assert chances.min() > 1e-5 and following.argmax(-1).tolist() != said[:end]


# ------------------------------------------------------------------------------------------------------------- corpus, training


def test_a_refused_capture_is_said_and_leaves_the_stream_as_it_was(monkeypatch):
    """As torch ends a capture that something made impossible: it raises before it takes the stream back."""

    class Stream:
        def wait_stream(self, other: object) -> None:
            pass

    class Within:
        def __init__(self, stream: Stream) -> None:
            self.stream = stream

        def __enter__(self) -> None:
            self.before, current[0] = current[0], self.stream

        def __exit__(self, *_: object) -> None:
            current[0] = self.before

    class Capture(Within):
        def __init__(self, graph: object, capture_error_mode: str) -> None:
            super().__init__(Stream())

        def __exit__(self, *_: object) -> None:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    main = Stream()
    current = [main]
    fakes = {"Stream": Stream, "stream": Within, "graph": Capture, "CUDAGraph": object, "current_stream": lambda: current[0]}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    gpu = SimpleNamespace(device=SimpleNamespace(type="cuda"), next=lambda weights, cache, ids, positions: ids + positions)
    step = mini_model._Step(gpu, {}, None)
    with pytest.warns(UserWarning, match="no CUDA graph of a sampled token"):
        assert step(torch.tensor([1]), torch.tensor([2])).item() == 3
    assert current == [main]
    assert step(torch.tensor([1]), torch.tensor([5])).item() == 6


def test_targets_are_the_responses_and_their_ends():
    given = [*documents(4), [PAD] * 5]
    packed, targets = pack(given)
    assert packed.ids.tolist() == [t for d in given for t in d] and packed.longest == max(map(len, given))
    assert packed.ends.tolist() == [0, *torch.tensor([len(d) for d in given]).cumsum(0).tolist()]
    assert packed.positions.tolist() == [i for d in given for i in range(len(d))]
    for problem, start, document in zip(draw("test", 4), packed.ends.tolist(), given, strict=False):
        mine = targets[start : start + len(document)]
        assert mini_tokenizer().decode(mine[mine != PAD].tolist(), skip_special_tokens=False) == problem.steps + "<eos>"
        assert mine[-1] == PAD and all(mine[i] in (PAD, document[i + 1]) for i in range(len(document) - 1))
    assert not targets[-5:].any()


def test_batches_are_full_by_number_and_of_training_problems():
    corpus, slipping = Corpus(3, 2048, 1.0), Corpus(3, 2048, 0.3)
    (packed, targets), (again, _), (other, _), (slipped, _) = corpus[5], corpus[5], corpus[6], slipping[5]
    assert len(packed.ids) == len(other.ids) == 2048 == packed.ends[-1] and torch.equal(packed.ids, again.ids)
    assert not torch.equal(packed.ids, other.ids) and (targets != PAD).float().mean() > 0.5
    clean, wrong = (mini_tokenizer().decode(b.ids.tolist(), skip_special_tokens=False).split("<eos>") for b in (packed, slipped))
    assert [c.split("<assistant>")[0] for c in clean][:6] == [w.split("<assistant>")[0] for w in wrong][:6]
    assert sum(c != w for c, w in zip(clean, wrong, strict=False)) > 0.4 * len(clean)
    with pytest.raises(ValueError, match="a batch of 415 tokens may not hold a document of 416"):
        Corpus(0, 415, 1.0)
    held = {p.prompt for p in draw("test", 2000)}
    assert not held & {c.split("<assistant>")[0].removeprefix("<user>") for c in clean}


def test_the_two_corpora_have_no_batch_in_common():
    clean, slipping = mini_train.batches(2, Training(tokens=512), 0, False)
    first, second = next(clean)[0].ids, next(slipping)[0].ids
    assert torch.equal(first, Corpus(4, 512, 1.0)[0][0].ids) and torch.equal(second, Corpus(5, 512, Training().right)[0][0].ids)


def test_every_weight_has_one_optimizer(weights):
    trained = {n: w for n, w in weights.items() if not n.endswith("correction_bias")}
    muon, adamw = mini_train._optimizers(trained, Training(), False)
    names = {id(w): n for n, w in trained.items()}
    by_muon = [names[id(p)] for g in muon.param_groups for p in g["params"]]
    by_adamw = {names[id(p)]: g["lr"] for g in adamw.param_groups for p in g["params"]}
    assert len(by_muon) == len(set(by_muon)) and sorted([*by_muon, *by_adamw]) == sorted(trained)
    assert all("_proj" in n or ".experts." in n for n in by_muon)
    assert {n for n, lr in by_adamw.items() if lr == Training().readout_lr} == {n for n in trained if "lm_head" in n or "moe.gate." in n}


def test_iteration_in_another_type_is_the_same_iteration():
    g = torch.randn(3, 48, 16, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(orthogonalise(g, dtype=torch.float32), orthogonalise(g), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(orthogonalise(g[0].mT, dtype=torch.bfloat16).float(), orthogonalise(g[0].mT), rtol=0, atol=0.05)


def test_training_lowers_the_loss_and_moves_the_bias():
    recipe = Training(steps=16, tokens=768, muon_lr=0.03, adamw_lr=1e-2, readout_lr=1e-2)
    made, done = train(SMALL, recipe, 0, CPU, progress=False)
    assert (done.steps, done.tokens, done.mfu) == (16, 16 * 768, None) and done.load >= 1 and 0 <= done.idle < 1
    assert done.tflops == pytest.approx(6 * model_of_config(config(SMALL), "x").active_parameters * done.tokens_per_second / 1e12)
    bias = made["model.layers.1.block_sparse_moe.e_score_correction_bias"]
    assert bias.any() and bias.abs().max() <= 16 * recipe.bias_rate + 1e-6
    packed, targets = pack(documents(20))
    losses = [F.cross_entropy(model().forward(w, packed), targets, ignore_index=PAD).item() for w in (initialise(SMALL, 0), made)]
    assert losses[1] < 0.6 * losses[0] and done.loss < 0.6 * losses[0]


def test_steps_of_a_seed_are_the_same_each_time():
    recipe = Training(steps=3, tokens=512)
    one, two, other = (train(SMALL, recipe, seed, CPU, progress=False)[0] for seed in (0, 0, 1))
    assert all(torch.equal(two[n], w) for n, w in one.items())
    assert not torch.equal(other["lm_head.weight"], one["lm_head.weight"])


def test_a_budget_of_time_ends_and_schedules_by_it(monkeypatch):
    begun = time.perf_counter()
    _, done = train(SMALL, Training(minutes=1.5 / 60, tokens=512), 0, CPU, progress=False)
    assert 1.4 < done.seconds <= time.perf_counter() - begun and done.steps > 1
    now = [0.0]
    monkeypatch.setattr(mini_train.time, "perf_counter", lambda: now[0])
    position = Position()
    budget = mini_train._Budget(Training(minutes=1.0), position)

    def spent(*times: float) -> list[float]:
        seen = []
        for at in times:
            now[0] = at
            seen.append(budget.spent(1))
        return seen

    now[0] = 20.0  # the first step compiles
    assert budget.spent(0) == 0.0
    budget.started()
    assert spent(20.0, 30.0) == [0.0, 0.25]
    budget.note()
    assert (position.starts, position.seconds, position.counted) == ([20.0], 30.0, 10.0)
    # Interrupted and called again: what the second start takes is not counted either.
    now[0] = 1000.0
    budget = mini_train._Budget(Training(minutes=1.0), position)
    assert spent(1000.0, 1015.0) == [0.25, 0.25] and budget.seconds == 45.0
    budget.started()
    assert spent(1025.0, 1044.0, 1046.0) == [0.5, 39 / 40, 1.0] and position.starts == [20.0, 15.0]


def test_a_diverged_run_says_so(monkeypatch):
    monkeypatch.setattr(mini_train, "REPORT_EVERY", 1)
    monkeypatch.setattr(mini_train.F, "cross_entropy", lambda logits, *a, **k: logits.sum() * float("nan"))
    with pytest.raises(FloatingPointError, match="loss nan at step 1"):
        train(SMALL, Training(steps=3, tokens=512), 0, CPU, progress=False)


def test_keys_that_are_no_numbers_are_a_diverged_run(monkeypatch):
    """By the loss, not by an error of the cache's format: only the loss makes a build forget its state."""

    def initialised(*arguments):
        made = initialise(*arguments)
        made["model.layers.0.self_attn.k_proj.weight"].fill_(float("nan"))
        return made

    monkeypatch.setattr(mini_train, "initialise", initialised)
    with pytest.raises(FloatingPointError, match="loss nan at step 1"):
        train(SMALL, Training(steps=1, tokens=512), 0, CPU, progress=False)


# ------------------------------------------------------------------------------------------------------------------------ build


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A build of a few steps, and the full-precision weights that it quantized."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mini_m3, "EVALUATED", 10)
        patch.setattr(mini_m3, "MAX_RESPONSE_TOKENS", 6)
        patch.setattr(mini_m3, "_SHARD", "150KB")
        kept, heads = {}, []
        write, teach = mini_m3.write_source, mini_m3.train

        def taught(*arguments):
            made, done = teach(*arguments)
            heads.append(made["lm_head.weight"].clone())
            return made, done

        patch.setattr(mini_m3, "train", taught)
        patch.setattr(mini_m3, "write_source", lambda folder, full, sizes: (kept.update(full), write(folder, full, sizes)))
        out = tmp_path_factory.mktemp("mini") / "deeper" / "m3"
        console = Console(quiet=True)
        report = mini_m3.build(out, 1, Training(steps=12, tokens=1024, muon_lr=0.02), "cpu", SMALL, console, progress=False)
    return out, report, kept, heads[0]


def test_build_is_a_whole_checkpoint_and_nothing_beside_it(built):
    out, report, _, _ = built
    assert [p.name for p in out.parent.iterdir()] == ["m3"]
    names = {p.name for p in out.iterdir()}
    assert {"config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "pretrain.json"} < names
    assert sum(n.endswith(".safetensors") for n in names) > 2 and "model.safetensors.index.json" in names
    checkpoint = Checkpoint(out)
    assert checkpoint.weights_hash == get_profile("w4a16").weights_hash and checkpoint.config["samebits"]["profile"] == "w4a16"
    assert {m.rpartition(".")[2] for m in checkpoint.modules if ".index_" in m and ".layers.1." in m} == {
        "index_q_proj", "index_k_proj", "index_q_norm", "index_k_norm",
    }  # fmt: skip
    assert json.loads((out / "pretrain.json").read_text()) == json.loads(json.dumps(report))
    assert report["command"] == "samebits mini-m3 OUT --seed 1 --steps 12 --device cpu"
    assert report["trained"]["steps"] == 12 and report["held_out_problems"] == 10
    seconds = report["seconds"]
    assert list(seconds) == ["start", "first step", "training", "keeping", "head scale", "quantizing", "measuring", "all"]
    assert min(seconds.values()) >= 0 and seconds["training"] > 0 and seconds["all"] == pytest.approx(sum(seconds.values()) / 2, abs=0.01)
    assert list(report["accuracy"]) == ["full precision", "all", *mini_m3.FAMILIES]
    assert sum(report["accuracy"][f]["problems"] for f in mini_m3.FAMILIES) == report["accuracy"]["all"]["problems"] == 10
    shown = Console(width=160)
    with shown.capture() as said:
        mini_m3.show(report, shown)
    assert "12 steps" in said.get() and "receipt" in said.get()


def test_checkpoint_holds_what_the_head_was_scaled_for(built):
    out, report, full, head = built
    held = dense_weights(out)
    want = served(full, get_profile("w4a16"), torch.float32)
    assert held.keys() == want.keys()
    assert all(torch.equal(held[n], w) for n, w in want.items())
    # An untrained model is never right: the scale ends at its limit.
    assert report["head_scale"] == pytest.approx(mini_m3.SCALES[1], rel=1e-3)
    assert torch.equal(held["lm_head.weight"], (head * report["head_scale"]).bfloat16().float())


def test_trainer_computes_what_the_pretraining_model_computes(built):
    """Over the packed checkpoint, with K and V in NVFP4; the unquantized weights are away from both by the error of quantization."""
    out, _, full, _ = built
    given = documents(6)
    packed, _ = pack(given)
    profile = get_profile("w4a16-fp32", "nvfp4")
    labels = packed.ids.roll(-1)
    trainer = M3ForTraining(Checkpoint(out), profile)
    with torch.no_grad():
        theirs = trainer(packed.ids, [len(d) for d in given], labels, torch.ones(len(labels))).logprobs
        ours, before = (model().forward(w, packed).log_softmax(-1).gather(1, labels[:, None])[:, 0] for w in (dense_weights(out), full))
    # A K or V next to a rounding boundary may go the other way in another order of sums, so a few tokens differ by more.
    assert (theirs - ours).abs().median() < 1e-5 and (theirs - ours).abs().mean() < 5e-3
    error = (ours - before).square().mean().sqrt()
    assert 1e-3 < error < 0.5 * before.std()


class Sure:
    """A model that gives the right next token a logit of `gap` and the others 0."""

    device = CPU

    def __init__(self, gap: float) -> None:
        self.gap = gap

    def forward(self, weights, packed):
        return self.gap * F.one_hot(packed.ids.roll(-1), 512).float()


def test_head_is_scaled_to_the_wanted_share():
    problems = draw("train", 40)
    sure = Sure(10.5)
    found = likely(sure, {}, problems)
    lengths = torch.tensor([len(mini_tokenizer().encode(p.steps + "<eos>").ids) for p in problems], dtype=torch.float64)
    token = math.exp(10.5) / (math.exp(10.5) + 511)
    torch.testing.assert_close(found.chance, token**lengths, rtol=1e-4, atol=0)
    assert found.greedy.all() and not likely(Sure(-1.0), {}, problems).greedy.any()
    for target in (0.2, 0.325, 0.6):
        scale = head_scale(sure, {}, problems, target)
        assert likely(Sure(10.5 * scale), {}, problems).chance.mean().item() == pytest.approx(target, abs=1e-3)


class Saying:
    """A model that says the right thing to the first problem, without its end to the second, and the first's to all others."""

    device = CPU

    def __init__(self, problems) -> None:
        self.problems = problems

    def sample(self, weights, prompts, max_new, eos, pad, temperature, g, looked):
        looked(16)
        right, cut = (mini_tokenizer().encode(p.steps).ids for p in self.problems[:2])
        said = [[*right, EOS], cut, *[[*right, EOS]] * (len(prompts) - 2)]
        return torch.tensor([row + [PAD] * (max_new - len(row)) for row in said])

    def forward(self, weights, packed):
        return Sure(20.0).forward(weights, packed)


def test_accuracy_counts_finished_right_answers_by_family():
    problems = draw("test", 12)
    assert len({p.answer for p in problems}) == 12
    told = []
    assert mini_m3.answered(Saying(problems), {}, problems, 1.0, None, told=told.append) == [True, *[False] * 11]
    assert told == [pytest.approx(16 / MAX_RESPONSE_TOKENS)]
    found = mini_m3.accuracies(Saying(problems), {}, problems, 0)
    assert found["all"]["sampled"] == found["all"]["greedy"] == 1 / 12 and found["all"]["expected"] > 0.99
    of_it = [p for p in problems if p.family == problems[0].family]
    assert found[problems[0].family]["sampled"] == 1 / len(of_it) and found[problems[0].family]["problems"] == len(of_it)
    assert sum(found[f]["sampled"] > 0 for f in mini_m3.FAMILIES) == 1 and found["all"]["mixed_groups_of_8"] < 0.1


# --------------------------------------------------------------------------------------------------------- command line, recipes


def run(*arguments: object):
    return CliRunner().invoke(cli.app, [str(a) for a in arguments], env={"COLUMNS": "200"})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--device", "tpu"], "--device must be cuda or cpu, not 'tpu'"),
        (["--device", "cuda"], "--device cuda: no CUDA GPU is available"),
        (["--device", "cpu", "--minutes", "0"], "--minutes must be positive, not 0"),
        (["--device", "cpu", "--minutes", "nan"], "--minutes must be positive, not nan"),
        (["--device", "cpu"], "is not empty"),
    ],
)
def test_bad_usage_is_one_line_with_status_2(tmp_path, monkeypatch, options, says):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "x").write_text("")
    result = run("mini-m3", tmp_path, *options)
    assert result.exit_code == 2 and result.output.startswith("samebits: ") and result.output.count("\n") == 1
    assert says in result.output and [p.name for p in tmp_path.iterdir()] == ["x"]


def test_command_builds_and_shows(tmp_path, monkeypatch):
    monkeypatch.setattr(mini_m3, "EVALUATED", 4)
    monkeypatch.setattr(mini_m3, "MAX_RESPONSE_TOKENS", 4)
    build = mini_m3.build
    monkeypatch.setattr(
        mini_m3,
        "build",
        lambda out, seed, training, device, console, imports: build(
            out, seed, dataclasses.replace(training, tokens=512), device, SMALL, console, imports=imports
        ),
    )
    result = run("mini-m3", tmp_path / "m3", "--device", "cpu", "--steps", 2, "--seed", 7)
    assert result.exit_code == 0, result.output
    assert "2 steps" in result.output and f"wrote {tmp_path / 'm3'}" in result.output
    assert json.loads((tmp_path / "m3" / "pretrain.json").read_text())["seed"] == 7


def test_sizes_are_those_that_recipes_plan_with():
    planned, made = get_model("mini-m3"), model_of_config(config(MINI), "mini MiniMax-M3")
    assert dataclasses.replace(planned, sources=()) == dataclasses.replace(made, sources=())
    total = planned.expert_parameters + planned.projection_parameters + 2 * planned.vocabulary * planned.hidden
    assert 0.3e9 < total < 1e9 and planned.experts >= 32
    m31 = get_model("m31-flash")
    assert (planned.head_dim, planned.sparse.blocks, planned.sparse.block, planned.sparse.index_dim) == (128, 16, 128, 128)
    assert planned.heads // planned.kv_heads == m31.heads // m31.kv_heads and planned.experts_per_token == m31.experts_per_token
    text = config(MINI)["text_config"]
    assert (text["partial_rotary_factor"], text["use_gemma_norm"], text["scoring_func"], text["use_routing_bias"]) == (
        0.5,
        True,
        "sigmoid",
        True,
    )


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_passes_its_check_and_can_run(name, tmp_path):
    result = run("train", f"{name}.yaml", "--check", "--json", tmp_path / "found.json")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["missing"] == [] and not found["checkpoint_here"]
    assert "samebits mini-m3 checkpoints/mini-m3 makes the checkpoint" in result.output
    gpus = 2 if name.endswith("x2") else 1
    assert found["layout"] | {"gpus": gpus, "replicas": gpus, "fsdp": gpus, "engine_gpus": 1} == found["layout"]
    assert found["profile"]["kv_cache"] == "nvfp4" and found["profile"]["name"] == "w4a16"
    assert found["data"][0]["source"] == "mini-math" and all(p["short"] == 0 for p in found["memory"]["phases"])


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_any_power_of_two_of_gpus_is_one_key(gpus):
    report = check("mini_m3_h200.yaml", [f"trainer.n_gpus_per_node={gpus}"])
    assert report.found.missing == () and (report.found.layout.replicas, report.found.layout.fsdp) == (gpus, gpus)
    assert report.memory.sync["to all replicas"] == gpus * report.memory.sync["to each replica"]
    assert report.memory.phases[1].parts["trainer: moments"] == 8 * report.memory.adapter_parameters / gpus
    if gpus == 2:
        named = check("mini_m3_h200_x2.yaml")
        assert named.found.layout == report.found.layout and named.memory == report.memory


def test_recipes_hold_the_task_and_let_the_engine_sleep():
    for name in RECIPES:
        recipe, verl = load_recipe(f"{name}.yaml", planned=True)
        rollout = verl.actor_rollout_ref.rollout
        assert (verl.data.max_prompt_length, verl.data.max_response_length) == (MAX_PROMPT_TOKENS, MAX_RESPONSE_TOKENS)
        assert rollout.free_cache_engine and rollout.enable_sleep_mode and not rollout.enforce_eager
        assert verl.reward.custom_reward_function.path == "pkg://samebits.recipes.mini_math" and recipe.architecture == "mini-m3"
        assert verl.trainer.total_training_steps == 200 and verl.trainer.val_before_train


def test_recipe_takes_a_built_checkpoint_and_refuses_one_of_other_sizes(built):
    out, *_ = built
    result = run("train", f"{RECIPES[0]}.yaml", "--check", f"model={out}")
    assert result.exit_code == 2 and "architecture: mini-m3 has layers 8, the checkpoint at" in result.output
    report = check(f"{RECIPES[0]}.yaml", [f"model={out}", "architecture=null"])
    assert report.found.checkpoint_here and report.found.missing == ()

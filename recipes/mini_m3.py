"""Build the mini MiniMax-M3: pre-train it on one GPU from generated math, quantize it, and write it as a checkpoint with its accuracies.

0.45 B parameters with M3's heads, blocks and top-k. What the corpus holds is exactly what `apply_chat_template` gives. GRPO is to
start at about 36 % right samples: slips in the corpus bring the model near, and the head is scaled by what is missing, which changes how
sharply the model samples and not what it says greedily. The scale is found on training problems, with the weights as they will be
served: the probability of a right solution is read off one forward pass over its text.

The indexer is not trained, as in `tiny_m3`: its projections are the mean of the attention heads that they stand for, and up to 2,048
tokens every block is chosen anyhow.

`pretrain.json` beside the checkpoint says how it was made, how often it is right, and how long each phase took. OUT appears when all of it
is there; until then everything is in `OUT.partial`, where the same command takes it up after an interruption (`mini_keep`).
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from samebits.quant import mxfp8, nvfp4
from samebits.quant.profile import Format, NumericsProfile, get_profile
from samebits.quant.roles import Role, tensor_role

from .mini_keep import Interrupts, States, Work, read_tensors, what_is_kept, write_tensors
from .mini_math import FAMILIES, MAX_RESPONSE_TOKENS, Problem, draw, grade
from .mini_model import FP32, MINI, MiniModel
from .mini_progress import Line
from .mini_tokens import chat, mini_tokenizer, write_tokenizer
from .mini_train import Training, pack, train
from .quantize import quantize
from .tiny_m3 import BOS, EOS, PAD, config, dense_weights, export
from .tiny_model import Sizes, Weights

PROFILE = "w4a16"
HEAD = "lm_head.weight"
TARGET = 0.325
"""Mean probability of the very solution that the head is scaled for. Other texts end in the right number as well, a tenth as often (40.1 %
of samples were right at 0.359, of 1,024), so that about 36 % of samples are right."""
SCALES = (0.6, 1.7)
"""Within which the head's scale lies; a model that needs more is not ready, and its accuracies show it."""
EVALUATED = 1024
"""Held-out problems behind the accuracies of pretrain.json, and training problems behind the head's scale."""
_SHARD = "400MB"


@dataclass(frozen=True, slots=True)
class Likely:
    """What a forward pass over right solutions says of each problem [P]."""

    chance: Tensor
    """Probability that a sample at temperature 1 is the very solution."""
    greedy: Tensor
    """Whether the greedy answer is it, token for token."""


def build(
    out: Path,
    seed: int = 0,
    training: Training | None = None,
    device: str = "cuda",
    sizes: Sizes = MINI,
    console: Console | None = None,
    progress: bool = True,
    imports: float = 0.0,
) -> dict[str, Any]:
    """Train, quantize, calibrate and write the mini M3 into `out`; returns what pretrain.json says.

    `imports`: seconds that the caller has spent already. Goes on from what an interrupted call with the same options left.
    Raises `FileExistsError` when `out` holds anything or is being built, `ValueError` when what is left is of other options,
    `FloatingPointError` when training diverged, `mini_keep.Interrupted`, and what `quant.convert` raises.
    """
    recipe, where, console = training or Training(), torch.device(device), console or Console()
    options = {"seed": seed, "device": where.type, **asdict(recipe), **asdict(sizes)}
    with Interrupts() as interrupts, Work(out, options) as work:
        if progress and work.goes_on:
            console.print(f"going on: {what_is_kept(out)}", highlight=False, soft_wrap=True)
        work.spent("start", imports)
        with work.phase("start"):
            made = _Build(work, interrupts, recipe, seed, where, sizes, console, progress)
        full = made.trained()
        made.quantized(full)
        return made.measured(full)


class _Build:
    """The phases of a build, each of which finds what an earlier call has done of it."""

    def __init__(
        self,
        work: Work,
        interrupts: Interrupts,
        recipe: Training,
        seed: int,
        device: torch.device,
        sizes: Sizes,
        console: Console,
        shown: bool,
    ) -> None:
        self.work, self.interrupts, self.recipe, self.seed, self.device = work, interrupts, recipe, seed, device
        self.sizes, self.console, self.shown = sizes, console, shown
        self.model = MiniModel(sizes, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
        self.target, self.profile = work.folder / "target", get_profile(PROFILE)

    def trained(self) -> Weights:
        """Weights as they are computed with, the head in fp32 and scaled."""
        kept, state, record = self.work.folder / "trained.safetensors", self.work.folder / "training.safetensors", self.work.record
        if kept.exists():
            weights, record["trained"] = read_tensors(kept, self.device)
        else:
            self._say(f"training until {self._budget()} are over; then quantizing and measuring")
            try:
                made, done = train(
                    self.sizes, self.recipe, self.seed, self.device, self.shown, States(state, self.interrupts), self.console
                )
            except FloatingPointError:
                state.unlink(missing_ok=True)  # it may hold what diverged
                raise
            weights, record["trained"] = self.model.rounded(made) | {HEAD: made[HEAD]}, asdict(done)
            with self.work.phase("keeping"):
                write_tensors(kept, weights, record["trained"])
                state.unlink(missing_ok=True)
            self.work.save()
            self.interrupts.wait = False
            self.interrupts.look()
        if "head_scale" not in record:
            with self.work.phase("head scale"), Line("head scale", self.console, self.shown):
                held = served(self.model.rounded(weights), self.profile, self.model.dtype)
                record["head_scale"] = head_scale(self.model, held, draw("train", EVALUATED, seed=1))
            self.work.save()
        return weights | {HEAD: weights[HEAD] * record["head_scale"]}

    def quantized(self, weights: Weights) -> None:
        """Write the quantized checkpoint."""
        self.interrupts.look()
        if (self.target / "config.json").exists():  # written last
            return
        source = self.work.folder / "source"
        for left in (source, self.target):
            shutil.rmtree(left, ignore_errors=True)
        with self.work.phase("quantizing"):
            write_source(source, self.model.rounded(weights), self.sizes)
            quantize(source, self.target, self.profile, None, self.console)

    def measured(self, weights: Weights) -> dict[str, Any]:
        """Measure the checkpoint, and put it in its place with pretrain.json."""
        self.interrupts.look()
        with self.work.phase("measuring"), Line("measuring", self.console, self.shown) as line:
            held = self.model.rounded({n: w.to(self.device) for n, w in dense_weights(self.target).items()})
            problems = draw("test", EVALUATED)
            before = likely(self.model, self.model.rounded(weights), problems)
            accuracy = {
                "full precision": {"expected": before.chance.mean().item(), "greedy": before.greedy.float().mean().item()},
                **accuracies(self.model, held, problems, self.seed, line.update),
            }
        self.interrupts.wait = True  # there is nothing left to interrupt
        report = self._report(sum(w.numel() for w in weights.values()), accuracy)
        (self.target / "pretrain.json").write_text(json.dumps(report, indent=2) + "\n")
        if self.work.out.exists():
            self.work.out.rmdir()
        self.target.rename(self.work.out)
        shutil.rmtree(self.work.folder)
        return report

    def _budget(self) -> str:
        if self.recipe.steps is not None:
            return f"{self.recipe.steps:,} steps"
        return f"{self.recipe.minutes:g} minutes, compiling included,"

    def _say(self, text: str) -> None:
        if self.shown:
            self.console.print(text, highlight=False, soft_wrap=True)

    def _report(self, parameters: int, accuracy: dict) -> dict[str, Any]:
        record, recipe = self.work.record, self.recipe
        budget = f"--steps {recipe.steps}" if recipe.steps is not None else f"--minutes {recipe.minutes:g}"
        return {
            "command": f"samebits mini-m3 OUT --seed {self.seed} {budget} --device {self.device.type}",
            "seed": self.seed,
            "profile": PROFILE,
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu",
            "versions": {n: importlib.metadata.version(n) for n in ("torch", "tokenizers", "safetensors")},
            "sizes": asdict(self.sizes),
            "parameters": parameters,
            "training": asdict(recipe),
            "trained": record["trained"],
            "seconds": _seconds(record["trained"], record["seconds"]),
            "indexer": "mean of the attention heads, not trained",
            "head_scale": record["head_scale"],
            "held_out_problems": EVALUATED,
            "accuracy": accuracy,
        }


def _seconds(trained: dict[str, Any], others: dict[str, float]) -> dict[str, float]:
    """Seconds by phase, of all calls together, in the order of the phases; what an interruption lost is not in them."""
    starts, keeping = sum(trained["starts"]), trained["keeping"]
    phases = {"start": 0.0, "first step": starts, "training": trained["seconds"] - starts - keeping, "keeping": 0.0} | others
    phases["keeping"] += keeping
    return {name: round(seconds, 3) for name, seconds in (phases | {"all": sum(phases.values())}).items()}


def write_source(folder: Path, weights: Weights, sizes: Sizes) -> None:
    """An unquantized checkpoint of trained weights in shards, as `samebits quantize` reads it."""
    from huggingface_hub import save_torch_state_dict

    folder.mkdir()
    tensors = {n: w.contiguous().cpu() for n, w in export(weights, sizes).items()}
    save_torch_state_dict(tensors, folder, max_shard_size=_SHARD)
    (folder / "config.json").write_text(json.dumps(config(sizes), indent=2) + "\n")
    write_tokenizer(folder, sizes.max_position)
    generation = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD, "do_sample": True, "temperature": 1.0}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


@torch.no_grad()
def served(weights: Weights, profile: NumericsProfile, dtype: torch.dtype) -> Weights:
    """`weights` with the values that a checkpoint in the formats of `profile` gives back, matrices in `dtype`."""
    roles = {"w1": Role.EXPERT_GATE, "w2": Role.EXPERT_DOWN, "w3": Role.EXPERT_UP}
    out: Weights = {}
    for name, w in weights.items():
        prefix, _, leaf = name.rpartition(".")
        if leaf in roles:
            stacks = {roles[n]: weights[f"{prefix}.{n}"] for n in (("w2",) if leaf == "w2" else ("w1", "w3"))}
            out[name] = nvfp4.dequantize(nvfp4.quantize_experts(stacks, prefix)[roles[leaf]], dtype)
            continue
        fmt = profile.weight_format(tensor_role(name))
        if fmt is Format.MXFP8:
            out[name] = mxfp8.dequantize(mxfp8.quantize(w, name), dtype)
        else:
            stored = w.float() if fmt is Format.FP32 else w.bfloat16()
            out[name] = stored.float() if name.endswith(FP32) else stored.to(dtype)
    return out


@torch.no_grad()
def _solution_logits(model: MiniModel, weights: Weights, problems: Sequence[Problem], batch: int = 128):
    """Logits [P, V] and tokens [P] of the right solutions with their end, and of which problem each is [P]."""
    logits, targets, owners = [], [], []
    for start in range(0, len(problems), batch):
        part = problems[start : start + batch]
        packed, wanted = pack([e.ids for e in mini_tokenizer().encode_batch([chat(p, p.steps) for p in part])])
        packed, wanted = packed.to(model.device), wanted.to(model.device)
        owner = torch.repeat_interleave(torch.arange(len(part), device=model.device), packed.ends.diff())
        inside = wanted != PAD
        logits.append(model.forward(weights, packed)[inside])
        targets.append(wanted[inside])
        owners.append(owner[inside] + start)
    return torch.cat(logits), torch.cat(targets), torch.cat(owners)


def _chances(logits: Tensor, targets: Tensor, owners: Tensor, count: int) -> Tensor:
    """Probability [count] of each problem's solution."""
    logprobs = torch.gather(logits.log_softmax(-1), 1, targets[:, None])[:, 0].double()
    return torch.zeros(count, device=logits.device, dtype=torch.float64).index_add_(0, owners, logprobs).exp()


def likely(model: MiniModel, weights: Weights, problems: Sequence[Problem]) -> Likely:
    """What one forward pass over the right solutions says."""
    logits, targets, owners = _solution_logits(model, weights, problems)
    wrong = torch.zeros(len(problems), device=model.device).index_add_(0, owners, (logits.argmax(-1) != targets).float())
    return Likely(_chances(logits, targets, owners, len(problems)), wrong == 0)


def head_scale(model: MiniModel, weights: Weights, problems: Sequence[Problem], target: float = TARGET) -> float:
    """Factor of the logits, within `SCALES`, with which samples are right with probability `target` on average."""
    found = _solution_logits(model, weights, problems)
    low, high = SCALES
    for _ in range(20):
        middle = (low + high) / 2
        chance = _chances(found[0] * middle, *found[1:], len(problems)).mean().item()
        low, high = (middle, high) if chance < target else (low, middle)
    return (low + high) / 2


def accuracies(
    model: MiniModel, weights: Weights, problems: Sequence[Problem], seed: int, told: Callable[[float, str], None] = lambda done, what: None
) -> dict[str, Any]:
    """How often problems are answered right, all of them and by family: sampled at temperature 1, greedily, and by the forward pass.

    `told` is called with the fraction that is done, and what is under way.
    """
    known = likely(model, weights, problems)
    g = torch.Generator(model.device).manual_seed(seed)
    sampled = answered(model, weights, problems, 1.0, g, told=lambda done: told(done / 2, "sampled at temperature 1"))
    greedy = answered(model, weights, problems, 0.0, g, told=lambda done: told((1 + done) / 2, "greedily"))
    rows = {}
    for name in ("all", *FAMILIES):
        at = [i for i, p in enumerate(problems) if name in ("all", p.family)]
        chance = known.chance[at]
        rows[name] = {
            "problems": len(at),
            "sampled": sum(sampled[i] for i in at) / max(1, len(at)),
            "greedy": sum(greedy[i] for i in at) / max(1, len(at)),
            "expected": chance.mean().item() if at else 0.0,
            "mixed_groups_of_8": (1 - chance**8 - (1 - chance) ** 8).mean().item() if at else 0.0,
        }
    return rows


def answered(
    model: MiniModel,
    weights: Weights,
    problems: Sequence[Problem],
    temperature: float,
    g: torch.Generator,
    batch: int = 1024,
    told: Callable[[float], None] = lambda done: None,
) -> list[bool]:
    """Whether each problem is answered right by one sample; a sample without its end is wrong. `told`: the fraction that is done."""
    tokenizer, right = mini_tokenizer(), []
    for start in range(0, len(problems), batch):
        part = problems[start : start + batch]
        prompts = [e.ids for e in tokenizer.encode_batch([f"<user>{p.prompt}<assistant>" for p in part])]

        def looked(tokens: int, before: int = start, count: int = len(part)) -> None:
            told((before + count * tokens / MAX_RESPONSE_TOKENS) / len(problems))

        out = model.sample(weights, prompts, MAX_RESPONSE_TOKENS, EOS, PAD, temperature, g, looked)
        texts = tokenizer.decode_batch([[t for t in row if t != PAD] for row in out.tolist()], skip_special_tokens=False)
        right += [t.endswith("<eos>") and grade(t, p.answer) > 0 for t, p in zip(texts, part, strict=True)]
    return right


def show(report: dict[str, Any], console: Console) -> None:
    """Print what a build gave."""
    done = report["trained"]
    speed = f"{done['tokens_per_second'] / 1e3:,.0f}k tokens/s, {done['tflops']:.0f} TFLOP/s"
    if done["mfu"]:
        speed += f" ({done['mfu']:.0%} of the device)"
    lines = (
        f"{report['parameters'] / 1e6:,.0f} M parameters; {done['steps']:,} steps, {done['tokens'] / 1e6:,.1f} M tokens in "
        f"{done['seconds']:.0f} s: {speed}; loss {done['loss']:.3f}",
        f"busiest expert {done['load']:.2f} times the mean, {done['idle']:.0%} of the experts idle",
        f"head scaled by {report['head_scale']:.3f}",
    )
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    table = Table(title="held-out problems answered right", title_justify="left")
    for column in ("", "problems", "sampled", "greedy", "the very solution", "groups of 8 with both"):
        table.add_column(column, justify="right" if column else "left")
    for name, found in report["accuracy"].items():
        shares = (f"{found[key]:.1%}" if key in found else "" for key in ("sampled", "greedy", "expected", "mixed_groups_of_8"))
        table.add_row(name, f"{found.get('problems', report['held_out_problems']):,}", *shares)
    console.print(table)
    seconds = ", ".join(f"{name} {spent:.1f}" for name, spent in report["seconds"].items())
    console.print(f"seconds: {seconds}", highlight=False, soft_wrap=True)

"""Build the mini MiniMax-M3: pre-train it on one GPU from generated math, quantize it, and write it as a checkpoint with its accuracies.

0.45 B parameters with M3's heads, blocks and top-k. What the corpus holds is exactly what `apply_chat_template` gives. GRPO is to
start at about 36 % right samples: slips in the corpus bring the model near, and the head is scaled by what is missing, which changes how
sharply the model samples and not what it says greedily. The scale is found on training problems, with the weights as they will be
served: the probability of a right solution is read off one forward pass over its text.

The indexer is not trained, as in `tiny_m3`: its projections are the mean of the attention heads that they stand for, and up to 2,048
tokens every block is chosen anyhow.

`pretrain.json` beside the checkpoint says how it was made and how often it is right. An interrupted build leaves nothing.
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import tempfile
from collections.abc import Sequence
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

from .mini_math import FAMILIES, MAX_RESPONSE_TOKENS, Problem, draw, grade
from .mini_model import FP32, MINI, MiniModel
from .mini_tokens import chat, mini_tokenizer, write_tokenizer
from .mini_train import Progressed, Training, pack, train
from .quantize import quantize
from .tiny_m3 import BOS, EOS, PAD, config, dense_weights, export
from .tiny_model import Sizes, Weights

PROFILE = "w4a16"
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
) -> dict[str, Any]:
    """Train, quantize, calibrate and write the mini M3 into `out`; returns what pretrain.json says.

    Raises `FileExistsError` when `out` holds anything, `FloatingPointError` when training diverged, and what `quant.convert` raises.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} is not empty")
    recipe, where, console = training or Training(), torch.device(device), console or Console()
    profile = get_profile(PROFILE)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as work:
        weights, done = train(sizes, recipe, seed, where, progress)
        model = MiniModel(sizes, where, torch.bfloat16 if where.type == "cuda" else torch.float32)
        full = model.rounded(weights)
        scale = head_scale(model, served(full, profile, model.dtype), draw("train", EVALUATED, seed=1))
        weights["lm_head.weight"] *= scale
        full = model.rounded(weights)
        source, target = Path(work) / "source", Path(work) / "target"
        write_source(source, full, sizes)
        quantize(source, target, profile, None, console)
        held = model.rounded({n: w.to(where) for n, w in dense_weights(target).items()})
        problems = draw("test", EVALUATED)
        before = likely(model, full, problems)
        accuracy = {
            "full precision": {"expected": before.chance.mean().item(), "greedy": before.greedy.float().mean().item()},
            **accuracies(model, held, problems, seed),
        }
        report = _report(seed, recipe, sizes, where, weights, done, scale, accuracy)
        (target / "pretrain.json").write_text(json.dumps(report, indent=2) + "\n")
        if out.exists():
            out.rmdir()
        shutil.move(target, out)
    return report


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


def accuracies(model: MiniModel, weights: Weights, problems: Sequence[Problem], seed: int) -> dict[str, Any]:
    """How often problems are answered right, all of them and by family: sampled at temperature 1, greedily, and by the forward pass."""
    known = likely(model, weights, problems)
    g = torch.Generator(model.device).manual_seed(seed)
    sampled, greedy = (answered(model, weights, problems, t, g) for t in (1.0, 0.0))
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
    model: MiniModel, weights: Weights, problems: Sequence[Problem], temperature: float, g: torch.Generator, batch: int = 512
) -> list[bool]:
    """Whether each problem is answered right by one sample; a sample without its end is wrong."""
    tokenizer, right = mini_tokenizer(), []
    for start in range(0, len(problems), batch):
        part = problems[start : start + batch]
        prompts = [e.ids for e in tokenizer.encode_batch([f"<user>{p.prompt}<assistant>" for p in part])]
        out = model.sample(weights, prompts, MAX_RESPONSE_TOKENS, EOS, PAD, temperature, g)
        texts = tokenizer.decode_batch([[t for t in row if t != PAD] for row in out.tolist()], skip_special_tokens=False)
        right += [t.endswith("<eos>") and grade(t, p.answer) > 0 for t, p in zip(texts, part, strict=True)]
    return right


def _report(
    seed: int, recipe: Training, sizes: Sizes, device: torch.device, weights: Weights, done: Progressed, scale: float, accuracy: dict
) -> dict[str, Any]:
    budget = f"--steps {recipe.steps}" if recipe.steps is not None else f"--minutes {recipe.minutes:g}"
    return {
        "command": f"samebits mini-m3 OUT --seed {seed} {budget} --device {device.type}",
        "seed": seed,
        "profile": PROFILE,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "versions": {n: importlib.metadata.version(n) for n in ("torch", "tokenizers", "safetensors")},
        "sizes": asdict(sizes),
        "parameters": sum(w.numel() for w in weights.values()),
        "training": asdict(recipe),
        "trained": asdict(done),
        "indexer": "mean of the attention heads, not trained",
        "head_scale": scale,
        "held_out_problems": EVALUATED,
        "accuracy": accuracy,
    }


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

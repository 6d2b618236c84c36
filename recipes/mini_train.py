"""Pre-training of the mini MiniMax-M3: a packed corpus made while it is read, and a loop with a budget of time or of steps.

Batches hold the same number of tokens each; batch i of a seed is the same whoever makes it, so worker processes make them ahead. The
rates, and the moment from which on the corpus has slips, follow the fraction of the budget that is spent. With a budget in minutes the
number of steps is what the machine makes of it; with one in steps a run sees the same batches at the same rates each time, and on a CPU
ends with the same bits (on a GPU, sums of the gradient of attention are in no fixed order).

Left out: checkpoints. A run takes minutes, and an interrupted one leaves nothing behind.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from . import mini_math
from .mini_math import MAX_PROMPT_TOKENS, MAX_RESPONSE_TOKENS
from .mini_model import MiniModel, Packed
from .mini_tokens import chat, mini_tokenizer
from .muon import Muon
from .plan_tables import model_of_config
from .tiny_m3 import PAD, config
from .tiny_model import Sizes, Weights, initialise

REPORT_EVERY = 20
"""Steps between two readings of loss and speed; each waits for the device."""


@dataclass(frozen=True, slots=True)
class Training:
    """How the full-precision model is trained: Muon for the matrices, AdamW for the rest; warm-up, then linear decay to 2 %."""

    minutes: float = 8.0
    """Budget; starting up and compiling are within it."""
    steps: int | None = None
    """A budget in steps instead."""
    tokens: int = 32768
    """Of a step."""
    muon_lr: float = 0.006
    adamw_lr: float = 3e-3
    """Of embedding and norms."""
    readout_lr: float = 1e-3
    """AdamW's for head and router, whose inputs are as many as the model is wide."""
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.01
    warmup: float = 0.02
    """Fraction of the budget."""
    clip: float = 1.0
    right: float = 0.35
    """Share of the solutions in the corpus that have no slip, once there are any."""
    slip_from: float = 0.6
    """Fraction of the budget before the first slip: the arithmetic is learned sooner from a clean corpus."""
    bias_rate: float = 0.002
    """Step of the router's bias toward the mean load."""


@dataclass(frozen=True, slots=True)
class Progressed:
    """What a training run did."""

    steps: int
    seconds: float
    """All of it."""
    tokens: int
    tokens_per_second: float
    """Median over the readings, so without start-up."""
    tflops: float
    """6 operations a token and active parameter, at that speed; attention scores and the optimizer are not counted."""
    mfu: float | None
    """Of the device's dense BF16 rate; None where `hardware.yaml` does not know the device."""
    loss: float
    load: float
    """Tokens of the busiest expert of any layer, over the mean, in the last step."""
    idle: float
    """Share of all experts with less than a tenth of the mean, in the last step."""
    curve: tuple[tuple[int, float, float], ...]
    """(step, seconds, loss) at every reading."""


class Corpus(Dataset):
    """Packed batches by number. Raises `ValueError` when a batch may be too small for the longest document."""

    def __init__(self, seed: int, tokens: int, right: float) -> None:
        if tokens < MAX_PROMPT_TOKENS + MAX_RESPONSE_TOKENS:
            raise ValueError(f"a batch of {tokens} tokens may not hold a document of {MAX_PROMPT_TOKENS + MAX_RESPONSE_TOKENS}")
        self.seed, self.tokens, self.right = seed, tokens, right

    def __getitem__(self, number: int) -> tuple[Packed, Tensor]:
        """Documents that fill the batch but for a remainder of padding, and next-token targets: `PAD` but in responses."""
        key = f"{self.seed}/{number}"
        rng, problems, tokenizer = random.Random(f"slips/{key}"), mini_math.stream("train", key), mini_tokenizer()
        documents: list[list[int]] = []
        room = self.tokens
        while room:
            part = [chat(p, p.steps_with_slips(self.right, rng)) for p, _ in zip(problems, range(64), strict=False)]
            for encoded in tokenizer.encode_batch(part):
                document = encoded.ids if len(encoded.ids) <= room else [PAD] * room
                documents.append(document)
                room -= len(document)
                if not room:
                    break
        return pack(documents)


def pack(documents: list[list[int]]) -> tuple[Packed, Tensor]:
    """Documents one after the other, and their targets [T]: the next token in a response and after it, elsewhere `PAD`."""
    start_of_response = mini_tokenizer().token_to_id("<assistant>")
    lengths = torch.tensor([len(d) for d in documents])
    ids = torch.tensor([t for d in documents for t in d])
    ends = F.pad(lengths.cumsum(0), (1, 0))
    positions = torch.arange(len(ids)) - ends[:-1].repeat_interleave(lengths)
    targets = torch.full_like(ids, PAD)
    for start, document in zip(ends.tolist(), documents, strict=False):
        if start_of_response in document:
            first = document.index(start_of_response)
            targets[start + first : start + len(document) - 1] = ids[start + first + 1 : start + len(document)]
    return Packed(ids, positions, ends.to(torch.int32), int(lengths.max())), targets


def batches(seed: int, recipe: Training, workers: int, pinned: bool) -> tuple[Iterator, Iterator]:
    """Endless batches without slips, and with them."""
    loaders = []
    for number, right in enumerate((1.0, recipe.right)):
        # Each has a seed of its own: the second is to bring new problems, not those of the first over again.
        corpus = Corpus(2 * seed + number, recipe.tokens, right)
        options: dict[str, Any] = {"num_workers": workers, "prefetch_factor": 4, "worker_init_fn": _alone} if workers else {}
        loaders.append(iter(DataLoader(corpus, batch_size=None, sampler=range(1 << 40), pin_memory=pinned, **options)))
    return loaders[0], loaders[1]


def _alone(worker: int) -> None:
    """A worker process keeps to one core: there are as many of them as cores."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)


def train(sizes: Sizes, recipe: Training, seed: int, device: torch.device, progress: bool = True) -> tuple[Weights, Progressed]:
    """Weights after training on the corpus (fp32, on `device`), and what was done.

    Raises `FloatingPointError` when the loss is no longer finite.
    """
    on_gpu = device.type == "cuda"
    budget = _Budget(recipe)
    workers = min(8, max(1, (os.cpu_count() or 2) - 2)) if on_gpu else 0
    clean, slipping = batches(seed, recipe, workers, on_gpu)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    model = MiniModel(sizes, device, dtype, compiled=on_gpu)
    weights = initialise(sizes, seed, device)
    trained = {n: w.requires_grad_(True) for n, w in weights.items() if not n.endswith("e_score_correction_bias")}
    optimizers = _optimizers(trained, recipe, on_gpu)
    rates = [(group, group["lr"]) for o in optimizers for group in o.param_groups]
    active = model_of_config(config(sizes), "mini").active_parameters
    curve: list[tuple[int, float, float]] = []
    speeds: list[float] = []
    step = 0
    reading = (0, budget.started)
    columns = (TextColumn("training mini M3"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TextColumn("{task.description}"))
    with Progress(*columns, TimeElapsedColumn(), disable=not progress) as bar:
        shown = bar.add_task("starting", total=1.0)
        while (spent := budget.spent(step)) < 1:
            for group, peak in rates:
                group["lr"] = peak * min(1.0, spent / recipe.warmup + 1e-3) * max(0.02, 1 - spent)
            batch, targets = next(clean if spent < recipe.slip_from else slipping)
            loss = F.cross_entropy(model.forward(model.rounded(weights), batch.to(device)), targets.to(device), ignore_index=PAD)
            for w in trained.values():
                w.grad = None
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained.values(), recipe.clip, foreach=True)
            for optimizer in optimizers:
                optimizer.step()
            loads = _balance(weights, model.counts, recipe.bias_rate)
            step += 1
            if step % REPORT_EVERY == 0:
                curve.append((step, budget.seconds, _finite(loss, step)))
                now = time.perf_counter()
                speeds.append((step - reading[0]) * recipe.tokens / (now - reading[1]))
                reading = (step, now)
                speed = f"{speeds[-1] / 1e3:,.0f}k tokens/s, {6 * active * speeds[-1] / 1e12:.0f} TFLOP/s"
                bar.update(shown, completed=spent, description=f"step {step}, loss {curve[-1][2]:.3f}, {speed}")
        final = _finite(loss, step)
    seconds = budget.seconds
    speed = sorted(speeds)[len(speeds) // 2] if speeds else step * recipe.tokens / seconds
    peak = peak_tflops(device)
    tflops = 6 * active * speed / 1e12
    done = Progressed(
        steps=step,
        seconds=seconds,
        tokens=step * recipe.tokens,
        tokens_per_second=speed,
        tflops=tflops,
        mfu=tflops / peak if peak else None,
        loss=final,
        load=loads.max().item(),
        idle=(loads < 0.1).float().mean().item(),
        curve=tuple(curve),
    )
    return {n: w.detach() for n, w in weights.items()}, done


class _Budget:
    """How much of the budget is spent. The first step, which compiles, is within a budget of time, but no schedule counts it."""

    def __init__(self, recipe: Training) -> None:
        self.recipe, self.started, self.begun = recipe, time.perf_counter(), None

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.perf_counter() - self.started

    def spent(self, step: int) -> float:
        """Fraction that is spent before step `step`, from 0 to 1; there is always a first step."""
        if self.recipe.steps is not None:
            return step / self.recipe.steps
        if step == 0:
            return 0.0
        if self.begun is None:
            self.begun = self.seconds
        left = 60 * self.recipe.minutes - self.begun
        return min(1.0, (self.seconds - self.begun) / left) if left > 0 else 1.0


def _finite(loss: Tensor, step: int) -> float:
    value = loss.item()
    if not math.isfinite(value):
        raise FloatingPointError(f"loss {value} at step {step}")
    return value


def _optimizers(trained: Weights, recipe: Training, on_gpu: bool) -> list[torch.optim.Optimizer]:
    """Muon for the projections and experts; AdamW for embedding, head, router and norms, the norms without weight decay."""

    def named(*parts: str) -> list[Tensor]:
        return [w for n, w in trained.items() if any(part in n for part in parts)]

    by_adamw = ("embed_tokens", "lm_head", "block_sparse_moe.gate", "norm")
    hidden = [w for n, w in trained.items() if not any(part in n for part in by_adamw)]
    groups = [
        {"params": named("embed_tokens"), "weight_decay": recipe.weight_decay},
        {"params": named("lm_head", "block_sparse_moe.gate"), "weight_decay": recipe.weight_decay, "lr": recipe.readout_lr},
        {"params": named("norm"), "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=recipe.adamw_lr, betas=recipe.betas, eps=1e-9, fused=on_gpu)
    return [Muon(hidden, recipe.muon_lr, weight_decay=recipe.weight_decay, dtype=torch.bfloat16 if on_gpu else None), adamw]


@torch.no_grad()
def _balance(weights: Weights, counts: dict[int, Tensor], rate: float) -> Tensor:
    """Move each router's bias toward the mean load; returns each expert's load over the mean [layers, E], on the device."""
    loads = []
    for layer, count in counts.items():
        load = count.float()
        weights[f"model.layers.{layer}.block_sparse_moe.e_score_correction_bias"] += rate * (load.mean() - load).sign()
        loads.append(load / load.mean())
    return torch.stack(loads)


def peak_tflops(device: torch.device) -> float | None:
    """Dense BF16 rate of the device as `hardware.yaml` has it, by the second word of its title (H200); None where it is unknown."""
    import yaml

    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device).lower()
    known = yaml.safe_load((Path(__file__).parent / "hardware.yaml").read_text())
    return next((entry["bf16_tflops"] for entry in known.values() if entry["title"].split()[1].lower() in name.split()), None)

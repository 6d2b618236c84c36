"""Pre-training of the mini MiniMax-M3: a packed corpus made while it is read, and a loop with a budget of time or of steps.

Batches hold the same number of tokens each; batch i of a seed is the same whoever makes it, so worker processes make them ahead. The
rates, and the moment from which on the corpus has slips, follow the fraction of the budget that is spent. With a budget in minutes the
number of steps is what the machine makes of it; with one in steps a run sees the same batches at the same rates each time, and on a CPU
ends with the same bits (on a GPU, sums of the gradient of attention are in no fixed order).

A run that was interrupted goes on from its last kept state (`mini_keep`): weights, states of the optimizers, batches taken, and how much of
the budget is spent. Nothing else is in it, so on a CPU the bits are those of a run without interruption.
"""

from __future__ import annotations

import math
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from . import mini_math
from .mini_keep import Interrupted, Position, States
from .mini_math import MAX_PROMPT_TOKENS, MAX_RESPONSE_TOKENS
from .mini_model import MiniModel, Packed, pack_ids
from .mini_progress import Line
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

    minutes: float = 3.5
    """Budget; starting up and compiling are within it, quantizing and measuring come after it."""
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
    starts: tuple[float, ...]
    """Of these, to the end of the first step of each call."""
    keeping: float
    """Of these, waiting for a state to be kept."""
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
    packed = pack_ids(documents)
    targets = torch.full_like(packed.ids, PAD)
    for start, document in zip(packed.ends.tolist(), documents, strict=False):
        if start_of_response in document:
            first = document.index(start_of_response)
            targets[start + first : start + len(document) - 1] = packed.ids[start + first + 1 : start + len(document)]
    return packed, targets


def batches(seed: int, recipe: Training, workers: int, pinned: bool, taken: Sequence[int] = (0, 0)) -> tuple[Iterator, Iterator]:
    """Endless batches without slips, and with them, each from the one after those that are `taken` on."""
    loaders = []
    mini_tokenizer()  # once, before there are workers
    for number, right in enumerate((1.0, recipe.right)):
        # Each has a seed of its own: the second is to bring new problems, not those of the first over again.
        corpus = Corpus(2 * seed + number, recipe.tokens, right)
        options: dict[str, Any] = {"num_workers": workers, "prefetch_factor": 4, "worker_init_fn": _alone} if workers else {}
        loaders.append(iter(DataLoader(corpus, batch_size=None, sampler=range(taken[number], 1 << 40), pin_memory=pinned, **options)))
    return loaders[0], loaders[1]


def _alone(worker: int) -> None:
    """A worker process keeps to one core, and leaves it to the trainer to end, which has a state to keep."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)


def train(
    sizes: Sizes, recipe: Training, seed: int, device: torch.device, progress: bool = True, states: States | None = None, console=None
) -> tuple[Weights, Progressed]:
    """Weights after training on the corpus (fp32, on `device`), and what was done.

    With `states` it goes on from the state that they hold, and keeps its own there.
    `states.interrupts` wait at its end, for the caller to keep what it made and to look then.
    Raises `FloatingPointError` when the loss is no longer finite, `Interrupted` when `states.interrupts` were asked: the last step is kept.
    """
    try:
        run = _Run(sizes, recipe, seed, device, states)  # before the line: its thread would be forked into the workers
        with Line("training", console or Console(), progress) as line:
            while run.budget.spent(run.at.step) < 1:
                run.step()
                if run.at.step % REPORT_EVERY == 0:
                    line.update(run.budget.spent(run.at.step), run.reading())
                run.keep_if_due()
            return run.end()
    finally:
        if states is not None:
            states.close()


class _Run:
    """A training run between two steps."""

    def __init__(self, sizes: Sizes, recipe: Training, seed: int, device: torch.device, states: States | None) -> None:
        on_gpu = device.type == "cuda"
        self.recipe, self.device, self.states = recipe, device, states
        tensors, self.at = (states and states.read(device)) or (None, Position())
        self.budget = _Budget(recipe, self.at)
        # One makes twenty batches a second, of which a GPU trains on seven.
        workers = min(4, max(1, (os.cpu_count() or 2) - 2)) if on_gpu else 0
        self.corpora = batches(seed, recipe, workers, on_gpu, self.at.drawn)
        self.model = MiniModel(sizes, device, torch.bfloat16 if on_gpu else torch.float32, compiled=on_gpu)
        self.active = model_of_config(config(sizes), "mini").active_parameters
        self.weights = initialise(sizes, seed, device) if tensors is None else {n: tensors[f"weights/{n}"] for n in _names(tensors)}
        self.trained = {n: w.requires_grad_(True) for n, w in self.weights.items() if not n.endswith("e_score_correction_bias")}
        self.optimizers = _optimizers(self.trained, recipe, on_gpu)
        if tensors is not None:
            _restore(self.optimizers, tensors)
        self.rates = [(group, group["lr"]) for o in self.optimizers for group in o.param_groups]
        self.first, self.last = self.at.step, (self.at.step, time.perf_counter())
        self.loss = self.loads = torch.full((), math.nan)

    def step(self) -> None:
        """One batch, one update."""
        at, recipe, spent = self.at, self.recipe, self.budget.spent(self.at.step)
        for group, peak in self.rates:
            group["lr"] = peak * min(1.0, spent / recipe.warmup + 1e-3) * max(0.02, 1 - spent)
        which = 0 if spent < recipe.slip_from else 1
        batch, targets = next(self.corpora[which])
        logits = self.model.forward(self.model.rounded(self.weights), batch.to(self.device))
        self.loss = F.cross_entropy(logits, targets.to(self.device, non_blocking=True), ignore_index=PAD)
        for w in self.trained.values():
            w.grad = None
        self.loss.backward()
        torch.nn.utils.clip_grad_norm_(self.trained.values(), recipe.clip, foreach=True)
        for optimizer in self.optimizers:
            optimizer.step()
        self.loads = _balance(self.weights, self.model.counts, recipe.bias_rate)
        at.drawn[which] += 1
        at.step += 1
        if at.step == self.first + 1:
            self.budget.started()

    def reading(self) -> str:
        """Loss and speed since the last reading, in words; waits for the device."""
        at, (step, then) = self.at, self.last
        at.curve.append((at.step, self.budget.seconds, _finite(self.loss, at.step)))
        self.last = (at.step, time.perf_counter())
        at.speeds.append((at.step - step) * self.recipe.tokens / (self.last[1] - then))
        return f"step {at.step:,}, loss {at.curve[-1][2]:.3f}, {at.speeds[-1] / 1e3:,.0f}k tokens/s"

    def keep_if_due(self) -> None:
        """Keep the state at its time, and when someone wants the run to end."""
        if self.states is None:
            return
        interrupts = self.states.interrupts
        interrupts.wait = True  # from now on there is something to keep
        asked = interrupts.asked
        if asked is None and not self.states.due:
            return
        begun = time.perf_counter()
        self.budget.note()
        if self.budget.spent(self.at.step) >= 1:  # what comes next is the end, which is kept by others
            return
        tensors = {f"weights/{n}": w for n, w in self.weights.items()} | _optimizer_states(self.optimizers)
        self.states.keep(tensors, self.at)
        if asked is not None:
            self.states.finish()
            interrupts.wait = False
            raise Interrupted(asked)
        self.at.keeping += time.perf_counter() - begun

    def end(self) -> tuple[Weights, Progressed]:
        """What `train` returns."""
        at, recipe, final = self.at, self.recipe, _finite(self.loss, self.at.step)
        if self.states is not None:
            begun = time.perf_counter()
            self.states.finish()
            at.keeping += time.perf_counter() - begun
        self.budget.note()
        speed = sorted(at.speeds)[len(at.speeds) // 2] if at.speeds else at.step * recipe.tokens / at.seconds
        peak, tflops = peak_tflops(self.device), 6 * self.active * speed / 1e12
        done = Progressed(
            steps=at.step,
            seconds=at.seconds,
            starts=tuple(at.starts),
            keeping=at.keeping,
            tokens=at.step * recipe.tokens,
            tokens_per_second=speed,
            tflops=tflops,
            mfu=tflops / peak if peak else None,
            loss=final,
            load=self.loads.max().item(),
            idle=(self.loads < 0.1).float().mean().item(),
            curve=tuple(at.curve),
        )
        return {n: w.detach() for n, w in self.weights.items()}, done


def _names(tensors: Weights) -> list[str]:
    return [n.removeprefix("weights/") for n in tensors if n.startswith("weights/")]


def _optimizer_states(optimizers: list[torch.optim.Optimizer]) -> Weights:
    """Tensors of the states, by optimizer, parameter and name."""
    return {
        f"optimizers/{number}/{parameter}/{name}": value
        for number, optimizer in enumerate(optimizers)
        for parameter, state in optimizer.state_dict()["state"].items()
        for name, value in state.items()
    }


def _restore(optimizers: list[torch.optim.Optimizer], tensors: Weights) -> None:
    for number, optimizer in enumerate(optimizers):
        held = optimizer.state_dict()
        for key, value in tensors.items():
            if key.startswith(f"optimizers/{number}/"):
                *_, parameter, name = key.split("/")
                held["state"].setdefault(int(parameter), {})[name] = value
        optimizer.load_state_dict(held)


class _Budget:
    """How much of the budget is spent. The first step of a call, which compiles, is within a budget of time, but no schedule counts it."""

    def __init__(self, recipe: Training, at: Position) -> None:
        self.recipe, self.at = recipe, at
        self._began, self._first = time.perf_counter(), None
        self._seconds, self._counted = at.seconds, at.counted

    @property
    def seconds(self) -> float:
        """Of all calls together."""
        return self._seconds + time.perf_counter() - self._began

    def started(self) -> None:
        """The first step of this call is done."""
        self._first = time.perf_counter()
        self.at.starts.append(self._first - self._began)

    def note(self) -> None:
        """Write into the position how much is spent."""
        self.at.seconds, self.at.counted = self.seconds, self._now()

    def _now(self) -> float:
        return self._counted + (0.0 if self._first is None else time.perf_counter() - self._first)

    def spent(self, step: int) -> float:
        """Fraction that is spent before step `step`, from 0 to 1; there is always a first step."""
        if self.recipe.steps is not None:
            return step / self.recipe.steps
        if not self.at.starts:
            return 0.0
        left = 60 * self.recipe.minutes - self.at.starts[0]
        return min(1.0, self._now() / left) if left > 0 else 1.0


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

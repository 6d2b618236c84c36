"""Steps of the mini M3's training and sampling on fake CUDA tensors: `python -m tests.recipes.on_fake_cuda`, a process of its own.

Raises where operands lie on two devices, where a value is asked for on the host, and where a grid is too large; a copy that waits for the
device is one that was not asked to be asynchronous. What `torch.compile` compiles runs as the operations that it is given.
"""

from __future__ import annotations

from tests.support.fake_cuda import Seen, fake_cuda  # before torch

# ruff: noqa: I001
import json
from typing import Any

import torch
from torch import Tensor

from samebits.recipes import mini_train
from samebits.recipes.mini_math import draw
from samebits.recipes.mini_model import Cache, MiniModel, Packed
from samebits.recipes.mini_tokens import chat, mini_tokenizer
from samebits.recipes.mini_train import Training, pack
from samebits.recipes.tiny_model import Sizes, initialise

SIZES = Sizes(vocab=512, hidden=256, layers=3, heads=32, kv_heads=2, experts=8, top_k=4, intermediate=128, dense=256, topk_blocks=16)
ROWS, LENGTH = 64, 448


def as_compiled(function):
    """A compiled function, without a compiler: our operations see that they are traced, and torch runs them."""

    def run(*arguments):
        before, torch.compiler.is_compiling = torch.compiler.is_compiling, lambda: True
        try:
            return function(*arguments)
        finally:
            torch.compiler.is_compiling = before

    return run


def batch() -> tuple[Packed, Tensor]:
    """On the host, with a number of tokens that kernels like."""
    documents = [e.ids for e in mini_tokenizer().encode_batch([chat(p, p.steps) for p in draw("train", 30)])]
    documents.append([0] * (-sum(map(len, documents)) % 64))
    return pack(documents)


def on_fake(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: torch.empty(w.shape, dtype=w.dtype, device="cuda") for n, w in weights.items()}


def training(seen: Seen, host: tuple[Packed, Tensor], weights: dict[str, Tensor]) -> list[str]:
    """Copies of the second step."""
    mini_train.initialise = lambda *_: on_fake(weights)
    mini_train.batches = lambda *_: (iter([host] * 2),) * 2
    run = mini_train._Run(SIZES, Training(steps=5), 0, torch.device("cuda"), None)
    for _ in range(2):
        seen.clear()
        run.step()
    assert run.loss.device.type == "cuda"
    return list(seen.copies)


def sampling(seen: Seen, weights: dict[str, Tensor]) -> set[str]:
    """Kernels of a token after which nothing new is compiled, and nothing was copied."""
    model = MiniModel(SIZES, torch.device("cuda"), torch.bfloat16)
    held, cache = model.rounded(on_fake(weights)), Cache(SIZES, ROWS, LENGTH, model.device, model.dtype)
    ids = torch.zeros(ROWS, dtype=torch.int64, device="cuda")
    keys: list[set[tuple[str, str]]] = []
    with torch.no_grad():
        model.next(held, cache, ids, ids)
        for _ in range(2):
            seen.clear()
            assert model.next(held, cache, ids, ids).shape == (ROWS, SIZES.vocab)
            assert not seen.copies, seen.copies
            keys.append({(launch.kernel, launch.key) for launch in seen.launches})
    assert keys[0] == keys[1]
    return {kernel for kernel, _ in keys[0]}


def main() -> dict[str, Any]:
    """Take the steps; returns what was copied in one of training, and what was launched for a sampled token."""
    weights, host = initialise(SIZES, 0), batch()
    torch.compile = as_compiled
    with fake_cuda() as seen:
        ids, positions, ends, targets = (torch.empty(t.shape, dtype=t.dtype) for t in (*host[0][:3], host[1]))
        fake = Packed(ids, positions, ends, host[0].longest), targets
        return {"copies": training(seen, fake, weights), "kernels": sorted(sampling(seen, weights))}


if __name__ == "__main__":
    print(json.dumps(main()))

"""Forward and backward of the training model on fake CUDA tensors: `python -m tests.trainer.on_fake_cuda bfloat16|nvfp4`.

A process of its own. Raises where operands lie on two devices, where a value is asked for on the host, and where a grid is too large; the
lengths of the sequences and the table of rotations are all that comes from the host.
"""

from __future__ import annotations

from tests.support.fake_cuda import fake_cuda  # before torch

# ruff: noqa: I001
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from samebits.quant.checkpoint import Checkpoint
from samebits.quant.profile import get_profile
from samebits.quant.roles import LORA_ROLES
from samebits.trainer.lora import LoRASettings
from samebits.trainer.model import M3ForTraining
from tests.support import random_m3

SIZES = dict(vocab=512, hidden=512, heads=16, kv_heads=4, layers=3, experts=4, top_k=2, intermediate=256, dense=512, blocks=16)
EXPECTED = ("rope.py", "packed.py")  # where a copy from the host is asked for
# Lengths, and whether routes are replayed, layers are recomputed, experts are recomputed.
STEPS = (
    ([7], False, False, False),
    ([40, 2300], True, False, False),
    ([400] * 60, True, False, True),
    ([400] * 60, True, True, False),
    ([16384, 16384], True, False, False),
)


def on_fake_device(model: nn.Module) -> None:
    for module in model.modules():
        for name, held in module._parameters.items():
            if held is not None:
                there = torch.empty(held.shape, dtype=held.dtype, device="cuda")
                module._parameters[name] = nn.Parameter(there, requires_grad=held.requires_grad)


def main(kv_cache: str) -> dict[str, Any]:
    """Take the steps; returns what was launched."""
    with tempfile.TemporaryDirectory() as folder:
        random_m3.build(Path(folder), **SIZES)
        profile = get_profile("w4a16", "nvfp4" if kv_cache == "nvfp4" else None)
        model = M3ForTraining(Checkpoint(folder), profile, LoRASettings(32, 32, LORA_ROLES), pack_on=torch.device("cpu"))
    kernels: set[str] = set()
    with fake_cuda() as seen:
        on_fake_device(model)
        for lengths, replay, checkpointed, recomputed in STEPS:
            seen.clear()
            model.checkpoint_activations(checkpointed)
            model.recompute_experts(recomputed)
            count = sum(lengths)
            tokens = torch.zeros(count, dtype=torch.int64, device="cuda")
            routes = torch.zeros(count, SIZES["layers"], SIZES["top_k"], dtype=torch.int16, device="cuda") if replay else None
            out = model(tokens, lengths, tokens.roll(-1), torch.ones(count, device="cuda"), routes, entropy=True)
            copies = list(seen.copies)
            assert all(any(f" at {name}:" in copy for name in EXPECTED) for copy in copies), copies
            out.logprobs.sum().backward()
            assert len(seen.copies) == len(copies), f"backward: {seen.copies[len(copies) :]}"
            for name, parameter in model.named_parameters():
                assert (parameter.grad is not None) == parameter.requires_grad, name
                if parameter.grad is not None:
                    assert parameter.grad.device.type == "cuda" and parameter.grad.dtype is torch.float32, name
                    parameter.grad = None
            kernels |= {launch.kernel for launch in seen.launches}
        sent = dict(model.export_adapter())
        assert sent and all(t.device.type == "cuda" and t.dtype is torch.bfloat16 for t in sent.values())
    return {"kernels": sorted(kernels)}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))

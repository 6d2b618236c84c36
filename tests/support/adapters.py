"""Adapter folders of any size of model, with random values that matter."""

from __future__ import annotations

from pathlib import Path

import torch

from samebits.quant.adapter import AdapterSpec, save_peft


def random_adapter(folder: Path, spec: AdapterSpec, profile: str | None, *, seed: int = 1, scale: float = 0.3, version: int = 1) -> Path:
    """Write an adapter as a run leaves it; `profile`: hash of its numerics, None to say nothing of it."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {n: (torch.randn(*s, generator=generator) * scale).to(torch.bfloat16) for n, s in spec.shapes().items()}
    meta = {} if profile is None else {"profile": profile, "adapter_version": str(version)}
    save_peft(folder, tensors, spec, "base", meta)
    return folder

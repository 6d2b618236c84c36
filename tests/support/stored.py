"""Source checkpoints on disk: sharded full-precision ones, and the formats of other tools."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from samebits.quant import mxfp8, nvfp4
from tests.support import random_m3

Tensors = dict[str, torch.Tensor]


def write(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    shards: int = 1,
    config: dict | None = None,
    place: Callable[[str, int], int] | None = None,
) -> Path:
    """An HF checkpoint with index. `place(name, position)` says in which shard a tensor lies; default round robin."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or random_m3.config()))
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors", {"format": "pt"})
        return folder
    parts: list[Tensors] = [{} for _ in range(shards)]
    placed = {}
    for i, (name, tensor) in enumerate(tensors.items()):
        k = (place(name, i) if place else i) % shards
        parts[k][name] = tensor
        placed[name] = f"model-{k + 1:05d}-of-{shards:05d}.safetensors"
    for k, part in enumerate(parts):
        save_file(part, folder / f"model-{k + 1:05d}-of-{shards:05d}.safetensors", {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return folder


def is_expert(name: str) -> bool:
    return ".experts." in name


def is_projection(name: str) -> bool:
    return name.endswith("_proj.weight")


def amax(w: torch.Tensor) -> torch.Tensor:
    return w.float().abs().amax()


def pair_scale(tensors: Tensors, name: str) -> torch.Tensor:
    """amax / 2688 of an expert's matrix, of gate and up together."""
    both = [name] if ".w2." in name else [name.replace(".w3.", ".w1."), name.replace(".w1.", ".w3.")]
    return torch.stack([amax(tensors[n]) for n in both]).amax() / 2688


def modelopt(tensors: Tensors, scale: Callable[[Tensors, str], torch.Tensor] = pair_scale, input_scale: bool = True) -> Tensors:
    """NVFP4 experts and MXFP8 projections as ModelOpt's mixed precision stores them."""
    out: Tensors = {}
    for name, w in tensors.items():
        module = name.removesuffix(".weight")
        if is_expert(name):
            t = nvfp4.quantize(w, scale(tensors, name))
            out |= {name: t.codes, f"{module}.weight_scale": t.block_scales.view(torch.float8_e4m3fn)}
            out[f"{module}.weight_scale_2"] = t.global_scale.reshape(())
            if input_scale:
                out[f"{module}.input_scale"] = torch.tensor(0.01 + len(out) / 1000)
        elif is_projection(name):
            m = mxfp8.quantize(w)
            out |= {name: m.codes.view(torch.float8_e4m3fn), f"{module}.weight_scale": m.exponents}
        else:
            out[name] = w
    return out


def minimax(tensors: Tensors) -> Tensors:
    """As `modelopt`, but projections with MiniMax's own name for the exponents and experts left in 16 bits."""
    out = {n: t for n, t in modelopt(tensors).items() if ".experts." not in n} | {n: t for n, t in tensors.items() if is_expert(n)}
    return {n.replace(".weight_scale", ".weight_scale_inv"): t for n, t in out.items()}


def compressed_tensors(tensors: Tensors, dividing: Callable[[Tensors, str], torch.Tensor]) -> Tensors:
    """Experts as nvfp4-pack-quantized with the global scale `dividing` (2688 / amax, or what a test wants), MXFP8 projections."""
    out: Tensors = {}
    for name, t in modelopt(tensors, scale=lambda ts, n: 1 / dividing(ts, n), input_scale=False).items():
        if not is_expert(name):
            out[name] = t
        elif name.endswith(".weight"):
            out[name + "_packed"] = t
        elif name.endswith(".weight_scale_2"):
            weight = name.removesuffix("_scale_2")
            out[weight + "_global_scale"] = dividing(tensors, weight).reshape(1)
        else:
            out[name] = t
    return out
